//! What keeps snapshots and objects from leaving: uses, leases, pins and promises.

use super::{
    Index, Pin, PinKind, Retain,
    node::Facts,
    slab::{ObjIx, SnapIx},
    snapshot::Snapshot,
};
use crate::types::{Millis, ObjectId, SnapshotId, Tokens};

/// A hold on all objects of one snapshot: while it lasts, no tier lets go of them. It ends by
/// [`release`](Index::release); one that is dropped instead lasts forever.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease lasts until it is released"]
pub struct LeaseToken {
    snapshot: SnapshotId,
    objects: Vec<Leased>,
}

#[derive(Debug, PartialEq, Eq)]
struct Leased {
    id: ObjectId,
    ix: ObjIx,
    serial: u32,
}

// === impl LeaseToken ===

impl LeaseToken {
    /// The snapshot.
    #[must_use]
    pub fn snapshot(&self) -> SnapshotId {
        self.snapshot
    }

    /// The objects: the state first, then all KV on the way to it.
    pub fn objects(&self) -> impl Iterator<Item = ObjectId> {
        self.objects.iter().map(|leased| leased.id)
    }
}

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// Notes a use of a snapshot: of its state, and of all KV on the way to it. Time never goes
    /// back. Says whether the snapshot is known.
    pub fn touch(&mut self, id: &SnapshotId, now: Millis) -> bool {
        let found = self.snapshots.find(*id);
        if let Some(ix) = found {
            self.touch_at(ix, now);
        }
        found.is_some()
    }

    pub(super) fn touch_at(&mut self, ix: SnapIx, now: Millis) {
        for object in self.needs(ix) {
            self.objects.touch(object, now);
        }
    }

    /// The state of a snapshot, then all KV on the way to it, deepest first.
    fn needs(&self, ix: SnapIx) -> Vec<ObjIx> {
        let snapshot = &self.snapshots[ix];
        let kv = self
            .nodes
            .upwards(snapshot.node)
            .flat_map(|node| self.starting_at(node));
        [snapshot.state].into_iter().chain(kv).collect()
    }

    /// Holds all objects of a snapshot; `None` if it is not known.
    pub fn lease(&mut self, id: &SnapshotId) -> Option<LeaseToken> {
        let needs = self.needs(self.snapshots.find(*id)?);
        let objects = needs.into_iter().map(|ix| {
            let object = &mut self.objects[ix];
            object.leases += 1;
            let (id, serial) = (object.id, object.serial);
            if object.leases == 1 {
                // No class of a leased object depends on who needs it.
                self.objects.reclass(ix, Facts::default());
            }
            Leased { id, ix, serial }
        });
        Some(LeaseToken {
            snapshot: *id,
            objects: objects.collect(),
        })
    }

    /// Ends a hold. Objects that were lost meanwhile are passed over.
    pub fn release(&mut self, lease: LeaseToken) {
        for Leased { ix, serial, .. } in lease.objects {
            let Some(object) = self.objects.get_mut(ix, serial) else {
                continue;
            };
            object.leases -= 1;
            if object.leases == 0 {
                self.objects.reclass(ix, self.facts(ix));
            }
        }
    }

    /// Pins a snapshot; says whether it is known.
    pub fn pin(&mut self, id: &SnapshotId, pin: Pin) -> bool {
        let Some(ix) = self.snapshots.find(*id) else {
            return false;
        };
        match pin {
            Pin::Named => self.change(ix, |snapshot| {
                snapshot.names = snapshot.names.saturating_add(1);
            }),
            Pin::Until(until) => {
                let later = self.snapshots[ix].until.max(Some(until));
                self.set_until(ix, later);
            }
        }
        true
    }

    /// Takes a pin away: the timed one, or one of the named. Says whether there was one.
    pub fn unpin(&mut self, id: &SnapshotId, kind: PinKind) -> bool {
        let Some(ix) = self.snapshots.find(*id) else {
            return false;
        };
        let snapshot = &self.snapshots[ix];
        match kind {
            PinKind::Named if snapshot.names > 0 => {
                self.change(ix, |snapshot| snapshot.names -= 1);
            }
            PinKind::Timed if snapshot.until.is_some() => self.set_until(ix, None),
            _ => return false,
        }
        true
    }

    /// Ends the timed pins that are over at `now`; says how many.
    pub fn expire_pins(&mut self, now: Millis) -> usize {
        let mut expired = 0;
        while let Some((until, ix)) = self.timed.first().copied()
            && until <= now
        {
            self.set_until(ix, None);
            expired += 1;
        }
        expired
    }

    fn set_until(&mut self, ix: SnapIx, until: Option<Millis>) {
        if let Some(old) = self.snapshots[ix].until {
            self.timed.remove(&(old, ix));
        }
        if let Some(new) = until {
            self.timed.insert((new, ix));
        }
        self.change(ix, |snapshot| snapshot.until = until);
    }

    /// Says what may become of the last copies of a snapshot; whether it is known.
    pub fn set_retain(&mut self, id: &SnapshotId, retain: Retain) -> bool {
        let found = self.snapshots.find(*id);
        if let Some(ix) = found {
            self.change(ix, |snapshot| snapshot.retain = retain);
        }
        found.is_some()
    }

    /// Notes that the manifest of a snapshot is committed, or is no more; whether it is known.
    pub fn set_durable(&mut self, id: &SnapshotId, durable: bool) -> bool {
        let found = self.snapshots.find(*id);
        if let Some(ix) = found {
            self.change(ix, |snapshot| snapshot.durable = durable);
        }
        found.is_some()
    }

    /// Changes a snapshot, and with it what may become of the objects that it needs.
    fn change(&mut self, ix: SnapIx, change: impl FnOnce(&mut Snapshot)) {
        let snapshot = &mut self.snapshots[ix];
        let before = snapshot.facts();
        change(snapshot);
        let (after, node, state) = (snapshot.facts(), snapshot.node, snapshot.state);
        if before != after {
            self.recount(node, before, after);
            self.objects.reclass(state, after);
        }
    }
}
