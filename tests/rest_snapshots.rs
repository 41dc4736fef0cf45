//! Snapshots by name, with a real engine that makes them.

mod common;

use common::daemon::Daemon;
use common::engine::{Engine, tokens};
use common::process::run;
use common::wait_for;
use serde_json::{Value, json};

/// A conversation of `turns` turns on an engine; returns all its tokens.
fn talk(engine: &Engine, session: &str, turns: u64) -> Vec<u32> {
    let mut said = Vec::new();
    for turn in 1..=turns {
        said.extend(tokens(turn, 400));
        let reply = engine.generate(session, &format!("{session}-{turn}"), &said, 16);
        said.extend(reply.tokens);
    }
    said
}

fn rows(daemon: &Daemon, session: &str) -> Vec<Value> {
    let answer = daemon.post("/list_snapshots", &json!({ "conversation_id": session }));
    assert_eq!(answer.status, 200);
    answer.json()["snapshots"].as_array().unwrap().clone()
}

/// Waits until so many turns of a conversation have a snapshot.
fn wait_turns(daemon: &Daemon, session: &str, turns: usize) -> Vec<Value> {
    wait_for("the turns", || {
        let rows = rows(daemon, session);
        let whole = rows
            .iter()
            .filter(|row| !row["snapshot_id"].is_null())
            .count();
        (whole >= turns).then_some(rows)
    })
}

#[test]
fn turns_are_listed_and_described() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    let said = talk(&engine, "chat", 3);
    let rows = wait_turns(&daemon, "chat", 3);
    let numbers: Vec<_> = rows
        .iter()
        .map(|row| row["turn_number"].as_u64().unwrap())
        .collect();
    assert_eq!(
        numbers,
        [1, 2, 3],
        "turns count 1, 2, 3 and are not token counts"
    );
    for row in &rows {
        let turn = row["turn_number"].as_u64().unwrap();
        let total = turn * 416;
        let boundary = row["boundary"].as_u64().unwrap();
        assert!(boundary > 0 && boundary <= total, "{row}");
        assert_eq!(boundary % 256, 0, "states are on the grid");
        assert_eq!(
            row["tokens_after_boundary"].as_u64().unwrap(),
            total - boundary,
            "{row}"
        );
        assert_eq!(row["token_count"].as_u64().unwrap(), boundary);
        assert_eq!(row["conversation_id"], "chat");
        for absent in ["mamba_pool_idx", "req_pool_idx", "active_tool_context"] {
            assert!(row.get(absent).unwrap().is_null());
        }
    }
    let info = json!({ "conversation_id": "chat", "turn_number": 3 });
    let answer = daemon.post("/get_snapshot_info", &info).json();
    let metadata = &answer["metadata"];
    assert_eq!(metadata["snapshot_id"], rows[2]["snapshot_id"]);
    let ids: Vec<u32> = serde_json::from_value(metadata["fill_ids"].clone()).unwrap();
    assert_eq!(
        ids,
        said[..ids.len()],
        "the tokens are those of prompt and answers"
    );
    assert_eq!(ids.len() as u64, metadata["boundary"].as_u64().unwrap());
    // A request's own name finds its turn too.
    let by_rid = json!({ "rid": "chat-2", "turn_number": 2 });
    assert_eq!(daemon.post("/get_snapshot_info", &by_rid).status, 200);
    let alone = daemon.post("/get_snapshot_info", &json!({ "rid": "chat-2" }));
    assert_eq!(alone.status, 200, "{}", alone.text());
    assert_eq!(alone.json()["metadata"]["turn_number"], 2);
    // By its own id on the native surface.
    let id = rows[0]["snapshot_id"].as_str().unwrap();
    assert_eq!(
        daemon.get(&format!("/v1/snapshots/{id}")).json()["snapshot_id"],
        id
    );
    let all = daemon.get("/v1/conversations").json();
    assert_eq!(all["total"], 1);
    assert_eq!(all["conversations"][0]["turns"], 3);
    let missing = json!({ "conversation_id": "chat", "turn_number": 4 });
    assert_eq!(daemon.post("/get_snapshot_info", &missing).status, 404);
}

#[test]
fn a_saved_conversation_survives_both_deaths_and_is_reused() {
    let mut daemon = Daemon::start(&[("service.write_after", "1h".into())]);
    let mut engine = Engine::beside(&daemon, &[]);
    let mut said = talk(&engine, "chat", 2);
    wait_turns(&daemon, "chat", 2);
    let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": "chat" }));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let saved = answer.json();
    assert_eq!(
        (&saved["success"], &saved["durable"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(saved["turn_number"], 2);
    assert!(saved["written_bytes"].as_u64().unwrap() > 0);
    let again = daemon
        .post("/save_snapshot", &json!({ "conversation_id": "chat" }))
        .json();
    assert_eq!(again["written_bytes"], 0, "a repeated save writes nothing");
    engine.kill();
    daemon.kill();
    daemon.restart();
    let rows = rows(&daemon, "chat");
    assert!(
        rows.iter()
            .any(|row| row["snapshot_id"] == saved["snapshot_id"]),
        "{rows:?}"
    );
    let restored = daemon.post("/restore_snapshot", &json!({ "conversation_id": "chat" }));
    assert_eq!(restored.status, 200, "{}", restored.text());
    let restored = restored.json();
    assert_eq!(restored["success"], true);
    assert_eq!(restored["token_count"], saved["token_count"]);
    assert!(restored["pinned_until"].as_f64().unwrap() > restored["created_at"].as_f64().unwrap());
    engine.restart_beside(&daemon);
    said.extend(tokens(9, 100));
    let warm = engine.generate("chat", "chat-3", &said, 32);
    assert_eq!(warm.cached, saved["boundary"].as_u64().unwrap());
    let cold = Engine::alone(&["--no-cache"]).generate("chat", "chat-3", &said, 32);
    assert_eq!(warm.tokens, cold.tokens);
}

#[test]
fn branches_are_named_and_deleted_by_name() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    talk(&engine, "chat", 2);
    wait_turns(&daemon, "chat", 2);
    let url = daemon.url();
    let (code, out, error) = run(&["save", "chat", "--branch", "keep", "--url", &url]);
    assert_eq!(code, 0, "{error}");
    assert!(out.contains("keep"), "{out}");
    let (_, out, _) = run(&["ls", "chat", "--url", &url]);
    assert_eq!(
        out.lines().count(),
        4,
        "two turns and a branch under a head: {out}"
    );
    let (code, out, error) = run(&["show", "chat", "--branch", "keep", "--url", &url]);
    assert_eq!(code, 0, "{error}");
    assert!(out.contains("boundary") || out.contains("tokens"), "{out}");
    let (code, _, error) = run(&["show", "chat", "--url", &url]);
    assert_eq!(code, 0, "{error}");
    // The id of a request is its turn; in the place of a conversation it stands for all of it.
    let turn = |out: &str| {
        let line = out.lines().find(|line| line.starts_with("turn "));
        line.map(|line| line.trim_start_matches("turn").trim().to_owned())
    };
    for (command, expected) in [
        (&["show", "--rid", "chat-1"][..], "1"),
        (&["show", "chat", "--rid", "chat-1"], "1"),
        (&["show", "chat-1"], "2"),
        (&["restore", "--rid", "chat-1"], "1"),
        (&["save", "--rid", "chat-1"], "1"),
    ] {
        let (code, out, error) = run(&[command, &["--url", &url]].concat());
        assert_eq!(code, 0, "{command:?}: {error}");
        assert_eq!(turn(&out).as_deref(), Some(expected), "{command:?}: {out}");
    }
    let (code, _, error) = run(&["restore", "chat", "--branch", "keep", "--url", &url]);
    assert_eq!(code, 0, "{error}");
    // The named state stays when the turn that made it goes.
    let (code, _, error) = run(&["rm", "chat", "--turn", "2", "--url", &url]);
    assert_eq!(code, 0, "{error}");
    let branch = json!({ "conversation_id": "chat", "branch_name": "keep" });
    assert_eq!(daemon.post("/get_snapshot_info", &branch).status, 200);
    let (code, ..) = run(&["rm", "chat", "--branch", "keep", "--url", &url]);
    assert_eq!(code, 0);
    assert_eq!(daemon.post("/get_snapshot_info", &branch).status, 404);
    assert_eq!(
        daemon.post("/delete_snapshot", &branch).status,
        404,
        "gone is gone"
    );
    // A part beside the whole is refused, and nothing goes.
    let both = json!({ "conversation_id": "chat", "turn_number": 1, "whole": true });
    assert_eq!(daemon.post("/delete_snapshot", &both).status, 400);
    let (code, out, error) = run(&["rm", "--rid", "chat-1", "--url", &url]);
    assert_eq!(code, 0, "{error}");
    assert!(out.starts_with("1 name and"), "{out}");
    let first = json!({ "conversation_id": "chat", "turn_number": 1 });
    assert_eq!(daemon.post("/get_snapshot_info", &first).status, 404);
    talk(&engine, "chat", 1);
    wait_turns(&daemon, "chat", 1);
    let (code, ..) = run(&["rm", "chat", "--all", "--url", &url]);
    assert_eq!(code, 0);
    assert_eq!(daemon.get("/v1/conversations").json()["total"], 0);
    // Nothing is left that a save or a restore could find.
    for path in ["/save_snapshot", "/restore_snapshot"] {
        assert_eq!(
            daemon
                .post(path, &json!({ "conversation_id": "chat" }))
                .status,
            404,
            "{path}"
        );
    }
}
