//! What one namespace may hold: a quota, and retention.
//!
//! # What
//! Bytes are payload: states and KV of all shards and all models of the namespace, each object once,
//! in whatever tiers it has copies and however many snapshots share it. Namespaces share no object,
//! so the sums of all namespaces are the sum of all objects.
//!
//! The *quota* is hard: nothing becomes visible that would go beyond it. What comes makes room
//! first, at the cost of its own namespace alone: KV that no snapshot needs, then the least recently
//! used of its snapshots. *Retention* takes away in the background what is too many, too much, or
//! was not used for too long, in the same order.
//!
//! # Never
//! Neither takes a snapshot that is named by a branch, pinned, leased or promised, nor one that is
//! not durable yet, where there is a disk: its last copy would be lost. A turn is no pin: it falls
//! back to the snapshot before it.
//!
//! # Errors
//! An offer that finds no room is declined and counted; a save by name, and an import, get
//! [`ServiceError::Quota`](super::ServiceError::Quota), for good if it alone is larger than the
//! quota.

mod config;
mod metrics;
mod quota;
mod retention;

use std::collections::HashMap;

pub use config::{Limits, NamespaceLimits};
pub use metrics::LimitMetrics;
pub use quota::NamespaceRow;
pub(super) use quota::Over;

use crate::types::{Namespace, NamespaceId};

/// The limits of one namespace.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Limit {
    pub quota: Option<u64>,
    pub keep_snapshots: Option<u64>,
    pub keep_bytes: Option<u64>,
    pub keep_for: Option<std::time::Duration>,
}

/// The limits of all namespaces.
#[derive(Debug, Default)]
pub(super) struct Rules {
    default: Limit,
    own: HashMap<NamespaceId, (String, Limit)>,
}

// === impl Rules ===

impl Rules {
    pub(super) fn new(limits: &Limits) -> Self {
        let own = limits.namespaces.iter();
        Self {
            default: limits.all(),
            own: own
                .map(|it| (it.id(), (it.name.clone(), it.limit())))
                .collect(),
        }
    }

    /// The limits of a namespace.
    pub(super) fn of(&self, namespace: &NamespaceId) -> Limit {
        let own = self.own.get(namespace);
        own.map_or(self.default, |(_, limit)| *limit)
    }

    /// The name of a namespace in the configuration.
    pub(super) fn name(&self, namespace: &NamespaceId) -> Option<&str> {
        Some(self.own.get(namespace)?.0.as_str())
    }

    /// The namespaces that have limits of their own, with their names.
    pub(super) fn named(&self) -> impl Iterator<Item = (&NamespaceId, &str)> {
        self.own.iter().map(|(id, (name, _))| (id, name.as_str()))
    }

    fn any_quota(&self) -> bool {
        let mut own = self.own.values();
        self.default.quota.is_some() || own.any(|(_, limit)| limit.quota.is_some())
    }

    /// Whether anything is ever taken away in the background.
    fn any_retention(&self) -> bool {
        let retains = |limit: &Limit| {
            limit.keep_snapshots.is_some() || limit.keep_bytes.is_some() || limit.keep_for.is_some()
        };
        retains(&self.default) || self.own.values().any(|(_, limit)| retains(limit))
    }
}

/// A namespace for people: its tenant, or that it has none, and the rest where there is more.
fn told(namespace: &Namespace) -> String {
    let Namespace {
        tenant,
        extra_key,
        cache_salt,
        adapter,
    } = namespace;
    let mut text = match tenant {
        Some(tenant) => format!("tenant `{tenant}`"),
        None => "the namespace without a tenant".to_owned(),
    };
    if extra_key.is_some() || cache_salt.is_some() || adapter.is_some() {
        let id = namespace.id().to_string();
        text.push_str(&format!(" (namespace {}…)", id.get(..16).unwrap_or(&id)));
    }
    text
}
