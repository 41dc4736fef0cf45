//! RAM and disk: what moves between them, what each may hold, and what is left after a crash.

mod common;

use std::fs;
use std::time::Duration;

use common::daemon::{Daemon, Knobs};
use common::disk;
use common::wait_for;
use common::worker::{Model, Worker, prompt};
use engram::proto::channel::layout::Tier;
use serde_json::{Value, json};

/// Tokens of a conversation: 864 KiB of state and KV with [`Model::large`].
const TOKENS: u32 = 200;

/// RAM for nine conversations.
const SMALL_RAM: &[(&str, &str)] = &[("store.ram", "16 MiB"), ("store.ram_headroom", "8 MiB")];

/// Nothing goes to disk before it is asked for or RAM is full.
const LAZY: &[(&str, &str)] = &[("service.write_after", "1h")];

/// Nothing comes into RAM before it is asked for.
const COLD: &[(&str, &str)] = &[("service.preload", "0 B")];

fn start(knobs: &[&[(&str, &str)]]) -> Daemon {
    Daemon::start(&knobs_of(knobs))
}

fn knobs_of<'a>(knobs: &[&[(&'a str, &'a str)]]) -> Vec<(&'a str, toml::Value)> {
    let all = knobs.iter().copied().flatten();
    all.map(|(key, value)| (*key, (*value).into())).collect()
}

fn tokens(number: u32) -> Vec<u32> {
    prompt(number + 1, TOKENS as usize)
}

fn name(number: u32) -> String {
    format!("c{number}")
}

fn ask(daemon: &Daemon, path: &str, number: u32) -> Value {
    let answer = daemon.post(path, &json!({ "conversation_id": name(number) }));
    assert_eq!(answer.status, 200, "{path} c{number}: {}", answer.text());
    answer.json()
}

fn save(daemon: &Daemon, number: u32) {
    assert_eq!(ask(daemon, "/save_snapshot", number)["durable"], true);
}

fn used(daemon: &Daemon, tier: &str) -> u64 {
    let tiers = daemon.get("/v1/tiers").json();
    let mut tiers = tiers["tiers"].as_array().unwrap().iter();
    let row = tiers.find(|row| row["tier"] == tier).unwrap();
    row["used_bytes"].as_u64().unwrap()
}

#[test]
fn pressure_on_ram_moves_the_oldest_to_disk_and_they_come_back() {
    let daemon = start(&[SMALL_RAM, LAZY]);
    let model = Model::large();
    let mut worker = Worker::attach_as(&daemon, &model);
    for number in 0..24 {
        worker.turn(&name(number), &tokens(number), TOKENS);
        assert!(used(&daemon, "ram") <= 8 << 20, "RAM is over its budget");
    }
    // From here on the disk has everything, and the least recently used leaves RAM first.
    for number in 0..24 {
        save(&daemon, number);
    }
    let size = model.state_bytes() + u64::from(TOKENS) * model.row_bytes();
    // The first have left RAM, the last are there; all are whole.
    let first = worker.restore(&tokens(0)).unwrap();
    assert_eq!(
        (first.boundary, first.tier, first.bytes),
        (TOKENS, Tier::Disk, size)
    );
    assert_eq!(worker.restore(&tokens(23)).unwrap().tier, Tier::Ram);
    assert_eq!(
        worker.restore(&tokens(0)).unwrap().tier,
        Tier::Ram,
        "it did not stay"
    );
    // By name: it says what it did, and does it once.
    let reply = ask(&daemon, "/restore_snapshot", 1);
    assert_eq!(reply["from_tier"], "disk");
    assert_eq!(reply["moved_bytes"], size);
    assert_eq!(reply["token_count"], TOKENS);
    assert_eq!(
        (&reply["tier"], &reply["pinned"]),
        (&json!("ram"), &json!(true))
    );
    let reply = ask(&daemon, "/restore_snapshot", 1);
    assert_eq!(
        (&reply["from_tier"], &reply["moved_bytes"]),
        (&json!("ram"), &json!(0))
    );
    // What is pinned stays, whatever comes.
    for number in 24..48 {
        worker.turn(&name(number), &tokens(number), TOKENS);
    }
    assert_eq!(
        worker.restore(&tokens(1)).unwrap().tier,
        Tier::Ram,
        "a pin did not hold"
    );
    assert_eq!(daemon.metric("engram_evicted_snapshots_total"), 0.0);
    for number in 0..48 {
        assert_eq!(
            worker.restore(&tokens(number)).unwrap().boundary,
            TOKENS,
            "c{number}"
        );
    }
}

/// `ENGRAM_CAP_MIB` sets the cap: 1024 is the full size.
#[test]
fn the_disk_never_holds_more_than_its_budget() {
    let mib = std::env::var("ENGRAM_CAP_MIB").map_or(32, |mib| mib.parse().unwrap());
    let cap: u64 = mib << 20;
    let budget = format!("{mib} MiB");
    let daemon = start(&[
        SMALL_RAM,
        &[
            ("store.disk.budget", &budget),
            ("service.write_after", "1ms"),
        ],
    ]);
    let model = Model::large();
    let mut worker = Worker::attach_as(&daemon, &model);
    let object = model.row_bytes() * u64::from(TOKENS) + (16 << 10);
    // A branch keeps what it names.
    worker.turn(&name(0), &tokens(0), TOKENS);
    let named = json!({ "conversation_id": name(0), "branch_name": "kept" });
    assert_eq!(daemon.post("/save_snapshot", &named).status, 200);
    // Five times the budget.
    let all = (5 * cap / object) as u32 + 2;
    for number in 1..all {
        worker.turn(&name(number), &tokens(number), TOKENS);
        let du = disk::du(&daemon.data());
        assert!(du <= cap + object, "{du} bytes after c{number}");
        if number % 8 == 0 {
            save(&daemon, number);
        }
    }
    save(&daemon, all - 1);
    let du = disk::du(&daemon.data());
    assert!(du <= cap, "{du} bytes at the end");
    assert!(daemon.metric("engram_written_bytes_total") > 4.0 * cap as f64);
    assert!(daemon.metric("engram_evicted_snapshots_total") > 0.0);
    assert!(worker.restore(&tokens(all - 1)).is_some());
    assert!(
        worker.restore(&tokens(0)).is_some(),
        "a named branch was evicted"
    );
    assert_eq!(worker.restore(&tokens(1)), None, "it cannot all be there");
    every_row_can_be_restored(&daemon);
    // A start finds the same within the same bounds.
    let mut daemon = daemon;
    daemon.restart();
    let du = disk::du(&daemon.data());
    assert!(du <= cap, "{du} bytes after a restart");
    assert!(every_row_can_be_restored(&daemon) >= 8);
    let mut worker = Worker::attach_as(&daemon, &model);
    assert!(worker.restore(&tokens(all - 1)).is_some());
    assert!(
        worker.restore(&tokens(0)).is_some(),
        "a named branch was lost"
    );
    // It is full, and evicts from the first byte on.
    for number in all..all + 8 {
        worker.turn(&name(number), &tokens(number), TOKENS);
        save(&daemon, number);
        let du = disk::du(&daemon.data());
        assert!(du <= cap + object, "{du} bytes after c{number}");
    }
}

/// Whatever is listed is there, with all its bytes. Returns how many there are.
fn every_row_can_be_restored(daemon: &Daemon) -> usize {
    // What is still to be written may evict what is listed.
    wait_for("all writes", || {
        (daemon.metric("engram_pending_writes") == 0.0).then_some(())
    });
    let list = daemon.get("/v1/snapshots?limit=1000").json();
    let rows = list["snapshots"].as_array().unwrap();
    for row in rows {
        let body = json!({ "snapshot_id": row["snapshot_id"], "pin_seconds": 0 });
        let answer = daemon.post("/restore_snapshot", &body);
        assert_eq!(answer.status, 200, "{row}: {}", answer.text());
    }
    rows.len()
}

#[test]
fn a_full_disk_is_said_and_costs_nothing_that_is_there() {
    let mut daemon = start(&[LAZY]);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    worker.turn(&name(0), &tokens(0), TOKENS);
    save(&daemon, 0);
    // Free space that no disk has.
    let greedy = knobs_of(&[LAZY, &[("store.disk.min_free", "8 EiB")]]);
    daemon.restart_with(&greedy);
    let mut worker = Worker::attach_as(&daemon, &model);
    worker.turn(&name(1), &tokens(1), TOKENS);
    let body = json!({ "conversation_id": name(1) });
    let answer = daemon.post("/save_snapshot", &body);
    assert_eq!(
        (answer.status, &*answer.kind()),
        (507, "no_space"),
        "{}",
        answer.text()
    );
    assert!(daemon.metric(r#"engram_write_failures_total{reason="no_space"}"#) > 0.0);
    // Both are served, and the daemon is well.
    assert_eq!(worker.restore(&tokens(0)).unwrap().boundary, TOKENS);
    assert_eq!(worker.restore(&tokens(1)).unwrap().boundary, TOKENS);
    assert_eq!(daemon.get("/readyz").status, 200);
    daemon.restart_with(&knobs_of(&[LAZY]));
    let mut worker = Worker::attach_as(&daemon, &model);
    assert_eq!(worker.restore(&tokens(0)).unwrap().boundary, TOKENS);
    assert_eq!(worker.restore(&tokens(1)), None);
}

#[test]
fn states_that_deeper_ones_of_their_request_superseded_are_never_written() {
    let mut daemon = start(&[LAZY]);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    let tokens = prompt(1, 3000);
    let req = worker.open("c0", &tokens);
    for boundary in [1024, 2048, 2816] {
        worker.save_at(req, &tokens, boundary);
    }
    worker.finish(req, tokens.len());
    worker.heard_all();
    save(&daemon, 0);
    assert_eq!(daemon.metric("engram_superseded_snapshots_total"), 2.0);
    let manifests = disk::manifests(&daemon.data());
    assert_eq!(manifests.len(), 1);
    assert_eq!(manifests[0].1["boundary"], 2816);
    let states = disk::objects(&daemon.data());
    let states = states
        .iter()
        .filter(|object| object.kind == "state")
        .count();
    assert_eq!(states, 1, "a superseded state was written");
    let bytes = model.state_bytes() + 2816 * model.row_bytes();
    assert_eq!(disk::payload(&daemon.data()), bytes);
    // A clean stop writes down what waits, and not what is superseded.
    let more = prompt(2, 2000);
    let req = worker.open("c1", &more);
    for boundary in [1024, 1536] {
        worker.save_at(req, &more, boundary);
    }
    worker.finish(req, more.len());
    worker.heard_all();
    assert!(daemon.stop().success());
    assert_eq!(disk::manifests(&daemon.data()).len(), 2);
    daemon.restart();
    let mut worker = Worker::attach_as(&daemon, &model);
    assert_eq!(worker.restore(&tokens).unwrap().boundary, 2816);
    assert_eq!(worker.restore(&tokens[..2100]), None);
    assert_eq!(worker.restore(&more).unwrap().boundary, 1536);
}

#[test]
fn a_start_brings_the_latest_into_ram_as_far_as_it_may() {
    let mut daemon = start(&[SMALL_RAM, COLD]);
    let model = Model::large();
    let mut worker = Worker::attach_as(&daemon, &model);
    for number in 0..12 {
        worker.turn(&name(number), &tokens(number), TOKENS);
        save(&daemon, number);
    }
    let restart = |daemon: &mut Daemon, preload: &str| {
        daemon.restart_with(&knobs_of(&[SMALL_RAM, &[("service.preload", preload)]]));
        Worker::attach_as(daemon, &model)
    };
    let mut worker = restart(&mut daemon, "0 B");
    assert_eq!(used(&daemon, "ram"), 0);
    assert_eq!(worker.restore(&tokens(11)).unwrap().tier, Tier::Disk);
    // Three of them: 864 KiB each.
    let mut worker = restart(&mut daemon, "3 MiB");
    wait_for("the preload", || {
        (daemon.metric("engram_promoted_objects_total") == 6.0).then_some(())
    });
    for (number, tier) in [
        (11, Tier::Ram),
        (9, Tier::Ram),
        (8, Tier::Disk),
        (0, Tier::Disk),
    ] {
        assert_eq!(
            worker.restore(&tokens(number)).unwrap().tier,
            tier,
            "c{number}"
        );
    }
    // Far more than RAM has: it stays below its budget, and serves.
    let mut worker = restart(&mut daemon, "1 GiB");
    wait_for("the preload", || {
        (daemon.metric("engram_promoted_objects_total") >= 8.0).then_some(())
    });
    assert!(used(&daemon, "ram") <= 8 << 20);
    for number in 0..12 {
        assert_eq!(
            worker.restore(&tokens(number)).unwrap().boundary,
            TOKENS,
            "c{number}"
        );
    }
}

#[test]
fn what_is_called_durable_survives_a_kill_right_after_the_answer() {
    let mut daemon = start(&[LAZY, COLD]);
    let model = Model::default();
    let trunk = prompt(1, 6000);
    for turn in 1..=6_u32 {
        let mut worker = Worker::attach_as(&daemon, &model);
        let boundary = turn * 1000 - 100;
        worker.turn("c0", &trunk[..turn as usize * 1000], boundary);
        save(&daemon, 0);
        daemon.kill();
        daemon.restart();
        // State, KV, tokens, names: all of it.
        let mut worker = Worker::attach_as(&daemon, &model);
        let got = worker.restore(&trunk).unwrap();
        assert_eq!((got.boundary, got.tier), (boundary, Tier::Disk));
        let body = json!({ "conversation_id": "c0", "turn_number": turn });
        let info = daemon.post("/get_snapshot_info", &body);
        assert_eq!(info.status, 200, "turn {turn}: {}", info.text());
        let info = &info.json()["metadata"];
        assert_eq!(
            (&info["boundary"], &info["durable"]),
            (&json!(boundary), &json!(true))
        );
        assert_eq!(info["fill_ids"], json!(trunk[..boundary as usize]));
        assert_eq!(info["tokens_after_boundary"], 100);
    }
    // What is not durable is gone without a trace, and nothing is half there.
    let mut worker = Worker::attach_as(&daemon, &model);
    worker.turn("c1", &tokens(7), TOKENS);
    daemon.kill();
    daemon.restart();
    let mut worker = Worker::attach_as(&daemon, &model);
    assert_eq!(worker.restore(&tokens(7)), None);
    assert_eq!(worker.restore(&trunk).unwrap().boundary, 5900);
    let list = ask(&daemon, "/list_snapshots", 0);
    assert_eq!(list["total"], 6);
    assert_eq!(disk::quarantine(&daemon.data()), []);
}

#[test]
fn a_deletion_that_was_answered_survives_a_kill() {
    let mut daemon = start(&[LAZY]);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    for number in 0..3 {
        worker.turn(&name(number), &tokens(number), TOKENS);
        save(&daemon, number);
    }
    let whole = json!({ "conversation_id": name(1), "whole": true });
    assert_eq!(daemon.post("/delete_snapshot", &whole).status, 200);
    daemon.kill();
    daemon.restart();
    let mut worker = Worker::attach_as(&daemon, &model);
    assert_eq!(worker.restore(&tokens(1)), None);
    let answer = daemon.post(
        "/get_snapshot_info",
        &json!({ "conversation_id": name(1), "turn_number": 1 }),
    );
    assert_eq!(answer.status, 404);
    for number in [0, 2] {
        assert_eq!(worker.restore(&tokens(number)).unwrap().boundary, TOKENS);
    }
    let bytes = 2 * (model.state_bytes() + u64::from(TOKENS) * model.row_bytes());
    assert_eq!(
        disk::payload(&daemon.data()),
        bytes,
        "its files are still there"
    );
}

/// The file of token ids in the data directory.
fn token_log(daemon: &Daemon) -> std::path::PathBuf {
    let entries = fs::read_dir(daemon.data()).unwrap();
    let mut paths = entries.map(|entry| entry.unwrap().path());
    let is_log = |path: &std::path::PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("tokens.") && name.ends_with(".log")
    };
    paths.find(is_log).unwrap()
}

#[test]
fn the_index_is_rebuilt_from_what_describes_itself() {
    let mut daemon = start(&[LAZY, COLD]);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    let trunk = prompt(1, 3000);
    for boundary in [900, 1900, 2900] {
        worker.turn("c0", &trunk[..boundary as usize], boundary);
        save(&daemon, 0);
    }
    let mut branch = trunk[..1500].to_vec();
    branch.extend(prompt(2, 500));
    worker.turn("c1", &branch, 2000);
    save(&daemon, 1);
    let check = |daemon: &Daemon| {
        let mut worker = Worker::attach_as(daemon, &model);
        for (tokens, boundary) in [(&trunk, 2900), (&branch, 2000)] {
            assert_eq!(worker.restore(tokens).unwrap().boundary, boundary);
        }
        assert_eq!(worker.restore(&trunk[..2000]).unwrap().boundary, 1900);
        assert_eq!(worker.restore(&trunk[..1000]).unwrap().boundary, 900);
    };
    // The token log is only a copy.
    daemon.kill();
    fs::remove_file(token_log(&daemon)).unwrap();
    daemon.restart();
    check(&daemon);
    daemon.kill();
    fs::write(token_log(&daemon), b"nonsense").unwrap();
    daemon.restart();
    check(&daemon);
    assert_eq!(ask(&daemon, "/list_snapshots", 0)["total"], 3);
    // Without names, snapshots are found by their tokens.
    daemon.kill();
    fs::remove_dir_all(daemon.data().join("refs")).unwrap();
    daemon.restart();
    check(&daemon);
    let list = daemon.get("/v1/snapshots").json();
    assert_eq!(list["total"], 4);
    // Files of a writer that died, and objects that no manifest names, are collected.
    daemon.kill();
    let (_, manifest) = &disk::manifests_of(&daemon.data(), "c0")[2];
    let object = disk::object_path(&daemon.data(), &manifest["state"]["object"]);
    let model_folder = disk::files(&daemon.data().join("models"))
        .into_keys()
        .find(|path| path.ends_with("model.json"))
        .unwrap();
    let orphan = model_folder.with_file_name("objects/00/00");
    fs::create_dir_all(&orphan).unwrap();
    let orphan = orphan.join(format!("{}.0.safetensors", "00".repeat(32)));
    fs::copy(&object, &orphan).unwrap();
    let torn = object.with_file_name(".tmp-torn");
    fs::write(&torn, "half").unwrap();
    daemon.restart();
    check(&daemon);
    assert!(!orphan.exists(), "an orphan was left");
    assert!(!torn.exists(), "a torn file was left");
    assert!(object.exists());
}

#[test]
fn without_a_disk_ram_forgets_the_oldest_and_says_so() {
    let daemon = start(&[SMALL_RAM, &[("store.disk.path", "")]]);
    let model = Model::large();
    let mut worker = Worker::attach_as(&daemon, &model);
    for number in 0..24 {
        worker.turn(&name(number), &tokens(number), TOKENS);
    }
    assert_eq!(worker.restore(&tokens(0)), None);
    assert_eq!(worker.restore(&tokens(23)).unwrap().tier, Tier::Ram);
    assert!(daemon.metric("engram_evicted_snapshots_total") > 0.0);
    let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": name(23) }));
    assert_eq!((answer.status, &*answer.kind()), (503, "unavailable"));
    let body = json!({ "conversation_id": name(23), "durable": false });
    let answer = daemon.post("/save_snapshot", &body);
    assert_eq!(
        (answer.status, &answer.json()["durable"]),
        (200, &json!(false))
    );
    let answer = daemon.post("/restore_snapshot", &json!({ "conversation_id": name(0) }));
    assert_eq!((answer.status, &*answer.kind()), (409, "no_state"));
}

#[test]
fn a_delayed_write_comes_by_itself() {
    let wait: Knobs = &[("service.write_after", "200ms".into())];
    let mut daemon = Daemon::start(wait);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    worker.turn(&name(0), &tokens(0), TOKENS);
    let durable = |daemon: &Daemon| daemon.metric("engram_durable_snapshots_total") == 1.0;
    common::wait_within(Duration::from_secs(60), "the write", || {
        durable(&daemon).then_some(())
    });
    daemon.kill();
    daemon.restart();
    let mut worker = Worker::attach_as(&daemon, &model);
    assert_eq!(worker.restore(&tokens(0)).unwrap().boundary, TOKENS);
}
