//! A worker's staging ring in the memory of a GPU.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::gpu::{Gpu, Live};
use super::lane::{Direction, Job};
use super::memory::Mapping;
use crate::device::shm::{OutOfBounds, SharedMap};
use crate::device::{DeviceError, Done, Ring, selftest};

/// The ring, opened. See the module above for its close.
pub(super) struct CudaRing {
    shared: Arc<Shared>,
    live: Arc<Live>,
    gpu: Arc<Gpu>,
}

/// What queued copies hold of a ring.
pub(super) struct Shared {
    /// `None` once the ring is closed.
    gate: Mutex<Option<Mapping>>,
    /// Where in the exported memory the ring starts.
    pub offset: u64,
    len: u64,
}

// === impl CudaRing ===

impl CudaRing {
    /// A ring of `len` bytes at `offset` of `mapping`, both checked.
    pub(super) fn new(
        mapping: Mapping,
        offset: u64,
        len: u64,
        (gpu, live): (Arc<Gpu>, Arc<Live>),
    ) -> Self {
        let gate = Mutex::new(Some(mapping));
        let shared = Arc::new(Shared { gate, offset, len });
        Self { shared, live, gpu }
    }

    fn submit(
        &self,
        direction: Direction,
        ring_off: u64,
        arena: &Arc<SharedMap>,
        arena_off: u64,
        len: u64,
        done: Done,
    ) {
        let places = [(ring_off, self.shared.len), (arena_off, arena.len())];
        if let Err(error) = OutOfBounds::check_all(places, len) {
            return done(Err(error.into()));
        }
        self.live.lane(direction).submit(Job {
            ring: Arc::clone(&self.shared),
            arena: Arc::clone(arena),
            ring_off,
            arena_off,
            len,
            done,
        });
    }
}

impl Ring for CudaRing {
    fn len(&self) -> u64 {
        self.shared.len
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

impl Drop for CudaRing {
    fn drop(&mut self) {
        // From here on nothing is queued. What is queued already, the GPU comes to by itself, also
        // if this is a copy's own completion.
        let mapping = self.shared.gate.lock().take();
        for direction in [Direction::Out, Direction::In] {
            if let Err(error) = self.live.lane(direction).wait() {
                tracing::warn!(%error, "Closing a ring");
            }
        }
        drop(mapping);
        self.gpu.ring_closed();
    }
}

impl fmt::Debug for CudaRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaRing")
            .field("len", &self.shared.len)
            .finish_non_exhaustive()
    }
}

// === impl Shared ===

impl Shared {
    /// Runs `queue` unless the ring is closed. Queueing a copy is short; the copy itself is made
    /// without the lock.
    pub(super) fn enter(
        &self,
        queue: impl FnOnce(&Mapping) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let gate = self.gate.lock();
        queue(gate.as_ref().ok_or(DeviceError::Closed)?)
    }
}
