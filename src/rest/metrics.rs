//! Counts of answers.

use axum::http::{Method, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Metrics of the REST surface. Cheap to clone; clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    requests: Family<Labels, Counter>,
}

/// Routes are ours and methods are known ones, so there are few combinations whatever clients send.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    route: String,
    method: &'static str,
    status: u16,
}

// === impl Metrics ===

impl Metrics {
    /// Registers the counts as `rest_requests`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "rest_requests",
            "Answers of the REST surface by route, method and status code",
            self.requests.clone(),
        );
    }

    /// Counts one answer.
    pub fn answered(&self, route: &str, method: &Method, status: StatusCode) {
        let method = match *method {
            Method::GET => "GET",
            Method::POST => "POST",
            Method::HEAD => "HEAD",
            Method::PUT => "PUT",
            Method::DELETE => "DELETE",
            Method::OPTIONS => "OPTIONS",
            Method::PATCH => "PATCH",
            _ => "other",
        };
        let labels = Labels {
            route: route.to_owned(),
            method,
            status: status.as_u16(),
        };
        self.requests.get_or_create(&labels).inc();
    }
}
