//! The power is cut after every single step that a daemon does to its data directory, and of what it
//! had not synced nothing, all names, all bytes or some of both are there.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use serde_json::Value;
use tempfile::TempDir;

use super::fake::*;
use crate::service::{DeleteRequest, SaveRequest, Selector};
use crate::store::fsck::{self, Class};
use crate::store::power::{Cut, Platter, Step};
use crate::store::{self, DiskConfig, Tier};
use crate::types::{Millis, SnapshotId, TokenId};
use crate::util::clock::ManualClock;

/// What the client was told when the mark of this number was set.
enum Told {
    /// It is on disk.
    Durable(SnapshotId, Vec<TokenId>),
    /// These may go from here on.
    Deleting(Vec<SnapshotId>),
    /// They are gone.
    Deleted(Vec<SnapshotId>),
}

/// Whether a step is left out.
type Lack<'a> = &'a dyn Fn(&Step) -> bool;

/// What a cut must not change.
#[derive(Default)]
struct Promises {
    kept: BTreeMap<SnapshotId, Vec<TokenId>>,
    gone: Vec<SnapshotId>,
}

/// Everything that a daemon did, and what it said of it.
struct Story {
    tape: Vec<Step>,
    told: Vec<Told>,
}

// === impl Promises ===

impl Promises {
    fn hear(&mut self, told: &Told) {
        match told {
            Told::Durable(id, tokens) => {
                self.kept.insert(*id, tokens.clone());
            }
            Told::Deleting(ids) => self.kept.retain(|id, _| !ids.contains(id)),
            Told::Deleted(ids) => self.gone.extend(ids),
        }
    }
}

// === impl Story ===

impl Story {
    fn tell(&mut self, world: &World, told: Told) {
        world.faults.mark(self.told.len() as u64);
        self.told.push(told);
    }

    async fn turn(&mut self, world: &World, fake: &mut Fake, name: &str, tokens: &[TokenId]) {
        let boundary = tokens.len() / 256 * 256;
        let id = fake.turn(name, tokens, boundary).await;
        fake.heard_all().await;
        let request = SaveRequest::new(Selector {
            branch_name: (tokens.len() % 2 == 1).then(|| "odd".to_owned()),
            ..Selector::conversation(name)
        });
        world.service.save(request).await.unwrap();
        let tokens = tokens[..boundary].to_vec();
        self.tell(world, Told::Durable(id, tokens));
    }

    async fn delete(&mut self, world: &World, name: &str, ids: Vec<SnapshotId>) {
        self.tell(world, Told::Deleting(ids.clone()));
        let whole = DeleteRequest {
            select: Selector::conversation(name),
            whole: true,
        };
        world.service.delete(whole).await.unwrap();
        self.tell(world, Told::Deleted(ids));
    }

    fn last(&self) -> SnapshotId {
        let ids = self.told.iter().rev();
        let mut ids = ids.filter_map(|told| match told {
            Told::Durable(id, _) => Some(*id),
            _ => None,
        });
        ids.next().unwrap()
    }

    /// A daemon that saves, deletes, tidies up and ends in good order.
    async fn live() -> Self {
        let world = World::with(settings(true)).await;
        let mut fake = Fake::attach(&world).await;
        let mut story = Self {
            tape: Vec::new(),
            told: Vec::new(),
        };
        let one = prompt(1, 1600);
        story.turn(&world, &mut fake, "one", &one[..700]).await;
        story.turn(&world, &mut fake, "one", &one[..1501]).await;
        story.turn(&world, &mut fake, "two", &prompt(2, 300)).await;
        let two = story.last();
        let branch = [&one[..600], &prompt(3, 400)].concat();
        story.turn(&world, &mut fake, "branch", &branch).await;
        story.delete(&world, "two", vec![two]).await;
        world
            .service
            .store
            .manifests
            .as_ref()
            .unwrap()
            .compact()
            .unwrap();
        story
            .turn(&world, &mut fake, "three", &prompt(4, 300))
            .await;
        world.service.shutdown().await;
        story.tape = world.faults.tape();
        story
    }

    /// A daemon that ends with a token log of which little is needed. Says where its end begins, too.
    async fn wasteful() -> (Self, usize) {
        let world = World::with(settings(true)).await;
        let mut fake = Fake::attach(&world).await;
        let mut story = Self {
            tape: Vec::new(),
            told: Vec::new(),
        };
        for (seed, name) in (1..).zip(["kept", "a", "b", "c"]) {
            story
                .turn(&world, &mut fake, name, &prompt(seed, 300))
                .await;
            if name != "kept" {
                let id = story.last();
                story.delete(&world, name, vec![id]).await;
            }
        }
        assert!(world.service.core.lock().index.log().is_wasteful());
        let from = world.faults.tape().len();
        world.service.shutdown().await;
        story.tape = world.faults.tape();
        (story, from)
    }

    /// Calls `f` for every cut: after how many steps, what the disk shows, and what must hold.
    fn cuts(&self, f: &mut dyn FnMut(usize, Cut, &Platter, &Promises)) {
        let mut platter = Platter::default();
        let mut promises = Promises::default();
        for (at, step) in self.tape.iter().enumerate() {
            platter.step(step);
            if let Step::Mark(mark) = step {
                promises.hear(&self.told[*mark as usize]);
                continue;
            }
            let seed = at as u64;
            let some = [Cut::Some(seed), Cut::Some(seed + 1_000_000)];
            for cut in [Cut::Nothing, Cut::Names, Cut::Bytes]
                .into_iter()
                .chain(some)
            {
                f(at, cut, &platter, &promises);
            }
        }
    }
}

fn settings(tape: bool) -> Settings {
    let mut settings = Settings {
        tape,
        ..Settings::default()
    };
    settings.config.write_after = Duration::from_secs(3600);
    settings.config.catalog_from = 0;
    settings.config.preload = ByteSize::b(0);
    settings
}

fn quick_folder() -> TempDir {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    folder.unwrap()
}

/// The host is another boot of itself.
fn boot_again(data: &Path) {
    let path = data.join("catalog.json");
    let Ok(bytes) = std::fs::read(&path) else {
        return;
    };
    let Ok(mut json) = serde_json::from_slice::<Value>(&bytes) else {
        return;
    };
    let fields = json.as_object_mut().unwrap();
    fields.remove("checksum");
    fields.insert("boot".into(), "another".into());
    let mut bytes = serde_json::to_vec(&json).unwrap();
    assert_eq!(bytes.pop(), Some(b'}'));
    let checksum = blake3::hash(&bytes).to_hex();
    bytes.extend(format!(",\"checksum\":\"{checksum}\"}}\n").into_bytes());
    std::fs::write(path, bytes).unwrap();
}

/// Reads everything that a start finds. `Err`: what is not as it must be.
fn look(data: &Path, promises: &Promises) -> Result<(), String> {
    let options = fsck::Options {
        path: data.to_owned(),
        repair: false,
        fast: false,
        threads: 1,
        quarantine: 0,
    };
    if data.join("format.json").exists() {
        let clock = ManualClock::new(Millis(1000));
        let report = fsck::check(&options, &clock, &|_| {}).map_err(|error| error.to_string())?;
        let damage = report.findings.iter().find(|it| it.class == Class::Damage);
        if let Some(damage) = damage {
            return Err(format!("fsck: {damage:?}"));
        }
    }
    let config = store::Config {
        ram: ByteSize::mib(4),
        ram_headroom: None,
        disk: Some(DiskConfig {
            min_free: ByteSize::b(0),
            io_threads: 1,
            io_engine: crate::store::IoEngine::Threads,
            ..DiskConfig::at(data.to_owned())
        }),
    };
    let store = config
        .build(Arc::new(ManualClock::new(Millis(1000))))
        .map_err(|error| error.to_string())?;
    let (manifests, refs) = (
        store.manifests.as_ref().unwrap(),
        store.refs.as_ref().unwrap(),
    );
    let (mut found, mut bad) = (Vec::new(), Vec::new());
    manifests
        .scan(&mut |manifest| match manifest {
            Ok(manifest) => found.push(manifest),
            Err(quarantined) => bad.push(quarantined.to_string()),
        })
        .map_err(|error| error.to_string())?;
    refs.scan(&mut |conversation| {
        if let Err(quarantined) = conversation {
            bad.push(quarantined.to_string());
        }
    })
    .map_err(|error| error.to_string())?;
    if let Some(bad) = bad.first() {
        return Err(format!("half there: {bad}"));
    }
    for id in promises.kept.keys() {
        if !found.iter().any(|manifest| manifest.snapshot == *id) {
            return Err(format!("durable, and lost: {id}"));
        }
    }
    for manifest in &found {
        if promises.gone.contains(&manifest.snapshot) {
            return Err(format!("deleted, and back: {}", manifest.snapshot));
        }
        let objects = manifest.kv.iter().map(|part| part.object);
        for object in objects.chain([manifest.state.object]) {
            let disk = store.disk.as_ref().unwrap();
            disk.get(&object, &store.arena)
                .map_err(|error| format!("{}: {error}", manifest.snapshot))?;
        }
    }
    Ok(())
}

fn shown(platter: &Platter, cut: Cut) -> TempDir {
    let folder = quick_folder();
    platter.show(cut, &folder.path().join("data")).unwrap();
    boot_again(&folder.path().join("data"));
    folder
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_cut_of_the_power_loses_what_is_durable_or_shows_a_half() {
    let story = Story::live().await;
    let mut cases = 0;
    story.cuts(&mut |at, cut, platter, promises| {
        let folder = shown(platter, cut);
        cases += 1;
        if let Err(why) = look(&folder.path().join("data"), promises) {
            let before = &story.tape[at.saturating_sub(5)..=at];
            let before: Vec<String> = before.iter().map(brief).collect();
            panic!("after step {at}, {cut:?}: {why}\n{}", before.join("\n"));
        }
    });
    assert!(cases > 1000, "{cases} cases");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_log_that_is_written_anew_survives_every_cut() {
    let (story, from) = Story::wasteful().await;
    let mut cases = Vec::new();
    story.cuts(&mut |at, cut, platter, promises| {
        if at < from {
            return;
        }
        let folder = shown(platter, cut);
        let data = folder.path().join("data");
        look(&data, promises).unwrap_or_else(|why| panic!("after step {at}, {cut:?}: {why}"));
        // As after a kill, too: then the boot is the same.
        let killed = quick_folder();
        platter
            .show(Cut::Bytes, &killed.path().join("data"))
            .unwrap();
        let whole = quick_folder();
        platter
            .show(Cut::Names, &whole.path().join("data"))
            .unwrap();
        boot_again(&whole.path().join("data"));
        let kept = promises.kept.clone();
        cases.extend([folder, killed, whole].map(|folder| (folder, kept.clone())));
    });
    let mut recalled = 0;
    for (folder, kept) in cases {
        // What was looked at before is swept already, and as good.
        let world = World::at(folder, settings(false)).await;
        recalled += u32::from(world.was_recalled());
        let mut fake = Fake::attach(&world).await;
        for tokens in kept.values() {
            let got = fake.restore(tokens).await;
            assert_eq!(got.map(|got| got.boundary), Some(tokens.len() as u32));
        }
        let logs = world.files("data/tokens.");
        assert!(logs.len() <= 1, "{logs:?}");
        world.check();
    }
    assert!(recalled > 0, "no catalog was closed");
}

fn brief(step: &Step) -> String {
    match step {
        Step::Write { path, at, bytes } => format!("Write {path} {at} {}", bytes.len()),
        step => format!("{step:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_serves_what_was_durable_after_a_cut_of_the_power() {
    let story = Story::live().await;
    let mut cases: Vec<(TempDir, BTreeMap<SnapshotId, Vec<TokenId>>)> = Vec::new();
    let end = story.tape.len();
    story.cuts(&mut |at, cut, platter, promises| {
        // Every step of the end, where the catalog is closed, and some of the others.
        let due = at % 16 == 5 || at + 24 > end;
        if due && matches!(cut, Cut::Nothing | Cut::Some(_)) {
            cases.push((shown(platter, cut), promises.kept.clone()));
        }
    });
    let mut recalled = 0;
    for (folder, kept) in cases {
        let world = World::at(folder, settings(false)).await;
        recalled += u32::from(world.was_recalled());
        let mut fake = Fake::attach(&world).await;
        for tokens in kept.values() {
            let got = fake.restore(tokens).await;
            assert_eq!(got.map(|got| got.boundary), Some(tokens.len() as u32));
        }
        world.check();
    }
    assert!(recalled > 0, "no catalog was closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_did_not_sync_would_be_caught() {
    let mut story = Story::live().await;
    let whole = std::mem::take(&mut story.tape);
    let is_temp = |path: &str| path.contains(".tmp-");
    let lacks: [(&str, Lack<'_>); 4] = [
        (
            "objects",
            &|step| matches!(step, Step::SyncFile(path) if is_temp(path) && path.contains("objects")),
        ),
        (
            "manifests",
            &|step| matches!(step, Step::SyncFile(path) if is_temp(path) && path.contains("manifests")),
        ),
        (
            "names of objects",
            &|step| matches!(step, Step::SyncFolder(path) if path.contains("objects/")),
        ),
        (
            "names of manifests",
            &|step| matches!(step, Step::SyncFolder(path) if path.contains("manifests/")),
        ),
    ];
    for (what, lack) in lacks {
        story.tape = whole.iter().filter(|step| !lack(step)).cloned().collect();
        let mut caught = false;
        story.cuts(&mut |at, cut, platter, promises| {
            // The end shows it, too.
            if !caught && at % 8 == 0 {
                let folder = shown(platter, cut);
                caught = look(&folder.path().join("data"), promises).is_err();
            }
        });
        assert!(caught, "without a sync of {what} nothing is lost");
    }
}
