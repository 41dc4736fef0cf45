//! Finds what a selector names.

use std::sync::Arc;

use super::super::api::Selector;
use super::super::error::ServiceError;
use super::{Conversation, ConversationKey, Conversations, Live, NoRoom, Turn};
use crate::types::SnapshotId;

/// Why the tokens of a conversation are not known that never had any.
pub const NO_TURN: &str = "no turn of it has finished";

/// What a selector without `snapshot_id` named.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The conversation.
    pub key: ConversationKey,
    /// The turn, if it is one that finished.
    pub turn: Option<u32>,
    /// The branch.
    pub branch: Option<String>,
    /// The request, unless it is a branch.
    pub rid: Option<Arc<str>>,
    /// Its snapshot; `None`: it has no state.
    pub snapshot: Option<SnapshotId>,
    /// Tokens of the turn, or of the request so far.
    pub total_tokens: Option<u32>,
    /// Saves that may still change the answer.
    pub saves: u32,
    /// Why the last state that was offered is not stored, if RAM was full.
    pub no_room: Option<NoRoom>,
}

/// What the caller needs the selector for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Need {
    /// Something that exists: `turn_number` and `branch_name` choose.
    Existing,
    /// A state to be kept: `branch_name` is the name to give, and beside a `rid`, `turn_number` and
    /// `conversation_id` are as well.
    Source,
}

/// Which tokens a selector without `snapshot_id` means.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Pick {
    /// Those of a turn.
    Turn(u32),
    /// Those of a branch that is no turn's snapshot.
    Branch(SnapshotId),
}

// === impl Conversations ===

impl Conversations {
    /// Whose tokens the selector means: a turn that finished, without any word the latest whose answer
    /// is whole, with or without a state.
    pub fn pick(&self, select: &Selector) -> Result<(ConversationKey, Pick), ServiceError> {
        let key = self.key_of(select)?;
        let conversation = self
            .all
            .get(&key)
            .ok_or_else(|| not_found("conversation", &key.name))?;
        let turns = &conversation.turns;
        if let Some(branch) = select.branch_name.as_deref() {
            let id = conversation.branches.get(branch);
            let id = *id.ok_or_else(|| not_found("branch", branch))?;
            let turn = turns.iter().rev().find(|turn| turn.snapshot == Some(id));
            let pick = turn.map_or(Pick::Branch(id), |turn| Pick::Turn(turn.number));
            return Ok((key, pick));
        }
        let rid = select
            .rid
            .as_deref()
            .filter(|rid| **rid != *key.name || conversation.has(rid));
        let matches = |turn: &&Turn| rid.is_none_or(|rid| *turn.rid == *rid);
        let mut turns = turns.iter().filter(matches);
        let turn = match select.turn_number {
            Some(number) => {
                let turn = turns.find(|turn| turn.number == number);
                turn.ok_or_else(|| not_found("turn", &number.to_string()))?
            }
            None => {
                let whole = |turn: &&Turn| rid.is_some() || !turn.is_left();
                let whole = turns.filter(whole);
                let latest = whole.max_by_key(|turn| (turn.finished, turn.number));
                latest.ok_or_else(|| ServiceError::TokensUnknown {
                    name: rid.unwrap_or(&key.name).to_owned(),
                    why: NO_TURN,
                })?
            }
        };
        let pick = Pick::Turn(turn.number);
        Ok((key, pick))
    }

    /// What the selector names. `snapshot_id` is not looked at.
    pub fn find(&self, select: &Selector, need: Need) -> Result<Found, ServiceError> {
        let tenant: Option<Arc<str>> = select.tenant.as_deref().map(Arc::from);
        let source = need == Need::Source;
        let first = match (&select.rid, &select.conversation_id) {
            (None, None) => {
                let text = "one of rid, conversation_id and snapshot_id is needed";
                return Err(ServiceError::Invalid(text.to_owned()));
            }
            (Some(rid), _) if source => self.by_rid(&tenant, rid).ok_or(("request", rid)),
            (_, Some(name)) => self.by_name(&tenant, name).ok_or(("conversation", name)),
            (Some(rid), None) => self.by_rid(&tenant, rid).ok_or(("request", rid)),
        };
        let key = first.map_err(|(what, name)| not_found(what, name))?;
        let conversation = self
            .all
            .get(key)
            .ok_or_else(|| not_found("conversation", &key.name))?;
        // A rid narrows to its own turn; used as the name of a conversation, it names all of it.
        let rid = select
            .rid
            .as_deref()
            .filter(|rid| **rid != *key.name || conversation.has(rid));
        if let Some(branch) = select.branch_name.as_deref().filter(|_| !source) {
            let id = conversation.branches.get(branch);
            let id = id.ok_or_else(|| not_found("branch", branch))?;
            return Ok(Found {
                key: key.clone(),
                turn: None,
                branch: Some(branch.to_owned()),
                rid: None,
                snapshot: Some(*id),
                total_tokens: None,
                saves: 0,
                no_room: None,
            });
        }
        let number = select.turn_number.filter(|_| !source || rid.is_none());
        if let Some(number) = number {
            let turn = conversation
                .turn(number)
                .filter(|turn| rid.is_none_or(|rid| *turn.rid == *rid));
            let turn = turn.ok_or_else(|| not_found("turn", &number.to_string()))?;
            return Ok(of_turn(key, conversation, turn));
        }
        latest(key, conversation, rid)
    }

    /// The conversation that bears this name, or of which it is a rid.
    pub fn alias(&self, key: &ConversationKey) -> Option<ConversationKey> {
        self.by_name(&key.tenant, &key.name).cloned()
    }

    /// The conversation that the selector names, whatever else it says.
    pub fn key_of(&self, select: &Selector) -> Result<ConversationKey, ServiceError> {
        let tenant: Option<Arc<str>> = select.tenant.as_deref().map(Arc::from);
        let (what, name) = match (&select.conversation_id, &select.rid) {
            (Some(name), _) => ("conversation", name),
            (None, Some(rid)) => ("request", rid),
            (None, None) => {
                let text = "one of rid and conversation_id is needed";
                return Err(ServiceError::Invalid(text.to_owned()));
            }
        };
        let found = match what {
            "request" => self.by_rid(&tenant, name),
            _ => self.by_name(&tenant, name),
        };
        found.cloned().ok_or_else(|| not_found(what, name))
    }

    fn by_name(&self, tenant: &Option<Arc<str>>, name: &str) -> Option<&ConversationKey> {
        let key = ConversationKey {
            tenant: tenant.clone(),
            name: Arc::from(name),
        };
        match self.all.get_key_value(&key) {
            Some((key, _)) => Some(key),
            None => self.rids.get(&(key.tenant, key.name)),
        }
    }

    fn by_rid(&self, tenant: &Option<Arc<str>>, rid: &str) -> Option<&ConversationKey> {
        match self.rids.get(&(tenant.clone(), Arc::from(rid))) {
            Some(key) => Some(key),
            None => {
                let key = ConversationKey {
                    tenant: tenant.clone(),
                    name: Arc::from(rid),
                };
                self.all.get_key_value(&key).map(|(key, _)| key)
            }
        }
    }
}

// === impl Conversation ===

impl Conversation {
    pub(super) fn has(&self, rid: &str) -> bool {
        let turn = self.turns.iter().any(|turn| *turn.rid == *rid);
        turn || self.live.values().any(|live| *live.rid == *rid)
    }

    /// Saves of requests that became this turn.
    fn saves_of(&self, turn: u32) -> u32 {
        let live = self.live.values().filter(|live| live.turn == Some(turn));
        live.map(|live| live.saves).sum()
    }
}

/// The latest by time with a state; without any state the latest at all.
fn latest(
    key: &ConversationKey,
    conversation: &Conversation,
    rid: Option<&str>,
) -> Result<Found, ServiceError> {
    let matches = |other: &str| rid.is_none_or(|rid| *other == *rid);
    let turns = conversation.turns.iter().filter(|turn| matches(&turn.rid));
    let turns = turns.map(|turn| (turn.finished, of_turn(key, conversation, turn)));
    let no_room = conversation.no_room;
    let live = conversation
        .live
        .values()
        .filter(|live| live.turn.is_none() && matches(&live.rid));
    let live = live.map(|live| (live.changed, of_live(key, live, no_room)));
    // A request under way counts as newer than a turn that finished in the same millisecond.
    let all: Vec<_> = turns.chain(live).collect();
    let best = all.iter().max_by_key(|(at, found)| {
        (
            found.snapshot.is_some() || found.saves > 0,
            *at,
            found.turn.is_none(),
            found.turn,
        )
    });
    match best {
        Some((_, found)) => Ok(found.clone()),
        None => match rid {
            Some(rid) => Err(not_found("request", rid)),
            None => Err(ServiceError::NoState {
                name: key.name.to_string(),
            }),
        },
    }
}

fn of_turn(key: &ConversationKey, conversation: &Conversation, turn: &Turn) -> Found {
    Found {
        key: key.clone(),
        turn: Some(turn.number),
        branch: None,
        rid: Some(Arc::clone(&turn.rid)),
        snapshot: turn.snapshot,
        total_tokens: Some(turn.total_tokens),
        saves: conversation.saves_of(turn.number),
        no_room: conversation.no_room,
    }
}

fn of_live(key: &ConversationKey, live: &Live, no_room: Option<NoRoom>) -> Found {
    Found {
        key: key.clone(),
        turn: None,
        branch: None,
        rid: Some(Arc::clone(&live.rid)),
        snapshot: live.snapshot,
        total_tokens: Some(live.tokens),
        saves: live.saves,
        no_room,
    }
}

fn not_found(what: &'static str, name: &str) -> ServiceError {
    ServiceError::NotFound {
        what,
        name: name.to_owned(),
    }
}
