//! The worker's saves: from an offer to the daemon's word that the snapshot is visible.
//!
//! # What
//!
//! Each state that is inserted into the device's cache is offered. What the daemon lacks of it and
//! of its KV is copied into the ring, the state first: it may be evicted at any time, as a save never
//! keeps a slot. The KV is locked from the daemon's answer until its last piece is in the ring.
//!
//! # Order
//!
//! A deeper state of the same request takes the place of one of which nothing was gathered.
//!
//! # Cancellation
//!
//! A save that ends early tells the daemon so. A piece that the daemon may still be reading keeps
//! its room in the ring until the daemon answers, whatever became of the save.

use std::time::Duration;

use super::plan::ranges;
use super::save_state::SaveState;
use super::session::{Cx, Flight, Session};
use super::talk::EPOCH;
use crate::engine::cache::NodeId;
use crate::engine::device_memory::DeviceMemory;
use crate::engine::memory::Boundary;
use crate::proto::channel::layout::{AbortReason, Piece, Status};
use crate::proto::channel::msg::{Decline, Drain, Drained, Offer, SaveAbort, Saved, Want};
use crate::types::TokenRange;

/// One save.
#[derive(Debug)]
pub(super) struct Save {
    pub state: SaveState,
    req: u64,
    node: NodeId,
    boundary: u32,
    /// The state first, then KV.
    parts: Vec<Part>,
    /// The KV is locked.
    locked: bool,
    /// When it last moved.
    since: Duration,
}

/// One piece that is wanted.
#[derive(Clone, Copy, Debug)]
struct Part {
    piece: Piece,
    index: u32,
    range: TokenRange,
    at: PartAt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartAt {
    Pool,
    Ring,
    Daemon,
}

/// What keeps a piece from the ring.
enum Obstacle {
    /// No room now.
    Room,
    /// The save cannot go on.
    Abort(AbortReason),
}

// === impl Save ===

impl Save {
    /// Gives back what it holds of the device.
    pub fn let_go(mut self, device: &mut DeviceMemory) {
        self.unlock(device);
    }

    fn unlock(&mut self, device: &mut DeviceMemory) {
        if std::mem::take(&mut self.locked) {
            device.unlock(self.node);
        }
    }

    fn is_ungathered(&self) -> bool {
        self.parts.iter().all(|part| part.at == PartAt::Pool)
    }

    fn all_at(&self, at: PartAt) -> bool {
        self.parts.iter().all(|part| part.at == at)
    }
}

impl Session {
    /// Offers the state at a node, if there is one. `number` is the save's.
    pub fn offer(&mut self, number: u64, req: u64, at: Boundary<'_>, cx: &mut Cx<'_>) {
        let Boundary { node, tokens } = at;
        let Ok(boundary) = u32::try_from(tokens.len()) else {
            return;
        };
        self.talk.tokens(req, tokens);
        let under_way = self.saves.values().any(|save| save.node == node);
        if under_way || cx.device.cache().state_of(node).is_none() {
            return;
        }
        self.supersede(req, boundary, cx);
        cx.counts.offered += 1;
        self.talk.say(Offer {
            save: number,
            req,
            attempt: self.talk.attempt(req),
            boundary,
            epoch: EPOCH,
        });
        let save = Save {
            state: SaveState::Offered,
            req,
            node,
            boundary,
            parts: Vec::new(),
            locked: false,
            since: cx.now,
        };
        self.saves.insert(number, save);
    }

    /// Drops shallower saves of a request of which nothing was gathered.
    fn supersede(&mut self, req: u64, boundary: u32, cx: &mut Cx<'_>) {
        let older = |save: &Save| {
            let early = matches!(save.state, SaveState::Offered | SaveState::Gathering);
            save.req == req && save.boundary < boundary && early && save.is_ungathered()
        };
        let older: Vec<u64> = self
            .saves
            .iter()
            .filter(|(_, save)| older(save))
            .map(|(number, _)| *number)
            .collect();
        for number in older {
            if self.talk.unsay_offer(number) {
                self.saves.remove(&number);
                cx.counts.drop_save(AbortReason::Superseded.as_str());
            } else {
                self.abort_save(number, AbortReason::Superseded, cx);
            }
        }
    }

    /// Gives a save up and tells the daemon.
    fn abort_save(&mut self, number: u64, reason: AbortReason, cx: &mut Cx<'_>) {
        if let Some(save) = self.saves.remove(&number) {
            save.let_go(cx.device);
            cx.counts.drop_save(reason.as_str());
            self.talk.say(SaveAbort {
                save: number,
                reason,
            });
        }
    }

    /// Gives up what still needs the device's cache, which is about to be emptied.
    pub fn abort_gathering(&mut self, cx: &mut Cx<'_>) {
        let early = |save: &Save| matches!(save.state, SaveState::Offered | SaveState::Gathering);
        let early: Vec<u64> = self
            .saves
            .iter()
            .filter(|(_, save)| early(save))
            .map(|(number, _)| *number)
            .collect();
        for number in early {
            self.abort_save(number, AbortReason::Evicted, cx);
        }
    }

    /// The daemon says what it lacks.
    pub fn wanted(&mut self, want: &Want, cx: &mut Cx<'_>) {
        let Want {
            save: number,
            need_state,
            parts,
        } = want;
        let Some(mut save) = self.saves.remove(number) else {
            cx.counts.late += 1;
            return;
        };
        match save.state.wanted() {
            Ok(state) => save.state = state,
            Err(state) => {
                save.state = state;
                self.saves.insert(*number, save);
                cx.counts.garbled += 1;
                return;
            }
        }
        let (number, boundary) = (*number, save.boundary);
        save.since = cx.now;
        let ranges = ranges(parts).ok().filter(|ranges| {
            let inside = ranges.iter().all(|range| range.end <= boundary);
            inside && ranges.is_sorted_by(|a, b| a.end <= b.start)
        });
        let Some(ranges) = ranges else {
            self.saves.insert(number, save);
            cx.counts.garbled += 1;
            self.abort_save(number, AbortReason::GatherFailed, cx);
            return;
        };
        let at = TokenRange {
            start: boundary,
            end: boundary,
        };
        let state = need_state.then_some((Piece::State, 0, at));
        let kv = (0..)
            .zip(ranges)
            .map(|(index, range)| (Piece::Kv, index, range));
        save.parts = state
            .into_iter()
            .chain(kv)
            .map(|(piece, index, range)| Part {
                piece,
                index,
                range,
                at: PartAt::Pool,
            })
            .collect();
        // Only a node that still ends there can be locked: it may have been evicted meanwhile.
        let there = cx.device.cache().end_of(save.node) == Some(boundary as usize);
        if there {
            cx.device.lock(save.node);
            save.locked = true;
        }
        self.saves.insert(number, save);
        if there {
            self.drive_save(number, cx);
        } else {
            self.abort_save(number, AbortReason::Evicted, cx);
        }
    }

    /// The daemon wants nothing.
    pub fn declined(&mut self, decline: &Decline, cx: &mut Cx<'_>) {
        let Decline { save, reason } = decline;
        match self.saves.remove(save) {
            Some(save) => {
                save.let_go(cx.device);
                *cx.counts.declined.entry(reason.as_str()).or_default() += 1;
            }
            None => cx.counts.late += 1,
        }
    }

    /// Pieces are out of the ring, or never will be.
    pub fn drained(&mut self, drained: &Drained, cx: &mut Cx<'_>) {
        let Drained {
            save,
            piece,
            status,
            ..
        } = *drained;
        for index in self.answered(drained.into(), cx) {
            self.drained_one((save, piece, index), status, cx);
        }
    }

    fn drained_one(
        &mut self,
        (number, piece, index): (u64, Piece, u32),
        status: Status,
        cx: &mut Cx<'_>,
    ) {
        match self.flights.remove(&Flight::Drain(number, piece, index)) {
            Some(room) => self.ring.free(room),
            None => {
                cx.counts.garbled += 1;
                return;
            }
        }
        let Some(save) = self.saves.get_mut(&number) else {
            cx.counts.late += 1;
            return;
        };
        // How the save ends is said by `Saved`.
        if status != Status::Ok {
            return;
        }
        save.since = cx.now;
        let its = |part: &&mut Part| (part.piece, part.index) == (piece, index);
        if let Some(part) = save.parts.iter_mut().find(its) {
            part.at = PartAt::Daemon;
        }
        self.drive_save(number, cx);
    }

    /// The daemon says how a save ended.
    pub fn saved(&mut self, saved: &Saved, cx: &mut Cx<'_>) {
        let Saved {
            save: number,
            status,
            snapshot: _,
        } = saved;
        let Some(save) = self.saves.remove(number) else {
            cx.counts.late += 1;
            return;
        };
        match (status, &save.state) {
            (Status::Ok, SaveState::Finishing) => cx.counts.saved += 1,
            (Status::Ok, _) => {
                cx.counts.garbled += 1;
                cx.counts.drop_save("garbled");
            }
            (status, _) => cx.counts.drop_save(status.as_str()),
        }
        save.let_go(cx.device);
    }

    /// Deadlines, and what waits for room.
    pub fn tend_saves(&mut self, cx: &mut Cx<'_>) {
        let numbers: Vec<u64> = self.saves.keys().copied().collect();
        for number in numbers {
            let Some(save) = self.saves.get(&number) else {
                continue;
            };
            if cx.now.saturating_sub(save.since) <= cx.limits.save_patience {
                self.drive_save(number, cx);
                continue;
            }
            cx.counts.deadline("save", save.state.as_str());
            let reason = match save.state {
                SaveState::Gathering => AbortReason::NoRoom,
                SaveState::Offered | SaveState::Draining | SaveState::Finishing => {
                    AbortReason::Deadline
                }
            };
            self.abort_save(number, reason, cx);
        }
    }

    /// Takes a save as far as it goes now.
    fn drive_save(&mut self, number: u64, cx: &mut Cx<'_>) {
        while let Some(save) = self.saves.get(&number) {
            if cx.control.holds_save(&save.state) {
                return;
            }
            match save.state {
                SaveState::Offered | SaveState::Finishing => return,
                SaveState::Gathering => {
                    self.gather(number, cx);
                    let Some(save) = self.saves.get_mut(&number) else {
                        return;
                    };
                    if save.parts.iter().any(|part| part.at == PartAt::Pool) {
                        return;
                    }
                    save.unlock(cx.device);
                    self.step_save(number, cx, SaveState::gathered);
                }
                SaveState::Draining => {
                    if !save.all_at(PartAt::Daemon) {
                        return;
                    }
                    self.step_save(number, cx, SaveState::drained);
                }
            }
        }
    }

    fn step_save(
        &mut self,
        number: u64,
        cx: &Cx<'_>,
        step: fn(SaveState) -> Result<SaveState, SaveState>,
    ) {
        if let Some(mut save) = self.saves.remove(&number) {
            save.state = step(save.state).unwrap_or_else(|state| state);
            save.since = cx.now;
            self.saves.insert(number, save);
        }
    }

    /// Copies pieces into the ring and hands them to the daemon, as long as there is room.
    fn gather(&mut self, number: u64, cx: &mut Cx<'_>) {
        let Some(mut save) = self.saves.remove(&number) else {
            return;
        };
        let mut abort = None;
        for index in 0..save.parts.len() {
            let Some(part) = save.parts.get(index).copied() else {
                break;
            };
            if part.at != PartAt::Pool {
                continue;
            }
            match self.gather_part(number, &save, part, cx) {
                Ok(()) => {
                    save.since = cx.now;
                    if let Some(part) = save.parts.get_mut(index) {
                        part.at = PartAt::Ring;
                    }
                }
                Err(Obstacle::Room) => break,
                Err(Obstacle::Abort(reason)) => {
                    abort = Some(reason);
                    break;
                }
            }
        }
        self.saves.insert(number, save);
        if let Some(reason) = abort {
            self.abort_save(number, reason, cx);
        }
    }

    fn gather_part(
        &mut self,
        number: u64,
        save: &Save,
        part: Part,
        cx: &mut Cx<'_>,
    ) -> Result<(), Obstacle> {
        let failed = || Obstacle::Abort(AbortReason::GatherFailed);
        let evicted = || Obstacle::Abort(AbortReason::Evicted);
        let Part {
            piece,
            index,
            range,
            at: _,
        } = part;
        let (start, end) = (range.start as usize, range.end as usize);
        let device = &*cx.device;
        // The state is looked for before there is room: without it the rest is of no use.
        let slot = match piece {
            Piece::State => Some(device.cache().state_of(save.node).ok_or_else(evicted)?),
            Piece::Kv => None,
        };
        let bytes = match piece {
            Piece::State => device.state.packed_len(),
            Piece::Kv => (end - start) * device.kv.token_bytes(),
        };
        if bytes as u64 > self.ring.bytes() {
            return Err(failed());
        }
        let room = self.ring.alloc(bytes as u64).ok_or(Obstacle::Room)?;
        cx.scratch.resize(bytes, 0);
        let copied = match slot {
            Some(slot) => device.state.gather(slot, cx.scratch),
            None => {
                let pages = device.cache().pages_to(save.node).unwrap_or_default();
                device.kv.gather(&pages, start, end, cx.scratch)
            }
        };
        let ring = &self.ring;
        let sent = || {
            ring.write(&room, cx.scratch)
                .and_then(|()| ring.send(&room))
        };
        if copied.is_err() || sent().is_err() {
            self.ring.free(room);
            return Err(failed());
        }
        self.talk.say(Drain {
            save: number,
            piece,
            index,
            count: 1,
            ring_offset: room.offset(),
            bytes: room.bytes(),
        });
        self.flights
            .insert(Flight::Drain(number, piece, index), room);
        Ok(())
    }
}
