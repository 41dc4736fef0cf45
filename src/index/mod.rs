//! Which prefixes are known, where their bytes are, and what may leave a tier.
//!
//! # What
//!
//! One radix tree of token ids per [`TreeKey`]. A **snapshot** stands at a node: it has a state
//! (one object) and needs KV of every token from the root to its node (objects that it shares with
//! other snapshots on the way). The index is pure: no IO but the token log behind [`Tokens`], no
//! clock, no lock. It has one owner, which brings the time along.
//!
//! # State
//!
//! - An **edge** holds where its tokens stand in the log, how many they are, the first of them and
//!   a hash of the first 64. Memory does not grow with the length of prompts. The first token finds
//!   the edge, the hash spares reading the log for most edges that do not fit, and the tokens
//!   themselves decide, always.
//! - A **KV object** covers positions `[a, b)` of one path. Every node on that path whose edge has
//!   some of them lists it. It may be used in part: a branch in the middle shares what lies before
//!   the divergence, and a split of an edge copies nothing. A manifest may name a part of an object
//!   whose other tokens are not known here; its `reach` says how far they are, and a later snapshot
//!   may extend it.
//! - A KV object is **needed** while a live snapshot exists at or below the node where the object
//!   starts: each of them has at least one of its tokens on its path. So nodes count the snapshots
//!   below them, and an insert, a removal or a pin walks up one path.
//! - A **tombstone** is a node without a snapshot: its state went, or it never had one. It stays
//!   while it has KV or branches; a node with neither is pruned, one with a single child is merged
//!   with it where their tokens stand side by side in the log.
//!
//! What holds between any two calls: every edge at or above a live snapshot is covered by objects
//! that have a copy in some tier. So every snapshot in the index can be restored, and a lookup
//! needs to look for nothing but the deepest one.
//!
//! # Order of leaving
//!
//! States and KV have each their own order of last use (a use of a snapshot is one of its state and
//! of all KV on its path), deepest first among equals. Each copy of an object in a tier is in one
//! class: orphan (no live snapshot needs it), spare (a lower tier has a copy), last copy, or kept.
//! The classes are ordered sets that every change keeps right, so asking for
//! [`victims`](Index::victims) costs as much as there are victims.
//!
//! # Errors
//!
//! An insert is checked whole before anything changes. Objects that belong to other tokens are
//! refused. A log that gives back other tokens than it took, or none, makes misses, never hits.

mod api;
mod check;
mod hold;
mod ids;
mod insert;
mod load;
mod log;
mod lookup;
mod node;
mod object;
mod owners;
mod remove;
mod shelf;
mod slab;
mod snapshot;
mod tier_set;
mod tree;
mod victims;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use hashbrown::HashMap;

pub use api::{
    Action, Coverage, Hit, IndexError, Inserted, KvRef, NewSnapshot, ObjectEntry, ObjectInfo, Pin,
    PinKind, Removed, Retain, SnapshotInfo, Stats, TreeKey, Usage, Victim,
};
pub use hold::LeaseToken;
pub use load::{Edge, Loader, Part, Placed, Placing, Spot};
pub use log::VecLog;
pub use owners::NamespaceUsage;
pub use tier_set::TierSet;

use crate::types::{Millis, TierKind, Tokens};
use node::{Hashing, Nodes};
use object::Objects;
use slab::{NodeIx, SnapIx};
use snapshot::Snapshots;

/// Longest prompt, in tokens.
pub const MAX_TOKENS: u32 = (1 << 31) - 1;

/// The index.
pub struct Index<T> {
    log: T,
    trees: HashMap<TreeKey, NodeIx>,
    /// The keys of the roots.
    roots: HashMap<NodeIx, TreeKey>,
    nodes: Nodes,
    objects: Objects,
    snapshots: Snapshots,
    /// Timed pins by their end.
    timed: BTreeSet<(Millis, SnapIx)>,
}

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// An empty index. `tiers` are those that there are: they say whether a last copy can be
    /// written down.
    #[must_use]
    pub fn new(log: T, tiers: TierSet) -> Self {
        Self::with_hashing(log, tiers, Hashing::default())
    }

    fn with_hashing(log: T, tiers: TierSet, hashing: Hashing) -> Self {
        Self {
            log,
            trees: HashMap::new(),
            roots: HashMap::new(),
            nodes: Nodes::new(hashing),
            objects: Objects::new(tiers),
            snapshots: Snapshots::new(),
            timed: BTreeSet::new(),
        }
    }

    /// Makes room for `snapshots` more, so that many inserts in a row grow no table.
    pub fn reserve(&mut self, snapshots: usize) {
        self.nodes.reserve(snapshots);
        self.objects.reserve(snapshots.saturating_mul(2));
        self.snapshots.reserve(snapshots);
    }

    /// The token log.
    pub fn log(&self) -> &T {
        &self.log
    }

    /// The token log. What is in it must stay as it is.
    pub fn log_mut(&mut self) -> &mut T {
        &mut self.log
    }

    /// Tiers that there are.
    #[must_use]
    pub fn tiers(&self) -> TierSet {
        self.objects.configured()
    }

    /// What a tier holds.
    #[must_use]
    pub fn usage(&self, tier: TierKind) -> Usage {
        self.objects.shelves[tier].usage
    }

    /// Sizes.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            trees: self.trees.len() as u64,
            nodes: self.nodes.len() as u64,
            snapshots: self.snapshots.len() as u64,
            objects: self.objects.len() as u64,
        }
    }
}
