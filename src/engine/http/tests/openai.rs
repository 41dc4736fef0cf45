//! Text in and out, with a real tokenizer.

use super::stream::read_events;
use super::*;
use crate::tokenizer::testing::{CHATML, write};

async fn rig() -> (tempfile::TempDir, Rig) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), CHATML).unwrap();
    let path = folder.path().to_str().unwrap().to_owned();
    let rig = Rig::new(&["--tokenizer", &path, "--page-size", "1", "--exact-end"]).await;
    (folder, rig)
}

impl Rig {
    async fn ask(&self, path: &str, body: &Value) -> Value {
        let (status, reply) = self.post(path, body.to_string()).await;
        assert_eq!(status, 200, "{reply}");
        reply
    }

    async fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let url = format!("http://{}{path}", self.address);
        let reply = self.client.post(url).body(body.to_string()).send().await;
        read_events(&reply.unwrap().text().await.unwrap())
    }
}

#[tokio::test]
async fn text_and_messages_become_the_tokens_that_are_generated_from() {
    let (_folder, rig) = rig().await;
    let text = "My favourite colour is blue.";
    let tokens = rig.ask("/tokenize", &json!({ "prompt": text })).await;
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    let back = json!({ "tokens": tokens["tokens"] });
    assert_eq!(rig.ask("/detokenize", &back).await["text"], text);
    let sampling = json!({ "max_new_tokens": 12, "ignore_eos": true });
    let by_ids = json!({ "input_ids": tokens["tokens"], "sampling_params": sampling });
    let by_text = json!({ "text": text, "sampling_params": sampling });
    let (ids, said) = (
        rig.ask("/generate", &by_ids).await,
        rig.ask("/generate", &by_text).await,
    );
    assert_eq!(ids["output_ids"], said["output_ids"]);
    assert_eq!(ids["text"], said["text"]);
    let answer = json!({ "tokens": ids["output_ids"] });
    assert_eq!(
        rig.ask("/v1/detokenize", &answer).await["text"],
        ids["text"]
    );
    let completion = json!({ "prompt": text, "max_tokens": 12, "ignore_eos": true });
    let completion = rig.ask("/v1/completions", &completion).await;
    assert_eq!(completion["choices"][0]["text"], ids["text"]);

    let messages = json!([{ "role": "user", "content": text }]);
    let rendered = rig
        .ask("/v1/tokenize", &json!({ "messages": messages }))
        .await;
    let whole = json!({ "tokens": rendered["tokens"], "skip_special_tokens": false });
    assert_eq!(
        rig.ask("/detokenize", &whole).await["text"],
        format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    );
    let chat = json!({ "messages": messages, "max_tokens": 12, "ignore_eos": true, "rid": "c" });
    let chat = rig.ask("/v1/chat/completions", &chat).await;
    let by_ids = json!({ "input_ids": rendered["tokens"], "sampling_params": sampling });
    let by_ids = rig.ask("/generate", &by_ids).await;
    assert_eq!(chat["choices"][0]["message"]["content"], by_ids["text"]);
    assert_eq!(
        (&chat["id"], &chat["object"]),
        (&json!("c"), &json!("chat.completion"))
    );
    assert_eq!(chat["usage"]["prompt_tokens"], rendered["count"]);
    assert_eq!(chat["usage"]["completion_tokens"], 12);
    // Tokens go before messages, as in SGLang.
    let order = |ids: &Value| {
        json!({
            "messages": [], "input_ids": ids, "max_tokens": 12, "ignore_eos": true,
            "return_cached_tokens_details": true,
        })
    };
    let other = rig
        .ask("/v1/chat/completions", &order(&rendered["tokens"]))
        .await;
    assert_eq!(other["choices"], chat["choices"]);
    let both = [&rendered["tokens"], &by_ids["output_ids"]];
    let longer: Vec<_> = both
        .iter()
        .flat_map(|ids| ids.as_array().unwrap())
        .collect();
    let other = rig
        .ask("/v1/chat/completions", &order(&json!(longer)))
        .await;
    let cached = &other["sglext"]["cached_tokens_details"]["device"];
    assert!(cached.as_u64().unwrap() > 0, "{other}");
}

#[tokio::test]
async fn streams_of_text_add_up_to_the_whole_answer() {
    let (_folder, rig) = rig().await;
    let body = |stream: bool| {
        json!({
            "messages": [{ "role": "user", "content": "What is my favourite colour?" }],
            "max_tokens": 40, "ignore_eos": true, "stream": stream, "logprobs": true,
            "top_logprobs": 2, "stream_options": { "include_usage": true },
        })
    };
    let whole = rig.ask("/v1/chat/completions", &body(false)).await;
    let chunks = rig.stream("/v1/chat/completions", &body(true)).await;
    let (mut text, mut logprobs) = (String::new(), Vec::new());
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        text += choice["delta"]["content"].as_str().unwrap_or_default();
        let content = choice["logprobs"]["content"].as_array();
        logprobs.extend(content.into_iter().flatten().cloned());
    }
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["content"], text);
    assert_eq!(choice["logprobs"]["content"], json!(logprobs));
    assert_eq!(logprobs.len(), 40);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(chunks.last().unwrap()["usage"], whole["usage"]);
    let ends = chunks
        .iter()
        .filter_map(|c| c["choices"].get(0)?["finish_reason"].as_str());
    assert_eq!(ends.collect::<Vec<_>>(), ["length"]);
}

#[tokio::test]
async fn a_stop_text_ends_the_answer_before_it() {
    let (_folder, rig) = rig().await;
    let body = |extra: Value| {
        let mut body = json!({
            "messages": [{ "role": "user", "content": "the quick brown fox" }],
            "max_tokens": 60, "ignore_eos": true,
        });
        body.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        body
    };
    let path = "/v1/chat/completions";
    let full = rig.ask(path, &body(json!({}))).await;
    let text = full["choices"][0]["message"]["content"]
        .as_str()
        .unwrap()
        .to_owned();
    let chars: Vec<(usize, char)> = text.char_indices().collect();
    // Across tokens, wherever they end.
    let (from, to) = (chars[chars.len() / 2].0, chars[chars.len() / 2 + 4].0);
    let stop = &text[from..to];
    let before = &text[..text.find(stop).unwrap()];
    let stopped = rig
        .ask(path, &body(json!({ "stop": [stop, "never seen"] })))
        .await;
    let choice = &stopped["choices"][0];
    assert_eq!(choice["message"]["content"], before);
    assert_eq!(
        (&choice["finish_reason"], &choice["matched_stop"]),
        (&json!("stop"), &json!(stop))
    );
    let chunks = rig
        .stream(path, &body(json!({ "stop": stop, "stream": true })))
        .await;
    let deltas = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
    assert_eq!(deltas.collect::<String>(), before);
    assert_eq!(rig.get("/server_info").await["sanity_check"], "ok");
}

#[tokio::test]
async fn bad_text_bodies_are_typed_400s() {
    let (_folder, rig) = rig().await;
    for (path, body) in [
        ("/tokenize", json!({})),
        ("/tokenize", json!({ "prompt": "x", "messages": [] })),
        ("/detokenize", json!({ "tokens": ["x"] })),
        ("/v1/chat/completions", json!({ "messages": "x" })),
        (
            "/v1/chat/completions",
            json!({ "messages": [], "input_ids": [] }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user" }], "n": 2 }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{}], "temperature": 0.5 }),
        ),
        ("/v1/completions", json!({ "prompt": [[1]] })),
        ("/v1/completions", json!({ "prompt": "x", "echo": true })),
        ("/v1/completions", json!({ "prompt": "x", "stop": "" })),
    ] {
        let (status, reply) = rig.post(path, body.to_string()).await;
        assert_eq!(
            (status, &reply["object"]),
            (400, &json!("error")),
            "{path} {body}"
        );
    }
    let models = rig.get("/v1/models").await;
    assert_eq!(models["data"][0]["id"], "engram-tiny-hybrid");
}
