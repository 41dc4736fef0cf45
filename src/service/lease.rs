//! Leases: a snapshot that stays while somebody restores it, and the room in RAM for that.

use std::collections::HashMap;
use std::sync::Arc;

use super::Service;
use super::core::{Core, Model};
use super::promises::{Answer, Promise, Ticket};
use super::room::footprint;
use crate::index::{Hit, LeaseToken, TreeKey};
use crate::store::{Object, Tier, pieces};
use crate::types::{ObjectId, ObjectKind, SnapshotId, TokenId, TokenRange};

/// A hold on a snapshot, with room for what has to come into RAM. It ends by
/// [`Service::release`].
#[derive(Debug)]
#[must_use = "a lease lasts until it is released"]
pub(super) struct Lease {
    pub(super) token: LeaseToken,
    promise: Promise,
}

/// What is looked for.
#[derive(Copy, Clone, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) key: &'a TreeKey,
    pub(super) model: &'a Model,
    pub(super) tokens: &'a [TokenId],
    /// The deepest boundary that is of use.
    pub(super) max_boundary: u32,
    /// Tokens whose KV is not needed.
    pub(super) device_kv: u32,
    /// A place in the line for room.
    pub(super) ticket: Option<Ticket>,
}

/// A hit, with everything that the lock was needed for.
#[derive(Debug)]
pub(super) struct Leased {
    pub(super) hit: Hit,
    pub(super) lease: Lease,
    /// Objects that are in RAM.
    pub(super) there: HashMap<ObjectId, Object>,
}

/// Why there is no lease.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum NoLease {
    /// Nothing is stored.
    Nothing,
    /// Nothing that is of use.
    Useless,
    /// Others have the room in RAM.
    Later,
    /// RAM is full of what is pinned.
    NoRoom,
    /// RAM is too small.
    TooLarge,
}

// === impl Service ===

impl Service {
    /// The deepest restorable snapshot, held, if `fits` says so.
    pub(super) fn lease(
        &self,
        wanted: &Wanted<'_>,
        fits: impl FnOnce(&Hit, &mut Core) -> bool,
    ) -> Result<Leased, NoLease> {
        let Wanted {
            key,
            model,
            tokens,
            max_boundary,
            device_kv,
            ticket,
        } = *wanted;
        let mut core = self.core.lock();
        let hit = core.index.lookup(key, tokens, max_boundary);
        let hit = hit.ok_or(NoLease::Nothing)?;
        if !fits(&hit, &mut core) {
            return Err(NoLease::Useless);
        }
        let token = core.index.lease(&hit.snapshot).ok_or(NoLease::Nothing)?;
        let there: HashMap<ObjectId, Object> = token
            .objects()
            .filter_map(|id| Some((id, self.store.ram.peek(&id)?)))
            .collect();
        // What the device has does not come into RAM; but what is there stays there.
        let mut needs: HashMap<ObjectId, u64> = there
            .iter()
            .map(|(id, object)| (*id, object.footprint()))
            .collect();
        let moved = TokenRange {
            start: device_kv.min(hit.boundary),
            end: hit.boundary,
        };
        let state = (hit.state, ObjectKind::State, TokenRange::at(hit.boundary));
        let kv = hit.kv.iter();
        let kv = kv.filter(|kv| kv.range.overlap(moved).is_some());
        let kv = kv.map(|kv| (kv.object, ObjectKind::Kv, kv.object_range));
        for (id, kind, range) in std::iter::once(state).chain(kv) {
            needs
                .entry(id)
                .or_insert_with(|| room_of(model, kind, range));
        }
        let lease = self.with_room(&mut core, token, needs, ticket)?;
        core.index.touch(&hit.snapshot, self.clock.now());
        Ok(Leased { hit, lease, there })
    }

    /// A snapshot, held, with room for all of it.
    pub(super) fn lease_by_id(
        &self,
        core: &mut Core,
        id: &SnapshotId,
        ticket: Option<Ticket>,
    ) -> Result<Lease, NoLease> {
        let record = core.records.get(id).ok_or(NoLease::Nothing)?;
        let model = Arc::clone(&record.model);
        let token = core.index.lease(id).ok_or(NoLease::Nothing)?;
        let needs = token
            .objects()
            .filter_map(|id| Some((id, core.index.object(&id)?)))
            .map(|(id, info)| (id, room_of(&model, info.kind, info.range)))
            .collect();
        self.with_room(core, token, needs, ticket)
    }

    /// The lease, once its room is promised; without that the snapshot is let go.
    fn with_room(
        &self,
        core: &mut Core,
        token: LeaseToken,
        needs: HashMap<ObjectId, u64>,
        ticket: Option<Ticket>,
    ) -> Result<Lease, NoLease> {
        let needs: Vec<_> = needs.into_iter().collect();
        let budget = self.store.ram.usage().budget;
        let why = match core.promises.ask(&needs, budget, ticket, self.clock.now()) {
            Answer::Yes(promise) => return Ok(Lease { token, promise }),
            Answer::Later => NoLease::Later,
            Answer::Never => NoLease::NoRoom,
            Answer::TooLarge => NoLease::TooLarge,
        };
        core.index.release(token);
        Err(why)
    }

    /// Ends a lease.
    pub(super) fn release(&self, lease: Lease) {
        let mut core = self.core.lock();
        let Lease { token, promise } = lease;
        let awaited = core.promises.give_back(promise);
        let removal = core.release(token);
        self.drop_from_ram(&core, &removal.objects);
        if self.store.disk.is_some() {
            core.queue.remove(removal);
        }
        drop(core);
        if awaited {
            self.room_freed.notify_waiters();
        }
    }

    /// Somebody does not wait for room any more.
    pub(super) fn leave_line(&self, ticket: Ticket) {
        if self.core.lock().promises.leave_line(ticket) {
            self.room_freed.notify_waiters();
        }
    }

    /// What a lease brought into RAM stays there, for as long as the snapshot is pinned.
    pub(super) fn pin_room(core: &mut Core, lease: &Lease, until: crate::types::Millis) {
        let snapshot = lease.token.snapshot();
        core.promises.pin(snapshot, until, &lease.promise);
    }
}

/// Bytes of the arena that an object takes, with the shards of all ranks.
fn room_of(model: &Model, kind: ObjectKind, range: TokenRange) -> u64 {
    let pieces = pieces(&model.geometry, kind, range);
    let shard = footprint(pieces.iter().map(|piece| piece.bytes));
    shard.saturating_mul(u64::from(model.shards))
}
