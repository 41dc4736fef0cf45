//! The bytes around the catalog's records.
//!
//! ```text
//! file    "engram\0c", version: u32, epoch: u64, crc: u32, then frames
//! frame   len: u32, crc of (place, len): u32, body, crc of (place, body): u32
//! ```
//!
//! A place is the epoch and the offset of the frame: a frame of another file, or one that stands
//! elsewhere than it was written, is no frame. Checksums are CRC-32C, everything is little endian.

use crc_fast::{CrcAlgorithm, checksum};

pub(super) const MAGIC: [u8; 8] = *b"engram\0c";
/// The version written and read here. Any other is rebuilt.
pub(super) const VERSION: u32 = 1;
pub(crate) const HEADER: usize = 24;
/// Bytes around a body.
pub(super) const FRAME: usize = 12;
/// A manifest of four million tokens stays below it.
const MAX_BODY: usize = 16 << 20;

/// What stands at a place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Framed<'a> {
    /// A whole frame, and where the next one is.
    Body(&'a [u8], usize),
    /// The end.
    End,
    /// A frame that was not written to its end.
    Torn,
    /// Not what was written.
    Bad,
}

/// The file's first bytes.
pub(crate) fn header(epoch: u64) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    let fields = MAGIC
        .into_iter()
        .chain(VERSION.to_le_bytes())
        .chain(epoch.to_le_bytes());
    for (slot, byte) in bytes.iter_mut().zip(fields) {
        *slot = byte;
    }
    if let Some((head, crc)) = bytes.split_last_chunk_mut::<4>() {
        *crc = crc32c(head).to_le_bytes();
    }
    bytes
}

/// Puts a frame around a body, for the place where it is going to stand.
pub(crate) fn frame(epoch: u64, at: u64, body: &[u8], out: &mut Vec<u8>) {
    let len = (body.len() as u32).to_le_bytes();
    let place = place(epoch, at);
    out.extend_from_slice(&len);
    out.extend_from_slice(&(crc32c(&len) ^ place).to_le_bytes());
    out.extend_from_slice(body);
    out.extend_from_slice(&(crc32c(body) ^ place).to_le_bytes());
}

/// What stands at `at`.
pub(crate) fn unframe(epoch: u64, bytes: &[u8], at: usize) -> Framed<'_> {
    let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) else {
        return Framed::End;
    };
    let place = place(epoch, at as u64);
    let Some((head, rest)) = rest.split_first_chunk::<8>() else {
        return Framed::Torn;
    };
    let [a, b, c, d, crc @ ..] = *head;
    let len = [a, b, c, d];
    if crc32c(&len) ^ place != u32::from_le_bytes(crc) {
        return Framed::Bad;
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_BODY {
        return Framed::Bad;
    }
    let Some((body, rest)) = rest.split_at_checked(len) else {
        return Framed::Torn;
    };
    let Some(crc) = rest.first_chunk::<4>() else {
        return Framed::Torn;
    };
    if crc32c(body) ^ place != u32::from_le_bytes(*crc) {
        return Framed::Bad;
    }
    Framed::Body(body, at + FRAME + len)
}

pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn place(epoch: u64, at: u64) -> u32 {
    let mixed = (epoch ^ at.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as u32
}
