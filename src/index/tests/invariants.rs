//! What must hold whatever happened before, one property each, asked of the index from outside and
//! compared with lists of everything.
//!
//! `machine` shows that index and model agree on every call; here the properties that both are there
//! for stand by their names, so that a change of both at once is noticed. Counts, leases, the two
//! orders of last use and moves between tiers have one owner and no lock in the index: any history
//! of calls is one after the other, and a search over histories covers what a search over
//! interleavings would.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{
    machine::Machine,
    ops::{Op, op},
    *,
};

// === impl Machine ===

impl Machine {
    /// Every snapshot that can be found has its state and the KV of all its tokens, each in some
    /// tier.
    pub(super) fn whole(&self) {
        let index = &self.bed.index;
        let copied = |id: &ObjectId| index.object(id).is_some_and(|info| !info.tiers.is_empty());
        for id in index.iter() {
            let hit = index.hit(&id).expect("what is listed can be restored");
            assert!(copied(&hit.state), "{id} lacks its state");
            let mut at = 0;
            for part in &hit.kv {
                assert!(
                    part.range.start == at && !part.range.is_empty(),
                    "{id} has a hole at {at}"
                );
                assert!(part.object_range.covers(part.range));
                assert!(copied(&part.object), "{id} lacks KV of {}", part.range);
                at = part.range.end;
            }
            assert_eq!(at, hit.boundary, "{id} lacks KV at its end");
            let mut tokens = Vec::new();
            assert!(index.read_tokens(&id, &mut tokens));
            let info = index.snapshot(&id).unwrap();
            let found = index
                .lookup(&info.key, &tokens, u32::MAX)
                .map(|hit| hit.snapshot);
            assert_eq!(
                found,
                Some(id),
                "a prompt that is all of {id} finds another"
            );
        }
    }

    /// Everything that could leave a tier now.
    fn victims(&mut self, tier: TierKind, bytes: u64) -> Vec<Victim> {
        let now = Millis(self.bed.now);
        self.model.expire_pins(now);
        self.bed.index.victims(tier, bytes, now)
    }

    /// Whether some snapshot keeps what may be its last copy.
    fn keeps(snapshot: &model::Snapshot) -> bool {
        let promised = snapshot.new.retain == Retain::Promised && !snapshot.new.durable;
        snapshot.names > 0 || promised
    }

    /// Whether a snapshot must be written before its last copies go.
    fn must_be_written(snapshot: &model::Snapshot) -> bool {
        snapshot.new.retain != Retain::Transient
    }
}

/// The history so far, and what happens next; `look` sees each state before and after.
fn histories(look: impl Fn(&mut Machine, &Op)) -> impl Fn(TierSet, Vec<Op>) {
    move |tiers, ops| {
        let mut machine = Machine::new(tiers, Hashing::default());
        machine.bed.now = 1000;
        for op in ops {
            look(&mut machine, &op);
            machine.step(op);
            machine.whole();
        }
        look(&mut machine, &Op::Evict(TierKind::Ram, u64::MAX));
        for (lease, _) in std::mem::take(&mut machine.leases) {
            machine.bed.index.release(lease);
        }
    }
}

fn tiers_of(all: bool) -> TierSet {
    if all {
        TierKind::ALL.into_iter().collect()
    } else {
        ram_and_disk()
    }
}

/// More evictions than elsewhere.
fn history() -> impl Strategy<Value = Vec<Op>> {
    let tier = prop::sample::select(vec![TierKind::Ram, TierKind::Disk]);
    let evict = (tier, 0..4000_u64).prop_map(|(tier, bytes)| Op::Evict(tier, bytes));
    prop::collection::vec(prop_oneof![5 => op(), 1 => evict], 1..50)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// After every call, and between any two steps of an eviction.
    #[test]
    fn no_reachable_snapshot_ever_lacks_a_piece(all in any::<bool>(), ops in history()) {
        histories(|machine, _| machine.whole())(tiers_of(all), ops);
    }

    /// Of two of one sort on one path the deeper leaves first, unless it was used after the other.
    #[test]
    fn leaves_leave_before_parents(all in any::<bool>(), ops in history()) {
        let look = |machine: &mut Machine, op: &Op| {
            let Op::Evict(tier, _) = op else { return };
            let victims = machine.victims(*tier, u64::MAX);
            let objects = &machine.model.objects;
            for (at, first) in victims.iter().enumerate() {
                for second in &victims[at + 1..] {
                    if (first.kind, first.action) != (second.kind, second.action) {
                        continue;
                    }
                    let (upper, lower) = (&objects[&first.object], &objects[&second.object]);
                    let below = upper.key == lower.key
                        && lower.entry.range.start >= upper.entry.range.end
                        && lower.entry.range.end > upper.entry.range.end
                        && lower.tokens.starts_with(&upper.tokens);
                    assert!(
                        !below || upper.last_use < lower.last_use,
                        "{first:?} leaves {tier} before {second:?} below it"
                    );
                }
            }
        };
        histories(look)(tiers_of(all), ops);
    }

    /// Before anything that a snapshot needs; and nothing else leaves while it is enough.
    #[test]
    fn kv_beyond_the_last_live_state_leaves_first(all in any::<bool>(), ops in history()) {
        let look = |machine: &mut Machine, op: &Op| {
            let Op::Evict(tier, bytes) = op else { return };
            let victims = machine.victims(*tier, u64::MAX);
            let needed = |victim: &Victim| machine.model.is_needed(&victim.object);
            let first = victims.iter().position(needed).unwrap_or(victims.len());
            let free: Vec<ObjectId> = victims[..first].iter().map(|victim| victim.object).collect();
            for (id, object) in &machine.model.objects {
                let here = object.entry.tiers.contains(*tier) && object.leases == 0;
                let is_free = here && !machine.model.is_needed(id);
                assert_eq!(free.contains(id), is_free, "{id} in {tier}");
            }
            let enough: u64 = victims[..first].iter().map(|victim| victim.bytes).sum();
            let asked = machine.victims(*tier, (*bytes).min(enough));
            assert!(asked.len() <= first);
        };
        histories(look)(tiers_of(all), ops);
    }

    /// Neither chosen, nor gone when all that is chosen was acted on.
    #[test]
    fn a_pinned_leased_promised_or_unwritten_last_copy_never_leaves(
        all in any::<bool>(), ops in history(),
    ) {
        let look = |machine: &mut Machine, op: &Op| {
            let Op::Evict(tier, bytes) = op else { return };
            let victims = machine.victims(*tier, u64::MAX);
            let model = &machine.model;
            let lower = !machine.bed.tiers.below(*tier).is_empty();
            for victim in &victims {
                let object = &model.objects[&victim.object];
                let needing = model.needing(object);
                assert_eq!(object.leases, 0, "{victim:?} is leased");
                assert!(needing.iter().all(|it| it.until.is_none()), "{victim:?} is pinned");
                if object.entry.tiers.below(*tier).is_empty() {
                    assert!(!needing.iter().any(|it| Machine::keeps(it)), "{victim:?} is kept");
                    let unwritten = needing.iter().any(|it| Machine::must_be_written(it));
                    let forgotten = victim.action == Action::Forget && lower;
                    // KV that follows the last state that needed it was needed until then.
                    let follows = victim.snapshot.is_none() && victim.kind == ObjectKind::Kv;
                    assert!(!(forgotten && unwritten) || follows, "{victim:?} was never written");
                } else {
                    assert_eq!(victim.action, Action::Drop);
                }
            }
            // What of it stays, and where, when the machine acts.
            let stays: BTreeMap<ObjectId, (TierSet, bool)> = model
                .objects
                .iter()
                .filter_map(|(id, object)| {
                    let needing = model.needing(object);
                    let held = object.leases > 0 || needing.iter().any(|it| it.until.is_some());
                    let kept = needing.iter().any(|it| Machine::keeps(it));
                    (held || kept).then_some((*id, (object.entry.tiers, held)))
                })
                .collect();
            machine.step(Op::Evict(*tier, *bytes));
            for (id, (before, held)) in stays {
                let now = machine.bed.index.object(&id).map(|info| info.tiers);
                let now = now.unwrap_or_else(|| panic!("{id} left {tier}, and was to stay"));
                let lost = before.iter().any(|tier| !now.contains(tier));
                assert!(!held || !lost, "a copy of {id} left {tier} under a lease or pin");
                assert!(!now.is_empty());
            }
        };
        histories(look)(tiers_of(all), ops);
    }

    /// Leases, needs and sums, counted anew from leases, tokens and objects.
    #[test]
    fn counts_equal_a_slow_recount(all in any::<bool>(), ops in history()) {
        let look = |machine: &mut Machine, _: &Op| {
            let (index, model) = (&machine.bed.index, &machine.model);
            let mut leases: BTreeMap<ObjectId, u32> = BTreeMap::new();
            for (_, held) in &machine.leases {
                for (id, life) in held {
                    // An object that came back under the same address is another.
                    let same = model.objects.get(id).is_some_and(|object| object.life == *life);
                    *leases.entry(*id).or_default() += u32::from(same);
                }
            }
            let mut usage: BTreeMap<TierKind, (u64, u64)> = BTreeMap::new();
            for (id, object) in &model.objects {
                let info = index.object(id).unwrap();
                assert_eq!(info.leases, leases.get(id).copied().unwrap_or(0), "leases of {id}");
                assert_eq!(info.needed, !model.needing(object).is_empty());
                for tier in info.tiers.iter() {
                    let (objects, bytes) = usage.entry(tier).or_default();
                    *objects += 1;
                    *bytes += info.bytes;
                }
            }
            for tier in TierKind::ALL {
                let Usage { objects, bytes } = index.usage(tier);
                assert_eq!((objects, bytes), usage.get(&tier).copied().unwrap_or_default());
            }
        };
        histories(look)(tiers_of(all), ops);
    }
}
