//! The n-th operation fails, for every n: whatever happens, the next start finds a consistent store.

use std::collections::BTreeSet;

use nix::libc::{EIO, ENOSPC, EROFS};

use super::*;
use crate::{
    store::{
        ConversationRef, ErrorKind, Reason,
        fault::{Fault, Op},
    },
    types::SnapshotId,
};

/// What the script achieved before and in spite of the fault.
#[derive(Default)]
struct Done {
    /// Manifests whose put said Ok, with the seed of the objects.
    durable: Vec<(SnapshotId, u64)>,
    /// Manifests whose put failed without poisoning the disk.
    refused: BTreeSet<SnapshotId>,
    /// Manifests whose removal said Ok.
    removed: BTreeSet<SnapshotId>,
    /// Manifests whose removal was begun.
    touched: BTreeSet<SnapshotId>,
    conversation: bool,
}

fn save(start: &Start, seed: u64, done: &mut Done) -> Result<SnapshotId, StoreError> {
    let [state, a, b] = snapshot_objects(&start.store, seed);
    for object in [&a, &b, &state] {
        start.disk().put(object)?;
    }
    let manifest = sample::manifest(&state, &[&a, &b]);
    if let Err(error) = start.manifests().put(&manifest) {
        if start.disk().poisoned().is_none() {
            done.refused.insert(manifest.snapshot);
        }
        return Err(error);
    }
    done.durable.push((manifest.snapshot, seed));
    Ok(manifest.snapshot)
}

/// A life of the store in which every kind of operation happens. Goes on after errors where a daemon
/// would.
fn script(bed: &Bed, faults: &Faults, done: &mut Done) -> Result<(), StoreError> {
    let start = scan(bed.open_with(faults.clone())?)?;
    start.refs().scan(&mut |_| {})?;
    register(&start.store)?;
    let first = save(&start, 1, done);
    let _ = save(&start, 11, done);
    let conversation = ConversationRef::new(None, "c".into(), Millis(3));
    done.conversation |= start.refs().put(&conversation).is_ok();
    for seed in [1, 2, 3] {
        // Either the right bytes or an error.
        if let Ok(object) = start.disk().get(&sample::id(seed), &start.store.arena) {
            assert!(sample::is_right(&object, seed));
        }
    }
    let first = first?;
    done.touched.insert(first);
    if start.manifests().remove(&first)? {
        done.removed.insert(first);
    }
    for seed in [1, 2, 3] {
        start.disk().remove(&sample::id(seed))?;
    }
    // Once more, over what was there.
    save(&start, 1, done)?;
    Ok(())
}

/// What the next start must find after a script that may have failed anywhere.
fn check(bed: &Bed, done: &Done, hidden_by_medium: bool) {
    let start = bed.start();
    let found: BTreeSet<SnapshotId> = start.snapshots.iter().map(|m| m.snapshot).collect();
    for manifest in &start.snapshots {
        let seed = manifest.state.generation.0;
        assert!(
            (seed..seed + 3).all(|seed| start.is_right(seed)),
            "complete"
        );
        assert!(
            !done.removed.contains(&manifest.snapshot),
            "removed for good"
        );
    }
    assert!(found.is_disjoint(&done.refused), "refused is not there");
    if !hidden_by_medium {
        assert!(start.bad.is_empty(), "{:?}", start.bad);
        let kept = done
            .durable
            .iter()
            .filter(|(id, _)| !done.touched.contains(id));
        for (snapshot, _) in kept {
            assert!(found.contains(snapshot), "durable means durable");
        }
    }
    let mut conversations = 0;
    start
        .refs()
        .scan(&mut |found| conversations += u32::from(found.is_ok()))
        .unwrap();
    assert!(conversations == 1 || !done.conversation || hidden_by_medium);
    assert_eq!(
        start.store.counts().quarantined_total(),
        0,
        "nothing is bad"
    );
    assert_eq!(start.disk().usage().bytes, du(&bed.dir()));
    // And it works on.
    let mut again = Done::default();
    save(&start, 41, &mut again).unwrap();
}

/// Runs the script with one fault at every operation of a kind on a fresh store, and at every fifth on
/// one that has a snapshot already.
fn at_every(op: impl Into<Option<Op>>, fault: Fault) {
    at_every_with(IoEngine::Threads, op.into(), fault);
}

fn at_every_with(engine: IoEngine, op: Option<Op>, fault: Fault) {
    // A medium that could not read a file at that moment: the file was moved aside, not lost.
    let hidden = op == Some(Op::Read);
    for (fresh, step) in [(true, 1), (false, 5)] {
        let mut runs = 0;
        for nth in (0..).step_by(step) {
            let bed = Bed {
                engine,
                ..Bed::new()
            };
            let mut done = Done::default();
            if !fresh {
                let snapshot = bed.start().snapshot(21).snapshot;
                done.durable.push((snapshot, 21));
            }
            let faults = Faults::default();
            faults.arm(op, nth, fault);
            let result = script(&bed, &faults, &mut done);
            check(&bed, &done, hidden);
            if faults.thrown() == 0 {
                result.unwrap();
                break;
            }
            runs += 1;
        }
        assert!(runs > 0, "{op:?} never happened");
    }
}

#[test]
fn killed_at_any_operation() {
    at_every(None, Fault::Torn);
}

#[test]
fn writes_fail() {
    at_every(Op::Write, Fault::Errno(ENOSPC));
    at_every(Op::Write, Fault::Short(ENOSPC));
    at_every(Op::Write, Fault::Errno(EIO));
}

#[test]
fn fsyncs_fail() {
    at_every(Op::Fsync, Fault::Errno(EIO));
}

#[test]
fn opens_fail() {
    at_every(Op::Open, Fault::Errno(EROFS));
    at_every(Op::Open, Fault::Errno(EIO));
}

#[test]
fn reads_fail() {
    at_every(Op::Read, Fault::Errno(EIO));
    at_every(Op::Read, Fault::Short(EIO));
}

/// What a ring does otherwise: reading and writing.
#[test]
fn the_same_with_a_ring() {
    at_every_with(IoEngine::Uring, None, Fault::Torn);
    for fault in [Fault::Errno(EIO), Fault::Short(ENOSPC)] {
        at_every_with(IoEngine::Uring, Some(Op::Write), fault);
    }
    for fault in [Fault::Errno(EIO), Fault::Short(EIO)] {
        at_every_with(IoEngine::Uring, Some(Op::Read), fault);
    }
}

#[test]
fn names_cannot_be_changed() {
    at_every(Op::Rename, Fault::Errno(EIO));
    at_every(Op::Unlink, Fault::Errno(EROFS));
    at_every(Op::Mkdir, Fault::Errno(ENOSPC));
}

fn failing(op: Op, nth: u64, fault: Fault) -> (Bed, Faults, Start, StoreError) {
    let bed = Bed::new();
    let faults = Faults::default();
    let start = scan(bed.open_with(faults.clone()).unwrap()).unwrap();
    register(&start.store).unwrap();
    start.snapshot(1);
    faults.arm(op, nth, fault);
    let object = sample::kv(&start.store.arena, &sample::geometry(), 0, 1024, 7);
    let error = start.disk().put(&object).unwrap_err();
    assert_eq!(faults.thrown(), 1);
    assert!(!start.disk().contains(&sample::id(7)));
    assert!(start.is_right(2), "reading goes on");
    (bed, faults, start, error)
}

#[test]
fn a_full_disk_is_typed_and_leaves_nothing() {
    for (nth, fault) in [
        (0, Fault::Errno(ENOSPC)),
        (2, Fault::Short(ENOSPC)),
        (5, Fault::Errno(nix::libc::EDQUOT)),
    ] {
        let (bed, _, start, error) = failing(Op::Write, nth, fault);
        assert!(matches!(error, StoreError::DiskFull { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        let folder = bed.object(&sample::id(7), 0).parent().unwrap().to_owned();
        assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
        assert_eq!(start.disk().usage().bytes, du(&bed.dir()));
        // Room again.
        start.put(&sample::kv(
            &start.store.arena,
            &sample::geometry(),
            0,
            1024,
            7,
        ));
        assert!(start.is_right(7));
    }
}

#[test]
fn a_read_only_disk_is_typed() {
    let (_bed, _, _, error) = failing(Op::Mkdir, 0, Fault::Errno(EROFS));
    assert!(matches!(error, StoreError::ReadOnly { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let (_bed, _, _, error) = failing(Op::Write, 1, Fault::Errno(EIO));
    assert!(
        matches!(error, StoreError::Io { op: Op::Write, .. }),
        "{error}"
    );
}

#[test]
fn a_failed_fsync_ends_all_writing() {
    // Folders, then the first shard.
    for nth in 0..4 {
        let (_bed, _, start, error) = failing(Op::Fsync, nth, Fault::Errno(EIO));
        assert!(
            matches!(error, StoreError::Io { op: Op::Fsync, .. }),
            "{error}"
        );
        assert!(start.disk().poisoned().is_some());
        let object = sample::kv(&start.store.arena, &sample::geometry(), 0, 10, 8);
        let refused = start.disk().put(&object).unwrap_err();
        assert!(matches!(refused, StoreError::Poisoned { .. }), "{refused}");
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        let [state, a, b] = snapshot_objects(&start.store, 1);
        let manifest = sample::manifest(&state, &[&a, &b]);
        let refused = start.manifests().put(&manifest);
        assert!(matches!(refused, Err(StoreError::Poisoned { .. })));
        let known = start.disk().list().len();
        assert_eq!(known, 3);
        assert_eq!(start.store.counts().fsync_failures, 1);
        let got = start.disk().get(&sample::id(1), &start.store.arena);
        assert!(sample::is_right(&got.unwrap(), 1));
    }
}

#[test]
fn a_medium_that_cannot_read_is_quarantined() {
    let bed = Bed::new();
    let faults = Faults::default();
    let start = scan(bed.open_with(faults.clone()).unwrap()).unwrap();
    register(&start.store).unwrap();
    start.snapshot(1);
    for (seed, nth) in [(1, 0), (2, 2), (3, 3)] {
        faults.arm(Op::Read, nth, Fault::Short(EIO));
        let error = start
            .disk()
            .get(&sample::id(seed), &start.store.arena)
            .unwrap_err();
        assert!(
            matches!(
                error,
                StoreError::Corrupt {
                    reason: Reason::Unreadable,
                    ..
                }
            ),
            "{error}"
        );
        assert!(!start.disk().contains(&sample::id(seed)));
    }
    assert_eq!(bed.quarantined(".safetensors").len(), 6);
}

#[test]
fn too_many_open_files_says_nothing_about_the_object() {
    let bed = Bed::new();
    let faults = Faults::default();
    let start = scan(bed.open_with(faults.clone()).unwrap()).unwrap();
    register(&start.store).unwrap();
    start.snapshot(1);
    faults.arm(Op::Open, 0, Fault::Errno(nix::libc::EMFILE));
    let error = start
        .disk()
        .get(&sample::id(1), &start.store.arena)
        .unwrap_err();
    assert!(
        matches!(error, StoreError::Io { op: Op::Open, .. }),
        "{error}"
    );
    assert!(start.is_right(1));
    assert_eq!(start.store.counts().quarantined_total(), 0);
}

#[test]
fn a_folder_that_cannot_be_listed_fails_the_start_and_loses_nothing() {
    let bed = Bed::new();
    let first = bed.start();
    let manifest = first.snapshot(1);
    drop(first);
    let mut failed = 0;
    for nth in 0.. {
        let faults = Faults::default();
        faults.arm(Op::Open, nth, Fault::Errno(EIO));
        let start = bed.open_with(faults.clone()).and_then(scan);
        if faults.thrown() == 0 {
            break;
        }
        failed += u32::from(start.is_err());
    }
    assert!(failed > 5);
    let again = bed.start();
    assert_eq!(again.snapshots, [manifest]);
    assert!(again.is_right(1));
}

/// Every name that appears is durable before anything builds on it.
#[test]
fn order_of_writes() {
    let bed = Bed::new();
    let faults = Faults::default();
    let start = scan(bed.open_with(faults.clone()).unwrap()).unwrap();
    register(&start.store).unwrap();
    faults.start_trace();
    let manifest = start.snapshot(1);
    let saved = faults.trace();

    let position = |wanted: &(Op, String)| saved.iter().rposition(|step| step == wanted);
    let path = |rel: super::super::root::Rel| rel.as_path().to_str().unwrap().to_owned();
    let commit = path(layout::manifest(&sample::MODEL, &manifest.snapshot));
    let commit_at = position(&(Op::Rename, commit.clone())).unwrap();
    for seed in [1, 2, 3] {
        let folder = layout::object_folder(&sample::MODEL, &sample::id(seed));
        let synced = position(&(Op::Fsync, path(folder.clone()))).unwrap();
        for shard in 0..2 {
            let name = path(layout::object(&sample::MODEL, &sample::id(seed), shard));
            let named = position(&(Op::Rename, name)).unwrap();
            assert!(named < synced, "the folder after the name");
        }
        // The folders above, too.
        for above in [folder.parent(), folder.parent().parent()] {
            let above = (Op::Fsync, path(above));
            let first = saved.iter().position(|step| *step == above);
            assert!(first.unwrap() < commit_at);
        }
        assert!(synced < commit_at, "the manifest last");
    }
    // Each temporary file: no write after its fsync, and the fsync before the next rename.
    let mut open: BTreeMap<&str, bool> = BTreeMap::new();
    for (op, path) in &saved {
        let temporary = path.rsplit('/').next().unwrap().starts_with(".tmp-");
        match op {
            Op::Write if temporary => {
                assert_ne!(open.insert(path, false), Some(true), "{path}");
            }
            Op::Fsync if temporary => {
                assert_eq!(open.insert(path, true), Some(false));
            }
            Op::Rename => assert!(open.values().all(|synced| *synced), "{path}"),
            _ => {}
        }
    }
    // Nothing but fsyncs follows the manifest's name: of its folder, which is new, and of that above.
    let folder = layout::manifest(&sample::MODEL, &manifest.snapshot).parent();
    let end = [folder.clone(), folder.parent()].map(|rel| (Op::Fsync, path(rel)));
    assert!(saved[commit_at + 1..].starts_with(&end));
    assert!(
        saved[commit_at + 1..]
            .iter()
            .all(|(op, _)| *op == Op::Fsync)
    );
    let folder = path(folder);

    faults.start_trace();
    start.manifests().remove(&manifest.snapshot).unwrap();
    let removed = faults.trace();
    let unlink = removed
        .iter()
        .position(|step| *step == (Op::Unlink, commit.clone()));
    let sync = removed
        .iter()
        .position(|step| *step == (Op::Fsync, folder.clone()));
    assert!(unlink.unwrap() < sync.unwrap());
}
