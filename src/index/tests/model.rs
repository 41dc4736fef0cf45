//! The index as it would be without a tree: lists of snapshots and objects with all their tokens,
//! and every question answered by looking at all of them.

use std::collections::BTreeMap;

use super::*;

#[derive(Clone)]
pub(super) struct Object {
    pub(super) key: TreeKey,
    /// KV: tokens from 0 to the end of its range. State: those of its boundary.
    pub(super) tokens: Vec<TokenId>,
    pub(super) entry: ObjectEntry,
    /// KV: how many of the tokens the index was shown.
    pub(super) reach: usize,
    pub(super) last_use: Millis,
    pub(super) leases: u32,
    /// Differs between objects of the same address at different times.
    pub(super) life: u64,
}

#[derive(Clone)]
pub(super) struct Snapshot {
    pub(super) key: TreeKey,
    pub(super) tokens: Vec<TokenId>,
    pub(super) new: NewSnapshot,
    pub(super) names: u32,
    pub(super) until: Option<Millis>,
}

#[derive(Clone)]
pub(super) struct Model {
    pub(super) tiers: TierSet,
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) objects: BTreeMap<ObjectId, Object>,
}

/// A victim that the model expects, and what it is sorted by.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Place {
    last_use: Millis,
    shallowness: u32,
    kind: ObjectKind,
    object: ObjectId,
}

fn shared(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

// === impl Model ===

impl Model {
    pub(super) fn new(tiers: TierSet) -> Self {
        Self {
            tiers,
            snapshots: Vec::new(),
            objects: BTreeMap::new(),
        }
    }

    pub(super) fn snapshot(&self, id: SnapshotId) -> Option<&Snapshot> {
        self.snapshots.iter().find(|snapshot| snapshot.new.id == id)
    }

    pub(super) fn snapshot_mut(&mut self, id: SnapshotId) -> &mut Snapshot {
        let found = self.snapshots.iter_mut().find(|s| s.new.id == id);
        found.unwrap()
    }

    /// Whether a snapshot needs an object: its state, or KV of at least one of its tokens.
    pub(super) fn needs(snapshot: &Snapshot, object: &Object) -> bool {
        if object.entry.kind == ObjectKind::State {
            return snapshot.new.state.id == object.entry.id;
        }
        let known = &object.tokens[..object.reach];
        snapshot.key == object.key
            && shared(known, &snapshot.tokens) > object.entry.range.start as usize
    }

    pub(super) fn needing(&self, object: &Object) -> Vec<&Snapshot> {
        self.snapshots
            .iter()
            .filter(|snapshot| Self::needs(snapshot, object))
            .collect()
    }

    pub(super) fn is_needed(&self, id: &ObjectId) -> bool {
        !self.needing(&self.objects[id]).is_empty()
    }

    /// How many leading tokens have KV.
    pub(super) fn covered(&self, key: &TreeKey, tokens: &[TokenId]) -> usize {
        let mut at = 0;
        loop {
            let further = self.objects.values().filter(|object| {
                object.key == *key
                    && object.entry.kind == ObjectKind::Kv
                    && object.entry.range.start as usize <= at
            });
            let reach = further
                .map(|object| shared(&object.tokens[..object.reach], tokens))
                .max()
                .unwrap_or(0);
            if reach <= at {
                return at;
            }
            at = reach;
        }
    }

    /// Leading tokens that something is known of.
    pub(super) fn matched(&self, key: &TreeKey, tokens: &[TokenId]) -> usize {
        let snapshots = self
            .snapshots
            .iter()
            .filter(|snapshot| snapshot.key == *key);
        let objects = self.objects.values();
        let objects = objects.filter(|o| o.key == *key && o.entry.kind == ObjectKind::Kv);
        snapshots
            .map(|snapshot| shared(&snapshot.tokens, tokens))
            .chain(objects.map(|object| shared(&object.tokens[..object.reach], tokens)))
            .max()
            .unwrap_or(0)
    }

    pub(super) fn lookup(
        &self,
        key: &TreeKey,
        tokens: &[TokenId],
        max: usize,
    ) -> Option<&Snapshot> {
        self.snapshots
            .iter()
            .filter(|snapshot| {
                snapshot.key == *key
                    && snapshot.tokens.len() <= max
                    && tokens.starts_with(&snapshot.tokens)
            })
            .max_by_key(|snapshot| snapshot.tokens.len())
    }

    pub(super) fn touch(&mut self, id: SnapshotId, now: Millis) {
        let Some(snapshot) = self.snapshot(id).cloned() else {
            return;
        };
        for object in self.objects.values_mut() {
            if Self::needs(&snapshot, object) {
                object.last_use = object.last_use.max(now);
            }
        }
    }

    /// Takes in what the index said it took in. `full` has the tokens of every given object.
    pub(super) fn insert(
        &mut self,
        snapshot: Snapshot,
        fresh: bool,
        full: &BTreeMap<ObjectId, Vec<TokenId>>,
        life: u64,
    ) {
        let new = &snapshot.new;
        let object = |entry: &ObjectEntry, tokens: Vec<TokenId>| Object {
            key: snapshot.key,
            tokens,
            entry: *entry,
            reach: 0,
            last_use: new.created,
            leases: 0,
            life,
        };
        if fresh {
            let state = object(&new.state, snapshot.tokens.clone());
            self.objects.entry(new.state.id).or_insert(state);
            for part in &new.kv {
                let given = new.new_objects.iter().find(|entry| entry.id == part.object);
                if let Some(given) = given {
                    let made = object(given, full[&part.object].clone());
                    self.objects.entry(part.object).or_insert(made);
                }
                let known = self.objects.get_mut(&part.object).unwrap();
                known.reach = known.reach.max(part.range.end as usize);
            }
        }
        for entry in new.new_objects.iter().chain([&new.state]) {
            if let Some(known) = self.objects.get_mut(&entry.id) {
                known.entry.tiers = known.entry.tiers.union(entry.tiers);
            }
        }
        if fresh {
            let (id, created) = (new.id, new.created);
            self.snapshots.push(snapshot);
            self.touch(id, created);
        }
    }

    fn end(&mut self, id: SnapshotId, removed: &mut Removed) -> Option<Snapshot> {
        let at = self.snapshots.iter().position(|s| s.new.id == id)?;
        let snapshot = self.snapshots.remove(at);
        removed.snapshots.push(id);
        let state = snapshot.new.state.id;
        if self.objects[&state].leases == 0 {
            self.objects.remove(&state);
            removed.objects.push(state);
        }
        Some(snapshot)
    }

    pub(super) fn forget_state(&mut self, id: SnapshotId) -> Removed {
        let mut removed = Removed::default();
        self.end(id, &mut removed);
        removed
    }

    pub(super) fn remove_snapshot(&mut self, id: SnapshotId) -> Removed {
        let mut removed = Removed::default();
        if let Some(snapshot) = self.end(id, &mut removed) {
            let objects = self.objects.values();
            let orphans: Vec<ObjectId> = objects
                .filter(|object| object.entry.kind == ObjectKind::Kv && object.leases == 0)
                .filter(|object| Self::needs(&snapshot, object))
                .map(|object| object.entry.id)
                .filter(|id| !self.is_needed(id))
                .collect();
            for id in orphans {
                self.objects.remove(&id);
                removed.objects.push(id);
            }
        }
        removed
    }

    pub(super) fn lose(&mut self, id: ObjectId) -> Removed {
        let mut removed = Removed::default();
        let Some(object) = self.objects.get_mut(&id) else {
            return removed;
        };
        object.leases = 0;
        let of_state = self.snapshots.iter().find(|s| s.new.state.id == id);
        if let Some(snapshot) = of_state.map(|snapshot| snapshot.new.id) {
            self.end(snapshot, &mut removed);
            return removed;
        }
        self.objects.remove(&id);
        removed.objects.push(id);
        let died: Vec<SnapshotId> = self
            .snapshots
            .iter()
            .filter(|s| self.covered(&s.key, &s.tokens) < s.tokens.len())
            .map(|snapshot| snapshot.new.id)
            .collect();
        for id in died {
            self.end(id, &mut removed);
        }
        removed
    }

    pub(super) fn set_tier(&mut self, id: ObjectId, tier: TierKind, there: bool) -> Removed {
        if let Some(object) = self.objects.get_mut(&id) {
            let tiers = object.entry.tiers;
            let tiers = if there {
                tiers.with(tier)
            } else {
                tiers.without(tier)
            };
            if tiers.is_empty() {
                return self.lose(id);
            }
            object.entry.tiers = tiers;
        }
        Removed::default()
    }

    pub(super) fn expire_pins(&mut self, now: Millis) {
        for snapshot in &mut self.snapshots {
            snapshot.until = snapshot.until.filter(|until| *until > now);
        }
    }

    /// The victims of a tier, in groups: within one any order will do.
    pub(super) fn victims(&self, tier: TierKind) -> Vec<Vec<(ObjectId, Action)>> {
        let (mut orphans, mut spare, mut last) = (Vec::new(), Vec::new(), Vec::new());
        for object in self.objects.values() {
            let needing = self.needing(object);
            let held = needing.iter().any(|snapshot| snapshot.until.is_some());
            if !object.entry.tiers.contains(tier) || object.leases > 0 || held {
                continue;
            }
            let place = Place {
                last_use: object.last_use,
                shallowness: u32::MAX - object.entry.range.end,
                kind: object.entry.kind,
                object: object.entry.id,
            };
            let kept = needing.iter().any(|snapshot| {
                let promised = snapshot.new.retain == Retain::Promised && !snapshot.new.durable;
                snapshot.names > 0 || promised
            });
            let worth_writing = needing.iter().any(|s| s.new.retain != Retain::Transient);
            let lower_exists = !self.tiers.below(tier).is_empty();
            if needing.is_empty() {
                orphans.push(place);
            } else if !object.entry.tiers.below(tier).is_empty() {
                spare.push(place);
            } else if kept {
                continue;
            } else if place.kind == ObjectKind::State || (worth_writing && lower_exists) {
                last.push(place);
            }
        }
        let mut groups = Vec::new();
        let mut model = self.clone();
        for mut places in [orphans, spare, last] {
            places.sort();
            let same = |a: &Place, b: &Place| {
                (a.last_use, a.shallowness, a.kind) == (b.last_use, b.shallowness, b.kind)
            };
            for tied in places.chunk_by(same) {
                let mut group: Vec<_> = tied
                    .iter()
                    .map(|place| (place.object, self.action(place, tier)))
                    .collect();
                group.sort_by_key(|(object, _)| *object);
                groups.push(group);
                for place in tied {
                    groups.extend(model.forget(place, self.action(place, tier), tier));
                }
            }
        }
        groups
    }

    fn action(&self, place: &Place, tier: TierKind) -> Action {
        let object = &self.objects[&place.object];
        let needing = self.needing(object);
        let transient = needing.iter().all(|s| s.new.retain == Retain::Transient);
        if !object.entry.tiers.below(tier).is_empty() {
            Action::Drop
        } else if transient || self.tiers.below(tier).is_empty() {
            Action::Forget
        } else {
            Action::Demote
        }
    }

    /// Forgets a state that the tier is asked to forget; says which KV nothing needs after it.
    fn forget(
        &mut self,
        place: &Place,
        action: Action,
        tier: TierKind,
    ) -> Option<Vec<(ObjectId, Action)>> {
        let owner = self
            .snapshots
            .iter()
            .find(|s| s.new.state.id == place.object);
        let owner = owner.filter(|_| action == Action::Forget)?.clone();
        self.forget_state(owner.new.id);
        let orphans = self.objects.values().filter(|object| {
            object.entry.kind == ObjectKind::Kv
                && Self::needs(&owner, object)
                && self.needing(object).is_empty()
                && object.leases == 0
                && object.entry.tiers.contains(tier)
                && object.entry.tiers.below(tier).is_empty()
        });
        let group: Vec<_> = orphans.map(|o| (o.entry.id, Action::Forget)).collect();
        (!group.is_empty()).then_some(group)
    }
}
