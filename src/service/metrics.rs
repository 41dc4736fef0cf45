//! Numbers of the service. All names begin with the registry's prefix (`engram_`).
//!
//! Tokens saved, restored and reused are three counters: *saved* became visible in RAM, *restored*
//! was in the worker's ring, *reused* the worker really went on from.
//!
//! A lookup is one of `engram_lookup_hits_total{tier}`, by the lowest tier that it needs, or of
//! `engram_lookup_misses_total{reason}`. `engram_lookup_tier_misses_total{tier}` counts beside them
//! each tier that was looked into without success: RAM for a hit from disk, every tier for a lookup
//! of what is not stored. It counts none for a lookup that ends for another reason.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::limits::LimitMetrics;
use crate::types::TierKind;

/// A label value from a fixed set of names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Name(pub &'static str);

/// Label `tier`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByTier {
    /// `ram`, `disk`, …
    pub tier: Name,
}

/// Label `reason`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByReason {
    /// Why.
    pub reason: Name,
}

/// Label `type`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByType {
    /// The kind of error.
    pub r#type: Name,
}

/// A whole number that goes up and down.
pub type Level = Gauge<u64, AtomicU64>;

/// Counters and gauges of the service; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Lookups that gave a lease, by the lowest tier that bytes come from.
    pub hits: Family<ByTier, Counter>,
    /// Lookups that gave none.
    pub misses: Family<ByReason, Counter>,
    /// Tiers that a lookup found nothing of use in, whether or not another tier then had it: a hit
    /// from disk missed RAM, a lookup that found nothing stored missed every tier that there is.
    pub tier_misses: Family<ByTier, Counter>,
    /// Lookups not followed although something is stored: below the minimum, or slower than
    /// prefill.
    pub skipped: Family<ByReason, Counter>,
    /// Leases that ended without being used.
    pub unused: Family<ByReason, Counter>,
    /// Tokens of snapshots that became visible beyond what was stored.
    pub saved_tokens: Counter,
    /// Their payload bytes.
    pub saved_bytes: Counter,
    /// Snapshots that became visible.
    pub saved_snapshots: Counter,
    /// Tokens whose state and KV were brought into a worker's ring.
    pub restored_tokens: Counter,
    /// Payload bytes brought into workers' rings.
    pub restored_bytes: Counter,
    /// Tokens that workers did not prefill thanks to a restore.
    pub reused_tokens: Counter,
    /// Saves that came to nothing.
    pub dropped: Family<ByReason, Counter>,
    /// Offers that were not wanted because all is stored.
    pub already_stored: Counter,
    /// Lookups that waited until room in RAM was promised to them.
    pub waited_for_room: Counter,
    /// Payload bytes that went from RAM to disk.
    pub written_bytes: Counter,
    /// Snapshots that became durable.
    pub durable_snapshots: Counter,
    /// Snapshots that were never written because a deeper one of their request came.
    pub superseded: Counter,
    /// Snapshots that wait to be written.
    pub pending_writes: Level,
    /// 1 while the disk has no room, else 0.
    pub disk_full: Level,
    /// 1 where the disk's files bypass the page cache, else 0.
    pub disk_direct: Level,
    /// 1 where io_uring moves their bytes, else 0.
    pub disk_uring: Level,
    /// 1 for what keeps the disk from taking writes, else 0.
    pub disk_trouble: Family<ByReason, Level>,
    /// Writes that failed and are tried again, or were given up.
    pub write_failures: Family<ByReason, Counter>,
    /// Objects that a tier gave up to make room.
    pub evicted: Family<ByTier, Counter>,
    /// Snapshots that were evicted with their last copy.
    pub evicted_snapshots: Counter,
    /// Of quotas and retention.
    pub limits: LimitMetrics,
    /// Objects brought from disk into RAM.
    pub promoted: Counter,
    /// Their payload bytes.
    pub promoted_bytes: Counter,
    /// Bytes on disk that were verified although nobody asked for them.
    pub scrubbed_bytes: Counter,
    /// Objects that could not be read then.
    pub scrub_errors: Counter,
    /// Passes over everything on disk that ended.
    pub scrub_passes: Counter,
    /// When the last one ended, in Unix seconds; 0: never.
    pub scrub_last_pass: Level,
    /// Errors, by type.
    pub errors: Family<ByType, Counter>,
    /// Attached workers.
    pub sessions: Level,
    /// Attaches that were refused.
    pub refused: Family<ByReason, Counter>,
    /// Sessions that ended.
    pub ended: Family<ByReason, Counter>,
    /// Turns that finished.
    pub turns: Counter,
    /// Prompt tokens of finished turns.
    pub prompt_tokens: Counter,
    /// Of them, not prefilled for any reason.
    pub cached_tokens: Counter,
    /// Of them, prefilled.
    pub prefilled_tokens: Counter,
    /// Bytes in use, by tier.
    pub tier_bytes: Family<ByTier, Level>,
    /// Bytes that may be used, by tier.
    pub tier_budget: Family<ByTier, Level>,
    /// Objects, by tier.
    pub tier_objects: Family<ByTier, Level>,
    /// Bytes of the arena in use: the RAM tier, and what is on its way.
    pub arena_bytes: Level,
    /// Files moved to quarantine.
    pub quarantined: Family<ByReason, Level>,
    /// Catalogs that could not be written any more.
    pub catalog_lost: Level,
    /// 1 if the last start was one from the catalog.
    pub catalog_used: Level,
    /// Snapshots that are visible.
    pub snapshots: Level,
    /// Conversations that are known.
    pub conversations: Level,
}

// === impl Name ===

impl EncodeLabelValue for Name {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.encode(encoder)
    }
}

impl From<TierKind> for ByTier {
    fn from(tier: TierKind) -> Self {
        Self {
            tier: Name(tier.as_str()),
        }
    }
}

// === impl Metrics ===

impl Metrics {
    /// Registers all of them.
    pub fn register(registry: &mut Registry) -> Self {
        let it = Self::default();
        let bytes = || Unit::Bytes;
        let Self {
            hits,
            misses,
            tier_misses,
            skipped,
            unused,
            saved_tokens,
            saved_bytes,
            saved_snapshots,
            restored_tokens,
            restored_bytes,
            reused_tokens,
            dropped,
            already_stored,
            waited_for_room,
            written_bytes,
            durable_snapshots,
            superseded,
            pending_writes,
            disk_full,
            disk_direct,
            disk_uring,
            disk_trouble,
            write_failures,
            evicted,
            evicted_snapshots,
            limits,
            promoted,
            promoted_bytes,
            scrubbed_bytes,
            scrub_errors,
            scrub_passes,
            scrub_last_pass,
            errors,
            sessions,
            refused,
            ended,
            turns,
            prompt_tokens,
            cached_tokens,
            prefilled_tokens,
            tier_bytes,
            tier_budget,
            tier_objects,
            arena_bytes,
            quarantined,
            catalog_lost,
            catalog_used,
            snapshots,
            conversations,
        } = it.clone();
        let r = registry;
        limits.register(r);
        r.register(
            "lookup_hits",
            "Lookups that gave a lease, by lowest tier",
            hits,
        );
        r.register(
            "lookup_misses",
            "Lookups that gave no lease, by reason",
            misses,
        );
        r.register(
            "lookup_tier_misses",
            "Lookups that a tier could not serve whole, by tier; another tier may have",
            tier_misses,
        );
        r.register("restores_skipped", "Hits not followed, by reason", skipped);
        r.register(
            "restores_unused",
            "Leases that ended unused, by reason",
            unused,
        );
        r.register("saved_tokens", "Tokens newly stored", saved_tokens);
        r.register_with_unit("saved", "Payload newly stored", bytes(), saved_bytes);
        r.register(
            "saved_snapshots",
            "Snapshots that became visible",
            saved_snapshots,
        );
        r.register(
            "restored_tokens",
            "Tokens brought to workers",
            restored_tokens,
        );
        r.register_with_unit(
            "restored",
            "Payload brought to workers",
            bytes(),
            restored_bytes,
        );
        r.register(
            "reused_tokens",
            "Tokens that workers went on from",
            reused_tokens,
        );
        r.register(
            "saves_dropped",
            "Saves that came to nothing, by reason",
            dropped,
        );
        r.register(
            "saves_already_stored",
            "Offers of what is stored",
            already_stored,
        );
        r.register(
            "lookups_waited_for_room",
            "Lookups that waited for room in RAM",
            waited_for_room,
        );
        r.register_with_unit("written", "Payload written to disk", bytes(), written_bytes);
        r.register(
            "durable_snapshots",
            "Snapshots that became durable",
            durable_snapshots,
        );
        r.register(
            "superseded_snapshots",
            "Snapshots never to be written",
            superseded,
        );
        r.register(
            "pending_writes",
            "Snapshots waiting for the disk",
            pending_writes,
        );
        r.register("disk_full", "1 while the disk has no room", disk_full);
        r.register(
            "disk_direct_io",
            "1 where the disk's files bypass the page cache",
            disk_direct,
        );
        r.register(
            "disk_uring",
            "1 where io_uring moves the bytes of the disk's files",
            disk_uring,
        );
        r.register(
            "disk_trouble",
            "1 for the reason why the disk takes no writes, else 0",
            disk_trouble,
        );
        r.register(
            "write_failures",
            "Failed writes to disk, by reason",
            write_failures,
        );
        r.register(
            "evicted_objects",
            "Objects given up for room, by tier",
            evicted,
        );
        r.register(
            "evicted_snapshots",
            "Snapshots given up for room",
            evicted_snapshots,
        );
        r.register(
            "promoted_objects",
            "Objects brought from disk to RAM",
            promoted,
        );
        r.register_with_unit(
            "promoted",
            "Payload from disk to RAM",
            bytes(),
            promoted_bytes,
        );
        r.register_with_unit(
            "scrubbed",
            "Bytes on disk verified in the background",
            bytes(),
            scrubbed_bytes,
        );
        r.register(
            "scrub_errors",
            "Objects that scrubbing could not read",
            scrub_errors,
        );
        r.register(
            "scrub_passes",
            "Passes of scrubbing over everything on disk that ended",
            scrub_passes,
        );
        r.register_with_unit(
            "scrub_last_pass_timestamp",
            "When the last whole pass of scrubbing ended, in Unix time; 0: never",
            Unit::Seconds,
            scrub_last_pass,
        );
        r.register("errors", "Errors, by type", errors);
        r.register("sessions", "Attached workers", sessions);
        r.register("attach_refused", "Refused attaches, by reason", refused);
        r.register("sessions_ended", "Ended sessions, by reason", ended);
        r.register("turns", "Finished turns", turns);
        r.register(
            "prompt_tokens",
            "Prompt tokens of finished turns",
            prompt_tokens,
        );
        r.register(
            "cached_tokens",
            "Prompt tokens not prefilled",
            cached_tokens,
        );
        r.register(
            "prefilled_tokens",
            "Prompt tokens prefilled",
            prefilled_tokens,
        );
        r.register_with_unit("tier_used", "Bytes in use, by tier", bytes(), tier_bytes);
        r.register_with_unit(
            "tier_budget",
            "Bytes allowed, by tier",
            bytes(),
            tier_budget,
        );
        r.register("tier_objects", "Objects, by tier", tier_objects);
        r.register_with_unit(
            "arena_used",
            "Bytes in use in RAM, those on their way included",
            bytes(),
            arena_bytes,
        );
        r.register(
            "quarantined_files",
            "Files moved to quarantine, by reason",
            quarantined,
        );
        r.register(
            "catalog_lost",
            "Catalogs of the disk that could not be written any more: the next start reads all manifests",
            catalog_lost,
        );
        r.register(
            "catalog_used",
            "1 if the start was one from the catalog, 0 if all manifests were read",
            catalog_used,
        );
        r.register("snapshots", "Visible snapshots", snapshots);
        r.register("conversations", "Known conversations", conversations);
        it
    }

    /// Counts an error.
    pub fn error(&self, kind: &'static str) {
        self.errors
            .get_or_create(&ByType { r#type: Name(kind) })
            .inc();
    }

    /// Counts a tier that could not serve a lookup.
    pub fn tier_missed(&self, tier: TierKind) {
        self.tier_misses.get_or_create(&tier.into()).inc();
    }

    /// Counts a save that came to nothing.
    pub fn drop_save(&self, reason: &'static str) {
        count(&self.dropped, reason);
    }
}

/// Adds one to the counter of a reason.
pub fn count(family: &Family<ByReason, Counter>, reason: &'static str) {
    family
        .get_or_create(&ByReason {
            reason: Name(reason),
        })
        .inc();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_told_with_their_labels() {
        let mut registry = Registry::with_prefix("engram");
        let metrics = Metrics::register(&mut registry);
        count(&metrics.misses, "nothing_stored");
        metrics.hits.get_or_create(&TierKind::Disk.into()).inc_by(2);
        metrics.error("io");
        metrics
            .tier_bytes
            .get_or_create(&TierKind::Ram.into())
            .set(7);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "engram_lookup_misses_total{reason=\"nothing_stored\"} 1",
            "engram_lookup_hits_total{tier=\"disk\"} 2",
            "engram_errors_total{type=\"io\"} 1",
            "engram_tier_used_bytes{tier=\"ram\"} 7",
            "engram_reused_tokens_total 0",
        ] {
            assert!(
                text.lines().any(|other| other == line),
                "{line} is not in\n{text}"
            );
        }
    }
}
