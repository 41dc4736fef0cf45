//! What a start finds.

use super::*;
use crate::{
    store::{Reason, Stored, sealed_json},
    types::TokenRange,
};

fn reseal(path: &Path, change: &dyn Fn(&str) -> String) {
    let text = fs::read_to_string(path).unwrap();
    let body = change(text.rsplit_once(",\"checksum\"").unwrap().0);
    let sum = blake3::hash(body.as_bytes()).to_hex();
    fs::write(path, format!("{body},\"checksum\":\"{sum}\"}}\n")).unwrap();
}

#[test]
fn everything_is_found_again() {
    let bed = Bed::new();
    let first = bed.start();
    let a = first.snapshot(1);
    let b = first.snapshot(11);
    let usage = first.disk().usage();
    assert_eq!(usage.bytes, du(&bed.dir()));
    drop(first);

    let again = bed.start();
    assert!(again.bad.is_empty());
    let mut found = again.snapshots.clone();
    found.sort_by_key(|manifest| manifest.snapshot);
    assert_eq!(found, [a.clone(), b]);
    assert_eq!(again.manifests().get(&a.snapshot).unwrap(), a);
    assert_eq!(again.manifests().len(), 2);
    for seed in [1, 2, 3, 11, 12, 13] {
        assert!(again.is_right(seed));
    }
    assert_eq!(again.disk().usage(), usage);
    assert_eq!(again.disk().tokens(&sample::id(2)).unwrap().len(), 1024);
}

#[test]
fn a_repeated_save_writes_nothing() {
    let bed = Bed::new();
    let first = bed.start();
    first.snapshot(1);
    let before = first.store.counts();
    assert!(before.written_payload > 0);
    for object in snapshot_objects(&first.store, 1) {
        assert_eq!(first.disk().put(&object).unwrap(), Stored::AlreadyThere);
    }
    let after = first.store.counts();
    assert_eq!(after.already_there, 3);
    let written = |c: &crate::store::Counts| (c.written_payload, c.written_bytes, c.written_files);
    assert_eq!(written(&after), written(&before));
    drop(first);

    let again = bed.start();
    for object in snapshot_objects(&again.store, 1) {
        assert_eq!(again.disk().put(&object).unwrap(), Stored::AlreadyThere);
    }
    assert_eq!(again.store.counts().written_bytes, 0);
}

#[test]
fn a_folder_removed_by_somebody_is_made_again() {
    let bed = Bed::new();
    let start = bed.start();
    start.snapshot(1);
    fs::remove_dir_all(bed.object(&sample::id(1), 0).ancestors().nth(2).unwrap()).unwrap();
    let error = start
        .disk()
        .get(&sample::id(1), &start.store.arena)
        .unwrap_err();
    assert!(matches!(error, StoreError::Lost { .. }), "{error}");
    let [state, ..] = snapshot_objects(&start.store, 1);
    start.put(&state);
    assert!(start.is_right(1));
}

#[test]
fn temporary_files_and_orphans_go_and_strangers_stay() {
    let bed = Bed::new();
    let first = bed.start();
    let manifest = first.snapshot(1);
    // Written, but its manifest never was.
    first.put(&sample::kv(
        &first.store.arena,
        &sample::geometry(),
        0,
        700,
        5,
    ));
    let orphan = bed.object(&sample::id(5), 0);
    let orphan_len = fs::metadata(&orphan).unwrap().len();
    drop(first);
    // A shard too many of an object that is wanted.
    let extra = bed.object(&sample::id(2), 2);
    fs::copy(bed.object(&sample::id(2), 1), &extra).unwrap();
    let extra_len = fs::metadata(&extra).unwrap().len();
    let stray = [
        bed.dir().join(".tmp-1"),
        bed.dir().join("models/.tmp-2"),
        orphan.with_file_name(".tmp-3"),
        bed.manifest(&manifest).with_file_name(".tmp-4"),
        bed.object(&sample::id(1), 0)
            .ancestors()
            .nth(4)
            .unwrap()
            .join(".tmp-5"),
    ];
    for path in &stray {
        fs::write(path, "half").unwrap();
    }
    let strange = [
        bed.dir().join("models/README"),
        orphan.with_file_name("notes.txt"),
        bed.manifest(&manifest).with_file_name("x.json"),
        orphan.parent().unwrap().with_file_name("zz"),
    ];
    for path in &strange {
        fs::write(path, "mine").unwrap();
    }

    let again = bed.start();
    assert_eq!(again.snapshots, [manifest]);
    assert!(again.bad.is_empty());
    let counts = again.store.counts();
    assert_eq!(counts.swept, stray.len() as u64);
    assert!(stray.iter().all(|path| !path.exists()));
    assert_eq!(
        (counts.orphans, counts.orphan_bytes),
        (3, 2 * orphan_len + extra_len)
    );
    assert!(!orphan.exists() && !extra.exists());
    assert_eq!(counts.strange, strange.len() as u64);
    assert!(strange.iter().all(|path| path.exists()));
    assert_eq!(again.disk().usage().bytes, du(&bed.dir()));
    assert!(again.is_right(2));
}

#[test]
fn a_bad_manifest_goes_aside_and_no_other() {
    type Harm<'a> = (Reason, &'a dyn Fn(&Path));
    let harms: [Harm<'_>; 8] = [
        (Reason::Length, &|path| fs::write(path, "").unwrap()),
        (Reason::Checksum, &|path| {
            let mut bytes = fs::read(path).unwrap();
            bytes.truncate(bytes.len() - 1);
            fs::write(path, bytes).unwrap();
        }),
        (Reason::Checksum, &|path| {
            let mut bytes = fs::read(path).unwrap();
            bytes[200] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        (Reason::Version, &|path| {
            reseal(path, &|t| {
                t.replace("\"format_version\":1", "\"format_version\":2")
            });
        }),
        (Reason::UnknownField, &|path| {
            reseal(path, &|t| format!("{t},\"new\":1"))
        }),
        (Reason::Invalid, &|path| {
            reseal(path, &|t| {
                t.replace("\"boundary\":1500", "\"boundary\":1499")
            });
        }),
        (Reason::Mismatch, &|path| {
            let text = fs::read_to_string(path).unwrap();
            let name = path.file_stem().unwrap().to_str().unwrap();
            let other = crate::types::SnapshotId::new().to_string();
            fs::write(path, text).unwrap();
            reseal(path, &|t| t.replace(name, &other));
        }),
        (Reason::Length, &|path| {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_len(sealed_json::MAX_BYTES + 1).unwrap();
        }),
    ];
    for (reason, harm) in harms {
        let bed = Bed::new();
        let first = bed.start();
        let good = first.snapshot(1);
        let bad = first.snapshot(11);
        drop(first);
        harm(&bed.manifest(&bad));

        let again = bed.start();
        assert_eq!(again.snapshots, [good]);
        assert_eq!(again.bad.len(), 1);
        assert_eq!(again.bad[0].reason, reason, "{}", again.bad[0]);
        assert!(!bed.manifest(&bad).exists());
        assert_eq!(bed.quarantined(".reason.json").len(), 1);
        assert_eq!(again.store.counts().quarantined_for(reason), 1);
        assert!(again.is_right(1) && again.is_right(3));
        // What a newer program may have written is not taken apart at once.
        let kept = matches!(reason, Reason::Version | Reason::UnknownField);
        assert_eq!(bed.object(&sample::id(11), 0).exists(), kept);
        assert_eq!(again.disk().usage().bytes, du(&bed.dir()));
    }
}

#[test]
fn a_manifest_without_all_its_objects_goes_aside() {
    type Harm<'a> = &'a dyn Fn(&Path);
    let harms: [Harm<'_>; 4] = [
        &|path| fs::remove_file(path).unwrap(),
        &|path| fs::write(path, "").unwrap(),
        &|path| {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_len(8192).unwrap();
        },
        &|path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        },
    ];
    for harm in harms {
        let bed = Bed::new();
        let first = bed.start();
        let good = first.snapshot(1);
        let bad = first.snapshot(11);
        // A third one that shares the object about to be harmed.
        let shared = {
            let [state, a, b] = snapshot_objects(&first.store, 11);
            sample::manifest(&state, &[&a, &b])
        };
        first.manifests().put(&shared).unwrap();
        drop(first);
        harm(&bed.object(&sample::id(12), 1));

        let again = bed.start();
        assert_eq!(again.snapshots, [good]);
        assert_eq!(again.bad.len(), 2);
        assert!(again.bad.iter().all(|bad| bad.reason == Reason::Incomplete));
        assert!(!bed.manifest(&bad).exists() && !bed.manifest(&shared).exists());
        assert!(!again.disk().contains(&sample::id(11)), "nobody's any more");
        assert!(!bed.object(&sample::id(11), 0).exists());
        assert!(again.is_right(1) && again.is_right(2) && again.is_right(3));
    }
}

#[test]
fn manifests_that_disagree_about_an_object() {
    let bed = Bed::new();
    let first = bed.start();
    let good = first.snapshot(1);
    let [state, a, b] = snapshot_objects(&first.store, 1);
    let mut liar = sample::manifest(&state, &[&a, &b]);
    liar.kv[1].object_range = TokenRange {
        start: 1000,
        end: 1500,
    };
    first.manifests().put(&liar).unwrap();
    drop(first);
    let again = bed.start();
    // Whichever is read first decides, unless the other is right about the files.
    assert_eq!(again.snapshots.len() + again.bad.len(), 2);
    assert!(again.snapshots.len() <= 1);
    if again.snapshots == [good] {
        assert!(again.is_right(3));
    }
}

#[test]
fn later_saves_decide_the_generation() {
    let bed = Bed::new();
    let first = bed.start();
    let old = first.snapshot(1);
    // The object is lost and saved again by a later snapshot that shares it.
    first.disk().remove(&sample::id(2)).unwrap();
    let [state, a, b] = snapshot_objects(&first.store, 1);
    let mut meta = (*a.meta).clone();
    meta.generation.0 = 1000;
    let a = sample::object(&first.store.arena, meta, 2);
    first.put(&a);
    let new = sample::manifest(&state, &[&a, &b]);
    first.manifests().put(&new).unwrap();
    drop((first, state, a, b));
    let again = bed.start();
    assert_eq!(again.snapshots.len(), 2);
    assert!(again.snapshots.contains(&old) && again.snapshots.contains(&new));
    assert!(again.is_right(2));
    assert_eq!(
        again.disk().meta(&sample::id(2)).unwrap().generation.0,
        1000
    );
}

#[test]
fn a_model_without_description_is_left_alone_until_it_comes_back() {
    for harm in [None, Some("{}"), Some("")] {
        let bed = Bed::new();
        let first = bed.start();
        let manifest = first.snapshot(1);
        let usage = first.disk().usage().bytes;
        drop(first);
        let model = bed
            .dir()
            .join(layout::model_folder(&sample::MODEL).as_path());
        let model = model.join(layout::MODEL);
        match harm {
            None => fs::remove_file(&model).unwrap(),
            Some(text) => fs::write(&model, text).unwrap(),
        }
        let without = scan(bed.open().unwrap()).unwrap();
        assert!(without.snapshots.is_empty() && without.bad.is_empty());
        assert_eq!(without.store.counts().unreadable_models, 1);
        assert!(bed.manifest(&manifest).exists() && bed.object(&sample::id(1), 0).exists());
        assert!(
            without.disk().usage().bytes + 8192 >= usage,
            "still counted"
        );
        assert_eq!(without.disk().usage().bytes, du(&bed.dir()));
        register(&without.store).unwrap();
        drop(without);
        let again = bed.start();
        assert_eq!(again.snapshots, [manifest]);
        assert!(again.is_right(1));
    }
}

#[test]
fn models_are_registered_once() {
    let bed = Bed::new();
    let start = bed.start();
    register(&start.store).unwrap();
    let other = sample::geometry_of(8, 8);
    let conflict = start
        .disk()
        .register_model(sample::MODEL, &other, BTreeMap::new());
    assert!(matches!(conflict, Err(StoreError::Conflict { .. })));
    drop(start);
    let again = scan(bed.open().unwrap()).unwrap();
    assert_eq!(
        *again.disk().geometry(&sample::MODEL).unwrap(),
        sample::geometry()
    );
    let conflict = again
        .disk()
        .register_model(sample::MODEL, &other, BTreeMap::new());
    assert!(matches!(conflict, Err(StoreError::Conflict { .. })));
}

#[test]
fn another_store_format_is_refused() {
    let bed = Bed::new();
    drop(bed.start());
    let format = bed.dir().join(layout::FORMAT);
    let good = fs::read(&format).unwrap();
    reseal(&format, &|t| {
        t.replace("\"format_version\":1", "\"format_version\":7")
    });
    let error = bed.open().unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::Version {
                found: 7,
                known: 1,
                ..
            }
        ),
        "{error}"
    );
    fs::write(&format, "{").unwrap();
    assert!(matches!(bed.open(), Err(StoreError::Damaged { .. })));
    fs::remove_file(&format).unwrap();
    assert!(matches!(bed.open(), Err(StoreError::NotAStore { .. })));
    assert!(bed.dir().join("models").exists());
    fs::write(&format, good).unwrap();
    bed.open().unwrap();
}

#[test]
fn a_folder_of_somebody_else_is_not_touched() {
    let bed = Bed::new();
    fs::create_dir(bed.dir()).unwrap();
    fs::write(bed.dir().join("thesis.tex"), "x").unwrap();
    assert!(matches!(bed.open(), Err(StoreError::NotAStore { .. })));
    assert_eq!(fs::read_dir(bed.dir()).unwrap().count(), 1);
    fs::remove_file(bed.dir().join("thesis.tex")).unwrap();
    // A fresh file system has this.
    fs::create_dir(bed.dir().join("lost+found")).unwrap();
    bed.open().unwrap();
}

#[test]
fn one_process_at_a_time() {
    let bed = Bed::new();
    let first = bed.start();
    let error = bed.open().unwrap_err();
    let StoreError::Locked { owner, .. } = &error else {
        panic!("{error}");
    };
    assert!(owner.contains(&std::process::id().to_string()), "{owner}");
    assert!(owner.contains("Z (") && owner.ends_with(" ago)"), "{owner}");
    drop(first);
    bed.open().unwrap();
}

#[test]
fn manifests_can_be_removed_and_go_aside_when_bad() {
    let bed = Bed::new();
    let start = bed.start();
    let a = start.snapshot(1);
    let b = start.snapshot(11);
    assert!(start.manifests().remove(&a.snapshot).unwrap());
    assert!(!start.manifests().remove(&a.snapshot).unwrap());
    let missed = start.manifests().get(&a.snapshot);
    assert!(matches!(missed, Err(StoreError::NoSnapshot { .. })));
    fs::write(bed.manifest(&b), "[]").unwrap();
    let damaged = start.manifests().get(&b.snapshot);
    assert!(matches!(damaged, Err(StoreError::Damaged { .. })));
    assert!(start.manifests().is_empty());
    assert!(start.manifests().scan(&mut |_| {}).is_err(), "only once");

    let mut incomplete = a;
    incomplete.kv[0].object = sample::id(99);
    let refused = start.manifests().put(&incomplete);
    assert!(matches!(refused, Err(StoreError::NotFound { .. })));
}

#[test]
fn the_directory_never_outgrows_its_budget() {
    let mut bed = Bed::new();
    bed.bytes = ByteSize::mib(2);
    let start = bed.start();
    let budget = start.disk().usage().budget;
    let mut last = None;
    for seed in 0..1000u64 {
        let object = sample::kv(&start.store.arena, &sample::geometry(), 0, 1000, seed);
        let put = start.disk().put(&object);
        let on_disk = du(&bed.dir());
        assert!(on_disk <= budget + 3 * 4096, "{on_disk}");
        assert_eq!(start.disk().usage().bytes, on_disk);
        if let Err(error) = put {
            last = Some(error);
            break;
        }
    }
    assert!(matches!(last, Some(StoreError::NoSpace { .. })));
    drop(start);
    // Everything was an orphan.
    let again = bed.start();
    assert_eq!(again.disk().usage().bytes, du(&bed.dir()));
    again.put(&sample::kv(
        &again.store.arena,
        &sample::geometry(),
        0,
        1000,
        1,
    ));
}

#[test]
fn free_space_has_a_floor() {
    let mut bed = Bed::new();
    bed.min_free = ByteSize::b(u64::MAX / 2);
    let start = scan(bed.open().unwrap()).unwrap();
    let refused = register(&start.store);
    assert!(matches!(refused, Err(StoreError::Floor { .. })));
    drop(start);
    bed.min_free = ByteSize::b(0);
    bed.start();
}

#[test]
fn the_token_log_starts_empty_and_is_counted() {
    use crate::types::Tokens;
    let bed = Bed::new();
    let start = bed.start();
    let mut log = start.store.token_log().unwrap();
    let before = start.disk().usage().bytes;
    log.append(&vec![3; 5000]).unwrap();
    assert_eq!(start.disk().usage().bytes, before + 20_480);
    assert_eq!(start.disk().usage().bytes, du(&bed.dir()));
    // Above the budget it is counted all the same: whoever owns that makes room.
    start.disk().set_budget(0);
    log.append(&vec![3; 5000]).unwrap();
    assert_eq!(start.disk().usage().bytes, before + 40_960);
    // Tokens that nobody knows any more give their room back.
    log.release(0, 9000);
    assert_eq!(start.disk().usage().bytes, before + 8192);
    // In memory it takes none.
    log.go_on_in_memory().unwrap();
    assert_eq!(log.len(), 10_000);
    let mut last = Vec::new();
    log.get(9999, 1, &mut |run| last.extend_from_slice(run));
    assert_eq!(last, [3]);
    assert_eq!(start.disk().usage().bytes, before);
    drop((log, start));
    let again = bed.start();
    let log = again.store.token_log().unwrap();
    assert!(log.is_empty());
}
