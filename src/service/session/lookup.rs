//! A worker's lookups: the deepest snapshot that is worth it, held, and on its way into RAM.

use std::collections::HashMap;
use std::time::Duration;

use super::restore::{Part, Restore, Slot};
use super::{Ended, Session};
use crate::index::TreeKey;
use crate::proto::channel::layout::{Miss, Tier as WireTier};
use crate::proto::channel::msg::{Lookup, LookupResult};
use crate::service::cost::Mark;
use crate::service::hold::Point;
use crate::service::lease::{Leased, NoLease, Wanted};
use crate::service::metrics::{self, ByReason, Name};
use crate::service::policy::{self, Facts};
use crate::service::promises::Ticket;
use crate::service::restore_state::RestoreState;
use crate::store::pieces;
use crate::types::{ObjectId, ObjectKind, TierKind, TokenRange};

/// Leases that one worker may hold.
const MAX_LEASES: usize = 1024;

/// A lookup that waits until room in RAM can be promised to it.
#[derive(Debug)]
pub(super) struct Waiting {
    lookup: Lookup,
    pub(super) ticket: Ticket,
    since: Duration,
}

/// Why there is no lease.
enum NoHit {
    Miss(Miss),
    /// Others have the room in RAM.
    Later,
}

impl From<Miss> for NoHit {
    fn from(miss: Miss) -> Self {
        Self::Miss(miss)
    }
}

impl Session {
    /// The longest restorable boundary, please.
    pub(super) async fn lookup(&mut self, lookup: Lookup) -> Ended {
        if let Err(reason) = self.check(&lookup) {
            return self.miss(&lookup, reason);
        }
        match self.find(&lookup, None) {
            Ok((id, restore)) => self.hit(&lookup, id, restore).await,
            Err(NoHit::Miss(reason)) => self.miss(&lookup, reason),
            Err(NoHit::Later) => {
                if self.leads() {
                    self.service.metrics.waited_for_room.inc();
                }
                self.waiting.push_back(Waiting {
                    lookup,
                    ticket: self.service.core.lock().promises.stand_in_line(),
                    since: self.service.clock.monotonic(),
                });
                Ok(())
            }
        }
    }

    /// Looks whether there is room now for those who wait for it.
    pub(super) async fn tend_lookups(&mut self) -> Ended {
        for _ in 0..self.waiting.len() {
            let Some(waiting) = self.waiting.pop_front() else {
                break;
            };
            let found = self.find(&waiting.lookup, Some(waiting.ticket));
            let waited = self.service.clock.monotonic().saturating_sub(waiting.since);
            if matches!(found, Err(NoHit::Later)) && waited < self.service.config.room_wait {
                self.waiting.push_back(waiting);
                continue;
            }
            self.service.leave_line(waiting.ticket);
            match found {
                Ok((id, restore)) => self.hit(&waiting.lookup, id, restore).await?,
                Err(NoHit::Miss(reason)) => self.miss(&waiting.lookup, reason)?,
                Err(NoHit::Later) => self.miss(&waiting.lookup, Miss::NoRoom)?,
            }
        }
        Ok(())
    }

    async fn hit(&mut self, lookup: &Lookup, id: u64, restore: Restore) -> Ended {
        // When the restored state is there is not known: the time to the next one says nothing.
        self.mark(lookup, restore.boundary, Duration::MAX);
        self.hold(Point::Restore(&restore.state)).await;
        self.grant(lookup, id, restore).await
    }

    /// Prefill of this prompt goes on from here.
    fn mark(&mut self, lookup: &Lookup, boundary: u32, at: Duration) {
        if let Some(request) = self.requests.get_mut(lookup.req) {
            request.mark = Some(Mark {
                boundary,
                at,
                // At least one token of a prompt is always computed.
                prompt: lookup.max_boundary.saturating_add(1),
            });
        }
    }

    fn miss(&mut self, lookup: &Lookup, reason: Miss) -> Ended {
        self.mark(
            lookup,
            lookup.device_boundary,
            self.service.clock.monotonic(),
        );
        if self.leads() {
            metrics::count(&self.service.metrics.misses, reason.as_str());
            if reason == Miss::NothingStored {
                self.service.metrics.tier_missed(TierKind::Ram);
                if self.service.store.disk.is_some() {
                    self.service.metrics.tier_missed(TierKind::Disk);
                }
            }
        }
        self.say(LookupResult {
            req: lookup.req,
            attempt: lookup.attempt,
            lease: 0,
            boundary: 0,
            kv_from: 0,
            tier: None,
            reason: Some(reason),
            bytes: 0,
            parts: Vec::new(),
        })
    }

    /// The request may ask, and has not asked before in this attempt.
    fn check(&mut self, lookup: &Lookup) -> Result<(), Miss> {
        let request = self
            .requests
            .get_mut(lookup.req)
            .filter(|request| !request.closed)
            .ok_or(Miss::BadRequest)?;
        let asked = |last| lookup.attempt <= last;
        if lookup.attempt < request.attempt || request.answered.is_some_and(asked) {
            return Err(Miss::BadRequest);
        }
        request.attempt = lookup.attempt;
        request.answered = Some(lookup.attempt);
        Ok(())
    }

    fn find(&mut self, lookup: &Lookup, ticket: Option<Ticket>) -> Result<(u64, Restore), NoHit> {
        let Lookup {
            req,
            attempt,
            max_boundary,
            device_boundary,
            device_kv,
        } = *lookup;
        let bad = Miss::BadRequest;
        let full = self.restores.len() >= MAX_LEASES || self.closing;
        let request = self
            .requests
            .get(req)
            .filter(|request| !request.closed && request.attempt == attempt)
            .ok_or(bad)?;
        if request.not_saved {
            return Err(Miss::NotSaved.into());
        }
        if request.poison.is_some() {
            return Err(bad.into());
        }
        let model = self.model.clone().ok_or(Miss::StaleEpoch)?;
        if request.epoch != self.epoch {
            return Err(Miss::StaleEpoch.into());
        }
        if full {
            return Err(Miss::Busy.into());
        }
        let key = TreeKey {
            fingerprint: model.fingerprint,
            namespace: request.namespace_id,
        };
        let owner = (self.worker.session, req);
        let conversation = &request.conversation;
        let wanted = Wanted {
            key: &key,
            model: &model,
            tokens: &request.tokens,
            max_boundary,
            device_kv,
            ticket,
        };
        let found = self.service.lease(&wanted, |hit, core| {
            let now = self.service.clock.now();
            core.conversations
                .saw(conversation, owner, hit.snapshot, hit.boundary, now);
            hit.boundary > device_boundary
        });
        let Leased { hit, lease, there } = found.map_err(|why| match why {
            NoLease::Nothing => Miss::NothingStored.into(),
            NoLease::Useless => Miss::DeviceAsDeep.into(),
            NoLease::NoRoom | NoLease::TooLarge => Miss::NoRoom.into(),
            NoLease::Later => NoHit::Later,
        })?;
        let boundary = hit.boundary;
        let kv_from = device_kv.min(boundary);
        let geometry = &model.geometry;
        let state = Part {
            object: hit.state,
            piece: 0,
            range: TokenRange::at(boundary),
            bytes: geometry.state_bytes(),
            filled: false,
        };
        let mut parts = vec![state];
        let needed = TokenRange {
            start: kv_from,
            end: boundary,
        };
        for part in &hit.kv {
            let Some(used) = part.range.overlap(needed) else {
                continue;
            };
            let pieces = pieces(geometry, ObjectKind::Kv, part.object_range);
            for (piece, at) in pieces.iter().enumerate() {
                if at.range.overlap(used).is_some() {
                    let (object, range, bytes) = (part.object, at.range, at.bytes);
                    parts.push(Part {
                        object,
                        piece,
                        range,
                        bytes,
                        filled: false,
                    });
                }
            }
        }
        let missing = |part: &&Part| !there.contains_key(&part.object);
        let moved = parts
            .iter()
            .map(|part| part.bytes)
            .fold(0, u64::saturating_add);
        let from_disk = parts
            .iter()
            .filter(missing)
            .map(|part| part.bytes)
            .fold(0, u64::saturating_add);
        let facts = || Facts {
            bytes: moved,
            disk_bytes: from_disk,
            queued: self.queued(),
            prefill_tokens_per_second: self.worker.costs.prefill(),
            disk_bytes_per_second: self.service.promoter.speed(),
            copy_bytes_per_second: self.worker.costs.copies(),
        };
        let skip = policy::skip(&self.service.config, boundary - device_boundary, facts);
        let too_many = parts.len().saturating_mul(8) as u64
            > self.service.config.down_capacity.as_u64() / 4 - 256;
        if skip.is_some() || too_many {
            self.service.release(lease);
            let reason = skip.unwrap_or(Miss::NoRoom);
            let name = Name(reason.as_str());
            self.service
                .metrics
                .skipped
                .get_or_create(&ByReason { reason: name })
                .inc();
            return Err(reason.into());
        }
        let mut objects = HashMap::new();
        for part in &parts {
            let slot = || match there.get(&part.object) {
                Some(object) => Slot::There(object.clone()),
                None => Slot::Coming,
            };
            objects.entry(part.object).or_insert_with(slot);
        }
        let id = self.service.next_lease();
        let restore = Restore {
            state: RestoreState::Leased,
            snapshot: hit.snapshot,
            held: lease,
            boundary,
            device_boundary,
            tier: if from_disk > 0 {
                TierKind::Disk
            } else {
                TierKind::Ram
            },
            objects,
            parts,
            waiting: Vec::new(),
            copying: 0,
            active: self.service.clock.monotonic(),
        };
        Ok((id, restore))
    }

    /// Bytes that leases of this worker still wait for: in all, and from disk.
    fn queued(&self) -> (u64, u64) {
        let (mut all, mut disk) = (0_u64, 0_u64);
        for restore in self.restores.values() {
            for part in restore.parts.iter().filter(|part| !part.filled) {
                all = all.saturating_add(part.bytes);
                if matches!(restore.objects.get(&part.object), Some(Slot::Coming)) {
                    disk = disk.saturating_add(part.bytes);
                }
            }
        }
        (all, disk)
    }

    /// Tells the worker, and lets what is missing come from disk.
    async fn grant(&mut self, lookup: &Lookup, id: u64, restore: Restore) -> Ended {
        if self.leads() {
            let hits = &self.service.metrics.hits;
            hits.get_or_create(&restore.tier.into()).inc();
            if restore.tier == TierKind::Disk {
                self.service.metrics.tier_missed(TierKind::Ram);
            }
        }
        let pairs = restore.parts.iter().skip(1);
        let parts = pairs
            .flat_map(|part| [part.range.start, part.range.end])
            .collect();
        let bytes = restore
            .parts
            .iter()
            .map(|part| part.bytes)
            .fold(0, u64::saturating_add);
        let coming = restore
            .objects
            .iter()
            .filter(|(_, slot)| matches!(slot, Slot::Coming));
        let coming: Vec<ObjectId> = coming.map(|(id, _)| *id).collect();
        let (boundary, tier) = (restore.boundary, restore.tier);
        self.restores.insert(id, restore);
        let all_there = coming.is_empty();
        for object in coming {
            self.service.promote_for(object, id, &self.events_tx);
        }
        let state = if all_there {
            RestoreState::Ready
        } else {
            RestoreState::Promoting
        };
        self.turn(id, state);
        self.say(LookupResult {
            req: lookup.req,
            attempt: lookup.attempt,
            lease: id,
            boundary,
            kv_from: lookup.device_kv.min(boundary),
            tier: Some(wire_tier(tier)),
            reason: None,
            bytes,
            parts,
        })?;
        self.hold_restore(id).await;
        Ok(())
    }
}

fn wire_tier(tier: TierKind) -> WireTier {
    match tier {
        TierKind::Vram => WireTier::Vram,
        TierKind::Ram => WireTier::Ram,
        TierKind::Disk => WireTier::Disk,
        TierKind::Remote => WireTier::Remote,
    }
}
