//! One attached worker: a task that reads what it says and drives its saves and restores.
//!
//! # What
//! The task owns everything of its worker: requests, saves, leases, the channel. It sleeps on the
//! worker's doorbell, on ends of copies and of reads from disk, and on a short timer, because a
//! bell can get lost. Each time it reads a bounded number of messages. It asks the service for what
//! is shared, under the service's own short lock; it waits for nothing but the three above.
//!
//! # Cancellation
//! The session ends when the worker closes it, breaks the protocol, goes away, is replaced, or is
//! sent away. Then every lease is given back, every unfinished save is dropped with its memory, and
//! the ring is closed, which waits for a copy under way. Nothing is written to the ring after that.
//!
//! # Errors
//! What the worker asked wrongly is answered. What cannot be (a broken record, an unknown value)
//! ends the session.

mod copies;
mod lookup;
mod offer;
mod outbox;
pub mod requests;
mod restore;
mod save;
mod shard;
mod turns;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::Service;
use super::core::Model;
use super::hold::Point;
use super::promote::PromoteError;
use super::workers::Worker;
use crate::device::{DeviceError, Listener, Ring};
use crate::proto::channel::layout::{CloseReason, DeclineReason, RevokeReason, Status};
use crate::proto::channel::msg::{Down, Up};
use crate::proto::channel::{Broken, DaemonEnd};
use crate::store::Object;
use crate::types::ObjectId;
use copies::{Copies, Copy, What};
use lookup::Waiting;
use outbox::{Outbox, OutboxError};
use requests::{Limits, Requests};
use restore::Restore;
use save::Save;

/// Messages read before copies that ended get their turn.
const BATCH: usize = 256;

/// The longest sleep: a doorbell that got lost costs at most this. Also the rhythm of beats.
const NAP: Duration = Duration::from_millis(5);

/// How long an ending session waits for drains under way.
const LAST_DRAINS: Duration = Duration::from_secs(2);

/// Something that ended elsewhere.
#[derive(Debug)]
pub(super) enum Event {
    /// A copy.
    Copied(Copy, Result<(), DeviceError>),
    /// A read from disk.
    Promoted {
        /// For which lease.
        lease: u64,
        /// What.
        object: ObjectId,
        /// How.
        result: Result<Object, PromoteError>,
    },
    /// A save of several ranks.
    Joined {
        /// The worker's number of it.
        save: u64,
        /// Tells it apart from others of the same number.
        serial: u64,
        /// The snapshot, or why there is none.
        result: Result<[u8; 16], Status>,
    },
}

/// Why a session ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    /// The worker breaks the protocol.
    #[error("the worker broke the protocol: {0}")]
    Broken(#[from] Broken),
    /// It cannot be told anything.
    #[error("the worker cannot be answered: {0}")]
    Outbox(#[from] OutboxError),
    /// The worker ended it.
    #[error("the worker ended the session ({})", .0.as_str())]
    Worker(CloseReason),
    /// The daemon ends it.
    #[error("the daemon ends the session ({})", .0.as_str())]
    Daemon(CloseReason),
}

/// Goes on, or the session ends.
pub(super) type Ended = Result<(), End>;

/// One attached worker.
pub(super) struct Session {
    pub(super) service: Arc<Service>,
    pub(super) worker: Arc<Worker>,
    end: DaemonEnd,
    bell: Listener,
    copies: Copies,
    outbox: Outbox,
    events: UnboundedReceiver<Event>,
    events_tx: UnboundedSender<Event>,
    requests: Requests,
    saves: HashMap<u64, Save>,
    restores: HashMap<u64, Restore>,
    /// Lookups that wait for room in RAM, in the order of asking.
    waiting: VecDeque<Waiting>,
    /// `None` while the weights are unknown.
    model: Option<Arc<Model>>,
    epoch: u64,
    serial: u64,
    /// No new saves and leases.
    closing: bool,
}

// === impl End ===

impl End {
    fn reason(&self) -> CloseReason {
        match self {
            Self::Broken(_) | Self::Outbox(OutboxError::Broken(_)) => CloseReason::BrokenPeer,
            Self::Outbox(OutboxError::NotRead) => CloseReason::SilentPeer,
            Self::Outbox(OutboxError::TooLarge { .. }) => CloseReason::Failed,
            Self::Worker(reason) | Self::Daemon(reason) => *reason,
        }
    }
}

// === impl Session ===

impl Session {
    /// A session whose ring is proven.
    pub(super) fn new(
        service: Arc<Service>,
        worker: Arc<Worker>,
        end: DaemonEnd,
        bell: Listener,
        ring: Arc<dyn Ring>,
    ) -> Self {
        let (events_tx, events) = unbounded_channel();
        let config = &service.config;
        let limits = Limits {
            request_tokens: config.max_prompt_tokens,
            session_tokens: config.max_session_tokens,
            requests: config.max_requests,
        };
        let (model, epoch) = worker.model();
        Self {
            copies: Copies::new(
                ring,
                events_tx.clone(),
                Arc::clone(&worker),
                Arc::clone(&service.clock),
            ),
            requests: Requests::new(limits),
            outbox: Outbox::default(),
            saves: HashMap::new(),
            restores: HashMap::new(),
            waiting: VecDeque::new(),
            serial: 0,
            closing: false,
            service,
            worker,
            end,
            bell,
            events,
            events_tx,
            model,
            epoch,
        }
    }

    /// Serves the worker until the session ends.
    pub(super) async fn run(mut self) {
        let end = loop {
            if let Err(end) = self.turn_once().await {
                break end;
            }
        };
        self.finish(end).await;
    }

    /// Sleeps until something happened, and sees to all of it.
    async fn turn_once(&mut self) -> Ended {
        let mut stop = self.worker.stop();
        let mut first = None;
        tokio::select! {
            biased;
            reason = stop.wait() => {
                self.shut(reason).await?;
                return Err(End::Daemon(reason));
            }
            event = self.events.recv() => first = event,
            rung = self.bell.wait() => {
                if let Err(error) = rung {
                    tracing::debug!(%error, "The doorbell does not work; polling");
                    tokio::time::sleep(NAP).await;
                }
            }
            () = self.service.room_freed.notified(), if !self.waiting.is_empty() => {}
            () = tokio::time::sleep(NAP) => {}
        }
        self.end.link.beat();
        if let Some(event) = first {
            self.happened(event).await?;
        }
        for _ in 0..BATCH {
            let Ok(event) = self.events.try_recv() else {
                break;
            };
            self.happened(event).await?;
        }
        loop {
            let more = self.read().await?;
            self.copies.pump();
            self.outbox.flush(&mut self.end.tx)?;
            self.end.link.beat();
            if !more || !self.events.is_empty() {
                break;
            }
            tokio::task::yield_now().await;
        }
        self.tend_saves().await?;
        self.tend_lookups().await?;
        self.tend_restores().await?;
        self.outbox.flush(&mut self.end.tx)?;
        let counts = (self.requests.len(), self.saves.len(), self.restores.len());
        self.worker.set_counts(counts);
        match self.end.link.peer_closed() {
            None => Ok(()),
            // What the worker said before it closed comes first.
            Some(reason) => {
                self.hear_out().await?;
                Err(End::Worker(reason))
            }
        }
    }

    /// Reads a bounded number of messages; `true`: there may be more.
    async fn read(&mut self) -> Result<bool, End> {
        for _ in 0..BATCH {
            let Some(message) = self.end.rx.pop()? else {
                return Ok(false);
            };
            self.said(message).await?;
        }
        Ok(true)
    }

    async fn said(&mut self, message: Up) -> Ended {
        match message {
            Up::RequestOpen(open) => self.request_open(open).await,
            Up::Tokens(tokens) => {
                self.tokens(tokens);
                Ok(())
            }
            Up::TokensWide(tokens) => {
                self.tokens_wide(tokens);
                Ok(())
            }
            Up::Lookup(lookup) => self.lookup(lookup).await,
            Up::Fill(fill) => self.fill(fill).await,
            Up::Release(release) => self.release(release).await,
            Up::Offer(offer) => self.offer(offer).await,
            Up::Drain(drain) => self.drain(drain).await,
            Up::SaveAbort(abort) => self.save_abort(abort).await,
            Up::TurnFinished(turn) => {
                self.turn_finished(&turn);
                Ok(())
            }
            Up::RequestClose(close) => {
                self.request_close(close.req);
                Ok(())
            }
            Up::Epoch(epoch) => self.new_epoch(&epoch).await,
        }
    }

    async fn happened(&mut self, event: Event) -> Ended {
        match event {
            Event::Copied(copy, result) => {
                if !self.copies.ended(&copy, &result) {
                    return Ok(());
                }
                let bytes = copy.segment.len();
                match copy.what {
                    What::Drain { serial, save, part } => {
                        drop(copy);
                        self.drained((serial, save, part), result).await
                    }
                    What::Fill { lease, part } => self.filled((lease, part), bytes, result).await,
                }
            }
            Event::Promoted {
                lease,
                object,
                result,
            } => self.promoted(lease, object, result).await,
            Event::Joined {
                save,
                serial,
                result,
            } => self.joined(save, serial, result).await,
        }
    }

    /// Says something, at the end of this turn at the latest.
    fn say(&mut self, message: impl Into<Down>) -> Ended {
        self.outbox.say(message.into())?;
        Ok(())
    }

    async fn hold(&mut self, point: Point<'_>) {
        let Self {
            service,
            end,
            outbox,
            ..
        } = self;
        stand_still(service, end, outbox, point).await;
    }

    /// Lets what was begun come to its end, as far as there is time.
    async fn shut(&mut self, reason: CloseReason) -> Ended {
        match reason {
            CloseReason::SilentPeer | CloseReason::Detached => self.hear_out().await,
            CloseReason::Shutdown => {
                self.closing = true;
                self.revoke_all(RevokeReason::Shutdown).await?;
                self.settle().await
            }
            _ => Ok(()),
        }
    }

    /// A worker that is gone still has said what it said, and its ring is still there.
    async fn hear_out(&mut self) -> Ended {
        self.closing = true;
        let deadline = tokio::time::Instant::now() + LAST_DRAINS;
        while self.read().await? && tokio::time::Instant::now() < deadline {}
        self.settle().await
    }

    /// Waits for copies under way and drops the saves that these did not complete.
    async fn settle(&mut self) -> Ended {
        let wait = LAST_DRAINS.min(self.service.config.drain_timeout);
        let deadline = tokio::time::Instant::now() + wait;
        while !self.copies.is_idle() {
            match tokio::time::timeout_at(deadline, self.events.recv()).await {
                Ok(Some(event)) => self.happened(event).await?,
                Ok(None) | Err(_) => break,
            }
        }
        self.drop_saves(None, Status::Cancelled, DeclineReason::Disabled)
            .await
    }

    /// Gives everything back.
    async fn finish(mut self, end: End) {
        let reason = end.reason();
        match &end {
            End::Worker(_) | End::Daemon(_) => {
                tracing::info!(session = %self.worker.session, "Session over: {end}");
            }
            End::Broken(_) | End::Outbox(_) => {
                self.service.metrics.error("broken_peer");
                tracing::warn!(session = %self.worker.session, "Session over: {end}");
            }
        }
        // The last word, as far as it is heard.
        let _ = self.outbox.flush(&mut self.end.tx);
        self.end.link.close(reason);
        self.drop_leases();
        let saves: Vec<u64> = self.saves.keys().copied().collect();
        for save in saves {
            self.service.metrics.drop_save("session_end");
            self.leave(save);
        }
        self.saves.clear();
        self.close_all_requests();
        self.service
            .detached(&self.worker, reason, &end.to_string());
        // Closing a ring waits for a copy under way.
        let (copies, events, worker) = (self.copies, self.events, self.worker);
        let closed = tokio::task::spawn_blocking(move || drop((copies, events))).await;
        if let Err(error) = closed {
            tracing::error!(%error, "A ring could not be closed");
        }
        worker.say_ring_closed();
    }
}

/// Stands still in a state that is held, and shows life; what was said until then is heard.
async fn stand_still(
    service: &Service,
    end: &mut DaemonEnd,
    outbox: &mut Outbox,
    point: Point<'_>,
) {
    let meanwhile = || {
        // A broken peer is found out when the turn goes on.
        let _ = outbox.flush(&mut end.tx);
        end.link.beat();
    };
    service.hold.pause(point, meanwhile).await;
}
