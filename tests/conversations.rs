//! Conversations over the native surface and the command line, with a real engine that speaks.

mod common;

use common::daemon::Daemon;
use common::engine::{Engine, tokens};
use common::process::run;
use common::wait_for;
use serde_json::{Value, json};

/// A turn of nobody's conversation: what the client sends, and what it has in all after the answer.
fn say(engine: &Engine, rid: &str, prompt: &[u32]) -> Vec<u32> {
    let body = json!({
        "input_ids": prompt,
        "sampling_params": { "max_new_tokens": 16, "temperature": 0.0 },
        "rid": rid,
    });
    let answer = engine.post("/generate", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let output: Vec<u32> = serde_json::from_value(answer.json()["output_ids"].clone()).unwrap();
    [prompt, &output].concat()
}

/// The turns of a conversation, once there are so many.
fn turns(daemon: &Daemon, path: &str, count: usize) -> Vec<Value> {
    wait_for("the turns", || {
        let answer = daemon.get(&format!("/v1/conversations/{path}"));
        let turns = answer.json()["turns"].as_array()?.clone();
        (turns.len() >= count).then_some(turns)
    })
}

fn token_ids(daemon: &Daemon, path: &str) -> Vec<u32> {
    let answer = daemon.get(&format!("/v1/conversations/{path}"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    serde_json::from_value(answer.json()["token_ids"].clone()).unwrap()
}

fn cli(daemon: &Daemon, args: &[&str]) -> String {
    let url = daemon.url();
    let (code, out, error) = run(&[args, &["--url", &url]].concat());
    assert_eq!(code, 0, "{args:?}: {error}");
    out
}

fn delete(daemon: &Daemon, path: &str) -> (u16, Value) {
    let answer = daemon.place().request("DELETE", path, &[], b"").unwrap();
    (answer.status, answer.json())
}

#[test]
fn who_unpins_learns_what_else_keeps_it_and_names_of_fields_are_the_same() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &["--page-size", "1", "--exact-end"]);
    let first = say(&engine, "r1", &tokens(1, 300));
    say(&engine, "r2", &[first, tokens(2, 20)].concat());
    let row = turns(&daemon, "r1", 2)[0].clone();
    let id = row["snapshot_id"].as_str().unwrap().to_owned();
    let save = json!({ "snapshot_id": id, "branch_name": "b" });
    wait_for("a branch", || {
        (daemon.post("/save_snapshot", &save).status == 200).then_some(())
    });
    let path = format!("/v1/snapshots/{id}");
    let (_, pinned) = patch(&daemon, &path, &json!({ "pinned": true }));
    assert_eq!(pinned["pinned_by"], json!(["pin", "branch"]));
    let out = cli(&daemon, &["unpin", &id]);
    assert!(out.contains("pinned by") && out.contains("branch"), "{out}");
    let fork = json!({ "new_id": "f", "turn_number": 1 });
    let forked = daemon.post("/v1/conversations/r1/fork", &fork);
    assert_eq!(
        (forked.status, &forked.json()["turns_total"]),
        (201, &json!(1))
    );
    let both = json!({ "new_id": "g", "turn": 1, "turn_number": 2 });
    assert_eq!(daemon.post("/v1/conversations/r1/fork", &both).status, 400);
}

fn patch(daemon: &Daemon, path: &str, body: &Value) -> (u16, Value) {
    let json = [("Content-Type", "application/json")];
    let body = body.to_string();
    let answer = daemon
        .place()
        .request("PATCH", path, &json, body.as_bytes());
    let answer = answer.unwrap();
    (answer.status, answer.json())
}

#[test]
fn what_was_said_is_known_and_gone_on_with_after_restarts_of_both() {
    let mut daemon = Daemon::start(&[]);
    let mut engine = Engine::beside(&daemon, &[]);
    // Too short for a state, and then long enough; nobody names the conversation.
    let mut said = say(&engine, "r1", &tokens(1, 40));
    said.extend(tokens(2, 500));
    said = say(&engine, "r2", &said);
    assert_eq!(turns(&daemon, "r1", 2).len(), 2);
    assert_eq!(token_ids(&daemon, "r2/tokens"), said);
    daemon.all_durable();
    daemon.kill();
    engine.kill();
    daemon.restart();
    engine.restart();
    engine.wait_attached(&daemon);
    assert_eq!(token_ids(&daemon, "r1/tokens"), said);
    let first = token_ids(&daemon, "r1/tokens?turn=1");
    assert_eq!(first, said[..56]);
    said.extend(tokens(3, 300));
    said = say(&engine, "r3", &said);
    let rows = turns(&daemon, "r3", 3);
    assert_eq!(rows[2]["rid"], "r3");
    assert_eq!(rows[2]["prompt_tokens"], said.len() - 16);
    assert_eq!(token_ids(&daemon, "r1/tokens"), said);
    let list = daemon.get("/v1/conversations").json();
    assert_eq!(list["total"], 1, "{list}");
}

#[test]
fn a_fork_goes_on_from_its_turn_and_the_tree_shows_it() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    let mut said = Vec::new();
    let mut after = Vec::new();
    for turn in 1..=3 {
        said.extend(tokens(turn, 400));
        let rid = format!("r{turn}");
        said.extend(engine.generate("chat/1 é", &rid, &said, 16).tokens);
        after.push(said.clone());
    }
    let name = "chat%2F1%20%C3%A9";
    turns(&daemon, name, 3);
    daemon.all_durable();
    let answer = daemon.post(
        &format!("/v1/conversations/{name}/fork"),
        &json!({ "turn": 2, "new_id": "b:2" }),
    );
    assert_eq!(answer.status, 201, "{}", answer.text());
    assert_eq!(answer.json()["origin"]["conversation_id"], "chat/1 é");
    let again = daemon.post(
        &format!("/v1/conversations/{name}/fork"),
        &json!({ "turn": 2, "new_id": "b:2" }),
    );
    assert_eq!((again.status, &*again.kind()), (409, "already_exists"));
    let out = cli(&daemon, &["fork", "chat/1 é", "c", "--turn", "1"]);
    assert!(out.contains("parted from  chat/1 é after turn 1"), "{out}");
    // The fork goes on with its own words, and reuses what both have.
    let mut other = after[1].clone();
    other.extend(tokens(9, 400));
    engine.flush();
    let reply = engine.generate("b:2", "f3", &other, 16);
    assert!(reply.cached >= 512, "{}", reply.cached);
    turns(&daemon, "b:2", 3);
    assert_eq!(token_ids(&daemon, "b:2/tokens?turn=2"), after[1]);
    let out = cli(&daemon, &["tree", "b:2"]);
    let lines: Vec<_> = out.lines().map(str::trim).collect();
    assert_eq!(lines[0], "chat/1 é");
    let at = |text: &str| {
        lines
            .iter()
            .position(|line| *line == text || line.starts_with(&format!("{text} ")))
            .unwrap()
    };
    assert!(
        at("1:") < at("c") && at("c") < at("2:") && at("2:") < at("b:2 *"),
        "{out}"
    );
    let compared = daemon
        .get(&format!(
            "/v1/conversations/{name}/compare?a=3&b=3&with=b%3A2"
        ))
        .json();
    assert_eq!(compared["relation"], "parted");
    let common = after[2].iter().zip(&other).take_while(|(a, b)| a == b);
    assert_eq!(compared["common_tokens"], common.count());
    let out = cli(&daemon, &["compare", "b:2", "2", "3"]);
    assert!(out.contains("The second goes on from the first."), "{out}");
    let out = cli(&daemon, &["show", "b:2", "--turns"]);
    assert!(out.contains("conversation b:2"), "{out}");
}

#[test]
fn deleting_takes_what_nothing_else_names() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    let mut said = Vec::new();
    for turn in 1..=3 {
        said.extend(tokens(turn, 400));
        said.extend(
            engine
                .generate("chat", &format!("r{turn}"), &said, 16)
                .tokens,
        );
    }
    let rows = turns(&daemon, "chat", 3);
    wait_for("the states", || {
        let rows = turns(&daemon, "chat", 3);
        rows.iter()
            .all(|row| !row["snapshot_id"].is_null())
            .then_some(())
    });
    let save = json!({ "conversation_id": "chat", "turn_number": 2, "branch_name": "kept/1" });
    assert_eq!(daemon.post("/save_snapshot", &save).status, 200);
    daemon.all_durable();
    let (status, gone) = delete(&daemon, "/v1/conversations/chat/turns/3");
    assert_eq!((status, &gone["names"]), (200, &json!(1)));
    assert_eq!(delete(&daemon, "/v1/conversations/chat/turns/3").0, 404);
    // A branch still names the second turn's.
    let (status, gone) = delete(&daemon, "/v1/conversations/chat/turns/2");
    assert_eq!(
        (status, &gone["objects"]),
        (200, &json!(0)),
        "{gone} {rows:?}"
    );
    let (status, gone) = delete(&daemon, "/v1/conversations/chat/branches/kept%2F1");
    assert_eq!(status, 200);
    assert!(gone["objects"].as_u64().unwrap() > 0, "{gone}");
    assert_eq!(delete(&daemon, "/v1/conversations/chat").0, 200);
    assert_eq!(delete(&daemon, "/v1/conversations/chat").0, 404);
    let tiers = daemon.get("/v1/tiers").json();
    for tier in tiers["tiers"].as_array().unwrap() {
        assert_eq!(tier["objects"], 0, "{tier}");
    }
}

#[test]
fn pins_and_labels_are_given_and_taken() {
    let mut daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    engine.generate("chat", "r1", &tokens(1, 600), 16);
    let id = wait_for("the state", || {
        let rows = turns(&daemon, "chat", 1);
        rows[0]["snapshot_id"].as_str().map(str::to_owned)
    });
    let path = format!("/v1/snapshots/{id}");
    let body = json!({ "pinned": true, "label": "before" });
    let (status, row) = patch(&daemon, &path, &body);
    assert_eq!(
        (status, &row["pinned"], &row["label"]),
        (200, &json!(true), &json!("before"))
    );
    assert_eq!(
        patch(&daemon, &path, &body),
        (200, daemon.get(&path).json())
    );
    daemon.all_durable();
    daemon.restart();
    let row = daemon.get(&path).json();
    assert_eq!(
        (&row["pinned"], &row["label"]),
        (&json!(true), &json!("before"))
    );
    let out = cli(&daemon, &["unpin", &id]);
    assert!(out.contains("label           before"), "{out}");
    let out = cli(&daemon, &["pin", &id, "--label", "", "--json"]);
    let row: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&row["pinned"], row.get("label")), (&json!(true), None));
    for (body, status) in [
        (json!({}), 400),
        (json!({ "pinned": "yes" }), 400),
        (json!({ "label": "" }), 400),
    ] {
        let (refused, answer) = patch(&daemon, &path, &body);
        assert_eq!(refused, status, "{body}");
        assert_eq!(answer["error"]["type"], "invalid_request");
    }
    let nobody = "/v1/snapshots/01890000-0000-7000-8000-000000000000";
    assert_eq!(patch(&daemon, nobody, &json!({ "pinned": true })).0, 404);
    assert_eq!(
        patch(&daemon, "/v1/snapshots/x", &json!({ "pinned": true })).0,
        400
    );
    assert_eq!(delete(&daemon, &path).0, 200);
    assert_eq!(daemon.get(&path).status, 404);
}

#[test]
fn a_conversation_gets_its_own_policy() {
    let mut daemon = Daemon::start(&[("service.write_after", "20ms".into())]);
    let engine = Engine::beside(&daemon, &[]);
    let shown = daemon.get("/v1/conversations/chat/policy");
    assert_eq!((shown.status, &*shown.kind()), (404, "not_found"));
    let out = cli(
        &daemon,
        &["policy", "chat", "--set", "manual_only", "--json"],
    );
    let rules: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&rules["policy"], &rules["own"]),
        (&json!("manual_only"), &json!(true))
    );
    for name in ["chat", "other"] {
        engine.generate(name, &format!("{name}-1"), &tokens(1, 600), 16);
    }
    let durable = |daemon: &Daemon, name: &str| {
        let turn = turns(daemon, name, 1)[0].clone();
        (turn["snapshot_id"].is_string(), turn["durable"].clone())
    };
    wait_for("the other's", || {
        (durable(&daemon, "other") == (true, json!(true))).then_some(())
    });
    wait_for("its state", || durable(&daemon, "chat").0.then_some(()));
    // The very same tokens: what one conversation has written, the other has, too.
    assert_eq!(durable(&daemon, "chat"), (true, json!(true)));
    engine.generate("chat", "chat-2", &tokens(7, 600), 16);
    wait_for("a state of its own", || {
        let rows = turns(&daemon, "chat", 2);
        rows[1]["snapshot_id"].is_string().then_some(())
    });
    daemon.all_durable();
    assert_eq!(turns(&daemon, "chat", 2)[1]["durable"], false);
    daemon.restart();
    let rules = daemon.get("/v1/conversations/chat/policy").json();
    assert_eq!(rules["policy"], "manual_only");
    let out = cli(&daemon, &["policy", "chat", "--unset"]);
    assert!(out.starts_with("policy          every_turn"), "{out}");
    let json = [("Content-Type", "application/json")];
    for body in [
        json!({}),
        json!({ "policy": "sometimes" }),
        json!({ "policy": "every_n_turns", "every_n_turns": 0 }),
        json!({ "policy": "every_turn", "min_interval_seconds": -1.0 }),
        json!({ "policy": "every_turn", "min_interval_seconds": 1e12 }),
    ] {
        let path = "/v1/conversations/chat/policy";
        let body = body.to_string();
        let answer = daemon.place().request("PUT", path, &json, body.as_bytes());
        assert_eq!(answer.unwrap().status, 400, "{body}");
    }
}

#[test]
fn what_is_asked_wrongly_is_refused_with_a_type() {
    let daemon = Daemon::start(&[]);
    let gets = [
        ("x", 404, "not_found"),
        ("x/tree", 404, "not_found"),
        ("x/tokens", 404, "not_found"),
        ("x/compare", 404, "not_found"),
        ("%2Fx", 400, "invalid_request"),
        ("x%FF", 400, "invalid_request"),
        ("x?limit=0", 400, "invalid_request"),
        ("x?limit=-1", 400, "invalid_request"),
        ("x/tokens?turn=0", 400, "invalid_request"),
        ("x/tokens?turn=1&branch=b", 400, "invalid_request"),
        ("x/compare?a=turn:0", 400, "invalid_request"),
        ("x/compare?tenant=", 400, "invalid_request"),
        ("x/turns/1", 405, "method_not_allowed"),
        ("x/nothing", 404, "not_found"),
    ];
    for (path, status, kind) in gets {
        let answer = daemon.get(&format!("/v1/conversations/{path}"));
        assert_eq!((answer.status, &*answer.kind()), (status, kind), "{path}");
    }
    for (path, status) in [
        ("x/turns/0", 400),
        ("x/turns/4294967296", 400),
        ("x/turns/one", 400),
        ("x/branches/..", 400),
        ("x/branches/b", 404),
        ("x/turns/1", 404),
        ("x", 404),
    ] {
        let (refused, answer) = delete(&daemon, &format!("/v1/conversations/{path}"));
        assert_eq!(refused, status, "{path}");
        assert_eq!(answer["success"], false);
    }
    for (body, status) in [
        (json!({}), 400),
        (json!({ "new_id": "" }), 400),
        (json!({ "new_id": "../y" }), 400),
        (json!({ "new_id": "y", "turn": -1 }), 400),
        (json!({ "new_id": "y", "turn": 1, "branch": "b" }), 400),
        (json!({ "new_id": "y" }), 404),
    ] {
        let answer = daemon.post("/v1/conversations/x/fork", &body);
        assert_eq!(answer.status, status, "{body}");
    }
}
