//! Copies that come and go, and what that does to snapshots.

use super::{
    Index, IndexError, Removed,
    node::Facts,
    slab::{Ix, NodeIx, ObjIx, SnapIx},
};
use crate::types::{ObjectId, ObjectKind, SnapshotId, TierKind, Tokens};

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// Notes that a tier has a copy of an object, or has it no more. The end of the last copy is
    /// the loss of the object: see [`lose_object`](Self::lose_object). Unknown objects are ignored.
    pub fn set_tier(&mut self, id: &ObjectId, tier: TierKind, there: bool) -> Removed {
        let Some(ix) = self.objects.find(*id) else {
            return Removed::default();
        };
        let before = self.objects[ix].tiers;
        let tiers = if there {
            before.with(tier)
        } else {
            before.without(tier)
        };
        if tiers.is_empty() {
            return self.lose_object(id);
        }
        if tiers != before {
            self.objects.set_tiers(ix, tiers);
            self.objects.reclass(ix, self.facts(ix));
        }
        Removed::default()
    }

    /// The state of a snapshot goes: the snapshot is gone, its node becomes a tombstone, and its KV
    /// stays for as long as there is room. A leased state stays in the index until its leases end,
    /// and is then the first to leave.
    pub fn forget_state(&mut self, id: &SnapshotId) -> Removed {
        let mut removed = Removed::default();
        if let Some(ix) = self.snapshots.find(*id) {
            let node = self.end(ix, &mut removed);
            self.prune(node);
        }
        removed
    }

    /// A snapshot goes, with everything that it alone needed. What is leased leaves later, as a
    /// victim.
    pub fn remove_snapshot(&mut self, id: &SnapshotId) -> Removed {
        let mut removed = Removed::default();
        let Some(ix) = self.snapshots.find(*id) else {
            return removed;
        };
        let node = self.end(ix, &mut removed);
        let path: Vec<NodeIx> = self.nodes.upwards(node).collect();
        let dead = path.iter().filter(|ix| self.nodes[**ix].facts.live == 0);
        let orphans: Vec<ObjIx> = dead
            .flat_map(|ix| self.starting_at(*ix))
            .filter(|object| self.objects[*object].leases == 0)
            .collect();
        self.prune(node);
        for object in orphans {
            removed.objects.push(self.drop_kv(object));
        }
        removed
    }

    /// An object that no snapshot needs goes.
    ///
    /// # Errors
    ///
    /// [`IndexError::InUse`] if a snapshot or a lease needs it; [`IndexError::UnknownObject`].
    pub fn forget_object(&mut self, id: &ObjectId) -> Result<(), IndexError> {
        let ix = self
            .objects
            .find(*id)
            .ok_or(IndexError::UnknownObject(*id))?;
        let object = &self.objects[ix];
        if object.leases > 0 || self.facts(ix).live > 0 {
            return Err(IndexError::InUse(*id));
        }
        self.take_out(ix);
        Ok(())
    }

    /// An object turned out to be missing or corrupt: it is gone from every tier, leased or not,
    /// and so is exactly every snapshot that lacks something without it. The states of those
    /// snapshots are among the removed objects.
    pub fn lose_object(&mut self, id: &ObjectId) -> Removed {
        let mut removed = Removed::default();
        let Some(ix) = self.objects.find(*id) else {
            return removed;
        };
        if self.objects[ix].kind == ObjectKind::State {
            let snapshot = self.objects[ix].snapshot;
            self.objects[ix].leases = 0;
            match snapshot.some() {
                Some(snapshot) => {
                    let node = self.end(snapshot, &mut removed);
                    self.prune(node);
                }
                None => removed.objects.push(self.drop_detached(ix)),
            }
            return removed;
        }
        let chain = self.chain(ix);
        let end = self.objects[ix].node;
        removed.objects.push(self.detach(ix, &chain));
        // Snapshots stand at the ends of edges: a hole in an edge is one for all at it and below.
        let holed = chain
            .iter()
            .rev()
            .find(|node| self.nodes[**node].facts.live > 0 && !self.is_covered(**node));
        let mut at_holes = Vec::new();
        if let Some(holed) = holed {
            for snapshot in self.below(*holed) {
                at_holes.push(self.end(snapshot, &mut removed));
            }
        }
        // A node that one pruning removes or merges away is not live for the next.
        for id in at_holes.into_iter().rev() {
            if self.nodes.contains(id) {
                self.prune(id);
            }
        }
        if self.nodes.contains(end) {
            self.prune(end);
        }
        removed
    }

    /// The snapshots that go when this object is lost.
    #[must_use]
    pub fn lost_with(&self, id: &ObjectId) -> Vec<SnapshotId> {
        let Some(ix) = self.objects.find(*id) else {
            return Vec::new();
        };
        let id_of = |ix: SnapIx| self.snapshots[ix].id;
        if self.objects[ix].kind == ObjectKind::State {
            return self.objects[ix]
                .snapshot
                .some()
                .map(id_of)
                .into_iter()
                .collect();
        }
        let chain = self.chain(ix);
        let holed = chain
            .iter()
            .rev()
            .find(|node| self.nodes[**node].facts.live > 0 && !self.is_covered_without(**node, ix));
        let below = holed.map(|holed| self.below(*holed)).unwrap_or_default();
        below.into_iter().map(id_of).collect()
    }

    /// Ends a snapshot; its node stays, to be pruned.
    fn end(&mut self, ix: SnapIx, removed: &mut Removed) -> NodeIx {
        let facts = self.snapshots[ix].facts();
        let snapshot = self.snapshots.remove(ix);
        if let Some(until) = snapshot.until {
            self.timed.remove(&(until, ix));
        }
        self.nodes[snapshot.node].snapshot = SnapIx::NONE;
        self.recount(snapshot.node, facts, Facts::default());
        self.objects[snapshot.state].snapshot = SnapIx::NONE;
        removed.snapshots.push(snapshot.id);
        if self.objects[snapshot.state].leases > 0 {
            self.objects.reclass(snapshot.state, Facts::default());
        } else {
            removed.objects.push(self.drop_detached(snapshot.state));
        }
        snapshot.node
    }

    fn drop_detached(&mut self, state: ObjIx) -> ObjectId {
        self.objects.remove(state).id
    }

    /// Takes an object out that nothing needs.
    fn take_out(&mut self, ix: ObjIx) -> ObjectId {
        match self.objects[ix].kind {
            ObjectKind::State => self.drop_detached(ix),
            ObjectKind::Kv => self.drop_kv(ix),
        }
    }

    fn drop_kv(&mut self, ix: ObjIx) -> ObjectId {
        let chain = self.chain(ix);
        let end = self.objects[ix].node;
        let id = self.detach(ix, &chain);
        self.prune(end);
        id
    }

    /// The nodes that list a KV object, from its last to its first.
    fn chain(&self, ix: ObjIx) -> Vec<NodeIx> {
        let object = &self.objects[ix];
        self.nodes
            .upwards(object.node)
            .take_while(|node| self.nodes[*node].end() > object.range.start)
            .collect()
    }

    fn detach(&mut self, ix: ObjIx, chain: &[NodeIx]) -> ObjectId {
        for node in chain {
            self.nodes[*node].kv.retain(|object| *object != ix);
        }
        self.objects.remove(ix).id
    }

    pub(super) fn is_covered(&self, ix: NodeIx) -> bool {
        self.is_covered_without(ix, ObjIx::NONE)
    }

    /// Whether all of an edge has KV, but for that of one object.
    fn is_covered_without(&self, ix: NodeIx, without: ObjIx) -> bool {
        let node = &self.nodes[ix];
        let mut at = node.start;
        while at < node.end() {
            let objects = node.kv.iter().filter(|object| **object != without);
            let ends = objects.filter_map(|object| {
                let object = &self.objects[*object];
                let end = object.reach.min(node.end());
                (object.range.start <= at && at < end).then_some(end)
            });
            match ends.max() {
                Some(end) => at = end,
                None => return false,
            }
        }
        true
    }

    /// The snapshots at a node and below it, parents before children.
    fn below(&self, top: NodeIx) -> Vec<SnapIx> {
        let mut found = Vec::new();
        let mut open = vec![top];
        while let Some(ix) = open.pop() {
            let node = &self.nodes[ix];
            if node.facts.live == 0 {
                continue;
            }
            found.extend(node.snapshot.some());
            open.extend(self.nodes.children(ix));
        }
        found
    }
}
