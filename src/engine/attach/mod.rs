//! The worker's side of the protocol: the engine's external memory is an Engram daemon.
//!
//! # What
//!
//! ```text
//!  scheduler's thread                                    thread `engram-attach`
//!  hooks, tick ──► Session ── saves, restores             attach, handshake, stream,
//!                    │   │                                heartbeat; again and again
//!                 talk  ring  ◄──── Linked, Lost ─────────── dial
//! ```
//!
//! The scheduler's hooks ([`Memory`]) offer what is inserted, look up what arrives, and place what was
//! restored. They talk to the daemon through the shared-memory channel only, and never wait.
//! Attaching, and knowing whether the daemon's process lives, is the other thread's.
//!
//! # State
//!
//! Everything of a session is in one [`Session`]: requests that the daemon knows of, saves
//! ([`SaveState`]), restores ([`RestoreState`]), the ring. Without a session the hooks do next to
//! nothing, and the engine serves as if there were no daemon.
//!
//! # Order of writes
//!
//! Only this process writes its pools. The daemon's bytes come through the ring, and are scattered
//! when all of them are there, or into pages that nobody else knows of; in mode engine this process
//! copies between the ring and a window, which is all that the daemon reaches. What is scattered is whole
//! before it is inserted; a piece of a save is whole in the ring before the daemon is told.
//!
//! # Cancellation
//!
//! A session ends when the daemon closes it, breaks the protocol, shows no life for
//! [`Limits::silence`], or its process goes away. Then all locks, pages, slots are given back in the
//! same tick, requests that waited are prefilled, and the ring is dropped: a daemon that was stopped
//! and comes back writes to memory that nobody reads. Answers carry numbers that are never used
//! twice, so one that comes late finds nothing.
//!
//! # Errors
//!
//! None reaches a request. What cannot be saved is dropped and counted, what cannot be restored is
//! prefilled and counted ([`Counts`]).

mod attaching;
mod control;
mod counts;
mod dial;
mod identity;
mod lookup;
mod place;
mod plan;
mod restore;
pub mod restore_state;
mod ring;
mod save;
pub mod save_state;
mod session;
mod talk;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

pub use control::{Control, Tamper};
pub use counts::Counts;
pub use dial::{Address, BadAddress};
pub use restore_state::RestoreState;
pub use save_state::SaveState;

use super::cache::Match;
use super::device_memory::DeviceMemory;
use super::memory::{Boundary, Gate, Holdings, Memory, Restored};
use super::model::Model;
use super::request::{FinishReason, RequestInfo};
use crate::proto::channel::layout::{Finish, Outcome};
use crate::proto::channel::msg::TurnFinished;
use crate::types::BLOCK_TOKENS;
use crate::types::{ModeChoice, hex};
use crate::util::clock::{Clock, SystemClock};
use dial::{Dial, Dialer, Event, Load};
use session::{Cx, End, Session};

/// Ticks while something is under way.
const BUSY: Duration = Duration::from_millis(1);
/// Ticks while a session is there.
const IDLE: Duration = Duration::from_millis(20);
/// Ticks while there is none.
const ALONE: Duration = Duration::from_millis(50);

/// How the engine attaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the daemon is.
    pub address: Address,
    /// What it wants to see over TCP.
    pub token: Option<String>,
    /// Size of the staging ring in bytes.
    pub ring_bytes: u64,
    /// How bytes may move.
    pub modes: ModeChoice,
    /// How long things may take.
    pub limits: Limits,
}

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// A step of a restore that a request waits for.
    pub patience: Duration,
    /// A step of a save.
    pub save_patience: Duration,
    /// Without a sign of life of the daemon the session is over.
    pub silence: Duration,
}

/// What is kept of each request that is not answered.
#[derive(Clone, Debug, Default)]
struct Tracked {
    /// Tokens that it did not compute.
    cached: usize,
    /// Tokens up to its deepest boundary.
    inserted: usize,
    /// What was restored for it.
    restored: Option<Restored>,
}

/// The external memory.
pub struct Attach {
    config: Config,
    clock: Arc<dyn Clock>,
    dialer: Dialer,
    load: Arc<Load>,
    control: Arc<Control>,
    session: Option<Session>,
    tracked: HashMap<u64, Tracked>,
    /// Saves so far: numbers are never used twice.
    saves: u64,
    counts: Counts,
    scratch: Vec<u8>,
    ticks: u64,
    /// Why there is no session, for people.
    apart: Option<String>,
}

// === impl Config ===

impl Config {
    /// Smallest ring for a model: 4 states and 8 blocks of KV.
    pub fn least_ring(state_bytes: usize, token_bytes: usize) -> u64 {
        let block = (token_bytes as u64).saturating_mul(BLOCK_TOKENS.into());
        (state_bytes as u64)
            .saturating_mul(4)
            .saturating_add(block.saturating_mul(8))
    }
}

// === impl Attach ===

impl Attach {
    /// Starts to look for the daemon.
    ///
    /// # Errors
    ///
    /// The system gives no thread.
    pub fn start(
        config: Config,
        model: &Model,
        device: &DeviceMemory,
        control: Arc<Control>,
    ) -> std::io::Result<Self> {
        let load = Arc::<Load>::default();
        let dialer = Dialer::start(Dial {
            address: config.address.clone(),
            request: identity::attach_request(&config, model, device),
            ring_bytes: config.ring_bytes,
            load: Arc::clone(&load),
        })?;
        let clock = Arc::new(SystemClock::new());
        Ok(Self::new(config, clock, dialer, load, control))
    }

    fn new(
        config: Config,
        clock: Arc<dyn Clock>,
        dialer: Dialer,
        load: Arc<Load>,
        control: Arc<Control>,
    ) -> Self {
        Self {
            config,
            clock,
            dialer,
            load,
            control,
            session: None,
            tracked: HashMap::new(),
            saves: 0,
            counts: Counts::default(),
            scratch: Vec::new(),
            ticks: 0,
            apart: Some("not attached yet".to_owned()),
        }
    }

    /// Does something in the session, if there is one, and sends what was said.
    fn with<R>(
        &mut self,
        device: &mut DeviceMemory,
        work: impl FnOnce(&mut Session, &mut Cx<'_>) -> R,
    ) -> Option<R> {
        let session = self.session.as_mut()?;
        let mut cx = Cx {
            now: self.clock.monotonic(),
            device,
            counts: &mut self.counts,
            tracked: &mut self.tracked,
            control: &self.control,
            limits: &self.config.limits,
            scratch: &mut self.scratch,
        };
        let done = work(session, &mut cx);
        if let Err(end) = session.flush() {
            self.part(&end, device);
        }
        Some(done)
    }

    /// Ends the session.
    fn part(&mut self, end: &End, device: &mut DeviceMemory) {
        let Some(session) = self.session.take() else {
            return;
        };
        tracing::warn!(session = hex::encode(&session.id), "Session over: {end}");
        let mut cx = Cx {
            now: self.clock.monotonic(),
            device,
            counts: &mut self.counts,
            tracked: &mut self.tracked,
            control: &self.control,
            limits: &self.config.limits,
            scratch: &mut self.scratch,
        };
        session.end(end, &mut cx);
        *self.counts.sessions_ended.entry(end.name()).or_default() += 1;
        self.apart = Some(end.to_string());
    }

    /// What the other thread has to say.
    fn listen(&mut self, device: &mut DeviceMemory) {
        while let Some(event) = self.dialer.event() {
            match event {
                Event::Linked(linked) => {
                    self.part(&End::Replaced, device);
                    let session = Session::new(*linked, self.clock.monotonic());
                    let (id, boot) = (hex::encode(&session.id), hex::encode(&session.boot));
                    tracing::info!(session = id, boot, "Attached");
                    self.session = Some(session);
                    self.counts.sessions += 1;
                    self.apart = None;
                }
                Event::Lost(id, why) => {
                    if self
                        .session
                        .as_ref()
                        .is_some_and(|session| session.id == id)
                    {
                        self.part(&End::Gone(why), device);
                    }
                }
                Event::Apart(why) => {
                    if self.session.is_none() {
                        self.apart = Some(why);
                    }
                }
            }
        }
    }

    /// The last word about a request.
    fn over(
        &mut self,
        request: &RequestInfo,
        tokens: Option<&[u32]>,
        finish: Finish,
        device: &mut DeviceMemory,
    ) -> Option<Restored> {
        let req = request.id.0;
        let Tracked {
            cached,
            inserted,
            restored,
        } = self.tracked.remove(&req).unwrap_or_default();
        let prompt = request.prompt.len();
        let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        self.with(device, |session, cx| {
            session.again.remove(&req);
            session.relied.remove(&req);
            session.end_restore(req, Outcome::Aborted, 0, cx);
            session.talk.open(request);
            if let Some(tokens) = tokens {
                session.talk.tokens(req, tokens);
            }
            let computed = match tokens {
                Some(tokens) if tokens.len() > prompt || finish != Finish::Abort => prompt,
                _ => inserted.min(prompt),
            };
            session.talk.say(TurnFinished {
                req,
                attempt: session.talk.attempt(req),
                prompt_tokens: count(prompt),
                total_tokens: session.talk.known(req),
                cached_tokens: count(cached),
                prefilled_tokens: count(computed.saturating_sub(cached)),
                finish,
            });
            session.talk.close(req);
        });
        restored
    }

    fn offer(&mut self, request: &RequestInfo, at: Boundary<'_>, device: &mut DeviceMemory) {
        self.saves += 1;
        let number = self.saves;
        self.with(device, |session, cx| {
            session.talk.open(request);
            session.offer(number, request.id.0, at, cx);
        });
    }
}

impl Memory for Attach {
    fn enqueued(&mut self, request: &RequestInfo, device: &mut DeviceMemory) {
        self.tracked.insert(request.id.0, Tracked::default());
        self.with(device, |session, cx| {
            session.talk.open(request);
            session.look_up(request, cx);
        });
    }

    fn gate(&mut self, request: &RequestInfo, device: &mut DeviceMemory) -> Gate {
        self.with(device, |session, cx| session.gate(request, cx))
            .unwrap_or(Gate::Open)
    }

    fn admitted(&mut self, request: &RequestInfo, found: &Match, device: &mut DeviceMemory) {
        let req = request.id.0;
        if let Some(tracked) = self.tracked.get_mut(&req) {
            tracked.cached = found.boundary;
        }
        let restored = |session: &mut Session, cx: &mut Cx<'_>| {
            let restored = session.restores.contains_key(&req);
            session.admitted(req, found, cx);
            restored
        };
        let restored = self.with(device, restored).unwrap_or(false);
        // A state that the device had: the daemon may never have seen it.
        if let Some(node) = found.node.filter(|_| !restored)
            && let Some(tokens) = request.prompt.get(..found.boundary)
        {
            self.offer(request, Boundary { node, tokens }, device);
        }
    }

    fn inserted(&mut self, request: &RequestInfo, at: Boundary<'_>, device: &mut DeviceMemory) {
        if let Some(tracked) = self.tracked.get_mut(&request.id.0) {
            tracked.inserted = tracked.inserted.max(at.tokens.len());
        }
        self.offer(request, at, device);
    }

    fn finished(
        &mut self,
        request: &RequestInfo,
        tokens: &[u32],
        reason: FinishReason,
        device: &mut DeviceMemory,
    ) -> Option<Restored> {
        let finish = match reason {
            FinishReason::Length => Finish::Length,
            FinishReason::Stop(_) | FinishReason::Text(_) => Finish::Stop,
            FinishReason::Abort => Finish::Abort,
        };
        self.over(request, Some(tokens), finish, device)
    }

    fn aborted(&mut self, request: &RequestInfo, device: &mut DeviceMemory) -> Option<Restored> {
        self.over(request, None, Finish::Abort, device)
    }

    fn flush(&mut self, device: &mut DeviceMemory) {
        self.with(device, |session, cx| {
            let all: Vec<u64> = session.restores.keys().copied().collect();
            for req in all {
                session.end_restore(req, Outcome::Aborted, 0, cx);
            }
            session.abort_gathering(cx);
        });
    }

    fn stopping(&mut self, device: &mut DeviceMemory) {
        self.part(&End::Stopping, device);
    }

    fn tick(&mut self, device: &mut DeviceMemory) {
        self.ticks += 1;
        self.listen(device);
        let ended = self.with(device, |session, cx| session.tick(cx).err());
        if let Some(Some(end)) = ended {
            self.part(&end, device);
        }
        self.load.set(self.ticks, device, self.tracked.len());
    }

    fn poll_interval(&self) -> Duration {
        match &self.session {
            Some(session) if session.is_busy() => BUSY,
            Some(_) => IDLE,
            None => ALONE,
        }
    }

    fn holdings(&self) -> Holdings {
        let mut holdings = Holdings::default();
        for restore in self
            .session
            .iter()
            .flat_map(|session| session.restores.values())
        {
            restore.holdings(&mut holdings);
        }
        holdings
    }

    fn report(&self) -> serde_json::Value {
        let mut saves: BTreeMap<&str, u64> = SaveState::ALL
            .iter()
            .map(|state| (state.as_str(), 0))
            .collect();
        let mut restores: BTreeMap<&str, u64> = RestoreState::ALL
            .iter()
            .map(|state| (state.as_str(), 0))
            .collect();
        if let Some(session) = &self.session {
            for save in session.saves.values() {
                *saves.entry(save.state.as_str()).or_default() += 1;
            }
            for restore in session.restores.values() {
                *restores.entry(restore.state.as_str()).or_default() += 1;
            }
        }
        let session = self.session.as_ref();
        let held = session.map_or_else(Vec::new, |session| session.held(&self.control));
        json!({
            "address": self.config.address.to_string(),
            "attached": session.is_some(),
            "apart": self.apart,
            "session": session.map(|session| hex::encode(&session.id)),
            "boot": session.map(|session| hex::encode(&session.boot)),
            "mode": session.map(|session| session.ring.mode()),
            "ring_bytes": self.config.ring_bytes,
            "ring_free": session.map(|session| session.ring.free_bytes()),
            "saves": saves,
            "restores": restores,
            "counts": self.counts,
            "held": held,
            "tamper": self.control.tamper(),
        })
    }
}

impl std::fmt::Debug for Attach {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attach")
            .field("config", &self.config)
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}
