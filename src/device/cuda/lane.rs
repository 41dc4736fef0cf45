//! One direction of a GPU's copies: a thread that keeps its stream full and tells when copies end.
//!
//! # Order of writes
//! Copies are cut into slices, and slices are queued in order, so copies of one lane end in order.
//! Some slices are under way at any time: the thread queues more before it sleeps on the oldest.
//!
//! # Cancellation
//! Each slice goes through its ring's gate, which is shut under the same lock. What is behind a shut
//! gate ends with [`DeviceError::Closed`] and is never queued.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError, bounded};

use super::driver::{Context, Event, Stream};
use super::error::CudaError;
use super::ring::Shared;
use crate::device::shm::SharedMap;
use crate::device::{DeviceError, Done};

/// Longest slice: what a close waits for is a few of them, and so a few milliseconds.
const SLICE: u64 = 32 << 20;

/// Slices under way at most: enough that small ones keep the bus busy too.
const DEPTH: usize = 16;

/// Bytes under way at most.
const DEPTH_BYTES: u64 = 128 << 20;

/// How long the last slice under way is looked at before the thread sleeps on it: about what waking
/// a sleeping processor would add to a copy that somebody waits for. All others end while it sleeps.
const WATCH: Duration = Duration::from_micros(800);

/// Copies that may wait.
const QUEUE: usize = 4096;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// Ring to arena.
    Out,
    /// Arena to ring.
    In,
}

/// One copy.
pub(super) struct Job {
    pub ring: Arc<Shared>,
    pub arena: Arc<SharedMap>,
    pub ring_off: u64,
    pub arena_off: u64,
    pub len: u64,
    pub done: Done,
}

/// A direction, from the outside.
pub(super) struct Lane {
    queue: Sender<Job>,
    stream: Arc<Stream>,
}

/// The thread's.
struct Loop {
    direction: Direction,
    stream: Arc<Stream>,
    broken: Arc<AtomicBool>,
    spare: Vec<Event>,
    under_way: VecDeque<Slice>,
    bytes: u64,
    current: Option<(Job, u64)>,
}

struct Slice {
    event: Option<Event>,
    bytes: u64,
    /// The copy that ends with this slice, and how, unless waiting for it says otherwise.
    last: Option<(Job, Result<(), DeviceError>)>,
}

// === impl Lane ===

impl Lane {
    /// Starts the thread. It ends when the lane is gone and its queue empty. `broken` is set when
    /// the GPU fails.
    pub(super) fn start(
        context: &Arc<Context>,
        direction: Direction,
        broken: &Arc<AtomicBool>,
    ) -> Result<Self, CudaError> {
        let stream = Arc::new(Stream::new(context)?);
        let spare = (0..DEPTH).map(|_| Event::new(context));
        let mut work = Loop {
            direction,
            stream: Arc::clone(&stream),
            broken: Arc::clone(broken),
            spare: spare.collect::<Result<_, _>>()?,
            under_way: VecDeque::with_capacity(DEPTH),
            bytes: 0,
            current: None,
        };
        let (queue, jobs) = bounded(QUEUE);
        let name = match direction {
            Direction::Out => "engram-gpu-out",
            Direction::In => "engram-gpu-in",
        };
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work.run(&jobs))
            .map_err(|error| CudaError::Thread(error.to_string()))?;
        Ok(Self { queue, stream })
    }

    /// Queues a copy whose bounds were checked. Returns at once.
    pub(super) fn submit(&self, job: Job) {
        let (job, error) = match self.queue.try_send(job) {
            Ok(()) => return,
            Err(TrySendError::Full(job)) => (job, DeviceError::Busy),
            Err(TrySendError::Disconnected(job)) => (job, DeviceError::Stopped),
        };
        (job.done)(Err(error));
    }

    /// Waits until the GPU is over with what was given to it so far.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.stream.wait()
    }
}

// === impl Loop ===

impl Loop {
    fn run(&mut self, jobs: &Receiver<Job>) {
        while self.fill(jobs) {
            self.reap();
        }
    }

    /// Queues slices as long as there is something to queue and room for it. `false`: nothing is
    /// under way, and nothing will be.
    fn fill(&mut self, jobs: &Receiver<Job>) -> bool {
        while !self.spare.is_empty() && self.bytes < DEPTH_BYTES {
            if self.current.is_none() {
                let next = if self.under_way.is_empty() {
                    jobs.recv().map_err(|_| TryRecvError::Disconnected)
                } else {
                    jobs.try_recv()
                };
                match next {
                    Ok(job) => self.current = Some((job, 0)),
                    Err(_) => break,
                }
            }
            self.queue_slice();
        }
        !self.under_way.is_empty()
    }

    fn queue_slice(&mut self) {
        let Some((job, at)) = self.current.take() else {
            return;
        };
        let bytes = (job.len - at).min(SLICE);
        let Some(event) = self.spare.pop() else {
            self.current = Some((job, at));
            return;
        };
        let queued = job.ring.enter(|mapping| {
            let ring = (mapping, job.ring.offset + job.ring_off + at);
            let arena = (&*job.arena, job.arena_off + at);
            if bytes > 0 {
                match self.direction {
                    Direction::Out => self.stream.copy_out(ring, arena, bytes)?,
                    Direction::In => self.stream.copy_in(arena, ring, bytes)?,
                }
            }
            Ok(event.record(&self.stream)?)
        });
        self.bytes += bytes;
        let (event, last) = match queued {
            Ok(()) if at + bytes < job.len => {
                self.current = Some((job, at + bytes));
                (Some(event), None)
            }
            Ok(()) => (Some(event), Some((job, Ok(())))),
            Err(error) => {
                self.spare.push(event);
                (None, Some((job, Err(error))))
            }
        };
        self.under_way.push_back(Slice { event, bytes, last });
    }

    /// Sleeps until the oldest slice is over.
    fn reap(&mut self) {
        let Some(Slice { event, bytes, last }) = self.under_way.pop_front() else {
            return;
        };
        let last_one = self.under_way.is_empty() && self.current.is_none();
        let waited = event.as_ref().map_or(Ok(()), |event| match last_one {
            true => watch(event),
            false => event.wait(),
        });
        self.spare.extend(event);
        self.bytes -= bytes;
        let failed = match (&waited, &last) {
            (Err(error), _) => Some(error.to_string()),
            (_, Some((_, Err(DeviceError::Cuda(error))))) => Some(error.to_string()),
            _ => None,
        };
        if let Some(error) = failed
            && !self.broken.swap(true, Ordering::Relaxed)
        {
            tracing::error!(error, "The GPU failed; its workers have to attach again");
        }
        let Some((job, result)) = last else {
            return;
        };
        let Job {
            ring, arena, done, ..
        } = job;
        drop((ring, arena));
        let result = result.and(waited.map_err(DeviceError::from));
        // What a completion does is not this thread's business: the next copy goes on.
        if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
            tracing::error!("A completion of a copy panicked");
        }
    }
}

/// Looks at the event for a while, giving the processor to others in between, then sleeps on it.
fn watch(event: &Event) -> Result<(), CudaError> {
    let began = Instant::now();
    while began.elapsed() < WATCH {
        if event.is_over()? {
            return Ok(());
        }
        thread::yield_now();
    }
    event.wait()
}
