//! Conversations outlive what they stand on: a state that went, a client that left, a deletion; and
//! they go on in no other name, namespace or tenant than their own.

use std::time::Duration;

use serde_json::{Value, json};

use crate::common::engine::tokens;
use crate::common::wait_for;
use crate::stage::{Stage, chat, ids, number, order, user};
use crate::trouble::{begin, read_to};

fn delete(stage: &Stage, path: &str) -> u16 {
    let answer = stage.daemon.place().request("DELETE", path, &[], b"");
    answer.unwrap().status
}

/// The turns of a conversation, once there are so many.
fn turns(stage: &Stage, name: &str, count: usize) -> Vec<Value> {
    wait_for("the turns", || {
        let row = stage.daemon.get(&format!("/v1/conversations/{name}"));
        let turns = row.json()["turns"].as_array()?.clone();
        (turns.len() >= count).then_some(turns)
    })
}

fn running(stage: &Stage, count: u64) {
    wait_for("the running requests", || {
        (stage.engine.info()["running"] == count).then_some(())
    });
}

#[test]
fn a_conversation_whose_state_went_goes_on() {
    let mut stage = Stage::new(&[]);
    let (a, b, c) = (tokens(1, 300), tokens(2, 20), tokens(3, 20));
    let mut known = a.clone();
    known.extend(ids(&stage.generate("c", &a, 8)));
    stage.keep("c");
    let snapshot = turns(&stage, "c", 1)[0]["snapshot_id"].clone();
    let path = format!("/v1/snapshots/{}", snapshot.as_str().unwrap());
    assert_eq!(delete(&stage, &path), 200);
    known.extend(&b);
    let on = stage.generate("c", &b, 8);
    assert_eq!(number(&on, "/engram/from_turn"), 1);
    assert_eq!(ids(&on), stage.truth(&known, 8));
    known.extend(ids(&on));
    // By retention, and over a restart.
    stage.keep("c");
    stage.knob("service.limits.keep_for", "1s".into());
    stage.knob("service.limits.check_every", "1s".into());
    stage.restart_both();
    wait_for("the end of all states", || {
        (stage.daemon.get("/v1/status").json()["snapshots"] == 0).then_some(())
    });
    stage.restart_both();
    known.extend(&c);
    let on = stage.generate("c", &c, 8);
    assert_eq!(number(&on, "/engram/from_turn"), 2);
    assert_eq!(ids(&on), stage.truth(&known, 8));
}

#[test]
fn a_request_by_any_name_of_a_conversation_waits_for_its_turn() {
    let stage = Stage::new(&[]);
    let a = tokens(1, 100);
    let mut body = order("c", &a, 8);
    body["rid"] = json!("first");
    let mut known = a;
    known.extend(ids(&stage.post("/v1/generate", &body)));
    let (b, c) = (tokens(2, 20), tokens(3, 20));
    std::thread::scope(|scope| {
        let whole = [&known[..], &b].concat();
        let (stage, b) = (&stage, &b);
        let slow = scope.spawn(move || stage.generate("c", b, 400));
        running(stage, 1);
        let by_rid = stage.generate("first", &c, 8);
        let slow = ids(&slow.join().unwrap());
        assert_eq!(by_rid["engram"]["branched"], false);
        assert_eq!(by_rid["engram"]["conversation_id"], "c");
        assert_eq!(number(&by_rid, "/engram/from_turn"), 2);
        let whole = [whole, slow, c].concat();
        assert_eq!(ids(&by_rid), stage.truth(&whole, 8));
    });
    let list = stage.daemon.get("/v1/conversations").json();
    let names = list["conversations"].as_array().unwrap().iter();
    assert_eq!(
        names.filter(|it| it["conversation_id"] == "first").count(),
        0
    );
    // An id is that of one turn of a conversation.
    let again = stage.daemon.post("/v1/generate", &body);
    assert_eq!((again.status, &*again.kind()), (409, "conflict"));
    assert_eq!(again.json()["error"]["retryable"], false);
    // Another name of the field.
    let mut named = order("c", &tokens(4, 5), 4);
    named["session_id"] = named["conversation_id"].take();
    let named = stage.post("/v1/generate", &named);
    assert_eq!(named["engram"]["conversation_id"], "c");
    let list = stage.post("/list_snapshots", &json!({ "session_id": "c" }));
    assert!(number(&list, "/total") > 0, "{list}");
}

#[test]
fn what_is_deleted_while_an_answer_runs_stays_deleted() {
    let stage = Stage::new(&[]);
    let (a, b, c) = (tokens(1, 100), tokens(2, 20), tokens(3, 20));
    for whole in [true, false] {
        let name = if whole { "whole" } else { "turn" };
        let first = [a.clone(), ids(&stage.generate(name, &a, 8))].concat();
        stage.generate(name, &b, 8);
        turns(&stage, name, 2);
        let path = match whole {
            true => format!("/v1/conversations/{name}"),
            false => format!("/v1/conversations/{name}/turns/2"),
        };
        std::thread::scope(|scope| {
            let stage = &stage;
            let late = scope.spawn(|| stage.generate(name, &c, 400));
            running(stage, 1);
            assert_eq!(delete(stage, &path), 200);
            late.join().unwrap();
        });
        wait_for("its end", || {
            let workers = stage.daemon.get("/v1/workers").json();
            (workers["workers"][0]["requests"] == 0).then_some(())
        });
        let states = stage.daemon.get("/v1/snapshots?limit=1000").json();
        let states = states["snapshots"].as_array().unwrap().iter();
        let states = states.filter(|row| row["conversation_id"] == name).count();
        let left = stage.daemon.get(&format!("/v1/conversations/{name}"));
        assert!(!whole || states == 0, "{states} states of what was deleted");
        match whole {
            true => assert_eq!(left.status, 404, "{}", left.text()),
            false => assert_eq!(left.json()["turns_total"], 1, "{}", left.text()),
        }
        let base = if whole { Vec::new() } else { first };
        let on = stage.generate(name, &c, 8);
        assert_eq!(
            ids(&on),
            stage.truth(&[base, c.clone()].concat(), 8),
            "{name}"
        );
    }
}

#[test]
fn no_turn_goes_on_from_an_answer_whose_client_left() {
    let stage = Stage::new(&[]);
    let (a, b, c) = (tokens(1, 100), tokens(2, 20), tokens(3, 20));
    let known = [a.clone(), ids(&stage.generate("c", &a, 8))].concat();
    let mut long = order("c", &b, 20_000);
    long["stream"] = json!(true);
    let mut client = begin(stage.daemon.place(), &long);
    read_to(&mut client, "data: {");
    drop(client);
    // At once, wherever the server is with it.
    let on = stage.generate("c", &c, 8);
    let truth = stage.truth(&[&known[..], &c].concat(), 8);
    assert_eq!((number(&on, "/engram/from_turn"), ids(&on)), (1, truth));
    // It is told to its last token, and can be named.
    let all = turns(&stage, "c", 3);
    let left: Vec<_> = all
        .iter()
        .filter(|turn| turn["finish"] == "abort")
        .collect();
    assert_eq!(left.len(), 1, "{all:?}");
    let turn = number(left[0], "/turn_number");
    let path = format!("/v1/conversations/c/tokens?turn={turn}");
    let told = stage.daemon.get(&path).json();
    let told: Vec<u32> = serde_json::from_value(told["token_ids"].clone()).unwrap();
    assert!(told.starts_with(&[&known[..], &b].concat()) && told.len() > known.len() + b.len());
    let mut named = order("c", &c, 8);
    named["turn"] = json!(turn);
    let from = stage.post("/v1/generate", &named);
    assert_eq!(ids(&from), stage.truth(&[told, c].concat(), 8));
}

#[test]
fn a_conversation_goes_on_in_its_own_namespace() {
    let stage = Stage::new(&[]);
    let (a, b) = (tokens(1, 300), tokens(2, 20));
    let salted = |new: &[u32], salt: Option<&str>| {
        let mut body = order("c", new, 8);
        if let Some(salt) = salt {
            body["cache_salt"] = json!(salt);
        }
        body
    };
    let known = [
        a.clone(),
        ids(&stage.post("/v1/generate", &salted(&a, Some("s")))),
    ]
    .concat();
    let other = stage.daemon.post("/v1/generate", &salted(&b, Some("t")));
    assert_eq!((other.status, &*other.kind()), (409, "mismatch"));
    // Without a word it keeps what it has, and finds what is cached there.
    let on = stage.post("/v1/generate", &salted(&b, None));
    assert!(number(&on, "/usage/cached_tokens") >= 300, "{on}");
    assert_eq!(ids(&on), stage.truth(&[known, b].concat(), 8));
    let create = |more: Value| {
        let mut body = json!({
            "conversation_id": "c", "turn_number": 1, "create_new_request": true,
            "continuation_ids": [5, 6, 7], "max_new_tokens": 4,
        });
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        stage.daemon.post("/restore_snapshot", &body)
    };
    wait_for("a state", || {
        (create(json!({})).status == 200).then_some(())
    });
    let resumed = create(json!({})).json();
    assert!(number(&resumed, "/usage/cached_tokens") >= 300, "{resumed}");
    assert_eq!(create(json!({ "cache_salt": "s" })).status, 200);
    assert_eq!(create(json!({ "cache_salt": "t" })).status, 409);
}

#[test]
fn a_tenant_is_the_servers_or_refused() {
    let stage = Stage::new(&[]);
    stage.generate("c", &tokens(1, 20), 4);
    let mut body = order("c", &[5], 4);
    let query = stage.daemon.post("/v1/generate?tenant=acme", &body);
    body["tenant"] = json!("acme");
    let said = stage.daemon.post("/v1/generate", &body);
    let both = chat(json!([user("x")]), 4, json!({ "conversation_id": "c" }));
    let both = stage.daemon.post("/v1/chat/completions?tenant=acme", &both);
    for answer in [query, said, both] {
        assert_eq!((answer.status, &*answer.kind()), (409, "mismatch"));
    }
    turns(&stage, "c", 1);
    let of = |query: &str| {
        stage
            .daemon
            .get(&format!("/v1/conversations{query}"))
            .json()
    };
    assert_eq!(of("")["total"], 1);
    assert_eq!(of("?tenant=acme")["total"], 0);
}

#[test]
fn a_conversation_that_is_too_long_says_so() {
    let knobs = [("service.max_prompt_tokens", toml::Value::from(400))];
    let stage = Stage::with(&[], &knobs, engram::tokenizer::testing::CHATML);
    let long = stage
        .daemon
        .post("/v1/generate", &order("c", &tokens(1, 400), 4));
    assert_eq!((long.status, &*long.kind()), (400, "invalid_request"));
    // An answer may go beyond it; what follows cannot go on.
    stage.generate("c", &tokens(1, 380), 40);
    let on = stage.daemon.post("/v1/generate", &order("c", &[5], 4));
    assert_eq!((on.status, &*on.kind()), (400, "invalid_request"));
    assert!(on.text().contains("max_prompt_tokens"), "{}", on.text());
}

#[test]
fn a_client_that_reads_nothing_keeps_nobody_from_the_conversation() {
    use crate::common::daemon::Daemon;
    use crate::fakes::{Fake, begin_events};
    use std::io::Write as _;

    let event = format!(
        r#"{{"text":"{}","meta_info":{{"finish_reason":null}}}}"#,
        "x".repeat(60_000)
    );
    let fake = Fake::start(move |stream| {
        begin_events(stream, &[&event]);
        let data = format!("data: {event}\n\n");
        let chunk = format!("{:x}\r\n{data}\r\n", data.len());
        while stream.write_all(chunk.as_bytes()).is_ok() {}
    });
    let knobs = [
        ("upstream.url", toml::Value::from(fake.url.clone())),
        ("rest.write_timeout", "500ms".into()),
    ];
    let daemon = Daemon::start(&knobs);
    let mut body = order("c", &[1, 2], 4);
    body["stream"] = json!(true);
    let deaf = begin(daemon.place(), &body);
    let mut next = begin(daemon.place(), &body);
    next.set_read_timeout(Some(Duration::from_secs(50)))
        .unwrap();
    read_to(&mut next, "data: {");
    drop(next);
    wait_for("the server to be told", || {
        let request = fake.requests.try_recv().ok()?;
        request.starts_with(b"POST /abort_request ").then_some(())
    });
    drop(deaf);
}
