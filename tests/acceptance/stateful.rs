//! Phase 8: the client sends only what is new.

use serde_json::{Value, json};

use crate::common::engine::tokens;
use crate::stage::{Stage, Talk, chat, content, ids, number, user};

#[test]
fn recall_after_restart() {
    let mut stage = Stage::new(&[]);
    let (prompt, more) = (tokens(1, 600), tokens(2, 25));
    let first = stage.generate("c", &prompt, 30);
    stage.keep("c");
    let whole = [prompt, ids(&first), more.clone()].concat();
    let truth = stage.truth(&whole, 24);
    // Engine and daemon both die, and with each try again, so that nothing is in any cache.
    for (tamper, right) in [
        (Value::Null, true),
        (json!("state"), false),
        (json!("kv"), false),
        (Value::Null, true),
    ] {
        stage.restart_both();
        stage.direct("/testing/tamper", &json!({ "restored": tamper }));
        let body = json!({
            "conversation_id": "c", "turn": 1, "input_ids": more,
            "sampling_params": { "max_new_tokens": 24, "ignore_eos": true },
        });
        let answer = stage.post("/v1/generate", &body);
        assert!(
            number(&answer, "/usage/cached_tokens") >= 600,
            "{}",
            answer["usage"]
        );
        assert!(
            number(&answer, "/usage/prefilled_tokens") <= 55,
            "{}",
            answer["usage"]
        );
        assert_eq!(number(&answer, "/usage/wire_tokens"), 25);
        assert_eq!(ids(&answer) == truth, right, "{tamper}");
    }
}

#[test]
fn stateful_equals_full_resend() {
    let stage = Stage::new(&[]);
    let mut talk = Talk::default();
    for text in [
        "My favourite colour is blue.",
        "What is my favourite colour?",
        "And which number did I tell you?",
    ] {
        let full = talk.say(&stage, text, 24);
        let stateful = chat(
            json!([user(text)]),
            24,
            json!({ "conversation_id": "talk" }),
        );
        let stateful = stage.post("/v1/chat/completions", &stateful);
        // To the letter.
        assert_eq!(content(&stateful), full);
        assert_eq!(
            number(&stateful, "/usage/prompt_tokens") as usize,
            talk.prompt
        );
        assert_eq!(stateful["engram"]["compatibility_result"], "fast-path");
    }
}

#[test]
fn three_turn_chain() {
    let mut stage = Stage::new(&[]);
    let mut transcript = Vec::new();
    for turn in 1..=3_u64 {
        let new = tokens(10 + turn, 200);
        transcript.extend(&new);
        let answer = stage.generate("chain", &new, 16);
        assert_eq!(number(&answer, "/engram/from_turn"), turn - 1);
        assert_eq!(
            number(&answer, "/usage/prompt_tokens") as usize,
            transcript.len()
        );
        assert_eq!(ids(&answer), stage.truth(&transcript, 16), "turn {turn}");
        transcript.extend(ids(&answer));
        stage.keep("chain");
        stage.restart_both();
    }
    let list = stage.post("/list_snapshots", &json!({ "conversation_id": "chain" }));
    let turns: Vec<u64> = list["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| number(row, "/turn_number"))
        .collect();
    assert_eq!(turns, [1, 2, 3]);
}

#[test]
fn token_savings() {
    let stage = Stage::new(&[]);
    let before = (
        stage.count("prompt_tokens"),
        stage.count("prefilled_tokens"),
    );
    let (mut wire, mut prompt, mut cached) = (0, 0, 0);
    for turn in 0..10_u64 {
        let new = tokens(30 + turn, if turn == 0 { 800 } else { 30 });
        let answer = stage.generate("c", &new, 10);
        assert_eq!(number(&answer, "/usage/wire_tokens") as usize, new.len());
        wire += number(&answer, "/usage/wire_tokens");
        prompt += number(&answer, "/usage/prompt_tokens");
        cached += number(&answer, "/usage/cached_tokens");
        let sum =
            number(&answer, "/usage/cached_tokens") + number(&answer, "/usage/prefilled_tokens");
        assert_eq!(sum, number(&answer, "/usage/prompt_tokens"));
    }
    // The server's own counts say the same.
    assert_eq!(stage.count("prompt_tokens") - before.0, prompt);
    assert_eq!(stage.count("prefilled_tokens") - before.1, prompt - cached);
    for (kind, tokens) in [("wire", wire), ("prompt", prompt), ("cached", cached)] {
        let sample = format!("engram_gateway_tokens_total{{kind=\"{kind}\"}}");
        assert_eq!(stage.daemon.metric(&sample), tokens as f64, "{kind}");
    }
    assert_eq!(stage.daemon.metric("engram_gateway_in_flight"), 0.0);
    assert!(
        wire * 8 < prompt && (prompt - cached) * 8 < prompt,
        "{wire} {cached} of {prompt}"
    );
}
