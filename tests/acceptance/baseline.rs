//! Phase 1: what clients do without any of this is unchanged through the proxy.

use std::thread;

use serde_json::{Value, json};

use crate::common::engine::tokens;
use crate::stage::{Stage, chat, content, events, user};

/// An answer without what differs between two answers to one question.
fn bare(mut answer: Value) -> Value {
    let object = answer.as_object_mut().unwrap();
    object.remove("created");
    if let Some(meta) = object.get_mut("meta_info").and_then(Value::as_object_mut) {
        meta.remove("e2e_latency");
        meta.remove("cached_tokens");
        meta.remove("engram");
    }
    answer
}

#[test]
fn health() {
    let stage = Stage::new(&[]);
    let through = stage.daemon.get("/health");
    assert_eq!(
        (through.status, through.json()),
        (200, json!({ "status": "ok" }))
    );
    let models = stage.daemon.get("/v1/models").json();
    assert_eq!(models, stage.engine.place().get("/v1/models").json());
}

#[test]
fn single_turn() {
    let stage = Stage::new(&[]);
    let prompt = tokens(1, 40);
    for (path, body) in [
        (
            "/v1/chat/completions",
            chat(json!([user("What is it?")]), 12, json!({ "rid": "r" })),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "the quick", "max_tokens": 9, "temperature": 0, "rid": "r" }),
        ),
        (
            "/generate",
            json!({ "input_ids": prompt, "rid": "r", "sampling_params": { "max_new_tokens": 9 } }),
        ),
        ("/tokenize", json!({ "prompt": "the quick" })),
        ("/v1/detokenize", json!({ "tokens": [300, 301] })),
    ] {
        let direct = stage.direct(path, &body);
        let through = stage.daemon.post(path, &body);
        assert_eq!(through.status, 200, "{path}: {}", through.text());
        assert_eq!(bare(through.json()), bare(direct), "{path}");
        assert_eq!(through.header("x-request-id").unwrap().len(), 32);
    }
}

#[test]
fn streaming() {
    let stage = Stage::new(&[]);
    let body = chat(
        json!([user("What is it?")]),
        20,
        json!({ "rid": "r", "stream": true, "stream_options": { "include_usage": true } }),
    );
    let path = "/v1/chat/completions";
    let (direct, through) = (
        stage.engine.post(path, &body),
        stage.daemon.post(path, &body),
    );
    let bare = |answer| events(answer).into_iter().map(bare).collect::<Vec<_>>();
    assert_eq!(bare(&through), bare(&direct));
    assert_eq!(
        through.header("content-type"),
        direct.header("content-type")
    );
    let body = json!({
        "input_ids": tokens(1, 9), "stream": true, "rid": "r",
        "sampling_params": { "max_new_tokens": 7 },
    });
    let answers = [
        stage.engine.post("/generate", &body),
        stage.daemon.post("/generate", &body),
    ];
    let [direct, through] = answers.each_ref().map(bare);
    assert_eq!(through, direct);
    // One for each token, and the end.
    assert_eq!(through.len(), 8);
}

#[test]
fn batch_independence() {
    let stage = Stage::new(&[]);
    let ask = |text: &str| {
        let answer = stage.post(
            "/v1/chat/completions",
            &chat(json!([user(text)]), 16, json!({})),
        );
        content(&answer).to_owned()
    };
    let alone = ask("What is my favourite colour?");
    thread::scope(|scope| {
        let others = (0..7).map(|i| scope.spawn(move || ask(&format!("Say {i} please"))));
        let others: Vec<_> = others.collect();
        let among = scope.spawn(|| ask("What is my favourite colour?"));
        assert_eq!(among.join().unwrap(), alone);
        for other in others {
            other.join().unwrap();
        }
    });
}

#[test]
fn batch_different_prompts() {
    let stage = Stage::new(&[]);
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| tokens(i, 30 + 7 * i as usize)).collect();
    let answer = |prompt: &Vec<u32>| {
        let body = json!({ "input_ids": prompt, "sampling_params": { "max_new_tokens": 12 } });
        crate::stage::ids(&stage.post("/generate", &body))
    };
    let alone: Vec<_> = prompts.iter().map(answer).collect();
    thread::scope(|scope| {
        let together: Vec<_> = prompts
            .iter()
            .map(|p| scope.spawn(move || answer(p)))
            .collect();
        for (together, alone) in together.into_iter().zip(&alone) {
            assert_eq!(together.join().unwrap(), *alone);
        }
    });
    let mut distinct = alone.clone();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), alone.len());
}

#[test]
fn long_context() {
    let stage = Stage::new(&[]);
    let prompt = tokens(3, 6000);
    let body = json!({ "input_ids": prompt, "sampling_params": { "max_new_tokens": 8 } });
    let through = stage.post("/generate", &body);
    assert_eq!(through["meta_info"]["prompt_tokens"], 6000);
    assert_eq!(crate::stage::ids(&through), stage.truth(&prompt, 8));
}

#[test]
fn sampling_params() {
    let stage = Stage::new(&[]);
    let path = "/v1/chat/completions";
    let question = json!([user("the lazy dog")]);
    let full = stage.post(
        path,
        &chat(question.clone(), 40, json!({ "logprobs": true })),
    );
    assert_eq!(full["usage"]["completion_tokens"], 40);
    assert_eq!(
        full["choices"][0]["logprobs"]["content"]
            .as_array()
            .unwrap()
            .len(),
        40
    );
    let text = content(&full).to_owned();
    let middle = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stop: String = text[middle..].chars().take(3).collect();
    let stopped = stage.post(path, &chat(question.clone(), 40, json!({ "stop": stop })));
    assert_eq!(content(&stopped), &text[..text.find(&stop).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    // What the server refuses is refused in its own words.
    for bad in [
        json!({ "temperature": 0.7 }),
        json!({ "n": 3 }),
        json!({ "messages": 1 }),
    ] {
        let body = chat(question.clone(), 4, bad);
        let (direct, through) = (
            stage.engine.post(path, &body),
            stage.daemon.post(path, &body),
        );
        assert_eq!((through.status, &through.body), (400, &direct.body));
    }
}
