//! A worker's saves: from its offers to visible snapshots.
//!
//! # What
//! An offer is planned at once: what is stored already is asked of the index, the rest is cut into
//! pieces, and RAM for them is taken before the worker hears of it. Each drained piece is copied
//! into its own block. When all are in, the snapshot is committed, and only then anything of it can
//! be found.
//!
//! # Order
//! Saves of one request follow each other. A deeper offer replaces an older one of which nothing
//! was drained. One that is being drained is waited for: its KV is not asked for twice, and the
//! deeper save commits after it.
//!
//! A rank of several takes over the plan of the first that offered, and hands its pieces over to be
//! committed with those of the others (`shard`).
//!
//! # Cancellation
//! A save ends by commit, by the worker's abort, by an epoch, by a deadline, by a fault, or with
//! the session. Until its commit it is a set of blocks that nobody else knows; a copy under way
//! holds its own block.

use std::sync::Arc;
use std::time::Duration;

use super::copies::{Copy, What};
use super::{Ended, Session};
use crate::device::DeviceError;
use crate::index::TreeKey;
use crate::proto::channel::layout::{CloseReason, DeclineReason, Status};
use crate::proto::channel::msg::{Drain, Drained, SaveAbort, Saved};
use crate::proto::channel::run::{Run, places};
use crate::service::commit::{Block, Commit, ShardBlocks};
use crate::service::core::Model;
use crate::service::hold::Point;
use crate::service::metrics;
use crate::service::room::Reservation;
use crate::service::save_state::SaveState;
use crate::store::Segment;
use crate::types::{SnapshotId, TokenRange};

/// One save.
#[derive(Debug)]
pub(super) struct Save {
    pub(super) state: SaveState,
    /// Tells it apart from others of the same number.
    pub(super) serial: u64,
    pub(super) req: u64,
    pub(super) boundary: u32,
    pub(super) model: Arc<Model>,
    pub(super) key: TreeKey,
    /// KV of `[0, base)` is stored, or comes with `after`.
    pub(super) base: u32,
    /// The save that brings KV up to `base`.
    pub(super) after: Option<u64>,
    /// The state first, then KV by position.
    pub(super) parts: Vec<Part>,
    /// Their room in the RAM tier.
    pub(super) room: Option<Reservation>,
    /// Parts that are not in yet.
    pub(super) missing: usize,
    /// They were handed over, to wait for those of the other ranks.
    pub(super) brought: bool,
    pub(super) offered: Duration,
    /// When the worker last did something about it.
    pub(super) active: Duration,
}

/// One piece of a save.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) range: TokenRange,
    pub(super) bytes: u64,
    pub(super) segment: Option<Arc<Segment>>,
    pub(super) at: PartAt,
}

#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum PartAt {
    Worker,
    Copying,
    In,
}

impl Save {
    /// Nothing of it has arrived.
    pub(super) fn is_untouched(&self) -> bool {
        self.parts.iter().all(|part| part.at == PartAt::Worker)
    }

    /// Hands over all pieces, which are in.
    pub(super) fn take_blocks(&mut self) -> Option<ShardBlocks> {
        let blocks = self.parts.iter_mut().map(|part| {
            let segment = part.segment.take()?;
            Some(Block {
                range: part.range,
                segment,
            })
        });
        let mut kv = blocks.collect::<Option<Vec<Block>>>()?;
        let state = (!kv.is_empty()).then(|| kv.remove(0))?.segment;
        Some(ShardBlocks { state, kv })
    }

    /// Takes over the pieces of a run, which are still the worker's: the index of each in `parts`,
    /// where it lies in a ring of `ring` bytes, and where it goes. `None`: not so, and nothing is
    /// taken over.
    fn take_over(&mut self, run: Run, (at, bytes): (u64, u64), ring: u64) -> Option<Vec<Taken>> {
        let range = run.of_list(self.parts.len())?;
        let parts = self.parts.get_mut(range.clone())?;
        let (starts, span) = places(at, parts.iter().map(|part| part.bytes))?;
        let fits = span == bytes && at.checked_add(span).is_some_and(|end| end <= ring);
        if !fits || parts.iter().any(|part| part.at != PartAt::Worker) {
            return None;
        }
        let taken = range.zip(starts).zip(parts.iter());
        let taken = taken.map(|((part, ring_offset), Part { segment, .. })| {
            Some(Taken {
                part,
                ring_offset,
                segment: Arc::clone(segment.as_ref()?),
            })
        });
        let taken = taken.collect::<Option<Vec<Taken>>>()?;
        parts.iter_mut().for_each(|part| part.at = PartAt::Copying);
        Some(taken)
    }
}

/// One piece that lies in the ring.
struct Taken {
    part: usize,
    ring_offset: u64,
    segment: Arc<Segment>,
}

/// How one piece ended.
fn drained(save: u64, part: usize, status: Status) -> Drained {
    let Run {
        piece,
        index,
        count,
    } = Run::of_part(part);
    Drained {
        save,
        piece,
        index,
        count,
        status,
    }
}

impl Session {
    /// A run of pieces lies in the ring.
    pub(super) async fn drain(&mut self, drain: Drain) -> Ended {
        let run = Run::from(&drain);
        let Drain {
            save: id,
            piece,
            index,
            count,
            ring_offset,
            bytes,
        } = drain;
        let now = self.service.clock.monotonic();
        let ring = self.copies.ring_len();
        let answer = |status| Drained {
            save: id,
            piece,
            index,
            count,
            status,
        };
        let Some(save) = self.saves.get_mut(&id) else {
            return self.say(answer(Status::Cancelled));
        };
        save.active = now;
        let serial = save.serial;
        let Some(run) = save.take_over(run, (ring_offset, bytes), ring) else {
            self.say(answer(Status::BadRequest))?;
            return self
                .drop_save(id, Status::BadRequest, DeclineReason::BadRequest)
                .await;
        };
        if save.state == SaveState::Wanted {
            self.advance(id, SaveState::Draining);
            self.hold(Point::Save(&SaveState::Draining)).await;
        }
        let mut full = false;
        for Taken {
            part,
            ring_offset,
            segment,
        } in run
        {
            let what = What::Drain {
                serial,
                save: id,
                part,
            };
            full = full
                || !self.copies.start(Copy {
                    what,
                    ring_offset,
                    segment,
                });
            if full {
                self.say(drained(id, part, Status::NoRoom))?;
            }
        }
        if full {
            return self
                .drop_save(id, Status::NoRoom, DeclineReason::NoRoom)
                .await;
        }
        Ok(())
    }

    /// A piece came out of the ring, or did not.
    pub(super) async fn drained(
        &mut self,
        (serial, id, part): (u64, u64, usize),
        result: Result<(), DeviceError>,
    ) -> Ended {
        let now = self.service.clock.monotonic();
        let save = self.saves.get_mut(&id).filter(|save| save.serial == serial);
        let Some(save) = save else {
            return self.say(drained(id, part, Status::Cancelled));
        };
        save.active = now;
        if self.has_left() {
            return self.left_behind(id).await;
        }
        if let Err(error) = result {
            tracing::warn!(%error, save = id, "A piece could not be copied out of the ring");
            self.service.metrics.error("copy");
            self.say(drained(id, part, Status::Failed))?;
            return self
                .drop_save(id, Status::Failed, DeclineReason::BadRequest)
                .await;
        }
        let mut whole = false;
        if let Some(save) = self.saves.get_mut(&id)
            && let Some(part) = save.parts.get_mut(part)
        {
            part.at = PartAt::In;
            save.missing -= 1;
            whole = save.missing == 0;
        }
        self.say(drained(id, part, Status::Ok))?;
        if whole { self.whole(id).await } else { Ok(()) }
    }

    /// The worker gave the daemon up, and may use the memory of its ring for something else: what was
    /// copied out of it since, or may have been, counts for nothing. A worker that ends, or was killed,
    /// leaves its ring as it is.
    fn has_left(&self) -> bool {
        let reason = self.end.link.peer_closed();
        reason.is_some_and(|reason| reason != CloseReason::Shutdown)
    }

    /// Drops a save of a worker that left.
    async fn left_behind(&mut self, id: u64) -> Ended {
        self.drop_save(id, Status::Cancelled, DeclineReason::Disabled)
            .await
    }

    /// All parts are in. Commits it, and those that waited for it.
    pub(super) async fn whole(&mut self, id: u64) -> Ended {
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let Some(save) = self.saves.get(&id) else {
                break;
            };
            if save.state == SaveState::Draining {
                self.advance(id, SaveState::Committing);
                self.hold(Point::Save(&SaveState::Committing)).await;
            }
            if self.has_left() {
                return self.left_behind(id).await;
            }
            let after = self.saves.get(&id).and_then(|save| save.after);
            if after.is_some_and(|after| self.saves.contains_key(&after)) {
                break;
            }
            let (status, snapshot) = if self.is_shard() {
                match self.bring(id) {
                    // The last rank says how it ends.
                    None => break,
                    Some(Ok(snapshot)) => (Status::Ok, snapshot),
                    Some(Err(status)) => (status, [0; 16]),
                }
            } else {
                self.commit(id)
            };
            self.say(Saved {
                save: id,
                status,
                snapshot,
            })?;
            if status == Status::Ok {
                self.hold(Point::Save(&SaveState::Visible)).await;
            } else {
                self.service.metrics.drop_save(status.as_str());
            }
            next = self.end_save(id);
        }
        Ok(())
    }

    /// Makes a whole save visible.
    fn commit(&mut self, id: u64) -> (Status, [u8; 16]) {
        let failed = |status| (status, [0; 16]);
        let Some(save) = self.saves.get_mut(&id) else {
            return failed(Status::Failed);
        };
        let Some(request) = self.requests.get(save.req) else {
            return failed(Status::Cancelled);
        };
        let Some(tokens) = request.prefix(save.boundary) else {
            return failed(Status::BadRequest);
        };
        let Some(shard) = save.take_blocks() else {
            return failed(Status::Failed);
        };
        let commit = Commit {
            model: &save.model,
            namespace: &request.namespace,
            key: save.key,
            tokens,
            base: save.base,
            shards: vec![shard],
            rooms: save.room.take().into_iter().collect(),
            conversation: &request.conversation,
            owner: (self.worker.session, save.req),
            rid: &request.rid,
        };
        match self.service.commit(commit) {
            Ok(SnapshotId(uuid)) => (Status::Ok, uuid.into_bytes()),
            Err(error) => {
                tracing::warn!(%error, save = id, "A save could not be made visible");
                failed(error.status())
            }
        }
    }

    /// The worker gives a save up.
    pub(super) async fn save_abort(&mut self, abort: SaveAbort) -> Ended {
        let SaveAbort { save: id, reason } = abort;
        if self.saves.contains_key(&id) {
            metrics::count(&self.service.metrics.dropped, reason.as_str());
            self.say(Saved {
                save: id,
                status: Status::Cancelled,
                snapshot: [0; 16],
            })?;
            let waiting = self.end_save(id);
            return self.fail_waiting(waiting).await;
        }
        Ok(())
    }

    /// Drops a save and tells the worker: by a decline if it has no answer yet.
    pub(super) async fn drop_save(
        &mut self,
        id: u64,
        status: Status,
        reason: DeclineReason,
    ) -> Ended {
        let Some(save) = self.saves.get(&id) else {
            return Ok(());
        };
        if save.state == SaveState::Reserving {
            self.decline(id, reason)?;
        } else {
            self.service.metrics.drop_save(reason.as_str());
            self.say(Saved {
                save: id,
                status,
                snapshot: [0; 16],
            })?;
        }
        let waiting = self.end_save(id);
        self.fail_waiting(waiting).await
    }

    /// A save that waited for one that came to nothing may still commit: its KV may be stored by
    /// now.
    async fn fail_waiting(&mut self, waiting: Option<u64>) -> Ended {
        match waiting {
            Some(id) => Box::pin(self.whole(id)).await,
            None => Ok(()),
        }
    }

    /// Takes a save out. Returns one that waited for it and is whole.
    pub(super) fn end_save(&mut self, id: u64) -> Option<u64> {
        let save = self.saves.remove(&id)?;
        self.leave(id);
        self.count_save(save.req, -1);
        let request = self.requests.get(save.req);
        if request.is_some_and(|request| request.closed && request.saves == 0) {
            self.forget_request(save.req);
        }
        let waits = |other: &Save| other.after == Some(id) && other.missing == 0;
        self.saves
            .iter()
            .find(|(_, other)| waits(other))
            .map(|(id, _)| *id)
    }

    /// A save of a request begins or ends: those who ask by name wait for its end.
    pub(super) fn count_save(&mut self, req: u64, by: i32) {
        if let Some(request) = self.requests.get_mut(req) {
            request.saves = request.saves.saturating_add_signed(by);
            let owner = (self.worker.session, req);
            let mut core = self.service.core.lock();
            core.conversations
                .count_saves(&request.conversation, owner, by);
            drop(core);
            self.service.changed.notify_waiters();
        }
    }

    /// Saves that wait for room, and deadlines.
    pub(super) async fn tend_saves(&mut self) -> Ended {
        let now = self.service.clock.monotonic();
        let limit = self.service.config.save_timeout;
        let mut waiting = Vec::new();
        let mut late = Vec::new();
        for (id, save) in &self.saves {
            if save.state == SaveState::Reserving {
                waiting.push((save.offered, *id));
            } else if now.saturating_sub(save.active) > limit {
                late.push(*id);
            }
        }
        for id in late {
            let waits = self.saves.get(&id).is_some_and(|save| save.brought);
            let status = if waits {
                Status::OtherRank
            } else {
                Status::Cancelled
            };
            self.drop_save(id, status, DeclineReason::BadRequest)
                .await?;
        }
        waiting.sort_unstable();
        for (_, id) in waiting {
            self.reserve(id).await?;
        }
        Ok(())
    }

    /// Ends every save of a request, or all.
    pub(super) async fn drop_saves(
        &mut self,
        of: Option<u64>,
        status: Status,
        reason: DeclineReason,
    ) -> Ended {
        let mut ids: Vec<(u32, u64)> = self
            .saves
            .iter()
            .filter(|(_, save)| of.is_none_or(|req| save.req == req))
            .map(|(id, save)| (save.boundary, *id))
            .collect();
        // The deepest first, so that none is left waiting for another.
        ids.sort_unstable_by(|a, b| b.cmp(a));
        for (_, id) in ids {
            self.drop_save(id, status, reason).await?;
        }
        Ok(())
    }

    pub(super) fn advance(&mut self, id: u64, to: SaveState) {
        if let Some(mut save) = self.saves.remove(&id) {
            save.state = self.step(save.state, to);
            self.saves.insert(id, save);
        }
    }

    pub(super) fn step(&self, state: SaveState, to: SaveState) -> SaveState {
        let name = state.as_str();
        match state.step(to) {
            Ok(state) => state,
            Err(_) => unreachable!("a save leaves {name} only by the steps that it has"),
        }
    }
}
