//! Taking in many snapshots at once, whose tokens stand in the log already: the start of a daemon.
//!
//! # What
//! [`Loader::place`] puts one snapshot below another that is there already, without reading a token
//! unless two edges begin with the same one. What depends on all snapshots together — the counts of
//! nodes, the times of last use, the order of leaving — is found once, in [`Loader::finish`]: an
//! insert one by one would walk up the whole conversation each time.
//!
//! # Errors
//! As an insert, a placing is checked whole before anything changes.

mod place;

use std::mem;

use super::{
    Index, IndexError, ObjectEntry, TreeKey,
    shelf::{Class, Place},
    slab::{Ix, NodeIx, SnapIx},
    tier_set::PerTier,
};
use crate::types::{Millis, ObjectId, SnapshotId, TierKind, TokenId, TokenRange, Tokens};

/// Tokens that stand side by side in the log.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Edge {
    /// Where, in tokens.
    pub offset: u64,
    /// How many; not 0.
    pub len: u32,
    /// The first of them.
    pub first: TokenId,
    /// The index's hash of the first 64.
    pub head: u32,
}

/// KV of a snapshot: an object, and the part of it that is used.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Part {
    /// The object.
    pub object: ObjectEntry,
    /// Tokens that it is used for.
    pub range: TokenRange,
}

/// A snapshot whose tokens are in the log.
#[derive(Copy, Clone, Debug)]
pub struct Placed<'a> {
    /// Its id.
    pub id: SnapshotId,
    /// Its state.
    pub state: ObjectEntry,
    /// A snapshot that is there already and whose tokens are the first of this one's.
    pub after: Option<Spot>,
    /// The tokens that follow those.
    pub edges: &'a [Edge],
    /// KV of these tokens, or of all: consecutive ranges up to the boundary.
    pub kv: &'a [Part],
    /// When it was made.
    pub created: Millis,
}

/// Where a snapshot was placed.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Spot(SnapIx);

/// What became of a placing.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Placing {
    /// It is in the index.
    Fresh(Spot),
    /// Another one stands there.
    Standing(Spot),
}

/// An index that is being filled.
pub struct Loader<T> {
    index: Index<T>,
}

/// How far edges lead.
struct Walk {
    /// The last node that fits whole.
    node: NodeIx,
    /// Tokens of a child of it that fit, and the child.
    partial: Option<(NodeIx, u32)>,
    /// Edges that fit whole.
    edges: usize,
    /// Tokens of the edge after them that fit.
    inside: u32,
    matched: u32,
}

/// The order of leaving that is put up at the end.
#[derive(Default)]
struct Waiting {
    orphans: Vec<Place>,
    spare: Vec<Place>,
    states: Vec<Place>,
    kv: Vec<Place>,
}

// === impl Placing ===

impl Placing {
    /// Where it, or the other one, stands.
    #[must_use]
    pub fn spot(self) -> Spot {
        let (Self::Fresh(spot) | Self::Standing(spot)) = self;
        spot
    }
}

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// Fills an index that is empty.
    #[must_use]
    pub fn loader(log: T, tiers: super::TierSet, snapshots: usize) -> Loader<T> {
        let mut index = Self::new(log, tiers);
        index.reserve(snapshots);
        Loader { index }
    }

    /// Where the tokens of a snapshot stand, from `from` on if an edge starts there, else from the
    /// first; says which. `None` if the snapshot is not known.
    #[must_use]
    pub fn edges(&self, id: &SnapshotId, from: u32) -> Option<(u32, Vec<Edge>)> {
        let snapshot = self.snapshots.find(*id)?;
        let path = self.nodes.path(self.snapshots[snapshot].node);
        let starts = |start| {
            path.iter().any(|ix| {
                let node = &self.nodes[*ix];
                node.start == start && node.len > 0
            })
        };
        let from = if starts(from) { from } else { 0 };
        let edges = path.into_iter().filter_map(|ix| {
            let node = &self.nodes[ix];
            (node.start >= from && node.len > 0).then_some(Edge {
                offset: node.offset,
                len: node.len,
                first: node.first,
                head: node.head,
            })
        });
        Some((from, edges.collect()))
    }
}

// === impl Loader ===

impl<T: Tokens> Loader<T> {
    /// Puts a snapshot where it belongs. Every object is taken to be in the tiers that it says.
    ///
    /// # Errors
    /// Those of an insert; nothing has changed then.
    pub fn place(&mut self, key: &TreeKey, new: &Placed<'_>) -> Result<Placing, IndexError> {
        let index = &mut self.index;
        let above = match new.after {
            Some(Spot(after)) => index.snapshots[after].node,
            None => index.root(key),
        };
        let placed = index.check_and_place(key.namespace, above, new);
        if placed.is_err() && new.after.is_none() {
            // A root of nothing.
            index.prune(above);
        }
        placed
    }

    /// Looks up what placing these snapshots will look up: their ids, two of their objects, and what
    /// they come after. Changes nothing. With millions of records each look is a miss of every cache,
    /// and one after the other, as they come when a snapshot is placed, they are most of a start;
    /// here many are under way at once.
    pub fn foresee(
        &self,
        rows: impl Iterator<Item = (SnapshotId, [Option<ObjectId>; 2], Option<Spot>)>,
    ) {
        let index = &self.index;
        let mut found = 0;
        for (snapshot, objects, after) in rows {
            found += usize::from(index.snapshots.find(snapshot).is_some());
            for object in objects.into_iter().flatten() {
                found += usize::from(index.objects.find(object).is_some());
            }
            if let Some(Spot(after)) = after {
                let node = &index.nodes[index.snapshots[after].node];
                found += usize::from(node.first_child.is_none());
            }
        }
        // Else it would all be left out.
        std::hint::black_box(found);
    }

    /// The token log.
    #[must_use]
    pub fn log(&self) -> &T {
        &self.index.log
    }

    /// Where a snapshot stands, with its boundary.
    #[must_use]
    pub fn find(&self, id: SnapshotId) -> Option<(Spot, u32)> {
        let ix = self.index.snapshots.find(id)?;
        let node = self.index.snapshots[ix].node;
        Some((Spot(ix), self.index.nodes[node].end()))
    }

    /// The nearest snapshot that one extends.
    #[must_use]
    pub fn parent(&self, Spot(ix): Spot) -> Option<SnapshotId> {
        let index = &self.index;
        let mut above = index.nodes.upwards(index.snapshots[ix].node).skip(1);
        let parent = above.find_map(|node| index.nodes[node].snapshot.some())?;
        Some(index.snapshots[parent].id)
    }

    /// The index, with all that holds between any two calls.
    #[must_use]
    pub fn finish(self) -> Index<T> {
        let mut index = self.index;
        let order = index.top_down();
        let latest = index.sum_up(&order);
        let mut waiting: PerTier<Waiting> = PerTier::default();
        for ix in order {
            let facts = index.nodes[ix].facts;
            let used = latest.get(ix.raw() as usize).copied().unwrap_or_default();
            let (node, objects) = (&index.nodes[ix], &mut index.objects);
            for object in &node.kv {
                if objects[*object].range.start >= node.start {
                    objects.settle(*object, facts, used, &mut |tier, class, place| {
                        waiting[tier].push(class, place);
                    });
                }
            }
            if let Some(snapshot) = node.snapshot.some() {
                let snapshot = &index.snapshots[snapshot];
                let (facts, used) = (snapshot.facts(), snapshot.created);
                objects.settle(snapshot.state, facts, used, &mut |tier, class, place| {
                    waiting[tier].push(class, place);
                });
            }
        }
        for tier in TierKind::ALL {
            let Waiting {
                orphans,
                spare,
                states,
                kv,
            } = mem::take(&mut waiting[tier]);
            let shelf = &mut index.objects.shelves[tier];
            shelf.fill(Class::Orphan, orphans);
            shelf.fill(Class::Spare, spare);
            shelf.fill(Class::LastState, states);
            shelf.fill(Class::LastKv, kv);
        }
        index
    }
}

// === impl Waiting ===

impl Waiting {
    fn push(&mut self, class: Class, place: Place) {
        match class {
            Class::Kept => {}
            Class::Orphan => self.orphans.push(place),
            Class::Spare => self.spare.push(place),
            Class::LastState => self.states.push(place),
            Class::LastKv => self.kv.push(place),
        }
    }
}
