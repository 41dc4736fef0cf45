//! Conversations in words: only the new messages are sent.

use engram::tokenizer::testing::CHATML;
use serde_json::{Value, json};

use crate::stage::{Stage, Talk, chat, content, events, ids, number, user};

const PATH: &str = "/v1/chat/completions";

fn ask(stage: &Stage, text: &str, more: Value) -> Value {
    let mut with = json!({ "conversation_id": "talk" });
    with.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    stage.post(PATH, &chat(json!([user(text)]), 16, with))
}

/// A conversation of three turns, one of them after both were killed, one streamed.
fn three_turns(stage: &mut Stage) {
    let mut talk = Talk::default();
    for (turn, text) in ["My number is 42.", "What is my number?", "And the weather?"]
        .into_iter()
        .enumerate()
    {
        let truth = talk.say(stage, text, 16);
        let (said, last) = if turn == 1 {
            let more = json!({ "conversation_id": "talk", "stream": true });
            let body = chat(json!([user(text)]), 16, more);
            let chunks = events(&stage.daemon.post(PATH, &body));
            let last = chunks.last().unwrap().clone();
            assert_eq!(last["choices"][0]["finish_reason"], "length");
            let texts = chunks
                .iter()
                .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
            (texts.collect::<String>(), last)
        } else {
            let answer = ask(stage, text, json!({}));
            assert!(answer.get("sglext").is_none(), "not asked for: {answer}");
            (content(&answer).to_owned(), answer)
        };
        assert_eq!(said, truth, "turn {turn}");
        assert_eq!(last["engram"]["from_turn"], turn, "{last}");
        assert_eq!(last["engram"]["fallback_reason"], Value::Null, "{last}");
        assert_eq!(number(&last, "/usage/prompt_tokens") as usize, talk.prompt);
        assert!(
            turn == 0 || number(&last, "/usage/cached_tokens") > 0,
            "{last}"
        );
        if turn == 1 {
            stage.keep("talk");
            stage.restart_both();
        }
    }
}

#[test]
fn the_server_tokenizes() {
    three_turns(&mut Stage::new(&[]));
}

#[test]
fn the_daemon_tokenizes_by_itself() {
    let mut stage = Stage::new(&[]);
    let folder = stage.tokenizer().to_str().unwrap().to_owned();
    stage.knob("upstream.tokenizer", folder.into());
    stage.restart_daemon();
    three_turns(&mut stage);
}

#[test]
fn a_template_that_shows_the_past_in_another_way_is_said() {
    let shouting = CHATML.replace(
        "{{ message.content }}",
        "{{ message.content | upper if message.role == 'assistant' else message.content }}",
    );
    let stage = Stage::with(&[], &[], &shouting);
    let first = ask(&stage, "hello", json!({}));
    assert_eq!(first["engram"]["compatibility_result"], "fast-path");
    let second = ask(&stage, "more", json!({}));
    assert_eq!(second["engram"]["compatibility_result"], "fallback");
    assert_eq!(second["engram"]["fallback_reason"], "prefix-mismatch");
    // What is right is what the template makes of all messages.
    let all = json!([
        user("hello"),
        { "role": "assistant", "content": content(&first) },
        user("more"),
    ]);
    let full = stage.direct(PATH, &chat(all, 16, json!({})));
    assert_eq!(content(&second), content(&full));
    assert_eq!(
        second["usage"]["prompt_tokens"],
        full["usage"]["prompt_tokens"]
    );
}

#[test]
fn messages_follow_tokens_that_nobody_said_in_words() {
    let stage = Stage::new(&[]);
    let asked = stage.direct("/tokenize", &json!({ "messages": [user("hello")] }));
    let asked: Vec<u32> = serde_json::from_value(asked["tokens"].clone()).unwrap();
    let first = stage.generate("talk", &asked, 10);
    let second = ask(&stage, "more", json!({}));
    assert_eq!(second["engram"]["fallback_reason"], Value::Null);
    let known = [asked, ids(&first)].concat();
    let rest = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n";
    let rest = stage.direct(
        "/tokenize",
        &json!({ "prompt": rest, "add_special_tokens": false }),
    );
    let rest: Vec<u32> = serde_json::from_value(rest["tokens"].clone()).unwrap();
    let truth = stage.truth(&[known, rest].concat(), 16);
    let truth = stage.direct("/detokenize", &json!({ "tokens": truth }));
    assert_eq!(content(&second), truth["text"]);
}

#[test]
fn completions_go_on_too() {
    let stage = Stage::new(&[]);
    let ask = |prompt: Value, more: Value| {
        let mut body = json!({
            "conversation_id": "text", "prompt": prompt, "max_tokens": 12, "ignore_eos": true,
            "temperature": 0,
        });
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        body
    };
    let path = "/v1/completions";
    let first = stage.post(path, &ask(json!("the quick brown"), json!({})));
    let second = ask(
        json!(" fox jumps"),
        json!({ "stream": true, "stream_options": { "include_usage": true } }),
    );
    let chunks = events(&stage.daemon.post(path, &second));
    let texts = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"].get(0)?["text"].as_str());
    let text: String = texts.collect();
    let said = first["choices"][0]["text"].as_str().unwrap();
    let whole = json!({
        "prompt": format!("the quick brown{said} fox jumps"), "max_tokens": 12,
        "ignore_eos": true, "temperature": 0,
    });
    assert_eq!(stage.direct(path, &whole)["choices"][0]["text"], text);
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert!(number(last, "/usage/cached_tokens") > 0);
    assert!(number(last, "/usage/wire_tokens") < number(last, "/usage/prompt_tokens"));
    let third = stage.post(path, &ask(json!([300, 301]), json!({})));
    assert_eq!(third["engram"]["from_turn"], 2);
}

#[test]
fn tools_logprobs_and_stops_pass_through() {
    let stage = Stage::new(&[]);
    let tools = json!([{
        "type": "function",
        "function": { "name": "weather", "parameters": { "type": "object" } },
    }]);
    let more = json!({
        "tools": tools, "logprobs": true, "top_logprobs": 2, "conversation_id": "talk",
    });
    let question = json!([user("the weather in Paris")]);
    let answer = stage.post(PATH, &chat(question.clone(), 30, more.clone()));
    let mut alone = more;
    alone.as_object_mut().unwrap().remove("conversation_id");
    let direct = stage.direct(PATH, &chat(question.clone(), 30, alone));
    assert_eq!(answer["choices"], direct["choices"]);
    assert_eq!(
        answer["usage"]["prompt_tokens"],
        direct["usage"]["prompt_tokens"]
    );
    let text = content(&answer).to_owned();
    let middle = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stop: String = text[middle..].chars().take(3).collect();
    let stopped = json!({ "tools": tools, "stop": [stop], "conversation_id": "other" });
    let stopped = stage.post(PATH, &chat(question, 30, stopped));
    assert_eq!(content(&stopped), &text[..text.find(&stop).unwrap()]);
    let called = json!([
        { "role": "tool", "tool_call_id": "c1", "content": "sunny" },
        user("thanks"),
    ]);
    let more = json!({
        "conversation_id": "talk", "tools": tools, "return_cached_tokens_details": true,
    });
    let called = stage.post(PATH, &chat(called, 8, more));
    let cached = number(&called, "/sglext/cached_tokens_details/device");
    assert_eq!(number(&called, "/usage/cached_tokens"), cached);
    assert_eq!(called["engram"]["from_turn"], 1);
}

#[test]
fn what_a_conversation_has_no_room_for_is_a_typed_400() {
    let stage = Stage::new(&[]);
    let of = |path: &str, body: Value| {
        let answer = stage.daemon.post(path, &body);
        (answer.status, answer.kind())
    };
    let talk = |more: Value| {
        let mut with = json!({ "conversation_id": "talk" });
        with.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        chat(json!([user("x")]), 4, with)
    };
    let image = json!([{ "type": "image_url", "image_url": { "url": "http://x" } }]);
    for (path, body, kind) in [
        (PATH, talk(json!({ "n": 2 })), "unsupported"),
        (PATH, talk(json!({ "input_ids": [1] })), "unsupported"),
        (PATH, talk(json!({ "session_id": "other" })), "unsupported"),
        (
            PATH,
            talk(json!({ "continue_final_message": true })),
            "unsupported",
        ),
        (
            PATH,
            talk(json!({ "messages": [{ "role": "user", "content": image }] })),
            "unsupported",
        ),
        (PATH, talk(json!({ "messages": [] })), "invalid_request"),
        (PATH, talk(json!({ "messages": ["x"] })), "invalid_request"),
        (PATH, talk(json!({ "messages": "x" })), "invalid_request"),
        (PATH, talk(json!({ "rid": "" })), "invalid_request"),
        (PATH, talk(json!({ "turn": 0 })), "invalid_request"),
        (
            PATH,
            talk(json!({ "stream_options": 1 })),
            "invalid_request",
        ),
        (
            "/v1/completions",
            json!({ "conversation_id": "t", "prompt": ["a", "b"] }),
            "unsupported",
        ),
        (
            "/v1/completions",
            json!({ "conversation_id": "t", "prompt": "a", "echo": true }),
            "unsupported",
        ),
        (
            "/v1/completions",
            json!({ "conversation_id": "t" }),
            "invalid_request",
        ),
        (
            "/v1/generate",
            json!({ "conversation_id": "t" }),
            "invalid_request",
        ),
        (
            "/v1/generate",
            json!({ "conversation_id": "t", "text": "a", "input_ids": [1] }),
            "invalid_request",
        ),
        (
            "/v1/generate",
            json!({ "conversation_id": "t", "input_ids": [] }),
            "invalid_request",
        ),
        (
            "/v1/generate",
            json!({ "conversation_id": "t", "input_ids": [-1] }),
            "invalid_request",
        ),
        (
            "/v1/generate",
            json!({ "conversation_id": "t", "text": "a", "sampling_params": [] }),
            "invalid_request",
        ),
        (
            "/v1/generate",
            json!({ "conversation_id": "t", "text": "a", "sampling_params": { "n": 2 } }),
            "unsupported",
        ),
        (
            "/v1/generate",
            json!({ "conversation_id": "t", "text": "a", "image_data": "x" }),
            "unsupported",
        ),
        ("/v1/generate", json!({ "text": "a" }), "invalid_request"),
        (
            "/v1/generate",
            json!({ "conversation_id": "../x", "text": "a" }),
            "invalid_request",
        ),
    ] {
        assert_eq!(
            of(path, body.clone()),
            (400, kind.to_owned()),
            "{path} {body}"
        );
    }
    for (path, body) in [
        (PATH, talk(json!({ "turn": 7 }))),
        (PATH, talk(json!({ "branch": "none" }))),
    ] {
        assert_eq!(of(path, body), (404, "not_found".to_owned()));
    }
    // Nothing of this began a conversation.
    assert_eq!(stage.daemon.get("/v1/conversations").json()["total"], 0);
    stage.engine.check_accounts();
}

#[test]
fn the_command_line_sends_only_the_new_line() {
    use std::io::Write as _;
    use std::process::Stdio;

    let stage = Stage::new(&[]);
    let url = stage.daemon.url();
    let args = [
        "chat",
        "talk",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        "--url",
        &url,
    ];
    let run = |more: &[&str], lines: &str| {
        let mut child = crate::common::process::engram()
            .args(args)
            .args(more)
            .env_remove("ENGRAM_TOKEN")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(lines.as_bytes())
            .unwrap();
        let output = child.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    let (code, out, err) = run(
        &["--system", "Be short."],
        "My number is 42.\n\nWhat is it?\n",
    );
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(out.matches("tokens reused").count(), 2, "{out}");
    let (code, out, err) = run(&["--json"], "And now?\n");
    assert_eq!(code, Some(0), "{err}");
    let said: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(said["engram"]["from_turn"], 2);
    assert!(number(&said, "/usage/wire_tokens") < number(&said, "/usage/cached_tokens"));
    // An error is said, and the next line is sent all the same.
    let (code, _, err) = run(&["--turn", "9"], "x\ny\n");
    assert_eq!(code, Some(1));
    assert_eq!(err.matches("404").count(), 2, "{err}");
}
