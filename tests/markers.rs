//! Many conversations, each with content that no other has, and RAM for a few of them: whatever order
//! they come back in, nobody gets a byte of another's.

mod common;

use std::thread;

use common::daemon::Daemon;
use common::engine::{Engine, tokens};
use common::shuffled;
use common::wait_for;
use common::worker::{Model, Names, Worker, prompt};

const CONVERSATIONS: usize = 64;

/// Tokens of each. With [`Model::large`] that is 864 KiB of state and KV.
const TOKENS: usize = 200;

/// RAM for eight of them, a disk for all.
const SMALL_RAM: &[(&str, &str)] = &[
    ("store.ram", "14 MiB"),
    ("store.ram_headroom", "7 MiB"),
    ("service.write_after", "20ms"),
];

/// Tokens of one conversation. Every other one begins with the same instructions: then KV is shared,
/// and a piece of it holds rows that belong to somebody else.
fn conversation(number: usize) -> Vec<u32> {
    let mut tokens = prompt(number as u32 + 1, TOKENS);
    if number.is_multiple_of(2) {
        tokens[..64].copy_from_slice(&prompt(0, 64));
    }
    tokens
}

#[test]
fn restored_bytes_are_those_of_the_conversation_in_any_order_and_at_once() {
    let knobs: Vec<_> = SMALL_RAM
        .iter()
        .map(|(key, value)| (*key, (*value).into()))
        .collect();
    let daemon = Daemon::start(&knobs);
    let model = Model::large();
    let mut worker = Worker::attach_as(&daemon, &model);
    for number in 0..CONVERSATIONS {
        worker.turn(&format!("c{number}"), &conversation(number), TOKENS as u32);
    }
    // Each client is a worker of its own, restores all in its own order, and compares every byte.
    thread::scope(|scope| {
        for client in 0..4 {
            let (daemon, model) = (&daemon, &model);
            scope.spawn(move || {
                let model = Model {
                    instance: [client; 16],
                    ..model.clone()
                };
                let mut worker = Worker::attach_as(daemon, &model);
                for number in shuffled(client.into(), CONVERSATIONS) {
                    let got = worker.restore(&conversation(number));
                    let got = got.unwrap_or_else(|| panic!("c{number} is not found"));
                    assert_eq!(got.boundary, TOKENS as u32, "c{number}");
                }
            });
        }
    });
    let hits = daemon.metric(r#"engram_lookup_hits_total{tier="disk"}"#);
    assert!(
        hits > CONVERSATIONS as f64,
        "only {hits} of 256 restores came from disk"
    );
    assert!(daemon.metric(r#"engram_evicted_objects_total{tier="ram"}"#) > 0.0);
    // Only what a deeper state of the same request had replaced may be gone.
    let evicted = daemon.metric("engram_evicted_snapshots_total");
    let superseded = daemon.metric("engram_superseded_snapshots_total");
    assert!(evicted <= superseded, "{evicted} of {superseded}");
    let restored = daemon.metric("engram_restored_tokens_total");
    assert_eq!(restored, (4 * CONVERSATIONS * TOKENS) as f64);
    // Prompts that share a beginning but nothing else find the beginning of nobody.
    let mut stranger = prompt(0, 64);
    stranger.extend(prompt(9999, 200));
    assert_eq!(worker.restore_as(&Names::default(), &stranger), None);
}

/// Tokens of a prompt to the engine; with its states and KV a conversation takes 220 KiB.
const PROMPT: usize = 1300;
const ANSWER: usize = 8;
const BOUNDARY: u64 = 1280;

/// A conversation whose marker, a run of tokens that is nobody else's, stands at its beginning, middle
/// and end; every other one begins with the same instructions.
fn marked(number: usize) -> Vec<u32> {
    let mut prompt = tokens(7, PROMPT);
    let marker = tokens(1000 + number as u64, 40);
    let shared = if number.is_multiple_of(2) { 256 } else { 0 };
    for at in [shared, PROMPT / 2, PROMPT - 200, PROMPT - 40] {
        prompt[at..at + 40].copy_from_slice(&marker);
    }
    prompt
}

#[test]
fn answers_after_a_restore_are_those_of_the_conversation_in_any_order_and_at_once() {
    // Of 64 conversations RAM has room for eight.
    let daemon = Daemon::start(&[
        ("store.ram", "2 MiB".into()),
        ("service.write_after", "20ms".into()),
        // Room comes as fast as the disk writes what is saved meanwhile.
        ("service.room_wait", "60s".into()),
    ]);
    let pools = [
        "--slots",
        "24",
        "--pages",
        "160",
        "--max-running",
        "4",
        "--restore-patience",
        "60s",
    ];
    let engine = Engine::beside(&daemon, &pools);
    let oracle = Engine::alone(&["--no-cache"]);
    let answers: Vec<Vec<u32>> = (0..CONVERSATIONS)
        .map(|number| {
            let (name, prompt) = (format!("c{number}"), marked(number));
            let reply = engine.generate(&name, &name, &prompt, ANSWER);
            // Pools are small: what is not saved soon may be evicted.
            engine.settled();
            let cold = oracle.generate(&name, &name, &prompt, ANSWER);
            assert_eq!(reply.tokens, cold.tokens, "{name}, the first time");
            cold.tokens
        })
        .collect();
    // Markers count: nobody's answer is everybody's.
    let mut distinct = answers.clone();
    distinct.sort();
    distinct.dedup();
    assert!(
        distinct.len() > CONVERSATIONS / 2,
        "{} distinct answers",
        distinct.len()
    );
    wait_for("all saves", || {
        let saved = daemon.metric("engram_durable_snapshots_total");
        (saved >= CONVERSATIONS as f64 && daemon.metric("engram_pending_writes") == 0.0)
            .then_some(())
    });
    engine.flush();
    thread::scope(|scope| {
        for client in 0..4 {
            let (engine, answers, daemon) = (&engine, &answers, &daemon);
            scope.spawn(move || {
                for number in shuffled(client, CONVERSATIONS) {
                    let rid = format!("{client}-{number}");
                    let reply =
                        engine.generate(&format!("c{number}"), &rid, &marked(number), ANSWER);
                    assert_eq!(
                        reply.tokens, answers[number],
                        "c{number} for client {client}"
                    );
                    assert!(
                        reply.cached >= BOUNDARY,
                        "c{number} for client {client}: {} cached; {}",
                        reply.cached,
                        misses(daemon)
                    );
                }
            });
        }
    });
    let info = engine.info();
    assert_eq!(info["sanity_check"], "ok", "{info}");
    let disk = daemon.metric(r#"engram_lookup_hits_total{tier="disk"}"#);
    assert!(disk > 50.0, "{disk} restores from disk");
    // Only what a deeper state of the same request had replaced may be gone.
    let evicted = daemon.metric("engram_evicted_snapshots_total");
    let superseded = daemon.metric("engram_superseded_snapshots_total");
    assert!(evicted <= superseded, "{evicted} of {superseded}");
}

fn misses(daemon: &Daemon) -> String {
    let metrics = daemon.get("/metrics");
    let lines = metrics.text().lines();
    let of = |line: &&str| {
        ["lookup", "dropped", "skipped", "unused"]
            .iter()
            .any(|name| line.contains(name))
    };
    lines
        .filter(|line| !line.starts_with('#'))
        .filter(of)
        .collect::<Vec<_>>()
        .join("; ")
}
