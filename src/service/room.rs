//! Room in RAM: what leaves when something has to come.
//!
//! # Order
//! The index says who goes first. A copy that the disk has too goes at once. What may vanish
//! vanishes: superseded snapshots, KV that no snapshot needs. A last copy is written down first, by
//! the disk thread, and goes when it is asked for again; what waits for the room looks again until
//! then, for as long as it may.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Service;
use super::api::Event;
use super::core::{Core, Removal};
use crate::index::{Action, Removed, Victim};
use crate::store::{PAGE, Segment, Tier};
use crate::types::{ObjectId, ObjectKind, SnapshotId, TierKind};

/// Room in the RAM tier that is spoken for: of what is on its way between a worker, the disk and
/// the tier.
#[derive(Debug)]
pub(super) struct Reservation {
    all: Arc<Mutex<u64>>,
    bytes: u64,
}

// === impl Reservation ===

impl Reservation {
    /// What the room was taken for comes into the tier by `put`, which counts it from then on.
    /// Nobody else can take the room between.
    pub(super) fn spend<T>(rooms: Vec<Self>, put: impl FnOnce() -> T) -> T {
        let Some(all) = rooms.first().map(|room| Arc::clone(&room.all)) else {
            return put();
        };
        let mut all = all.lock();
        let done = put();
        for mut room in rooms {
            *all -= std::mem::take(&mut room.bytes);
        }
        done
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // A spent one is dropped under the lock.
        if self.bytes > 0 {
            *self.all.lock() -= self.bytes;
        }
    }
}

// === impl Service ===

impl Service {
    /// A block for each length, or none at all: then room is on its way, unless nothing can go.
    pub(super) fn allocate(&self, lengths: &[u64]) -> Option<(Vec<Segment>, Reservation)> {
        let need = footprint(lengths.iter().copied());
        let reservation = self.reserve(need).or_else(|| {
            self.make_room(need);
            self.reserve(need)
        })?;
        let all = || {
            lengths
                .iter()
                .map(|len| self.store.arena.alloc(*len))
                .collect()
        };
        let segments: Option<Vec<Segment>> = all();
        let segments = segments.or_else(|| {
            // Free, but in pieces that are too small.
            self.let_go(need);
            all()
        })?;
        Some((segments, reservation))
    }

    /// Whether so many bytes would fit into an empty RAM tier.
    pub(super) fn can_ever_hold(&self, lengths: &[u64]) -> bool {
        footprint(lengths.iter().copied()) <= self.store.ram.usage().budget
    }

    /// Speaks for room in the RAM tier, if it has it.
    pub(super) fn reserve(&self, bytes: u64) -> Option<Reservation> {
        let mut all = self.reserved.lock();
        let usage = self.store.ram.usage();
        let taken = usage.bytes.saturating_add(*all).saturating_add(bytes);
        if taken > usage.budget || self.store.arena.free_bytes() < bytes {
            return None;
        }
        *all += bytes;
        Some(Reservation {
            all: Arc::clone(&self.reserved),
            bytes,
        })
    }

    /// Lets objects leave RAM until `need` bytes fit, as far as some can leave at once; last copies
    /// are sent to the disk thread.
    pub(super) fn make_room(&self, need: u64) {
        let usage = self.store.ram.usage();
        let taken = usage
            .bytes
            .saturating_add(*self.reserved.lock())
            .saturating_add(need);
        let short = taken.saturating_sub(usage.budget);
        let arena = need.saturating_sub(self.store.arena.free_bytes());
        self.let_go(short.max(arena).max(PAGE));
    }

    /// Lets objects of so many bytes leave RAM.
    pub(super) fn let_go(&self, bytes: u64) {
        let now = self.clock.now();
        let mut core = self.core.lock();
        let victims = core.index.victims(TierKind::Ram, bytes, now);
        // RAM goes on without a disk that takes nothing.
        let lost = self.latches.holds(super::DISK_FAILED) || core.queue.trouble.lasts();
        let mut removal = Removal::default();
        let mut freed = Vec::new();
        let mut evicted = Vec::new();
        for victim in victims {
            let forget =
                victim.action == Action::Forget || (victim.action == Action::Demote && lost);
            if victim.action == Action::Drop {
                let _ = core.index.set_tier(&victim.object, TierKind::Ram, false);
                freed.push(victim.object);
            } else if forget {
                let gone = self.forget(&mut core, &victim, TierKind::Ram);
                evicted.extend(gone.snapshots.iter().copied());
                freed.push(victim.object);
                freed.extend(gone.objects.iter().copied());
                removal.objects.extend(gone.objects);
                removal.snapshots.extend(gone.snapshots);
            } else {
                self.demote(&mut core, &victim);
            }
        }
        self.metrics
            .evicted
            .get_or_create(&TierKind::Ram.into())
            .inc_by(freed.len() as u64);
        if self.store.disk.is_some() {
            core.queue.remove(removal);
        }
        self.drop_from_ram(&core, &freed);
        drop(core);
        self.announce_evicted(&evicted);
        self.wake.notify_one();
    }

    /// A victim goes with what only it kept. The index first: from here on nobody finds it.
    pub(super) fn forget(&self, core: &mut Core, victim: &Victim, tier: TierKind) -> Removal {
        match victim.snapshot {
            Some(snapshot) if victim.kind == ObjectKind::State => {
                let instead = core.ancestor(&snapshot, |_, _| true);
                core.keep_tokens(snapshot, instead.map_or(0, |(_, boundary)| boundary));
                let removed = core.index.forget_state(&snapshot);
                core.gone(removed, instead)
            }
            _ => {
                let removed = core.index.set_tier(&victim.object, tier, false);
                core.gone(removed, None)
            }
        }
    }

    /// Objects leave the RAM tier. Under the lock, so that nobody brings one of them back between
    /// its leaving the index and its leaving the tier.
    pub(super) fn drop_from_ram(&self, _: &Core, objects: &[ObjectId]) {
        for object in objects {
            if let Err(error) = self.store.ram.remove(object) {
                tracing::error!(%error, "RAM did not let go of an object");
            }
        }
    }

    /// A last copy is to be written down, with its snapshot if it is a state.
    fn demote(&self, core: &mut Core, victim: &Victim) {
        match victim.snapshot {
            Some(snapshot) => core.queue.push(snapshot, self.clock.monotonic()),
            None if !core.queue.demotions.contains(&victim.object) => {
                core.queue.demotions.push_back(victim.object);
            }
            None => {}
        }
    }

    /// An object's copy on disk is missing or bad. Without another copy its snapshots are gone.
    pub(super) fn lost_on_disk(&self, object: &ObjectId) {
        let mut core = self.core.lock();
        core.keep_tokens_of(object, TierKind::Disk);
        let removed = core.index.set_tier(object, TierKind::Disk, false);
        self.after_loss(core, removed);
    }

    fn after_loss(&self, mut core: parking_lot::MutexGuard<'_, Core>, removed: Removed) {
        let removal = core.gone(removed, None);
        let snapshots = removal.snapshots.clone();
        let objects = removal.objects.clone();
        if self.store.disk.is_some() {
            core.queue.remove(removal);
        }
        self.drop_from_ram(&core, &objects);
        drop(core);
        for snapshot_id in snapshots {
            tracing::warn!(snapshot = %snapshot_id, "Snapshot lost: a part of it is missing or bad");
            self.metrics.error("lost_snapshot");
            self.announce(Event::Removed {
                snapshot_id,
                reason: "lost",
            });
        }
        self.changed.notify_waiters();
        self.wake.notify_one();
    }

    pub(super) fn announce_evicted(&self, snapshots: &[SnapshotId]) {
        for snapshot in snapshots {
            self.metrics.evicted_snapshots.inc();
            self.announce(Event::Removed {
                snapshot_id: *snapshot,
                reason: "evicted",
            });
        }
    }

    /// Keeps some of the RAM tier free, so that offers seldom wait.
    pub(super) fn keep_room(&self) {
        let usage = self.store.ram.usage();
        let part = |part: f64| (usage.budget as f64 * part) as u64;
        if usage.bytes > part(self.config.ram_high) {
            self.let_go(usage.bytes.saturating_sub(part(self.config.ram_low)));
        }
    }
}

/// Bytes of the arena that blocks of these lengths take: whole pages, and one for the header.
pub(super) fn footprint(lengths: impl Iterator<Item = u64>) -> u64 {
    lengths.fold(0, |sum, len| {
        let block = len.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        sum.saturating_add(block).saturating_add(PAGE)
    })
}
