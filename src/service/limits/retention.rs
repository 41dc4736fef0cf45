//! What goes in the background: too many, too much, or not used for too long.
//!
//! The least recently used goes. One that a restore or a request on its way keeps for a time stays until
//! that is over, and no newer one goes in its place.

use super::super::Service;
use super::super::core::{Core, Removal};
use super::Limit;
use crate::types::{Millis, NamespaceId, SnapshotId};

/// Snapshots that go under one hold of the lock.
const AT_ONCE: usize = 64;

// === impl Service ===

impl Service {
    /// Looks after every namespace, if it is time; whether anything went. Called by the disk thread.
    pub(in crate::service) fn retain(&self) -> bool {
        let due = || self.clock.monotonic() >= *self.retain_at.lock();
        if !self.rules.any_retention() || !due() {
            return false;
        }
        let next = self.clock.monotonic();
        let next = next.saturating_add(self.config.limits.check_every);
        let now = self.clock.now();
        let all: Vec<NamespaceId> = {
            let core = self.core.lock();
            core.index.namespaces().map(|(id, _)| id).collect()
        };
        let mut any = false;
        for namespace in all {
            let limit = self.rules.of(&namespace);
            loop {
                let taken = self.retain_some(&namespace, limit, now);
                any |= taken > 0;
                if taken < AT_ONCE {
                    break;
                }
            }
        }
        *self.retain_at.lock() = next;
        any
    }

    /// Takes some of what a namespace is not to keep; says how many.
    fn retain_some(&self, namespace: &NamespaceId, limit: Limit, now: Millis) -> usize {
        let mut core = self.core.lock();
        let spare = self.spare_of(&mut core, namespace, AT_ONCE);
        let waiting = core.index.kept_for_a_time(namespace);
        let mut removal = Removal::default();
        let mut taken = 0;
        for id in spare {
            if !is_beyond(&core, namespace, (limit, &waiting), &id, now) {
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

/// Whether the least recently used snapshot of a namespace that may go is one too many, also when those
/// before it that wait for the end of a pin are gone.
fn is_beyond(
    core: &Core,
    namespace: &NamespaceId,
    (limit, waiting): (Limit, &[(Millis, u64)]),
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
    let Some(used) = core.index.snapshot(id).map(|info| info.last_use) else {
        return false;
    };
    let before = waiting.iter().take_while(|(other, _)| *other <= used);
    let (count, bytes) = before.fold((0_u64, 0_u64), |(count, all), (_, bytes)| {
        (count + 1, all.saturating_add(*bytes))
    });
    keep_snapshots.is_some_and(|most| usage.snapshots.saturating_sub(count) > most)
        || keep_bytes.is_some_and(|most| usage.bytes.saturating_sub(bytes) > most)
        || keep_for.is_some_and(|time| now.since(used) >= time)
}
