//! A small caller of the index, as the service is a large one.

mod evict;
mod insert;
mod invariants;
mod load;
mod machine;
mod model;
mod ops;
mod prefix;

use super::{node::Hashing, *};
use crate::types::{
    Fingerprint, NamespaceId, ObjectId, ObjectKind, SnapshotId, TokenId, TokenRange,
};
use uuid::Uuid;

/// Everything that must hold does; and what is spare of a namespace is nothing that anybody was
/// promised, in the order of last use.
fn check_spare(index: &Index<VecLog>) {
    index.check().unwrap();
    let namespace = key(1).namespace;
    let all = index.spare(&namespace, false, usize::MAX);
    let durable = index.spare(&namespace, true, usize::MAX);
    let info = |id: &SnapshotId| index.snapshot(id).unwrap();
    for id in &all {
        let it = info(id);
        assert_eq!((it.names, it.pinned_until, it.leases), (0, None, 0));
        assert!(it.durable || it.retain != Retain::Promised);
        assert_eq!(durable.contains(id), it.durable);
    }
    assert!(all.is_sorted_by_key(|id| info(id).last_use));
    assert_eq!(index.spare(&namespace, false, 1), all[..all.len().min(1)]);
    assert_eq!(index.spare(&NamespaceId([9; 32]), false, 9), []);
}

fn tiers(tiers: &[TierKind]) -> TierSet {
    TierSet::of(tiers)
}

fn ram() -> TierSet {
    tiers(&[TierKind::Ram])
}

fn ram_and_disk() -> TierSet {
    ram().with(TierKind::Disk)
}

fn key(n: u8) -> TreeKey {
    TreeKey {
        fingerprint: Fingerprint([n; 32]),
        namespace: NamespaceId([1; 32]),
    }
}

fn snapshot_id(n: u64) -> SnapshotId {
    SnapshotId(Uuid::from_u64_pair(7 << 12, n))
}

/// The address of an object: made of all that it depends on, as the real one is.
fn address(key: &TreeKey, prefix: &[TokenId], range: TokenRange, kind: ObjectKind) -> ObjectId {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&key.fingerprint.0).update(&key.namespace.0);
    for token in prefix.iter().chain(&[range.start, range.end]) {
        hasher.update(&token.to_le_bytes());
    }
    hasher.update(kind.as_str().as_bytes());
    ObjectId(*hasher.finalize().as_bytes())
}

fn state_of(key: &TreeKey, tokens: &[TokenId], tiers: TierSet) -> ObjectEntry {
    let range = TokenRange::at(tokens.len() as u32);
    ObjectEntry {
        id: address(key, tokens, range, ObjectKind::State),
        kind: ObjectKind::State,
        range,
        bytes: 1000,
        tiers,
    }
}

/// KV of the tokens of `prefix` from `start` on.
fn kv_of(key: &TreeKey, prefix: &[TokenId], start: u32, tiers: TierSet) -> ObjectEntry {
    let range = TokenRange {
        start,
        end: prefix.len() as u32,
    };
    ObjectEntry {
        id: address(key, prefix, range, ObjectKind::Kv),
        kind: ObjectKind::Kv,
        range,
        bytes: u64::from(range.len()),
        tiers,
    }
}

fn part(object: &ObjectEntry, start: u32, end: u32) -> KvRef {
    KvRef {
        object: object.id,
        range: TokenRange { start, end },
        object_range: object.range,
    }
}

/// An index, ids and a clock.
struct Bed {
    index: Index<VecLog>,
    tiers: TierSet,
    now: u64,
}

impl Bed {
    /// Loses an object; what goes with it was foretold.
    fn lose(&mut self, id: &ObjectId) -> Removed {
        let mut foretold = self.index.lost_with(id);
        let removed = self.index.lose_object(id);
        let mut gone = removed.snapshots.clone();
        foretold.sort_unstable();
        gone.sort_unstable();
        assert_eq!(foretold, gone);
        removed
    }

    /// New objects are in the fastest of `tiers`.
    fn new(tiers: TierSet) -> Self {
        Self::with_hashing(tiers, Hashing::default())
    }

    fn with_hashing(tiers: TierSet, hashing: Hashing) -> Self {
        Self {
            index: Index::with_hashing(VecLog::new(), tiers, hashing),
            tiers,
            now: 0,
        }
    }

    fn tick(&mut self) -> Millis {
        self.now += 1;
        Millis(self.now)
    }

    /// A snapshot of `tokens`: KV that is there is used, the rest is one new object.
    fn new_snapshot(&mut self, key: &TreeKey, tokens: &[TokenId]) -> NewSnapshot {
        let fast = TierSet::EMPTY.with(self.tiers.iter().next().unwrap());
        let boundary = tokens.len() as u32;
        let mut kv = self.index.kv_refs(key, tokens, boundary);
        let covered = kv.last().map_or(0, |part| part.range.end);
        let mut new_objects = Vec::new();
        if covered < boundary {
            let object = kv_of(key, tokens, covered, fast);
            kv.push(part(&object, covered, boundary));
            new_objects.push(object);
        }
        let created = self.tick();
        NewSnapshot {
            id: snapshot_id(self.now),
            state: state_of(key, tokens, fast),
            kv,
            new_objects,
            created,
            durable: false,
            retain: Retain::Ordinary,
        }
    }

    fn save(&mut self, key: &TreeKey, tokens: &[TokenId]) -> SnapshotId {
        let new = self.new_snapshot(key, tokens);
        let inserted = self.index.insert(key, tokens, new).unwrap();
        self.index.check().unwrap();
        inserted.snapshot
    }

    fn find(&self, key: &TreeKey, tokens: &[TokenId]) -> Option<(SnapshotId, u32)> {
        let hit = self.index.lookup(key, tokens, u32::MAX)?;
        Some((hit.snapshot, hit.boundary))
    }

    fn state(&self, id: SnapshotId) -> ObjectId {
        self.index.hit(&id).unwrap().state
    }

    fn set_tiers(&mut self, object: ObjectId, tiers: TierSet) {
        for tier in tiers.iter() {
            self.index.set_tier(&object, tier, true);
        }
        for tier in TierKind::ALL {
            if !tiers.contains(tier) {
                self.index.set_tier(&object, tier, false);
            }
        }
        self.index.check().unwrap();
    }

    /// Writes a snapshot down.
    fn write_down(&mut self, id: SnapshotId) {
        let hit = self.index.hit(&id).unwrap();
        for object in hit.kv.iter().map(|part| part.object).chain([hit.state]) {
            self.index.set_tier(&object, TierKind::Disk, true);
        }
        self.index.set_durable(&id, true);
        self.index.check().unwrap();
    }

    fn victims(&mut self, tier: TierKind) -> Vec<(ObjectId, Action)> {
        let victims = self.index.victims(tier, u64::MAX, Millis(self.now));
        victims.iter().map(|v| (v.object, v.action)).collect()
    }
}

/// `len` tokens that differ from those of every other `from`.
fn run(from: u32, len: u32) -> Vec<TokenId> {
    (from..from + len).collect()
}

fn join(a: &[TokenId], b: &[TokenId]) -> Vec<TokenId> {
    [a, b].concat()
}

fn sorted(mut removed: Removed) -> Removed {
    removed.snapshots.sort();
    removed.objects.sort();
    removed
}
