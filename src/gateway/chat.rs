//! `/v1/chat/completions` with a conversation: new messages behind what is known.
//!
//! The server gets the whole prompt as `input_ids` beside the messages, so that it renders nothing;
//! all else of the body is its own: sampling parameters, stops, log probabilities, tools, their
//! parsing.

use std::sync::Arc;

use serde_json::{Value, json};

use super::body::{OTHER_INPUT, look, one_answer, refuse, take};
use super::chat_stream::{ChatStream, Wanted};
use super::facts::{Counts, Facts};
use super::flight::Flight;
use super::generate::Order;
use super::tokens::Extras;
use super::{Ask, Fields, Gateway, GatewayError, Reply};

/// Fields that a conversation leaves no room for.
const REFUSED: [&str; 3] = [
    "input_ids",
    "continue_final_message",
    "return_hidden_states",
];
/// Asks the server how much of the prompt was cached.
pub(super) const DETAILS: &str = "return_cached_tokens_details";

// === impl Gateway ===

impl Gateway {
    /// Goes on with a conversation from its new messages.
    ///
    /// # Errors
    /// All of [`GatewayError`].
    pub async fn chat(self: &Arc<Self>, ask: Ask) -> Result<Reply, GatewayError> {
        let Ask {
            request_id,
            target,
            mut body,
        } = ask;
        let flight = self.takeoff(take(&mut body, "rid")?)?;
        refuse(&body, &OTHER_INPUT)?;
        refuse(&body, &REFUSED)?;
        one_answer(&body, &["n", "best_of"])?;
        let new: Vec<Value> = take(&mut body, "messages")?.unwrap_or_default();
        check(&new)?;
        let wanted = Wanted::of(&body)?;
        let stream = look(&body, "stream")?.unwrap_or(false);
        let (mut order, base) = self.enter(flight, body, (request_id, target)).await?;
        let extras = Extras::of(&order.body);
        let composing = self.compose(&base, &new, &extras);
        let composed = order.flight.or_cut(composing).await?;
        order.compose(&composed)?;
        order.body.insert("messages".into(), json!(new));
        order.body.insert(DETAILS.into(), true.into());
        let said = base.is_head.then_some(new);
        match stream {
            true => {
                order.ask_usage();
                let path = "/v1/chat/completions";
                let (events, order) = order.events(path).await?;
                let stream = ChatStream::new(events, order, said, wanted);
                Ok(Reply::Events(stream.into_bodies()))
            }
            false => {
                let (mut answer, mut order) = order.json("/v1/chat/completions").await?;
                let message = answer.pointer("/choices/0/message").cloned();
                let said = said
                    .zip(message)
                    .map(|(said, message)| record(said, message));
                finish(&mut order.flight, &order.facts, &mut answer, said, wanted);
                Ok(Reply::Json(answer))
            }
        }
    }
}

/// Messages that are text and tool calls.
fn check(messages: &[Value]) -> Result<(), GatewayError> {
    if messages.is_empty() {
        let text = "`messages` is needed: the new ones";
        return Err(GatewayError::Invalid(text.to_owned()));
    }
    for message in messages {
        if message.get("role").and_then(Value::as_str).is_none() {
            let text = "`messages`: each is an object with a `role`";
            return Err(GatewayError::Invalid(text.to_owned()));
        }
        let text = |part: &Value| part.get("type").and_then(Value::as_str) == Some("text");
        let parts = message.get("content").and_then(Value::as_array);
        if parts.is_some_and(|parts| !parts.iter().all(text)) {
            let text = "`messages`: content that is no text";
            return Err(GatewayError::Unsupported(text.to_owned()));
        }
    }
    Ok(())
}

/// What was said in a turn: its new messages and its answer without what is empty.
pub(super) fn record(mut said: Vec<Value>, mut answer: Value) -> Vec<Value> {
    if let Some(answer) = answer.as_object_mut() {
        let keep = |name: &str, value: &Value| name == "content" || !value.is_null();
        answer.retain(|name, value| keep(name, value));
    }
    said.push(answer);
    said
}

/// Adds to an answer what the daemon knows, and ends the flight.
pub(super) fn finish(
    flight: &mut Flight,
    facts: &Facts,
    answer: &mut Value,
    said: Option<Vec<Value>>,
    wanted: Wanted,
) {
    let reason = answer.pointer("/choices/0/finish_reason");
    let ended = reason
        .and_then(Value::as_str)
        .is_some_and(|it| it != "abort");
    let mut counts = answer.as_object().map(counts_of).unwrap_or_default();
    // Asked for details, the server says nothing where nothing was cached.
    counts.cached.get_or_insert(0);
    if let Value::Object(answer) = answer {
        let usage = answer.remove("usage");
        let usage = facts.usage(counts, usage.and_then(into_fields));
        answer.insert("usage".into(), usage);
        answer.insert("engram".into(), facts.origin());
        answer.insert("id".into(), facts.rid.as_str().into());
        if !wanted.details {
            drop_details(answer);
        }
    }
    match ended {
        true => flight.answered(facts, counts, said),
        false => flight.ended(),
    }
}

/// What an answer, or the chunks at its end, count.
pub(super) fn counts_of(answer: &Fields) -> Counts {
    let details = answer
        .get("sglext")
        .and_then(|ext| ext.get("cached_tokens_details"));
    Counts::of_usage(answer.get("usage").unwrap_or(&Value::Null), details)
}

/// Takes out what only the daemon asked for.
pub(super) fn drop_details(answer: &mut Fields) {
    if let Some(Value::Object(ext)) = answer.get_mut("sglext") {
        ext.remove("cached_tokens_details");
        if ext.values().all(Value::is_null) {
            answer.remove("sglext");
        }
    }
}

pub(super) fn into_fields(value: Value) -> Option<Fields> {
    match value {
        Value::Object(fields) => Some(fields),
        _ => None,
    }
}

// === impl Order ===

impl Order {
    /// Has the server say at the end of a stream what it counted.
    pub(super) fn ask_usage(&mut self) {
        let options = self.body.entry("stream_options").or_insert(Value::Null);
        let mut fields = into_fields(options.take()).unwrap_or_default();
        fields.insert("include_usage".into(), true.into());
        *options = Value::Object(fields);
    }

    pub(super) async fn json(mut self, path: &str) -> Result<(Value, Order), GatewayError> {
        self.flight.sent(&self.facts.conversation);
        let upstream = self.flight.gateway.upstream.clone();
        let body = Value::Object(std::mem::take(&mut self.body));
        let answer = self.flight.ask(upstream.json(path, &body)).await?;
        Ok((answer, self))
    }

    pub(super) async fn events(
        mut self,
        path: &str,
    ) -> Result<(crate::upstream::Events, Order), GatewayError> {
        self.flight.sent(&self.facts.conversation);
        let upstream = self.flight.gateway.upstream.clone();
        let body = Value::Object(std::mem::take(&mut self.body));
        let events = self.flight.ask(upstream.events(path, &body)).await?;
        Ok((events, self))
    }
}
