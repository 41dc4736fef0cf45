//! The engine's device memory: a state pool and a KV pool.
//!
//! # What
//!
//! The *state pool* holds one recurrent state a slot: `conv[i]` `[L_m, slots+1, dim, K-1]` and
//! `temporal` `[L_m, slots+1, H, P, N]`. The *KV pool* holds one row a token and attention layer:
//! `k`, `v` `[rows, kv_heads, head_dim]`, `page_size` rows a page. Slot 0 and page 0 are reserved.
//!
//! Two layouts exist. [`Layout::PerLayer`] is one tensor for each name (state) or layer (KV).
//! [`Layout::PageMajor`] is one raw buffer a pool in which one slot, or one page, is one range.
//!
//! # Packed bytes
//!
//! A packed state is, for each state tensor in order (`conv[0]` .. `temporal`), `[L_m][bytes of one
//! slot]`. Packed KV of tokens `[a, b)` is `[attention layer][K|V][token]` rows. Both are little
//! endian and depend on the tokens alone: not on slots, pages, page size, layout or capacity.

mod free_list;
mod kv;
mod state;

pub use free_list::FreeList;
pub use kv::{Half, KvPool, KvSpec};
pub use state::{StatePool, StateSpec, TensorSpec};

/// How a pool lays out its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Layout {
    /// One tensor for each state tensor, one for K and one for V of each attention layer.
    PerLayer,
    /// One raw buffer a pool: one slot, one page, is one contiguous range.
    PageMajor,
}

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Dtype {
    /// 16-bit brain floating point.
    #[value(name = "bfloat16", alias = "bf16")]
    Bf16,
    /// 32-bit floating point.
    #[value(name = "float32", alias = "fp32")]
    F32,
}

/// What a pool refuses.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PoolError {
    /// A packed buffer has not the size that its content needs.
    #[error("packed buffer is {got} bytes, expected {expected}")]
    PackedLength {
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// A slot is reserved or beyond the pool.
    #[error("slot {0} is reserved or out of range")]
    Slot(u32),
    /// A page is reserved or beyond the pool.
    #[error("page {0} is reserved or out of range")]
    Page(u32),
    /// The pages given do not cover the token range.
    #[error("{pages} pages do not hold tokens [{start}, {end})")]
    TokenRange {
        /// First token.
        start: usize,
        /// One past the last token.
        end: usize,
        /// Pages given, of tokens from 0 on.
        pages: usize,
    },
    /// A pool of this capacity does not fit the address space.
    #[error("the pool is too large")]
    TooLarge,
}

// === impl Layout ===

impl Layout {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::PerLayer => "per-layer",
            Self::PageMajor => "page-major",
        }
    }
}

// === impl Dtype ===

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name as PyTorch prints it, without `torch.`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
        }
    }
}

/// `a * b`, or [`PoolError::TooLarge`].
fn mul(a: usize, b: usize) -> Result<usize, PoolError> {
    a.checked_mul(b)
        .filter(|n| *n <= isize::MAX as usize)
        .ok_or(PoolError::TooLarge)
}
