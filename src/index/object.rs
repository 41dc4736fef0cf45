//! Objects: what the index knows of stored bytes, and where each stands in the order of leaving.

use super::{
    ObjectEntry, TierSet,
    ids::Ids,
    node::Facts,
    owners::Owners,
    shelf::{Class, Place, Shelves, move_place},
    slab::{Ix, NodeIx, ObjIx, Slab, SnapIx},
    tier_set::PerTier,
};
use crate::types::{Millis, NamespaceId, ObjectId, ObjectKind, TierKind, TokenRange};

pub(super) struct Object {
    pub(super) id: ObjectId,
    pub(super) range: TokenRange,
    pub(super) bytes: u64,
    pub(super) last_use: Millis,
    /// KV: the node with the last position that is known to be the object's.
    pub(super) node: NodeIx,
    /// KV: one past that position. Tokens of the object beyond it are not known yet.
    pub(super) reach: u32,
    /// State: its snapshot; `NONE` if that went while the state was leased.
    pub(super) snapshot: SnapIx,
    pub(super) leases: u32,
    /// Tells this object from another that used the same number before.
    pub(super) serial: u32,
    /// The number of its namespace.
    pub(super) owner: u32,
    pub(super) kind: ObjectKind,
    pub(super) tiers: TierSet,
    classes: PerTier<Class>,
}

/// All objects, and the shelves that they stand on.
pub(super) struct Objects {
    slab: Slab<ObjIx, Object>,
    ids: Ids<ObjIx>,
    pub(super) shelves: Shelves,
    pub(super) owners: Owners,
    /// Tiers that there are.
    configured: TierSet,
    serial: u32,
}

// === impl Object ===

impl Object {
    fn place(&self, ix: ObjIx) -> Place {
        Place::new(self.last_use, self.range.end, self.kind, ix)
    }

    /// What may become of the copy in `tier`, given those who need the object.
    fn class(&self, tier: TierKind, facts: Facts, configured: TierSet) -> Class {
        if !self.tiers.contains(tier) || self.leases > 0 || facts.held > 0 {
            return Class::Kept;
        }
        if facts.live == 0 {
            return Class::Orphan;
        }
        if !self.tiers.below(tier).is_empty() {
            return Class::Spare;
        }
        if facts.kept > 0 {
            return Class::Kept;
        }
        match self.kind {
            ObjectKind::State => Class::LastState,
            ObjectKind::Kv if facts.ordinary > 0 && !configured.below(tier).is_empty() => {
                Class::LastKv
            }
            ObjectKind::Kv => Class::Kept,
        }
    }
}

// === impl Objects ===

impl Objects {
    pub(super) fn new(configured: TierSet) -> Self {
        Self {
            slab: Slab::new(),
            ids: Ids::new(),
            shelves: Shelves::default(),
            owners: Owners::default(),
            configured,
            serial: 0,
        }
    }

    pub(super) fn reserve(&mut self, more: usize) {
        self.slab.reserve(more);
        self.ids.reserve(more);
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ObjIx, &Object)> {
        self.slab.iter()
    }

    pub(super) fn configured(&self) -> TierSet {
        self.configured
    }

    pub(super) fn find(&self, id: ObjectId) -> Option<ObjIx> {
        self.ids.find(word(&id), |ix| self.slab[ix].id == id)
    }

    /// The object with this number, if it is still the one with this serial.
    pub(super) fn get_mut(&mut self, ix: ObjIx, serial: u32) -> Option<&mut Object> {
        let same = self.slab.peek(ix)?.serial == serial;
        same.then(|| &mut self.slab[ix])
    }

    /// Takes in an object of a namespace that no snapshot needs yet.
    pub(super) fn insert(
        &mut self,
        namespace: NamespaceId,
        entry: &ObjectEntry,
        created: Millis,
    ) -> ObjIx {
        self.serial = self.serial.wrapping_add(1);
        let owner = self.owners.add(namespace, entry.kind, entry.bytes);
        let ix = self.slab.insert(Object {
            id: entry.id,
            range: entry.range,
            bytes: entry.bytes,
            last_use: created,
            node: NodeIx::NONE,
            reach: entry.range.start,
            snapshot: SnapIx::NONE,
            leases: 0,
            serial: self.serial,
            owner,
            kind: entry.kind,
            tiers: TierSet::EMPTY,
            classes: PerTier::default(),
        });
        self.ids.insert(word(&entry.id), ix);
        self.set_tiers(ix, entry.tiers);
        ix
    }

    /// Takes an object out of everything here; nodes and snapshots must not name it any more.
    pub(super) fn remove(&mut self, ix: ObjIx) -> Object {
        self.set_tiers(ix, TierSet::EMPTY);
        self.reclass(ix, Facts::default());
        let object = self.slab.remove(ix);
        self.owners.sub(&object);
        self.ids.remove(word(&object.id), ix);
        object
    }

    /// Sets where copies are. The classes must be set anew after it.
    pub(super) fn set_tiers(&mut self, ix: ObjIx, tiers: TierSet) {
        let object = &mut self.slab[ix];
        for tier in TierKind::ALL {
            let usage = &mut self.shelves[tier].usage;
            match (object.tiers.contains(tier), tiers.contains(tier)) {
                (false, true) => {
                    usage.objects += 1;
                    usage.bytes = usage.bytes.saturating_add(object.bytes);
                }
                (true, false) => {
                    usage.objects -= 1;
                    usage.bytes = usage.bytes.saturating_sub(object.bytes);
                }
                _ => {}
            }
        }
        object.tiers = tiers;
    }

    /// Sets the object's classes, given those who need it.
    pub(super) fn reclass(&mut self, ix: ObjIx, facts: Facts) {
        let object = &mut self.slab[ix];
        let place = object.place(ix);
        for tier in TierKind::ALL {
            let old = object.classes[tier];
            let new = object.class(tier, facts, self.configured);
            if old != new {
                object.classes[tier] = new;
                move_place(&mut self.shelves, tier, (old, place), (new, place));
            }
        }
    }

    /// Sets the classes and the last use of an object that is on no shelf yet; `put` takes its places.
    pub(super) fn settle(
        &mut self,
        ix: ObjIx,
        facts: Facts,
        used: Millis,
        put: &mut impl FnMut(TierKind, Class, Place),
    ) {
        let object = &mut self.slab[ix];
        object.last_use = used;
        let place = object.place(ix);
        for tier in object.tiers.iter() {
            let class = object.class(tier, facts, self.configured);
            object.classes[tier] = class;
            put(tier, class, place);
        }
    }

    /// Notes a use.
    pub(super) fn touch(&mut self, ix: ObjIx, now: Millis) {
        let object = &mut self.slab[ix];
        if now <= object.last_use {
            return;
        }
        let old = object.place(ix);
        object.last_use = now;
        let new = object.place(ix);
        for tier in object.tiers.iter() {
            let class = object.classes[tier];
            move_place(&mut self.shelves, tier, (class, old), (class, new));
        }
    }

    /// Whether the object's classes and places are what they should be.
    pub(super) fn check(&self, ix: ObjIx, facts: Facts) -> Result<(), String> {
        let object = &self[ix];
        if self.find(object.id) != Some(ix) {
            return Err(format!("object {} is not found by its id", object.id));
        }
        for tier in TierKind::ALL {
            let class = object.class(tier, facts, self.configured);
            if object.classes[tier] != class {
                let old = object.classes[tier];
                return Err(format!(
                    "object {} is {old:?} in {tier}, not {class:?}",
                    object.id
                ));
            }
            let set = self.shelves[tier].set(class);
            if set.is_some_and(|set| !set.contains(&object.place(ix))) {
                return Err(format!(
                    "object {} is not on its shelf in {tier}",
                    object.id
                ));
            }
        }
        Ok(())
    }

    /// Whether shelves hold nothing but what objects account for, and the sums are right.
    pub(super) fn check_sums(&self) -> Result<(), String> {
        if self.ids.len() != self.slab.len() {
            return Err("the table of objects has another size than the list".into());
        }
        self.owners
            .check(self.slab.iter().map(|(_, object)| object))?;
        for tier in TierKind::ALL {
            let shelf = &self.shelves[tier];
            let here = || self.slab.iter().filter(|(_, o)| o.tiers.contains(tier));
            let placed = here()
                .filter(|(_, o)| o.classes[tier] != Class::Kept)
                .count();
            let sets = [&shelf.orphans, &shelf.spare, &shelf.states, &shelf.kv];
            if sets
                .into_iter()
                .map(std::collections::BTreeSet::len)
                .sum::<usize>()
                != placed
            {
                return Err(format!("the shelf of {tier} holds what is not there"));
            }
            let bytes = here().map(|(_, o)| o.bytes).sum::<u64>();
            if shelf.usage.objects != here().count() as u64 || shelf.usage.bytes != bytes {
                return Err(format!("the usage of {tier} is wrong"));
            }
        }
        Ok(())
    }
}

impl std::ops::Index<ObjIx> for Objects {
    type Output = Object;

    fn index(&self, ix: ObjIx) -> &Object {
        &self.slab[ix]
    }
}

impl std::ops::IndexMut<ObjIx> for Objects {
    fn index_mut(&mut self, ix: ObjIx) -> &mut Object {
        &mut self.slab[ix]
    }
}

/// The first bytes of a digest.
fn word(id: &ObjectId) -> u64 {
    let (words, _) = id.0.as_chunks::<8>();
    words.first().copied().map_or(0, u64::from_le_bytes)
}
