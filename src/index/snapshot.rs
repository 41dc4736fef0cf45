//! Snapshots: what stands at nodes, and what is known of each.

use super::{
    Hit, Index, ObjectInfo, Retain, SnapshotInfo, TierSet,
    ids::Ids,
    node::Facts,
    slab::{Ix, NodeIx, ObjIx, Slab, SnapIx},
};
use crate::types::{Millis, ObjectId, SnapshotId, TierKind, TokenId, Tokens};

pub(super) struct Snapshot {
    pub(super) id: SnapshotId,
    pub(super) node: NodeIx,
    pub(super) state: ObjIx,
    pub(super) created: Millis,
    pub(super) until: Option<Millis>,
    pub(super) names: u32,
    pub(super) durable: bool,
    pub(super) retain: Retain,
}

/// All snapshots.
pub(super) struct Snapshots {
    slab: Slab<SnapIx, Snapshot>,
    ids: Ids<SnapIx>,
}

// === impl Snapshot ===

impl Snapshot {
    /// What it adds to the counts of the nodes above it.
    pub(super) fn facts(&self) -> Facts {
        let promised = self.retain == Retain::Promised && !self.durable;
        Facts {
            live: 1,
            kept: u32::from(self.names > 0 || promised),
            held: u32::from(self.until.is_some()),
            ordinary: u32::from(self.retain != Retain::Transient),
        }
    }
}

// === impl Snapshots ===

impl Snapshots {
    pub(super) fn new() -> Self {
        Self {
            slab: Slab::new(),
            ids: Ids::new(),
        }
    }

    pub(super) fn reserve(&mut self, more: usize) {
        self.slab.reserve(more);
        self.ids.reserve(more);
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SnapIx, &Snapshot)> {
        self.slab.iter()
    }

    pub(super) fn find(&self, id: SnapshotId) -> Option<SnapIx> {
        self.ids.find(word(id), |ix| self.slab[ix].id == id)
    }

    pub(super) fn insert(&mut self, snapshot: Snapshot) -> SnapIx {
        let word = word(snapshot.id);
        let ix = self.slab.insert(snapshot);
        self.ids.insert(word, ix);
        ix
    }

    pub(super) fn remove(&mut self, ix: SnapIx) -> Snapshot {
        let snapshot = self.slab.remove(ix);
        self.ids.remove(word(snapshot.id), ix);
        snapshot
    }
}

impl std::ops::Index<SnapIx> for Snapshots {
    type Output = Snapshot;

    fn index(&self, ix: SnapIx) -> &Snapshot {
        &self.slab[ix]
    }
}

impl std::ops::IndexMut<SnapIx> for Snapshots {
    fn index_mut(&mut self, ix: SnapIx) -> &mut Snapshot {
        &mut self.slab[ix]
    }
}

/// The low half of an id is random in version 7.
fn word(id: SnapshotId) -> u64 {
    let (_, low) = id.0.as_u64_pair();
    low
}

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// What is known of a snapshot; `None` if it is not in the index (any more).
    #[must_use]
    pub fn snapshot(&self, id: &SnapshotId) -> Option<SnapshotInfo> {
        let snapshot = &self.snapshots[self.snapshots.find(*id)?];
        let state = &self.objects[snapshot.state];
        let path = self.nodes.path(snapshot.node);
        let root = path.first()?;
        let (mut kv_tiers, mut kv_bytes) = (TierKind::ALL.into_iter().collect::<TierSet>(), 0_u64);
        let mut parent = None;
        for ix in &path {
            let node = &self.nodes[*ix];
            if let Some(above) = node.snapshot.some().filter(|_| *ix != snapshot.node) {
                parent = Some(self.snapshots[above].id);
            }
            for object in self.starting_at(*ix) {
                let object = &self.objects[object];
                kv_tiers = kv_tiers.both(object.tiers);
                kv_bytes = kv_bytes.saturating_add(object.bytes);
            }
        }
        Some(SnapshotInfo {
            id: *id,
            key: *self.roots.get(root)?,
            boundary: state.range.end,
            parent,
            state_tiers: state.tiers,
            kv_tiers,
            state_bytes: state.bytes,
            kv_bytes,
            created: snapshot.created,
            last_use: state.last_use,
            names: snapshot.names,
            pinned_until: snapshot.until,
            durable: snapshot.durable,
            retain: snapshot.retain,
            leases: state.leases,
        })
    }

    /// All snapshots, in no order that means anything, but always the same.
    pub fn iter(&self) -> impl Iterator<Item = SnapshotId> {
        self.snapshots.iter().map(|(_, snapshot)| snapshot.id)
    }

    /// A snapshot by its id, with all that it needs.
    #[must_use]
    pub fn hit(&self, id: &SnapshotId) -> Option<Hit> {
        Some(self.hit_at(self.snapshots.find(*id)?))
    }

    /// Writes the tokens of a snapshot, from the first to its boundary, to the end of `out`;
    /// `false` if it is not known or the log lacks some of them (`out` is then as it was).
    pub fn read_tokens(&self, id: &SnapshotId, out: &mut Vec<TokenId>) -> bool {
        let Some(ix) = self.snapshots.find(*id) else {
            return false;
        };
        let before = out.len();
        let node = self.snapshots[ix].node;
        for ix in self.nodes.path(node) {
            let edge = &self.nodes[ix];
            self.log
                .get(edge.offset, edge.len, &mut |run| out.extend_from_slice(run));
        }
        let whole = out.len() - before == self.nodes[node].end() as usize;
        if !whole {
            out.truncate(before);
        }
        whole
    }

    /// What is known of an object.
    #[must_use]
    pub fn object(&self, id: &ObjectId) -> Option<ObjectInfo> {
        let ix = self.objects.find(*id)?;
        let object = &self.objects[ix];
        let snapshot = object.snapshot.some();
        Some(ObjectInfo {
            kind: object.kind,
            range: object.range,
            bytes: object.bytes,
            tiers: object.tiers,
            leases: object.leases,
            last_use: object.last_use,
            needed: self.facts(ix).live > 0,
            snapshot: snapshot.map(|ix| self.snapshots[ix].id),
        })
    }

    /// Those who need an object.
    pub(super) fn facts(&self, ix: ObjIx) -> Facts {
        let object = &self.objects[ix];
        if let Some(snapshot) = object.snapshot.some() {
            return self.snapshots[snapshot].facts();
        }
        let start = self
            .nodes
            .upwards(object.node)
            .find(|node| self.nodes[*node].start <= object.range.start);
        start.map_or_else(Facts::default, |node| self.nodes[node].facts)
    }
}
