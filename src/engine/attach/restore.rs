//! The worker's restores: from a question to the daemon to state and KV in the device's cache.
//!
//! # What
//!
//! A request is looked up when it arrives, and waits for the answer when it is first considered for
//! admission; from then on each step has a deadline. What the device has is not fetched again: after
//! the loss of a state alone only the state moves.
//!
//! # Order
//!
//! Pages last: bytes come into the ring first, see [`super::place`] for what follows. A prefix larger
//! than the ring's share streams through the ring into pages that are held meanwhile.
//!
//! # Cancellation
//!
//! A restore that ends early gives everything back at once but rooms that the daemon may still be
//! writing to: those stay taken until it answers. The lease is released last.

use std::time::Duration;

use super::plan::Take;
use super::restore_state::RestoreState;
use super::ring::Room;
use super::session::{Cx, Flight, Session};
use crate::engine::cache::{Match, NodeId};
use crate::engine::device_memory::DeviceMemory;
use crate::engine::memory::{Gate, Holdings};
use crate::engine::request::RequestInfo;
use crate::proto::channel::layout::{Outcome, Piece, RevokeReason, Status, Tier};
use crate::proto::channel::msg::{Fill, Filled, Release, Revoke};

use super::place::Raw;

/// Pieces that a streaming restore has asked for at once.
const STREAM_WINDOW: usize = 8;

/// One restore.
#[derive(Debug)]
pub(super) struct Restore {
    pub state: RestoreState,
    /// When it last moved.
    pub since: Duration,
    /// When the request began to wait for it.
    pub started: Duration,
    /// The request was considered for admission.
    pub considered: bool,
    pub attempt: u32,
    pub max_boundary: u32,
    /// What the device had when the daemon was asked.
    pub device_boundary: u32,
    pub device_kv: u32,
    pub lease: u64,
    pub boundary: u32,
    pub kv_from: u32,
    pub tier: Option<Tier>,
    /// What moves, and where it is.
    pub pieces: Vec<(Take, At)>,
    /// It goes through the ring piece by piece.
    pub streams: bool,
    /// Node whose KV is locked: what the device has of the prefix.
    pub locked: Option<NodeId>,
    /// Pages and a slot that nobody else knows of.
    pub raw: Option<Raw>,
    /// Node that is locked with its state.
    pub placed: Option<NodeId>,
    /// How the lease ends, from [`RestoreState::Releasing`] on.
    release: Option<(Outcome, u32)>,
}

/// Where a piece is.
#[derive(Debug)]
pub(super) enum At {
    Daemon,
    Flying,
    Ring(Room),
    Pool,
}

// === impl Restore ===

impl Restore {
    /// One whose daemon was asked just now; `found` is what the device has.
    pub fn new(now: Duration, attempt: u32, max_boundary: u32, found: &Match) -> Self {
        Self {
            state: RestoreState::LookingUp,
            since: now,
            started: now,
            considered: false,
            attempt,
            max_boundary,
            device_boundary: found.boundary as u32,
            device_kv: found.kv_tokens as u32,
            lease: 0,
            boundary: 0,
            kv_from: 0,
            tier: None,
            pieces: Vec::new(),
            streams: false,
            locked: None,
            raw: None,
            placed: None,
            release: None,
        }
    }

    /// Gives back what it holds of the device.
    pub fn let_go(&mut self, device: &mut DeviceMemory) {
        self.relock(None, device);
        if let Some(raw) = self.raw.take() {
            raw.let_go(device);
        }
        if let Some(node) = self.placed.take() {
            device.unpin_state(node);
            device.unlock(node);
        }
    }

    /// Moves its lock on the device's part of the prefix.
    pub fn relock(&mut self, node: Option<NodeId>, device: &mut DeviceMemory) {
        if let Some(node) = node {
            device.lock(node);
        }
        if let Some(old) = std::mem::replace(&mut self.locked, node) {
            device.unlock(old);
        }
    }

    /// Whether the daemon keeps something for it.
    pub fn holds_lease(&self) -> bool {
        self.lease != 0
    }

    /// Adds what it holds of the pools.
    pub fn holdings(&self, holdings: &mut Holdings) {
        if let Some(raw) = &self.raw {
            holdings.slots.push(raw.slot);
            holdings.pages.extend(&raw.pages);
        }
    }

    /// Takes the step if the state has it.
    pub fn step(
        &mut self,
        now: Duration,
        step: fn(RestoreState) -> Result<RestoreState, RestoreState>,
    ) -> bool {
        // Any value does: it is replaced before anybody sees it.
        let state = std::mem::replace(&mut self.state, RestoreState::Releasing);
        match step(state) {
            Ok(state) => {
                (self.state, self.since) = (state, now);
                true
            }
            Err(state) => {
                self.state = state;
                false
            }
        }
    }
}

impl Session {
    /// Whether a request may be considered for admission; takes its restore on.
    pub fn gate(&mut self, request: &RequestInfo, cx: &mut Cx<'_>) -> Gate {
        let req = request.id.0;
        self.look_up_if_lost(request, cx);
        self.look_up_again(request, cx);
        let Some(restore) = self.restores.get_mut(&req) else {
            return Gate::Open;
        };
        if !std::mem::replace(&mut restore.considered, true) {
            (restore.since, restore.started) = (cx.now, cx.now);
        }
        if cx.control.holds_restore(&restore.state) {
            return match restore.state {
                RestoreState::Releasing => Gate::Open,
                _ => Gate::Hold,
            };
        }
        match restore.state {
            RestoreState::Leased => self.fetch(request, cx),
            RestoreState::Placing => self.place(request, cx),
            _ => {}
        }
        self.look_up_again(request, cx);
        let restore = self.restores.get(&req);
        match restore.map(|restore| (&restore.state, cx.control.holds_restore(&restore.state))) {
            None | Some((RestoreState::Releasing, _)) => Gate::Open,
            Some((_, true)) => Gate::Hold,
            // Without room for it there is none for the request either: it waits in its turn.
            Some((RestoreState::Placing | RestoreState::Placed, false)) => Gate::Open,
            Some((_, false)) => Gate::Hold,
        }
    }

    /// A request was admitted and holds its own lock on `found`.
    pub fn admitted(&mut self, req: u64, found: &Match, cx: &mut Cx<'_>) {
        self.again.remove(&req);
        self.relied.remove(&req);
        let Some(restore) = self.restores.get(&req) else {
            return;
        };
        let (boundary, had) = (restore.boundary, restore.device_boundary);
        let (outcome, reused) = match restore.state {
            RestoreState::Placed if found.boundary == boundary as usize => {
                (Outcome::Used, boundary - had)
            }
            RestoreState::Placed => (Outcome::DeviceAsDeep, 0),
            RestoreState::Placing => (Outcome::NoDeviceRoom, 0),
            RestoreState::LookingUp | RestoreState::Leased | RestoreState::Filling => {
                (Outcome::Deadline, 0)
            }
            RestoreState::Releasing => return,
        };
        cx.counts.reused_tokens += u64::from(reused);
        if let Some(restored) = cx
            .tracked
            .get_mut(&req)
            .and_then(|tracked| tracked.restored.as_mut())
        {
            restored.reused_tokens = reused as usize;
        }
        self.end_restore(req, outcome, reused, cx);
    }

    /// Asks for the pieces, once there is room for them.
    fn fetch(&mut self, request: &RequestInfo, cx: &mut Cx<'_>) {
        let req = request.id.0;
        let limit = request.prompt.len().saturating_sub(1);
        let found = cx.device.peek(&request.namespace, &request.prompt, limit);
        let Some(restore) = self.restores.get_mut(&req) else {
            return;
        };
        if found.boundary >= restore.boundary as usize {
            return self.end_restore(req, Outcome::DeviceAsDeep, 0, cx);
        }
        if found.kv_tokens < restore.kv_from as usize {
            // The device lost what it had when the daemon was asked.
            self.end_restore(req, Outcome::NoDeviceRoom, 0, cx);
            self.again.insert(req);
            return;
        }
        restore.relock(found.kv_node.filter(|_| found.kv_tokens > 0), cx.device);
        if restore.streams {
            if self.take_raw(request, cx) {
                self.fill_next(req, cx);
                if let Some(restore) = self.restores.get_mut(&req) {
                    restore.step(cx.now, RestoreState::asked);
                }
            }
            return;
        }
        // Saves may fill the ring; a restore takes all that it needs at once, or waits.
        let sizes = restore.pieces.iter().map(|(take, _)| take.bytes);
        let Some(rooms) = self.ring.alloc_all(sizes) else {
            return;
        };
        let lease = restore.lease;
        for ((take, at), room) in restore.pieces.iter_mut().zip(rooms) {
            *at = At::Flying;
            self.talk.say(fill(lease, take, &room));
            self.flights.insert(flight(lease, take), room);
        }
        restore.step(cx.now, RestoreState::asked);
    }

    /// Asks for the next pieces of a streaming restore, as far as there is room.
    fn fill_next(&mut self, req: u64, cx: &Cx<'_>) {
        let Some(restore) = self.restores.get_mut(&req) else {
            return;
        };
        let lease = restore.lease;
        let flying = |(_, at): &&(Take, At)| matches!(at, At::Flying);
        let mut window = STREAM_WINDOW.saturating_sub(restore.pieces.iter().filter(flying).count());
        for (take, at) in &mut restore.pieces {
            if window == 0 {
                return;
            }
            if !matches!(at, At::Daemon) {
                continue;
            }
            let Some(room) = self.ring.alloc(take.bytes) else {
                return;
            };
            window -= 1;
            *at = At::Flying;
            restore.since = cx.now;
            self.talk.say(fill(lease, take, &room));
            self.flights.insert(flight(lease, take), room);
        }
    }

    /// Pieces are in the ring, or never will be.
    pub fn filled(&mut self, filled: &Filled, cx: &mut Cx<'_>) {
        let Filled {
            lease,
            piece,
            status,
            ..
        } = *filled;
        for index in self.answered(filled.into(), cx) {
            self.filled_one((lease, piece, index), status, cx);
        }
    }

    fn filled_one(
        &mut self,
        (lease, piece, index): (u64, Piece, u32),
        status: Status,
        cx: &mut Cx<'_>,
    ) {
        let Some(room) = self.flights.remove(&Flight::Fill(lease, piece, index)) else {
            cx.counts.garbled += 1;
            return;
        };
        let its = |(_, restore): &(&u64, &mut Restore)| restore.lease == lease;
        let found = self.restores.iter_mut().find(its);
        let fills = found.filter(|(_, restore)| restore.state == RestoreState::Filling);
        let Some((req, restore)) = fills.map(|(req, restore)| (*req, restore)) else {
            self.ring.free(room);
            cx.counts.late += 1;
            return;
        };
        if status != Status::Ok || self.ring.fetch(&room).is_err() {
            self.ring.free(room);
            return self.end_restore(req, Outcome::FillFailed, 0, cx);
        }
        restore.since = cx.now;
        let here = |(take, _): &&mut (Take, At)| (take.piece, take.index) == (piece, index);
        if let Some((_, at)) = restore.pieces.iter_mut().find(here) {
            *at = At::Ring(room);
        }
        if restore.streams {
            self.scatter(req, cx);
            self.fill_next(req, cx);
        }
        let Some(restore) = self.restores.get_mut(&req) else {
            return;
        };
        let here = |(_, at): &(Take, At)| matches!(at, At::Ring(_) | At::Pool);
        if restore.pieces.iter().all(here) {
            restore.step(cx.now, RestoreState::filled);
        }
    }

    /// The daemon takes a lease back.
    pub fn revoked(&mut self, revoke: &Revoke, cx: &mut Cx<'_>) {
        let Revoke { lease, reason } = *revoke;
        let its = |(_, restore): &(&u64, &Restore)| restore.lease == lease;
        let found = self.restores.iter().find(its);
        let Some((req, considered, state)) =
            found.map(|(req, restore)| (*req, restore.considered, &restore.state))
        else {
            cx.counts.late += 1;
            return;
        };
        let sound = matches!(reason, RevokeReason::Deadline | RevokeReason::Shutdown);
        let over = match state {
            RestoreState::LookingUp | RestoreState::Leased | RestoreState::Filling => true,
            // All bytes are here, and the daemon need not keep them any longer.
            RestoreState::Placing => !sound,
            RestoreState::Placed | RestoreState::Releasing => false,
        };
        if over {
            self.end_restore(req, outcome_of(reason), 0, cx);
            if !considered && reason == RevokeReason::Deadline {
                self.again.insert(req);
            }
        }
    }

    /// Deadlines, and leases that can be given back.
    pub fn tend_restores(&mut self, cx: &mut Cx<'_>) {
        let all: Vec<u64> = self.restores.keys().copied().collect();
        for req in all {
            let Some(restore) = self.restores.get(&req) else {
                continue;
            };
            let limit = match restore.state {
                // Its bytes are here and its request waits for memory, as others do before it.
                RestoreState::Placing => cx.limits.patience.saturating_mul(10),
                _ => cx.limits.patience,
            };
            let waits = restore.considered || restore.state == RestoreState::Releasing;
            let late = waits && cx.now.saturating_sub(restore.since) > limit;
            if late {
                cx.counts.deadline("restore", restore.state.as_str());
            }
            match restore.state {
                RestoreState::LookingUp if late => {
                    self.restores.remove(&req);
                }
                RestoreState::Releasing if late || !cx.control.holds_restore(&restore.state) => {
                    self.finish_release(req, cx);
                }
                _ if late => self.end_restore(req, Outcome::Deadline, 0, cx),
                RestoreState::Filling
                    if restore.streams && !cx.control.holds_restore(&restore.state) =>
                {
                    self.fill_next(req, cx);
                }
                _ => {}
            }
        }
    }

    /// Ends a restore in whatever state it is.
    pub fn end_restore(&mut self, req: u64, outcome: Outcome, reused: u32, cx: &mut Cx<'_>) {
        let Some(restore) = self.restores.get_mut(&req) else {
            return;
        };
        restore.let_go(cx.device);
        for (_, at) in restore.pieces.drain(..) {
            if let At::Ring(room) = at {
                self.ring.free(room);
            }
        }
        if restore.step(cx.now, RestoreState::ended) {
            restore.release = Some((outcome, reused));
            if !cx.control.holds_restore(&restore.state) {
                self.finish_release(req, cx);
            }
        } else if restore.state == RestoreState::LookingUp {
            self.restores.remove(&req);
        }
    }

    /// Gives the lease back. Rooms that the daemon may still write to wait for its answer in
    /// [`Session::flights`].
    fn finish_release(&mut self, req: u64, cx: &mut Cx<'_>) {
        let Some(restore) = self.restores.remove(&req) else {
            return;
        };
        let (outcome, reused) = restore.release.unwrap_or((Outcome::Aborted, 0));
        self.release(restore.lease, outcome, reused, cx);
    }

    pub fn release(&mut self, lease: u64, outcome: Outcome, reused: u32, cx: &mut Cx<'_>) {
        if outcome != Outcome::Used {
            *cx.counts.unused.entry(outcome.as_str()).or_default() += 1;
        }
        self.talk.say(Release {
            lease,
            outcome,
            reused,
        });
    }
}

fn outcome_of(reason: RevokeReason) -> Outcome {
    match reason {
        RevokeReason::Deadline | RevokeReason::Shutdown => Outcome::Deadline,
        RevokeReason::Lost | RevokeReason::StaleEpoch => Outcome::FillFailed,
    }
}

fn flight(lease: u64, take: &Take) -> Flight {
    Flight::Fill(lease, take.piece, take.index)
}

fn fill(lease: u64, take: &Take, room: &Room) -> Fill {
    Fill {
        lease,
        piece: take.piece,
        index: take.index,
        count: 1,
        ring_offset: room.offset(),
        bytes: room.bytes(),
    }
}
