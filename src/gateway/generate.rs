//! `/v1/generate`: tokens or text behind what is known.

use std::sync::Arc;

use serde_json::{Value, json};

use super::base::Base;
use super::body::{OTHER_INPUT, look, one_answer, refuse, take};
use super::compose::Composed;
use super::facts::{Counts, Facts};
use super::flight::Flight;
use super::native_stream::NativeStream;
use super::{Ask, Fields, Gateway, GatewayError, Reply, Target};
use crate::types::Namespace;

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
        let (mut order, base) = self.enter(flight, body, (request_id, target)).await?;
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

// === impl Gateway ===

impl Gateway {
    /// A request in its conversation, once it is its turn there, and from where it goes on.
    ///
    /// # Errors
    /// `OtherTenant`, `UsedRid`, `OtherNamespace`, and those of [`Gateway::base`].
    pub(super) async fn enter(
        &self,
        flight: Flight,
        body: Fields,
        (request_id, target): (String, Target),
    ) -> Result<(Order, Base), GatewayError> {
        let target = self.resolved(target)?;
        let mut order = Order {
            facts: facts(&flight, request_id, &target),
            flight,
            body,
        };
        let base = order.enter(&target).await?;
        Ok((order, base))
    }

    /// By its conversation's own name.
    ///
    /// # Errors
    /// `OtherTenant`.
    pub fn resolved(&self, target: Target) -> Result<Target, GatewayError> {
        if target.tenant != self.tenant {
            return Err(GatewayError::OtherTenant);
        }
        let own = self
            .service
            .own_name(target.tenant.as_deref(), &target.conversation);
        Ok(Target {
            conversation: own.unwrap_or(target.conversation),
            ..target
        })
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
        let (tenant, name) = (gateway.tenant.as_deref(), &target.conversation);
        if gateway.service.has_turn_of(tenant, name, &self.flight.rid) {
            return Err(GatewayError::UsedRid(self.flight.rid.clone()));
        }
        let (base, head) = self.flight.or_cut(gateway.base(target)).await?;
        self.flight.hold(head);
        self.facts.from(&base);
        if !base.tokens.is_empty() {
            go_on_in(&mut self.body, &base.namespace)?;
        }
        Ok(base)
    }

    /// This is its prompt.
    pub fn compose(&mut self, composed: &Composed) -> Result<(), GatewayError> {
        let most = self.flight.gateway.service.config().max_prompt_tokens;
        if composed.tokens.len() >= most as usize {
            return Err(GatewayError::TooLong(most));
        }
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
        self.flight.sent(&self.facts.conversation);
        let upstream = self.flight.gateway.upstream.clone();
        let body = Value::Object(std::mem::take(&mut self.body));
        let asked = upstream.json("/generate", &body);
        let mut answer = self.flight.ask(asked).await?;
        finish(&mut self.flight, &self.facts, &mut answer);
        Ok(answer)
    }

    async fn stream(mut self) -> Result<Reply, GatewayError> {
        self.body.insert("stream".into(), true.into());
        self.flight.sent(&self.facts.conversation);
        let upstream = self.flight.gateway.upstream.clone();
        let body = Value::Object(std::mem::take(&mut self.body));
        let asked = upstream.events("/generate", &body);
        let events = self.flight.ask(asked).await?;
        let stream = NativeStream::new(events, self.flight, self.facts);
        Ok(Reply::Events(stream.into_bodies()))
    }
}

/// A conversation goes on in the namespace that it has: what the body does not say of it is added.
///
/// # Errors
/// `OtherNamespace` if the body says something else.
pub(super) fn go_on_in(body: &mut Fields, namespace: &Namespace) -> Result<(), GatewayError> {
    let Namespace {
        tenant: _,
        extra_key,
        cache_salt,
        adapter,
    } = namespace;
    let salt: Option<String> = look(body, "cache_salt")?;
    let key: Option<String> = look(body, "extra_key")?;
    // Some endpoints of a server join them to one.
    let joined = |salt: &Option<String>, key: &Option<String>| {
        [salt, key]
            .map(|part| part.as_deref().unwrap_or_default())
            .concat()
    };
    if salt.is_none() && key.is_none() {
        for (name, part) in [("cache_salt", cache_salt), ("extra_key", extra_key)] {
            if let Some(part) = part.as_deref().filter(|part| !part.is_empty()) {
                body.insert(name.into(), part.into());
            }
        }
    } else if joined(&salt, &key) != joined(cache_salt, extra_key) {
        return Err(GatewayError::OtherNamespace(
            "another `cache_salt` or `extra_key`: leave both out, or fork it by its tokens",
        ));
    }
    let says = |name: &str| body.get(name).is_some_and(|value| !value.is_null());
    // An adapter may be named within the model's name.
    let model = body.get("model").and_then(Value::as_str);
    let within = model.is_some_and(|model| model.contains(':'));
    let lora = says("lora_path") || says("lora_id");
    match adapter {
        Some(_) if !lora && !within => Err(GatewayError::OtherNamespace(
            "an adapter: name it (`lora_path`, or in `model`)",
        )),
        None if lora => Err(GatewayError::OtherNamespace("no adapter: leave it out")),
        _ => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(salt: Option<&str>, key: Option<&str>, adapter: bool) -> Namespace {
        Namespace {
            cache_salt: salt.map(str::to_owned),
            extra_key: key.map(str::to_owned),
            adapter: adapter.then_some([1; 32]),
            tenant: None,
        }
    }

    fn gone_on(body: Value, namespace: &Namespace) -> Option<Value> {
        let Value::Object(mut body) = body else {
            panic!()
        };
        go_on_in(&mut body, namespace).ok()?;
        Some(Value::Object(body))
    }

    #[test]
    fn a_conversation_goes_on_in_its_namespace_or_not_at_all() {
        let (none, salted) = (
            namespace(None, None, false),
            namespace(Some("s"), Some("k"), false),
        );
        assert_eq!(gone_on(json!({}), &none), Some(json!({})));
        let full = json!({ "cache_salt": "s", "extra_key": "k" });
        assert_eq!(gone_on(json!({}), &salted), Some(full.clone()));
        assert_eq!(gone_on(full.clone(), &salted), Some(full.clone()));
        // As a server tells it that joins them.
        assert!(gone_on(full.clone(), &namespace(None, Some("sk"), false)).is_some());
        assert_eq!(gone_on(full.clone(), &none), None);
        for other in [json!({ "cache_salt": "x" }), json!({ "extra_key": "k" })] {
            assert_eq!(gone_on(other, &salted), None);
        }
        let adapted = namespace(None, None, true);
        for body in [json!({ "lora_path": "a" }), json!({ "model": "base:a" })] {
            assert!(gone_on(body, &adapted).is_some());
        }
        assert_eq!(gone_on(json!({ "model": "base" }), &adapted), None);
        assert_eq!(gone_on(json!({ "lora_path": "a" }), &none), None);
    }
}
