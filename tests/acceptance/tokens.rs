//! `/tokenize_chat`, and the bridge that clients build with it: exact tokens, an exact prefix, and
//! only the rest is sent.

use serde_json::{Value, json};

use crate::stage::{Stage, chat, content, ids, user};

fn tokenize(stage: &Stage, messages: &Value, open: bool) -> Vec<u32> {
    let body = json!({ "messages": messages, "add_generation_prompt": open });
    let answer = stage.post("/tokenize_chat", &body);
    assert_eq!(answer["success"], true);
    let ids: Vec<u32> = serde_json::from_value(answer["token_ids"].clone()).unwrap();
    assert_eq!(answer["token_count"], ids.len());
    assert!(answer["chat_template_name"].is_string());
    ids
}

#[test]
fn messages_become_tokens() {
    let mut stage = Stage::new(&[]);
    let messages = json!([user("What is it?")]);
    let (closed, open) = (
        tokenize(&stage, &messages, false),
        tokenize(&stage, &messages, true),
    );
    assert!(open.starts_with(&closed) && open.len() > closed.len());
    let folder = stage.tokenizer().to_str().unwrap().to_owned();
    stage.knob("upstream.tokenizer", folder.into());
    stage.restart_daemon();
    assert_eq!(tokenize(&stage, &messages, true), open);
    assert_eq!(tokenize(&stage, &messages, false), closed);
    let bad = stage.daemon.post("/tokenize_chat", &json!({}));
    assert_eq!((bad.status, &*bad.kind()), (400, "invalid_request"));
}

#[test]
fn the_bridge_of_an_append_only_client() {
    let stage = Stage::new(&[]);
    // A chat without a conversation, saved by the id of its answer.
    let first = stage.post(
        "/v1/chat/completions",
        &chat(json!([user("My number is 42.")]), 16, json!({})),
    );
    let rid = &first["id"];
    let saved = json!({ "rid": rid, "conversation_id": "bridge", "turn_number": 1 });
    crate::common::wait_for("a saved turn", || {
        (stage.daemon.post("/save_snapshot", &saved).status == 200).then_some(())
    });
    let messages = json!([
        user("My number is 42."),
        { "role": "assistant", "content": content(&first) },
        user("What is my number?"),
    ]);
    let whole = tokenize(&stage, &messages, true);
    let info = json!({ "conversation_id": "bridge", "turn_number": 1 });
    let info = stage.post("/get_snapshot_info", &info);
    let fill: Vec<u32> = serde_json::from_value(info["metadata"]["fill_ids"].clone()).unwrap();
    let delta = whole
        .strip_prefix(fill.as_slice())
        .expect("an exact prefix");
    let body = json!({
        "conversation_id": "bridge", "turn_number": 1, "create_new_request": true,
        "continuation_ids": delta, "max_new_tokens": 12,
        "sampling_params": { "ignore_eos": true },
    });
    let answer = stage.post("/restore_snapshot", &body);
    assert_eq!(ids(&answer), stage.truth(&whole, 12));
}
