//! The device without a GPU: rings are memfds, copies are made by one thread.
//!
//! # State
//! A ring is open or closed; its gate holds that and whether the copy thread is inside a copy of it.
//! Queued copies own what they need, so a ring or a device may go at any time.
//!
//! # Cancellation
//! Closing (the drop of a ring) marks the gate, waits for a running copy, which looks at the gate
//! after each [`SLICE`], and returns: whatever is still queued then finds the gate closed before it
//! writes a byte, and ends with [`DeviceError::Closed`]. No lock is held while bytes move.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use parking_lot::{Condvar, Mutex};

use super::{
    Device, DeviceError, DeviceKind, Done, Ring, RingExport, selftest,
    shm::{OutOfBounds, SharedMap},
};

/// Bytes between two looks at the gate: about 100 µs, the longest that a drop waits.
const SLICE: u64 = 1 << 20;

/// Copies that may wait, by default: beyond what all workers of a host have in flight.
pub const DEFAULT_QUEUE: usize = 4096;

/// Copies between memfds, one after another, on a thread of its own. The thread ends when the device
/// and all its rings are gone.
#[derive(Debug)]
pub struct HostDevice {
    queue: Sender<Job>,
}

#[derive(Debug)]
struct HostRing {
    shared: Arc<Shared>,
    queue: Sender<Job>,
}

#[derive(Debug)]
struct Shared {
    map: SharedMap,
    /// Set under `copying`, looked at without it between slices.
    closed: AtomicBool,
    copying: Mutex<bool>,
    idle: Condvar,
}

#[derive(Clone, Copy)]
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
    done: Done,
}

// === impl HostDevice ===

impl HostDevice {
    /// Starts the copy thread; at most `queue` copies wait for it.
    pub fn new(queue: usize) -> io::Result<Self> {
        let (sender, jobs) = bounded(queue);
        thread::Builder::new()
            .name("engram-copy".to_owned())
            .spawn(move || run(&jobs))?;
        Ok(Self { queue: sender })
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
            copying: Mutex::new(false),
            idle: Condvar::new(),
        };
        Ok(Arc::new(HostRing {
            shared: Arc::new(shared),
            queue: self.queue.clone(),
        }))
    }
}

// === impl HostRing ===

impl HostRing {
    fn submit(&self, job: Job) {
        let refused = match job.check() {
            Err(error) => Some((job, error.into())),
            Ok(()) => match self.queue.try_send(job) {
                Ok(()) => None,
                Err(TrySendError::Full(job)) => Some((job, DeviceError::Busy)),
                Err(TrySendError::Disconnected(job)) => Some((job, DeviceError::Stopped)),
            },
        };
        if let Some((job, error)) = refused {
            (job.done)(Err(error));
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
        let (ring, arena) = (Arc::clone(&self.shared), Arc::clone(arena));
        self.submit(Job {
            ring,
            arena,
            direction: Direction::Out,
            ring_off,
            arena_off,
            len,
            done,
        });
    }

    fn copy_in(&self, arena: &Arc<SharedMap>, arena_off: u64, ring_off: u64, len: u64, done: Done) {
        let (ring, arena) = (Arc::clone(&self.shared), Arc::clone(arena));
        self.submit(Job {
            ring,
            arena,
            direction: Direction::In,
            ring_off,
            arena_off,
            len,
            done,
        });
    }

    fn self_test(&self) -> Result<(), DeviceError> {
        selftest::run(self)
    }
}

impl Drop for HostRing {
    fn drop(&mut self) {
        let mut copying = self.shared.copying.lock();
        self.shared.closed.store(true, Ordering::Relaxed);
        while *copying {
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
            *copying = true;
        }
        let result = copy();
        *self.copying.lock() = false;
        self.idle.notify_all();
        result
    }
}

// === impl Job ===

impl Job {
    fn check(&self) -> Result<(), OutOfBounds> {
        let ends = [
            (self.ring_off, self.ring.map.len()),
            (self.arena_off, self.arena.len()),
        ];
        for (offset, size) in ends {
            if offset.checked_add(self.len).is_none_or(|end| end > size) {
                return Err(OutOfBounds {
                    offset,
                    len: self.len,
                    align: 1,
                    size,
                });
            }
        }
        Ok(())
    }

    fn run(self) {
        let Self {
            ring,
            arena,
            direction,
            ring_off,
            arena_off,
            len,
            done,
        } = self;
        let result = ring.enter(|| {
            let mut at = 0;
            while at < len {
                if ring.closed.load(Ordering::Relaxed) {
                    return Err(DeviceError::Closed);
                }
                let n = (len - at).min(SLICE);
                match direction {
                    Direction::Out => ring.map.copy(ring_off + at, &arena, arena_off + at, n)?,
                    Direction::In => arena.copy(arena_off + at, &ring.map, ring_off + at, n)?,
                }
                at += n;
            }
            Ok(())
        });
        drop((ring, arena));
        done(result);
    }
}

fn run(jobs: &Receiver<Job>) {
    for job in jobs {
        // What a completion does is not this thread's business: the next copy goes on.
        if catch_unwind(AssertUnwindSafe(|| job.run())).is_err() {
            tracing::error!("A completion of a copy panicked");
        }
    }
}

#[cfg(test)]
mod tests;
