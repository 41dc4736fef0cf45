//! Ids of the engine's device memory.

use std::fmt;

/// One slot of the state pool, `1..=slots`. Slot 0 is reserved and never handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(u32);

/// One page of the KV pool, `1..=pages`. Page 0 is reserved and never handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(u32);

/// An id that counts from 1 in one pool.
pub trait PoolId: Copy + Eq + fmt::Debug {
    /// The id with this number.
    fn from_raw(raw: u32) -> Self;
    /// The number, `1..=capacity` for an id that a free list handed out.
    fn raw(self) -> u32;
    /// The number as an index.
    fn index(self) -> usize {
        self.raw() as usize
    }
}

// === impl SlotId ===

impl PoolId for SlotId {
    fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    fn raw(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl PageId ===

impl PoolId for PageId {
    fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    fn raw(self) -> u32 {
        self.0
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
