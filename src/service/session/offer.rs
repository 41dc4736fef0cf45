//! A worker's offers: what is stored already, what has to move, and room for it.

use std::sync::Arc;

use super::save::{Part, PartAt, Save};
use super::{Ended, Session};
use crate::index::TreeKey;
use crate::pool::cut;
use crate::proto::channel::layout::{DeclineReason, Status};
use crate::proto::channel::msg::{Decline, Offer, Want};
use crate::service::conversations::NoRoom;
use crate::service::hold::Point;
use crate::service::limits::Over;
use crate::service::save_state::SaveState;
use crate::types::{TokenId, TokenRange};

/// Saves that one worker may have open.
const MAX_SAVES: usize = 1024;

impl Session {
    /// A state exists on the device.
    pub(super) async fn offer(&mut self, offer: Offer) -> Ended {
        match self.plan(&offer) {
            Ok(save) => {
                self.hold(Point::Save(&save.state)).await;
                // Several ranks give up older ones together, and say so.
                if !self.is_shard() {
                    self.replace_untouched(offer.req, offer.boundary).await?;
                }
                self.count_save(offer.req, 1);
                let state = self.step(save.state, SaveState::Reserving);
                self.saves.insert(offer.save, Save { state, ..save });
                self.hold(Point::Save(&SaveState::Reserving)).await;
                self.reserve(offer.save).await
            }
            Err(reason) => self.decline(offer.save, reason),
        }
    }

    pub(super) fn decline(&mut self, save: u64, reason: DeclineReason) -> Ended {
        match reason {
            DeclineReason::AlreadyStored => {
                self.service.metrics.already_stored.inc();
            }
            reason => self.service.metrics.drop_save(reason.as_str()),
        }
        self.say(Decline { save, reason })
    }

    /// What has to move for an offer, or why nothing does.
    fn plan(&mut self, offer: &Offer) -> Result<Save, DeclineReason> {
        let Offer {
            save,
            req,
            attempt,
            boundary,
            epoch,
        } = *offer;
        let bad = DeclineReason::BadRequest;
        if self.saves.contains_key(&save) || boundary == 0 {
            return Err(bad);
        }
        let request = self
            .requests
            .get_mut(req)
            .filter(|request| !request.closed)
            .ok_or(bad)?;
        request.attempt = request.attempt.max(attempt);
        if let Some(mark) = request.mark {
            let now = self.service.clock.monotonic();
            request.mark = Some(self.worker.costs.state(mark, boundary, now));
        }
        if request.not_saved {
            return Err(DeclineReason::NotSaved);
        }
        let request_epoch = request.epoch;
        if request.poison.is_some() || attempt < request.attempt || request.len() < boundary {
            return Err(bad);
        }
        let model = self.model.clone().ok_or(DeclineReason::StaleEpoch)?;
        if epoch != self.epoch || request_epoch != self.epoch {
            return Err(DeclineReason::StaleEpoch);
        }
        if self.saves.len() >= MAX_SAVES || self.closing {
            return Err(DeclineReason::NoRoom);
        }
        let request = self.requests.get(req).ok_or(bad)?;
        let owner = (self.worker.session, req);
        if self.service.core.lock().conversations.is_forgotten(owner) {
            return Err(DeclineReason::NotSaved);
        }
        let tokens = request.prefix(boundary).ok_or(bad)?;
        let key = TreeKey {
            fingerprint: model.fingerprint,
            namespace: request.namespace_id,
        };
        if self
            .saves
            .values()
            .any(|save| save.req == req && save.boundary == boundary)
        {
            return Err(DeclineReason::AlreadyStored);
        }
        let planned = self.service.shards.planned(&self.save_name(save));
        let planned = planned.filter(|_| self.is_shard());
        let first = planned.is_none();
        let (base, after) = match planned {
            Some(plan) => (plan.base, plan.after),
            None => {
                let owner = (self.worker.session, req);
                let stored = self
                    .service
                    .coverage(&key, tokens, &request.conversation, owner);
                let stored = stored.ok_or(DeclineReason::AlreadyStored)?;
                self.after_others(req, &key, boundary, stored)
            }
        };
        let state = TokenRange::at(boundary);
        let kv = cut(TokenRange {
            start: base.min(boundary),
            end: boundary,
        });
        let part = |range: TokenRange, bytes| Part {
            range,
            bytes,
            segment: None,
            at: PartAt::Worker,
        };
        let state = part(state, model.geometry.state_bytes());
        let kv = kv.map(|range| part(range, model.geometry.kv_bytes(range)));
        let parts: Vec<Part> = [state].into_iter().chain(kv).collect();
        let now = self.service.clock.monotonic();
        let planned = Save {
            state: SaveState::Offered,
            serial: self.serial + 1,
            req,
            boundary,
            model,
            key,
            base,
            after,
            missing: parts.len(),
            parts,
            room: None,
            brought: false,
            offered: now,
            active: now,
        };
        if first {
            self.check_quota(&planned, tokens)?;
        }
        if self.is_shard() && !self.join(save, &planned, tokens) {
            return Err(DeclineReason::OtherRank);
        }
        self.serial += 1;
        Ok(planned)
    }

    /// The namespace may hold all that has to move, of all ranks.
    fn check_quota(&self, save: &Save, tokens: &[TokenId]) -> Result<(), DeclineReason> {
        let shard: u64 = save.parts.iter().map(|part| part.bytes).sum();
        let need = shard.saturating_mul(u64::from(save.model.shards));
        let Err(over) = self.service.quota_room(&save.key, tokens, need) else {
            return Ok(());
        };
        let Over { used, quota, need } = over;
        self.service.metrics.limits.declined.inc();
        if let Some(request) = self.requests.get(save.req) {
            let why = NoRoom::Quota { used, quota, need };
            let mut core = self.service.core.lock();
            core.conversations.had_no_room(&request.conversation, why);
        }
        Err(DeclineReason::NoRoom)
    }

    /// KV that is stored or comes with another save of the request, and that save.
    fn after_others(
        &self,
        req: u64,
        key: &TreeKey,
        boundary: u32,
        stored: u32,
    ) -> (u32, Option<u64>) {
        let (mut base, mut after) = (stored, None);
        for (id, other) in &self.saves {
            let deeper = other.boundary > base && other.boundary <= boundary;
            if other.req == req && other.key == *key && deeper && !other.is_untouched() {
                base = other.boundary;
                after = Some(*id);
            }
        }
        (base, after)
    }

    /// Drops shallower saves of the request of which nothing was drained.
    async fn replace_untouched(&mut self, req: u64, boundary: u32) -> Ended {
        let older =
            |save: &Save| save.req == req && save.boundary < boundary && save.is_untouched();
        let older: Vec<u64> = self
            .saves
            .iter()
            .filter(|(_, save)| older(save))
            .map(|(id, _)| *id)
            .collect();
        for id in older {
            self.drop_save(id, Status::Cancelled, DeclineReason::Superseded)
                .await?;
        }
        Ok(())
    }

    /// Takes RAM for all parts and tells the worker what is wanted; or waits for room.
    pub(super) async fn reserve(&mut self, id: u64) -> Ended {
        let Some(save) = self.saves.get_mut(&id) else {
            return Ok(());
        };
        let lengths: Vec<u64> = save.parts.iter().map(|part| part.bytes).collect();
        let Some((segments, room)) = self.service.allocate(&lengths) else {
            let waited = self.service.clock.monotonic().saturating_sub(save.offered);
            let hopeless = !self.service.can_ever_hold(&lengths);
            if hopeless || waited >= self.service.config.room_wait {
                let why = if hopeless { NoRoom::Ever } else { NoRoom::Now };
                if let Some(request) = self.requests.get(save.req) {
                    let mut core = self.service.core.lock();
                    core.conversations.had_no_room(&request.conversation, why);
                }
                return self
                    .drop_save(id, Status::NoRoom, DeclineReason::NoRoom)
                    .await;
            }
            return Ok(());
        };
        for (part, segment) in save.parts.iter_mut().zip(segments) {
            part.segment = Some(Arc::new(segment));
        }
        save.room = Some(room);
        save.active = self.service.clock.monotonic();
        let pairs = save.parts.iter().skip(1);
        let parts = pairs
            .flat_map(|part| [part.range.start, part.range.end])
            .collect();
        self.advance(id, SaveState::Wanted);
        self.say(Want {
            save: id,
            need_state: true,
            parts,
        })?;
        self.hold(Point::Save(&SaveState::Wanted)).await;
        Ok(())
    }
}
