//! Any sequence of calls, on the index and on the model: both say the same, and all that must hold
//! does.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{
    model::Model,
    ops::{Op, Shape, op},
    *,
};

/// Index and model, and leases of the former with what the latter thinks of them.
pub(super) struct Machine {
    pub(super) bed: Bed,
    pub(super) hashing: Hashing,
    pub(super) model: Model,
    pub(super) leases: Vec<(LeaseToken, Vec<(ObjectId, u64)>)>,
    /// The tokens of all objects ever made.
    pub(super) full: BTreeMap<ObjectId, Vec<TokenId>>,
    /// Times at which snapshots were made or touched.
    pub(super) times: BTreeSet<u64>,
    /// Objects that were lost once.
    pub(super) lost: BTreeSet<ObjectId>,
}

// === impl Machine ===

impl Machine {
    pub(super) fn new(tiers: TierSet, hashing: Hashing) -> Self {
        Self {
            bed: Bed::with_hashing(tiers, hashing),
            hashing,
            model: Model::new(tiers),
            leases: Vec::new(),
            full: BTreeMap::new(),
            times: BTreeSet::new(),
            lost: BTreeSet::new(),
        }
    }

    /// The n-th snapshot, if there is any.
    fn pick(&self, n: usize) -> Option<SnapshotId> {
        let count = self.model.snapshots.len();
        (count > 0).then(|| self.model.snapshots[n % count].new.id)
    }

    fn pick_object(&self, n: usize) -> Option<ObjectId> {
        let count = self.model.objects.len();
        self.model
            .objects
            .keys()
            .nth(n.checked_rem(count)?)
            .copied()
    }

    pub(super) fn step(&mut self, op: Op) {
        match op {
            Op::Insert {
                key: k,
                base,
                shape,
                tier,
                retain,
                durable,
                late,
            } => {
                let known = self.model.snapshots.iter().filter(|s| s.key == key(k));
                let known: Vec<&[TokenId]> = known.map(|s| s.tokens.as_slice()).collect();
                let start = base
                    .0
                    .checked_rem(known.len())
                    .map_or(&[][..], |n| known[n]);
                let start = &start[..base.1 % (start.len() + 1)];
                let tokens = join(start, &base.2);
                let new = self.shape(&key(k), &tokens, &shape, TierSet::EMPTY.with(tier));
                // Of two states with the same last use either may leave first: none is made.
                let mut created = new.created;
                if late {
                    created.0 /= 2;
                    while !self.times.insert(created.0) {
                        created.0 -= 1;
                    }
                }
                self.times.insert(new.created.0);
                let new = NewSnapshot {
                    retain,
                    durable,
                    created,
                    ..new
                };
                self.insert(&key(k), &tokens, new);
            }
            Op::Repeat(n) => {
                if let Some(id) = self.pick(n) {
                    let snapshot = self.model.snapshot(id).unwrap().clone();
                    let mut new = self.bed.new_snapshot(&snapshot.key, &snapshot.tokens);
                    assert_eq!(new.new_objects, []);
                    if n.is_multiple_of(2) {
                        new.id = id;
                    }
                    self.insert(&snapshot.key, &snapshot.tokens, new);
                }
            }
            Op::Lookup(k, tokens, max) => self.ask(&key(k), &tokens, max),
            Op::Touch(n) => {
                if let Some(id) = self.pick(n) {
                    let now = self.bed.tick();
                    self.times.insert(now.0);
                    assert!(self.bed.index.touch(&id, now));
                    self.model.touch(id, now);
                }
            }
            Op::Forget(n) => {
                if let Some(id) = self.pick(n) {
                    let removed = self.bed.index.forget_state(&id);
                    assert_eq!(sorted(removed), sorted(self.model.forget_state(id)));
                }
            }
            Op::Remove(n) => {
                if let Some(id) = self.pick(n) {
                    let removed = self.bed.index.remove_snapshot(&id);
                    assert_eq!(sorted(removed), sorted(self.model.remove_snapshot(id)));
                }
            }
            Op::Lose(n) => {
                if let Some(id) = self.pick_object(n) {
                    self.lost.insert(id);
                    let removed = self.bed.lose(&id);
                    assert_eq!(sorted(removed), sorted(self.model.lose(id)));
                }
            }
            Op::ForgetObject(n) => {
                if let Some(id) = self.pick_object(n) {
                    let free = self.model.objects[&id].leases == 0 && !self.model.is_needed(&id);
                    assert_eq!(self.bed.index.forget_object(&id).is_ok(), free);
                    if free {
                        self.model.objects.remove(&id);
                    }
                }
            }
            Op::SetTier(n, tier, there) => {
                if let Some(id) = self.pick_object(n) {
                    self.set_tier(id, tier, there);
                }
            }
            Op::Evict(tier, bytes) => self.evict(tier, bytes),
            Op::Lease(n) => {
                if let Some(id) = self.pick(n) {
                    self.lease(id);
                }
            }
            Op::Release(n) => {
                if let Some(n) = n.checked_rem(self.leases.len()) {
                    let (token, objects) = self.leases.swap_remove(n);
                    self.bed.index.release(token);
                    for (id, life) in objects {
                        let object = self.model.objects.get_mut(&id);
                        if let Some(object) = object.filter(|object| object.life == life) {
                            object.leases -= 1;
                        }
                    }
                }
            }
            Op::Pin(n, until) => {
                if let Some(id) = self.pick(n) {
                    let until = until.map(|ahead| Millis(self.bed.now + ahead));
                    self.bed
                        .index
                        .pin(&id, until.map_or(Pin::Named, Pin::Until));
                    let snapshot = self.model.snapshot_mut(id);
                    snapshot.names += u32::from(until.is_none());
                    snapshot.until = snapshot.until.max(until);
                }
            }
            Op::Unpin(n, kind) => {
                if let Some(id) = self.pick(n) {
                    let was = self.bed.index.unpin(&id, kind);
                    let snapshot = self.model.snapshot_mut(id);
                    match kind {
                        PinKind::Timed => assert_eq!(snapshot.until.take().is_some(), was),
                        PinKind::Named => {
                            assert_eq!(snapshot.names > 0, was);
                            snapshot.names = snapshot.names.saturating_sub(1);
                        }
                    }
                }
            }
            Op::SetRetain(n, retain) => {
                if let Some(id) = self.pick(n) {
                    assert!(self.bed.index.set_retain(&id, retain));
                    self.model.snapshot_mut(id).new.retain = retain;
                }
            }
            Op::SetDurable(n, durable) => {
                if let Some(id) = self.pick(n) {
                    assert!(self.bed.index.set_durable(&id, durable));
                    self.model.snapshot_mut(id).new.durable = durable;
                }
            }
            Op::Restart(n) => self.restart(n),
        }
    }

    /// A new snapshot whose KV is cut as `shape` says.
    fn shape(
        &mut self,
        key: &TreeKey,
        tokens: &[TokenId],
        shape: &Shape,
        tiers: TierSet,
    ) -> NewSnapshot {
        let boundary = tokens.len() as u32;
        let covered = self.model.covered(key, tokens) as u32;
        let start = covered.saturating_sub(shape.overlap);
        let mut new = self.bed.new_snapshot(key, tokens);
        new.state.tiers = tiers;
        if start >= boundary {
            return new;
        }
        new.new_objects.clear();
        // Old objects up to `start` or up to all that they cover: the new one begins at `start`.
        let upto = if shape.cut.is_multiple_of(2) {
            start
        } else {
            covered
        };
        new.kv = self.bed.index.kv_refs(key, tokens, upto);
        let mut at = new.kv.last().map_or(0, |part| part.range.end);
        assert_eq!(at, upto);
        let cut = (start + shape.cut).clamp(at, boundary);
        let full = join(tokens, &shape.beyond);
        for (end, prefix) in [(cut, &tokens[..cut as usize]), (boundary, &full[..])] {
            if end > at {
                let object = kv_of(key, prefix, if at == upto { start } else { at }, tiers);
                self.full.insert(object.id, prefix.to_vec());
                new.kv.push(part(&object, at, end));
                let known = new.new_objects.iter().any(|entry| entry.id == object.id);
                if !known {
                    new.new_objects.push(object);
                }
                at = end;
            }
        }
        new
    }

    fn insert(&mut self, key: &TreeKey, tokens: &[TokenId], new: NewSnapshot) {
        if tokens.is_empty() {
            let error = self.bed.index.insert(key, tokens, new).unwrap_err();
            assert!(matches!(error, IndexError::Empty));
            return;
        }
        let standing = self.model.lookup(key, tokens, tokens.len());
        let standing = standing.filter(|s| s.tokens.len() == tokens.len());
        let expected = standing.map_or(new.id, |standing| standing.new.id);
        let fresh = standing.is_none();
        let entries: Vec<ObjectId> = new.new_objects.iter().map(|entry| entry.id).collect();
        let inserted = self.bed.index.insert(key, tokens, new.clone()).unwrap();
        assert_eq!((inserted.snapshot, inserted.fresh), (expected, fresh));
        let snapshot = model::Snapshot {
            key: *key,
            tokens: tokens.to_vec(),
            new,
            names: 0,
            until: None,
        };
        let life = self.bed.tick().0;
        self.model.insert(snapshot, fresh, &self.full, life);
        let unused = entries
            .iter()
            .filter(|id| !self.model.objects.contains_key(id));
        assert!(unused.eq(inserted.unused.iter()));
    }

    fn set_tier(&mut self, id: ObjectId, tier: TierKind, there: bool) {
        if !there && self.model.objects[&id].entry.tiers.without(tier).is_empty() {
            self.lost.insert(id);
        }
        let removed = self.bed.index.set_tier(&id, tier, there);
        assert_eq!(
            sorted(removed),
            sorted(self.model.set_tier(id, tier, there))
        );
    }

    fn lease(&mut self, id: SnapshotId) {
        let token = self.bed.index.lease(&id).unwrap();
        let snapshot = self.model.snapshot(id).unwrap().clone();
        let mut objects = Vec::new();
        for (id, object) in &mut self.model.objects {
            if Model::needs(&snapshot, object) {
                object.leases += 1;
                objects.push((*id, object.life));
            }
        }
        let mut leased: Vec<ObjectId> = token.objects().collect();
        leased.sort();
        assert!(leased.iter().eq(objects.iter().map(|(id, _)| id)));
        self.leases.push((token, objects));
    }

    /// Compares the victims with those of the model, and acts on them as a caller would.
    fn evict(&mut self, tier: TierKind, bytes: u64) {
        let now = Millis(self.bed.now);
        self.model.expire_pins(now);
        let all = self.bed.index.victims(tier, u64::MAX, now);
        let mut rest = all.as_slice();
        for expected in self.model.victims(tier) {
            let (group, after) = rest
                .split_at_checked(expected.len())
                .expect("as many victims");
            rest = after;
            let mut group: Vec<_> = group.iter().map(|v| (v.object, v.action)).collect();
            group.sort_by_key(|(object, _)| *object);
            assert_eq!(group, expected);
        }
        assert_eq!(rest, []);

        let some = self.bed.index.victims(tier, bytes, now);
        assert_eq!(some, all[..some.len()]);
        let freed: u64 = some.iter().map(|victim| victim.bytes).sum();
        assert!(freed >= bytes || some.len() == all.len());
        for victim in some {
            self.whole();
            let id = victim.object;
            match (victim.action, victim.snapshot) {
                (Action::Drop, _) => {
                    let removed = self.bed.index.set_tier(&id, tier, false);
                    assert_eq!(removed, Removed::default());
                    self.model.set_tier(id, tier, false);
                }
                (Action::Demote, _) => {
                    let lower = self.bed.tiers.below(tier).iter().next().unwrap();
                    self.set_tier(id, lower, true);
                    self.set_tier(id, tier, false);
                }
                (Action::Forget, Some(snapshot)) => {
                    let removed = self.bed.index.forget_state(&snapshot);
                    assert_eq!(sorted(removed), sorted(self.model.forget_state(snapshot)));
                }
                (Action::Forget, None) => {
                    self.bed.index.forget_object(&id).unwrap();
                    self.model.objects.remove(&id);
                }
            }
        }
    }

    /// Another index from the manifests, in another order, as after a restart of the daemon.
    fn restart(&mut self, order: usize) {
        let old = std::mem::replace(&mut self.model, Model::new(self.bed.tiers));
        self.bed.index = Index::with_hashing(VecLog::new(), self.bed.tiers, self.hashing);
        self.leases.clear();
        let mut snapshots = old.snapshots;
        let count = snapshots.len().max(1);
        snapshots.rotate_left(order % count);
        if order.is_multiple_of(2) {
            snapshots.reverse();
        }
        for snapshot in snapshots {
            let ids = snapshot.new.kv.iter().map(|part| part.object);
            let entries: Option<Vec<_>> = ids.map(|id| old.objects.get(&id)).collect();
            let (Some(mut entries), Some(state)) =
                (entries, old.objects.get(&snapshot.new.state.id))
            else {
                continue;
            };
            entries.dedup_by_key(|object| object.entry.id);
            let mut new_objects: Vec<ObjectEntry> = Vec::new();
            for object in entries {
                if !new_objects.contains(&object.entry) {
                    new_objects.push(object.entry);
                }
            }
            let new = NewSnapshot {
                state: state.entry,
                new_objects,
                ..snapshot.new
            };
            self.insert(&snapshot.key, &snapshot.tokens, new);
        }
    }

    fn ask(&self, key: &TreeKey, tokens: &[TokenId], max: u32) {
        let index = &self.bed.index;
        let expected = self.model.lookup(key, tokens, max as usize);
        let hit = index.lookup(key, tokens, max);
        let found = hit.as_ref().map(|hit| (hit.snapshot, hit.boundary));
        let boundary = |s: &model::Snapshot| (s.new.id, s.tokens.len() as u32);
        assert_eq!(found, expected.map(boundary));
        if let (Some(hit), Some(expected)) = (hit, expected) {
            assert_eq!(hit.state, expected.new.state.id);
            self.check_kv(key, tokens, &hit.kv, hit.boundary);
        }
        let standing = expected.filter(|s| s.tokens.len() == max as usize);
        assert_eq!(
            index.has_snapshot(key, tokens, max),
            standing.map(|s| s.new.id)
        );
        let coverage = index.coverage(key, tokens);
        assert_eq!(coverage.kv as usize, self.model.covered(key, tokens));
        assert!(coverage.matched as usize >= self.model.matched(key, tokens));
        let deepest = self.model.lookup(key, tokens, tokens.len());
        assert_eq!(coverage.deepest, deepest.map(boundary));
        let upto = coverage.kv.min(max);
        self.check_kv(key, tokens, &index.kv_refs(key, tokens, max), upto);
    }

    /// The references lead from 0 to `upto`, through objects that exist and hold these tokens.
    fn check_kv(&self, key: &TreeKey, tokens: &[TokenId], kv: &[KvRef], upto: u32) {
        let mut at = 0;
        for part in kv {
            assert_eq!(part.range.start, at);
            at = part.range.end;
            let object = &self.model.objects[&part.object];
            assert_eq!((object.key, object.entry.range), (*key, part.object_range));
            assert!(!object.entry.tiers.is_empty());
            assert!(part.object_range.covers(part.range) && !part.range.is_empty());
            assert_eq!(object.tokens[..at as usize], tokens[..at as usize]);
        }
        assert_eq!(at, upto);
    }

    fn check(&self) {
        let index = &self.bed.index;
        check_spare(index);
        assert_eq!(index.stats().snapshots, self.model.snapshots.len() as u64);
        assert_eq!(index.stats().objects, self.model.objects.len() as u64);
        for snapshot in &self.model.snapshots {
            let (id, boundary) = (snapshot.new.id, snapshot.tokens.len() as u32);
            self.ask(&snapshot.key, &snapshot.tokens, boundary);
            let info = index.snapshot(&id).unwrap();
            assert_eq!((info.key, info.boundary), (snapshot.key, boundary));
            assert_eq!(
                (info.names, info.pinned_until),
                (snapshot.names, snapshot.until)
            );
            let parent = self
                .model
                .lookup(&snapshot.key, &snapshot.tokens, boundary as usize - 1);
            assert_eq!(info.parent, parent.map(|parent| parent.new.id));
            // What a manifest names is there, whichever object a lookup would choose.
            let named = snapshot.new.kv.iter().map(|part| part.object);
            for object in named.chain([snapshot.new.state.id]) {
                assert!(index.object(&object).is_some() || self.lost.contains(&object));
            }
            let mut read = Vec::new();
            assert!(index.read_tokens(&id, &mut read));
            assert_eq!(read, snapshot.tokens);
        }
        for (id, object) in &self.model.objects {
            let info = index.object(id).unwrap();
            assert_eq!(
                (info.tiers, info.leases),
                (object.entry.tiers, object.leases)
            );
            assert_eq!(info.last_use, object.last_use);
            assert_eq!(info.needed, self.model.is_needed(id));
        }
    }
}

fn run_machine(tiers: TierSet, hashing: Hashing, ops: Vec<Op>) {
    let mut machine = Machine::new(tiers, hashing);
    machine.bed.now = 1000;
    for op in ops {
        machine.step(op);
        machine.check();
    }
    for (lease, _) in std::mem::take(&mut machine.leases) {
        machine.bed.index.release(lease);
    }
    let ids: Vec<ObjectId> = machine.model.objects.keys().copied().collect();
    for id in ids {
        machine.bed.index.lose_object(&id);
        machine.bed.index.check().unwrap();
    }
    assert_eq!(machine.bed.index.stats(), Stats::default());
    assert_eq!(
        machine.bed.index.log().released(),
        machine.bed.index.log().len()
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn index_and_model_agree(
        all_tiers in any::<bool>(),
        collide in any::<bool>(),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let tiers = if all_tiers { TierKind::ALL.into_iter().collect() } else { ram_and_disk() };
        let collide = collide.then_some(Hashing { head: |_| 0, child: |_, _| 0 });
        run_machine(tiers, collide.unwrap_or_default(), ops);
    }
}
