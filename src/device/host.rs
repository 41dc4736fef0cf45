//! The device without a GPU: rings and windows are memfds, copies are made by some threads.
//!
//! # State
//! A ring is open or closed; its gate holds that and how many threads are inside a copy of it. Queued
//! copies own what they need, so a ring or a device may go at any time.
//!
//! # Order
//! A copy is cut into slices of [`SLICE`], which the threads take from the queue in order; whoever
//! ends the last slice of a copy calls its completion. So one large copy has all threads, and small
//! ones go side by side.
//!
//! # Cancellation
//! Closing (the drop of a ring) marks the gate, waits for slices that are being copied, and returns:
//! whatever is still queued then finds the gate closed before it writes a byte, and ends with
//! [`DeviceError::Closed`]. No lock is held while bytes move.

use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use parking_lot::{Condvar, Mutex};

use super::{
    Device, DeviceError, DeviceKind, Done, Ring, RingExport, selftest,
    shm::{OutOfBounds, SharedMap},
};

/// Bytes between two looks at the gate: about 100 µs, the longest that a drop waits.
const SLICE: u64 = 1 << 20;

/// Copies that may wait, by default: beyond what all workers of a host have in flight.
pub const DEFAULT_QUEUE: usize = 4096;

/// Copies between memfds. Its threads end when the device and all its rings are gone.
#[derive(Debug)]
pub struct HostDevice {
    pool: Arc<Pool>,
}

#[derive(Debug)]
struct HostRing {
    shared: Arc<Shared>,
    pool: Arc<Pool>,
}

#[derive(Debug)]
struct Shared {
    map: SharedMap,
    /// Set under `copying`.
    closed: AtomicBool,
    /// Threads inside a copy.
    copying: Mutex<usize>,
    idle: Condvar,
}

/// The threads, from outside.
#[derive(Debug)]
struct Pool {
    queue: Arc<Queue>,
    /// Copies that may wait.
    most: usize,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    /// Copies of which some slice was not taken.
    waiting: VecDeque<Waiting>,
    /// Nobody can ask for more.
    over: bool,
}

#[derive(Debug)]
struct Waiting {
    job: Arc<Job>,
    /// Bytes of it whose slices were taken.
    taken: u64,
}

#[derive(Clone, Copy, Debug)]
enum Direction {
    Out,
    In,
}

struct Job {
    ring: Arc<Shared>,
    arena: Arc<SharedMap>,
    direction: Direction,
    ring_off: u64,
    arena_off: u64,
    len: u64,
    /// Bytes whose slices did not end.
    left: AtomicU64,
    end: Mutex<End>,
}

struct End {
    done: Option<Done>,
    result: Result<(), DeviceError>,
}

// === impl HostDevice ===

impl HostDevice {
    /// One thread; at most `queue` copies wait for it.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(queue: usize) -> io::Result<Self> {
        Self::with_threads(queue, 1)
    }

    /// So many threads, at least one, that share each large copy.
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn with_threads(queue: usize, threads: usize) -> io::Result<Self> {
        let pool = Arc::new(Pool {
            queue: Arc::default(),
            most: queue,
        });
        for _ in 0..threads.max(1) {
            let queue = Arc::clone(&pool.queue);
            thread::Builder::new()
                .name("engram-copy".to_owned())
                .spawn(move || queue.run())?;
        }
        Ok(Self { pool })
    }
}

impl Device for HostDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn open_ring(&self, export: RingExport) -> Result<Arc<dyn Ring>, DeviceError> {
        let RingExport::Host { fd, bytes } = export else {
            return Err(DeviceError::Unsupported);
        };
        let shared = Shared {
            map: SharedMap::open(fd, bytes)?,
            closed: AtomicBool::new(false),
            copying: Mutex::new(0),
            idle: Condvar::new(),
        };
        Ok(Arc::new(HostRing {
            shared: Arc::new(shared),
            pool: Arc::clone(&self.pool),
        }))
    }
}

// === impl HostRing ===

impl HostRing {
    fn submit(
        &self,
        direction: Direction,
        ring_off: u64,
        arena: &Arc<SharedMap>,
        arena_off: u64,
        len: u64,
        done: Done,
    ) {
        let places = [(ring_off, self.shared.map.len()), (arena_off, arena.len())];
        if let Err(error) = OutOfBounds::check_all(places, len) {
            return done(Err(error.into()));
        }
        let end = End {
            done: Some(done),
            result: Ok(()),
        };
        let job = Arc::new(Job {
            ring: Arc::clone(&self.shared),
            arena: Arc::clone(arena),
            direction,
            ring_off,
            arena_off,
            len,
            left: AtomicU64::new(len),
            end: Mutex::new(end),
        });
        if !self.pool.push(&job) {
            job.finish(Err(DeviceError::Busy));
        }
    }
}

impl Ring for HostRing {
    fn len(&self) -> u64 {
        self.shared.map.len()
    }

    fn copy_out(
        &self,
        ring_off: u64,
        arena: &Arc<SharedMap>,
        arena_off: u64,
        len: u64,
        done: Done,
    ) {
        self.submit(Direction::Out, ring_off, arena, arena_off, len, done);
    }

    fn copy_in(&self, arena: &Arc<SharedMap>, arena_off: u64, ring_off: u64, len: u64, done: Done) {
        self.submit(Direction::In, ring_off, arena, arena_off, len, done);
    }

    fn self_test(&self) -> Result<(), DeviceError> {
        selftest::run(self)
    }
}

impl Drop for HostRing {
    fn drop(&mut self) {
        let mut copying = self.shared.copying.lock();
        self.shared.closed.store(true, Ordering::Relaxed);
        while *copying > 0 {
            self.shared.idle.wait(&mut copying);
        }
    }
}

// === impl Shared ===

impl Shared {
    /// Runs `copy` unless the ring is closed; a close meanwhile waits for its end.
    fn enter(&self, copy: impl FnOnce() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        {
            let mut copying = self.copying.lock();
            if self.closed.load(Ordering::Relaxed) {
                return Err(DeviceError::Closed);
            }
            *copying += 1;
        }
        let result = copy();
        *self.copying.lock() -= 1;
        self.idle.notify_all();
        result
    }
}

// === impl Pool ===

impl Pool {
    /// `false`: too many wait.
    fn push(&self, job: &Arc<Job>) -> bool {
        let mut jobs = self.queue.jobs.lock();
        if jobs.waiting.len() >= self.most {
            return false;
        }
        let job = Arc::clone(job);
        let alone = job.len <= SLICE;
        jobs.waiting.push_back(Waiting { job, taken: 0 });
        drop(jobs);
        if alone {
            self.queue.more.notify_one();
        } else {
            self.queue.more.notify_all();
        }
        true
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.queue.jobs.lock().over = true;
        self.queue.more.notify_all();
    }
}

// === impl Queue ===

impl Queue {
    /// One thread.
    fn run(&self) {
        while let Some((job, at, len)) = self.next() {
            // What a completion does is not this thread's business: the next copy goes on.
            if catch_unwind(AssertUnwindSafe(|| job.copy(at, len))).is_err() {
                tracing::error!("A completion of a copy panicked");
            }
        }
    }

    /// The next slice: of which copy, from where on, how much. `None`: there will be none.
    fn next(&self) -> Option<(Arc<Job>, u64, u64)> {
        let mut jobs = self.jobs.lock();
        loop {
            if let Some(Waiting { job, taken }) = jobs.waiting.front_mut() {
                let (job, at) = (Arc::clone(job), *taken);
                let len = (job.len - at).min(SLICE);
                *taken += len;
                if at + len == job.len {
                    jobs.waiting.pop_front();
                }
                return Some((job, at, len));
            }
            if jobs.over {
                return None;
            }
            self.more.wait(&mut jobs);
        }
    }
}

// === impl Job ===

impl Job {
    /// Copies one slice, and ends the copy if it was the last.
    fn copy(&self, at: u64, len: u64) {
        let (ring_off, arena_off) = (self.ring_off + at, self.arena_off + at);
        let copied = self.ring.enter(|| {
            match self.direction {
                Direction::Out => self.ring.map.copy(ring_off, &self.arena, arena_off, len)?,
                Direction::In => self.arena.copy(arena_off, &self.ring.map, ring_off, len)?,
            }
            Ok(())
        });
        if let Err(error) = copied {
            let mut end = self.end.lock();
            if end.result.is_ok() {
                end.result = Err(error);
            }
        }
        // Who ends last has seen all other slices end.
        if self.left.fetch_sub(len, Ordering::AcqRel) == len {
            self.finish(Ok(()));
        }
    }

    /// Says how it ended, once.
    fn finish(&self, result: Result<(), DeviceError>) {
        let mut end = self.end.lock();
        let so_far = std::mem::replace(&mut end.result, Ok(()));
        let done = end.done.take();
        drop(end);
        if let Some(done) = done {
            done(so_far.and(result));
        }
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("direction", &self.direction)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
