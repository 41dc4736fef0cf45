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
use crate::types::{Namespace, SnapshotId, TokenId};

/// Why the tokens of a conversation are not known that has too many.
pub const TOO_LONG: &str = "there are more than service.max_prompt_tokens";

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
    /// Who may share with it.
    pub namespace: Arc<Namespace>,
}

/// What was said in each turn, if that is known of every one.
type Words = Option<Vec<Arc<str>>>;

/// A stream, or where to look for its tokens.
enum Stream {
    Known(TokenStream, Words),
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
        let read = |said: Vec<Arc<str>>| -> Option<Vec<Vec<serde_json::Value>>> {
            let lists = said.iter().map(|said| serde_json::from_str(said).ok());
            lists.collect()
        };
        let lists = said.and_then(read);
        stream.messages = lists.map(|lists| lists.into_iter().flatten().collect());
        Ok(stream)
    }

    /// The own name of the conversation that a name or a request's id stands for.
    pub fn own_name(&self, tenant: Option<&str>, name: &str) -> Option<String> {
        let key = ConversationKey::new(tenant, name);
        let core = self.core.lock();
        Some(core.conversations.alias(&key)?.name.to_string())
    }

    /// The own name of the conversation that a selector is about, if it is about one.
    pub fn name_selected(&self, select: &Selector) -> Option<String> {
        let core = self.core.lock();
        let key = match select.snapshot_id {
            Some(id) => called(&core, id).key,
            None => core.conversations.key_of(select).ok(),
        };
        Some(key?.name.to_string())
    }

    /// Who may share with the snapshot.
    pub fn namespace_of(&self, snapshot: &SnapshotId) -> Arc<Namespace> {
        self.core.lock().namespace_of(snapshot).unwrap_or_default()
    }

    /// A request begins; whether some turn of the conversation is of a request of this id already.
    pub fn has_turn_of(&self, tenant: Option<&str>, conversation: &str, rid: &str) -> bool {
        let key = ConversationKey::new(tenant, conversation);
        let mut core = self.core.lock();
        core.conversations.come_back(&key, &Arc::from(rid));
        let conversation = core.conversations.get(&key);
        conversation.is_some_and(|it| it.turns.iter().any(|turn| *turn.rid == *rid))
    }

    /// The client of a request went away before its answer was whole: without a word no turn goes on
    /// from it.
    pub fn client_left(&self, tenant: Option<&str>, conversation: &str, rid: &str) {
        let key = ConversationKey::new(tenant, conversation);
        self.core.lock().conversations.leave(&key, &Arc::from(rid));
        self.wake.notify_one();
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
    ) -> Result<(TokenStream, Words), ServiceError> {
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
            why: match turn.total_tokens > self.config.max_prompt_tokens {
                true => TOO_LONG,
                false => "they were not told, or went with damaged files",
            },
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
        let record = self.records.get(&id);
        let rid = record.and_then(|record| record.rid.clone());
        let stream = TokenStream {
            boundary: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            tokens,
            turn: 0,
            snapshot: Some(id),
            rid: rid.unwrap_or_else(|| Arc::from("")),
            messages: None,
            namespace: record
                .map(|record| Arc::clone(&record.namespace))
                .unwrap_or_default(),
        };
        Ok(Stream::Known(stream, None))
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

    /// What was said in the turns up to this one, if it is known of every one that it goes on from.
    fn said_until(&self, key: &ConversationKey, number: u32) -> Words {
        let turns = self.conversations.get(key)?.turns.iter();
        let turns: Vec<_> = turns.take_while(|turn| turn.number <= number).collect();
        if turns.len() != number as usize {
            // One of them was deleted: its words are in the tokens, still.
            return None;
        }
        // Nothing goes on without a word from an answer whose client went.
        let whole = turns
            .into_iter()
            .filter(|turn| turn.number == number || !turn.is_left());
        whole.map(|turn| turn.said.clone()).collect()
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
        namespace: turn.namespace.clone().unwrap_or_default(),
    }
}
