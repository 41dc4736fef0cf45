//! The disk thread: the only one that changes what is on disk.
//!
//! # What
//! Removals first, then objects that have to leave RAM, then snapshots that are due, oldest first;
//! and the conversations that changed. One thread, so that no two of these ever meet: what is being
//! written is not removed at the same time, and a manifest never goes after its objects.
//!
//! # Errors
//! A failed write is tried again, later and later, and told once a minute; who waits for it hears
//! of a disk that takes nothing at once, and of one that fails after three attempts. While the service
//! ends, what such a disk refuses is given up. As long as it does, last copies may leave RAM. After a
//! failed fsync the disk takes nothing more: the service is not ready any longer, and serves from RAM
//! and disk as before. What cannot be removed is tried again; a manifest that stays keeps its objects.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Service;
use super::core::{Model, Removal};
use crate::index::{Action, Hit};
use crate::store::{self, StoreError, Stored, Tier};
use crate::types::TierKind;

/// The longest sleep; levels of tiers are told as often.
const NAP: Duration = Duration::from_millis(500);

/// Between two pieces of the token log that are verified.
const VERIFY_PAUSE: Duration = Duration::from_millis(1);

/// Between two attempts to remove what could not be removed.
const REMOVE_AGAIN: Duration = Duration::from_secs(10);

/// Between two looks at what was said without a state, while the disk is full.
const TRIM_AGAIN: Duration = Duration::from_secs(1);
/// Conversations that come between two such looks at least, where they come faster.
const TRIM_MORE: usize = 16;

/// Most of the disk's budget that is kept free.
const MAX_SLACK: u64 = 256 << 20;

/// States that leave RAM at once when the disk is full of their KV.
const UNWRITTEN_AT_ONCE: u32 = 16;

/// Bytes that a manifest and the names of a snapshot may take.
const SMALL_FILES: u64 = 64 << 10;

/// Wakes the disk thread.
#[derive(Debug, Default)]
pub struct Bell {
    rung: Mutex<bool>,
    cond: Condvar,
}

// === impl Bell ===

impl Bell {
    /// There is something to do.
    pub fn notify_one(&self) {
        *self.rung.lock() = true;
        self.cond.notify_one();
    }

    /// Waits until it rings, or for so long.
    fn wait(&self, at_most: Duration) {
        let mut rung = self.rung.lock();
        if !*rung {
            self.cond.wait_for(&mut rung, at_most);
        }
        *rung = false;
    }
}

/// Starts the thread. It ends with the service.
pub(super) fn start(service: &Arc<Service>) -> std::io::Result<()> {
    let bell = Arc::clone(&service.wake);
    let service = Arc::downgrade(service);
    let thread = std::thread::Builder::new().name("engram-disk".to_owned());
    thread.spawn(move || run(&bell, &service))?;
    Ok(())
}

fn run(bell: &Bell, service: &Weak<Service>) {
    let mut pause = Duration::ZERO;
    loop {
        bell.wait(pause);
        let Some(service) = service.upgrade() else {
            return;
        };
        if !service.is_loaded() {
            pause = NAP;
            continue;
        }
        pause = service.move_things();
    }
}

// === impl Service ===

impl Service {
    /// Does one round of everything that is to be done. Returns how long nothing is due.
    pub(super) fn move_things(&self) -> Duration {
        if self.retain() && !self.core.lock().queue.refs_failed {
            // What was said is in the record before the state that held it is gone.
            self.write_refs();
        }
        self.remove_things();
        self.remove_again();
        self.give_tokens_back();
        self.made_room();
        self.keep_disk_room();
        self.demote_things();
        self.remove_things();
        let now = self.clock.monotonic();
        // A snapshot that fails again and again keeps no conversation from the disk, nor the other
        // way round.
        if !self.core.lock().queue.refs_failed {
            self.write_refs();
        }
        let due = self.core.lock().queue.pop(now);
        if let Some(snapshot) = due {
            self.write_down(snapshot);
        }
        self.write_refs();
        self.look_at_disk();
        self.refresh_levels();
        self.changed.notify_waiters();
        if self.verify_some() {
            return VERIFY_PAUSE;
        }
        let core = self.core.lock();
        if !core.queue.removals.is_empty() || !core.queue.demotions.is_empty() {
            return Duration::ZERO;
        }
        let next = core.queue.next_at().map(|at| {
            let now = self.clock.monotonic();
            let not_before = core.queue.not_before.saturating_sub(now);
            if core.queue.draining {
                not_before
            } else {
                at.saturating_sub(now)
            }
        });
        next.unwrap_or(NAP).min(NAP)
    }

    /// Takes off the disk what is to go: manifests first.
    fn remove_things(&self) {
        loop {
            let Some(removal) = self.core.lock().queue.removals.pop_front() else {
                return;
            };
            self.remove_now(&removal);
            self.core.lock().queue.done += 1;
            self.changed.notify_waiters();
        }
    }

    /// Tokens become holes once no row of the catalog names them.
    fn give_tokens_back(&self) {
        let mut core = self.core.lock();
        if core.queue.removals.is_empty() {
            core.index.log_mut().give_back();
        }
        drop(core);
        if let Some(manifests) = &self.store.manifests {
            manifests.tidy();
        }
    }

    /// Tries once more, now and then, what could not be removed.
    fn remove_again(&self) {
        let Some(disk) = &self.store.disk else { return };
        let stuck = {
            let mut core = self.core.lock();
            let now = self.clock.monotonic();
            if core.queue.trouble.stuck().is_none() || now < core.queue.remove_after {
                return;
            }
            core.queue.remove_after = now.saturating_add(REMOVE_AGAIN);
            std::mem::take(&mut core.queue.stuck)
        };
        for removal in &stuck {
            self.remove_now(removal);
        }
        match disk.remove_stuck() {
            Err(error) => self.disk_failed("remove", &error),
            Ok(()) if self.core.lock().queue.stuck.is_empty() => self.all_removed(),
            Ok(()) => {}
        }
    }

    /// As [`Self::remove_things`], one removal.
    pub(super) fn remove_now(&self, removal: &Removal) {
        let Removal { snapshots, objects } = removal;
        let mut named = false;
        if let Some(manifests) = &self.store.manifests {
            for snapshot in snapshots {
                if let Err(error) = manifests.remove(snapshot) {
                    self.disk_failed("remove", &error);
                    named = true;
                }
            }
        }
        if named {
            // A manifest that stays may name any of them on disk. In RAM nobody would find them.
            let mut core = self.core.lock();
            for object in objects {
                if core.index.object(object).is_none() {
                    self.drop_from_ram(&core, std::slice::from_ref(object));
                }
            }
            core.queue.stuck.push_back(removal.clone());
            return;
        }
        for object in objects {
            // Somebody may have saved the same prefix again: then it is known again, and stays.
            let mut core = self.core.lock();
            let known = core.index.object(object);
            if known.is_some_and(|info| info.tiers.contains(TierKind::Disk)) {
                continue;
            }
            if known.is_none() {
                self.drop_from_ram(&core, std::slice::from_ref(object));
            }
            core.unnamed.remove(object);
            drop(core);
            if let Some(disk) = &self.store.disk
                && let Err(error) = disk.remove(object)
            {
                self.disk_failed("remove", &error);
            }
        }
    }

    /// Writes objects down whose last copy has to leave RAM.
    fn demote_things(&self) {
        loop {
            let (object, model) = {
                let mut core = self.core.lock();
                if self.clock.monotonic() < core.queue.not_before {
                    return;
                }
                let Some(id) = core.queue.demotions.pop_front() else {
                    return;
                };
                let known = core.index.object(&id);
                if known.is_none_or(|info| info.tiers.contains(TierKind::Disk)) {
                    continue;
                }
                let object = self.store.ram.peek(&id);
                let fingerprint = object.as_ref().map(|object| object.meta.fingerprint);
                let model = fingerprint.and_then(|fingerprint| core.model(&fingerprint));
                (object, model)
            };
            let Some((object, model)) = object.zip(model) else {
                continue;
            };
            match self.write_demoted(&object, &model) {
                Ok(_) => self.made_room(),
                Err(error) => {
                    self.write_failed(&error);
                    return;
                }
            }
        }
    }

    fn write_demoted(&self, object: &store::Object, model: &Model) -> Result<u64, StoreError> {
        if let Some(disk) = &self.store.disk {
            disk.register_model(model.fingerprint, &model.geometry, model.description())?;
        }
        self.write_object(object)
    }

    /// Last copies became spare ones: let some go if RAM is full. Not while the service ends: what
    /// had to be written first would come back for as long as the disk does not take it.
    pub(super) fn made_room(&self) {
        if !self.core.lock().queue.draining {
            self.keep_room();
        }
    }

    /// Writes one object, making room on disk if need be. Returns the payload bytes written.
    pub(super) fn write_object(&self, object: &store::Object) -> Result<u64, StoreError> {
        let Some(disk) = &self.store.disk else {
            return Ok(0);
        };
        let mut tried = 0;
        let stored = loop {
            match disk.put(object) {
                Err(StoreError::NoSpace { need, .. }) if need > disk.usage().budget => {
                    return Err(StoreError::TooLarge {
                        tier: TierKind::Disk,
                        need,
                        budget: disk.usage().budget,
                    });
                }
                Err(error) if tried < 3 && self.make_room_on_disk(&error) => tried += 1,
                stored => break stored?,
            }
        };
        let id = &object.meta.id;
        let mut core = self.core.lock();
        if core.index.object(id).is_none() {
            drop(core);
            // It went while it was written.
            disk.remove(id)?;
            return Ok(0);
        }
        let _ = core.index.set_tier(id, TierKind::Disk, true);
        core.unnamed.insert(*id);
        drop(core);
        match stored {
            Stored::Written { .. } => {
                self.metrics.written_bytes.inc_by(object.bytes());
                Ok(object.bytes())
            }
            Stored::AlreadyThere => Ok(0),
        }
    }

    /// Lets others leave the disk for what it refused. Says whether it is worth another try.
    pub(super) fn make_room_on_disk(&self, error: &StoreError) -> bool {
        let Some(disk) = &self.store.disk else {
            return false;
        };
        match error {
            StoreError::NoSpace { need, free, .. } => {
                self.evict_from_disk(need.saturating_sub(*free)) > 0
            }
            StoreError::Floor {
                need,
                available,
                min_free,
                ..
            } => {
                let short = need.saturating_add(*min_free).saturating_sub(*available);
                // What others fill, giving up all of ours would not free. Where it would, the small
                // files that follow an object find room, too.
                short <= disk.usage().bytes
                    && self.evict_from_disk(short.saturating_add(SMALL_FILES)) > 0
            }
            _ => false,
        }
    }

    /// Keeps a little of the disk's budget free: for the tokens of snapshots that are only in RAM,
    /// and for small files, so that those who write them need not wait.
    pub(super) fn keep_disk_room(&self) {
        let Some(disk) = &self.store.disk else {
            return;
        };
        if self.floor_changed.swap(false, Ordering::AcqRel) {
            self.keep_floor();
        }
        let usage = disk.usage();
        let slack = (usage.budget / 32).min(MAX_SLACK);
        let over = usage
            .bytes
            .saturating_add(slack)
            .saturating_sub(usage.budget);
        if over > 0 {
            // Only a part of it, as little as that of the slack, is for what was said without a state.
            let now = self.clock.monotonic();
            let mut core = self.core.lock();
            if now >= core.queue.trim_after || core.conversations.len() >= core.queue.trim_at {
                core.queue.trim_after = now.saturating_add(TRIM_AGAIN);
                core.conversations.trim_bytes(slack);
                // Each look sorts all: it comes again when there are some more of them.
                let count = core.conversations.len();
                core.queue.trim_at = count + (count / 16).max(TRIM_MORE);
            }
        }
        if over > 0 && self.evict_from_disk(over) == 0 && usage.bytes > usage.budget {
            // All of it is to stay. What is in RAM must be found all the same.
            let moved = self.core.lock().index.log_mut().go_on_in_memory();
            if let Err(error) = moved {
                tracing::warn!(%error, "The token log cannot go on in memory");
            }
        }
    }

    /// More of the file system is to stay free than before: what is too much goes now, if that is
    /// enough. What others fill, giving up all of ours would not free.
    fn keep_floor(&self) {
        let short = self.store.disk_below_floor();
        let held = self
            .store
            .disk
            .as_ref()
            .map_or(0, |disk| disk.usage().bytes);
        if (1..=held).contains(&short) {
            self.evict_from_disk(short);
        }
    }

    /// Lets the least recently used go from disk: the snapshot from the index, its manifest, its
    /// objects. Returns how many objects went.
    pub(super) fn evict_from_disk(&self, bytes: u64) -> usize {
        let gone = self.evict_named(bytes);
        if gone == 0 && self.forget_unwritten() {
            return self.evict_named(bytes);
        }
        gone
    }

    /// The disk may be full of KV whose states could not follow: no manifest names it, so nothing of
    /// it would ever leave. The least recently used of those states go from RAM. Says whether some
    /// did.
    fn forget_unwritten(&self) -> bool {
        let now = self.clock.now();
        let mut removal = Removal::default();
        let mut core = self.core.lock();
        let victims = core.index.victims(TierKind::Ram, u64::MAX, now);
        let mut left = UNWRITTEN_AT_ONCE;
        for victim in victims {
            if left == 0 {
                break;
            }
            let Some(snapshot) = victim.snapshot.filter(|_| victim.action != Action::Drop) else {
                continue;
            };
            let hit = core.index.hit(&snapshot);
            let unnamed = |hit: Hit| hit.kv.iter().any(|kv| core.unnamed.contains(&kv.object));
            if !hit.is_some_and(unnamed) {
                continue;
            }
            left -= 1;
            let gone = self.forget(&mut core, &victim, TierKind::Ram);
            removal.snapshots.extend(gone.snapshots);
            removal.objects.extend(gone.objects);
        }
        self.drop_from_ram(&core, &removal.objects);
        drop(core);
        self.announce_evicted(&removal.snapshots);
        self.remove_now(&removal);
        left < UNWRITTEN_AT_ONCE
    }

    fn evict_named(&self, bytes: u64) -> usize {
        let now = self.clock.now();
        let mut removal = Removal::default();
        {
            let mut core = self.core.lock();
            for victim in core.index.victims(TierKind::Disk, bytes, now) {
                let gone = self.forget(&mut core, &victim, TierKind::Disk);
                removal.snapshots.extend(gone.snapshots);
                removal.objects.extend(gone.objects);
                if !removal.objects.contains(&victim.object) {
                    removal.objects.push(victim.object);
                }
            }
        }
        let count = removal.objects.len();
        self.metrics
            .evicted
            .get_or_create(&TierKind::Disk.into())
            .inc_by(count as u64);
        self.announce_evicted(&removal.snapshots);
        self.remove_now(&removal);
        count
    }
}
