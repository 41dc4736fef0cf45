//! Bringing a snapshot into RAM and holding it there.

use super::super::Service;
use super::super::api::{RestoreReply, RestoreRequest};
use super::super::core::Core;
use super::super::error::ServiceError;
use super::super::promote::PromoteError;
use super::super::rows::{existing, unknown_snapshot};
use super::super::workers::{Worker, seconds};
use super::{check_names, gone};
use crate::index::{LeaseToken, Pin, PinKind};
use crate::types::{ObjectId, SnapshotId, TierKind};

impl Service {
    /// Brings a snapshot into RAM and keeps it there for the next request.
    ///
    /// # Errors
    /// `NotFound`, `NoState`, `Invalid`, `Mismatch`; `NoSpace` if RAM has no room; `Data` if a part
    /// is missing or bad.
    pub async fn restore(&self, request: RestoreRequest) -> Result<RestoreReply, ServiceError> {
        let RestoreRequest { select, pin_for } = request;
        check_names(&select)?;
        let start = self.clock.monotonic();
        let until = self
            .clock
            .now()
            .after(pin_for.unwrap_or(self.config.pin_for));
        let (id, called, token, lacking) = {
            let mut core = self.core.lock();
            let (id, called) = existing(&core, &select)?;
            self.check_match(&core, id)?;
            let token = core.index.lease(&id).ok_or_else(|| unknown_snapshot(&id))?;
            core.index.touch(&id, self.clock.now());
            core.index.pin(&id, Pin::Until(until));
            let lacking: Vec<(ObjectId, u64)> = token
                .objects()
                .filter_map(|object| Some((object, core.index.object(&object)?)))
                .filter(|(_, info)| !info.tiers.contains(TierKind::Ram))
                .map(|(object, info)| (object, info.bytes))
                .collect();
            (id, called, token, lacking)
        };
        // The lease is given back whatever happens to this request.
        let held = HeldLease {
            service: self,
            token: Some(token),
        };
        let objects = lacking.iter().map(|(object, _)| self.promote(*object));
        let promoted = futures_util::future::join_all(objects).await;
        let failed = promoted.iter().find_map(|result| result.as_ref().err());
        let moved_bytes = lacking
            .iter()
            .map(|(_, bytes)| *bytes)
            .fold(0, u64::saturating_add);
        drop(held);
        let mut core = self.core.lock();
        if let Some(error) = failed {
            core.index.unpin(&id, PinKind::Timed);
            return Err(match error {
                PromoteError::NoRoom => ServiceError::NoSpace("RAM has no room for it".to_owned()),
                PromoteError::Lost => ServiceError::Data(format!("a part of snapshot {id}")),
                PromoteError::Failed => ServiceError::Busy("the disk did not answer".to_owned()),
            });
        }
        let row = self.row(&core, id, &called).ok_or_else(|| gone(id))?;
        if row.tier != TierKind::Ram {
            core.index.unpin(&id, PinKind::Timed);
            return Err(ServiceError::NoSpace("RAM has no room for it".to_owned()));
        }
        drop(core);
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

/// A lease that ends with its scope.
struct HeldLease<'a> {
    service: &'a Service,
    token: Option<LeaseToken>,
}

impl Drop for HeldLease<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token.take() {
            self.service.release(token);
        }
    }
}
