//! The arena: one pre-sized piece of shared memory from which every payload in RAM is taken.
//!
//! # What
//! Blocks of whole 4 KiB pages: one page with a header that says what follows, then the payload.
//! The free ranges are known to this process alone, so nothing that a peer writes into the memory
//! can make two blocks overlap.
//!
//! # State
//! A block is *open* while it is being filled and *sealed* once its object is complete. Freeing
//! zeroes the header's magic before the pages can be given out again, so a sealed header in memory
//! always describes the bytes behind it.
//!
//! # Order of writes
//! Payload, then the sealed header. A process that dies in between leaves an open or torn header,
//! which [`Arena::scan`] skips.
//!
//! # Errors
//! Running full is no error: `alloc` says `None`.

mod blocks;
mod header;

use std::{
    fmt, io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use parking_lot::Mutex;
use uuid::Uuid;

use crate::device::shm::{OutOfBounds, SharedMap, ShmError};

use blocks::Blocks;
use header::{BlockHeader, HEADER_BYTES};

pub use header::{PAGE, SegmentHeader};

/// The arena. Clones are the same arena.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

/// A block of the arena; dropping it gives the block back.
pub struct Segment {
    arena: Arc<Inner>,
    header: u64,
    block_len: u64,
    len: u64,
}

/// A sealed block found by [`Arena::scan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where the payload starts.
    pub offset: u64,
    /// Bytes of payload.
    pub len: u64,
    /// What it is.
    pub header: SegmentHeader,
}

/// Memory that cannot be used as an arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The memory itself.
    #[error("arena: {0}")]
    Shm(#[from] ShmError),
    /// The system gave no memory.
    #[error("arena: {0}")]
    Io(#[from] io::Error),
    /// Not the first page of an arena of this length and version.
    #[error("this memory is no arena of {len} bytes of a version known here")]
    NotAnArena {
        /// Its length.
        len: u64,
    },
    /// Too short, or not whole pages.
    #[error("an arena of {len} bytes: at least 3 and only whole pages of 4096")]
    Length {
        /// The length asked for.
        len: u64,
    },
}

struct Inner {
    map: Arc<SharedMap>,
    id: [u8; 16],
    len: u64,
    blocks: Mutex<Blocks>,
}

// === impl Arena ===

impl Arena {
    /// A fresh arena of `bytes` (rounded up to whole pages) in a memfd of this name.
    pub fn new(name: &str, bytes: u64) -> Result<Self, ArenaError> {
        let len = whole_pages(bytes).filter(|len| *len >= 3 * PAGE);
        let len = len.ok_or(ArenaError::Length { len: bytes })?;
        let (map, _) = SharedMap::create(name, len)?;
        let id = Uuid::new_v4().into_bytes();
        map.write(0, &header::encode_arena(id, len))
            .map_err(|_| ArenaError::Length { len })?;
        Ok(Self::with(map, id, len))
    }

    /// The arena that an earlier process made, with its sealed blocks. All else in it is free. A
    /// segment that is dropped is freed as usual.
    pub fn reopen(
        fd: OwnedFd,
        len: u64,
    ) -> Result<(Self, Vec<(SegmentHeader, Segment)>), ArenaError> {
        if len < 3 * PAGE || !len.is_multiple_of(PAGE) {
            return Err(ArenaError::Length { len });
        }
        let map = SharedMap::open(fd, len)?;
        let mut first = [0; HEADER_BYTES];
        let read = map.read(0, &mut first);
        let id = read.ok().and_then(|()| header::decode_arena(&first, len));
        let id = id.ok_or(ArenaError::NotAnArena { len })?;
        let arena = Self::with(map, id, len);
        let mut kept = Vec::new();
        arena.inner.walk(|block| match block.sealed {
            Some(sealed) => {
                let taken = arena
                    .inner
                    .blocks
                    .lock()
                    .take(block.offset, block.block_len);
                if taken {
                    kept.push((
                        sealed,
                        Segment {
                            arena: Arc::clone(&arena.inner),
                            header: block.offset,
                            block_len: block.block_len,
                            len: block.payload_len,
                        },
                    ));
                }
            }
            None => arena.inner.erase(block.offset),
        });
        Ok((arena, kept))
    }

    /// A block for `len` bytes of payload, at 4 KiB alignment, or `None` if no free range is long
    /// enough. The payload has the bytes of whoever had it before; the rounding behind it is zero.
    #[must_use]
    pub fn alloc(&self, len: u64) -> Option<Segment> {
        let block_len = whole_pages(len)?.checked_add(PAGE)?;
        let header = self.inner.blocks.lock().alloc(block_len)?;
        let segment = Segment {
            arena: Arc::clone(&self.inner),
            header,
            block_len,
            len,
        };
        segment.write_header(None);
        let padding = block_len - PAGE - len;
        segment
            .arena
            .map
            .fill(segment.offset() + len, padding, 0)
            .expect("blocks lie inside the arena");
        Some(segment)
    }

    /// Says in the block's header what it holds, for [`Arena::scan`]. Its payload must be complete.
    pub fn seal(&self, segment: &Segment, header: &SegmentHeader) {
        segment.write_header(Some(*header));
    }

    /// The sealed blocks, found from the bytes in memory alone, by ascending offset.
    #[must_use]
    pub fn scan(&self) -> Vec<Found> {
        let mut found = Vec::new();
        self.inner.walk(|block| {
            if let Some(header) = block.sealed {
                found.push(Found {
                    offset: block.offset + PAGE,
                    len: block.payload_len,
                    header,
                });
            }
        });
        found
    }

    /// Bytes of the arena, its own page included.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.inner.len
    }

    /// Never: an arena has pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes that no block has. They may lie in many places.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.inner.blocks.lock().free_bytes()
    }

    /// The longest payload that [`Arena::alloc`] can give now.
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        self.inner.blocks.lock().longest().saturating_sub(PAGE)
    }

    /// Bytes that blocks have, headers included.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.inner.len - PAGE - self.free_bytes()
    }

    /// The memory.
    #[must_use]
    pub fn map(&self) -> &Arc<SharedMap> {
        &self.inner.map
    }

    /// The memfd, to be passed to a worker or kept over a restart.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inner.map.fd()
    }

    fn with(map: SharedMap, id: [u8; 16], len: u64) -> Self {
        Self {
            inner: Arc::new(Inner {
                map: Arc::new(map),
                id,
                len,
                blocks: Mutex::new(Blocks::new(PAGE, len)),
            }),
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("len", &self.len())
            .field("used", &self.used())
            .finish_non_exhaustive()
    }
}

// === impl Segment ===

impl Segment {
    /// Where the payload starts in the arena's memory.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.header + PAGE
    }

    /// Bytes of payload.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no payload.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the arena that the block has.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        self.block_len
    }

    /// The arena's memory.
    #[must_use]
    pub fn map(&self) -> &Arc<SharedMap> {
        &self.arena.map
    }

    /// Copies bytes into the payload.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let start = self.checked(at, bytes.len() as u64);
        self.arena.map.write(start, bytes)
    }

    /// Copies bytes out of the payload.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        let start = self.checked(at, bytes.len() as u64);
        self.arena.map.read(start, bytes)
    }

    /// The whole payload in memory of its own; for tests and tools.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.len).unwrap_or(0)];
        self.read(0, &mut bytes)
            .expect("blocks lie inside the arena");
        bytes
    }

    /// Offset in the arena of payload byte `at`; beyond all bounds if `len` bytes do not fit.
    fn checked(&self, at: u64, len: u64) -> u64 {
        match at.checked_add(len) {
            Some(end) if end <= self.len => self.offset() + at,
            _ => u64::MAX,
        }
    }

    fn write_header(&self, sealed: Option<SegmentHeader>) {
        let header = BlockHeader {
            offset: self.header,
            block_len: self.block_len,
            payload_len: self.len,
            sealed,
        };
        let bytes = header.encode(self.arena.id);
        let written = self.arena.map.write(self.header, &bytes);
        written.expect("blocks lie inside the arena");
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // First the header: once the range is free it is somebody else's.
        self.arena.erase(self.header);
        self.arena.blocks.lock().free(self.header, self.block_len);
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment")
            .field("offset", &self.offset())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

// === impl Inner ===

impl Inner {
    fn erase(&self, header: u64) {
        let erased = self.map.fill(header, 8, 0);
        erased.expect("blocks lie inside the arena");
    }

    /// Calls `f` for each block header in memory.
    fn walk(&self, mut f: impl FnMut(BlockHeader)) {
        let mut at = PAGE;
        let mut bytes = [0; HEADER_BYTES];
        while at < self.len {
            let read = self.map.read(at, &mut bytes);
            read.expect("pages lie inside the arena");
            match BlockHeader::decode(&bytes, self.id, at, self.len) {
                Some(block) => {
                    at += block.block_len;
                    f(block);
                }
                None => at += PAGE,
            }
        }
    }
}

/// `bytes` rounded up to whole pages.
fn whole_pages(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(PAGE)
}

#[cfg(test)]
pub(super) mod tests;
