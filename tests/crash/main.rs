//! The daemon is killed again and again, at any moment of saving, restoring, deleting, evicting and
//! starting. What it called durable comes back with every byte, what it called deleted stays away,
//! nothing is half there, and what it says that it holds on disk is what lies there.
//!
//! `ENGRAM_KILLS` says how many kills (500 is the long run), `ENGRAM_SEED` repeats their order.

#[path = "../common/mod.rs"]
mod common;
mod ledger;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::daemon::Daemon;
use common::http::{Answer, Place};
use common::process::run;
use common::wait_for;
use common::worker::{Model, SaveEnd, Worker};
use ledger::{AT_ONCE, COMMON, Dice, Ledger};
use nix::sys::signal::Signal;
use nix::unistd::{Whence, lseek};
use parking_lot::Mutex;
use serde_json::{Value, json};

/// Kills of one test in a usual run.
const KILLS: u64 = 60;

/// What one test tries.
struct Trial {
    disk: &'static str,
    ram: &'static str,
    /// Heads of the model: how large its KV is.
    heads: u32,
    /// The disk holds everything: what is durable is there.
    roomy: bool,
}

fn post(place: &Place, path: &str, body: &Value) -> Option<Answer> {
    let json = [("Content-Type", "application/json")];
    let body = body.to_string();
    let answer = place.request("POST", path, &json, body.as_bytes()).ok()?;
    serde_json::from_slice::<Value>(&answer.body).ok()?;
    Some(answer)
}

/// Does one thing after another until the daemon is gone.
fn load(
    worker: &mut Worker,
    place: &Place,
    ledger: &Mutex<Ledger>,
    (trial, dice): (&Trial, &mut Dice),
) {
    loop {
        let done = match dice.roll(10) {
            0..5 => turn(worker, place, ledger, (trial, dice)),
            5..8 => restore(worker, place, ledger, dice),
            _ => delete(place, ledger, dice),
        };
        if done.is_none() {
            return;
        }
    }
}

fn turn(
    worker: &mut Worker,
    place: &Place,
    ledger: &Mutex<Ledger>,
    (trial, dice): (&Trial, &mut Dice),
) -> Option<()> {
    let (name, tokens, from) = {
        let mut ledger = ledger.lock();
        let fresh = ledger.talks.len() < AT_ONCE && dice.roll(3) == 0;
        let at = match ledger.talks.len() {
            0 => ledger.open(dice),
            _ if fresh => ledger.open(dice),
            count => dice.roll(count),
        };
        let talk = &ledger.talks[at];
        (talk.name.clone(), Arc::clone(&talk.tokens), talk.len)
    };
    let more = from.max(COMMON) + 2 * (1 + dice.roll(300));
    if more > tokens.len() {
        return delete_one(place, ledger, &name);
    }
    let req = worker.open(&name, &tokens[..more]);
    let end = worker.save_at(req, &tokens[..more], more as u32);
    worker.finish(req, more);
    // A turn that ends after its conversation was deleted begins another one.
    worker.heard_all();
    {
        let mut ledger = ledger.lock();
        if let Some(talk) = ledger.talks.iter_mut().find(|talk| talk.name == name) {
            talk.len = more;
        }
        ledger.count("turns");
    }
    let SaveEnd::Saved(..) = end else {
        return Some(());
    };
    // Some are only written when their time has come.
    let branch = match dice.roll(4) {
        0 => return Some(()),
        1 => Some("kept"),
        _ => None,
    };
    let mut body = json!({ "conversation_id": name });
    if let Some(branch) = branch {
        body["branch_name"] = branch.into();
        // The name leaves what had it.
        let mut ledger = ledger.lock();
        let all = ledger.named.clone();
        for id in all {
            if ledger.durable.get(&id).is_some_and(|(of, _)| *of == name) {
                ledger.named.remove(&id);
            }
        }
    }
    let answer = post(place, "/save_snapshot", &body)?;
    let mut ledger = ledger.lock();
    match answer.status {
        200 => {
            let row = answer.json();
            let id = row["snapshot_id"].as_str().unwrap().to_owned();
            let boundary = row["boundary"].as_u64().unwrap() as usize;
            let after = row["tokens_after_boundary"].as_u64().unwrap() as usize;
            // Where the state of this turn was evicted meanwhile, that of an earlier one is kept, and
            // the answer says how much of the turn is not in it.
            assert_eq!(boundary + after, more, "{row}");
            assert!(after == 0 || !trial.roomy, "{row}");
            if branch.is_some() {
                ledger.named.insert(id.clone());
            }
            ledger.durable.insert(id, (name, boundary));
            ledger.count("durable");
        }
        // It was evicted meanwhile, or the disk is full of what is named.
        404 | 409 | 503 | 507 => ledger.count("refused"),
        other => panic!("{other}: {}", answer.text()),
    }
    Some(())
}

fn restore(
    worker: &mut Worker,
    place: &Place,
    ledger: &Mutex<Ledger>,
    dice: &mut Dice,
) -> Option<()> {
    let (name, tokens, len) = {
        let ledger = ledger.lock();
        if ledger.talks.is_empty() {
            return Some(());
        }
        let talk = &ledger.talks[dice.roll(ledger.talks.len())];
        (talk.name.clone(), Arc::clone(&talk.tokens), talk.len)
    };
    if dice.roll(2) == 0 {
        // Whatever comes, every byte of it is compared.
        let hit = worker.restore(&tokens[..len.max(1)]).is_some();
        ledger.lock().count(if hit { "hits" } else { "misses" });
        return Some(());
    }
    let body = json!({ "conversation_id": name, "pin_seconds": 0 });
    let answer = post(place, "/restore_snapshot", &body)?;
    assert!(
        matches!(answer.status, 200 | 404 | 409 | 503),
        "{}: {}",
        answer.status,
        answer.text()
    );
    Some(())
}

fn delete(place: &Place, ledger: &Mutex<Ledger>, dice: &mut Dice) -> Option<()> {
    let name = {
        let ledger = ledger.lock();
        if ledger.talks.len() < AT_ONCE * 3 / 4 {
            return Some(());
        }
        ledger.talks[dice.roll(ledger.talks.len())].name.clone()
    };
    delete_one(place, ledger, &name)
}

fn delete_one(place: &Place, ledger: &Mutex<Ledger>, name: &str) -> Option<()> {
    ledger.lock().doubt(name);
    let body = json!({ "conversation_id": name, "whole": true });
    let answer = post(place, "/delete_snapshot", &body)?;
    let mut ledger = ledger.lock();
    match answer.status {
        200 => {
            ledger.gone.insert(name.to_owned());
            ledger.count("deleted");
        }
        404 => {}
        // Gone, or not yet on the medium of a full disk: in doubt.
        507 => ledger.count("deleted on a full disk"),
        other => panic!("{other}: {}", answer.text()),
    }
    Some(())
}

/// Everything that is to hold after a start. Reads what was never read before, and every n-th of the
/// others.
fn verify(
    daemon: &Daemon,
    worker: &mut Worker,
    ledger: &Mutex<Ledger>,
    (trial, every): (&Trial, usize),
) {
    let mut ledger = ledger.lock();
    let list = daemon.get("/v1/snapshots?limit=1000").json();
    let rows = list["snapshots"].as_array().unwrap();
    assert!(rows.len() < 1000);
    let mut listed = BTreeMap::new();
    for row in rows {
        let id = row["snapshot_id"].as_str().unwrap();
        listed.insert(id.to_owned(), row);
        if let Some(name) = row["conversation_id"].as_str() {
            assert!(!ledger.gone.contains(name), "deleted, and back: {row}");
        }
    }
    for (id, (name, boundary)) in &ledger.durable {
        let row = listed.get(id);
        assert!(
            row.is_some() || !(trial.roomy || ledger.named.contains(id)),
            "durable, and lost: {id} of {name} at {boundary}"
        );
        if let Some(row) = row {
            assert_eq!(row["boundary"], *boundary, "{row}");
        }
    }
    let evicted = ledger.durable.keys().filter(|id| !listed.contains_key(*id));
    let evicted: Vec<String> = evicted.cloned().collect();
    for id in evicted {
        ledger.durable.remove(&id);
        ledger.count("evicted");
    }
    // What is listed is whole, called durable or not.
    for (at, (id, row)) in listed.iter().enumerate() {
        assert_eq!(row["durable"], true, "{row}");
        let known = !ledger.read.insert(id.clone());
        if known && at % every != 0 {
            continue;
        }
        ledger.count("read");
        let boundary = row["boundary"].as_u64().unwrap() as u32;
        let body = json!({ "snapshot_id": row["snapshot_id"] });
        let info = daemon.post("/get_snapshot_info", &body).json();
        let tokens: Vec<u32> =
            serde_json::from_value(info["metadata"]["fill_ids"].clone()).unwrap();
        assert_eq!(tokens.len() as u32, boundary, "{row}");
        assert!(
            ledger.said.values().any(|said| said.starts_with(&tokens)),
            "nobody said that: {row}"
        );
        let got = worker.restore(&tokens).expect("a listed snapshot");
        assert_eq!(got.boundary, boundary, "{row}");
    }
}

/// What the daemon says that it uses is what lies there.
fn usage(daemon: &Daemon) {
    let said = |daemon: &Daemon| {
        let tiers = daemon.get("/v1/tiers").json();
        let mut rows = tiers["tiers"].as_array().unwrap().clone().into_iter();
        let disk = rows.find(|row| row["tier"] == "disk").unwrap();
        disk["used_bytes"].as_u64().unwrap()
    };
    let deadline = Instant::now() + common::PATIENCE;
    loop {
        // It moves while things are written and removed.
        let (before, there, after) = (said(daemon), lies(&daemon.data()), said(daemon));
        if before == there && there == after {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{before} and {after} said, {there} there"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

/// Bytes of files and folders, in whole blocks. The token log has holes; what the file system takes to
/// find them is not counted.
fn lies(folder: &Path) -> u64 {
    let mut sum = 4096;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(meta) = fs::symlink_metadata(&path) else {
            continue;
        };
        let name = entry.file_name().into_string().unwrap();
        sum += match meta.is_dir() {
            true => lies(&path),
            false if name.starts_with("tokens.") => data_in(&path),
            false => meta.len().next_multiple_of(4096),
        };
    }
    sum
}

/// Bytes of a file that are no hole.
fn data_in(path: &Path) -> u64 {
    let Ok(file) = fs::File::open(path) else {
        return 0;
    };
    let (mut sum, mut at) = (0, 0);
    while let Ok(data) = lseek(&file, at, Whence::SeekData) {
        at = lseek(&file, data, Whence::SeekHole).unwrap();
        sum += (at - data) as u64;
    }
    sum.next_multiple_of(4096)
}

/// Findings of a check that changes nothing.
fn fsck(data: &Path) -> Vec<Value> {
    let (code, out, error) = run(&["fsck", data.to_str().unwrap(), "--json"]);
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{code}: {error}"));
    report["findings"].as_array().unwrap().clone()
}

/// Where an fsync costs nothing, if there is such a place with room: a kill is the same there.
fn quick_folder() -> PathBuf {
    let shm = Path::new("/dev/shm");
    match nix::sys::statvfs::statvfs(shm) {
        Ok(stat) if stat.blocks_available() * stat.fragment_size() > 1 << 30 => shm.into(),
        _ => std::env::temp_dir(),
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn run_trial(trial: &Trial) {
    let kills = number("ENGRAM_KILLS").unwrap_or(KILLS);
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = number("ENGRAM_SEED").unwrap_or(now);
    println!("ENGRAM_SEED={seed} ENGRAM_KILLS={kills}");
    quiet();
    let mut dice = Dice(seed | 1);
    let mut daemon = Daemon::start_in(
        &quick_folder(),
        &[
            ("store.disk.budget", trial.disk.into()),
            ("store.ram", trial.ram.into()),
            ("service.write_after", "20ms".into()),
            ("service.preload", "0 B".into()),
            // Every start has a catalog, some do without it.
            ("service.catalog_from", 0.into()),
            ("log.filter", "warn".into()),
        ],
    );
    let ledger = Mutex::new(Ledger::default());
    let model = Model {
        heads: trial.heads,
        ..Model::default()
    };
    let began = Instant::now();
    for kill in 0..kills {
        let mut worker = Worker::attach_as(&daemon, &model);
        let every = if kill % 10 == 9 { 1 } else { 5 };
        verify(&daemon, &mut worker, &ledger, (trial, every));
        usage(&daemon);
        let place = daemon.place().clone();
        let mut own = Dice(seed ^ (kill + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        thread::scope(|scope| {
            let ledger = &ledger;
            let load = scope.spawn(move || load(&mut worker, &place, ledger, (trial, &mut own)));
            thread::sleep(Duration::from_micros(dice.roll(120_000) as u64));
            daemon.process().signal(Signal::SIGKILL);
            if let Err(panic) = load.join()
                && !gone(&*panic)
            {
                std::panic::resume_unwind(panic);
            }
        });
        daemon.kill();
        // A killed start is one more.
        if dice.roll(4) == 0 {
            ledger.lock().count("kills");
            daemon.die_starting(Duration::from_micros(dice.roll(30_000) as u64));
        }
        ledger.lock().count("kills");
        let damage = fsck(&daemon.data());
        let damage: Vec<_> = damage.iter().filter(|it| it["class"] == "damage").collect();
        assert!(damage.is_empty(), "after kill {kill}: {damage:?}");
        if dice.roll(10) == 0 {
            // The host went down: the catalog is not to be trusted.
            fs::remove_file(daemon.data().join("catalog.json")).ok();
        }
        daemon.restart();
        if kill % 20 == 19 {
            assert!(daemon.stop().success());
            assert_eq!(fsck(&daemon.data()), [Value::Null; 0], "after a stop");
            daemon.restart();
        }
    }
    let mut worker = Worker::attach_as(&daemon, &model);
    verify(&daemon, &mut worker, &ledger, (trial, 1));
    assert_eq!(common::disk::quarantine(&daemon.data()), []);
    let ledger = ledger.into_inner();
    println!(
        "{kills} kills in {:?}: {:?}, {} durable at the end, {} of them named",
        began.elapsed(),
        ledger.counts,
        ledger.durable.len(),
        ledger.named.len()
    );
    let evicted = Some("evicted").filter(|_| !trial.roomy);
    for what in ["turns", "durable", "hits", "deleted"]
        .into_iter()
        .chain(evicted)
    {
        assert!(ledger.counts.get(what) > Some(&0), "no {what}");
    }
    wait_for("an end of all writes", || {
        (daemon.get("/v1/status").json()["pending_writes"] == 0).then_some(())
    });
}

/// Whether a thread ended because the daemon was killed.
fn gone(panic: &(dyn std::any::Any + Send)) -> bool {
    panic
        .downcast_ref::<String>()
        .is_some_and(|text| text.contains(common::worker::GONE))
}

/// Says nothing of the ends that are meant.
fn quiet() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let meant = info
            .payload_as_str()
            .is_some_and(|text| text.contains(common::worker::GONE));
        if !meant {
            usual(info);
        }
    }));
}

#[test]
fn what_is_called_durable_survives_every_kill() {
    run_trial(&Trial {
        disk: "1 GiB",
        ram: "32 MiB",
        heads: 2,
        roomy: true,
    });
}

#[test]
fn kills_while_the_disk_evicts_leave_nothing_half_there() {
    run_trial(&Trial {
        disk: "16 MiB",
        // The longest conversation just fits, alone.
        ram: "12 MiB",
        heads: 16,
        roomy: false,
    });
}
