//! What must hold between any two steps.

use std::collections::{BTreeMap, BTreeSet};

use super::daemon::{Daemon, Offer, Restore};
use super::model::Model;
use crate::store::Tier;
use crate::types::{ObjectId, SnapshotId, TierKind};
use crate::util::clock::Clock;

/// What folders and small files may take beyond a budget, until the disk thread makes room.
const BESIDE: u64 = 512 << 10;

/// Looks at everything.
pub fn check(daemon: &Daemon, model: &Model, offers: &[Offer], restores: &[Restore]) {
    known(daemon, model);
    copies(daemon);
    leases(daemon, offers, restores);
    budgets(daemon, offers, restores);
    pins(daemon, model);
}

/// Index and records have what was committed and not said to be gone, as durable as was said.
fn known(daemon: &Daemon, model: &Model) {
    let core = daemon.service.core.lock();
    core.index.check().unwrap();
    let indexed: BTreeSet<SnapshotId> = core.index.iter().collect();
    assert_eq!(indexed, model.live, "what can be found");
    let records: BTreeSet<SnapshotId> = core.records.keys().copied().collect();
    assert_eq!(records, model.live, "what is known of it");
    let durable = records.iter().filter(|id| core.is_durable(id)).copied();
    assert_eq!(
        durable.collect::<BTreeSet<_>>(),
        model.durable,
        "what is durable"
    );
    for id in &model.live {
        let info = core.index.snapshot(id).unwrap();
        assert_eq!(info.durable, model.durable.contains(id));
        if info.durable {
            // Others may have stored its KV a second time, which is not on disk yet: what its manifest
            // names is seen to by the next start.
            let on_disk = info.state_tiers.contains(TierKind::Disk);
            assert!(on_disk, "{id} is durable without its state");
        }
        let mut tokens = Vec::new();
        assert!(core.index.read_tokens(id, &mut tokens));
        assert_eq!(tokens, model.known[id]);
    }
    for (name, id) in core.conversations.iter().flat_map(|(key, it)| {
        let turns = it.turns.iter().filter_map(|turn| turn.snapshot);
        let branches = it.branches.values().copied();
        turns.chain(branches).map(move |id| (&key.name, id))
    }) {
        assert!(model.live.contains(&id), "{name} names {id}, which is gone");
    }
}

/// Index and tiers agree on where each object is.
fn copies(daemon: &Daemon) {
    let service = &daemon.service;
    let core = service.core.lock();
    let is_in = |id: &ObjectId, tier| {
        let info = core.index.object(id);
        info.is_some_and(|info| info.tiers.contains(tier))
    };
    let ram = service.store.ram.list();
    for meta in &ram {
        assert!(
            is_in(&meta.id, TierKind::Ram),
            "RAM has {}, and nobody knows it",
            meta.id
        );
    }
    assert_eq!(ram.len() as u64, core.index.usage(TierKind::Ram).objects);
    let disk = service.store.disk.as_ref().unwrap();
    let all = disk.list();
    let there = all.iter().filter(|meta| is_in(&meta.id, TierKind::Disk));
    let there = there.count() as u64;
    assert_eq!(
        there,
        core.index.usage(TierKind::Disk).objects,
        "objects that the disk lacks"
    );
    // What a fault kept from being removed is found by the next start.
    if core.queue.is_idle() && daemon.faults.thrown() == 0 {
        let strays = all.iter().filter(|meta| !is_in(&meta.id, TierKind::Disk));
        assert_eq!(strays.count(), 0, "the disk has what nobody knows");
    }
}

/// Leases are those of the restores under way, and room is spoken for by offers alone.
fn leases(daemon: &Daemon, offers: &[Offer], restores: &[Restore]) {
    let core = daemon.service.core.lock();
    let mut counted: BTreeMap<ObjectId, u32> = BTreeMap::new();
    for id in restores.iter().flat_map(Restore::leased) {
        *counted.entry(id).or_default() += 1;
    }
    let all = core.index.iter().flat_map(|id| {
        let hit = core.index.hit(&id).unwrap();
        let kv: Vec<ObjectId> = hit.kv.iter().map(|part| part.object).collect();
        kv.into_iter().chain([hit.state])
    });
    for id in all.collect::<BTreeSet<_>>() {
        let leases = core.index.object(&id).unwrap().leases;
        // A lease may be of an object of this address that was lost since.
        let most = counted.get(&id).copied().unwrap_or(0);
        assert!(leases <= most, "{id} has {leases} leases, {most} are held");
    }
    assert_eq!(core.promises.restores(), restores.len(), "promised room");
    if offers.is_empty() {
        assert_eq!(
            *daemon.service.reserved.lock(),
            0,
            "room that is spoken for by nobody"
        );
    }
}

fn budgets(daemon: &Daemon, offers: &[Offer], restores: &[Restore]) {
    let store = &daemon.service.store;
    let (ram, reserved) = (store.ram.usage(), *daemon.service.reserved.lock());
    assert!(
        ram.bytes + reserved <= ram.budget,
        "{} + {reserved} in RAM of {}",
        ram.bytes,
        ram.budget
    );
    if offers.is_empty() && restores.is_empty() {
        assert_eq!(
            store.arena.used(),
            ram.bytes,
            "blocks of the arena that nobody holds"
        );
    }
    let disk = store.disk.as_ref().unwrap().usage();
    assert!(
        disk.bytes <= disk.budget + BESIDE,
        "{} on disk of {}",
        disk.bytes,
        disk.budget
    );
}

/// What is pinned for a time stays in RAM.
fn pins(daemon: &Daemon, model: &Model) {
    let now = daemon.clock.now();
    let core = daemon.service.core.lock();
    for (id, until) in model.pinned.iter().filter(|(_, until)| **until > now) {
        let info = core.index.snapshot(id).unwrap();
        let there =
            info.state_tiers.contains(TierKind::Ram) && info.kv_tiers.contains(TierKind::Ram);
        assert!(there, "{id} is pinned until {until:?}, and left RAM");
    }
}
