//! What is written to disk: what is new, once, and not a byte more.

mod common;

use std::thread;

use common::daemon::{Daemon, Knobs};
use common::disk;
use common::worker::{Model, SaveEnd, Worker, prompt};
use engram::proto::channel::layout::DeclineReason;
use serde_json::{Value, json};

const WRITTEN: &str = "engram_written_bytes_total";

/// Nothing goes to disk before it is asked for.
const LAZY: &[(&str, &str)] = &[("service.write_after", "1h")];

fn start(knobs: &[(&str, &str)]) -> Daemon {
    let knobs: Vec<_> = knobs
        .iter()
        .map(|(key, value)| (*key, (*value).into()))
        .collect();
    let knobs: Knobs = &knobs;
    Daemon::start(knobs)
}

/// Saves the latest of a conversation durably, and returns the bytes that this wrote by the answer.
fn save(daemon: &Daemon, conversation: &str) -> u64 {
    let answer = daemon.post(
        "/save_snapshot",
        &json!({ "conversation_id": conversation }),
    );
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    assert_eq!(answer["durable"], true);
    answer["written_bytes"].as_u64().unwrap()
}

/// State and KV of so many tokens.
fn bytes(model: &Model, tokens: u64) -> u64 {
    model.state_bytes() + tokens * model.row_bytes()
}

#[test]
fn saving_the_same_again_writes_nothing() {
    let mut daemon = start(LAZY);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    let tokens = prompt(1, 3000);
    worker.turn("c", &tokens, 2816);
    assert_eq!(save(&daemon, "c"), bytes(&model, 2816));
    assert_eq!(daemon.metric(WRITTEN), bytes(&model, 2816) as f64);
    assert_eq!(disk::payload(&daemon.data()), bytes(&model, 2816));
    let objects = |daemon: &Daemon| disk::files(&daemon.data().join("models"));
    let before = objects(&daemon);
    // By name; by the worker, for this and for another conversation; by another process.
    assert_eq!(save(&daemon, "c"), 0);
    for conversation in ["c", "d"] {
        let req = worker.open(conversation, &tokens);
        let end = worker.save_at(req, &tokens, 2816);
        assert_eq!(end, SaveEnd::Declined(DeclineReason::AlreadyStored));
        worker.finish(req, tokens.len());
        worker.heard_all();
        assert_eq!(save(&daemon, conversation), 0);
    }
    let pages = Model {
        page_size: 64,
        instance: [9; 16],
        ..model.clone()
    };
    let mut other = Worker::attach_as(&daemon, &pages);
    let req = other.open("e", &tokens);
    let end = other.save_at(req, &tokens, 2816);
    assert_eq!(end, SaveEnd::Declined(DeclineReason::AlreadyStored));
    assert_eq!(daemon.metric(WRITTEN), bytes(&model, 2816) as f64);
    assert_eq!(objects(&daemon), before, "a file was touched");
    // After a restart, too.
    daemon.restart();
    let mut worker = Worker::attach_as(&daemon, &model);
    let req = worker.open("f", &tokens);
    let end = worker.save_at(req, &tokens, 2816);
    assert_eq!(end, SaveEnd::Declined(DeclineReason::AlreadyStored));
    worker.finish(req, tokens.len());
    worker.heard_all();
    assert_eq!(save(&daemon, "f"), 0);
    assert_eq!(save(&daemon, "c"), 0);
    assert_eq!(daemon.metric(WRITTEN), 0.0);
    assert_eq!(objects(&daemon), before, "a file was touched");
}

#[test]
fn each_turn_writes_its_own_tokens_and_its_state() {
    let daemon = start(LAZY);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    let tokens = prompt(1, 9000);
    let mut last = 0;
    let mut sum = 0;
    // Within a block, to the end of one, over several, one token.
    for boundary in [700, 1000, 1024, 1280, 4000, 4001, 8192, 9000] {
        let parts = worker.turn("c", &tokens[..boundary as usize], boundary);
        let wanted: u64 = parts.iter().map(|part| part.len() as u64).sum();
        assert_eq!(wanted, u64::from(boundary - last), "turn to {boundary}");
        let own = bytes(&model, u64::from(boundary - last));
        assert_eq!(save(&daemon, "c"), own, "turn to {boundary}");
        sum += own;
        assert_eq!(daemon.metric(WRITTEN), sum as f64, "turn to {boundary}");
        assert_eq!(disk::payload(&daemon.data()), sum, "turn to {boundary}");
        last = boundary;
    }
    let objects = disk::objects(&daemon.data());
    let of = |kind: &str| objects.iter().filter(|object| object.kind == kind).count();
    assert_eq!(of("state"), 8);
    // Each turn is whole.
    assert_eq!(worker.restore(&tokens).unwrap().boundary, 9000);
    assert_eq!(worker.restore(&tokens[..8999]).unwrap().boundary, 8192);
    assert_eq!(worker.restore(&tokens[..1023]).unwrap().boundary, 1000);
}

#[test]
fn a_branch_writes_what_lies_beyond_it() {
    let daemon = start(LAZY);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    let trunk = prompt(1, 5000);
    worker.turn("trunk", &trunk, 5000);
    save(&daemon, "trunk");
    let mut sum = bytes(&model, 5000);
    for (fork, seed) in [(1, 2), (1024, 3), (2500, 4), (4999, 5)] {
        let mut branch = trunk[..fork].to_vec();
        branch.extend(prompt(seed, 1500));
        let name = format!("branch at {fork}");
        worker.turn(&name, &branch, branch.len() as u32);
        let written = save(&daemon, &name);
        let own = bytes(&model, 1500);
        let partial = model.row_bytes() * (fork as u64 % 1024);
        assert!(
            (own..=own + partial).contains(&written),
            "{name}: {written}, own are {own}"
        );
        sum += written;
        assert_eq!(disk::payload(&daemon.data()), sum, "{name}");
        assert_eq!(
            worker.restore(&branch).unwrap().boundary as usize,
            branch.len()
        );
    }
    assert_eq!(worker.restore(&trunk).unwrap().boundary, 5000);
    assert_eq!(daemon.metric(WRITTEN), sum as f64);
}

#[test]
fn branches_that_come_at_once_keep_their_whole_blocks_once() {
    let daemon = start(LAZY);
    let model = Model::default();
    let shared = prompt(1, 2500);
    let branches: Vec<Vec<u32>> = (0..4)
        .map(|i| [shared.clone(), prompt(i + 2, 500)].concat())
        .collect();
    thread::scope(|scope| {
        for (branch, i) in branches.iter().zip(0_u8..) {
            let (daemon, model) = (
                &daemon,
                Model {
                    instance: [i; 16],
                    ..model.clone()
                },
            );
            scope.spawn(move || {
                let mut worker = Worker::attach_as(daemon, &model);
                worker.turn(&format!("b{i}"), branch, 3000);
            });
        }
    });
    for i in 0..4 {
        save(&daemon, &format!("b{i}"));
    }
    let written = disk::payload(&daemon.data());
    let most = 4 * bytes(&model, 3000 - 2048) + 2048 * model.row_bytes();
    assert!(written <= most, "{written} bytes, {most} at most");
    let mut worker = Worker::attach_as(&daemon, &model);
    for branch in &branches {
        assert_eq!(worker.restore(branch).unwrap().boundary, 3000);
    }
}

#[test]
fn bytes_written_by_the_answer_the_metric_and_the_disk_agree() {
    let daemon = start(&[("service.write_after", "1ms")]);
    let model = Model::default();
    let mut worker = Worker::attach_as(&daemon, &model);
    for i in 0..8 {
        worker.turn(&format!("c{i}"), &prompt(i + 1, 1100), 1100);
    }
    for i in 0..8 {
        let written = save(&daemon, &format!("c{i}"));
        // It may have become durable by itself before.
        assert!([0, bytes(&model, 1100)].contains(&written), "{written}");
    }
    assert_eq!(disk::payload(&daemon.data()), 8 * bytes(&model, 1100));
    assert_eq!(daemon.metric(WRITTEN), 8.0 * bytes(&model, 1100) as f64);
    let tiers = daemon.get("/v1/tiers").json();
    let tiers = tiers["tiers"].as_array().unwrap();
    let used = |tier: &str| {
        let row = tiers
            .iter()
            .find(|row| row["tier"] == tier)
            .map(|row| &row["used_bytes"]);
        row.and_then(Value::as_u64).unwrap()
    };
    let du = disk::du(&daemon.data());
    let told = used("disk");
    assert!(
        du.abs_diff(told) <= 64 << 10,
        "{told} bytes told, {du} used"
    );
}
