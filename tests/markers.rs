//! Many conversations, each with content that no other has, and RAM for a few of them: whatever order
//! they come back in, nobody gets a byte of another's.

mod common;

use std::thread;

use common::daemon::Daemon;
use common::shuffled;
use common::worker::{Model, Names, Worker, prompt};

const CONVERSATIONS: usize = 64;

/// Tokens of each. With [`Model::large`] that is 864 KiB of state and KV.
const TOKENS: usize = 200;

/// RAM for nine of them, a disk for all.
const SMALL_RAM: &[(&str, &str)] = &[
    ("store.ram", "16 MiB"),
    ("store.ram_headroom", "8 MiB"),
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
    assert_eq!(daemon.metric("engram_evicted_snapshots_total"), 0.0);
    let restored = daemon.metric("engram_restored_tokens_total");
    assert_eq!(restored, (4 * CONVERSATIONS * TOKENS) as f64);
    // Prompts that share a beginning but nothing else find the beginning of nobody.
    let mut stranger = prompt(0, 64);
    stranger.extend(prompt(9999, 200));
    assert_eq!(worker.restore_as(&Names::default(), &stranger), None);
}
