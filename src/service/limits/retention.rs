//! What goes in the background: too many, too much, or not used for too long.

use super::super::Service;
use super::super::core::{Core, Removal};
use super::Limit;
use crate::types::{Millis, NamespaceId, SnapshotId};

/// Snapshots that go under one hold of the lock.
const AT_ONCE: usize = 256;

// === impl Service ===

impl Service {
    /// Looks after every namespace, if it is time. Called by the disk thread.
    pub(in crate::service) fn retain(&self) {
        let due = || self.clock.monotonic() >= *self.retain_at.lock();
        if !self.rules.any_retention() || !due() {
            return;
        }
        let next = self.clock.monotonic();
        let next = next.saturating_add(self.config.limits.check_every);
        let now = self.clock.now();
        let all: Vec<NamespaceId> = {
            let core = self.core.lock();
            core.index.namespaces().map(|(id, _)| id).collect()
        };
        for namespace in all {
            let limit = self.rules.of(&namespace);
            while self.retain_some(&namespace, limit, now) == AT_ONCE {}
        }
        *self.retain_at.lock() = next;
    }

    /// Takes some of what a namespace is not to keep; says how many.
    fn retain_some(&self, namespace: &NamespaceId, limit: Limit, now: Millis) -> usize {
        let mut core = self.core.lock();
        let spare = self.spare_of(&mut core, namespace, AT_ONCE);
        let mut removal = Removal::default();
        let mut taken = 0;
        for id in spare {
            if !is_beyond(&core, namespace, limit, &id, now) {
                break;
            }
            removal.append(Self::take_away(&mut core, &id));
            taken += 1;
        }
        let gone = self.let_removed_go(&mut core, removal);
        drop(core);
        self.metrics.limits.expired.inc_by(gone.len() as u64);
        self.announce_gone(&gone, "expired");
        taken
    }
}

/// Whether the least recently used snapshot of a namespace is one too many.
fn is_beyond(
    core: &Core,
    namespace: &NamespaceId,
    limit: Limit,
    id: &SnapshotId,
    now: Millis,
) -> bool {
    let Limit {
        quota: _,
        keep_snapshots,
        keep_bytes,
        keep_for,
    } = limit;
    let usage = core.index.usage_of(namespace);
    let old = |time| {
        let used = core.index.snapshot(id).map(|info| info.last_use);
        used.is_some_and(|used| now.since(used) >= time)
    };
    keep_snapshots.is_some_and(|most| usage.snapshots > most)
        || keep_bytes.is_some_and(|most| usage.bytes > most)
        || keep_for.is_some_and(old)
}
