//! All tokens of a turn: those of its snapshot, and its tail.

use std::sync::Arc;

use super::super::Service;
use super::super::api::Selector;
use super::super::by_name::check_names;
use super::super::core::Core;
use super::super::error::ServiceError;
use super::super::rows::{called, unknown_snapshot};
use super::kept::LATER;
use super::{ConversationKey, Pick, Turn, digest_of, shelf};
use crate::store;
use crate::types::{SnapshotId, TokenId};

/// The exact tokens of a conversation up to the end of a turn: prompt and answer.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenStream {
    /// All of them.
    pub tokens: Vec<TokenId>,
    /// The turn, counted from 1; 0: a snapshot that is no turn's.
    pub turn: u32,
    /// How many of them the snapshot holds; 0 without one.
    pub boundary: u32,
    /// The deepest snapshot on them.
    pub snapshot: Option<SnapshotId>,
    /// The request that the turn was; empty if that is not known.
    pub rid: Arc<str>,
    /// What was said up to the turn's end, if that is known of every turn.
    pub messages: Option<Vec<serde_json::Value>>,
}

/// A stream, or where to look for its tokens.
enum Stream {
    Known(TokenStream, Vec<Arc<str>>),
    /// What is on disk alone is to come back first.
    Shelved(ConversationKey),
    /// In one of these turns, proven by the digest.
    Later(ConversationKey, Turn, Vec<u32>),
}

// === impl Service ===

impl Service {
    /// All tokens of a turn, prompt and answer: of the one that is selected, or else of the latest of
    /// the conversation, with or without a state. Those of a branch are those of the turn that has
    /// its snapshot.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`; `TokensUnknown` if they are not known (any more); `Data` if they cannot
    /// be read.
    pub async fn token_stream(&self, select: &Selector) -> Result<TokenStream, ServiceError> {
        check_names(select)?;
        let found = loop {
            let found = self.core.lock().stream(select)?;
            match found {
                Stream::Shelved(key) => self.unshelve(key).await?,
                found => break found,
            }
        };
        let (mut stream, said) = match found {
            Stream::Known(stream, said) => (stream, said),
            Stream::Shelved(_) => unreachable!("the loop above goes on with it"),
            Stream::Later(key, turn, later) => self.begun_by(&key, &turn, &later)?,
        };
        let lists = said
            .iter()
            .map(|said| serde_json::from_str::<Vec<serde_json::Value>>(said).ok());
        let lists: Option<Vec<_>> = lists.collect();
        let all = lists.filter(|lists| !lists.is_empty() && lists.len() == stream.turn as usize);
        stream.messages = all.map(|lists| lists.into_iter().flatten().collect());
        Ok(stream)
    }

    /// Notes what a turn said, beside its tokens: its new messages and its answer. It may come before
    /// or after the turn's end, and is found by the request's rid. What is too long is not kept.
    pub fn note_messages(
        &self,
        tenant: Option<&str>,
        conversation: &str,
        rid: &str,
        messages: Vec<serde_json::Value>,
    ) {
        let Ok(said) = serde_json::to_string(&messages) else {
            return;
        };
        if said.len() > shelf::MAX_SAID {
            tracing::debug!(
                conversation,
                rid,
                bytes = said.len(),
                "Messages are not kept"
            );
            return;
        }
        let said = Arc::from(said);
        let rid: Arc<str> = Arc::from(rid);
        let key = ConversationKey::new(tenant, conversation);
        let mut core = self.core.lock();
        let key = core.conversations.alias(&key).unwrap_or(key);
        core.conversations.note(&key, &rid, said);
        drop(core);
        self.wake.notify_one();
    }

    /// Brings what was said in a conversation back from disk.
    pub(in crate::service) async fn unshelve(
        &self,
        key: ConversationKey,
    ) -> Result<(), ServiceError> {
        let refs = self.store.refs.clone();
        let name = store::ConversationKey::of(key.tenant.as_deref(), &key.name);
        let read =
            tokio::task::spawn_blocking(move || refs.map(|refs| refs.get(&name)).transpose());
        let read = read.await;
        let stored = read.map_err(|error| ServiceError::Internal(error.to_string()))?;
        let stored = stored.map_err(|error| {
            ServiceError::Data(format!(
                "the record of conversation `{}`: {error}",
                key.name
            ))
        })?;
        let mut core = self.core.lock();
        core.conversations.unshelve(&key, stored.flatten());
        Ok(())
    }

    /// The tokens of a turn as the beginning of a later one's.
    fn begun_by(
        &self,
        key: &ConversationKey,
        turn: &Turn,
        later: &[u32],
    ) -> Result<(TokenStream, Vec<Arc<str>>), ServiceError> {
        for number in later {
            let tokens = {
                let core = self.core.lock();
                let conversation = core.conversations.get(key);
                let later = conversation.and_then(|it| it.turn(*number));
                later.and_then(|later| core.tokens_of(later))
            };
            let Some(mut tokens) = tokens else { continue };
            tokens.truncate(turn.total_tokens as usize);
            if turn
                .print
                .is_some_and(|print| print.digest == digest_of(&tokens))
            {
                let core = self.core.lock();
                return Ok((of_turn(turn, tokens), core.said_until(key, turn.number)));
            }
        }
        Err(ServiceError::TokensUnknown {
            name: key.name.to_string(),
            why: "its snapshot is gone, and no later turn begins with them",
        })
    }
}

// === impl Core ===

impl Core {
    fn stream(&self, select: &Selector) -> Result<Stream, ServiceError> {
        let (key, number) = match select.snapshot_id {
            Some(id) if !self.records.contains_key(&id) => return Err(unknown_snapshot(&id)),
            Some(id) => match called(self, id) {
                super::super::rows::Called {
                    key: Some(key),
                    turn: Some(turn),
                    ..
                } => (key, turn),
                _ => return self.bare_stream(id),
            },
            None => match self.conversations.pick(select)? {
                (_, Pick::Branch(id)) => return self.bare_stream(id),
                (key, Pick::Turn(number)) => (key, number),
            },
        };
        let conversation = self.conversations.get(&key);
        let turn = conversation.and_then(|it| Some((it, it.turn(number)?)));
        let Some((conversation, turn)) = turn else {
            return Err(ServiceError::NotFound {
                what: "turn",
                name: number.to_string(),
            });
        };
        if conversation.shelved {
            return Ok(Stream::Shelved(key));
        }
        if let Some(tokens) = self.tokens_of(turn) {
            let said = self.said_until(&key, number);
            return Ok(Stream::Known(of_turn(turn, tokens), said));
        }
        let longer = |other: &&Turn| {
            let known = other.beyond().is_some();
            known && other.number > number && other.total_tokens >= turn.total_tokens
        };
        let later = conversation.turns.iter().filter(longer).take(LATER);
        let later = later.map(|other| other.number).collect();
        Ok(Stream::Later(key, turn.clone(), later))
    }

    /// The tokens of a snapshot that is no turn's.
    fn bare_stream(&self, id: SnapshotId) -> Result<Stream, ServiceError> {
        let mut tokens = Vec::new();
        if !self.index.read_tokens(&id, &mut tokens) {
            return Err(ServiceError::Data(format!("the tokens of snapshot {id}")));
        }
        let rid = self.records.get(&id).and_then(|record| record.rid.clone());
        let stream = TokenStream {
            boundary: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            tokens,
            turn: 0,
            snapshot: Some(id),
            rid: rid.unwrap_or_else(|| Arc::from("")),
            messages: None,
        };
        Ok(Stream::Known(stream, Vec::new()))
    }

    /// The tokens of a turn, if its snapshot and its tail have them all.
    pub(super) fn tokens_of(&self, turn: &Turn) -> Option<Vec<TokenId>> {
        let beyond = turn.beyond()?;
        let mut tokens = Vec::with_capacity(turn.total_tokens as usize);
        if let Some(id) = &turn.snapshot
            && !self.index.read_tokens(id, &mut tokens)
        {
            return None;
        }
        tokens.extend_from_slice(beyond);
        (tokens.len() == turn.total_tokens as usize).then_some(tokens)
    }

    /// What was said in the turns up to this one, as far as it is known.
    fn said_until(&self, key: &ConversationKey, number: u32) -> Vec<Arc<str>> {
        let conversation = self.conversations.get(key);
        let turns = conversation.map_or(&[][..], |it| it.turns.as_slice());
        let turns = turns.iter().take_while(|turn| turn.number <= number);
        turns.filter_map(|turn| turn.said.clone()).collect()
    }
}

fn of_turn(turn: &Turn, tokens: Vec<TokenId>) -> TokenStream {
    TokenStream {
        tokens,
        turn: turn.number,
        boundary: turn.boundary,
        snapshot: turn.snapshot,
        rid: Arc::clone(&turn.rid),
        messages: None,
    }
}
