//! Bytes at the start of an arena and of each of its blocks, by which a later process finds again
//! what lies in it. All numbers are little-endian.
//!
//! Block header, 256 bytes of a 4 KiB page (the rest is not written):
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | magic `EngramSg`; zeroed when the block is freed |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | state: 1 open (being filled), 2 sealed |
//! | 16 | 16 | id of the arena: a header copied from another arena is none |
//! | 32 | 8 | offset of this header in the arena, likewise |
//! | 40 | 8 | length of the block with this page |
//! | 48 | 8 | length of the payload, which starts 4 KiB after the header |
//! | 56 | 8 | generation |
//! | 64 | 96 | object id, fingerprint, namespace |
//! | 160 | 32 | kind (0 state, 1 KV), shard, shards, piece, pieces, 3 unused |
//! | 192 | 16 | range of the piece, range of the object |
//! | 208 | 44 | zero |
//! | 252 | 4 | CRC-32C of the 252 bytes before |

use crc_fast::{CrcAlgorithm, checksum};

use crate::types::{Fingerprint, Generation, NamespaceId, ObjectId, ObjectKind, TokenRange};

use crate::store::object::ObjectMeta;

/// Unit of the arena: blocks start and end at its multiples.
pub const PAGE: u64 = 4096;

pub(super) const HEADER_BYTES: usize = 256;

const BLOCK_MAGIC: &[u8; 8] = b"EngramSg";
const ARENA_MAGIC: &[u8; 8] = b"EngramAr";
const VERSION: u32 = 1;
const STATE_OPEN: u32 = 1;
const STATE_SEALED: u32 = 2;

/// What a sealed block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The object.
    pub object: ObjectId,
    /// Its model.
    pub fingerprint: Fingerprint,
    /// Who may share it.
    pub namespace: NamespaceId,
    /// The save that it comes from.
    pub generation: Generation,
    /// State or KV.
    pub kind: ObjectKind,
    /// Which shard, `0..shards`.
    pub shard: u32,
    /// Shards of the object.
    pub shards: u32,
    /// Which piece, `0..pieces`.
    pub piece: u32,
    /// Pieces of each shard.
    pub pieces: u32,
    /// Tokens of the piece.
    pub range: TokenRange,
    /// Tokens of the object.
    pub object_range: TokenRange,
}

/// A block header as found in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockHeader {
    pub(super) offset: u64,
    pub(super) block_len: u64,
    pub(super) payload_len: u64,
    /// `None`: open.
    pub(super) sealed: Option<SegmentHeader>,
}

// === impl SegmentHeader ===

impl SegmentHeader {
    /// The header of one piece of one shard; `None` if there is no such piece.
    #[must_use]
    pub fn of(meta: &ObjectMeta, shard: u32, piece: usize) -> Option<Self> {
        let range = meta.pieces.get(piece)?.range;
        Some(Self {
            object: meta.id,
            fingerprint: meta.fingerprint,
            namespace: meta.namespace,
            generation: meta.generation,
            kind: meta.kind,
            shard,
            shards: meta.shards,
            piece: u32::try_from(piece).ok()?,
            pieces: u32::try_from(meta.pieces.len()).ok()?,
            range,
            object_range: meta.range,
        })
    }
}

// === impl BlockHeader ===

impl BlockHeader {
    pub(super) fn encode(&self, arena: [u8; 16]) -> [u8; HEADER_BYTES] {
        let mut out = Out::new();
        out.put(BLOCK_MAGIC);
        out.u32(VERSION);
        out.u32(if self.sealed.is_some() {
            STATE_SEALED
        } else {
            STATE_OPEN
        });
        out.put(&arena);
        out.u64(self.offset);
        out.u64(self.block_len);
        out.u64(self.payload_len);
        if let Some(sealed) = &self.sealed {
            let SegmentHeader {
                object,
                fingerprint,
                namespace,
                generation,
                kind,
                shard,
                shards,
                piece,
                pieces,
                range,
                object_range,
            } = sealed;
            out.u64(generation.0);
            out.put(&object.0);
            out.put(&fingerprint.0);
            out.put(&namespace.0);
            out.u32(match kind {
                ObjectKind::State => 0,
                ObjectKind::Kv => 1,
            });
            for number in [*shard, *shards, *piece, *pieces, 0, 0, 0] {
                out.u32(number);
            }
            for number in [range.start, range.end, object_range.start, object_range.end] {
                out.u32(number);
            }
        }
        out.finish()
    }

    /// Reads the header found at `offset` of this arena; `None` if there is none, or a torn one.
    pub(super) fn decode(
        bytes: &[u8; HEADER_BYTES],
        arena: [u8; 16],
        offset: u64,
        arena_len: u64,
    ) -> Option<Self> {
        let mut fields = In::new(bytes, BLOCK_MAGIC)?;
        let state = fields.u32()?;
        let of_arena: [u8; 16] = fields.take()?;
        let of_offset = fields.u64()?;
        let block_len = fields.u64()?;
        let payload_len = fields.u64()?;
        let end = offset.checked_add(block_len)?;
        let room = block_len.checked_sub(PAGE)?;
        if of_arena != arena
            || of_offset != offset
            || !block_len.is_multiple_of(PAGE)
            || end > arena_len
            || payload_len > room
        {
            return None;
        }
        let sealed = match state {
            STATE_OPEN => None,
            STATE_SEALED => Some(fields.segment()?),
            _ => return None,
        };
        Some(Self {
            offset,
            block_len,
            payload_len,
            sealed,
        })
    }
}

/// The first page of an arena.
pub(super) fn encode_arena(arena: [u8; 16], len: u64) -> [u8; HEADER_BYTES] {
    let mut out = Out::new();
    out.put(ARENA_MAGIC);
    out.u32(VERSION);
    out.u32(0);
    out.put(&arena);
    out.u64(len);
    out.finish()
}

/// The id of an arena of this length, if the bytes are the first page of one.
pub(super) fn decode_arena(bytes: &[u8; HEADER_BYTES], len: u64) -> Option<[u8; 16]> {
    let mut fields = In::new(bytes, ARENA_MAGIC)?;
    fields.u32()?;
    let arena = fields.take()?;
    (fields.u64()? == len).then_some(arena)
}

/// Writes fields one after the other, and the checksum at the end.
struct Out {
    bytes: [u8; HEADER_BYTES],
    at: usize,
}

impl Out {
    fn new() -> Self {
        Self {
            bytes: [0; HEADER_BYTES],
            at: 0,
        }
    }

    fn put(&mut self, field: &[u8]) {
        let room = self.bytes.iter_mut().skip(self.at);
        for (to, from) in room.zip(field) {
            *to = *from;
        }
        self.at += field.len();
    }

    fn u32(&mut self, number: u32) {
        self.put(&number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.put(&number.to_le_bytes());
    }

    fn finish(mut self) -> [u8; HEADER_BYTES] {
        if let Some((body, crc)) = self.bytes.split_last_chunk_mut::<4>() {
            *crc = crc32c(body).to_le_bytes();
        }
        self.bytes
    }
}

/// Reads fields one after the other from bytes whose magic, version and checksum are right.
struct In<'a> {
    rest: &'a [u8],
}

impl<'a> In<'a> {
    fn new(bytes: &'a [u8; HEADER_BYTES], magic: &[u8; 8]) -> Option<Self> {
        let (body, crc) = bytes.split_last_chunk::<4>()?;
        let rest = body.strip_prefix(magic)?;
        if crc32c(body) != u32::from_le_bytes(*crc) {
            return None;
        }
        let mut fields = Self { rest };
        (fields.u32()? == VERSION).then_some(fields)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*field)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn range(&mut self) -> Option<TokenRange> {
        TokenRange::new(self.u32()?, self.u32()?).ok()
    }

    fn segment(&mut self) -> Option<SegmentHeader> {
        let generation = Generation(self.u64()?);
        let object = ObjectId(self.take()?);
        let fingerprint = Fingerprint(self.take()?);
        let namespace = NamespaceId(self.take()?);
        let kind = match self.u32()? {
            0 => ObjectKind::State,
            1 => ObjectKind::Kv,
            _ => return None,
        };
        let (shard, shards) = (self.u32()?, self.u32()?);
        let (piece, pieces) = (self.u32()?, self.u32()?);
        self.take::<12>()?;
        Some(SegmentHeader {
            object,
            fingerprint,
            namespace,
            generation,
            kind,
            shard,
            shards,
            piece,
            pieces,
            range: self.range()?,
            object_range: self.range()?,
        })
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    // The algorithm has 32 bits; the upper half is zero.
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> BlockHeader {
        BlockHeader {
            offset: 2 * PAGE,
            block_len: 3 * PAGE,
            payload_len: PAGE + 5,
            sealed: Some(SegmentHeader {
                object: ObjectId([1; 32]),
                fingerprint: Fingerprint([2; 32]),
                namespace: NamespaceId([3; 32]),
                generation: Generation(u64::MAX - 1),
                kind: ObjectKind::Kv,
                shard: 3,
                shards: 4,
                piece: 5,
                pieces: 6,
                range: TokenRange { start: 7, end: 8 },
                object_range: TokenRange { start: 6, end: 9 },
            }),
        }
    }

    #[test]
    fn round_trip() {
        let arena = [9; 16];
        for sealed in [header().sealed, None] {
            let header = BlockHeader { sealed, ..header() };
            let bytes = header.encode(arena);
            let read = |arena, offset, len| BlockHeader::decode(&bytes, arena, offset, len);
            assert_eq!(read(arena, 2 * PAGE, 5 * PAGE), Some(header));
            assert_eq!(read([8; 16], 2 * PAGE, 5 * PAGE), None, "another arena");
            assert_eq!(read(arena, 3 * PAGE, 9 * PAGE), None, "another place");
            assert_eq!(read(arena, 2 * PAGE, 4 * PAGE), None, "beyond the end");
        }
        let first = encode_arena(arena, 100 * PAGE);
        assert_eq!(decode_arena(&first, 100 * PAGE), Some(arena));
        assert_eq!(decode_arena(&first, 101 * PAGE), None);
    }

    #[test]
    fn a_flipped_bit_anywhere_is_no_header() {
        let bytes = header().encode([9; 16]);
        let first = encode_arena([9; 16], 5 * PAGE);
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(BlockHeader::decode(&bad, [9; 16], 2 * PAGE, 5 * PAGE), None);
            let mut bad = first;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_arena(&bad, 5 * PAGE), None);
        }
    }
}
