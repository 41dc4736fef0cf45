//! What conversations are made of.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::{Mark, SavingRules, StreamPrint, Tail};
use crate::types::{Millis, Namespace, SessionId, SnapshotId};

/// Name of a conversation within a tenant.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ConversationKey {
    /// Tenant, if there is one.
    pub tenant: Option<Arc<str>>,
    /// The `session_id`, or a rid.
    pub name: Arc<str>,
}

/// A request under way: the worker's session and its number there.
pub type Owner = (SessionId, u64);

/// One finished turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Counted from 1.
    pub number: u32,
    /// The deepest snapshot on its token path.
    pub snapshot: Option<SnapshotId>,
    /// Boundary of that snapshot.
    pub boundary: u32,
    /// Tokens of prompt and answer.
    pub total_tokens: u32,
    /// Those of the prompt, if they were counted.
    pub prompt_tokens: Option<u32>,
    /// The request.
    pub rid: Arc<str>,
    /// When it finished.
    pub finished: Millis,
    /// How: `stop`, `length`, `abort`, `error`.
    pub finish: &'static str,
    /// Its tokens beyond its snapshot; `None`: they were never known, or are not any more.
    pub tail: Option<Tail>,
    /// What all of its tokens are known by.
    pub print: Option<StreamPrint>,
    /// What was said in it: a JSON list of messages.
    pub said: Option<Arc<str>>,
    /// Who may share with it, if that is anything else than everybody.
    pub namespace: Option<Arc<Namespace>>,
}

/// How a request ended.
#[derive(Clone, Debug, Default)]
pub struct Ending {
    /// Tokens of prompt and answer.
    pub total_tokens: u32,
    /// Those of the prompt, if they were counted.
    pub prompt_tokens: Option<u32>,
    /// `stop`, `length`, `abort`, `error`.
    pub finish: &'static str,
    /// Its last tokens, if they are known.
    pub tail: Option<Tail>,
    /// What all of them are known by.
    pub print: Option<StreamPrint>,
    /// Who may share with it, if that is anything else than everybody.
    pub namespace: Option<Arc<Namespace>>,
}

/// When something of a conversation was let be written.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Pace {
    /// The turn, and when that was decided.
    pub last: Option<(u32, Duration)>,
    /// A state that waits for the minimum interval.
    pub deferred: Option<Deferred>,
}

/// A state that waits for the minimum interval.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Deferred {
    /// The state.
    pub snapshot: SnapshotId,
    /// Its turn.
    pub turn: u32,
    /// When it is let be written.
    pub due: Duration,
}

/// Where a conversation parted from another one of its tenant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin {
    /// The other's name.
    pub conversation: Arc<str>,
    /// The last turn that both have.
    pub turn: u32,
}

/// A request that is not closed yet.
#[derive(Clone, Debug)]
pub struct Live {
    /// Its request id.
    pub rid: Arc<str>,
    /// The deepest visible snapshot that it made or found.
    pub snapshot: Option<SnapshotId>,
    /// Boundary of that snapshot.
    pub boundary: u32,
    /// Tokens known so far.
    pub tokens: u32,
    /// Saves that may still become visible.
    pub saves: u32,
    /// It calls a tool.
    pub tool_call: bool,
    /// The turn that it became, once it finished.
    pub turn: Option<u32>,
    /// When it last changed.
    pub changed: Millis,
    /// What it goes on from was deleted: nothing of it is recorded.
    pub forgotten: bool,
    /// Its client went away before its answer was whole.
    pub left: bool,
}

/// Why a state is not in RAM.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum NoRoom {
    /// RAM was full.
    Now,
    /// It is larger than RAM.
    Ever,
    /// Its namespace holds its quota.
    Quota {
        /// Bytes that it holds.
        used: u64,
        /// Bytes that it may hold.
        quota: u64,
        /// Bytes of the state and its KV.
        need: u64,
    },
}

/// One conversation.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// Turns, ascending by number.
    pub turns: Vec<Turn>,
    /// Named branches.
    pub branches: BTreeMap<String, SnapshotId>,
    /// Requests under way.
    pub live: HashMap<Owner, Live>,
    /// RAM had no room for the last state that was offered.
    pub no_room: Option<NoRoom>,
    /// Last change.
    pub updated: Millis,
    /// No client named it.
    pub unnamed: bool,
    /// Where it parted from another.
    pub origin: Option<Origin>,
    /// Which of its states are written, if it has rules of its own.
    pub rules: Option<SavingRules>,
    /// When something of it was let be written.
    pub pace: Pace,
    /// What was noted of its snapshots.
    pub marks: BTreeMap<SnapshotId, Mark>,
    /// Tails and messages of its turns are on disk alone.
    pub shelved: bool,
}

// === impl ConversationKey ===

impl ConversationKey {
    /// The conversation `name` of `tenant`.
    pub fn new(tenant: Option<&str>, name: &str) -> Self {
        Self {
            tenant: tenant.map(Arc::from),
            name: Arc::from(name),
        }
    }
}

// === impl Pace ===

impl Pace {
    /// The last turn that was let be written until `now`.
    pub fn last(&self, now: Duration) -> Option<(u32, Duration)> {
        let waited = self.deferred.filter(|it| it.due <= now);
        waited.map(|it| (it.turn, it.due)).or(self.last)
    }
}

// === impl Conversation ===

impl Conversation {
    /// The turn of this number.
    pub fn turn(&self, number: u32) -> Option<&Turn> {
        self.turns.iter().find(|turn| turn.number == number)
    }

    pub(super) fn turn_mut(&mut self, number: u32) -> Option<&mut Turn> {
        self.turns.iter_mut().find(|turn| turn.number == number)
    }

    /// The number that the next turn gets.
    pub fn next_number(&self) -> u32 {
        self.turns
            .last()
            .map_or(1, |turn| turn.number.saturating_add(1))
    }

    /// Every snapshot that a turn or a branch names, once.
    pub fn snapshots(&self) -> HashSet<SnapshotId> {
        let turns = self.turns.iter().filter_map(|turn| turn.snapshot);
        turns.chain(self.branches.values().copied()).collect()
    }

    pub(super) fn names(&self, snapshot: SnapshotId) -> bool {
        let turn = self
            .turns
            .iter()
            .any(|turn| turn.snapshot == Some(snapshot));
        turn || self.branches.values().any(|id| *id == snapshot)
    }
}
