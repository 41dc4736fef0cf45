//! One area of the channel: where its words lie, and what a broken peer is.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::codec::DecodeError;
use super::layout;
use crate::device::shm::{OutOfBounds, SharedMap};

/// Kind of the record that fills what is left of an area.
pub(super) const PAD: u16 = 0;

/// One area of a channel, seen from either side. Positions are offsets in it: a multiple of
/// 16 below the capacity.
#[derive(Debug)]
pub(super) struct Area {
    map: Arc<SharedMap>,
    offset: u64,
    capacity: u64,
    /// Offset of the tail word in the map.
    tail: u64,
}

/// What follows the seq word in a record's head.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) struct Head {
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) flags: u16,
}

/// The peer wrote what a peer never writes. The session must be closed; nothing else of it can be
/// believed either.
#[derive(Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum Broken {
    /// The reader's tail went back, ahead of what was written, or off the grid.
    #[error("the peer's tail is {tail}; it was {before}, of {written} written")]
    Tail {
        /// The tail found.
        tail: u64,
        /// The tail before.
        before: u64,
        /// Bytes written in all.
        written: u64,
    },
    /// A record that its area cannot hold, or that is larger than any record may be.
    #[error("a record with {len} bytes of body, {left} bytes before the end of its area")]
    Length {
        /// Length in its head.
        len: u32,
        /// Bytes from its head to the end of the area.
        left: u64,
    },
    /// A pad that does not reach exactly to the end of its area, or is as large as the largest record.
    #[error("a pad of {len} bytes, {left} bytes before the end of its area")]
    Pad {
        /// Length in its head.
        len: u32,
        /// Bytes from its head to the end of the area.
        left: u64,
    },
    /// Flags in a record's head.
    #[error("a record with flags {0:#x}")]
    Flags(u16),
    /// A body that is no message.
    #[error(transparent)]
    Message(#[from] DecodeError),
}

// === impl Area ===

impl Area {
    /// The area of `capacity` bytes at `offset`, with its tail word at `tail`. `None` if the map
    /// does not have it, or if it is not what the layout allows.
    pub(super) fn new(map: &Arc<SharedMap>, offset: u64, capacity: u64, tail: u64) -> Option<Self> {
        let aligned = [offset, capacity]
            .iter()
            .all(|n| n.is_multiple_of(layout::AREA_ALIGN));
        let sized = (layout::MIN_CAPACITY..=layout::MAX_CAPACITY).contains(&capacity);
        let inside = offset >= layout::HEADER_BYTES
            && offset
                .checked_add(capacity)
                .is_some_and(|end| end <= map.len());
        let tail_inside = tail.is_multiple_of(8) && tail < layout::HEADER_BYTES;
        (aligned && sized && inside && tail_inside).then(|| Self {
            map: Arc::clone(map),
            offset,
            capacity,
            tail,
        })
    }

    /// Bytes from its start to its end in the map.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.offset, self.offset + self.capacity)
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Size of the largest record, head and padding included.
    pub(super) fn largest(&self) -> u64 {
        self.capacity / layout::RECORD_SHARE
    }

    pub(super) fn seq(&self, position: u64) -> u64 {
        held(self.map.load_u64(self.offset + position, Ordering::Acquire))
    }

    /// Stores a seq word after everything that was written before.
    pub(super) fn publish(&self, position: u64, number: u64) {
        held(
            self.map
                .store_u64(self.offset + position, number, Ordering::Release),
        );
    }

    /// Keeps old bytes from being taken for a record. Comes before the `publish` that uncovers it.
    pub(super) fn clear_seq(&self, position: u64) {
        held(
            self.map
                .store_u64(self.offset + position, 0, Ordering::Relaxed),
        );
    }

    /// What follows the seq word. One load, so that it cannot change between its parts.
    pub(super) fn head(&self, position: u64) -> Head {
        Head::from_word(held(
            self.map
                .load_u64(self.offset + position + 8, Ordering::Relaxed),
        ))
    }

    pub(super) fn set_head(&self, position: u64, head: Head) {
        let at = self.offset + position + 8;
        held(self.map.store_u64(at, head.to_word(), Ordering::Relaxed));
    }

    pub(super) fn read(&self, position: u64, out: &mut [u8]) {
        held(self.map.read(self.offset + position, out));
    }

    pub(super) fn write(&self, position: u64, bytes: &[u8]) {
        held(self.map.write(self.offset + position, bytes));
    }

    pub(super) fn tail(&self) -> u64 {
        held(self.map.load_u64(self.tail, Ordering::Acquire))
    }

    /// Gives room back, after everything that was read from it.
    pub(super) fn set_tail(&self, consumed: u64) {
        held(self.map.store_u64(self.tail, consumed, Ordering::Release));
    }
}

// === impl Head ===

impl Head {
    fn from_word(word: u64) -> Self {
        Self {
            len: word as u32,
            kind: (word >> 32) as u16,
            flags: (word >> 48) as u16,
        }
    }

    fn to_word(self) -> u64 {
        u64::from(self.len) | u64::from(self.kind) << 32 | u64::from(self.flags) << 48
    }
}

/// Size of a record with `len` bytes of body: head, body and padding.
pub(super) fn record_bytes(len: u64) -> u64 {
    (layout::RECORD_HEAD_BYTES + len).next_multiple_of(layout::RECORD_ALIGN)
}

/// Positions and lengths are checked against the area before they are used, and the area against
/// the map when it was made.
fn held<T>(result: Result<T, OutOfBounds>) -> T {
    result.expect("the area lies in the map")
}
