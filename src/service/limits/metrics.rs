//! Numbers of quotas and retention. Labels come from the configuration alone.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

use super::super::metrics::Level;

/// Label `namespace`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByNamespace {
    /// A name of the configuration, or `other`.
    pub namespace: String,
}

/// Counters and gauges; clones share them.
#[derive(Clone, Debug, Default)]
pub struct LimitMetrics {
    /// Offers declined because their namespace was full.
    pub declined: Counter,
    /// Saves by name and imports refused for the same reason.
    pub refused: Counter,
    /// Snapshots that made room for others of their namespace.
    pub evicted: Counter,
    /// Snapshots that retention took away.
    pub expired: Counter,
    /// Namespaces that hold something.
    pub namespaces: Level,
    /// Namespaces that hold nine tenths of their quota or more.
    pub full: Level,
    /// Bytes that a namespace holds.
    pub bytes: Family<ByNamespace, Level>,
    /// Bytes that it may hold.
    pub quota: Family<ByNamespace, Level>,
}

// === impl LimitMetrics ===

impl LimitMetrics {
    /// Registers all of them.
    pub fn register(&self, r: &mut Registry) {
        let Self {
            declined,
            refused,
            evicted,
            expired,
            namespaces,
            full,
            bytes,
            quota,
        } = self.clone();
        let text = "Offers declined because their namespace holds its quota";
        r.register("quota_declined", text, declined);
        let text = "Saves by name and imports refused because their namespace holds its quota";
        r.register("quota_refused", text, refused);
        let text = "Snapshots that made room for others of their namespace";
        r.register("quota_evicted_snapshots", text, evicted);
        let text = "Snapshots that retention took away";
        r.register("expired_snapshots", text, expired);
        r.register("namespaces", "Namespaces that hold something", namespaces);
        let text = "Namespaces that hold nine tenths of their quota or more";
        r.register("namespaces_full", text, full);
        let text = "Bytes that a namespace with limits of its own holds; `other`: all others";
        r.register_with_unit("namespace_used", text, Unit::Bytes, bytes);
        let text = "Bytes that a namespace with limits of its own may hold";
        r.register_with_unit("namespace_quota", text, Unit::Bytes, quota);
    }
}
