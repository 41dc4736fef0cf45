//! A streamed answer of the OpenAI endpoints. Chunks pass as they come; the one that says why the
//! answer ended waits for the counts behind it, which go with it or in a chunk of their own, as the
//! client asked.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use serde_json::{Value, json};

use super::body::look;
use super::chat::{counts_of, drop_details, into_fields, record};
use super::facts::Counts;
use super::generate::Order;
use super::native_stream::{DONE, ended_badly, frame};
use super::pump::read_ahead;
use super::{Bodies, Fields, GatewayError};
use crate::upstream::{Event, Events};

/// What the client asked for of what the daemon asks for always.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    /// A chunk with the usage.
    pub usage: bool,
    /// How much was cached where.
    pub details: bool,
}

/// An answer under way.
pub(super) struct ChatStream {
    events: Events,
    order: Order,
    /// New messages, if they are to be noted.
    said: Option<Vec<Value>>,
    wanted: Wanted,
    answer: Answer,
    /// The chunk that said why it ended.
    last: Option<Fields>,
    counts: Counts,
    usage: Option<Fields>,
    ready: VecDeque<Bytes>,
    over: bool,
}

/// The message that the chunks add up to.
#[derive(Debug, Default)]
struct Answer {
    texts: BTreeMap<String, String>,
    calls: BTreeMap<u64, Fields>,
}

// === impl Wanted ===

impl Wanted {
    pub fn of(body: &Fields) -> Result<Wanted, GatewayError> {
        let options: Option<Fields> = look(body, "stream_options")?;
        let usage = options.map(|options| look(&options, "include_usage"));
        Ok(Wanted {
            usage: usage.transpose()?.flatten().unwrap_or(false),
            details: look(body, "return_cached_tokens_details")?.unwrap_or(false),
        })
    }
}

// === impl ChatStream ===

impl ChatStream {
    pub fn new(
        events: Events,
        order: Order,
        said: Option<Vec<Value>>,
        wanted: Wanted,
    ) -> ChatStream {
        ChatStream {
            events,
            order,
            said,
            wanted,
            answer: Answer::default(),
            last: None,
            counts: Counts::default(),
            usage: None,
            ready: VecDeque::new(),
            over: false,
        }
    }

    pub fn into_bodies(self) -> Bodies {
        read_ahead(futures_util::stream::unfold(self, |mut stream| async {
            let next = stream.next().await?;
            Some((Ok(next), stream))
        }))
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Some(ready);
            }
            if self.over {
                return None;
            }
            match self.order.flight.or_cut(self.events.next()).await {
                Ok(Event::Data(data)) => self.take(&data),
                Ok(Event::Done) => {
                    self.over = true;
                    self.finish();
                    self.ready.push_back(Bytes::from_static(DONE));
                }
                Err(error) => {
                    self.over = true;
                    return Some(ended_badly(&error));
                }
            }
        }
    }

    fn take(&mut self, data: &[u8]) {
        let Ok(Value::Object(mut chunk)) = serde_json::from_slice::<Value>(data) else {
            self.ready.push_back(frame(data));
            return;
        };
        let choice = chunk.get("choices").and_then(|choices| choices.get(0));
        let (ends, has_choice) = (
            choice.is_some_and(|choice| choice.get("finish_reason").is_some_and(Value::is_string)),
            choice.is_some(),
        );
        if let Some(delta) = choice.and_then(|choice| choice.get("delta")) {
            self.answer.add(delta);
        }
        if chunk.contains_key("error") {
            self.ready.push_back(frame(data));
            return;
        }
        let counts = counts_of(&chunk);
        self.counts = Counts {
            prompt: counts.prompt.or(self.counts.prompt),
            cached: counts.cached.or(self.counts.cached),
            completion: counts.completion.or(self.counts.completion),
        };
        if has_choice {
            chunk.insert("id".into(), self.order.facts.rid.as_str().into());
            match ends {
                true => self.last = Some(chunk),
                false => self.push(&chunk),
            }
            return;
        }
        if let Some(usage) = chunk.remove("usage").and_then(into_fields) {
            self.usage = Some(usage);
            return;
        }
        if !self.wanted.details {
            drop_details(&mut chunk);
        }
        // What has neither choice nor counts nor anything else that was asked for.
        if chunk.get("sglext").is_some_and(|ext| !ext.is_null()) {
            self.push(&chunk);
        }
    }

    /// Everything has come.
    fn finish(&mut self) {
        let Some(mut last) = self.last.take() else {
            // An answer that never ended is none; the server said why.
            self.order.flight.ended();
            return;
        };
        let facts = self.order.facts.clone();
        let reason = last
            .get("choices")
            .and_then(|choices| choices.pointer("/0/finish_reason"));
        let aborted = reason.and_then(Value::as_str) == Some("abort");
        // Asked for details, the server says nothing where nothing was cached.
        self.counts.cached.get_or_insert(0);
        let usage = facts.usage(self.counts, self.usage.take());
        if self.wanted.usage {
            let mut counted = last.clone();
            counted.insert("choices".into(), json!([]));
            self.push(&last);
            counted.insert("usage".into(), usage);
            counted.insert("engram".into(), facts.origin());
            self.push(&counted);
        } else {
            last.insert("usage".into(), usage);
            last.insert("engram".into(), facts.origin());
            self.push(&last);
        }
        match aborted {
            true => self.order.flight.ended(),
            false => {
                let answer = std::mem::take(&mut self.answer).into_message();
                let said = self.said.take().map(|said| record(said, answer));
                self.order.flight.answered(&facts, self.counts, said);
            }
        }
    }

    fn push(&mut self, chunk: &Fields) {
        match serde_json::to_vec(chunk) {
            Ok(data) => self.ready.push_back(frame(&data)),
            Err(error) => tracing::error!(%error, "A chunk is lost"),
        }
    }
}

// === impl Answer ===

impl Answer {
    fn add(&mut self, delta: &Value) {
        for name in ["content", "reasoning_content", "refusal"] {
            if let Some(text) = delta.get(name).and_then(Value::as_str) {
                self.texts
                    .entry(name.to_owned())
                    .or_default()
                    .push_str(text);
            }
        }
        let calls = delta.get("tool_calls").and_then(Value::as_array);
        for call in calls.into_iter().flatten() {
            let index = call.get("index").and_then(Value::as_u64).unwrap_or(0);
            let known = self.calls.entry(index).or_default();
            merge(known, call);
        }
    }

    fn into_message(mut self) -> Value {
        let mut message = Fields::new();
        message.insert("role".into(), "assistant".into());
        let content = self.texts.remove("content").filter(|text| !text.is_empty());
        let empty = if self.calls.is_empty() {
            Value::String(String::new())
        } else {
            Value::Null
        };
        message.insert("content".into(), content.map_or(empty, Value::String));
        for (name, text) in self.texts {
            message.insert(name, text.into());
        }
        if !self.calls.is_empty() {
            let calls: Vec<Value> = self.calls.into_values().map(Value::Object).collect();
            message.insert("tool_calls".into(), calls.into());
        }
        Value::Object(message)
    }
}

/// Names come once, arguments in pieces.
fn merge(known: &mut Fields, call: &Value) {
    for name in ["id", "type"] {
        if let Some(value) = call.get(name).filter(|value| value.is_string()) {
            known.entry(name).or_insert_with(|| value.clone());
        }
    }
    let function = known
        .entry("function")
        .or_insert_with(|| json!({ "arguments": "" }));
    let (Some(function), Some(new)) = (function.as_object_mut(), call.get("function")) else {
        return;
    };
    if let Some(name) = new.get("name").filter(|name| name.is_string()) {
        function.entry("name").or_insert_with(|| name.clone());
    }
    let more = new
        .get("arguments")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if let Some(Value::String(arguments)) = function.get_mut("arguments") {
        arguments.push_str(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deltas_add_up_to_a_message() {
        let mut answer = Answer::default();
        for delta in [
            json!({ "role": "assistant", "content": "" }),
            json!({ "reasoning_content": "w" }),
            json!({ "content": "It is " }),
            json!({ "content": "blue", "tool_calls": null }),
            json!({ "tool_calls": [{
                "index": 0, "id": "c1", "type": "function",
                "function": { "name": "f", "arguments": "" },
            }] }),
            json!({ "tool_calls": [{ "index": 0, "function": { "arguments": "{\"x\":" } }] }),
            json!({ "tool_calls": [{ "index": 0, "id": null, "function": { "arguments": "1}" } }] }),
        ] {
            answer.add(&delta);
        }
        assert_eq!(
            answer.into_message(),
            json!({
                "role": "assistant", "content": "It is blue", "reasoning_content": "w",
                "tool_calls": [{
                    "id": "c1", "type": "function",
                    "function": { "name": "f", "arguments": "{\"x\":1}" },
                }],
            })
        );
        assert_eq!(
            Answer::default().into_message(),
            json!({ "role": "assistant", "content": "" })
        );
    }
}
