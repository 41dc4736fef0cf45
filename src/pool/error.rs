//! Why a geometry is refused.

use crate::proto::v1::refusal::Reason;

/// A description of pools that cannot be worked with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// The worker has per-slot or per-row memory that it cannot describe.
    #[error("pools that are not known: {}", .0.join(", "))]
    UnknownPool(Vec<String>),
    /// More of something than can be taken.
    #[error("{have} {what}, at most {most} can be taken")]
    TooMany {
        /// What.
        what: &'static str,
        /// How many there are.
        have: u64,
        /// The limit.
        most: u64,
    },
    /// A name that cannot be the name of a tensor in a file.
    #[error("bad name of a state tensor: {0:?}")]
    Name(String),
    /// Two state tensors of one name.
    #[error("two state tensors are called {0:?}")]
    Duplicate(String),
    /// Layers that are not in strictly ascending order.
    #[error("layers of {0} are not in ascending order")]
    LayerOrder(String),
    /// A state tensor that no layer has.
    #[error("no layer has the state tensor {0:?}")]
    NoLayers(String),
    /// An element type that is not known.
    #[error("unknown element type {0}")]
    DType(i32),
    /// A product of sizes that does not fit any number.
    #[error("the size of {0} overflows")]
    Overflow(String),
    /// Not one byte of recurrent state.
    #[error("no recurrent state")]
    NoState,
    /// Not one byte of attention KV.
    #[error("no attention KV")]
    NoKv,
    /// Neither of the known layouts.
    #[error("unknown layout {0}")]
    Layout(i32),
    /// A page size of zero, or rows that are not whole pages.
    #[error("{rows} rows are not whole pages of {page_size}")]
    Pages {
        /// Rows of the pool.
        rows: u64,
        /// Rows of a page.
        page_size: u32,
    },
    /// A pool without a slot or a row.
    #[error("a pool without {0}")]
    Empty(&'static str),
    /// A slot or a row that the pool does not have.
    #[error("{what} {index} is not among 0..{count}")]
    OutOfPool {
        /// Slot or row.
        what: &'static str,
        /// The one asked for.
        index: u64,
        /// How many there are.
        count: u64,
    },
    /// A shard that is not one of its group.
    #[error("rank {rank} is not one of {size}")]
    Shard {
        /// Said rank.
        rank: u32,
        /// Said size of the group.
        size: u32,
    },
}

// === impl GeometryError ===

impl GeometryError {
    /// The reason in a refusal to attach.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::UnknownPool(_) => Reason::UnknownPool,
            _ => Reason::BadGeometry,
        }
    }
}
