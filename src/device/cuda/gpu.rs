//! One GPU: cold, warming up, or ready for rings.
//!
//! # State
//! ```text
//! cold -> warming -> ready -> cold
//!            `-> cold (failed)
//! ```
//! A cold GPU costs nothing: no context, none of its memory, no thread. The first ring starts a
//! thread, the keeper, which retains the context, pins the arena and starts the copy lanes; it
//! sleeps while rings are open, and takes everything down a while after the last one closed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::driver::{Context, Driver, Found};
use super::error::CudaError;
use super::lane::{Direction, Lane};
use super::memory::{Mapping, Pinned};
use super::ring::CudaRing;
use crate::device::shm::{SharedMap, TOUCHERS};

/// How long an attach waits for a GPU that warms up: less than a handshake may take.
const PATIENCE: Duration = Duration::from_secs(8);

/// How long a GPU without rings stays warm: a worker may be about to come back.
const LINGER: Duration = Duration::from_secs(5);

/// Free memory that a GPU must have beyond the context: for the driver's own needs while it copies.
const SPARE_VRAM: u64 = 64 << 20;

/// One GPU.
pub(super) struct Gpu {
    driver: Arc<Driver>,
    pub found: Found,
    arena: Arc<SharedMap>,
    slot: Mutex<Slot>,
    changed: Condvar,
}

struct Slot {
    state: State,
    rings: usize,
}

enum State {
    Cold(Option<CudaError>),
    Warming,
    Ready(Arc<Live>),
}

/// A warm GPU.
pub(super) struct Live {
    // In the order of their drop: lanes before the memory that they copy, all before the context.
    out: Lane,
    into: Lane,
    /// `None`: the system did not let it be pinned, and copies are slow.
    _pinned: Option<Pinned>,
    context: Arc<Context>,
    broken: Arc<AtomicBool>,
}

// === impl Gpu ===

impl Gpu {
    pub(super) fn new(driver: &Arc<Driver>, found: Found, arena: &Arc<SharedMap>) -> Arc<Self> {
        let state = State::Cold(None);
        Arc::new(Self {
            driver: Arc::clone(driver),
            found,
            arena: Arc::clone(arena),
            slot: Mutex::new(Slot { state, rings: 0 }),
            changed: Condvar::new(),
        })
    }

    /// Opens a ring, warming the GPU up if need be. Blocks, for [`PATIENCE`] at most.
    pub(super) fn open(
        self: &Arc<Self>,
        handle: [u8; 64],
        offset: u64,
        bytes: u64,
    ) -> Result<CudaRing, CudaError> {
        let live = self.warm()?;
        let opened = Mapping::open(&live.context, handle).and_then(|mapping| {
            let size = mapping.size;
            if offset.checked_add(bytes).is_none_or(|end| end > size) {
                return Err(CudaError::Short {
                    offset,
                    bytes,
                    size,
                });
            }
            Ok(mapping)
        });
        match opened {
            Ok(mapping) => Ok(CudaRing::new(
                mapping,
                offset,
                bytes,
                (Arc::clone(self), live),
            )),
            Err(error) => {
                drop(live);
                self.ring_closed();
                Err(error)
            }
        }
    }

    /// One ring less.
    pub(super) fn ring_closed(&self) {
        let mut slot = self.slot.lock();
        slot.rings = slot.rings.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Counts a ring and gives what it needs.
    fn warm(self: &Arc<Self>) -> Result<Arc<Live>, CudaError> {
        let until = Instant::now() + PATIENCE;
        let mut slot = self.slot.lock();
        let mut started = false;
        loop {
            match &mut slot.state {
                State::Ready(live) if !live.broken.load(Ordering::Relaxed) => {
                    let live = Arc::clone(live);
                    slot.rings += 1;
                    return Ok(live);
                }
                State::Ready(_) => {
                    // Its rings close, then it starts anew.
                    if self.changed.wait_until(&mut slot, until).timed_out() {
                        return Err(CudaError::Warming);
                    }
                }
                State::Cold(Some(error)) if started => return Err(error.clone()),
                State::Cold(_) => {
                    started = true;
                    slot.state = State::Warming;
                    let gpu = Arc::clone(self);
                    let keeper = thread::Builder::new().name("engram-gpu".to_owned());
                    if let Err(error) = keeper.spawn(move || gpu.keep()) {
                        slot.state = State::Cold(None);
                        return Err(CudaError::Thread(error.to_string()));
                    }
                }
                State::Warming => {
                    started = true;
                    if self.changed.wait_until(&mut slot, until).timed_out() {
                        return Err(CudaError::Warming);
                    }
                }
            }
        }
    }

    /// The keeper's thread.
    fn keep(&self) {
        let began = Instant::now();
        let made = Live::new(&self.driver, &self.found, &self.arena);
        let mut slot = self.slot.lock();
        match made {
            Ok(live) => {
                let took = began.elapsed();
                tracing::info!(gpu = self.found.name, ?took, "The GPU is ready for rings");
                slot.state = State::Ready(Arc::new(live));
            }
            Err(error) => {
                tracing::warn!(%error, gpu = self.found.name, "The GPU cannot be used");
                slot.state = State::Cold(Some(error));
                self.changed.notify_all();
                return;
            }
        }
        self.changed.notify_all();
        let mut unused = Instant::now();
        loop {
            let broken =
                matches!(&slot.state, State::Ready(live) if live.broken.load(Ordering::Relaxed));
            if slot.rings > 0 {
                self.changed.wait(&mut slot);
                unused = Instant::now();
            } else if broken || unused.elapsed() >= LINGER {
                break;
            } else {
                self.changed.wait_until(&mut slot, unused + LINGER);
            }
        }
        let live = std::mem::replace(&mut slot.state, State::Warming);
        drop(slot);
        // Unpinning takes a while.
        drop(live);
        self.slot.lock().state = State::Cold(None);
        self.changed.notify_all();
        tracing::info!(gpu = self.found.name, "The GPU is given back");
    }
}

// === impl Live ===

impl Live {
    fn new(driver: &Arc<Driver>, found: &Found, arena: &Arc<SharedMap>) -> Result<Self, CudaError> {
        let context = Context::retain(driver, found.device)?;
        let (free, _) = context.memory()?;
        if free < SPARE_VRAM {
            let need = SPARE_VRAM;
            return Err(CudaError::VramShort { free, need });
        }
        arena.populate(TOUCHERS);
        let pinned = match Pinned::new(&context, arena) {
            Ok(pinned) => Some(pinned),
            Err(error) => {
                let memlock =
                    nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK);
                let memlock = memlock.map_or(0, |(soft, _)| soft);
                tracing::warn!(
                    %error, bytes = arena.len(), memlock,
                    "The RAM tier cannot be pinned, so copies to and from the GPU will be slow; \
                     raise the limit of locked memory (ulimit -l, LimitMEMLOCK=) or make \
                     store.ram smaller"
                );
                None
            }
        };
        let broken = Arc::new(AtomicBool::new(false));
        Ok(Self {
            out: Lane::start(&context, Direction::Out, &broken)?,
            into: Lane::start(&context, Direction::In, &broken)?,
            _pinned: pinned,
            context,
            broken,
        })
    }

    pub(super) fn lane(&self, direction: Direction) -> &Lane {
        match direction {
            Direction::Out => &self.out,
            Direction::In => &self.into,
        }
    }
}
