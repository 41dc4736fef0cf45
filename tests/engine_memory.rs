//! A real engine beside a real daemon: what is saved comes back, and only what is its own.

mod common;

use std::os::unix::fs::PermissionsExt;

use common::daemon::Daemon;
use common::engine::{Engine, Reply, tokens};
use common::wait_for;
use serde_json::{Value, json};

/// Tokens of an answer.
const ANSWER: usize = 24;

/// An engine that computes every prompt in full.
fn oracle() -> Engine {
    Engine::alone(&["--no-cache"])
}

fn restored(reply: &Reply) -> (u64, u64, &str) {
    let engram = &reply.meta["engram"];
    let number = |key: &str| engram[key].as_u64().unwrap_or_else(|| panic!("{engram}"));
    let tier = engram["tier"].as_str().unwrap();
    (number("restored_tokens"), number("reused_tokens"), tier)
}

#[test]
fn every_turn_comes_back_from_ram_after_the_device_forgot_it() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    let oracle = oracle();
    let mut said = tokens(1, 1100);
    let mut boundary = 0;
    for turn in 1..=4 {
        let reply = engine.generate("chat", &format!("chat-{turn}"), &said, ANSWER);
        let cold = oracle.generate("chat", &format!("chat-{turn}"), &said, ANSWER);
        assert_eq!(reply.tokens, cold.tokens, "turn {turn}");
        assert_eq!(reply.cached, boundary, "turn {turn}");
        if turn == 1 {
            assert_eq!(reply.meta["engram"], Value::Null);
        } else {
            assert_eq!(restored(&reply), (boundary, boundary, "ram"));
            assert!(reply.meta["engram"]["restore_ms"].as_f64().unwrap() > 0.0);
        }
        boundary = (said.len() as u64 + ANSWER as u64 - 1) / 256 * 256;
        said.extend(reply.tokens);
        said.extend(tokens(turn + 1, 170));
        engine.check_accounts();
    }
    let counts = engine.settled()["counts"].take();
    assert_eq!(
        (&counts["restored"], &counts["garbled"]),
        (&json!(3), &json!(0))
    );
    // Of a save that a deeper one replaced, two answers may come late; of nothing else.
    let replaced = counts["dropped"]["superseded"].as_u64().unwrap_or(0);
    assert!(counts["late"].as_u64().unwrap() <= 2 * replaced, "{counts}");
    // The daemon counts the same.
    let reused = wait_for("the daemon's count", || {
        let reused = daemon.metric("engram_reused_tokens_total");
        (reused > 0.0).then_some(reused)
    });
    assert_eq!(counts["reused_tokens"].as_f64().unwrap(), reused);
}

#[test]
fn a_killed_engine_finds_its_memory_in_ram_whatever_its_pools_are_like_now() {
    let daemon = Daemon::start(&[]);
    let mut engine = Engine::beside(&daemon, &["--scramble-seed", "1"]);
    let said = tokens(3, 1300);
    let first = engine.generate("chat", "chat-1", &said, ANSWER);
    engine.settled();
    engine.kill();
    drop(engine);
    for args in [
        &["--scramble-seed", "2", "--slots", "9", "--pages", "40"][..],
        &["--page-size", "1", "--pages", "3000"],
        &[
            "--page-size",
            "16",
            "--layout",
            "page-major",
            "--chunk",
            "300",
        ],
    ] {
        wait_for("the daemon to see the end", || {
            (common::engine::workers(&daemon) == 0).then_some(())
        });
        let engine = Engine::beside(&daemon, args);
        let again = engine.generate("chat", "chat-1", &said, ANSWER);
        assert_eq!(again.tokens, first.tokens, "{args:?}");
        assert_eq!(restored(&again), (1280, 1280, "ram"), "{args:?}");
        engine.check_accounts();
    }
}

#[test]
fn after_the_daemons_death_what_was_durable_comes_from_disk() {
    let knobs = [
        ("service.write_after", toml::Value::from("0s")),
        ("service.preload", toml::Value::from("0 B")),
    ];
    let mut daemon = Daemon::start(&knobs);
    let engine = Engine::beside(&daemon, &[]);
    let said = tokens(4, 1300);
    let first = engine.generate("chat", "chat-1", &said, ANSWER);
    engine.settled();
    daemon.all_durable();
    daemon.kill();
    // Without a daemon the engine serves on.
    let other = tokens(5, 300);
    let alone = engine.generate("other", "other-1", &other, ANSWER);
    assert_eq!(
        alone.tokens,
        oracle().generate("o", "o", &other, ANSWER).tokens
    );
    wait_for("the engine to see the end", || {
        (engine.info()["memory"]["attached"] == false).then_some(())
    });
    daemon.restart();
    engine.wait_attached(&daemon);
    engine.flush();
    let again = engine.generate("chat", "chat-2", &said, ANSWER);
    assert_eq!(again.tokens, first.tokens);
    assert_eq!(restored(&again), (1280, 1280, "disk"));
    engine.check_accounts();
    // From now on from RAM.
    let again = engine.generate("chat", "chat-3", &said, ANSWER);
    assert_eq!(
        (again.tokens == first.tokens, restored(&again).2),
        (true, "ram")
    );
}

#[test]
fn an_engine_that_came_first_attaches_when_a_daemon_appears() {
    let mut daemon = Daemon::start(&[]);
    daemon.kill();
    let engine = Engine::toward(&daemon.grpc_socket(), &[]);
    let said = tokens(6, 700);
    let alone = engine.generate("chat", "chat-1", &said, ANSWER);
    let memory = engine.info()["memory"].take();
    assert_eq!(
        (&memory["attached"], memory["apart"].is_string()),
        (&json!(false), true)
    );
    daemon.restart();
    engine.wait_attached(&daemon);
    // The next hit offers what the device had before.
    engine.generate("chat", "chat-2", &said, ANSWER);
    let memory = engine.settled();
    assert!(memory["counts"]["saved"].as_u64().unwrap() > 0, "{memory}");
    engine.check_accounts();
    let again = engine.generate("chat", "chat-3", &said, ANSWER);
    assert_eq!((again.tokens, again.cached), (alone.tokens, 512));
}

#[test]
fn other_weights_under_the_same_name_never_hit() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    let said = tokens(7, 700);
    let right = engine.generate("chat", "chat-1", &said, ANSWER);
    engine.settled();
    let other = Engine::beside(&daemon, &["--perturb-weights"]);
    let reply = other.generate("chat", "chat-1", &said, ANSWER);
    assert_eq!((reply.cached, &reply.meta["engram"]), (0, &Value::Null));
    let cold = Engine::alone(&["--no-cache", "--perturb-weights"]);
    assert_eq!(reply.tokens, cold.generate("c", "c", &said, ANSWER).tokens);
    assert_ne!(reply.tokens, right.tokens);
    let counts = other.settled()["counts"].take();
    assert_eq!(counts["misses"]["nothing_stored"], 1);
}

#[test]
fn a_repeated_prompt_is_offered_and_writes_nothing() {
    let knobs = [("service.write_after", toml::Value::from("0s"))];
    let daemon = Daemon::start(&knobs);
    let engine = Engine::beside(&daemon, &[]);
    let said = tokens(8, 700);
    engine.generate("chat", "chat-1", &said, ANSWER);
    engine.settled();
    daemon.all_durable();
    let written = daemon.metric("engram_written_bytes_total");
    assert!(written > 0.0);
    engine.generate("chat", "chat-2", &said, ANSWER);
    engine.flush();
    engine.generate("chat", "chat-3", &said, ANSWER);
    let memory = engine.settled();
    assert!(
        memory["counts"]["declined"]["already_stored"]
            .as_u64()
            .unwrap()
            > 0,
        "{memory}"
    );
    daemon.all_durable();
    assert_eq!(daemon.metric("engram_written_bytes_total"), written);
}

#[test]
fn over_tcp_the_token_counts_and_a_refusal_leaves_the_engine_serving() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "a-token-of-enough-length\n").unwrap();
    std::fs::set_permissions(&token, PermissionsExt::from_mode(0o600)).unwrap();
    let knobs = [
        ("grpc.listen", toml::Value::from("127.0.0.1:0")),
        (
            "service.token_file",
            toml::Value::from(token.to_str().unwrap()),
        ),
    ];
    let daemon = Daemon::start(&knobs);
    let bound = std::fs::read(daemon.folder().join("addresses.json")).unwrap();
    let bound: Value = serde_json::from_slice(&bound).unwrap();
    let url = format!("http://{}", bound["grpc"].as_str().unwrap());
    let engine = Engine::alone(&["--engram", &url]);
    let said = tokens(9, 300);
    let right = engine.generate("chat", "chat-1", &said, ANSWER);
    let why = wait_for("the refusal", || {
        let memory = engine.info()["memory"].take();
        assert_eq!(memory["attached"], false);
        let why = memory["apart"].as_str().unwrap_or_default().to_owned();
        why.contains("UNAUTHENTICATED").then_some(why)
    });
    assert!(!why.contains("a-token"), "{why}");
    let token = token.to_str().unwrap();
    let engine = Engine::alone(&["--engram", &url, "--engram-token-file", token]);
    engine.wait_attached(&daemon);
    engine.generate("chat", "chat-2", &said, ANSWER);
    engine.check_accounts();
    let again = engine.generate("chat", "chat-3", &said, ANSWER);
    assert_eq!((again.cached, again.tokens), (256, right.tokens));
}

#[cfg(feature = "testing")]
#[test]
fn zeroing_the_restored_state_or_the_restored_kv_changes_the_answer() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    let said = tokens(10, 1300);
    let right = engine.generate("chat", "chat-1", &said, ANSWER);
    engine.check_accounts();
    for (what, same) in [
        (json!("state"), false),
        (json!("kv"), false),
        (Value::Null, true),
    ] {
        let set = engine.post("/testing/tamper", &json!({ "restored": what }));
        assert_eq!(set.status, 200, "{}", set.text());
        let reply = engine.generate("chat", &format!("again-{what}"), &said, ANSWER);
        assert_eq!(restored(&reply).1, 1280);
        assert_eq!(reply.tokens == right.tokens, same, "{what}");
        engine.check_accounts();
    }
}
