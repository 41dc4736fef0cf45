//! `/v1/generate`: tokens or text behind what is known.

use std::sync::Arc;

use serde_json::{Value, json};

use super::base::Base;
use super::body::{OTHER_INPUT, one_answer, refuse, take};
use super::compose::Composed;
use super::facts::{Counts, Facts};
use super::flight::Flight;
use super::native_stream::NativeStream;
use super::{Ask, Fields, Gateway, GatewayError, Reply, Target};

/// A request that was composed.
pub(super) struct Order {
    pub flight: Flight,
    pub facts: Facts,
    pub body: Fields,
}

// === impl Gateway ===

impl Gateway {
    /// Goes on with a conversation from `input_ids` or `text`, which is only what is new. All other
    /// fields are the server's.
    ///
    /// # Errors
    /// All of [`GatewayError`].
    pub async fn generate(self: &Arc<Self>, ask: Ask) -> Result<Reply, GatewayError> {
        let Ask {
            request_id,
            target,
            mut body,
        } = ask;
        let flight = self.takeoff(take(&mut body, "rid")?)?;
        let stream = take(&mut body, "stream")?.unwrap_or(false);
        let ids: Option<Vec<u32>> = take(&mut body, "input_ids")?;
        let text: Option<String> = take(&mut body, "text")?;
        refuse(&body, &OTHER_INPUT)?;
        if let Some(sampling) = body.get("sampling_params") {
            let Value::Object(sampling) = sampling else {
                let text = "`sampling_params` must be an object";
                return Err(GatewayError::Invalid(text.to_owned()));
            };
            one_answer(sampling, &["n"])?;
        }
        let mut order = Order {
            facts: facts(&flight, request_id, &target),
            flight,
            body,
        };
        let base = order.enter(&target).await?;
        let new = match (ids, text) {
            (Some(ids), None) => ids,
            (None, Some(text)) => self.tokens.encode(&text, base.tokens.is_empty()).await?,
            _ => {
                let text = "one of `input_ids` and `text` is needed";
                return Err(GatewayError::Invalid(text.to_owned()));
            }
        };
        order.compose(&Composed::append(&base.tokens, &new))?;
        match stream {
            true => order.stream().await,
            false => order.whole().await.map(Reply::Json),
        }
    }
}

/// What is known of a request at first.
pub(super) fn facts(flight: &Flight, request_id: String, target: &Target) -> Facts {
    Facts {
        request_id,
        rid: flight.rid.clone(),
        conversation: target.conversation.clone(),
        turn: 0,
        known_tokens: 0,
        boundary: 0,
        wire_tokens: 0,
        prompt_tokens: 0,
        branches: false,
        fallback: None,
    }
}

// === impl Facts ===

impl Facts {
    /// From where it goes on.
    pub(super) fn from(&mut self, base: &Base) {
        self.turn = base.turn;
        self.known_tokens = base.tokens.len();
        self.boundary = base.boundary;
        self.branches = !base.is_head;
    }
}

// === impl Order ===

impl Order {
    /// Waits for its turn, and says from where it goes on.
    pub async fn enter(&mut self, target: &Target) -> Result<Base, GatewayError> {
        let gateway = Arc::clone(&self.flight.gateway);
        let (base, head) = self.flight.or_cut(gateway.base(target)).await?;
        self.flight.hold(head);
        self.facts.from(&base);
        Ok(base)
    }

    /// This is its prompt.
    pub fn compose(&mut self, composed: &Composed) -> Result<(), GatewayError> {
        if composed.tokens.is_empty() {
            let text = "there is nothing to go on from: no token is known, and none was sent";
            return Err(GatewayError::Invalid(text.to_owned()));
        }
        self.facts = self.facts.clone().composed(composed);
        self.body.insert("input_ids".into(), json!(composed.tokens));
        self.body.insert("rid".into(), json!(self.flight.rid));
        self.body
            .insert("session_id".into(), json!(self.facts.conversation));
        Ok(())
    }

    /// The answer in one piece.
    pub async fn whole(mut self) -> Result<Value, GatewayError> {
        self.body.insert("stream".into(), false.into());
        self.flight.sent();
        let upstream = self.flight.gateway.upstream.clone();
        let body = Value::Object(std::mem::take(&mut self.body));
        let asked = upstream.json("/generate", &body);
        let mut answer = self.flight.or_cut(asked).await?;
        finish(&mut self.flight, &self.facts, &mut answer);
        Ok(answer)
    }

    async fn stream(mut self) -> Result<Reply, GatewayError> {
        self.body.insert("stream".into(), true.into());
        self.flight.sent();
        let upstream = self.flight.gateway.upstream.clone();
        let body = Value::Object(std::mem::take(&mut self.body));
        let asked = upstream.events("/generate", &body);
        let events = self.flight.or_cut(asked).await?;
        let stream = NativeStream::new(events, self.flight, self.facts);
        Ok(Reply::Events(stream.into_bodies()))
    }
}

/// Adds to the last piece of an answer what the daemon knows, and ends the flight.
pub(super) fn finish(flight: &mut Flight, facts: &Facts, answer: &mut Value) {
    let meta = answer.get("meta_info").cloned().unwrap_or_default();
    let ended = meta
        .pointer("/finish_reason/type")
        .and_then(Value::as_str)
        .is_some_and(|kind| kind != "abort");
    let counts = Counts::of_meta(&meta);
    if let Value::Object(answer) = answer {
        let usage = facts.usage(counts, None);
        answer.insert("usage".into(), usage);
        answer.insert("engram".into(), facts.origin());
        answer.insert("id".into(), facts.rid.as_str().into());
    }
    match ended {
        true => flight.answered(facts, counts, None),
        false => flight.ended(),
    }
}
