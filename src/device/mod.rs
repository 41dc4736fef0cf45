//! Memory, descriptors and copies: the only part of the crate with `unsafe`.
//!
//! A [`Device`] opens the staging ring that a worker exports; a [`Ring`] moves bytes between that
//! ring and the daemon's arena. Neither knows what the bytes mean.

pub mod cuda;
pub mod fds;
pub mod host;
pub mod mapfile;
#[cfg(test)]
pub(crate) mod meter;
pub mod shm;
pub mod uring;

mod doorbell;
mod peer;
mod selftest;

use std::{fmt, os::fd::OwnedFd, sync::Arc};

pub use doorbell::{Doorbell, Listener};
pub use peer::{Peer, PeerProcess};
pub use selftest::{SELF_TEST_BYTES, pattern};

use cuda::CudaError;
use shm::{OutOfBounds, SharedMap, ShmError};

/// Which memory a device copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// Memory of this host, shared by a memfd: a ring, or the window of a worker in mode engine.
    Host,
    /// Memory of an NVIDIA GPU.
    Cuda,
}

/// A worker's staging ring, as it came over the wire.
#[derive(Debug)]
#[non_exhaustive]
pub enum RingExport {
    /// A memfd that the worker made and sealed.
    Host {
        /// The memfd.
        fd: OwnedFd,
        /// Size that the worker said, in bytes.
        bytes: u64,
    },
    /// Memory of a GPU that the worker exported by CUDA IPC.
    Cuda {
        /// Which GPU.
        uuid: [u8; 16],
        /// The driver's handle of the exported allocation.
        handle: [u8; 64],
        /// Where in the allocation the ring starts.
        offset: u64,
        /// Size that the worker said, in bytes.
        bytes: u64,
    },
}

/// What a copy calls when it is over, once.
///
/// Usually on the copy thread, so it must be short and must not block. A copy that is refused at
/// once (out of bounds, queue full, thread gone) calls it on the caller's thread, before the call
/// returns: hold no lock that it takes.
pub type Done = Box<dyn FnOnce(Result<(), DeviceError>) + Send>;

/// Something that can reach a worker's memory.
pub trait Device: Send + Sync + fmt::Debug {
    /// Which memory.
    fn kind(&self) -> DeviceKind;

    /// Opens a worker's ring. Hostile exports are refused, never trusted.
    fn open_ring(&self, export: RingExport) -> Result<Arc<dyn Ring>, DeviceError>;
}

/// An opened staging ring.
///
/// Dropping it cancels what is queued and waits for what is being copied: after the drop nothing is
/// written to the ring or, on its behalf, to an arena. Cancelled copies end with
/// [`DeviceError::Closed`].
pub trait Ring: Send + Sync + fmt::Debug {
    /// Size in bytes.
    fn len(&self) -> u64;

    /// A ring always has room.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `ring[ring_off..][..len]` to `arena[arena_off..][..len]`. Returns at once. Copies may be made
    /// at the same time and end in any order: what must come after another is asked for when that
    /// one is over.
    fn copy_out(&self, ring_off: u64, arena: &Arc<SharedMap>, arena_off: u64, len: u64, done: Done);

    /// `arena[arena_off..][..len]` to `ring[ring_off..][..len]`, likewise.
    fn copy_in(&self, arena: &Arc<SharedMap>, arena_off: u64, ring_off: u64, len: u64, done: Done);

    /// Checks the pattern that the worker left in the ring's first [`SELF_TEST_BYTES`] and answers
    /// with its complement. Blocks until the copies are made.
    fn self_test(&self) -> Result<(), DeviceError>;
}

/// Why a device or a ring did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The queue of copies is full; ask again later.
    #[error("the queue of copies is full")]
    Busy,
    /// The ring was closed before this copy was made.
    #[error("the ring was closed")]
    Closed,
    /// The copy thread is gone.
    #[error("the copy thread is gone")]
    Stopped,
    /// An offset or a length that the ring or the arena does not have.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// The exported memory is not what it should be.
    #[error("the exported ring is refused: {0}")]
    Export(#[from] ShmError),
    /// The ring does not hold the pattern of the self-test.
    #[error("the self-test failed at byte {at} of the ring")]
    SelfTest {
        /// First wrong byte.
        at: u64,
    },
    /// The GPU, or its driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// This device cannot open such an export.
    #[error("this device cannot open such a ring")]
    Unsupported,
}

// === impl DeviceKind ===

impl DeviceKind {
    /// The name in the API and in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}
