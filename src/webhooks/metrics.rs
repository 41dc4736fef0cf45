//! Counts of deliveries.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Metrics of webhooks. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    attempts: Family<Attempt, Counter>,
    dropped: Family<Receiver, Counter>,
}

/// How an attempt ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The receiver has it.
    Delivered,
    /// It is tried again.
    Retried,
    /// It is not tried again.
    GivenUp,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Attempt {
    url: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Receiver {
    url: String,
}

// === impl Metrics ===

impl Metrics {
    /// Registers the counts as `webhook_attempts` and `webhook_dropped`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "webhook_attempts",
            "Attempts to deliver an event, by receiver and outcome",
            metrics.attempts.clone(),
        );
        registry.register(
            "webhook_dropped",
            "Events that a receiver was too slow for, or that were given up",
            metrics.dropped.clone(),
        );
        metrics
    }

    /// Shows a receiver from its start on.
    pub(super) fn receiver(&self, url: &str) {
        self.dropped_by(url, 0);
    }

    pub(super) fn attempt(&self, url: &str, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Delivered => "delivered",
            Outcome::Retried => "retried",
            Outcome::GivenUp => "given_up",
        };
        let url = url.to_owned();
        self.attempts.get_or_create(&Attempt { url, outcome }).inc();
    }

    pub(super) fn dropped_by(&self, url: &str, events: u64) {
        let url = url.to_owned();
        self.dropped.get_or_create(&Receiver { url }).inc_by(events);
    }
}
