//! Errors of the store, each with the path or the ids that it is about.

use std::{io, path::PathBuf};

use crate::types::{Fingerprint, ObjectId, SnapshotId, TierKind};

use super::{counters::Reason, fault::Op};

/// What went wrong in a tier, or with a file of the data directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The tier's budget has no room; nothing was written.
    #[error("the {tier} tier has no room: {need} bytes needed, {free} bytes of its budget free")]
    NoSpace {
        /// The tier.
        tier: TierKind,
        /// Bytes asked for.
        need: u64,
        /// Bytes of the budget that are free.
        free: u64,
    },
    /// It is larger than the tier's whole budget; nothing was written.
    #[error("it takes {need} bytes, the {tier} tier may hold {budget} in all")]
    TooLarge {
        /// The tier.
        tier: TierKind,
        /// Bytes asked for.
        need: u64,
        /// All that the tier may hold.
        budget: u64,
    },
    /// The file system would fall below the free space that is to stay; nothing was written.
    #[error(
        "{path}: {need} bytes needed, {available} available, of which {min_free} are to stay free"
    )]
    Floor {
        /// The data directory.
        path: PathBuf,
        /// Bytes asked for.
        need: u64,
        /// Bytes that the file system has.
        available: u64,
        /// Bytes that are to stay free.
        min_free: u64,
    },
    /// The file system, or this user's quota, is full.
    #[error("{path}: no space left: {source}")]
    DiskFull {
        /// The file being written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file system is mounted read-only.
    #[error("{path}: {source}")]
    ReadOnly {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The data directory was removed or moved while it was in use, or something else stands there.
    #[error("{path}: the data directory in use is not there any more")]
    Removed {
        /// Where it was.
        path: PathBuf,
    },
    /// Any other failure of the system.
    #[error("{} {path}: {source}", .op.as_str())]
    Io {
        /// What was tried.
        op: Op,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// An fsync failed earlier: what was written since the one before it may be gone, so nothing
    /// more is written. Reading goes on. Ends with a restart.
    #[error("no more writes to this disk after a failed fsync: {reason}")]
    Poisoned {
        /// The failed fsync.
        reason: String,
    },
    /// A file's bytes are not those that were written. Its object was moved to quarantine.
    #[error("object {object}, shard {shard}: {} ({detail})", .reason.as_str())]
    Corrupt {
        /// The object, all shards of which are gone from the tier.
        object: ObjectId,
        /// The shard that showed it.
        shard: u32,
        /// What kind of damage.
        reason: Reason,
        /// What exactly.
        detail: String,
    },
    /// A file that should be there is not. What is left of its object was moved to quarantine.
    #[error("object {object}, shard {shard}: its file is missing")]
    Lost {
        /// The object, all shards of which are gone from the tier.
        object: ObjectId,
        /// The shard that is missing.
        shard: u32,
    },
    /// The tier does not hold this object.
    #[error("no object {object} here")]
    NotFound {
        /// The object asked for.
        object: ObjectId,
    },
    /// There is no manifest of this snapshot.
    #[error("no snapshot {snapshot} here")]
    NoSnapshot {
        /// The snapshot asked for.
        snapshot: SnapshotId,
    },
    /// Something that is no plain file or folder of ours stands on a path of ours (a link, say). It
    /// was not followed.
    #[error("{path}: not a plain file or folder of this store; not followed")]
    UnsafePath {
        /// The path.
        path: PathBuf,
    },
    /// Objects of this model cannot be written before it is registered.
    #[error("model {fingerprint} is not registered")]
    UnknownModel {
        /// The model.
        fingerprint: Fingerprint,
    },
    /// Another geometry, or another object, is known under the same id.
    #[error("{what} differs from what is stored under the same id")]
    Conflict {
        /// What differs.
        what: String,
    },
    /// An argument that contradicts itself or a limit.
    #[error("invalid {what}")]
    Invalid {
        /// What is wrong with it.
        what: String,
    },
    /// The arena has no free block of this length.
    #[error("the arena has no free block of {need} bytes")]
    ArenaFull {
        /// Length of the block asked for.
        need: u64,
    },
    /// The data directory was not scanned yet; see `Manifests::scan`.
    #[error("the data directory was not scanned yet")]
    NotScanned,
    /// Another process uses the data directory.
    #[error("{path} is in use by {owner}")]
    Locked {
        /// The data directory.
        path: PathBuf,
        /// Who holds it, as that process wrote it down.
        owner: String,
    },
    /// A file of a format that this version does not know.
    #[error("{path} has format version {found}, this version knows {known}")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The version that this program reads and writes.
        known: u32,
    },
    /// A folder with something in it that is not a store; it is left as it is.
    #[error("{path} is not empty and not a data directory (it holds {found:?})")]
    NotAStore {
        /// The folder.
        path: PathBuf,
        /// A name in it.
        found: String,
    },
    /// A JSON file that cannot be read, where a start without it is not safe.
    #[error("{path}: {} ({detail}){hint}", .reason.as_str())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What kind of damage.
        reason: Reason,
        /// What exactly.
        detail: String,
        /// What people can do about it, as a part of a sentence; may be empty.
        hint: &'static str,
    },
    /// The system gave no memory for the arena.
    #[error("no memory for store.ram of {bytes} bytes ({source})")]
    NoMemory {
        /// Length of the arena.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
}

/// What a caller can do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// It is not there: a miss.
    NotFound,
    /// Make room, then try again.
    NoSpace,
    /// Do not try again: the request is wrong.
    Invalid,
    /// The tier does not take this now; others may.
    Unavailable,
    /// Stored bytes are bad or gone: a miss, and the object is gone from the tier.
    Data,
    /// Anything else.
    Internal,
}

// === impl StoreError ===

impl StoreError {
    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } | Self::NoSnapshot { .. } => ErrorKind::NotFound,
            Self::NoSpace { .. }
            | Self::Floor { .. }
            | Self::DiskFull { .. }
            | Self::ArenaFull { .. } => ErrorKind::NoSpace,
            Self::UnknownModel { .. }
            | Self::Conflict { .. }
            | Self::Invalid { .. }
            | Self::TooLarge { .. } => ErrorKind::Invalid,
            Self::Poisoned { .. }
            | Self::ReadOnly { .. }
            | Self::Removed { .. }
            | Self::NotScanned
            | Self::Locked { .. } => ErrorKind::Unavailable,
            Self::Corrupt { .. } | Self::Lost { .. } | Self::Damaged { .. } => ErrorKind::Data,
            Self::Io { .. }
            | Self::UnsafePath { .. }
            | Self::Version { .. }
            | Self::NotAStore { .. }
            | Self::NoMemory { .. } => ErrorKind::Internal,
        }
    }

    /// The error for a failed system call.
    pub(crate) fn io(op: Op, path: PathBuf, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path, source }
            }
            io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly { path, source },
            // A link on the way (ELOOP), or something else where a folder should be.
            io::ErrorKind::NotADirectory => Self::UnsafePath { path },
            _ if source.raw_os_error() == Some(nix::libc::ELOOP) => Self::UnsafePath { path },
            _ => Self::Io { op, path, source },
        }
    }

    /// Whether the file or folder was simply not there.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Shorthand for [`StoreError::Invalid`].
    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid { what: what.into() }
    }
}
