//! Whose bytes objects are: sums for each namespace, kept as objects come and go.

use hashbrown::HashMap;

use super::{
    Index,
    object::Object,
    slab::{Ix, NodeIx},
};
use crate::types::{Millis, NamespaceId, ObjectId, ObjectKind, SnapshotId, TierKind, Tokens};

/// What a namespace holds. An object counts once, in however many tiers it has a copy and however
/// many snapshots share it.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub struct NamespaceUsage {
    /// States: as many as snapshots, beside states that go once their leases end.
    pub snapshots: u64,
    /// States and KV.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// All namespaces that hold something, by number.
#[derive(Debug, Default)]
pub(super) struct Owners {
    numbers: HashMap<NamespaceId, u32>,
    all: Vec<(NamespaceId, NamespaceUsage)>,
    free: Vec<u32>,
    /// Bytes of all.
    bytes: u64,
}

// === impl Owners ===

impl Owners {
    /// An object comes; the number of its namespace.
    pub(super) fn add(&mut self, namespace: NamespaceId, kind: ObjectKind, bytes: u64) -> u32 {
        let number = match self.numbers.get(&namespace) {
            Some(number) => *number,
            None => {
                let fresh = (namespace, NamespaceUsage::default());
                let number = match self.free.pop() {
                    Some(number) => number,
                    None => {
                        self.all.push(fresh);
                        (self.all.len() - 1) as u32
                    }
                };
                if let Some(place) = self.all.get_mut(number as usize) {
                    *place = fresh;
                }
                self.numbers.insert(namespace, number);
                number
            }
        };
        if let Some((_, usage)) = self.all.get_mut(number as usize) {
            usage.objects += 1;
            usage.bytes = usage.bytes.saturating_add(bytes);
            usage.snapshots += u64::from(kind == ObjectKind::State);
            self.bytes = self.bytes.saturating_add(bytes);
        }
        number
    }

    /// It goes.
    pub(super) fn sub(&mut self, object: &Object) {
        let Some((namespace, usage)) = self.all.get_mut(object.owner as usize) else {
            return;
        };
        self.bytes = self.bytes.saturating_sub(object.bytes);
        usage.objects -= 1;
        usage.bytes = usage.bytes.saturating_sub(object.bytes);
        usage.snapshots -= u64::from(object.kind == ObjectKind::State);
        if usage.objects == 0 {
            self.numbers.remove(namespace);
            self.free.push(object.owner);
        }
    }

    pub(super) fn number(&self, namespace: &NamespaceId) -> Option<u32> {
        self.numbers.get(namespace).copied()
    }

    fn usage(&self, number: u32) -> NamespaceUsage {
        let found = self.all.get(number as usize);
        found.map(|(_, usage)| *usage).unwrap_or_default()
    }

    /// Whether the sums are those of the objects.
    pub(super) fn check<'a>(
        &self,
        objects: impl Iterator<Item = &'a Object>,
    ) -> Result<(), String> {
        let mut sums: HashMap<u32, NamespaceUsage> = HashMap::new();
        for object in objects {
            let sum = sums.entry(object.owner).or_default();
            sum.objects += 1;
            sum.bytes += object.bytes;
            sum.snapshots += u64::from(object.kind == ObjectKind::State);
        }
        if self.bytes != sums.values().map(|sum| sum.bytes).sum::<u64>() {
            return Err("the bytes of all namespaces are wrong".into());
        }
        if sums.len() != self.numbers.len() {
            return Err("a namespace is counted that holds nothing, or the other way round".into());
        }
        match sums
            .iter()
            .find(|(number, sum)| self.usage(**number) != **sum)
        {
            Some((number, _)) => Err(format!("the usage of namespace {number} is wrong")),
            None => Ok(()),
        }
    }
}

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// What a namespace holds, of all models.
    #[must_use]
    pub fn usage_of(&self, namespace: &NamespaceId) -> NamespaceUsage {
        let owners = &self.objects.owners;
        let number = owners.number(namespace);
        number.map_or_else(NamespaceUsage::default, |number| owners.usage(number))
    }

    /// The namespaces that hold something, in no order.
    pub fn namespaces(&self) -> impl Iterator<Item = (NamespaceId, NamespaceUsage)> {
        let owners = &self.objects.owners;
        let numbers = owners.numbers.iter();
        numbers.map(|(namespace, number)| (*namespace, owners.usage(*number)))
    }

    /// How many namespaces hold something, and the bytes of all.
    #[must_use]
    pub fn held(&self) -> (u64, u64) {
        let owners = &self.objects.owners;
        (owners.numbers.len() as u64, owners.bytes)
    }

    /// Some snapshot of each of these namespaces that has one.
    pub fn some_of(&self, wanted: &[NamespaceId]) -> HashMap<NamespaceId, SnapshotId> {
        let mut found = HashMap::new();
        for (key, root) in &self.trees {
            if wanted.contains(&key.namespace) && !found.contains_key(&key.namespace) {
                found.extend(self.first_below(*root).map(|id| (key.namespace, id)));
            }
        }
        found
    }

    fn first_below(&self, root: NodeIx) -> Option<SnapshotId> {
        let mut next = Some(root);
        while let Some(ix) = next {
            if let Some(snapshot) = self.nodes[ix].snapshot.some() {
                return Some(self.snapshots[snapshot].id);
            }
            let mut below = self.nodes.children(ix);
            next = below.find(|child| self.nodes[*child].facts.live > 0);
        }
        None
    }

    /// Up to so many snapshots of a namespace that may be given up, in the order in which they
    /// should: least recently used first, the deepest first among equals. Never one that is leased,
    /// pinned or promised, nor one whose state is not in the lowest tier that there is; if `durable`,
    /// nor one that is not. Timed pins that are over at `now` count no more.
    pub fn spare_snapshots(
        &mut self,
        namespace: &NamespaceId,
        now: Millis,
        durable: bool,
        at_most: usize,
    ) -> Vec<SnapshotId> {
        self.expire_pins(now);
        self.spare(namespace, durable, at_most)
    }

    pub(super) fn spare(
        &self,
        namespace: &NamespaceId,
        durable: bool,
        at_most: usize,
    ) -> Vec<SnapshotId> {
        let number = self.objects.owners.number(namespace);
        let lowest = self.objects.configured().iter().last();
        let Some((number, lowest)) = number.zip(lowest) else {
            return Vec::new();
        };
        let places = self.objects.shelves[lowest].states.iter();
        let ours = places.filter_map(|place| {
            let object = &self.objects[place.object()];
            let snapshot = object.snapshot.some().filter(|_| object.owner == number)?;
            let snapshot = &self.snapshots[snapshot];
            (snapshot.durable || !durable).then_some(snapshot.id)
        });
        ours.take(at_most).collect()
    }

    /// When the snapshots of a namespace that only a timed pin keeps were last used, the first first.
    #[must_use]
    pub fn kept_for_a_time(&self, namespace: &NamespaceId) -> Vec<(Millis, u64)> {
        let number = self.objects.owners.number(namespace);
        let pinned = self.timed.iter().filter_map(|(_, ix)| {
            let snapshot = &self.snapshots[*ix];
            let state = &self.objects[snapshot.state];
            if snapshot.names > 0 || Some(state.owner) != number {
                return None;
            }
            let info = self.snapshot(&snapshot.id)?;
            Some((
                info.last_use,
                info.state_bytes.saturating_add(info.kv_bytes),
            ))
        });
        let mut pinned: Vec<_> = pinned.collect();
        pinned.sort_unstable();
        pinned
    }

    /// KV of a namespace that no snapshot needs, the least recently used first.
    #[must_use]
    pub fn spare_kv(&self, namespace: &NamespaceId) -> Vec<ObjectId> {
        let number = self.objects.owners.number(namespace);
        let mut found = Vec::new();
        for tier in TierKind::ALL {
            let orphans = self.objects.shelves[tier].orphans.iter();
            let orphans = orphans.map(|place| &self.objects[place.object()]);
            let ours = orphans.filter(|object| {
                // Once, though it may stand on several shelves.
                let first = object.tiers.iter().next() == Some(tier);
                Some(object.owner) == number && object.kind == ObjectKind::Kv && first
            });
            found.extend(ours.map(|object| object.id));
        }
        found
    }
}
