//! Totals of what became of saves and restores, for `/server_info`.

use std::collections::BTreeMap;

use serde::Serialize;

/// How often, by reason.
pub type ByReason = BTreeMap<&'static str, u64>;

/// Totals since the engine's start, over all sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Sessions with a daemon.
    pub sessions: u64,
    /// How they ended.
    pub sessions_ended: ByReason,
    /// States offered.
    pub offered: u64,
    /// Saves that the daemon made visible.
    pub saved: u64,
    /// Offers that the daemon declined.
    pub declined: ByReason,
    /// Saves that came to nothing.
    pub dropped: ByReason,
    /// Questions what is stored.
    pub lookups: u64,
    /// Leases given.
    pub leased: u64,
    /// Questions without a lease.
    pub misses: ByReason,
    /// Restores that reached the device's cache.
    pub restored: u64,
    /// Tokens that they brought beyond what the device had.
    pub restored_tokens: u64,
    /// Tokens of them that a request went on from.
    pub reused_tokens: u64,
    /// Leases that no request went on from.
    pub unused: ByReason,
    /// Deadlines missed, by machine and state.
    pub deadlines: BTreeMap<String, u64>,
    /// Answers that came for what was over.
    pub late: u64,
    /// Answers that cannot be.
    pub garbled: u64,
}

// === impl Counts ===

impl Counts {
    /// One more save that came to nothing.
    pub fn drop_save(&mut self, reason: &'static str) {
        *self.dropped.entry(reason).or_default() += 1;
    }

    /// One more deadline missed.
    pub fn deadline(&mut self, machine: &str, state: &str) {
        let name = format!("{machine}:{state}");
        *self.deadlines.entry(name).or_default() += 1;
    }
}
