//! What a check finds, and that it changes nothing.

use std::os::unix::fs::{MetadataExt as _, symlink};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::true_store::{TrueStore, snapshot, tokens};
use super::*;
use crate::{
    store::{
        Reason,
        fsck::{self, Class, Options, Report},
    },
    types::TokenRange,
    util::clock::ManualClock,
};

pub(super) fn options(path: &Path) -> Options {
    Options {
        path: path.to_owned(),
        repair: false,
        fast: false,
        threads: 3,
        quarantine: 1 << 30,
    }
}

pub(super) fn run(options: &Options) -> Result<Report, StoreError> {
    fsck::check(options, &ManualClock::new(Millis(2_000)), &|_| {})
}

pub(super) fn check(path: &Path) -> Report {
    run(&options(path)).unwrap()
}

/// Everything in a folder that a change would show in.
pub(super) fn state(path: &Path) -> BTreeMap<PathBuf, (u64, u64, i64, i64)> {
    let mut all = BTreeMap::new();
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let seen = (meta.ino(), meta.len(), meta.ctime(), meta.ctime_nsec());
            if meta.is_dir() {
                folders.push(path.clone());
            }
            all.insert(path, seen);
        }
    }
    all
}

#[test]
fn a_sound_store_is_clean_and_counted() {
    let it = TrueStore::new();
    let before = state(&it.bed.dir());
    let phases = parking_lot::Mutex::new(BTreeMap::new());
    let watch = |progress: fsck::Progress| {
        let mut phases = phases.lock();
        let last: &mut u64 = phases.entry(progress.phase).or_default();
        *last = (*last).max(progress.done);
        assert!(progress.done <= progress.total);
    };
    let clock = ManualClock::new(Millis(5));
    let report = fsck::check(&options(&it.bed.dir()), &clock, &watch).unwrap();
    assert_eq!(report.findings, []);
    assert_eq!(
        (report.snapshots, report.objects, report.conversations),
        (3, it.copies.len() as u64, 1)
    );
    // The second KV object is used twice: up to 1500, and up to 1200.
    assert!(
        (2100..=1024 * 3 + 1000 + 776).contains(&report.tokens),
        "{}",
        report.tokens
    );
    assert!(report.verified_bytes > 0);
    assert_eq!(report.space.total(), du(&it.bed.dir()));
    assert_eq!(report.space.other, 0);
    let [model] = &report.models[..] else {
        panic!("{:?}", report.models);
    };
    assert_eq!(model.fingerprint, Some(sample::MODEL.to_string()));
    assert_eq!(model.description["name"], "sample");
    assert_eq!((model.snapshots, model.namespaces.len()), (3, 1));
    let phases = phases.into_inner();
    assert_eq!(phases["manifests"], 3);
    assert_eq!(phases["objects"], it.copies.len() as u64);
    assert_eq!(phases["tokens"], 3);
    assert_eq!(state(&it.bed.dir()), before, "nothing was changed");
}

#[test]
fn who_uses_it_is_told_and_readers_do_not_mind_each_other() {
    let it = TrueStore::new();
    let store = it.bed.open().unwrap();
    for repair in [false, true] {
        let options = Options {
            repair,
            ..options(&it.bed.dir())
        };
        let Err(StoreError::Locked { owner, .. }) = run(&options) else {
            panic!("it is in use");
        };
        assert!(
            owner.contains(&format!("process {}", std::process::id())),
            "{owner}"
        );
    }
    drop(store);
    // While one check reads, so may another, and no daemon may write.
    let inner = AtomicU64::new(0);
    let watch = |_: fsck::Progress| {
        if inner.fetch_add(1, Relaxed) == 0 {
            assert_eq!(check(&it.bed.dir()).findings, []);
            assert!(matches!(it.bed.open(), Err(StoreError::Locked { .. })));
        }
    };
    let clock = ManualClock::new(Millis(5));
    fsck::check(&options(&it.bed.dir()), &clock, &watch).unwrap();
    assert!(inner.into_inner() > 0);
}

#[test]
fn what_is_no_store_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x");
    for repair in [false, true] {
        let refused = |path: &Path| {
            let options = Options {
                repair,
                ..options(path)
            };
            run(&options).unwrap_err()
        };
        assert!(refused(&path).is_missing());
        assert!(!path.exists(), "nothing is made");
        fs::create_dir_all(&path).unwrap();
        assert!(matches!(refused(&path), StoreError::Invalid { .. }));
        fs::write(path.join("mine"), "x").unwrap();
        assert!(matches!(refused(&path), StoreError::NotAStore { .. }));
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
        fs::remove_dir_all(&path).unwrap();
    }
    // Another version is not touched either.
    let it = TrueStore::new();
    let format = it.bed.dir().join(layout::FORMAT);
    fs::write(&format, r#"{"format_version":9}"#).unwrap();
    let options = Options {
        repair: true,
        ..options(&it.bed.dir())
    };
    let error = run(&options).unwrap_err();
    assert!(
        matches!(error, StoreError::Version { found: 9, .. }),
        "{error}"
    );
}

#[test]
fn fast_leaves_out_chunks_only() {
    let it = TrueStore::new();
    let object = it.bed.object(&it.manifests[1].state.object, 1);
    let whole = fs::read(&object).unwrap();
    let with = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&object, bytes).unwrap();
        let fast = Options {
            fast: true,
            ..options(&it.bed.dir())
        };
        let report = run(&fast).unwrap();
        assert_eq!(report.verified_bytes, 0);
        (report.left() > 0, check(&it.bed.dir()).left() > 0)
    };
    assert_eq!(with(whole.len() - 1), (false, true), "payload");
    assert_eq!(with(100), (true, true), "header");
}

#[test]
fn tokens_that_give_other_addresses_are_found() {
    let it = TrueStore::new();
    let start = it.bed.start();
    let range = |start, end| TokenRange { start, end };
    let (text, other) = (tokens(1, 1500), tokens(9, 1500));
    // Its second block is another conversation's; and its state alone is.
    let (mut block, objects) = snapshot(
        &start.store,
        2,
        &text,
        &[
            (&text, range(0, 1024), 1024),
            (&other, range(1024, 1500), 1500),
        ],
    );
    block.snapshot = crate::types::SnapshotId::new();
    let (mut alone, more) = snapshot(&start.store, 2, &other, &[(&other, range(0, 1500), 1500)]);
    alone.kv.clone_from(&it.manifests[1].kv);
    for object in objects.iter().chain(&more) {
        start.put(object);
    }
    for manifest in [&block, &alone] {
        start.manifests().put(manifest).unwrap();
    }
    drop(start);
    let report = check(&it.bed.dir());
    let damage: Vec<_> = report.of(Class::Damage).collect();
    assert_eq!(damage.len(), 2, "{damage:?}");
    for finding in damage {
        assert_eq!(finding.reason, Some(Reason::Mismatch.as_str()));
        assert!(
            finding.detail.ends_with("belongs to other tokens"),
            "{finding:?}"
        );
    }
    assert_eq!(report.snapshots, 3);
}

#[test]
fn a_lying_manifest_does_not_cost_the_honest_one_its_object() {
    let it = TrueStore::new();
    let honest = &it.manifests[0];
    let mut liar = honest.clone();
    liar.snapshot = crate::types::SnapshotId::new();
    liar.shards = 1;
    let bytes = crate::store::sealed_json::encode(&liar).unwrap();
    let path = it.bed.manifest(&liar);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    let report = check(&it.bed.dir());
    let damage: Vec<_> = report.of(Class::Damage).collect();
    assert_eq!(damage.len(), 1, "{damage:?}");
    assert!(it.bed.dir().join(&damage[0].path) == path);
    assert_eq!(report.snapshots, 3);
}

#[test]
fn a_link_in_place_of_a_folder_is_not_followed() {
    let it = TrueStore::new();
    let elsewhere = tempfile::tempdir().unwrap();
    for name in ["refs", "models"] {
        let folder = it.bed.dir().join(name);
        let aside = elsewhere.path().join(name);
        assert!(
            std::process::Command::new("mv")
                .args([&folder, &aside])
                .status()
                .unwrap()
                .success()
        );
        symlink(&aside, &folder).unwrap();
    }
    let before = state(elsewhere.path());
    // Without its folder of models it is still one by its format file.
    let report = check(&it.bed.dir());
    let damage: Vec<_> = report
        .of(Class::Damage)
        .map(|f| (&*f.path, f.reason))
        .collect();
    let reason = Some(Reason::NotAFile.as_str());
    assert_eq!(damage, [("models", reason), ("refs", reason)]);
    let options = Options {
        repair: true,
        ..options(&it.bed.dir())
    };
    assert_eq!(run(&options).unwrap().left(), 0);
    assert_eq!(state(elsewhere.path()), before);
    assert_eq!(check(&it.bed.dir()).left(), 0);
}
