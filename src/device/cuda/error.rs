//! What can be wrong with a GPU.

/// Why a GPU cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The machine has no NVIDIA driver, or this process does not see it.
    #[error("there is no NVIDIA driver (libcuda) here")]
    NoDriver,
    /// The driver is older than a function that is needed.
    #[error("the NVIDIA driver has no {0}: it is too old")]
    MissingFunction(&'static str),
    /// There is a driver, but no GPU that this process may use.
    #[error("the NVIDIA driver shows no GPU")]
    NoGpu,
    /// The worker's GPU is none of those that this process may use.
    #[error("this daemon does not see the GPU {}", Uuid(.0))]
    UnknownGpu([u8; 16]),
    /// The GPU has too little memory left for a second process.
    #[error("the GPU has {free} bytes left, {need} are needed")]
    VramShort {
        /// Bytes that are free.
        free: u64,
        /// Bytes that have to be.
        need: u64,
    },
    /// The arena is being pinned; ask again soon.
    #[error("the arena is still being prepared for the GPU")]
    Warming,
    /// The exported memory is smaller than the worker said.
    #[error("{bytes} bytes at {offset} are not in the {size} bytes that were exported")]
    Short {
        /// Where the ring should start.
        offset: u64,
        /// How long it should be.
        bytes: u64,
        /// What there is.
        size: u64,
    },
    /// The driver said no.
    #[error("{call}: {name} ({code})")]
    Call {
        /// The function.
        call: &'static str,
        /// The driver's number.
        code: u32,
        /// The driver's name of it.
        name: String,
    },
    /// The system gave no thread.
    #[error("no thread for the GPU: {0}")]
    Thread(String),
}

struct Uuid<'a>(&'a [u8; 16]);

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

// === impl CudaError ===

impl CudaError {
    /// Whether it may be otherwise in a while.
    #[must_use]
    pub fn passes(&self) -> bool {
        match self {
            Self::Warming | Self::VramShort { .. } | Self::Thread(_) => true,
            Self::Call { code, .. } => *code == OUT_OF_MEMORY,
            _ => false,
        }
    }
}

// === impl Uuid ===

impl std::fmt::Display for Uuid<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU-{}", uuid::Uuid::from_bytes(*self.0))
    }
}
