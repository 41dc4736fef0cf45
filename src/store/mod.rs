//! The store: objects and snapshots, in RAM and on disk.
//!
//! # What
//! An *object* is a state, or the KV of a run of tokens, of all shards: immutable bytes under an
//! address derived from their prefix. A *snapshot* is a manifest that names a state and the KV of all
//! tokens before it. Objects live in *tiers* behind one trait; snapshots and conversations are small
//! files. There is no policy here: what is kept where, and who has to go, is decided above.
//!
//! # State
//! In RAM all payload lies in one [`Arena`]; an object holds its blocks and gives them back when the
//! last clone is dropped. On disk an object is a file for each shard; a snapshot is there when its
//! manifest is. The start reads the [`catalog`] of all manifests, or, where that is missing or not to
//! be trusted, the manifests themselves ([`Manifests::scan`]); no payload is read.
//!
//! # Order of writes
//! Objects first, each shard as temporary file, fsync, rename, then fsync of the folder, and of those
//! above it in which it is new. The manifest last, in the same way: its rename is **the commit
//! point**. Deleting goes the other way, manifest (and fsync) first. So whatever a crash leaves, every
//! manifest's objects are complete; objects that no manifest names are removed at the next start.
//!
//! # Cancellation
//! All calls block and run to their end. Before the commit point a killed process leaves only what
//! the next start sweeps; after it the snapshot is there.
//!
//! # Errors
//! One enum, [`StoreError`]. Bytes read from disk are verified before anyone sees them: a bad file
//! is moved to `quarantine/` with all shards of its object, with a note, counted by [`Reason`], and the
//! read fails with `Corrupt`. A failed fsync ends all writing until the next start. Names from
//! outside reach the file system only as hashes, and no link is ever followed.

mod ailment;
mod arena;
pub mod bundle;
pub mod catalog;
mod config;
mod counters;
mod disk;
mod error;
mod facade;
pub mod fault;
mod manifest;
mod object;
mod ram;
mod refs;
mod sealed_json;
mod tensor_header;
mod tier;
mod token_log;

#[cfg(any(test, feature = "testing"))]
mod bulk;
#[cfg(any(test, feature = "testing"))]
pub mod conformance;
#[cfg(any(test, feature = "testing"))]
pub mod power;
#[cfg(any(test, feature = "testing"))]
pub mod sample;

pub use ailment::Ailment;
pub use arena::{Arena, ArenaError, Found, PAGE, Segment, SegmentHeader};
pub use config::{Config, DiskConfig, IoEngine};
pub use counters::{Counters, Counts, Reason};
pub use disk::manifests::{Place, Recalled};
pub use disk::quarantine::Quarantined;
pub use disk::stream::ShardStream;
pub use disk::{DiskTier, Registered, conversations::Refs, manifests::Manifests};
pub use disk::{fsck, scrub};
pub use error::{ErrorKind, StoreError};
pub use facade::Store;
pub use manifest::{KvRef, Manifest, ObjectRef};
pub use object::{
    Encoding, MAX_OBJECT_TOKENS, MAX_SHARD_BYTES, MAX_SHARDS, Object, ObjectMeta, Piece, pieces,
};
pub use ram::RamTier;
pub use refs::{
    ConversationKey, ConversationRef, MarkRef, OriginRef, RulesRef, StreamPrint, TurnRef,
};
pub use tier::{Stored, Tier, Usage};
pub use token_log::TokenLog;

#[cfg(test)]
pub(crate) mod parsers;
#[cfg(test)]
mod tests;
