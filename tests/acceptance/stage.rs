//! A daemon, an engine beside it that it forwards to, and a tokenizer for both.

use std::path::Path;

use serde_json::{Value, json};

use crate::common::daemon::{Daemon, Knobs};
use crate::common::engine::Engine;
use crate::common::http::Answer;
use crate::common::wait_for;

/// States at every token, so that all of a turn comes back.
pub const EXACT: [&str; 5] = ["--page-size", "1", "--exact-end", "--pages", "30000"];

/// All of it.
pub struct Stage {
    pub engine: Engine,
    pub daemon: Daemon,
    /// Further knobs of the daemon.
    knobs: Vec<(&'static str, toml::Value)>,
    _tokenizer: tempfile::TempDir,
}

/// A folder with the tokenizer.
pub fn tokenizer(template: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    engram::tokenizer::testing::write(folder.path(), template).unwrap();
    folder
}

impl Stage {
    /// Starts all of it, with arguments of the engine beside [`EXACT`].
    pub fn new(args: &[&str]) -> Stage {
        Stage::with(args, &[], engram::tokenizer::testing::CHATML)
    }

    /// With knobs of the daemon, and another chat template.
    pub fn with(args: &[&str], knobs: &[(&'static str, toml::Value)], template: &str) -> Stage {
        let tokenizer = tokenizer(template);
        let daemon = Daemon::start(&[]);
        let folder = tokenizer.path().to_str().unwrap();
        let args = [&EXACT, args, &["--tokenizer", folder]].concat();
        let engine = Engine::beside(&daemon, &args);
        let mut stage = Stage {
            engine,
            daemon,
            knobs: knobs.to_vec(),
            _tokenizer: tokenizer,
        };
        stage.restart_daemon();
        stage
    }

    /// The folder of the tokenizer.
    pub fn tokenizer(&self) -> &Path {
        self._tokenizer.path()
    }

    /// Further knobs from the next start of the daemon on.
    pub fn knob(&mut self, name: &'static str, value: toml::Value) {
        self.knobs.push((name, value));
    }

    /// Kills the daemon and starts it again.
    pub fn restart_daemon(&mut self) {
        let url = match self.engine.place() {
            crate::common::http::Place::Tcp(address) => format!("http://{address}"),
            crate::common::http::Place::Unix(path) => panic!("{path:?}"),
        };
        let mut knobs = self.knobs.clone();
        knobs.push(("upstream.url", url.into()));
        let knobs: Knobs = &knobs;
        self.daemon.restart_with(knobs);
        self.engine.wait_attached(&self.daemon);
    }

    /// Kills both and starts them again: nothing is left but what is on disk.
    pub fn restart_both(&mut self) {
        self.daemon.kill();
        self.engine.kill();
        self.engine.restart();
        self.restart_daemon();
    }

    /// POST to the daemon; the answer is good.
    pub fn post(&self, path: &str, body: &Value) -> Value {
        good(&self.daemon.post(path, body))
    }

    /// POST to the engine; the answer is good.
    pub fn direct(&self, path: &str, body: &Value) -> Value {
        good(&self.engine.post(path, body))
    }

    /// `/v1/generate` with new tokens.
    pub fn generate(&self, conversation: &str, new: &[u32], length: usize) -> Value {
        self.post("/v1/generate", &order(conversation, new, length))
    }

    /// What the engine answers to a whole prompt without anything cached, and without leaving
    /// anything: the truth.
    pub fn truth(&self, prompt: &[u32], length: usize) -> Vec<u32> {
        let salt = format!("truth-{}", uuid::Uuid::new_v4());
        let body = json!({
            "input_ids": prompt, "cache_salt": salt,
            "sampling_params": { "max_new_tokens": length, "ignore_eos": true },
        });
        ids(&self.direct("/generate", &body))
    }

    /// Waits until a turn with this rid is on disk.
    pub fn keep(&self, conversation: &str) {
        let body = json!({ "conversation_id": conversation });
        wait_for("a durable turn", || {
            (self.daemon.post("/save_snapshot", &body).status == 200).then_some(())
        });
        self.daemon.all_durable();
    }

    /// The numbers of the engine's own counts.
    pub fn count(&self, name: &str) -> u64 {
        self.engine.info()["counts"][name].as_u64().unwrap()
    }
}

/// A conversation in words, as its exact tokens go.
#[derive(Default)]
pub struct Talk {
    /// All so far.
    pub known: Vec<u32>,
    /// Tokens of the last prompt.
    pub prompt: usize,
}

impl Talk {
    /// What the model answers to a message, by the engine alone and without anything cached.
    pub fn say(&mut self, stage: &Stage, text: &str, length: usize) -> String {
        let ended = if self.known.is_empty() {
            ""
        } else {
            "<|im_end|>\n"
        };
        let text = format!("{ended}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
        let body = json!({ "prompt": text, "add_special_tokens": false });
        let new: Vec<u32> =
            serde_json::from_value(stage.direct("/tokenize", &body)["tokens"].clone()).unwrap();
        self.known.extend(new);
        self.prompt = self.known.len();
        let answer = stage.truth(&self.known, length);
        self.known.extend(&answer);
        let text = stage.direct("/detokenize", &json!({ "tokens": answer }));
        text["text"].as_str().unwrap().to_owned()
    }
}

/// A body of `/v1/generate`.
pub fn order(conversation: &str, new: &[u32], length: usize) -> Value {
    json!({
        "conversation_id": conversation, "input_ids": new,
        "sampling_params": { "max_new_tokens": length, "ignore_eos": true },
    })
}

/// A good answer.
pub fn good(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// The tokens of an answer.
pub fn ids(answer: &Value) -> Vec<u32> {
    serde_json::from_value(answer["output_ids"].clone()).unwrap()
}

/// The events of a streamed answer that ended well: without the last `[DONE]`.
pub fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let mut parts: Vec<&str> = answer.text().split("\n\n").collect();
    assert_eq!((parts.pop(), parts.pop()), (Some(""), Some("data: [DONE]")));
    let data = parts
        .iter()
        .map(|part| part.strip_prefix("data: ").unwrap());
    data.map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

/// A number in an answer.
pub fn number(answer: &Value, at: &str) -> u64 {
    let value = answer.pointer(at).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("{at} in {answer}"))
}

/// Body of a chat, with the engine's answers as long as they are asked for.
pub fn chat(messages: Value, length: usize, more: Value) -> Value {
    let mut body = json!({
        "model": "engram-tiny-hybrid", "messages": messages, "max_tokens": length,
        "ignore_eos": true, "temperature": 0,
    });
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

/// The text of a chat's answer.
pub fn content(answer: &Value) -> &str {
    let text = answer.pointer("/choices/0/message/content");
    text.and_then(Value::as_str)
        .unwrap_or_else(|| panic!("{answer}"))
}

/// One message.
pub fn user(text: &str) -> Value {
    json!({ "role": "user", "content": text })
}
