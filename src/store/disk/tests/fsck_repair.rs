//! Repairing: every damage is dealt with, nothing sound is touched, and it can be killed anywhere.

use std::os::unix::fs::symlink;

use super::fsck::{check, options, run, state};
use super::true_store::TrueStore;
use super::*;
use crate::store::{
    fault::Fault,
    fsck::{Class, Options, Report},
    sealed_json,
};

/// What is done, the class of what is found, its reason, and how many snapshots are left.
type Case = (
    &'static str,
    fn(&TrueStore),
    Class,
    Option<&'static str>,
    usize,
);

const CASES: &[Case] = &[
    (
        "a bit of a state",
        |it| flip(&state_of(it, 1), 5000),
        Class::Damage,
        Some("checksum"),
        2,
    ),
    (
        "a bit of the first KV",
        |it| flip(&kv_of(it, 0, 0), 9000),
        Class::Damage,
        Some("checksum"),
        0,
    ),
    (
        "a bit of the branch's KV",
        |it| flip(&kv_of(it, 2, 2), 9000),
        Class::Damage,
        Some("checksum"),
        2,
    ),
    (
        "a bit of a token",
        |it| flip(&kv_of(it, 1, 1), 4100),
        Class::Damage,
        Some("checksum"),
        1,
    ),
    (
        "a bit of a header",
        |it| flip(&state_of(it, 1), 200),
        Class::Damage,
        Some("header"),
        2,
    ),
    (
        "a bit of a length",
        |it| flip(&state_of(it, 1), 1),
        Class::Damage,
        Some("length"),
        2,
    ),
    (
        "a state less a byte",
        |it| cut(&state_of(it, 1), 1),
        Class::Damage,
        Some("length"),
        2,
    ),
    (
        "an empty KV",
        |it| cut(&kv_of(it, 2, 2), u64::MAX),
        Class::Damage,
        Some("length"),
        2,
    ),
    (
        "no state",
        |it| fs::remove_file(state_of(it, 2)).unwrap(),
        Class::Damage,
        Some("incomplete"),
        2,
    ),
    (
        "another's state",
        |it| {
            fs::copy(state_of(it, 0), state_of(it, 1)).unwrap();
        },
        Class::Damage,
        Some("mismatch"),
        2,
    ),
    (
        "a link as a state",
        |it| relink(&state_of(it, 1)),
        Class::Damage,
        Some("not_a_file"),
        2,
    ),
    (
        "a bit of a manifest",
        |it| flip(&manifest_of(it, 1), 60),
        Class::Damage,
        Some("checksum"),
        2,
    ),
    (
        "half a manifest",
        |it| cut(&manifest_of(it, 1), 200),
        Class::Damage,
        Some("checksum"),
        2,
    ),
    (
        "a link as a manifest",
        |it| relink(&manifest_of(it, 1)),
        Class::Damage,
        Some("not_a_file"),
        2,
    ),
    (
        "a manifest without KV",
        |it| change(it, |m| m.kv.clear()),
        Class::Damage,
        Some("invalid"),
        2,
    ),
    (
        "another shard count",
        |it| change(it, |m| m.shards = 3),
        Class::Damage,
        Some("incomplete"),
        2,
    ),
    (
        "a name at random",
        |it| {
            let to = manifest_of(it, 1).with_file_name("00000000-0000-7000-8000-000000000000.json");
            fs::rename(manifest_of(it, 1), to).unwrap();
        },
        Class::Damage,
        Some("mismatch"),
        2,
    ),
    (
        "a bit of a conversation",
        |it| flip(&it.conversation, 30),
        Class::Damage,
        Some("checksum"),
        3,
    ),
    (
        "a bit of the format file",
        |it| flip(&it.bed.dir().join("format.json"), 5),
        Class::Damage,
        Some("checksum"),
        3,
    ),
    (
        "no format file",
        |it| fs::remove_file(it.bed.dir().join("format.json")).unwrap(),
        Class::Damage,
        Some("incomplete"),
        3,
    ),
    (
        "a link as the format file",
        |it| relink(&it.bed.dir().join("format.json")),
        Class::Damage,
        Some("not_a_file"),
        3,
    ),
    (
        "a pipe",
        |it| {
            nix::unistd::mkfifo(
                &it.bed.dir().join("models/pipe"),
                nix::sys::stat::Mode::S_IRWXU,
            )
            .unwrap();
        },
        Class::Damage,
        Some("not_a_file"),
        3,
    ),
    (
        "a temporary file",
        |it| fs::write(state_of(it, 1).with_file_name(".tmp-x"), "half").unwrap(),
        Class::Leftover,
        None,
        3,
    ),
    (
        "a lost manifest",
        |it| fs::remove_file(manifest_of(it, 2)).unwrap(),
        Class::Leftover,
        None,
        2,
    ),
    (
        "a shard too many",
        |it| {
            let state = &it.manifests[1].state.object;
            fs::copy(it.bed.object(state, 0), it.bed.object(state, 2)).unwrap();
        },
        Class::Leftover,
        None,
        3,
    ),
    (
        "an empty folder",
        |it| fs::create_dir_all(it.bed.dir().join("refs/0e")).unwrap(),
        Class::Leftover,
        None,
        3,
    ),
    (
        "a strange file",
        |it| fs::write(it.bed.dir().join("models/README"), "mine").unwrap(),
        Class::Note,
        None,
        3,
    ),
];

fn state_of(it: &TrueStore, snapshot: usize) -> PathBuf {
    it.bed.object(&it.manifests[snapshot].state.object, 1)
}

fn kv_of(it: &TrueStore, snapshot: usize, part: usize) -> PathBuf {
    it.bed.object(&it.manifests[snapshot].kv[part].object, 0)
}

fn manifest_of(it: &TrueStore, snapshot: usize) -> PathBuf {
    it.bed.manifest(&it.manifests[snapshot])
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

fn cut(path: &Path, by: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len.saturating_sub(by)).unwrap();
}

fn relink(path: &Path) {
    fs::remove_file(path).unwrap();
    symlink("/etc/passwd", path).unwrap();
}

/// The second turn's manifest says something else, and is sealed again.
fn change(it: &TrueStore, f: fn(&mut Manifest)) {
    let mut manifest = it.manifests[1].clone();
    f(&mut manifest);
    let bytes = sealed_json::encode(&manifest).unwrap();
    fs::write(manifest_of(it, 1), bytes).unwrap();
}

fn repair(it: &TrueStore) -> Report {
    let options = Options {
        repair: true,
        ..options(&it.bed.dir())
    };
    run(&options).unwrap()
}

#[test]
fn every_damage_is_found_and_dealt_with() {
    let passwd = fs::read("/etc/passwd").unwrap();
    for (name, damage, class, reason, left) in CASES {
        let it = TrueStore::new();
        damage(&it);
        let before = state(&it.bed.dir());
        let found = check(&it.bed.dir());
        let mut of = found.of(*class);
        assert!(
            of.any(|finding| finding.reason == *reason),
            "{name}: {found:#?}"
        );
        assert_eq!(found.left() > 0, *class == Class::Damage, "{name}");
        assert_eq!(found.repaired(), 0, "{name}");
        assert_eq!(found.snapshots, *left as u64, "{name}");
        assert_eq!(found.space.total(), du(&it.bed.dir()), "{name}");
        assert_eq!(
            state(&it.bed.dir()),
            before,
            "{name}: a check changes nothing"
        );

        let repaired = repair(&it);
        assert_eq!(repaired.left(), 0, "{name}: {repaired:#?}");
        assert_eq!(repaired.repaired() > 0, *class != Class::Note, "{name}");
        let damage = repaired.of(Class::Damage).count();
        // What is gone altogether cannot be put aside; each other damage has a note.
        let aside = it.bed.quarantined(".reason.json").len();
        let gone = usize::from(*name == "no format file");
        assert_eq!(aside, damage - gone, "{name}");

        let again = check(&it.bed.dir());
        let bad = again.of(Class::Damage).chain(again.of(Class::Leftover));
        assert_eq!(bad.count(), 0, "{name}: {again:#?}");
        assert_eq!(again.space.total(), du(&it.bed.dir()), "{name}");
        assert_eq!(
            repair(&it).repaired(),
            0,
            "{name}: a second repair has nothing to do"
        );
        // A start finds nothing to complain about, and every sound snapshot.
        let start = it.bed.start();
        assert_eq!(start.bad, [], "{name}");
        assert_eq!(start.store.counts().orphans, 0, "{name}");
        drop(start);
        assert_eq!(it.read_all().len(), *left, "{name}");
    }
    assert_eq!(fs::read("/etc/passwd").unwrap(), passwd);
}

#[test]
fn a_model_without_description_waits_for_its_worker() {
    let it = TrueStore::new();
    let model = it
        .bed
        .dir()
        .join(layout::model_folder(&sample::MODEL).as_path());
    flip(&model.join("model.json"), 40);
    let found = check(&it.bed.dir());
    assert_eq!((found.left(), found.snapshots), (1, 0));
    let repaired = repair(&it);
    assert_eq!((repaired.left(), repaired.repaired()), (0, 1));
    let again = check(&it.bed.dir());
    assert_eq!((again.left(), again.of(Class::Note).count()), (0, 1));
    // It attaches, and at the next start all is there.
    drop(it.bed.start());
    assert_eq!(check(&it.bed.dir()).snapshots, 3);
    assert_eq!(it.read_all().len(), 3);
}

#[test]
fn what_a_manifest_of_another_version_names_is_kept() {
    let it = TrueStore::new();
    let text = fs::read_to_string(manifest_of(&it, 2)).unwrap();
    let body = text.rsplit_once(",\"checksum\"").unwrap().0;
    let body = body.replacen("\"format_version\":1", "\"format_version\":7", 1);
    let sum = blake3::hash(body.as_bytes()).to_hex();
    fs::write(
        manifest_of(&it, 2),
        format!("{body},\"checksum\":\"{sum}\"}}\n"),
    )
    .unwrap();
    let repaired = repair(&it);
    assert_eq!(
        (repaired.left(), repaired.of(Class::Leftover).count()),
        (0, 0)
    );
    assert!(repaired.of(Class::Note).count() > 0);
    assert!(kv_of(&it, 2, 2).exists());
}

#[test]
fn derived_files_go_before_anything_else_is_changed() {
    let it = TrueStore::new();
    let derived = ["tokens.log", "tokens.00ff.log", "catalog.log"];
    for name in derived {
        fs::write(it.bed.dir().join(name), "x").unwrap();
    }
    let there = || {
        derived
            .iter()
            .filter(|name| it.bed.dir().join(name).exists())
            .count()
    };
    assert_eq!(check(&it.bed.dir()).findings, []);
    assert_eq!(repair(&it).repaired(), 0);
    assert_eq!(there(), 3, "nothing was wrong");
    fs::write(it.bed.dir().join(".tmp-x"), "half").unwrap();
    assert_eq!(repair(&it).repaired(), 1);
    assert_eq!(there(), 3, "what nobody names is not in them");
    flip(&state_of(&it, 1), 5000);
    repair(&it);
    assert_eq!(there(), 0);
}

#[test]
fn a_repair_that_is_killed_anywhere_is_ended_by_the_next() {
    let damage = |it: &TrueStore| {
        flip(&state_of(it, 1), 5000);
        flip(&it.conversation, 30);
        flip(&it.bed.dir().join("format.json"), 5);
        fs::remove_file(manifest_of(it, 2)).unwrap();
        fs::write(it.bed.dir().join(".tmp-x"), "half").unwrap();
    };
    for fault in [Fault::Torn, Fault::Errno(nix::libc::EIO)] {
        let mut nth = 0;
        loop {
            let it = TrueStore::new();
            damage(&it);
            let faults = Faults::default();
            faults.arm(None, nth, fault);
            let options = Options {
                repair: true,
                threads: 1,
                ..options(&it.bed.dir())
            };
            let clock = ManualClock::new(Millis(2_000));
            // Whatever it says, it ends.
            let _ = crate::store::fsck::check_with(&options, &clock, &|_| {}, faults.clone());
            let thrown = faults.thrown() > 0;
            let second = repair(&it);
            assert_eq!(second.left(), 0, "{nth}: {second:#?}");
            let clean = check(&it.bed.dir());
            assert_eq!(clean.of(Class::Leftover).count(), 0, "{nth}: {clean:#?}");
            assert_eq!(clean.left(), 0, "{nth}: {clean:#?}");
            let left = it.read_all();
            // An error of the medium may have cost what could not be read.
            if fault == Fault::Torn {
                assert_eq!(clean.findings, [], "{nth}");
                assert_eq!(left, [it.manifests[0].clone()], "{nth}");
            }
            if !thrown {
                break;
            }
            nth += 1;
        }
        assert!(nth > 50, "{nth} operations");
    }
}
