//! A snapshot as a pair of files that needs nothing else: `NAME.safetensors` and `NAME.json`.
//!
//! # What
//! The safetensors file holds all bytes of one snapshot: token ids, the state and the KV of every
//! shard. The JSON file says what they are, what the snapshot was called, and the checksum of every
//! 1 MiB of the other file. It is written last: without it there is no export. Where the store cuts KV
//! into objects, and which of them snapshots share, is no part of it: KV comes in blocks of 1024
//! tokens, and nothing beyond the snapshot's own tokens is in it.
//!
//! # The safetensors file
//! ```text
//! 8 bytes   n, little-endian; 8 + n is a multiple of 4096
//! n bytes   JSON, padded with spaces
//! data      tensors, in this order; `tokens`, each state and each block start at multiples of 4096
//! ```
//!
//! | tensor | dtype | shape |
//! |---|---|---|
//! | `tokens` | `U32` | `[boundary]` |
//! | `rank.<r>.state.<name>` | the model's | `[layers, …]`, one for each state tensor of the model (`conv.0`, `temporal`), without gaps between them |
//! | `rank.<r>.kv.<a>-<b>` | the model's | `[layers, 2, b - a, heads, head_dim]`, K before V, where all layers are alike |
//! | `rank.<r>.kv.<a>-<b>.<layer>.k`, `.v` | that layer's | `[b - a, heads, head_dim]` each, where they are not; no `.v` where a layer has none |
//! | `_pad.<n>` | `U8` | zeros up to the next multiple of 4096: safetensors allows no holes |
//!
//! `<r>` is `0..shards`, the attention tensor-parallel rank. `<a>-<b>` are tokens `[1024·i, 1024·(i+1))`,
//! the last one shorter. Layers are those that have the thing, ascending, as `geometry` in the JSON
//! numbers them. `__metadata__` has `format` (`engram.snapshot`), `format_version`, `encoding`,
//! `snapshot`, `fingerprint`, `boundary` and `shards`, all strings.
//!
//! # The JSON file
//! A sealed JSON object (see [`Bundle`] for its members): its last member is the BLAKE3 of all before
//! it. `encoding` is `raw`: tensors as they lie in the pools of the model. A version that this program
//! does not know, or another encoding, is refused by name.
//!
//! # Errors
//! One enum, [`BundleError`]. Whoever reads a pair trusts nothing of it: sizes are bounded before
//! anything is allocated, the header must describe exactly the tensors that the JSON implies, every
//! chunk is compared with its checksum before a byte of it is used, and a file that is too short, too
//! long or padded with something else is refused.

mod blocks;
mod describe;
mod incoming;
mod layout;
mod outgoing;

use std::io;

pub use blocks::copy_rows;
pub use describe::{Bundle, Names};
pub use incoming::{Incoming, verify};
pub use layout::{Layout, Part, What};
pub use outgoing::Outgoing;

/// Bytes of the safetensors file that share a checksum.
pub const CHUNK: u64 = 1 << 20;

/// Why a pair of files is not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The description is of another version.
    #[error("the description has format version {found}, this version knows {known}")]
    Version {
        /// Its version.
        found: u64,
        /// The version that this program reads and writes.
        known: u32,
    },
    /// The payload is encoded in a way that is not known.
    #[error("the encoding is {found:?}, this version knows \"raw\"")]
    Encoding {
        /// Its name.
        found: String,
    },
    /// The JSON is none, is damaged, or contradicts itself.
    #[error("the description is not one of a snapshot: {detail}")]
    Description {
        /// What is wrong.
        detail: String,
    },
    /// The header of the safetensors file is not what the description implies.
    #[error("the header of the tensors is wrong: {detail}")]
    Header {
        /// What is wrong.
        detail: String,
    },
    /// Bytes are not those that were exported.
    #[error("chunk {chunk} of {chunks} of the tensors does not have its checksum")]
    Checksum {
        /// Which 1 MiB, counted from 0.
        chunk: u64,
        /// All of them.
        chunks: u64,
    },
    /// The file of tensors is too short.
    #[error("the tensors end after {at} of {bytes} bytes")]
    Short {
        /// Where it ends.
        at: u64,
        /// Where it should.
        bytes: u64,
    },
    /// The file of tensors is too long.
    #[error("there is more behind the {bytes} bytes of the tensors")]
    Long {
        /// Where it should end.
        bytes: u64,
    },
    /// What fills the room between tensors is not zero.
    #[error("the padding before byte {at} of the tensors is not zero")]
    Padding {
        /// Where it ends.
        at: u64,
    },
    /// The bytes could not be read.
    #[error("the tensors could not be read: {0}")]
    Io(#[from] io::Error),
}

#[cfg(test)]
mod tests;
