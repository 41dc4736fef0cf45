//! Clients that exist, call by call: what they send, in which order, and what they read of the answers.

use serde_json::{Value, json};

use crate::common::http::Answer;
use crate::common::wait_for;
use crate::stage::{Stage, good, ids};

/// As a client with a key that this server does not ask for.
fn call(stage: &Stage, path: &str, body: &Value) -> Answer {
    let headers = [
        ("Content-Type", "application/json"),
        ("Authorization", "Bearer some-key"),
        ("User-Agent", "client/0.2.0"),
    ];
    let body = body.to_string();
    let place = stage.daemon.place();
    let answer = place.request("POST", path, &headers, body.as_bytes());
    answer.unwrap()
}

/// Until the state of the turn before is there.
fn saved(stage: &Stage, body: &Value) -> Value {
    wait_for("a saved state", || {
        let answer = call(stage, "/save_snapshot", body);
        (answer.status == 200).then(|| answer.json())
    })
}

/// Chat, save by the answer's id; then tokens, their exact prefix, and a restore with the rest.
#[test]
fn the_append_only_provider() {
    let stage = Stage::new(&[]);
    let mut messages = vec![json!({ "role": "user", "content": "My number is 42." })];
    let chat = |messages: &[Value]| {
        let body = json!({
            "model": "default", "messages": messages, "max_tokens": 16, "temperature": 0,
        });
        good(&call(&stage, "/v1/chat/completions", &body))
    };
    let first = chat(&messages);
    let rid = first["id"].as_str().unwrap();
    let text = first["choices"][0]["message"]["content"].as_str().unwrap();
    let save = json!({ "rid": rid, "conversation_id": "chat:1", "turn_number": 1 });
    let save = saved(&stage, &save);
    assert_eq!(save["success"], true);
    assert!(save["snapshot_id"].is_string() && save["message"].is_string());
    messages.push(json!({ "role": "assistant", "content": text }));
    messages.push(json!({ "role": "user", "content": "What is my number?" }));
    let tokens = json!({ "messages": messages, "add_generation_prompt": true });
    let tokens = good(&call(&stage, "/tokenize_chat", &tokens));
    assert_eq!(tokens["success"], true);
    assert!(tokens["chat_template_name"].is_string());
    let whole: Vec<u32> = serde_json::from_value(tokens["token_ids"].clone()).unwrap();
    assert_eq!(tokens["token_count"], whole.len());
    let which = json!({ "conversation_id": "chat:1", "turn_number": 1 });
    let info = good(&call(&stage, "/get_snapshot_info", &which));
    let metadata = &info["metadata"];
    for field in [
        "conversation_id",
        "turn_number",
        "timestamp",
        "token_count",
        "model_name",
    ] {
        assert!(!metadata[field].is_null(), "{field} in {metadata}");
    }
    assert_eq!(metadata["layer_config"]["model_type"], "hybrid");
    let fill: Vec<u32> = serde_json::from_value(metadata["fill_ids"].clone()).unwrap();
    assert_eq!(metadata["token_count"], fill.len());
    let rest = whole.strip_prefix(&fill[..]).expect("an exact prefix");
    let restore = json!({
        "conversation_id": "chat:1", "turn_number": 1, "create_new_request": true,
        "continuation_ids": rest, "max_new_tokens": 12,
    });
    let restored = good(&call(&stage, "/restore_snapshot", &restore));
    assert_eq!(restored["success"], true);
    assert!(restored["rid"].is_string() && restored["output_text"].is_string());
    assert!(restored["token_count"].is_u64());
    // The answer may end before its length.
    let answer = ids(&restored);
    assert!(stage.truth(&whole, 12).starts_with(&answer) && !answer.is_empty());
    // Its answer is saved as the next turn, by its own id.
    let next = json!({ "rid": restored["rid"], "conversation_id": "chat:1", "turn_number": 2 });
    assert_eq!(saved(&stage, &next)["turn_number"], 2);
    let list = good(&call(
        &stage,
        "/list_snapshots",
        &json!({ "conversation_id": "chat:1" }),
    ));
    let turns: Vec<_> = list["snapshots"].as_array().unwrap().iter().collect();
    assert_eq!((list["success"].clone(), turns.len()), (json!(true), 2));
    let deleted = good(&call(&stage, "/delete_snapshot", &which));
    assert_eq!(deleted["success"], true);
    // What it throws an error for.
    let gone = call(&stage, "/get_snapshot_info", &which);
    assert_eq!(
        (gone.status, gone.json()["success"].clone()),
        (404, json!(false))
    );
    assert!(gone.json()["message"].is_string());
    // It asks before there is anything, and goes on without.
    let none = good(&call(
        &stage,
        "/list_snapshots",
        &json!({ "conversation_id": "new" }),
    ));
    assert_eq!(none["snapshots"], json!([]));
}

/// Full messages; saves, restores and lists by the conversation's name alone.
#[test]
fn the_stateless_provider() {
    let stage = Stage::new(&[]);
    let mut messages = Vec::new();
    for text in ["Hello.", "And again?"] {
        messages.push(json!({ "role": "user", "content": text }));
        let body = json!({ "model": "default", "messages": messages, "max_tokens": 8 });
        let body = good(&call(&stage, "/v1/chat/completions", &body));
        messages.push(body["choices"][0]["message"].clone());
    }
    // It names a conversation that it never told the server of: that is said, and nothing saved.
    let save = json!({ "conversation_id": "talk", "turn_number": 2 });
    let refused = call(&stage, "/save_snapshot", &save);
    assert_eq!((refused.status, &*refused.kind()), (404, "not_found"));
    // Told once, by a conversation_id of its own, all its calls find it.
    let body = json!({
        "model": "default", "conversation_id": "talk", "max_tokens": 8,
        "messages": [{ "role": "user", "content": "Hello." }],
    });
    good(&call(&stage, "/v1/chat/completions", &body));
    let save = json!({ "conversation_id": "talk", "turn_number": 1 });
    let save = saved(&stage, &save);
    let which = json!({ "conversation_id": "talk", "turn_number": 1 });
    let restore = good(&call(&stage, "/restore_snapshot", &which));
    for (answer, fields) in [
        (
            &save,
            &[
                "conversation_id",
                "turn_number",
                "snapshot_id",
                "size_bytes",
                "created_at",
            ][..],
        ),
        (
            &restore,
            &["conversation_id", "turn_number", "restore_time_ms", "tier"][..],
        ),
    ] {
        assert_eq!(answer["success"], true);
        for field in fields {
            assert!(!answer[field].is_null(), "{field} in {answer}");
        }
    }
    let latest = good(&call(
        &stage,
        "/restore_snapshot",
        &json!({ "conversation_id": "talk" }),
    ));
    assert_eq!(latest["turn_number"], 1);
    let list = good(&call(
        &stage,
        "/list_snapshots",
        &json!({ "conversation_id": "talk" }),
    ));
    assert_eq!(list["snapshots"][0]["snapshot_id"], save["snapshot_id"]);
    let deleted = good(&call(&stage, "/delete_snapshot", &which));
    assert_eq!(deleted["deleted"], true);
}
