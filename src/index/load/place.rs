//! Where a snapshot's edges go, checked before anything changes; and what is summed up at the end.

use smallvec::SmallVec;

use super::super::{
    Index, IndexError, KvRef, MAX_TOKENS, Retain,
    insert::{MAX_BYTES, bad, unreadable},
    log,
    node::{Facts, Node},
    slab::{Ix, NodeIx, ObjIx},
    snapshot::Snapshot,
};
use super::{Edge, Part, Placed, Placing, Spot, Walk};
use crate::types::{Millis, NamespaceId, ObjectKind, TokenId, TokenRange, Tokens};

// === impl Index ===

impl<T: Tokens> Index<T> {
    pub(super) fn check_and_place(
        &mut self,
        namespace: NamespaceId,
        above: NodeIx,
        new: &Placed<'_>,
    ) -> Result<Placing, IndexError> {
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
        self.extend_all(namespace, new, node);
        let state = self.objects.insert(namespace, &new.state, new.created);
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
    fn extend_all(&mut self, namespace: NamespaceId, new: &Placed<'_>, node: NodeIx) {
        let mut found: SmallVec<[ObjIx; 8]> = SmallVec::new();
        let mut lowest = u32::MAX;
        for part in new.kv {
            let object = match self.objects.find(part.object.id) {
                Some(object) => object,
                None => self.objects.insert(namespace, &part.object, new.created),
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
    pub(super) fn top_down(&self) -> Vec<NodeIx> {
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
    pub(super) fn sum_up(&mut self, order: &[NodeIx]) -> Vec<Millis> {
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
