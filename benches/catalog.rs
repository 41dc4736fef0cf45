//! The start of a daemon with many snapshots, and what it does then.
//!
//! ```text
//! cargo bench --bench catalog --features testing -- SNAPSHOTS [FOLDER] [sparse|whole]
//! ```
//!
//! Makes a store of SNAPSHOTS (default 20,000) in conversations of 50 turns, over 100 system prompts
//! of 512 tokens. Eight conversations have turns of 2,560 tokens and end at 128,512; the others have
//! turns of 64. The tokens of every turn are unique. Manifests, conversations, catalog and token log
//! are those of a daemon; files of objects are not made, as a start with a catalog never looks at
//! them. With `sparse` all manifests of one folder are made, and the first of each other: a start
//! looks at the folders' times alone, and the disk need not hold a million files. With `whole` all
//! files of objects are made, too, and what is measured is `engram fsck`, with all bytes verified and
//! with `--fast`. Every start runs in a process of its own.

mod numbers;
#[path = "catalog/talk.rs"]
mod talk;

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use bytesize::ByteSize;
use engram::{
    index::{Index, TierSet},
    service::{self, DeleteRequest, ListRequest, Selector, Service},
    store::{
        self, DiskConfig, Store,
        catalog::{PlacedTokens, TokenRun},
        fsck, sample,
    },
    types::{ObjectKind, SnapshotId, TierKind, TokenId},
    util::clock::{Clock, SystemClock},
};
use prometheus_client::registry::Registry;
use talk::{DEEP, TURNS, Talk, key, prompt};

/// The folder of which all manifests are made: its time, the last of all, makes sure of the others.
const WHOLE: u8 = 0xff;
/// Conversations whose turns interleave.
const AT_ONCE: u32 = 200;

fn open(folder: &Path) -> (Store, Arc<dyn Clock>) {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let config = store::Config {
        ram: ByteSize::mib(64),
        ram_headroom: None,
        disk: Some(DiskConfig {
            bytes: ByteSize::tib(1),
            min_free: ByteSize::b(0),
            ..DiskConfig::at(folder.join("data"))
        }),
    };
    let store = config.build(Arc::clone(&clock)).expect("a store");
    (store, clock)
}

fn make(folder: &Path, snapshots: u32, (sparse, whole): (bool, bool)) {
    let geometry = sample::geometry();
    let started = Instant::now();
    let (store, _) = open(folder);
    let manifests = store.manifests.as_ref().expect("a disk tier");
    manifests.scan(&mut |_| {}).expect("an empty store");
    store
        .refs
        .as_ref()
        .expect("a disk tier")
        .scan(&mut |_| {})
        .expect("an empty store");
    let disk = store.disk.as_ref().expect("a disk tier");
    disk.register_model(sample::MODEL, &sample::geometry(), BTreeMap::new())
        .expect("a model");
    let log = store.new_catalog().expect("a catalog");
    let tiers = TierSet::of(&[TierKind::Ram, TierKind::Disk]);
    let mut index = Index::new(log, tiers);
    let conversations = snapshots / TURNS;
    let mut now = 1_700_000_000_000;
    let mut planting = Duration::ZERO;
    let mut folders = HashSet::new();
    for group in 0..conversations.div_ceil(AT_ONCE) {
        let numbers: Vec<u32> =
            (group * AT_ONCE..((group + 1) * AT_ONCE).min(conversations)).collect();
        let mut talks: Vec<Talk> = numbers.iter().map(|number| Talk::new(*number)).collect();
        for turn in 1..=TURNS {
            for (number, talk) in numbers.iter().zip(&mut talks) {
                now += 1;
                let from = talk.at;
                let (manifest, new) = talk.turn(*number, turn, now);
                let known = talk.tokens.get(..talk.at as usize).expect("its tokens");
                index.insert(&key(), known, new).expect("a good snapshot");
                if whole {
                    let own = &talk.tokens[from as usize..manifest.boundary as usize];
                    for meta in manifest.objects(&geometry) {
                        match meta.kind {
                            ObjectKind::State => store.plant_object(&meta, &[]),
                            ObjectKind::Kv if meta.range.start == from => {
                                store.plant_object(&meta, own)
                            }
                            ObjectKind::Kv => Ok(()),
                        }
                        .expect("an object");
                    }
                }
                let clock = Instant::now();
                let mut place =
                    |after| placed(&index, &manifest.snapshot, if after { from } else { 0 });
                let [.., last] = manifest.snapshot.to_bytes();
                let file = folders.insert(last) || last == WHOLE || !sparse;
                store
                    .plant(&manifest, file, &mut place)
                    .expect("a manifest");
                planting += clock.elapsed();
            }
        }
        for talk in talks {
            store
                .plant_conversation(&talk.stored)
                .expect("a conversation");
        }
    }
    println!(
        "made {} snapshots in {conversations} conversations in {:.1?} ({:.1?} each for manifest and row)",
        conversations * TURNS,
        started.elapsed(),
        planting / (conversations * TURNS).max(1),
    );
    println!("tokens: {}", index.log().len());
    manifests.taken_in();
    store.close_catalog(index.log());
}

fn placed(index: &Index<store::TokenLog>, id: &SnapshotId, from: u32) -> PlacedTokens {
    let (from, edges) = index.edges(id, from).expect("it is there");
    let runs = edges.into_iter().map(|edge| TokenRun {
        offset: edge.offset,
        len: edge.len,
        first: edge.first,
        head: edge.head,
        crc: index.log().crc(edge.offset, edge.len).expect("its tokens"),
    });
    PlacedTokens {
        from,
        runs: runs.collect(),
    }
}

/// A line of `/proc/self/status`, in KiB.
fn memory(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let digits = line.and_then(|line| line.split_whitespace().nth(1));
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

async fn start(folder: &Path, from: usize) -> (Arc<Service>, Duration) {
    let started = Instant::now();
    let (store, clock) = open(folder);
    let config = service::Config {
        fd_socket: folder.join("fd.sock"),
        catalog_from: from,
        preload: ByteSize::b(0),
        ..service::Config::default()
    };
    let mut registry = Registry::with_prefix("engram");
    let service =
        Service::start(config, store, Vec::new(), clock, &mut registry).expect("a daemon");
    service.ready().await;
    (service, started.elapsed())
}

fn usage(service: &Service) -> (u64, u64) {
    let tiers = service.tiers();
    let disk = tiers
        .iter()
        .find(|row| row.tier == TierKind::Disk)
        .expect("a disk tier");
    (disk.used_bytes, disk.objects)
}

async fn measure(folder: &Path, how: &str) {
    let before = memory("RssAnon");
    let (service, took) = start(folder, 0).await;
    let status = service.status();
    let anon = memory("RssAnon").saturating_sub(before);
    let (bytes, objects) = usage(&service);
    println!(
        "start ({how}): {took:.2?}, {} snapshots, {} conversations, {objects} objects, {bytes} bytes on disk",
        status.snapshots, status.conversations
    );
    let each = anon * 1024 / (status.snapshots.max(1) as u64);
    println!(
        "  memory: {} MiB, {each} bytes a snapshot; mapped files {} MiB",
        anon >> 10,
        memory("RssFile") >> 10
    );
    if how == "killed" {
        // As after SIGKILL: nothing is closed.
        std::process::abort();
    }
    if how == "used" {
        lookups(&service);
        lists(&service);
        deletes(&service).await;
    }
    service.shutdown().await;
}

fn lookups(service: &Service) {
    let prompts: Vec<Vec<TokenId>> = (0..DEEP).map(prompt).collect();
    let mut times: Vec<Duration> = (0..400)
        .map(|n| {
            let prompt = prompts.get(n % prompts.len()).expect("a prompt");
            let clock = Instant::now();
            let found = service.find(&key(), prompt);
            let took = clock.elapsed();
            assert_eq!(
                found.map(|(_, boundary)| boundary as usize),
                Some(prompt.len())
            );
            took
        })
        .collect();
    let first = times.first().copied().unwrap_or_default();
    times.sort_unstable();
    let at = |part: usize| {
        times
            .get(times.len() * part / 100)
            .copied()
            .unwrap_or_default()
    };
    println!(
        "  lookup of {} tokens, without hashing: first {first:.1?}, median {:.1?}, p99 {:.1?}",
        prompts.first().map_or(0, Vec::len),
        at(50),
        at(99)
    );
}

fn lists(service: &Service) {
    for (limit, offset) in [(100, 0), (100, 500_000), (1000, 0)] {
        let clock = Instant::now();
        let request = ListRequest {
            limit,
            offset,
            ..ListRequest::default()
        };
        let reply = service.list(request).expect("a list");
        println!(
            "  list, {limit} rows from {offset} of {}: {:.1?}",
            reply.total,
            clock.elapsed()
        );
    }
    let clock = Instant::now();
    let request = ListRequest {
        conversation_id: Some("conversation-9".to_owned()),
        ..ListRequest::default()
    };
    let reply = service.list(request).expect("a list");
    println!(
        "  list of one conversation, {} rows: {:.1?}",
        reply.total,
        clock.elapsed()
    );
}

async fn deletes(service: &Service) {
    let mut times = Vec::new();
    for number in 100..120 {
        let select = Selector::conversation(format!("conversation-{number}"));
        let clock = Instant::now();
        let reply = service
            .delete(DeleteRequest {
                select,
                whole: true,
            })
            .await;
        times.push(clock.elapsed());
        assert_eq!(
            reply.expect("a conversation").snapshots.len(),
            TURNS as usize
        );
    }
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    println!("  delete of a conversation of {TURNS} snapshots, durable: median {median:.1?}");
}

fn folder_sizes(folder: &Path) {
    for name in ["catalog.log", "tokens", "models", "refs"] {
        let entries = fs::read_dir(folder.join("data"))
            .into_iter()
            .flatten()
            .flatten();
        for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(name)) {
            let out = Command::new("du").arg("-sk").arg(entry.path()).output();
            let text = out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
            let kib = text
                .ok()
                .and_then(|text| text.split_whitespace().next().map(str::to_owned));
            println!(
                "  {}: {} KiB",
                entry.file_name().display(),
                kib.unwrap_or_default()
            );
        }
    }
}

/// `engram fsck`.
fn check(folder: &Path, fast: bool) {
    let options = fsck::Options {
        path: folder.join("data"),
        repair: false,
        fast,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        quarantine: 0,
    };
    let started = Instant::now();
    let report = fsck::check(&options, &SystemClock::new(), &|_| {}).expect("a store");
    let took = started.elapsed();
    let findings = report.findings.len();
    println!("fsck (fast: {fast}): {took:.1?}, {findings} findings");
    assert_eq!(findings, 0, "{:?}", report.findings.first());
}

fn again(folder: &Path, how: &str) {
    let this = std::env::current_exe().expect("this program");
    let status = Command::new(this)
        .arg("--stage")
        .arg(how)
        .arg(folder)
        .status();
    assert!(
        status.is_ok_and(|status| status.success()) || how == "killed",
        "{how}"
    );
}

fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    if let [stage, how, folder] = args.as_slice()
        && stage == "--stage"
    {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(measure(Path::new(folder), how));
        return;
    }
    let snapshots = args
        .first()
        .and_then(|arg| arg.parse().ok())
        .unwrap_or(20_000);
    let kept = args.get(1).map(PathBuf::from);
    let temporary = tempfile::tempdir().expect("a folder");
    let folder = kept.unwrap_or_else(|| temporary.path().to_owned());
    let whole = args.iter().any(|arg| arg == "whole");
    if !folder.join("data").exists() {
        let sparse = args.iter().any(|arg| arg == "sparse");
        make(&folder, snapshots, (sparse, whole));
        // A folder that was changed just now may hide a change.
        std::thread::sleep(Duration::from_secs(4));
    }
    folder_sizes(&folder);
    if whole {
        for fast in [false, true] {
            check(&folder, fast);
        }
        return;
    }
    for how in [
        "closed",
        "closed",
        "killed",
        "after a kill",
        "used",
        "after deletes",
    ] {
        again(&folder, how);
    }
}
