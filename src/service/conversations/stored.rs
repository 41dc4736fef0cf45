//! Conversations on disk: what is written of them, and how they come back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::super::core::{Core, Record};
use super::super::saving::SavingRules;
use super::{
    Conversation, ConversationKey, Conversations, Known, Mark, Origin, Owner, Tail, Turn, tail,
};
use crate::index::Pin;
use crate::proto::channel::layout::Finish;
use crate::store::{ConversationRef, MarkRef, OriginRef, RulesRef, TurnRef};
use crate::types::{SnapshotId, TokenId};
use crate::util::id_map::IdMap;

/// Turns that are written of one conversation: the last so many.
const MAX_TURNS: usize = 50_000;

/// Branches that one conversation may have.
pub const MAX_BRANCHES: usize = 4096;

/// Turns that are written with what their tokens are known by: the last so many.
const MAX_PRINTS: usize = 4096;

/// Tokens beyond snapshots that are written of one conversation, the latest first: 8 MiB of digits, so
/// that one without any state is known to its end.
const MAX_TAILS: usize = 1 << 20;

/// Bytes that a record may take, without its messages.
const MAX_RECORD: usize = 12 << 20;

/// Bytes of a turn in a record, without its tail and its messages, and of a token with its comma.
const TURN_BYTES: usize = 256;
const TOKEN_BYTES: usize = 8;

/// Bytes of messages that are written of one conversation, the latest first.
const MAX_SAID: usize = 3 << 20;

/// What a record has room for.
struct Room {
    turns: usize,
    tokens: usize,
    said: usize,
}

/// A turn whose snapshot was not there.
pub type Missing = (ConversationKey, Turn);

/// A conversation as its record has it, on its way back.
pub struct Back {
    key: ConversationKey,
    conversation: Conversation,
    weight: usize,
}

// === impl Core ===

impl Core {
    /// A conversation as it is written down: it names durable snapshots only, so a turn whose own
    /// snapshot is not durable yet names the nearest ancestor that is, and its tail begins there.
    /// `None`: nothing durable bears its name, and no turn's tokens are known without one.
    pub fn stored(&self, key: &ConversationKey) -> Option<ConversationRef> {
        let conversation = self.conversations.get(key)?;
        let skip = conversation.turns.len().saturating_sub(MAX_TURNS);
        let turns = conversation.turns.get(skip..).unwrap_or_default();
        let tokens = MAX_RECORD.saturating_sub(turns.len().saturating_mul(TURN_BYTES));
        let mut room = Room {
            turns: 0,
            tokens: MAX_TAILS.min(tokens / TOKEN_BYTES),
            said: MAX_SAID,
        };
        let later = turns.iter().skip(1).map(Some).chain([None]);
        let pairs: Vec<_> = turns.iter().zip(later).collect();
        let mut turns: Vec<TurnRef> = pairs
            .into_iter()
            .rev()
            .map(|(turn, later)| self.stored_turn(turn, later, &mut room))
            .collect();
        turns.reverse();
        let branches = conversation
            .branches
            .iter()
            .filter(|(_, id)| self.is_durable(id));
        let branches: BTreeMap<String, SnapshotId> =
            branches.map(|(name, id)| (name.clone(), *id)).collect();
        let marks = conversation.marks.iter();
        let marks = marks.filter(|(id, _)| self.is_durable(id));
        let marks: BTreeMap<SnapshotId, MarkRef> = marks
            .map(|(id, Mark { pinned, label })| {
                let (pinned, label) = (*pinned, label.clone());
                (*id, MarkRef { pinned, label })
            })
            .collect();
        let worth = |turn: &TurnRef| turn.snapshot.is_some() || turn.tail.is_some();
        let rules = conversation.rules;
        if branches.is_empty() && marks.is_empty() && rules.is_none() && !turns.iter().any(worth) {
            return None;
        }
        let tenant = key.tenant.as_deref().map(str::to_owned);
        let mut stored = ConversationRef::new(tenant, key.name.to_string(), conversation.updated);
        stored.turns = turns;
        stored.branches = branches;
        stored.marks = marks;
        stored.rules = rules.map(|rules| RulesRef {
            policy: rules.policy.as_str().to_owned(),
            every_n_turns: rules.every_n_turns,
            min_interval: u64::try_from(rules.min_interval.as_millis()).unwrap_or(u64::MAX),
        });
        stored.unnamed = conversation.unnamed;
        stored.origin = conversation.origin.as_ref().map(|origin| OriginRef {
            conversation: origin.conversation.to_string(),
            turn: origin.turn,
        });
        Some(stored)
    }

    fn stored_turn(&self, turn: &Turn, later: Option<&Turn>, room: &mut Room) -> TurnRef {
        // The way up is walked only for the few that are not durable yet.
        let durable = |(id, boundary): (SnapshotId, u32)| match self.is_durable(&id) {
            true => Some((id, boundary)),
            false => self.ancestor(&id, Self::is_durable),
        };
        let found = turn
            .snapshot
            .map(|id| (id, turn.boundary))
            .and_then(durable);
        let found = found.filter(|(_, boundary)| *boundary <= turn.total_tokens);
        let boundary = found.map_or(0, |(_, boundary)| boundary);
        room.turns += 1;
        // What the next turn's record has is not written twice.
        let twice = turn.print.is_some() && later.is_some_and(|later| turn.shares_tail(later));
        let tail = match twice {
            true => None,
            false => self.stored_tail(turn, boundary, room.tokens),
        };
        if let Some(tail) = &tail {
            room.tokens -= tail.len();
        }
        let said = turn.said.as_ref().filter(|said| said.len() <= room.said);
        room.said = match (said, &turn.said) {
            (Some(said), _) => room.said - said.len(),
            // The room is used up: older ones alone are of no use to the latest turn.
            (None, Some(_)) => 0,
            (None, None) => room.said,
        };
        TurnRef {
            turn: turn.number,
            snapshot: found.map(|(id, _)| id),
            boundary,
            total_tokens: turn.total_tokens,
            prompt_tokens: turn.prompt_tokens,
            rid: turn.rid.to_string(),
            finished: turn.finished,
            finish: turn.finish.to_owned(),
            tail,
            print: turn.print.filter(|_| room.turns <= MAX_PRINTS),
            said: said.cloned(),
            namespace: turn.namespace.as_deref().cloned(),
        }
    }

    /// The tokens of a turn from `boundary` on, if there are at most so many.
    fn stored_tail(&self, turn: &Turn, boundary: u32, most: usize) -> Option<Arc<[TokenId]>> {
        let len = (turn.total_tokens - boundary) as usize;
        if len > most {
            return None;
        }
        let beyond = turn.beyond()?;
        if boundary == turn.boundary {
            return Some(Arc::from(beyond));
        }
        let mut tokens = Vec::with_capacity(turn.total_tokens as usize);
        if !self.index.read_tokens(&turn.snapshot?, &mut tokens) {
            return None;
        }
        tokens.extend_from_slice(beyond);
        let tail = tokens.get(boundary as usize..)?;
        (tail.len() == len).then(|| Arc::from(tail))
    }

    /// The request goes on with a turn whose tokens begin its prompt: it and the snapshots that it made
    /// move into that conversation, if that may be.
    pub fn go_on(&mut self, owner: Owner, known: &Known) {
        let Some(from) = self.conversations.open_in(owner) else {
            return;
        };
        if self.in_doubt.contains(&from) {
            return;
        }
        let Some(to) = self.conversations.go_on(owner, known) else {
            return;
        };
        let mut next = self.conversations.snapshot_of(owner);
        while let Some(id) = next {
            let record = self.records.get_mut(&id);
            let Some(record) = record.filter(|it| it.conversation.as_ref() == Some(&from)) else {
                return;
            };
            record.conversation = Some(to.clone());
            next = self.index.snapshot(&id).and_then(|info| info.parent);
        }
    }

    /// Turns whose snapshots had no record: names of those that still have none are forgotten.
    pub fn name_missing(&mut self, missing: Vec<Missing>) {
        for (key, turn) in missing {
            if !name_record(&mut self.records, &key, &turn)
                && let Some(id) = turn.snapshot
            {
                self.conversations.lost(id, None);
            }
        }
        // What was just read need not be written.
        self.conversations.take_dirty();
    }

    /// The branches and marks of a conversation come back.
    pub fn name_branches(&mut self, stored: &ConversationRef) {
        let key = ConversationKey::new(stored.tenant.as_deref(), &stored.conversation);
        for (name, id) in &stored.branches {
            if self.index.pin(id, Pin::Named) {
                self.conversations
                    .set_branch(&key, name, *id, stored.updated);
            }
        }
        for (id, MarkRef { pinned, label }) in &stored.marks {
            let there = match pinned {
                true => self.index.pin(id, Pin::Named),
                false => self.records.contains_key(id),
            };
            if there {
                let (pinned, label) = (*pinned, label.clone());
                self.conversations
                    .set_mark(&key, *id, Mark { pinned, label });
            }
        }
        self.conversations.drop_if_empty(&key);
        self.conversations.take_dirty();
    }
}

// === impl Conversations ===

impl Conversations {
    /// Every record learns the conversation and the request that it belongs to. Gives the turns whose
    /// snapshots have no record.
    pub fn name_records(&self, records: &mut IdMap<SnapshotId, Record>) -> Vec<Missing> {
        let mut missing = Vec::new();
        for (key, conversation) in &self.all {
            for turn in &conversation.turns {
                if !name_record(records, key, turn) {
                    missing.push((key.clone(), turn.clone()));
                }
            }
        }
        missing
    }

    /// Makes room for the turns of so many snapshots.
    pub fn reserve(&mut self, snapshots: usize) {
        self.names.reserve(snapshots);
        self.rids.reserve(snapshots);
    }

    /// What was made of a record takes its place, in one go. It need not be written. `all`: nothing
    /// else comes back of it.
    pub fn take_back(&mut self, back: Back, all: bool) {
        let Back {
            key,
            conversation,
            weight,
        } = back;
        for turn in &conversation.turns {
            let rid = (key.tenant.clone(), Arc::clone(&turn.rid));
            self.rids.entry(rid).or_insert_with(|| key.clone());
            if let Some(id) = turn.snapshot {
                self.name(id, &key);
            }
            if conversation.unnamed {
                self.prints.learn_turn(&key, turn);
            }
        }
        self.weigh(0, weight);
        let empty = all && conversation.turns.is_empty() && conversation.rules.is_none();
        if !empty {
            self.all.insert(key, conversation);
        }
        self.shelve(super::shelf::IN_RAM, true);
    }
}

// === impl Back ===

impl Back {
    /// Reads a record, without its branches.
    pub fn new(stored: &ConversationRef, turns: Vec<TurnRef>) -> Self {
        let key = ConversationKey::new(stored.tenant.as_deref(), &stored.conversation);
        let origin = stored.origin.as_ref().map(|origin| Origin {
            conversation: Arc::from(origin.conversation.as_str()),
            turn: origin.turn,
        });
        let mut conversation = Conversation {
            turns: Vec::with_capacity(turns.len()),
            unnamed: stored.unnamed,
            origin,
            updated: stored.updated,
            rules: stored.rules.as_ref().and_then(rules_of),
            ..Conversation::default()
        };
        let mut weight = 0;
        for turn in turns {
            let before = conversation.turns.last();
            let shared = before.and_then(|before: &Turn| before.namespace.clone());
            let turn = Turn {
                number: turn.turn,
                snapshot: turn.snapshot,
                boundary: turn.boundary,
                total_tokens: turn.total_tokens,
                prompt_tokens: turn.prompt_tokens,
                rid: Arc::from(turn.rid),
                finished: turn.finished,
                finish: finish_name(&turn.finish),
                tail: turn.tail.map(|tail| Tail::new(turn.boundary, tail)),
                print: turn.print,
                said: turn.said,
                namespace: turn.namespace.map(|its| {
                    let same = shared.filter(|before| **before == its);
                    same.unwrap_or_else(|| Arc::new(its))
                }),
            };
            weight += turn.weight();
            if let Some(tail) = &turn.tail {
                weight -= tail::share(&mut conversation.turns, tail);
            }
            conversation.updated = conversation.updated.max(turn.finished);
            conversation.turns.push(turn);
        }
        Self {
            key,
            conversation,
            weight,
        }
    }
}

/// A turn's snapshot learns whose it is; whether it is known, if there is one.
fn name_record(
    records: &mut IdMap<SnapshotId, Record>,
    key: &ConversationKey,
    turn: &Turn,
) -> bool {
    let Some(id) = turn.snapshot else {
        return true;
    };
    let Some(record) = records.get_mut(&id) else {
        return false;
    };
    record.conversation.get_or_insert_with(|| key.clone());
    record.rid.get_or_insert_with(|| Arc::clone(&turn.rid));
    true
}

/// SavingRules as they were written; `None`: of a policy that there is no longer.
fn rules_of(stored: &RulesRef) -> Option<SavingRules> {
    let policy = serde_json::Value::from(stored.policy.as_str());
    let rules = SavingRules {
        policy: serde_json::from_value(policy).ok()?,
        every_n_turns: stored.every_n_turns,
        min_interval: Duration::from_millis(stored.min_interval),
    };
    rules.check().is_ok().then_some(rules)
}

/// The name as the wire has it; `error` for one that it does not have.
fn finish_name(name: &str) -> &'static str {
    let known = Finish::ALL
        .into_iter()
        .find(|finish| finish.as_str() == name);
    known.unwrap_or(Finish::Error).as_str()
}
