//! A worker's leases: from the grant of a hit to their end.
//!
//! # What
//! The worker asks for runs of pieces. A piece is filled as soon as its object is in RAM, whatever
//! becomes of its run; objects whose tokens the device has are not touched.
//!
//! # Cancellation
//! A lease ends by the worker's release, by a deadline, by an epoch, by the loss of an object, or
//! with the session. Copies under way hold their own blocks; fills that wait for their object are
//! answered.

use std::collections::HashMap;
use std::time::Duration;

use super::copies::{Copy, What};
use super::{Ended, Session, stand_still};
use crate::device::DeviceError;
use crate::proto::channel::layout::{Outcome, RevokeReason, Status};
use crate::proto::channel::msg::{Fill, Filled, Release, Revoke};
use crate::proto::channel::run::{Run, places};
use crate::service::api::Event as Announcement;
use crate::service::hold::Point;
use crate::service::lease::Lease;
use crate::service::promote::PromoteError;
use crate::service::restore_state::RestoreState;
use crate::store::Object;
use crate::types::{ObjectId, SnapshotId, TierKind, TokenRange};

/// Fills of one lease that may wait for their object.
const MAX_WAITING: usize = 1 << 14;

/// One lease.
#[derive(Debug)]
pub(super) struct Restore {
    pub(super) state: RestoreState,
    pub(super) snapshot: SnapshotId,
    pub(super) held: Lease,
    pub(super) boundary: u32,
    /// Boundary that the device had anyway.
    pub(super) device_boundary: u32,
    pub(super) tier: TierKind,
    /// Objects needed, as far as they are in RAM.
    pub(super) objects: HashMap<ObjectId, Slot>,
    /// The state first, then KV pieces in the order told.
    pub(super) parts: Vec<Part>,
    /// Pieces that were asked for and whose object is not in RAM.
    pub(super) waiting: Vec<Asked>,
    /// Copies under way.
    pub(super) copying: usize,
    /// When the worker last did something about it.
    pub(super) active: Duration,
}

/// One piece that the worker asked for.
#[derive(Copy, Clone, Debug)]
pub(super) struct Asked {
    /// The piece in the list of parts.
    part: usize,
    ring_offset: u64,
}

#[derive(Debug)]
pub(super) enum Slot {
    There(Object),
    Coming,
    Failed(Status),
}

#[derive(Debug)]
pub(super) struct Part {
    pub(super) object: ObjectId,
    /// Which piece of the object.
    pub(super) piece: usize,
    pub(super) range: TokenRange,
    pub(super) bytes: u64,
    pub(super) filled: bool,
}

impl Session {
    /// An object came from disk, or did not.
    pub(super) async fn promoted(
        &mut self,
        id: u64,
        object: ObjectId,
        result: Result<Object, PromoteError>,
    ) -> Ended {
        let Some(restore) = self.restores.get_mut(&id) else {
            return Ok(());
        };
        let lost = matches!(result, Err(PromoteError::Lost));
        let slot = match result {
            Ok(object) => Slot::There(object),
            Err(PromoteError::Lost) => Slot::Failed(Status::Lost),
            Err(PromoteError::NoRoom) => Slot::Failed(Status::NoRoom),
            Err(PromoteError::Failed) => Slot::Failed(Status::Failed),
        };
        restore.objects.insert(object, slot);
        let mut ready = Vec::new();
        restore.waiting.retain(|asked| {
            let part = restore.parts.get(asked.part);
            let its = part.is_some_and(|part| part.object == object);
            if its {
                ready.push(*asked);
            }
            !its
        });
        for asked in ready {
            self.fill_one(id, asked).await?;
        }
        let Some(restore) = self.restores.get(&id) else {
            return Ok(());
        };
        let coming = restore
            .objects
            .values()
            .any(|slot| matches!(slot, Slot::Coming));
        if !coming && restore.state == RestoreState::Promoting {
            self.turn(id, RestoreState::Ready);
            self.hold_restore(id).await;
        }
        if lost {
            self.say(Revoke {
                lease: id,
                reason: RevokeReason::Lost,
            })?;
        }
        Ok(())
    }

    /// A run of pieces into the ring, please.
    pub(super) async fn fill(&mut self, fill: Fill) -> Ended {
        let run = Run::from(&fill);
        let Fill {
            lease: id,
            piece,
            index,
            count,
            ring_offset,
            bytes,
        } = fill;
        let now = self.service.clock.monotonic();
        let ring = self.copies.ring_len();
        let answer = |status| Filled {
            lease: id,
            piece,
            index,
            count,
            status,
        };
        let Some(restore) = self.restores.get_mut(&id) else {
            return self.say(answer(Status::Cancelled));
        };
        restore.active = now;
        let Some(run) = restore.place(run, (ring_offset, bytes), ring) else {
            return self.say(answer(Status::BadRequest));
        };
        for asked in run {
            self.fill_one(id, asked).await?;
        }
        Ok(())
    }

    /// One piece into the ring, now or when its object is in RAM.
    async fn fill_one(&mut self, id: u64, asked: Asked) -> Ended {
        let Asked { part, ring_offset } = asked;
        let answer = |status| filled(id, part, status);
        let Some(restore) = self.restores.get_mut(&id) else {
            return self.say(answer(Status::Cancelled));
        };
        let Some(Part {
            object,
            piece,
            bytes,
            ..
        }) = restore.parts.get(part)
        else {
            return self.say(answer(Status::BadRequest));
        };
        let segment = match restore.objects.get(object) {
            Some(Slot::There(object)) => {
                let pieces = object.shards.get(self.worker.shard.rank as usize);
                pieces.and_then(|pieces| pieces.get(*piece)).cloned()
            }
            Some(Slot::Failed(status)) => {
                let status = *status;
                return self.say(answer(status));
            }
            Some(Slot::Coming) if restore.waiting.len() < MAX_WAITING => {
                restore.waiting.push(asked);
                return Ok(());
            }
            Some(Slot::Coming) | None => None,
        };
        let Some(segment) = segment.filter(|segment| segment.len() == *bytes) else {
            return self.say(answer(Status::Failed));
        };
        restore.copying += 1;
        if restore.state != RestoreState::Filling {
            self.turn(id, RestoreState::Filling);
            self.hold_restore(id).await;
        }
        if !self.copies.start(Copy {
            what: What::Fill { lease: id, part },
            ring_offset,
            segment,
        }) {
            if let Some(restore) = self.restores.get_mut(&id) {
                restore.copying -= 1;
            }
            return self.say(answer(Status::NoRoom));
        }
        Ok(())
    }

    /// A piece is in the ring, or is not.
    pub(super) async fn filled(
        &mut self,
        (id, part): (u64, usize),
        bytes: u64,
        result: Result<(), DeviceError>,
    ) -> Ended {
        let status = match &result {
            Ok(()) => Status::Ok,
            Err(DeviceError::Closed) => Status::Cancelled,
            Err(error) => {
                tracing::warn!(%error, lease = id, "A piece could not be copied into the ring");
                self.service.metrics.error("copy");
                Status::Failed
            }
        };
        if status == Status::Ok {
            self.service.metrics.restored_bytes.inc_by(bytes);
        }
        let mut idle = false;
        if let Some(restore) = self.restores.get_mut(&id) {
            restore.copying -= 1;
            restore.active = self.service.clock.monotonic();
            idle = restore.copying == 0 && restore.state == RestoreState::Filling;
            let before = restore.is_whole();
            if let Some(part) = restore.parts.get_mut(part)
                && status == Status::Ok
            {
                part.filled = true;
            }
            if !before && restore.is_whole() {
                let tokens = restore.boundary - restore.device_boundary;
                let tokens = if self.worker.shard.rank == 0 {
                    tokens
                } else {
                    0
                };
                self.service
                    .metrics
                    .restored_tokens
                    .inc_by(u64::from(tokens));
            }
        }
        self.say(filled(id, part, status))?;
        if idle {
            self.turn(id, RestoreState::Filled);
            self.hold_restore(id).await;
        }
        Ok(())
    }

    /// The worker is done with a lease.
    pub(super) async fn release(&mut self, release: Release) -> Ended {
        let Release {
            lease: id,
            outcome,
            reused,
        } = release;
        let Some(restore) = self.restores.get(&id) else {
            return Ok(());
        };
        let (snapshot, tier) = (restore.snapshot, restore.tier);
        // Each rank reuses the same tokens: they count once.
        let reused = if outcome == Outcome::Used && self.leads() {
            reused.min(restore.boundary)
        } else {
            0
        };
        if reused > 0 {
            self.service.metrics.reused_tokens.inc_by(u64::from(reused));
            self.service.touch(snapshot);
            self.service.announce(Announcement::Restored {
                snapshot_id: snapshot,
                reused,
                tier,
            });
        }
        let unused = reused == 0 && self.leads();
        self.end_lease(id, unused.then_some(outcome)).await
    }

    /// Ends a lease; fills that wait are answered.
    async fn end_lease(&mut self, id: u64, unused: Option<Outcome>) -> Ended {
        let Some(mut restore) = self.restores.remove(&id) else {
            return Ok(());
        };
        if let Some(outcome) = unused {
            crate::service::metrics::count(&self.service.metrics.unused, outcome.as_str());
        }
        restore.state = self.go(restore.state, RestoreState::Released);
        self.hold(Point::Restore(&restore.state)).await;
        self.service.release(restore.held);
        for Asked { part, .. } in restore.waiting {
            self.say(filled(id, part, Status::Cancelled))?;
        }
        Ok(())
    }

    /// Takes back leases of which nothing was heard for too long.
    pub(super) async fn tend_restores(&mut self) -> Ended {
        let now = self.service.clock.monotonic();
        let limit = self.service.config.lease_timeout;
        let late =
            |restore: &Restore| restore.copying == 0 && now.saturating_sub(restore.active) > limit;
        let late: Vec<u64> = self
            .restores
            .iter()
            .filter(|(_, restore)| late(restore))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.say(Revoke {
                lease: id,
                reason: RevokeReason::Deadline,
            })?;
            self.end_lease(id, Some(Outcome::Deadline)).await?;
        }
        Ok(())
    }

    /// Takes all leases back.
    pub(super) async fn revoke_all(&mut self, reason: RevokeReason) -> Ended {
        let ids: Vec<u64> = self.restores.keys().copied().collect();
        for id in ids {
            self.say(Revoke { lease: id, reason })?;
            self.end_lease(id, Some(Outcome::SessionEnd)).await?;
        }
        Ok(())
    }

    /// Gives every lease back without a word: the worker is gone.
    pub(super) fn drop_leases(&mut self) {
        for waiting in self.waiting.drain(..) {
            self.service.leave_line(waiting.ticket);
        }
        for (_, restore) in self.restores.drain() {
            let unused = &self.service.metrics.unused;
            crate::service::metrics::count(unused, Outcome::SessionEnd.as_str());
            self.service.release(restore.held);
        }
    }

    pub(super) async fn hold_restore(&mut self, id: u64) {
        let Self {
            service,
            end,
            outbox,
            restores,
            ..
        } = self;
        if let Some(restore) = restores.get(&id) {
            let point = Point::Restore(&restore.state);
            stand_still(service, end, outbox, point).await;
        }
    }

    pub(super) fn turn(&mut self, id: u64, to: RestoreState) {
        if let Some(mut restore) = self.restores.remove(&id) {
            restore.state = self.go(restore.state, to);
            self.restores.insert(id, restore);
        }
    }

    fn go(&self, state: RestoreState, to: RestoreState) -> RestoreState {
        let name = state.as_str();
        match state.step(to) {
            Ok(state) => state,
            Err(_) => unreachable!("a restore leaves {name} only by the steps that it has"),
        }
    }
}

// === impl Restore ===

impl Restore {
    fn is_whole(&self) -> bool {
        self.parts.iter().all(|part| part.filled)
    }

    /// The pieces of a run, and where each is to be in a ring of `ring` bytes. `None`: not so.
    fn place(&self, run: Run, (at, bytes): (u64, u64), ring: u64) -> Option<Vec<Asked>> {
        let parts = run.of_list(self.parts.len())?;
        let sizes = self.parts.get(parts.clone())?.iter().map(|part| part.bytes);
        let (starts, span) = places(at, sizes)?;
        let fits = span == bytes && at.checked_add(span).is_some_and(|end| end <= ring);
        let asked = |(part, ring_offset)| Asked { part, ring_offset };
        fits.then(|| parts.zip(starts).map(asked).collect())
    }
}

/// How one piece ended.
fn filled(lease: u64, part: usize, status: Status) -> Filled {
    let Run {
        piece,
        index,
        count,
    } = Run::of_part(part);
    Filled {
        lease,
        piece,
        index,
        count,
        status,
    }
}
