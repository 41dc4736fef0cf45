//! A start from the catalog is a start from the manifests.

mod killed;
mod story;
mod tokens;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::{Config as ProptestConfig, TestRunner};

use super::fake::*;
use crate::service::{DeleteRequest, Selector};
use crate::store::Tier;
use crate::store::fault::{Fault, Op};
use crate::types::{SnapshotId, TierKind};

/// Settings under which every start trusts the catalog.
fn trusting() -> Settings {
    let mut settings = Settings::default();
    settings.config.catalog_from = 0;
    settings.config.preload = bytesize::ByteSize::b(0);
    settings
}

/// Settings under which every start reads all manifests.
fn thorough() -> Settings {
    let mut settings = trusting();
    settings.config.catalog_from = usize::MAX;
    settings
}

/// All that a daemon knows of its disk.
#[derive(Debug, PartialEq)]
struct Picture {
    snapshots: BTreeMap<SnapshotId, String>,
    conversations: BTreeMap<String, String>,
    objects: BTreeMap<String, String>,
    usage: String,
    /// Files on disk but for the catalog's.
    files: Vec<PathBuf>,
}

fn picture(world: &World) -> Picture {
    let core = world.service.core.lock();
    core.index.check().unwrap();
    let ids: Vec<SnapshotId> = core.index.iter().collect();
    let mut snapshots = BTreeMap::new();
    for id in ids {
        let info = core.index.snapshot(&id).unwrap();
        let hit = core.index.hit(&id).unwrap();
        let record = &core.records[&id];
        let mut tokens = Vec::new();
        assert!(core.index.read_tokens(&id, &mut tokens));
        assert_eq!(hit.kv.last().map(|part| part.range.end), Some(hit.boundary));
        let kv: Vec<_> = hit.kv.iter().map(|part| part.object).collect();
        assert!(kv.iter().all(|object| core.index.object(object).is_some()));
        let text = format!(
            "{info:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
            hit.state,
            blake3::hash(format!("{tokens:?}").as_bytes()),
            record.namespace,
            record.state,
            record.generation,
            record.created,
            record.conversation,
            record.rid,
        );
        snapshots.insert(id, text);
    }
    assert_eq!(core.records.len(), snapshots.len());
    let conversations = core.conversations.iter().map(|(key, it)| {
        let text = format!("{:?} {:?} {:?}", it.turns, it.branches, it.updated);
        (format!("{key:?}"), text)
    });
    let conversations = conversations.collect();
    let usage = format!("{:?}", core.index.usage(TierKind::Disk));
    drop(core);
    let disk = world.service.store.disk.as_ref().unwrap();
    let objects = disk.list();
    let objects = objects
        .iter()
        .map(|meta| (meta.id.to_string(), format!("{meta:?}")));
    let data = world.folder.path().join("data");
    assert_eq!(
        disk.usage().bytes,
        du(&data),
        "what is counted is what is there"
    );
    Picture {
        snapshots,
        conversations,
        objects: objects.collect(),
        usage,
        files: files(&data, &data),
    }
}

fn is_catalog(path: &Path) -> bool {
    let name = path.file_name().unwrap().to_str().unwrap();
    name.starts_with("catalog.") || name.starts_with("tokens.")
}

/// Files and folders, whole blocks each; holes of the token log take no room.
fn du(path: &Path) -> u64 {
    let metadata = fs::symlink_metadata(path).unwrap();
    if metadata.is_dir() {
        let entries = fs::read_dir(path).unwrap();
        return 4096 + entries.map(|entry| du(&entry.unwrap().path())).sum::<u64>();
    }
    let name = path.file_name().unwrap().to_str().unwrap();
    if name.starts_with("tokens.") {
        return metadata.blocks() * 512;
    }
    metadata.len().next_multiple_of(4096)
}

fn files(root: &Path, path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(root, &path));
        } else if !is_catalog(&path) {
            found.push(path.strip_prefix(root).unwrap().to_owned());
        }
    }
    found.sort();
    found
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            copy(&entry.path(), &target);
        } else if kind.is_file() {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A daemon on a copy of the data directory.
async fn on_copy(world: &World, settings: Settings) -> World {
    let folder = tempfile::TempDir::new().unwrap();
    copy(
        &world.folder.path().join("data"),
        &folder.path().join("data"),
    );
    World::at(folder, settings).await
}

/// What both kinds of start make of the same files. The first is that of `world`, just started.
async fn assert_same_as_thorough(world: &World) {
    let other = on_copy(world, thorough()).await;
    assert_eq!(picture(world), picture(&other));
    assert!(!other.was_recalled());
}

fn compact(world: &World) {
    let manifests = world.service.store.manifests.as_ref();
    manifests.unwrap().compact().unwrap();
}

fn catalog(world: &World) -> PathBuf {
    world.folder.path().join("data/catalog.log")
}

/// Some conversations, a branch, a deletion, and a snapshot whose parent is gone.
async fn some(settings: Settings) -> World {
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    for n in 0..3_u32 {
        let tokens = prompt(n, 2000);
        for boundary in [300, 700, 1200] {
            fake.turn(&format!("c{n}"), &tokens[..boundary + 20], boundary)
                .await;
            world.all_durable().await;
        }
    }
    let mut branch = prompt(0, 2000)[..900].to_vec();
    branch.extend(prompt(9, 200));
    fake.turn("branch", &branch, 1050).await;
    fake.turn("gone", &prompt(20, 500), 400).await;
    world.all_durable().await;
    delete(&world, "gone").await;
    let middle = Selector {
        turn_number: Some(2),
        ..Selector::conversation("c1")
    };
    let request = DeleteRequest {
        select: middle,
        whole: false,
    };
    world.service.delete(request).await.unwrap();
    world
}

async fn delete(world: &World, conversation: &str) {
    let select = Selector::conversation(conversation);
    let request = DeleteRequest {
        select,
        whole: true,
    };
    world.service.delete(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_kill_and_after_an_orderly_end() {
    let world = some(trusting()).await;
    let world = world.killed().await;
    assert!(world.was_recalled());
    assert_same_as_thorough(&world).await;
    let before = picture(&world);
    world.service.shutdown().await;
    let world = world.killed().await;
    assert!(world.was_recalled());
    assert_eq!(picture(&world), before);
    // It is used as any other.
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(2, 2000);
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1200);
    fake.turn("c2", &tokens, 1900).await;
    world.all_durable().await;
    delete(&world, "branch").await;
    let world = world.killed().await;
    assert!(world.was_recalled());
    assert_same_as_thorough(&world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compacted_catalog_says_the_same() {
    let world = some(trusting()).await;
    let before = fs::metadata(catalog(&world)).unwrap().len();
    compact(&world);
    assert!(fs::metadata(catalog(&world)).unwrap().len() < before);
    let mut fake = Fake::attach(&world).await;
    fake.turn("c0", &prompt(0, 2000), 1900).await;
    world.all_durable().await;
    let world = world.killed().await;
    assert!(world.was_recalled());
    assert_same_as_thorough(&world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_cannot_be_trusted_is_rebuilt() {
    let world = some(trusting()).await;
    world.service.shutdown().await;
    let right = picture(&on_copy(&world, thorough()).await);
    let state = |change: fn(&mut serde_json::Value)| {
        move |data: &Path| {
            let path = data.join("catalog.json");
            let mut value: serde_json::Value =
                serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            change(&mut value);
            value.as_object_mut().unwrap().remove("checksum");
            let text = value.to_string();
            let body = text.strip_suffix('}').unwrap();
            let sum = blake3::hash(body.as_bytes()).to_hex();
            fs::write(path, format!("{body},\"checksum\":\"{sum}\"}}\n")).unwrap();
        }
    };
    type Harm = Box<dyn Fn(&Path)>;
    let harms: Vec<(&str, Harm)> = vec![
        (
            "no log",
            Box::new(|data| fs::remove_file(data.join("catalog.log")).unwrap()),
        ),
        (
            "no state",
            Box::new(|data| fs::remove_file(data.join("catalog.json")).unwrap()),
        ),
        (
            "another version",
            Box::new(state(|value| value["format_version"] = 2.into())),
        ),
        (
            "another epoch",
            Box::new(state(|value| value["epoch"] = 7.into())),
        ),
        (
            "another boot",
            Box::new(state(|value| {
                value["closed"] = serde_json::Value::Null;
                value["boot"] = "x".into();
            })),
        ),
        (
            "shorter than said",
            Box::new(|data| {
                let file = fs::File::options()
                    .write(true)
                    .open(data.join("catalog.log"))
                    .unwrap();
                file.set_len(1000).unwrap();
            }),
        ),
        (
            "a version of the log",
            Box::new(|data| {
                let path = data.join("catalog.log");
                let mut bytes = fs::read(&path).unwrap();
                bytes[8] = 2;
                fs::write(path, bytes).unwrap();
            }),
        ),
        (
            "a folder instead",
            Box::new(|data| {
                fs::remove_file(data.join("catalog.json")).unwrap();
                fs::write(data.join("catalog.json"), "{}").unwrap();
            }),
        ),
        (
            "no token log",
            Box::new(|data| {
                for entry in fs::read_dir(data).unwrap() {
                    let path = entry.unwrap().path();
                    if path
                        .file_name()
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .starts_with("tokens.")
                    {
                        fs::remove_file(path).unwrap();
                    }
                }
            }),
        ),
    ];
    for (what, harm) in harms {
        let folder = tempfile::TempDir::new().unwrap();
        copy(
            &world.folder.path().join("data"),
            &folder.path().join("data"),
        );
        harm(&folder.path().join("data"));
        let other = World::at(folder, trusting()).await;
        assert!(!other.was_recalled(), "{what}");
        assert_eq!(picture(&other), right, "{what}");
        // The new one is good.
        let other = other.killed().await;
        assert!(other.was_recalled(), "{what}");
        assert_eq!(picture(&other), right, "{what}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_anywhere_or_with_any_byte_changed_it_is_never_wrong() {
    let world = some(trusting()).await;
    let world = world.killed().await;
    let right = picture(&on_copy(&world, thorough()).await);
    let log = fs::read(catalog(&world)).unwrap();
    let cuts = (0..log.len()).step_by(512).map(|at| log[..at].to_vec());
    // Every byte is tried at the level of frames; here some, with all that follows from it.
    let flips = (0..log.len()).step_by(log.len() / 24).map(|at| {
        let mut bytes = log.clone();
        bytes[at] ^= 0x41;
        bytes
    });
    for bytes in cuts.chain(flips) {
        let folder = tempfile::TempDir::new().unwrap();
        copy(
            &world.folder.path().join("data"),
            &folder.path().join("data"),
        );
        fs::write(folder.path().join("data/catalog.log"), &bytes).unwrap();
        let other = World::at(folder, trusting()).await;
        assert_eq!(
            picture(&other),
            right,
            "{} of {} bytes",
            bytes.len(),
            log.len()
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_that_went_meanwhile_is_missed() {
    for orderly in [true, false] {
        let world = some(trusting()).await;
        if orderly {
            world.service.shutdown().await;
        }
        let manifests = world.files("manifests");
        fs::remove_file(&manifests[0]).unwrap();
        let world = world.killed().await;
        assert!(world.was_recalled());
        assert_eq!(picture(&world).snapshots.len(), manifests.len() - 1);
        assert_same_as_thorough(&world).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_catalog_of_before_is_brought_up_to_date() {
    let world = some(trusting()).await;
    world.service.shutdown().await;
    let data = world.folder.path().join("data");
    let names = ["catalog.log", "catalog.json"];
    let before = names.map(|name| fs::read(data.join(name)).unwrap());
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    fake.turn("c2", &prompt(2, 2000), 1900).await;
    fake.turn("new", &prompt(50, 700), 600).await;
    world.all_durable().await;
    delete(&world, "c0").await;
    world.service.shutdown().await;
    for (name, bytes) in names.into_iter().zip(before) {
        fs::write(data.join(name), bytes).unwrap();
    }
    let world = world.killed().await;
    assert!(world.was_recalled());
    assert_same_as_thorough(&world).await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&prompt(50, 700)).await.unwrap().boundary, 600);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_token_log_costs_the_catalog_and_nothing_else() {
    let world = some(trusting()).await;
    world.service.shutdown().await;
    let right = picture(&on_copy(&world, thorough()).await);
    let data = world.folder.path().join("data");
    let name = fs::read_dir(data).unwrap().find_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.starts_with("tokens.").then_some(name)
    });
    let name = name.unwrap();
    for at in [0, 100, 3000] {
        let folder = tempfile::TempDir::new().unwrap();
        copy(
            &world.folder.path().join("data"),
            &folder.path().join("data"),
        );
        let path = folder.path().join("data").join(&name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 1;
        fs::write(&path, bytes).unwrap();
        let other = World::at(folder, trusting()).await;
        assert_eq!(picture(&other).snapshots, right.snapshots, "byte {at}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_catalog_that_cannot_be_written_is_given_up_and_rebuilt() {
    let world = some(trusting()).await;
    let mut fake = Fake::attach(&world).await;
    // The next write to the disk is that of the catalog: an object begins.
    world
        .faults
        .arm(Op::Write, 0, Fault::Errno(nix::libc::ENOSPC));
    let tokens = prompt(30, 900);
    // A token is missing, or else the turn itself would be written before its object.
    let req = fake.open("late", &tokens);
    fake.save_at(req, &tokens, 800).await;
    fake.finish(req, 901);
    world.all_durable().await;
    assert!(!catalog(&world).exists());
    eventually("it is told", || world.metric("engram_catalog_lost") >= 1.0).await;
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 800);
    let world = world.killed().await;
    assert!(!world.was_recalled());
    assert_eq!(picture(&world).snapshots.len(), 10);
    let world = world.killed().await;
    assert!(world.was_recalled());
    assert_same_as_thorough(&world).await;
}
