//! One session with a daemon, from the scheduler's thread: the channel, the ring, and all saves and
//! restores under way. All of it ends with the session.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::time::Duration;

use super::control::Control;
use super::counts::Counts;
use super::dial::{Linked, Over};
use super::restore::Restore;
use super::ring::{Ring, Room};
use super::save::Save;
use super::talk::{Talk, TalkError};
use super::{Limits, Tracked};
use crate::engine::device_memory::{DeviceMemory, Evicted};
use crate::proto::channel::layout::{CloseReason, Piece};
use crate::proto::channel::msg::Down;
use crate::proto::channel::run::Run;
use crate::proto::channel::{Broken, Link, Reader};

/// Messages read in one tick.
const BATCH: usize = 1024;

/// A session.
pub(super) struct Session {
    /// Its id.
    pub id: [u8; 16],
    /// The daemon's start.
    pub boot: [u8; 16],
    pub ring: Ring,
    pub talk: Talk,
    /// By number.
    pub saves: BTreeMap<u64, Save>,
    /// By request.
    pub restores: BTreeMap<u64, Restore>,
    /// Requests whose lease ended before they were considered: they are looked up again then.
    pub again: HashSet<u64>,
    /// What the device had, by request, where nothing more was to be had; with its evictions by then.
    pub relied: HashMap<u64, (usize, Evicted)>,
    /// Rooms that the daemon reads or writes until it answers.
    pub flights: HashMap<Flight, Room>,
    link: Link,
    rx: Reader<Down>,
    bell: Box<dyn Fn() + Send>,
    /// The daemon's beat, and when it changed.
    beat: (u64, Duration),
    /// Tells the thread that holds the connection when this is dropped.
    _over: Over,
}

/// One piece on its way between the ring and the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flight {
    /// Out of the ring, for a save.
    Drain(u64, Piece, u32),
    /// Into the ring, for a lease.
    Fill(u64, Piece, u32),
}

/// Why a session is over.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the daemon closed it ({})", .0.as_str())]
    Closed(CloseReason),
    #[error("the daemon is silent")]
    Silent,
    #[error("the daemon broke the protocol: {0}")]
    Broken(#[from] Broken),
    #[error("the daemon does not read")]
    NotRead,
    #[error("the connection is gone: {0}")]
    Gone(String),
    #[error("another session began")]
    Replaced,
    #[error("the engine stops")]
    Stopping,
}

/// What the machines work with.
pub(super) struct Cx<'a> {
    pub now: Duration,
    pub device: &'a mut DeviceMemory,
    pub counts: &'a mut Counts,
    pub tracked: &'a mut HashMap<u64, Tracked>,
    pub control: &'a Control,
    pub limits: &'a Limits,
    /// Bytes on their way between pool and ring.
    pub scratch: &'a mut Vec<u8>,
}

// === impl End ===

impl End {
    /// For counting.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Closed(reason) => reason.as_str(),
            Self::Silent => "silent",
            Self::Broken(_) => "broken",
            Self::NotRead => "not_read",
            Self::Gone(_) => "gone",
            Self::Replaced => "replaced",
            Self::Stopping => "stopping",
        }
    }

    fn reason(&self) -> CloseReason {
        match self {
            Self::Broken(_) => CloseReason::BrokenPeer,
            Self::Silent | Self::NotRead | Self::Gone(_) => CloseReason::SilentPeer,
            Self::Replaced => CloseReason::Replaced,
            Self::Closed(_) | Self::Stopping => CloseReason::Shutdown,
        }
    }
}

impl From<TalkError> for End {
    fn from(error: TalkError) -> Self {
        match error {
            TalkError::NotRead => Self::NotRead,
            TalkError::Broken(broken) => Self::Broken(broken),
        }
    }
}

// === impl Session ===

impl Session {
    pub fn new(linked: Linked, now: Duration) -> Self {
        let Linked {
            id,
            boot,
            end,
            ring,
            window,
            bell,
            over,
        } = linked;
        Self {
            id,
            boot,
            ring: Ring::new(ring, window),
            talk: Talk::new(end.tx),
            saves: BTreeMap::new(),
            restores: BTreeMap::new(),
            again: HashSet::new(),
            relied: HashMap::new(),
            flights: HashMap::new(),
            beat: (end.link.peer_beat(), now),
            link: end.link,
            rx: end.rx,
            bell,
            _over: over,
        }
    }

    /// One tick: signs of life, answers, deadlines, the work of all machines.
    ///
    /// # Errors
    ///
    /// The session is over.
    pub fn tick(&mut self, cx: &mut Cx<'_>) -> Result<(), End> {
        self.link.beat();
        let beat = self.link.peer_beat();
        if beat != self.beat.0 {
            self.beat = (beat, cx.now);
        }
        if cx.now.saturating_sub(self.beat.1) > cx.limits.silence {
            return Err(End::Silent);
        }
        let closed = self.link.peer_closed();
        for _ in 0..BATCH {
            // A held machine waits for what moves it on, so nothing more is heard.
            if self.is_held(cx.control) {
                break;
            }
            let Some(message) = self.rx.pop()? else {
                break;
            };
            self.heard(message, cx);
        }
        if let Some(reason) = closed {
            return Err(End::Closed(reason));
        }
        self.tend_saves(cx);
        self.tend_restores(cx);
        self.flush()
    }

    /// Says what waits and wakes the daemon.
    ///
    /// # Errors
    ///
    /// The session is over.
    pub fn flush(&mut self) -> Result<(), End> {
        if self.talk.flush()? {
            (self.bell)();
        }
        Ok(())
    }

    /// Drops everything under way. Nothing of the pools is held after it.
    pub fn end(mut self, end: &End, cx: &mut Cx<'_>) {
        self.link.close(end.reason());
        if end.reason() != CloseReason::Shutdown {
            // As if the memory were used for something else from here on: a daemon that reads it late
            // must not find what looks like a state.
            self.ring.spoil();
        }
        for save in std::mem::take(&mut self.saves).into_values() {
            save.let_go(cx.device);
            cx.counts.drop_save("session_end");
        }
        for (req, mut restore) in std::mem::take(&mut self.restores) {
            restore.let_go(cx.device);
            if restore.holds_lease() {
                *cx.counts.unused.entry("session_end").or_default() += 1;
            }
            tracing::debug!(req, state = %restore.state, "A restore ended with its session");
        }
    }

    /// Machines that stand in a state that is held.
    pub fn held(&self, control: &Control) -> Vec<String> {
        let save = |save: &&Save| control.holds_save(&save.state);
        let saves = self.saves.values().filter(save);
        let restore = |restore: &&Restore| control.holds_restore(&restore.state);
        let restores = self.restores.values().filter(restore);
        saves
            .map(|save| format!("save:{}", save.state))
            .chain(restores.map(|restore| format!("restore:{}", restore.state)))
            .collect()
    }

    fn is_held(&self, control: &Control) -> bool {
        let mut saves = self.saves.values();
        let mut restores = self.restores.values();
        saves.any(|save| control.holds_save(&save.state))
            || restores.any(|restore| control.holds_restore(&restore.state))
    }

    /// Whether anything is under way that an answer moves on.
    pub fn is_busy(&self) -> bool {
        !self.saves.is_empty() || !self.restores.is_empty()
    }

    /// The pieces that an answer speaks of: no more than are under way, or none at all.
    pub fn answered(&self, run: Run, cx: &mut Cx<'_>) -> Range<u32> {
        let known = |indices: &Range<u32>| indices.len() <= self.flights.len();
        run.indices().filter(known).unwrap_or_else(|| {
            cx.counts.garbled += 1;
            0..0
        })
    }

    fn heard(&mut self, message: Down, cx: &mut Cx<'_>) {
        match message {
            Down::LookupResult(result) => self.looked_up(result, cx),
            Down::Filled(filled) => self.filled(&filled, cx),
            Down::Revoke(revoke) => self.revoked(&revoke, cx),
            Down::Want(want) => self.wanted(&want, cx),
            Down::Decline(decline) => self.declined(&decline, cx),
            Down::Drained(drained) => self.drained(&drained, cx),
            Down::Saved(saved) => self.saved(&saved, cx),
        }
    }
}
