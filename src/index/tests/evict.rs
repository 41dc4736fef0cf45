//! What leaves, in which order, and what does not.

use super::*;
use Action::{Demote, Drop, Forget};
use TierKind::{Disk, Ram};

/// The object with the KV that ends at the boundary of a snapshot.
fn last_kv(bed: &Bed, id: SnapshotId) -> ObjectId {
    bed.index.hit(&id).unwrap().kv.last().unwrap().object
}

#[test]
fn leaves_before_parents() {
    let mut bed = Bed::new(ram());
    let turns = run(0, 300);
    let ids: Vec<SnapshotId> = [100, 200, 300]
        .into_iter()
        .map(|boundary| bed.save(&key(1), &turns[..boundary]))
        .collect();
    let now = bed.tick();
    for id in &ids {
        bed.index.touch(id, now);
    }
    let kv: Vec<ObjectId> = ids.iter().map(|id| last_kv(&bed, *id)).collect();
    let states: Vec<ObjectId> = ids.iter().map(|id| bed.state(*id)).collect();
    // Each state takes along the KV that it alone needed.
    let expected: Vec<_> = (0..3)
        .rev()
        .flat_map(|turn| [(states[turn], Forget), (kv[turn], Forget)])
        .collect();
    assert_eq!(bed.victims(Ram), expected);

    // Least recently used wins over deepest.
    let now = bed.tick();
    bed.index.touch(&ids[2], now);
    let order: Vec<ObjectId> = bed
        .victims(Ram)
        .into_iter()
        .map(|(object, _)| object)
        .collect();
    assert_eq!(order[..3], [states[1], states[0], states[2]]);
}

#[test]
fn kv_without_live_state_goes_first() {
    let mut bed = Bed::new(ram());
    let old = bed.save(&key(1), &run(0, 100));
    let young = bed.save(&key(1), &run(500, 100));
    let orphan = last_kv(&bed, young);
    bed.index.forget_state(&young);
    let first = bed.index.victims(Ram, 1, Millis(bed.now));
    assert_eq!(first.len(), 1);
    assert_eq!((first[0].object, first[0].action), (orphan, Forget));
    assert_eq!(first[0].snapshot, None);
    bed.index.forget_object(&orphan).unwrap();
    bed.index.check().unwrap();
    assert_eq!(
        bed.index.coverage(&key(1), &run(500, 100)),
        Coverage::default()
    );
    assert_eq!(bed.victims(Ram)[0], (bed.state(old), Forget));
    let needed = last_kv(&bed, old);
    let refused = bed.index.forget_object(&needed);
    assert!(matches!(refused, Err(IndexError::InUse(_))));
}

#[test]
fn copies_of_what_a_lower_tier_has_go_before_last_copies() {
    let mut bed = Bed::new(ram_and_disk());
    let unwritten = bed.save(&key(1), &run(0, 100));
    let written = bed.save(&key(1), &run(500, 100));
    bed.write_down(written);
    assert_eq!(
        bed.victims(Ram),
        [
            (bed.state(written), Drop),
            (last_kv(&bed, written), Drop),
            (bed.state(unwritten), Demote),
            (last_kv(&bed, unwritten), Demote),
        ]
    );
    assert_eq!(
        bed.victims(Disk),
        [
            (bed.state(written), Forget),
            (last_kv(&bed, written), Forget)
        ]
    );
    // Superseded states are not written; their KV goes with them.
    bed.index.set_retain(&unwritten, Retain::Transient);
    bed.index.check().unwrap();
    let victims = bed.victims(Ram);
    assert_eq!(
        victims[2..],
        [
            (bed.state(unwritten), Forget),
            (last_kv(&bed, unwritten), Forget)
        ]
    );
}

#[test]
fn a_parent_can_leave_while_its_child_lives() {
    let mut bed = Bed::new(ram());
    let turns = run(0, 200);
    let parent = bed.save(&key(1), &turns[..100]);
    let child = bed.save(&key(1), &turns);
    let now = bed.tick();
    bed.index.touch(&child, now);
    let victims = bed.index.victims(Ram, 1, now);
    assert_eq!(victims.len(), 1, "KV that the child needs does not follow");
    assert_eq!(victims[0].snapshot, Some(parent));
    let removed = bed.index.remove_snapshot(&parent);
    bed.index.check().unwrap();
    assert_eq!(removed.objects, [victims[0].object]);
    assert_eq!(bed.find(&key(1), &turns), Some((child, 200)));
    assert_eq!(bed.index.hit(&child).unwrap().kv.len(), 2);
}

#[test]
fn victims_stop_at_the_bytes_asked_for() {
    let mut bed = Bed::new(ram());
    for n in 0..10 {
        bed.save(&key(1), &run(n * 1000, 100));
    }
    assert_eq!(bed.index.victims(Ram, 0, Millis(99)), []);
    let all = bed.index.victims(Ram, u64::MAX, Millis(99));
    assert_eq!(all.len(), 20);
    let some = bed.index.victims(Ram, 2100, Millis(99));
    assert_eq!(some, all[..4]);
    assert_eq!(bed.index.victims(Disk, 1, Millis(99)), []);
}

#[test]
fn lease_protects() {
    let mut bed = Bed::new(ram_and_disk());
    let turns = run(0, 200);
    let parent = bed.save(&key(1), &turns[..100]);
    let child = bed.save(&key(1), &turns);
    bed.write_down(child);
    let lease = bed.index.lease(&child).unwrap();
    assert_eq!(lease.objects().count(), 3);
    assert_eq!(lease.snapshot(), child);
    bed.index.check().unwrap();
    assert_eq!(bed.victims(Ram), [(bed.state(parent), Demote)]);
    assert_eq!(bed.victims(Disk), []);

    // Deleted while it is read: found no more, but the bytes stay until the lease ends.
    let state = bed.state(child);
    let kv = last_kv(&bed, child);
    let second = bed.index.lease(&child).unwrap();
    let removed = bed.index.remove_snapshot(&child);
    assert_eq!((removed.snapshots, removed.objects), (vec![child], vec![]));
    assert_eq!(bed.find(&key(1), &turns), Some((parent, 100)));
    assert!(bed.index.forget_object(&kv).is_err());
    assert_eq!(bed.victims(Ram), [(bed.state(parent), Demote)]);
    bed.index.release(lease);
    assert!(bed.index.forget_object(&state).is_err());
    bed.index.release(second);
    bed.index.check().unwrap();
    let victims = bed.victims(Ram);
    assert_eq!(victims[..2], [(state, Drop), (kv, Drop)]);
    bed.index.forget_object(&state).unwrap();
    bed.index.forget_object(&kv).unwrap();
    bed.index.check().unwrap();
    assert_eq!(bed.index.stats().objects, 2);
}

#[test]
fn a_lease_outlives_the_loss_of_its_objects() {
    let mut bed = Bed::new(ram());
    let tokens = run(0, 100);
    let id = bed.save(&key(1), &tokens);
    let lease = bed.index.lease(&id).unwrap();
    let (state, kv) = (bed.state(id), last_kv(&bed, id));
    bed.index.lose_object(&kv);
    bed.index.lose_object(&state);
    // The same prefix again, at the same places: its leases are its own.
    let again = bed.save(&key(1), &tokens);
    let own = bed.index.lease(&again).unwrap();
    bed.index.release(lease);
    bed.index.check().unwrap();
    assert_eq!(bed.index.snapshot(&again).unwrap().leases, 1);
    bed.index.release(own);
    bed.index.check().unwrap();
    assert_eq!(bed.victims(Ram).len(), 2);
}

#[test]
fn pins_protect() {
    let mut bed = Bed::new(ram_and_disk());
    let id = bed.save(&key(1), &run(0, 100));
    bed.write_down(id);
    let objects = [bed.state(id), last_kv(&bed, id)];

    // Names keep the last copy, wherever it is.
    bed.index.pin(&id, Pin::Named);
    bed.index.pin(&id, Pin::Named);
    assert_eq!(bed.victims(Disk), []);
    assert_eq!(bed.victims(Ram), objects.map(|object| (object, Drop)));
    bed.index.unpin(&id, PinKind::Named);
    assert_eq!(bed.victims(Disk), []);
    bed.index.unpin(&id, PinKind::Named);
    assert!(!bed.index.unpin(&id, PinKind::Named));
    assert_eq!(bed.victims(Disk), objects.map(|object| (object, Forget)));

    // Time keeps every copy, until it is over.
    bed.index.pin(&id, Pin::Until(Millis(50)));
    bed.index.pin(&id, Pin::Until(Millis(20)));
    bed.index.check().unwrap();
    assert_eq!(
        bed.index.snapshot(&id).unwrap().pinned_until,
        Some(Millis(50))
    );
    for tier in [Ram, Disk] {
        assert_eq!(bed.index.victims(tier, 1, Millis(49)), []);
    }
    assert_eq!(bed.index.victims(Ram, u64::MAX, Millis(50)).len(), 2);
    bed.index.pin(&id, Pin::Until(Millis(90)));
    assert_eq!(bed.victims(Disk), []);
    assert!(bed.index.unpin(&id, PinKind::Timed));
    assert_eq!(bed.victims(Disk).len(), 2);
    bed.index.check().unwrap();
}

#[test]
fn a_promise_keeps_the_last_copy_until_it_is_fulfilled() {
    let mut bed = Bed::new(ram_and_disk());
    let id = bed.save(&key(1), &run(0, 100));
    bed.index.set_retain(&id, Retain::Promised);
    assert_eq!(bed.victims(Ram), []);
    bed.write_down(id);
    assert_eq!(bed.victims(Ram).len(), 2);
    assert_eq!(bed.victims(Disk).len(), 2);
}

#[test]
fn quarantine_kills_exactly_the_dependants() {
    let mut bed = Bed::new(ram());
    let turns = run(0, 300);
    let branch = join(&turns[..150], &run(9000, 50));
    let ids: Vec<SnapshotId> = [100, 200, 300]
        .into_iter()
        .map(|boundary| bed.save(&key(1), &turns[..boundary]))
        .collect();
    let branched = bed.save(&key(1), &branch);
    let other = bed.save(&key(1), &run(7000, 10));

    // The KV of [100, 200): both what extends it, and what branches inside it.
    let middle = last_kv(&bed, ids[1]);
    let states = [ids[1], ids[2], branched].map(|id| bed.state(id));
    let removed = bed.index.lose_object(&middle);
    bed.index.check().unwrap();
    let mut died = removed.snapshots.clone();
    died.sort();
    assert_eq!(died, [ids[1], ids[2], branched]);
    assert_eq!(removed.objects.len(), 4);
    assert!(
        states
            .iter()
            .chain([&middle])
            .all(|object| removed.objects.contains(object))
    );
    assert_eq!(bed.find(&key(1), &turns), Some((ids[0], 100)));
    assert_eq!(bed.find(&key(1), &branch), Some((ids[0], 100)));
    assert_eq!(bed.find(&key(1), &run(7000, 10)), Some((other, 10)));
    assert_eq!(bed.index.coverage(&key(1), &turns).kv, 100);

    // A state kills its snapshot alone; so does the end of the last copy.
    let first = bed.state(ids[0]);
    assert_eq!(bed.index.lose_object(&first).snapshots, [ids[0]]);
    let last = bed.state(other);
    assert_eq!(bed.index.set_tier(&last, Ram, false).snapshots, [other]);
    bed.index.check().unwrap();
    assert_eq!(bed.index.stats().snapshots, 0);
}

#[test]
fn a_loss_that_other_objects_make_good_kills_nothing() {
    let mut bed = Bed::new(ram());
    let tokens = run(0, 300);
    let first = bed.save(&key(1), &tokens[..200]);
    // Two saves at the same time: the second object overlaps the first.
    let whole = kv_of(&key(1), &tokens, 0, ram());
    let mut new = bed.new_snapshot(&key(1), &tokens);
    new.kv = vec![part(&whole, 0, 300)];
    new.new_objects = vec![whole];
    let second = bed.index.insert(&key(1), &tokens, new).unwrap().snapshot;
    bed.index.check().unwrap();
    let lost = kv_of(&key(1), &tokens[..200], 0, ram());
    assert_eq!(bed.index.lose_object(&lost.id).snapshots, []);
    bed.index.check().unwrap();
    assert_eq!(bed.index.hit(&first).unwrap().kv, [part(&whole, 0, 200)]);
    assert_eq!(bed.index.lose_object(&whole.id).snapshots, [first, second]);
    bed.index.check().unwrap();
    assert_eq!(bed.index.stats(), Stats::default());
}

#[test]
fn tiers_are_counted_each_for_itself() {
    let mut bed = Bed::new(ram_and_disk());
    let id = bed.save(&key(1), &run(0, 100));
    bed.write_down(id);
    let usage = |objects, bytes| Usage { objects, bytes };
    assert_eq!(bed.index.usage(Ram), usage(2, 1100));
    assert_eq!(bed.index.usage(Disk), usage(2, 1100));
    let (state, kv) = (bed.state(id), last_kv(&bed, id));
    bed.set_tiers(state, tiers(&[Disk]));
    assert_eq!(bed.index.usage(Ram), usage(1, 100));
    let info = bed.index.snapshot(&id).unwrap();
    assert_eq!(
        (info.state_tiers, info.kv_tiers),
        (tiers(&[Disk]), ram_and_disk())
    );
    bed.set_tiers(kv, tiers(&[Disk]));
    assert_eq!(bed.index.usage(Ram), usage(0, 0));
    assert_eq!(bed.find(&key(1), &run(0, 100)), Some((id, 100)));
    assert!(bed.index.object(&kv).unwrap().needed);
}
