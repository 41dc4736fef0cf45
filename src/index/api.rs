//! What goes in and comes out of the index.

use std::io;

use super::TierSet;
use crate::types::{
    Fingerprint, Millis, NamespaceId, ObjectId, ObjectKind, SnapshotId, TokenRange,
};

/// Which tree: prefixes of different keys never meet.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug)]
pub struct TreeKey {
    /// What makes the bytes interchangeable.
    pub fingerprint: Fingerprint,
    /// Who may share them.
    pub namespace: NamespaceId,
}

/// KV of some tokens, as part of a stored object.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct KvRef {
    /// The object.
    pub object: ObjectId,
    /// Tokens that it is used for; not empty; inside `object_range`.
    pub range: TokenRange,
    /// Tokens that the object holds.
    pub object_range: TokenRange,
}

/// A stored object, as its store describes it.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct ObjectEntry {
    /// Its address.
    pub id: ObjectId,
    /// What it holds.
    pub kind: ObjectKind,
    /// KV: the tokens it holds, not empty. State: `[boundary, boundary)`.
    pub range: TokenRange,
    /// Bytes of all shards, in each tier that has it.
    pub bytes: u64,
    /// Tiers that have a whole copy; not empty.
    pub tiers: TierSet,
}

/// What may become of the last copy of a snapshot's objects.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, Default)]
pub enum Retain {
    /// It may vanish instead of being written down: superseded, or never to be saved.
    Transient,
    /// It is written down before it leaves a tier, as long as a lower tier exists.
    #[default]
    Ordinary,
    /// It was asked to be durable: until it is, its last copies stay where they are.
    Promised,
}

/// A snapshot to insert.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Its state.
    pub state: ObjectEntry,
    /// KV of all its tokens: consecutive ranges from token 0 to the boundary.
    pub kv: Vec<KvRef>,
    /// Objects named in `kv` that the index may not know yet.
    pub new_objects: Vec<ObjectEntry>,
    /// When it was made: its first use.
    pub created: Millis,
    /// Whether its manifest is committed.
    pub durable: bool,
    /// What may become of its last copies.
    pub retain: Retain,
}

/// The outcome of an insert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// The snapshot that stands at the boundary now: the new one, or the one that stood there.
    pub snapshot: SnapshotId,
    /// Whether it is the new one.
    pub fresh: bool,
    /// Objects of the call that the index did not take in: nothing will ever name them.
    pub unused: Vec<ObjectId>,
}

/// What is known of a prompt.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct Coverage {
    /// Leading tokens that equal a known prefix.
    pub matched: u32,
    /// KV of `[0, kv)` is stored in some tier.
    pub kv: u32,
    /// The deepest restorable snapshot on the way, and its boundary.
    pub deepest: Option<(SnapshotId, u32)>,
}

/// A snapshot that can be restored, and all that it needs.
#[derive(Clone, Eq, PartialEq, Debug)]
pub struct Hit {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Its boundary, in tokens.
    pub boundary: u32,
    /// Its state.
    pub state: ObjectId,
    /// Its KV: consecutive ranges from token 0 to the boundary.
    pub kv: Vec<KvRef>,
}

/// A reason to keep a snapshot.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum Pin {
    /// It stays in every tier that it is in, until then. The latest such pin counts.
    Until(Millis),
    /// Its last copies stay, until every name is taken away: pins of this kind are counted.
    Named,
}

/// A kind of [`Pin`].
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum PinKind {
    /// [`Pin::Until`].
    Timed,
    /// One [`Pin::Named`].
    Named,
}

/// What is known of a snapshot.
#[derive(Clone, Eq, PartialEq, Debug)]
pub struct SnapshotInfo {
    /// The snapshot.
    pub id: SnapshotId,
    /// Its tree.
    pub key: TreeKey,
    /// Its boundary, in tokens.
    pub boundary: u32,
    /// The nearest snapshot that it extends.
    pub parent: Option<SnapshotId>,
    /// Tiers that hold its state.
    pub state_tiers: TierSet,
    /// Tiers that hold all of its KV.
    pub kv_tiers: TierSet,
    /// Bytes of its state.
    pub state_bytes: u64,
    /// Bytes of the KV objects on its path, shared ones included.
    pub kv_bytes: u64,
    /// When it was made.
    pub created: Millis,
    /// When it was last inserted, restored or touched.
    pub last_use: Millis,
    /// Names that pin it.
    pub names: u32,
    /// End of its timed pin.
    pub pinned_until: Option<Millis>,
    /// Whether its manifest is committed.
    pub durable: bool,
    /// What may become of its last copies.
    pub retain: Retain,
    /// Leases on its state.
    pub leases: u32,
}

/// What is known of an object.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct ObjectInfo {
    /// What it holds.
    pub kind: ObjectKind,
    /// Its tokens; `[boundary, boundary)` for a state.
    pub range: TokenRange,
    /// Its bytes, in each tier that has it.
    pub bytes: u64,
    /// Tiers that have it.
    pub tiers: TierSet,
    /// Leases on it.
    pub leases: u32,
    /// When a snapshot that needs it was last used.
    pub last_use: Millis,
    /// Whether a live snapshot needs it.
    pub needed: bool,
    /// Of a state: its snapshot.
    pub snapshot: Option<SnapshotId>,
}

/// What to do with a victim.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum Action {
    /// A lower tier has a copy: this one can go.
    Drop,
    /// No lower tier has a copy yet: write one, then drop this one.
    Demote,
    /// It may vanish. A state with a snapshot: that goes, manifest first, then
    /// [`forget_state`](super::Index::forget_state). Anything else: no snapshot needs it once the
    /// victims before it are gone; [`forget_object`](super::Index::forget_object).
    Forget,
}

/// An object that can leave a tier.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Victim {
    /// The object.
    pub object: ObjectId,
    /// What it holds.
    pub kind: ObjectKind,
    /// Bytes that its leaving frees in the tier.
    pub bytes: u64,
    /// What to do with it.
    pub action: Action,
    /// Of a state: its snapshot, unless that went already.
    pub snapshot: Option<SnapshotId>,
}

/// What went out of the index: no snapshot needs these objects any more.
#[derive(Clone, Eq, PartialEq, Debug, Default)]
pub struct Removed {
    /// Snapshots that are gone.
    pub snapshots: Vec<SnapshotId>,
    /// Objects that are gone; their bytes can be deleted in every tier.
    pub objects: Vec<ObjectId>,
}

/// What a tier holds, as far as the index knows.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct Usage {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Sizes of the index.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct Stats {
    /// Trees.
    pub trees: u64,
    /// Nodes of all trees, roots included.
    pub nodes: u64,
    /// Live snapshots.
    pub snapshots: u64,
    /// Objects.
    pub objects: u64,
}

/// Why the index refused something. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// A snapshot of no tokens.
    #[error("a snapshot needs at least one token")]
    Empty,
    /// More tokens than positions can count.
    #[error("{tokens} tokens are more than {max}")]
    TooLong {
        /// Tokens given.
        tokens: usize,
        /// Most that can be.
        max: u32,
    },
    /// An entry that contradicts itself, the snapshot, or what is known of the object.
    #[error("object {object}: {what}")]
    BadObject {
        /// The object.
        object: ObjectId,
        /// What is wrong.
        what: &'static str,
    },
    /// The KV references do not cover the tokens one after the other.
    #[error("no KV reference covers token {at}")]
    Gap {
        /// First token that is not covered.
        at: u32,
    },
    /// A KV reference to an object that is neither known nor given.
    #[error("object {0} is not known")]
    UnknownObject(ObjectId),
    /// An object that belongs to other tokens than the snapshot's.
    #[error("object {0} belongs to another prefix")]
    Foreign(ObjectId),
    /// The id of another snapshot.
    #[error("snapshot {0} exists at another prefix")]
    DuplicateSnapshot(SnapshotId),
    /// Something still needs the object.
    #[error("object {0} is in use")]
    InUse(ObjectId),
    /// The token log did not take, or did not give, tokens.
    #[error("token log: {0}")]
    Log(#[from] io::Error),
}
