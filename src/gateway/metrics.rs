//! What the gateway counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::facts::{Counts, Facts};

/// Counts of all requests. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Metrics {
    in_flight: Gauge,
    answers: Family<Kind, Counter>,
    tokens: Family<Kind, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

// === impl Metrics ===

impl Metrics {
    pub fn register(registry: &mut Registry) -> Metrics {
        let metrics = Metrics::default();
        let Metrics {
            in_flight,
            answers,
            tokens,
        } = metrics.clone();
        registry.register(
            "gateway_in_flight",
            "Requests to the inference server under way",
            in_flight,
        );
        registry.register(
            "gateway_answers",
            "Whole answers in conversations, by whether the prompt went on from the tokens known or \
             fell back",
            answers,
        );
        registry.register(
            "gateway_tokens",
            "Tokens of whole answers in conversations: of prompts, of those the cached ones, those \
             that clients sent, and those of answers",
            tokens,
        );
        metrics
    }

    pub fn began(&self) {
        self.in_flight.inc();
    }

    pub fn ended(&self) {
        self.in_flight.dec();
    }

    pub fn answered(&self, facts: &Facts, counts: Counts) {
        let kind = facts.fallback.map_or("fast-path", |why| why.as_str());
        self.answers.get_or_create(&Kind { kind }).inc();
        for (kind, count) in [
            (
                "prompt",
                counts.prompt.unwrap_or(facts.prompt_tokens as u64),
            ),
            ("cached", counts.cached.unwrap_or(0)),
            ("wire", facts.wire_tokens as u64),
            ("completion", counts.completion.unwrap_or(0)),
        ] {
            self.tokens.get_or_create(&Kind { kind }).inc_by(count);
        }
    }
}
