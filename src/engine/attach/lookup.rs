//! The question what the daemon has for a request, and its answer.
//!
//! An answer is believed as far as it can be: a boundary that was asked for, pieces that bring every
//! row that the device lacks and that the ring holds. Anything else ends the lease.

use super::plan::{Take, takes};
use super::restore::{At, Restore};
use super::restore_state::RestoreState;
use super::session::{Cx, Session};
use crate::engine::cache::Match;
use crate::engine::request::RequestInfo;
use crate::proto::channel::layout::{Miss, Outcome};
use crate::proto::channel::msg::{Lookup, LookupResult};

/// Questions for one request. There are several when a snapshot's boundary is not a page's end, when
/// the device lost what it had, and when the daemon took a lease back from a request in line.
const MAX_ATTEMPTS: u32 = 8;

impl Session {
    /// Asks what the daemon has for a request, if that can be more than the device has.
    pub fn look_up(&mut self, request: &RequestInfo, cx: &mut Cx<'_>) {
        let page = cx.device.kv.page_size();
        let limit = request.prompt.len().saturating_sub(1);
        let found = cx.device.peek(&request.namespace, &request.prompt, limit);
        let Ok(max_boundary) = u32::try_from(limit - limit % page) else {
            return;
        };
        if max_boundary as usize > found.boundary {
            self.ask(request.id.0, max_boundary, &found, cx);
        } else {
            self.rely(request.id.0, found.boundary, cx);
        }
    }

    /// The device has as much as is to be had. It may lose it before the request is admitted.
    fn rely(&mut self, req: u64, boundary: usize, cx: &Cx<'_>) {
        self.relied.insert(req, (boundary, cx.device.evicted()));
    }

    /// Asks after all if the device lost what was relied on.
    pub fn look_up_if_lost(&mut self, request: &RequestInfo, cx: &mut Cx<'_>) {
        let req = request.id.0;
        let evicted = cx.device.evicted();
        let Some((boundary, before)) = self.relied.get_mut(&req) else {
            return;
        };
        if std::mem::replace(before, evicted) == evicted {
            return;
        }
        let limit = request.prompt.len().saturating_sub(1);
        let found = cx.device.peek(&request.namespace, &request.prompt, limit);
        if found.boundary < *boundary {
            self.relied.remove(&req);
            self.again.insert(req);
        }
    }

    /// Asks once more for a request whose lease ended before it could be used.
    pub fn look_up_again(&mut self, request: &RequestInfo, cx: &mut Cx<'_>) {
        let again = self.again.remove(&request.id.0);
        if again && self.talk.attempt(request.id.0) < MAX_ATTEMPTS {
            self.talk.next_attempt(request.id.0);
            self.look_up(request, cx);
        }
    }

    fn ask(&mut self, req: u64, max_boundary: u32, found: &Match, cx: &mut Cx<'_>) {
        let (boundary, kv) = (found.boundary as u32, found.kv_tokens as u32);
        let attempt = self.talk.attempt(req);
        cx.counts.lookups += 1;
        self.talk.say(Lookup {
            req,
            attempt,
            max_boundary,
            device_boundary: boundary,
            device_kv: kv,
        });
        let restore = Restore::new(cx.now, attempt, max_boundary, found);
        self.restores.insert(req, restore);
    }

    /// The daemon has something, or not.
    pub fn looked_up(&mut self, result: LookupResult, cx: &mut Cx<'_>) {
        let LookupResult {
            req,
            attempt,
            lease,
            boundary,
            kv_from,
            tier,
            reason,
            bytes: _,
            parts,
        } = result;
        let waits = |restore: &&mut Restore| {
            restore.state == RestoreState::LookingUp && restore.attempt == attempt
        };
        let Some(restore) = self.restores.get_mut(&req).filter(waits) else {
            cx.counts.late += 1;
            let known = self.restores.values().any(|restore| restore.lease == lease);
            if lease != 0 && !known {
                self.release(lease, Outcome::Deadline, 0, cx);
            }
            return;
        };
        if lease == 0 {
            let had = restore.device_boundary as usize;
            self.restores.remove(&req);
            if reason == Some(Miss::DeviceAsDeep) {
                self.rely(req, had, cx);
            }
            let reason = reason.map_or("none", |reason| reason.as_str());
            *cx.counts.misses.entry(reason).or_default() += 1;
            return;
        }
        (restore.lease, restore.tier, restore.since) = (lease, tier, cx.now);
        cx.counts.leased += 1;
        let (state, row) = (cx.device.state.packed_len(), cx.device.kv.token_bytes());
        let sound = boundary > restore.device_boundary
            && boundary <= restore.max_boundary
            && kv_from <= restore.device_kv.min(boundary);
        let takes = takes(&parts, kv_from, boundary, state as u64, row as u64).ok();
        let ring = self.ring.bytes();
        let fits = |takes: &Vec<Take>| takes.iter().all(|take| take.bytes <= ring);
        let Some(takes) = takes.filter(|takes| sound && fits(takes)) else {
            cx.counts.garbled += 1;
            self.step_and_end(req, Outcome::FillFailed, cx);
            return;
        };
        let page = cx.device.kv.page_size() as u32;
        if !boundary.is_multiple_of(page) {
            self.ask_past(req, boundary - boundary % page, cx);
            return;
        }
        let bytes: u64 = takes.iter().map(|take| take.bytes).sum();
        restore.streams = bytes > ring / 2;
        (restore.boundary, restore.kv_from) = (boundary, kv_from);
        restore.pieces = takes.into_iter().map(|take| (take, At::Daemon)).collect();
        restore.step(cx.now, RestoreState::found);
    }

    /// The snapshot found ends inside one of our pages: asks for one at `max_boundary` or before.
    fn ask_past(&mut self, req: u64, max_boundary: u32, cx: &mut Cx<'_>) {
        let Some(restore) = self.restores.remove(&req) else {
            return;
        };
        self.release(restore.lease, Outcome::NoDeviceRoom, 0, cx);
        let deeper = max_boundary > restore.device_boundary;
        if !deeper || restore.attempt >= MAX_ATTEMPTS {
            return;
        }
        self.talk.next_attempt(req);
        let found = Match {
            boundary: restore.device_boundary as usize,
            kv_tokens: restore.device_kv as usize,
            ..Match::default()
        };
        self.ask(req, max_boundary, &found, cx);
        if let Some(again) = self.restores.get_mut(&req) {
            (again.considered, again.started) = (restore.considered, restore.started);
        }
    }

    /// As [`Self::end_restore`], for a lease that was not taken over yet.
    fn step_and_end(&mut self, req: u64, outcome: Outcome, cx: &mut Cx<'_>) {
        if let Some(restore) = self.restores.get_mut(&req) {
            restore.step(cx.now, RestoreState::found);
        }
        self.end_restore(req, outcome, 0, cx);
    }
}
