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

use std::mem;

use smallvec::SmallVec;

use super::{
    Index, IndexError, KvRef, MAX_TOKENS, ObjectEntry, Retain, TreeKey,
    insert::{MAX_BYTES, bad, unreadable},
    log,
    node::{Facts, Node},
    shelf::{Class, Place},
    slab::{Ix, NodeIx, ObjIx, SnapIx},
    snapshot::Snapshot,
    tier_set::PerTier,
};
use crate::types::{Millis, ObjectKind, SnapshotId, TierKind, TokenId, TokenRange, Tokens};

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
        let placed = index.check_and_place(above, new);
        if placed.is_err() && new.after.is_none() {
            // A root of nothing.
            index.prune(above);
        }
        placed
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

// === impl Index ===

impl<T: Tokens> Index<T> {
    fn check_and_place(&mut self, above: NodeIx, new: &Placed<'_>) -> Result<Placing, IndexError> {
        let from = self.nodes[above].end();
        let boundary = new.edges.iter().try_fold(from, |end, edge| {
            let end = end.checked_add(edge.len)?;
            (edge.len > 0 && end <= MAX_TOKENS).then_some(end)
        });
        let Some(boundary) = boundary.filter(|boundary| *boundary > 0) else {
            return Err(IndexError::Empty);
        };
        check_objects(new, from, boundary)?;
        let walk = self.walk(above, from, new.edges)?;
        if self.snapshots.find(new.id).is_some() {
            return Err(IndexError::DuplicateSnapshot(new.id));
        }
        let whole = walk.matched == boundary && walk.partial.is_none();
        if whole && let Some(standing) = self.nodes[walk.node].snapshot.some() {
            return Ok(Placing::Standing(Spot(standing)));
        }
        if self.objects.find(new.state.id).is_some() {
            return Err(bad(new.state.id, "is the state of another snapshot"));
        }
        self.check_shared(new.kv, &walk)?;
        let node = self.attach(&walk, new.edges)?;
        self.extend_all(new, node);
        let state = self.objects.insert(&new.state, new.created);
        let snapshot = self.snapshots.insert(Snapshot {
            id: new.id,
            node,
            state,
            created: new.created,
            until: None,
            names: 0,
            durable: true,
            retain: Retain::Ordinary,
        });
        self.nodes[node].snapshot = snapshot;
        self.objects[state].snapshot = snapshot;
        Ok(Placing::Fresh(Spot(snapshot)))
    }

    /// Follows edges as far as the tree has their tokens.
    fn walk(&self, above: NodeIx, from: u32, edges: &[Edge]) -> Result<Walk, IndexError> {
        let mut walk = Walk {
            node: above,
            partial: None,
            edges: 0,
            inside: 0,
            matched: from,
        };
        while let Some(edge) = edges.get(walk.edges) {
            let (offset, len) = (edge.offset + u64::from(walk.inside), edge.len - walk.inside);
            let (child, cut) = match walk.partial {
                Some(partial) => partial,
                None => {
                    let first = match walk.inside {
                        0 => edge.first,
                        _ => self.first_at(offset)?,
                    };
                    match self.nodes.child(walk.node, first) {
                        Some(child) => (child, 0),
                        None => break,
                    }
                }
            };
            let node = &self.nodes[child];
            let (at, most) = (node.offset + u64::from(cut), (node.len - cut).min(len));
            let same = if at == offset {
                most
            } else {
                log::common_runs(&self.log, at, offset, most)
            };
            if cut + same == 0 {
                // Their first tokens are the same.
                return Err(unreadable());
            }
            walk.matched += same;
            walk.inside += same;
            if walk.inside == edge.len {
                walk.edges += 1;
                walk.inside = 0;
            }
            if cut + same == node.len {
                (walk.node, walk.partial) = (child, None);
                continue;
            }
            walk.partial = Some((child, cut + same));
            if same < most {
                break;
            }
        }
        Ok(walk)
    }

    fn first_at(&self, offset: u64) -> Result<TokenId, IndexError> {
        let run = log::read(&self.log, offset, 1);
        let first = run.and_then(|run| run.first().copied());
        first.ok_or_else(unreadable)
    }

    /// Objects that are known must be the same, and belong to these tokens.
    fn check_shared(&self, kv: &[Part], walk: &Walk) -> Result<(), IndexError> {
        let mut path: Option<Vec<NodeIx>> = None;
        for part in kv {
            let object = &part.object;
            let Some(ix) = self.objects.find(object.id) else {
                continue;
            };
            let known = &self.objects[ix];
            if (known.kind, known.range, known.bytes) != (object.kind, object.range, object.bytes) {
                return Err(bad(object.id, "is known with another kind, range or size"));
            }
            let last = walk.partial.map_or(walk.node, |(child, _)| child);
            let path = path.get_or_insert_with(|| self.nodes.path(last));
            let part = KvRef {
                object: object.id,
                range: part.range,
                object_range: object.range,
            };
            self.check_place(ix, &part, path, walk.matched)?;
        }
        Ok(())
    }

    /// Makes the nodes that edges lead to beyond what is there.
    fn attach(&mut self, walk: &Walk, edges: &[Edge]) -> Result<NodeIx, IndexError> {
        let mut rest: SmallVec<[Edge; 4]> = SmallVec::new();
        for (at, edge) in edges.iter().enumerate().skip(walk.edges) {
            if at > walk.edges || walk.inside == 0 {
                rest.push(*edge);
                continue;
            }
            let (offset, len) = (edge.offset + u64::from(walk.inside), edge.len - walk.inside);
            let run = log::read(&self.log, offset, len.min(log::HEAD_TOKENS));
            let run = run.ok_or_else(unreadable)?;
            rest.push(Edge {
                offset,
                len,
                first: run.first().copied().ok_or_else(unreadable)?,
                head: self.head(&run),
            });
        }
        for edge in &rest {
            if !self.log.hold(edge.offset, edge.len) {
                return Err(unreadable());
            }
        }
        let mut node = match walk.partial {
            None => walk.node,
            Some((child, cut)) => {
                let at = self.nodes[child].start + cut;
                self.split(child, at).ok_or_else(unreadable)?
            }
        };
        for edge in rest {
            let parent = node;
            node = self.nodes.insert_child(Node {
                parent,
                start: self.nodes[parent].end(),
                len: edge.len,
                first: edge.first,
                head: edge.head,
                offset: edge.offset,
                ..Node::root()
            });
            if self.can_merge(parent) {
                self.merge(parent);
            }
        }
        Ok(node)
    }

    /// Makes the snapshot's KV known on its path.
    fn extend_all(&mut self, new: &Placed<'_>, node: NodeIx) {
        let mut found: SmallVec<[ObjIx; 8]> = SmallVec::new();
        let mut lowest = u32::MAX;
        for part in new.kv {
            let object = match self.objects.find(part.object.id) {
                Some(object) => object,
                None => self.objects.insert(&part.object, new.created),
            };
            let reach = self.objects[object].reach;
            if reach < part.range.end {
                lowest = lowest.min(reach);
            }
            found.push(object);
        }
        let mut path: SmallVec<[NodeIx; 8]> = SmallVec::new();
        for ix in self.nodes.upwards(node) {
            path.push(ix);
            if self.nodes[ix].start <= lowest {
                break;
            }
        }
        path.reverse();
        for (object, part) in found.into_iter().zip(new.kv) {
            self.extend(object, &path, part.range.end);
        }
    }

    /// All nodes, parents before children.
    fn top_down(&self) -> Vec<NodeIx> {
        let mut order = Vec::with_capacity(self.nodes.len());
        order.extend(self.roots.keys().copied());
        let mut at = 0;
        while let Some(ix) = order.get(at).copied() {
            order.extend(self.nodes.children(ix));
            at += 1;
        }
        order
    }

    /// Counts what is at each node and below it. Says when something there was made last.
    fn sum_up(&mut self, order: &[NodeIx]) -> Vec<Millis> {
        let most = order.iter().map(|ix| ix.raw()).max();
        let mut latest = vec![Millis::default(); most.map_or(0, |most| most as usize + 1)];
        for ix in order {
            self.nodes[*ix].facts = Facts::default();
        }
        for ix in order.iter().rev() {
            let mut used = latest.get(ix.raw() as usize).copied().unwrap_or_default();
            let node = &self.nodes[*ix];
            let parent = node.parent.some();
            let mut facts = node.facts;
            if let Some(snapshot) = node.snapshot.some() {
                let snapshot = &self.snapshots[snapshot];
                facts = facts.plus(snapshot.facts());
                used = used.max(snapshot.created);
            }
            self.nodes[*ix].facts = facts;
            if let Some(slot) = latest.get_mut(ix.raw() as usize) {
                *slot = used;
            }
            if let Some(parent) = parent {
                let above = &mut self.nodes[parent];
                above.facts = above.facts.plus(facts);
                if let Some(slot) = latest.get_mut(parent.raw() as usize) {
                    *slot = used.max(*slot);
                }
            }
        }
        latest
    }
}

fn check_objects(new: &Placed<'_>, from: u32, boundary: u32) -> Result<(), IndexError> {
    let state = &new.state;
    if state.kind != ObjectKind::State || state.range != TokenRange::at(boundary) {
        return Err(bad(state.id, "is no state at the boundary"));
    }
    let mut at = new.kv.first().map_or(0, |part| part.range.start);
    if at != 0 && at != from {
        return Err(IndexError::Gap { at: from });
    }
    for part in new.kv {
        let object = &part.object;
        let range = object.range;
        if object.kind != ObjectKind::Kv || range.is_empty() || range.end > MAX_TOKENS {
            return Err(bad(object.id, "is no KV of a range of tokens"));
        }
        if part.range.is_empty() || !range.covers(part.range) {
            return Err(bad(object.id, "is referred to outside its range"));
        }
        if part.range.start != at {
            return Err(IndexError::Gap { at });
        }
        at = part.range.end;
    }
    if at != boundary {
        let at = at.min(boundary);
        return Err(IndexError::Gap { at });
    }
    for object in new.kv.iter().map(|part| &part.object).chain([state]) {
        if object.tiers.is_empty() {
            return Err(bad(object.id, "has no copy in any tier"));
        }
        if object.bytes > MAX_BYTES {
            return Err(bad(object.id, "is larger than any object can be"));
        }
    }
    Ok(())
}
