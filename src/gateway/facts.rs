//! What an answer says of itself: usage, and where it came from.

use serde_json::{Value, json};

use super::Fields;
use super::compose::{Composed, Fallback};

/// What is known of a request before its answer.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub request_id: String,
    pub rid: String,
    pub conversation: String,
    /// The turn that it goes on from.
    pub turn: u32,
    /// Tokens of that turn, and how many of them its snapshot holds.
    pub known_tokens: usize,
    pub boundary: u32,
    /// Tokens that the client sent.
    pub wire_tokens: usize,
    /// Tokens of the whole prompt.
    pub prompt_tokens: usize,
    /// It parted from the conversation's head.
    pub branches: bool,
    pub fallback: Option<Fallback>,
}

/// What the server counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub prompt: Option<u64>,
    pub cached: Option<u64>,
    pub completion: Option<u64>,
}

// === impl Facts ===

impl Facts {
    /// `composed` is the prompt of it.
    pub fn composed(mut self, composed: &Composed) -> Facts {
        self.prompt_tokens = composed.tokens.len();
        self.wire_tokens = composed.wire_tokens;
        self.fallback = composed.fallback;
        self
    }

    /// Where the answer came from.
    pub fn origin(&self) -> Value {
        json!({
            "request_id": self.request_id,
            "rid": self.rid,
            "conversation_id": self.conversation,
            "from_turn": self.turn,
            "branched": self.branches,
            "known_tokens": self.known_tokens,
            "compatibility_result": if self.fallback.is_none() { "fast-path" } else { "fallback" },
            "fallback_reason": self.fallback.map(Fallback::as_str),
        })
    }

    /// The counts, added to what a server's `usage` has.
    pub fn usage(&self, counts: Counts, before: Option<Fields>) -> Value {
        let prompt = counts.prompt.unwrap_or(self.prompt_tokens as u64);
        let completion = counts.completion.unwrap_or(0);
        let mut usage = before.unwrap_or_default();
        let prefilled = counts.cached.map(|cached| prompt.saturating_sub(cached));
        for (name, value) in [
            ("prompt_tokens", json!(prompt)),
            ("completion_tokens", json!(completion)),
            ("total_tokens", json!(prompt.saturating_add(completion))),
            ("cached_tokens", json!(counts.cached)),
            ("prefilled_tokens", json!(prefilled)),
            ("wire_tokens", json!(self.wire_tokens)),
            ("boundary", json!(self.boundary)),
        ] {
            usage.insert(name.to_owned(), value);
        }
        Value::Object(usage)
    }
}

// === impl Counts ===

impl Counts {
    /// Those of a `meta_info`.
    pub fn of_meta(meta: &Value) -> Counts {
        let count = |name: &str| meta.get(name).and_then(Value::as_u64);
        Counts {
            prompt: count("prompt_tokens"),
            cached: count("cached_tokens"),
            completion: count("completion_tokens"),
        }
    }

    /// Those of a `usage`, and of the details that are asked for where it says nothing of the cache.
    pub fn of_usage(usage: &Value, details: Option<&Value>) -> Counts {
        let count = |at: &str| usage.pointer(at).and_then(Value::as_u64);
        let detailed = details.map(|details| {
            let tiers = ["device", "host", "storage"];
            let counts = tiers.iter().filter_map(|tier| details.get(*tier)?.as_u64());
            counts.fold(0, u64::saturating_add)
        });
        Counts {
            prompt: count("/prompt_tokens"),
            cached: count("/prompt_tokens_details/cached_tokens").or(detailed),
            completion: count("/completion_tokens"),
        }
    }
}
