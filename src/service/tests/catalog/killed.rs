//! Starts that are killed, and starts after a kill between two writes.

use std::time::{Duration, SystemTime};

use super::*;
use crate::store::catalog::{
    Image,
    frame::{Framed, HEADER, unframe},
};
use crate::store::fsck;
use crate::types::Millis;
use crate::util::clock::ManualClock;

fn folders(data: &Path) -> Vec<PathBuf> {
    let models = fs::read_dir(data.join("models")).unwrap();
    let mut folders: Vec<PathBuf> = models
        .flat_map(|model| fs::read_dir(model.unwrap().path().join("manifests")).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.sort();
    folders
}

/// Gives each folder of manifests a time of its own, none so young that it is listed anyway.
fn age(data: &Path) {
    let folders = folders(data);
    assert!(folders.len() > 3);
    for (folder, age) in folders.iter().zip(1..) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000 - 1000 * age);
        fs::File::open(folder).unwrap().set_modified(time).unwrap();
    }
}

fn epoch(log: &[u8]) -> u64 {
    u64::from_le_bytes(log[12..20].try_into().unwrap())
}

/// Where the frames of a log end.
fn ends(log: &[u8]) -> Vec<usize> {
    let mut ends = vec![HEADER];
    while let Framed::Body(_, next) = unframe(epoch(log), log, *ends.last().unwrap()) {
        ends.push(next);
    }
    assert_eq!(ends.last(), Some(&log.len()));
    ends
}

/// What a check of a copy finds damaged.
fn damage(data: &Path) -> Vec<String> {
    let folder = tempfile::TempDir::new().unwrap();
    copy(data, folder.path());
    let options = fsck::Options {
        path: folder.path().to_owned(),
        repair: false,
        fast: false,
        threads: 1,
        quarantine: 0,
    };
    let report = fsck::check(&options, &ManualClock::new(Millis(1000)), &|_| {}).unwrap();
    let damage = report.findings.iter();
    let damage = damage.filter(|it| it.class == fsck::Class::Damage);
    damage.map(|it| format!("{it:?}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_killed_while_it_writes_the_catalog_anew_loses_nothing() {
    let world = some(trusting()).await;
    let mut fake = Fake::attach(&world).await;
    // Several in one folder.
    for n in 0..200_u32 {
        let tokens = [&prompt(60, 100)[..], &prompt(100 + n, 30)].concat();
        fake.turn(&format!("small{n}"), &tokens, 120).await;
    }
    world.all_durable().await;
    world.service.shutdown().await;
    let data = world.folder.path().join("data");
    fs::remove_file(data.join("catalog.json")).unwrap();
    age(&data);
    let world = world.killed().await;
    assert!(!world.was_recalled());
    let right = picture(&world);
    let log = fs::read(catalog(&world)).unwrap();
    let ends = ends(&log);
    for end in ends.iter().step_by(ends.len() / 12) {
        let folder = tempfile::TempDir::new().unwrap();
        let there = folder.path().join("data");
        copy(&data, &there);
        age(&there);
        fs::write(there.join("catalog.log"), &log[..*end]).unwrap();
        let other = World::at(folder, trusting()).await;
        assert!(other.was_recalled());
        assert!(
            picture(&other) == right,
            "{} of {} snapshots after {end} of {} bytes",
            picture(&other).snapshots.len(),
            right.snapshots.len(),
            log.len()
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_after_a_kill_between_a_manifest_and_its_drop_writes_the_drop() {
    let world = some(trusting()).await;
    let before = world.files("manifests");
    let mut fake = Fake::attach(&world).await;
    // Its tokens fill pages of the token log.
    fake.turn("long", &prompt(70, 4000), 3900).await;
    world.all_durable().await;
    let data = world.folder.path().join("data");
    let mut manifests = world.files("manifests");
    manifests.retain(|path| !before.contains(path));
    let [manifest] = &manifests[..] else {
        panic!("{manifests:?}");
    };
    fs::remove_file(manifest).unwrap();
    let world = world.killed().await;
    assert!(world.was_recalled());
    let right = picture(&world);
    assert_eq!(right.snapshots.len(), before.len());
    assert_eq!(damage(&data), [""; 0]);
    let log = fs::read(catalog(&world)).unwrap();
    let image = Image::parse(log.clone(), epoch(&log)).unwrap();
    assert_eq!(image.snapshots(), before.len());
    // The tokens take no room any more.
    let world = world.killed().await;
    assert!(world.was_recalled());
    assert_eq!(picture(&world), right);
    assert_same_as_thorough(&world).await;
}
