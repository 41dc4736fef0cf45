//! Conversations, their turns and their named branches: what snapshots are called.
//!
//! # What
//! A conversation is named by the `session_id` of its requests, or else by the rid of its first one.
//! Its turns count from 1 in the order in which they finished. A turn's snapshot is the deepest one
//! on its token path; it may come after the turn finished, when the last state is drained, and it
//! falls back to an ancestor when it is evicted. Pure: no clock, no IO. Clocks may go back: within a
//! conversation nothing is older than what came before it.
//!
//! # Ancestry
//! A request without a `session_id` goes on with a conversation that no client named if its prompt
//! begins with all tokens of that conversation's last turn, prompt and answer: it is the next turn
//! there, and its rid is another name of the conversation. If it begins with those of an earlier
//! turn, it is a conversation of its own, which knows where it parted ([`Origin`]). Prompts are
//! compared by a quick sum of every prefix, then by a digest: a mistake could only misname, as
//! states are found by their tokens alone.
//!
//! # Tokens
//! The tokens of a turn up to its boundary are the index's; those beyond, its *tail*, are kept here,
//! also of turns that left no state. When a deeper snapshot of the turn appears the tail gets
//! shorter. When the turn falls back to an ancestor the tail may begin too late: then the tokens are
//! those of a later turn that begins with them, proven by digest, or they are not known any more,
//! and that is what is answered. The record on disk has the tail from the boundary that is durable
//! *there*, so that a crash loses nothing of it; a conversation is written down as soon as it has a
//! durable snapshot or a turn whose tokens are all in its record.
//!
//! # Bounds
//! Tails and messages of all conversations together stay below [`shelf::IN_RAM`]: beyond, those that
//! were longest unchanged are left on disk and read when somebody asks ([`shelf`]). A record holds
//! those of the latest turns that find room in it.

mod ancestry;
mod names;
mod select;
mod shelf;
mod stored;
mod stream;
mod tail;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::types::{Millis, SessionId, SnapshotId};
use crate::util::id_map::IdMap;

pub use ancestry::Known;
pub use select::{Found, Need, Pick};
pub use shelf::IN_RAM;
pub use stored::MAX_BRANCHES;
pub use stream::TokenStream;
pub use tail::{Chain, Tail, digest_of, print_of};

use crate::store::StreamPrint;
use ancestry::Prints;

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
}

/// How a request ended.
#[derive(Clone, Debug, Default)]
pub struct Ending {
    /// Tokens of prompt and answer.
    pub total_tokens: u32,
    /// `stop`, `length`, `abort`, `error`.
    pub finish: &'static str,
    /// Its last tokens, if they are known.
    pub tail: Option<Tail>,
    /// What all of them are known by.
    pub print: Option<StreamPrint>,
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
    /// The turn that it became, once it finished.
    pub turn: Option<u32>,
    /// When it last changed.
    pub changed: Millis,
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
    /// Tails and messages of its turns are on disk alone.
    pub shelved: bool,
}

/// All conversations.
#[derive(Debug, Default)]
pub struct Conversations {
    all: HashMap<ConversationKey, Conversation>,
    /// The conversation that a request belonged to last.
    rids: HashMap<(Option<Arc<str>>, Arc<str>), ConversationKey>,
    /// Which conversations name a snapshot, by turn or by branch.
    names: IdMap<SnapshotId, Vec<ConversationKey>>,
    /// The conversation of each open request.
    open: HashMap<Owner, ConversationKey>,
    /// Changed since the last [`Conversations::take_dirty`].
    dirty: HashSet<ConversationKey>,
    /// Turns by their tokens.
    prints: Prints,
    /// What was said in turns that are not over yet.
    said: shelf::Early,
    /// Bytes of tails and messages in memory.
    weight: usize,
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

// === impl Conversation ===

impl Conversation {
    /// The turn of this number.
    pub fn turn(&self, number: u32) -> Option<&Turn> {
        self.turns.iter().find(|turn| turn.number == number)
    }

    fn turn_mut(&mut self, number: u32) -> Option<&mut Turn> {
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

    fn names(&self, snapshot: SnapshotId) -> bool {
        let turn = self
            .turns
            .iter()
            .any(|turn| turn.snapshot == Some(snapshot));
        turn || self.branches.values().any(|id| *id == snapshot)
    }
}

// === impl Conversations ===

impl Conversations {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The conversation of this name.
    pub fn get(&self, key: &ConversationKey) -> Option<&Conversation> {
        self.all.get(key)
    }

    /// All, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&ConversationKey, &Conversation)> {
        self.all.iter()
    }

    /// A request begins; `unnamed`: nobody named its conversation, so that it bears the rid.
    pub fn open(
        &mut self,
        key: &ConversationKey,
        owner: Owner,
        (rid, unnamed): (&Arc<str>, bool),
        now: Millis,
    ) {
        let now = now.max(self.get(key).map_or(now, |it| it.updated));
        let live = Live {
            rid: Arc::clone(rid),
            snapshot: None,
            boundary: 0,
            tokens: 0,
            saves: 0,
            turn: None,
            changed: now,
        };
        let conversation = self.all.entry(key.clone()).or_insert_with(|| Conversation {
            unnamed,
            ..Conversation::default()
        });
        conversation.live.insert(owner, live);
        self.open.insert(owner, key.clone());
        conversation.updated = conversation.updated.max(now);
        let rid = (key.tenant.clone(), Arc::clone(rid));
        self.rids.insert(rid, key.clone());
    }

    /// The conversation of an open request; `key` is where it began.
    pub fn home(&self, owner: Owner, key: &ConversationKey) -> ConversationKey {
        self.open.get(&owner).unwrap_or(key).clone()
    }

    /// The conversation of an open request.
    pub fn open_in(&self, owner: Owner) -> Option<ConversationKey> {
        self.open.get(&owner).cloned()
    }

    /// The snapshot that an open request has.
    pub fn snapshot_of(&self, owner: Owner) -> Option<SnapshotId> {
        self.request(owner)?.snapshot
    }

    /// The boundary of that snapshot; 0 without one.
    pub fn boundary(&self, owner: Owner) -> u32 {
        self.request(owner).map_or(0, |live| live.boundary)
    }

    fn request(&self, owner: Owner) -> Option<&Live> {
        self.all.get(self.open.get(&owner)?)?.live.get(&owner)
    }

    /// A save of the request begins (`+1`) or ends (`-1`).
    pub fn count_saves(&mut self, key: &ConversationKey, owner: Owner, by: i32) {
        let key = &self.home(owner, key);
        if let Some(live) = self.live(key, owner) {
            live.saves = live.saves.saturating_add_signed(by);
        }
    }

    /// RAM did not take a state of the conversation.
    pub fn had_no_room(&mut self, key: &ConversationKey, why: NoRoom) {
        if let Some(conversation) = self.all.get_mut(key) {
            conversation.no_room = Some(why);
        }
    }

    /// A snapshot on the token path of the request is visible. Returns the turn whose snapshot it
    /// became, if the request has finished.
    pub fn saw(
        &mut self,
        key: &ConversationKey,
        owner: Owner,
        snapshot: SnapshotId,
        boundary: u32,
        now: Millis,
    ) -> Option<u32> {
        let key = &self.home(owner, key);
        let conversation = self.all.get_mut(key)?;
        conversation.no_room = None;
        let now = now.max(conversation.updated);
        let live = self.live(key, owner)?;
        if live.snapshot.is_some() && boundary <= live.boundary {
            return None;
        }
        live.snapshot = Some(snapshot);
        live.boundary = boundary;
        live.tokens = live.tokens.max(boundary);
        live.changed = now;
        let number = live.turn?;
        self.set_turn(key, number, snapshot, boundary);
        Some(number)
    }

    fn set_turn(&mut self, key: &ConversationKey, number: u32, id: SnapshotId, boundary: u32) {
        let conversation = self.all.get_mut(key);
        let Some(turn) = conversation.and_then(|conversation| conversation.turn_mut(number)) else {
            return;
        };
        let old = turn.snapshot.replace(id);
        turn.boundary = boundary;
        let before = turn.weight();
        turn.shrink_tail();
        let after = turn.weight();
        self.weigh(before, after);
        self.name(id, key);
        if let Some(old) = old {
            self.unname(old, key);
        }
        self.dirty.insert(key.clone());
    }

    /// The request finished. Returns the number of its turn; a request that finished before (a
    /// retraction that ended twice) keeps its number.
    pub fn finish(
        &mut self,
        key: &ConversationKey,
        owner: Owner,
        ending: Ending,
        now: Millis,
    ) -> Option<u32> {
        let Ending {
            total_tokens,
            finish,
            tail,
            print,
        } = ending;
        let key = &self.home(owner, key);
        let conversation = self.all.get_mut(key)?;
        let now = now.max(conversation.updated);
        let next = conversation.next_number();
        let live = conversation.live.get_mut(&owner)?;
        live.tokens = total_tokens;
        live.changed = now;
        let number = *live.turn.get_or_insert(next);
        let rid = Arc::clone(&live.rid);
        let early = self.said.take(key, &rid);
        let said = early.or_else(|| conversation.turn(number)?.said.clone());
        let live = conversation.live.get(&owner)?;
        let mut turn = Turn {
            number,
            snapshot: live.snapshot,
            boundary: live.boundary,
            total_tokens,
            rid: Arc::clone(&live.rid),
            finished: now,
            finish,
            tail,
            print,
            said,
        };
        turn.shrink_tail();
        conversation.updated = now;
        self.put_turn(key, turn);
        Some(number)
    }

    /// Adds a turn, or replaces the one of its number.
    pub fn put_turn(&mut self, key: &ConversationKey, turn: Turn) {
        let rid = (key.tenant.clone(), Arc::clone(&turn.rid));
        self.rids.entry(rid).or_insert_with(|| key.clone());
        let conversation = self.all.entry(key.clone()).or_default();
        let new = turn.snapshot;
        let number = turn.number;
        let mut weights = (0, turn.weight());
        let at = conversation
            .turns
            .partition_point(|other| other.number < turn.number);
        conversation.updated = conversation.updated.max(turn.finished);
        let old = match conversation.turns.get_mut(at) {
            Some(other) if other.number == turn.number => {
                let other = std::mem::replace(other, turn);
                weights.0 = other.weight();
                self.prints.forget(key, &other);
                other.snapshot
            }
            _ => {
                conversation.turns.insert(at, turn);
                None
            }
        };
        // The turn before often begins this one's tokens.
        let (earlier, later) = conversation.turns.split_at_mut(at);
        if let Some((earlier, later)) = earlier.last_mut().zip(later.first())
            && let Some(tail) = later.tail.as_ref().filter(|_| !later.shares_tail())
        {
            weights.0 += earlier.weight();
            earlier.share_tail(tail);
            weights.1 += earlier.weight();
        }
        self.weigh(weights.0, weights.1);
        self.learn_print(key, number);
        if let Some(new) = new {
            self.name(new, key);
        }
        if let Some(old) = old {
            self.unname(old, key);
        }
        self.dirty.insert(key.clone());
    }

    /// Nothing more comes from the request. A conversation without a turn or branch then goes.
    pub fn close(&mut self, key: &ConversationKey, owner: Owner) {
        let key = &self.home(owner, key);
        self.open.remove(&owner);
        let Some(conversation) = self.all.get_mut(key) else {
            return;
        };
        if let Some(live) = conversation.live.remove(&owner) {
            if !conversation.has(&live.rid) {
                self.forget_rid(key, &live.rid);
            }
            self.drop_if_empty(key);
        }
    }

    /// Forgets the longest unchanged conversations without any snapshot and without any open
    /// request until at most `keep` such are left.
    pub fn trim(&mut self, keep: usize) {
        if self.all.len() <= keep {
            return;
        }
        let named = |it: &Conversation| {
            !it.branches.is_empty() || it.turns.iter().any(|turn| turn.snapshot.is_some())
        };
        let idle = |it: &Conversation| it.live.is_empty() && !named(it);
        let mut idle: Vec<_> = self.all.iter().filter(|(_, it)| idle(it)).collect();
        if idle.len() <= keep {
            return;
        }
        idle.sort_by_key(|(_, it)| it.updated);
        let count = idle.len() - keep;
        let keys: Vec<_> = idle
            .into_iter()
            .take(count)
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            self.remove(&key);
            // A record of turns alone goes, too.
            self.dirty.insert(key);
        }
    }

    /// What changed since the last call.
    pub fn take_dirty(&mut self) -> HashSet<ConversationKey> {
        std::mem::take(&mut self.dirty)
    }

    /// It waits to be written.
    pub fn is_dirty(&self, key: &ConversationKey) -> bool {
        self.dirty.contains(key)
    }

    /// Some conversation waits to be written.
    pub fn any_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// How many wait to be written.
    pub fn dirty(&self) -> usize {
        self.dirty.len()
    }

    /// To be written again later.
    pub fn mark_dirty(&mut self, key: ConversationKey) {
        self.dirty.insert(key);
    }

    fn live(&mut self, key: &ConversationKey, owner: Owner) -> Option<&mut Live> {
        self.all.get_mut(key)?.live.get_mut(&owner)
    }

    fn name(&mut self, snapshot: SnapshotId, key: &ConversationKey) {
        let keys = self.names.entry(snapshot).or_default();
        if !keys.contains(key) {
            keys.push(key.clone());
        }
    }

    /// Takes the name away if the conversation does not use it any longer.
    fn unname(&mut self, snapshot: SnapshotId, key: &ConversationKey) {
        if self.all.get(key).is_some_and(|it| it.names(snapshot)) {
            return;
        }
        if let Some(keys) = self.names.get_mut(&snapshot) {
            keys.retain(|other| other != key);
            if keys.is_empty() {
                self.names.remove(&snapshot);
            }
        }
    }

    fn drop_if_empty(&mut self, key: &ConversationKey) {
        let empty =
            |it: &Conversation| it.turns.is_empty() && it.branches.is_empty() && it.live.is_empty();
        if self.all.get(key).is_some_and(empty) {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: &ConversationKey) {
        let Some(conversation) = self.all.remove(key) else {
            return;
        };
        for turn in conversation.turns {
            self.forget_rid(key, &turn.rid);
            self.prints.forget(key, &turn);
            self.weigh(turn.weight(), 0);
        }
    }

    /// Tails and messages took `before` bytes, and take `after`.
    fn weigh(&mut self, before: usize, after: usize) {
        self.weight = (self.weight + after).saturating_sub(before);
    }

    fn forget_rid(&mut self, key: &ConversationKey, rid: &Arc<str>) {
        let rid = (key.tenant.clone(), Arc::clone(rid));
        if self.rids.get(&rid) == Some(key) {
            self.rids.remove(&rid);
        }
    }
}
