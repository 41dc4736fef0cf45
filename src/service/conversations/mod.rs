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
//! shorter. When the turn falls back to an ancestor its tail gets longer again, unless a later turn
//! begins with its tokens ([`kept`]): then they are found there, proven by digest. Only what is damaged,
//! or was never told, is not known, and that is what is answered. The record on disk has the tail from the boundary that is durable
//! *there*, so that a crash loses nothing of it; a conversation is written down as soon as it has a
//! durable snapshot or a turn whose tokens are all in its record.
//!
//! # Deletion, and clients that go
//! What is deleted while an answer runs that goes on from it stays deleted: nothing of that answer is
//! recorded. An answer whose client went away is a turn that ends with `abort`; without a word no turn
//! goes on from it, see [`left`].
//!
//! # Bounds
//! Tails and messages of all conversations together stay below [`shelf::IN_RAM`]: beyond, those that
//! were longest unchanged are left on disk and read when somebody asks ([`shelf`]). A record holds
//! those of the latest turns that find room in it.

mod ancestry;
mod compared;
mod kept;
mod left;
mod marks;
mod names;
mod parts;
mod select;
mod shelf;
mod stored;
mod stream;
mod tail;
#[cfg(test)]
mod tests;
mod view;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use indexmap::IndexMap;
use smallvec::SmallVec;

use crate::types::{Millis, SnapshotId};
use crate::util::id_map::IdMap;

pub use ancestry::Known;
pub use compared::{Compared, Comparison, Relation};
pub use left::LEFT;
pub use marks::Mark;
pub use parts::{
    Conversation, ConversationKey, Deferred, Ending, Live, NoRoom, Origin, Owner, Pace, Turn,
};
pub use select::{Found, NO_TURN, Need, Pick};
pub use shelf::IN_RAM;
pub use stored::{Back, MAX_BRANCHES, Missing};
pub use stream::{TOO_LONG, TokenStream};
pub use tail::{Chain, Tail, digest_of, print_of};
pub use view::{BranchRow, ConversationView, ForkRow, OriginRow, TreeNode, TreeTurn, TurnRow};

/// Turns of a conversation that are shown where nobody says how many.
pub const SHOWN_TURNS: usize = 1000;

use super::saving::SavingRules;
use crate::store::StreamPrint;
use ancestry::Prints;

/// All conversations.
#[derive(Debug, Default)]
pub struct Conversations {
    all: HashMap<ConversationKey, Conversation>,
    /// The conversation that a request belonged to last.
    rids: IndexMap<(Option<Arc<str>>, Arc<str>), ConversationKey>,
    /// Which conversations name a snapshot, by turn or by branch.
    names: IdMap<SnapshotId, SmallVec<[ConversationKey; 1]>>,
    /// The conversation of each open request.
    open: HashMap<Owner, ConversationKey>,
    /// Changed since the last [`Conversations::take_dirty`].
    dirty: HashSet<ConversationKey>,
    /// In which conversation something is noted of a snapshot.
    marked: HashMap<SnapshotId, ConversationKey>,
    /// Turns by their tokens.
    prints: Prints,
    /// What was said in turns that are not over yet.
    said: shelf::Early,
    /// Requests whose clients went away before a worker told of them.
    left: left::Left,
    /// Bytes of tails and messages in memory.
    weight: usize,
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
            tool_call: false,
            turn: None,
            changed: now,
            forgotten: false,
            left: self.left.take(key, rid),
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
        let live = self.live(key, owner).filter(|live| !live.forgotten)?;
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
            prompt_tokens,
            finish,
            tail,
            print,
            namespace,
        } = ending;
        let key = &self.home(owner, key);
        let conversation = self.all.get_mut(key)?;
        let now = now.max(conversation.updated);
        let next = conversation.next_number();
        let live = conversation.live.get_mut(&owner)?;
        if live.forgotten {
            return None;
        }
        let finish = if live.left { LEFT } else { finish };
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
            prompt_tokens: prompt_tokens.filter(|prompt| *prompt <= total_tokens),
            rid: Arc::clone(&live.rid),
            finished: now,
            finish,
            tail,
            print,
            said,
            namespace,
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
        // The turns before often begin this one's tokens.
        let (earlier, later) = conversation.turns.split_at_mut(at);
        if let Some(tail) = later.first().and_then(|later| later.tail.as_ref()) {
            weights.0 += tail::share(earlier, tail);
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
        let idle = self.idle();
        let count = idle.len().saturating_sub(keep);
        for key in idle.into_iter().take(count) {
            self.forget(&key);
        }
    }

    /// Forgets such conversations until their records take no more than about so many bytes.
    pub fn trim_bytes(&mut self, most: u64) {
        // Digits of a token, and a comma.
        let weight = |it: &Conversation| {
            let tokens = it.turns.iter().map(|turn| u64::from(turn.total_tokens));
            tokens.sum::<u64>().saturating_mul(8)
        };
        let mut left = most;
        for key in self.idle().into_iter().rev() {
            let bytes = self.all.get(&key).map_or(0, weight);
            match left.checked_sub(bytes) {
                Some(rest) => left = rest,
                None => {
                    left = 0;
                    self.forget(&key);
                }
            }
        }
    }

    /// Conversations without any snapshot and without any open request, the longest unchanged first.
    fn idle(&self) -> Vec<ConversationKey> {
        let named = |it: &Conversation| {
            !it.branches.is_empty()
                || !it.marks.is_empty()
                || it.turns.iter().any(|turn| turn.snapshot.is_some())
        };
        let all = self.all.iter();
        let idle = all.filter(|(_, it)| it.live.is_empty() && !named(it));
        let mut idle: Vec<_> = idle.map(|(key, it)| (it.updated, key.clone())).collect();
        idle.sort_unstable();
        idle.into_iter().map(|(_, key)| key).collect()
    }

    /// A record of turns alone goes from disk, too.
    fn forget(&mut self, key: &ConversationKey) {
        self.remove(key);
        self.dirty.insert(key.clone());
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
                self.names.swap_remove(&snapshot);
            }
        }
    }

    fn drop_if_empty(&mut self, key: &ConversationKey) {
        let empty = |it: &Conversation| {
            it.turns.is_empty()
                && it.branches.is_empty()
                && it.live.is_empty()
                && it.marks.is_empty()
                && it.rules.is_none()
        };
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
            self.rids.swap_remove(&rid);
        }
    }
}
