//! Bringing a snapshot into RAM and holding it there.

use std::time::Duration;

use super::super::Service;
use super::super::api::{RestoreReply, RestoreRequest, Selector};
use super::super::core::Core;
use super::super::error::ServiceError;
use super::super::lease::{Lease, NoLease};
use super::super::promises::Ticket;
use super::super::promote::PromoteError;
use super::super::rows::{Called, existing, unknown_snapshot};
use super::super::workers::{Worker, seconds};
use super::{check_names, gone};
use crate::index::{Pin, PinKind};
use crate::types::{Millis, ObjectId, SnapshotId, TierKind};

/// How often one that waits for room looks for it, if nobody tells.
const LOOK: Duration = Duration::from_millis(50);

/// What is found, what it is called, its lease, and objects of it that are not in RAM with their
/// bytes.
type Held<'a> = (SnapshotId, Called, HeldLease<'a>, Vec<(ObjectId, u64)>);

impl Service {
    /// Brings a snapshot into RAM and keeps it there for the next request.
    ///
    /// # Errors
    /// `NotFound`, `Deleted`, `NoState`, `Invalid`, `Mismatch`; `NoSpace` if RAM has no room now, `TooLarge` if never; `Data` if a part
    /// is missing or bad.
    pub async fn restore(&self, request: RestoreRequest) -> Result<RestoreReply, ServiceError> {
        let RestoreRequest { select, pin_for } = request;
        check_names(&select)?;
        let start = self.clock.monotonic();
        let until = self
            .clock
            .now()
            .after(pin_for.unwrap_or(self.config.pin_for));
        let mut line = InLine {
            service: self,
            ticket: None,
        };
        let (id, called, held, lacking) = loop {
            let freed = self.room_freed.notified();
            match self.hold_by_name(&select, until, line.ticket)? {
                Some(found) => break found,
                None if self.clock.monotonic().saturating_sub(start) >= self.config.room_wait => {
                    let text = "other restores hold the room in RAM";
                    return Err(ServiceError::NoSpace(text.to_owned()));
                }
                None => line.stand(),
            }
            let _ = tokio::time::timeout(LOOK, freed).await;
        };
        drop(line);
        let objects = lacking.iter().map(|(object, _)| self.promote(*object));
        let promoted = futures_util::future::join_all(objects).await;
        let failed = promoted.iter().find_map(|result| result.as_ref().err());
        let moved_bytes = lacking
            .iter()
            .map(|(_, bytes)| *bytes)
            .fold(0, u64::saturating_add);
        let mut core = self.core.lock();
        if let Some(error) = failed {
            unpin(&mut core, id);
            return Err(match error {
                PromoteError::NoRoom => {
                    ServiceError::NoSpace("RAM (store.ram) has no room for it".to_owned())
                }
                PromoteError::Lost => ServiceError::Data(format!("a part of snapshot {id}")),
                PromoteError::Failed => ServiceError::Busy("the disk did not answer".to_owned()),
            });
        }
        let row = self
            .row(&core, id, &called)
            .ok_or_else(|| gone(&core, id))?;
        if row.tier != TierKind::Ram {
            unpin(&mut core, id);
            return Err(ServiceError::NoSpace(
                "RAM (store.ram) has no room for it".to_owned(),
            ));
        }
        drop(core);
        drop(held);
        let took = self.clock.monotonic().saturating_sub(start);
        let from_tier = if lacking.is_empty() {
            TierKind::Ram
        } else {
            TierKind::Disk
        };
        Ok(RestoreReply {
            row,
            from_tier,
            moved_bytes,
            restore_time_ms: took.as_secs_f64() * 1000.0,
            pinned_until: seconds(until),
        })
    }

    /// The snapshot, pinned and held, and what of it is not in RAM. `None`: others have the room.
    fn hold_by_name(
        &self,
        select: &Selector,
        until: Millis,
        ticket: Option<Ticket>,
    ) -> Result<Option<Held<'_>>, ServiceError> {
        let mut core = self.core.lock();
        let (id, called) = existing(&core, select)?;
        self.check_match(&core, id)?;
        let lease = match self.lease_by_id(&mut core, &id, ticket) {
            Ok(lease) => lease,
            Err(NoLease::Later) => return Ok(None),
            Err(NoLease::NoRoom) => {
                let text = "RAM (store.ram) is full of pinned snapshots";
                return Err(ServiceError::NoSpace(text.to_owned()));
            }
            Err(NoLease::TooLarge) => {
                let text = "it is larger than RAM can ever hold (store.ram)";
                return Err(ServiceError::TooLarge(text.to_owned()));
            }
            Err(NoLease::Nothing | NoLease::Useless) => return Err(unknown_snapshot(&id)),
        };
        core.index.touch(&id, self.clock.now());
        core.index.pin(&id, Pin::Until(until));
        Self::pin_room(&mut core, &lease, until);
        let lacking = lease
            .token
            .objects()
            .filter_map(|object| Some((object, core.index.object(&object)?)))
            .filter(|(_, info)| !info.tiers.contains(TierKind::Ram))
            .map(|(object, info)| (object, info.bytes))
            .collect();
        let held = HeldLease {
            service: self,
            lease: Some(lease),
        };
        Ok(Some((id, called, held, lacking)))
    }

    /// Some attached worker can read it, or none is attached.
    fn check_match(&self, core: &Core, id: SnapshotId) -> Result<(), ServiceError> {
        let record = core.records.get(&id).ok_or_else(|| unknown_snapshot(&id))?;
        let fingerprint = record.model.fingerprint;
        let workers = self.workers.all();
        let runs = |worker: &Worker| {
            worker
                .model()
                .0
                .is_some_and(|model| model.fingerprint == fingerprint)
        };
        if workers.is_empty() || workers.iter().any(|worker| runs(worker)) {
            Ok(())
        } else {
            Err(ServiceError::Mismatch {
                snapshot: id,
                fingerprint,
            })
        }
    }
}

fn unpin(core: &mut Core, id: SnapshotId) {
    core.index.unpin(&id, PinKind::Timed);
    core.promises.unpin(&id);
}

/// A lease that ends with its scope, whatever happens to the request.
struct HeldLease<'a> {
    service: &'a Service,
    lease: Option<Lease>,
}

impl Drop for HeldLease<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.service.release(lease);
        }
    }
}

/// A place in the line for room, which ends with its scope.
struct InLine<'a> {
    service: &'a Service,
    ticket: Option<Ticket>,
}

impl InLine<'_> {
    fn stand(&mut self) {
        let stand = || self.service.core.lock().promises.stand_in_line();
        self.ticket.get_or_insert_with(stand);
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.service.leave_line(ticket);
        }
    }
}
