//! Conversations: which snapshot each turn ended with. Small JSON files that are rewritten whole.
//!
//! On disk each is a sealed JSON file (see `sealed_json`) with the fields of [`ConversationRef`], at
//! `refs/<first two digits>/<hash>.json`. The hash is that of tenant and conversation; names given
//! by clients reach the file system in no other form.
//!
//! Version 2 has what was said beside the snapshots: the tokens of a turn beyond its boundary, a
//! print of all of its tokens, its messages. Version 1 is still read: all of that is then unknown.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::types::{Millis, Namespace, SnapshotId, TokenId, hex};

use super::sealed_json::Record;

const MAX_NAME: usize = 16 << 10;
const MAX_TURNS: usize = 100_000;
const MAX_BRANCHES: usize = 4096;
const MAX_MARKS: usize = 4096;

/// Digits of a [`StreamPrint`].
const PRINT_DIGITS: usize = 48;

/// What a turn's tokens are known by, prompt and answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StreamPrint {
    /// First bytes of the BLAKE3 of the tokens.
    pub digest: [u8; 16],
    /// A quick sum of namespace and tokens, to look for them by.
    pub chain: u64,
}

/// What a [`StreamPrint`] does not look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a print has {PRINT_DIGITS} lowercase hexadecimal digits")]
pub struct NoPrint;

/// Where a conversation parted from another of its tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OriginRef {
    /// The other's name.
    pub conversation: String,
    /// The last turn that both have.
    pub turn: u32,
}

/// What somebody noted of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MarkRef {
    /// It is kept from eviction.
    pub pinned: bool,
    /// For people.
    pub label: Option<Box<str>>,
}

/// Which states of a conversation are written by themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RulesRef {
    /// The name of the policy.
    pub policy: String,
    /// See the policy.
    pub every_n_turns: u32,
    /// In milliseconds.
    pub min_interval: u64,
}

/// Names the file of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConversationKey(pub [u8; 32]);

/// A turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TurnRef {
    /// 1, 2, 3, ….
    pub turn: u32,
    /// The deepest snapshot on its tokens, if there is one.
    pub snapshot: Option<SnapshotId>,
    /// Boundary of that snapshot; 0 without one.
    pub boundary: u32,
    /// Tokens of prompt and answer together.
    pub total_tokens: u32,
    /// Those of the prompt, if they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u32>,
    /// The request.
    pub rid: String,
    /// When it ended.
    pub finished: Millis,
    /// How it ended, as the server named it.
    pub finish: String,
    /// Tokens `[boundary, total_tokens)`; `None`: not known.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "tokens")]
    pub tail: Option<Arc<[TokenId]>>,
    /// What all of its tokens are known by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub print: Option<StreamPrint>,
    /// What was said in it: a JSON list of messages.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "text")]
    pub said: Option<Arc<str>>,
    /// Who may share with it; absent: everybody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<Namespace>,
}

/// All that is known of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversationRef {
    /// 2.
    pub format_version: u32,
    /// Its name.
    pub conversation: String,
    /// Whose it is.
    pub tenant: Option<String>,
    /// Its turns, ascending.
    pub turns: Vec<TurnRef>,
    /// Named branches.
    pub branches: BTreeMap<String, SnapshotId>,
    /// Last change.
    pub updated: Millis,
    /// No client named it: requests go on with it by their tokens.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unnamed: bool,
    /// Where it parted from another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<OriginRef>,
    /// What was noted of its snapshots.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub marks: BTreeMap<SnapshotId, MarkRef>,
    /// Its own rules of saving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<RulesRef>,
}

// === impl StreamPrint ===

impl fmt::Display for StreamPrint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { digest, chain } = self;
        write!(
            f,
            "{}{}",
            hex::encode(digest),
            hex::encode(&chain.to_be_bytes())
        )
    }
}

impl FromStr for StreamPrint {
    type Err = NoPrint;

    fn from_str(text: &str) -> Result<Self, NoPrint> {
        let (digest, chain) = text.split_at_checked(32).ok_or(NoPrint)?;
        let digest = hex::decode(digest).map_err(|_| NoPrint)?;
        let chain = hex::decode(chain).map_err(|_| NoPrint)?;
        Ok(Self {
            digest,
            chain: u64::from_be_bytes(chain),
        })
    }
}

impl TryFrom<String> for StreamPrint {
    type Error = NoPrint;

    fn try_from(text: String) -> Result<Self, NoPrint> {
        text.parse()
    }
}

impl From<StreamPrint> for String {
    fn from(print: StreamPrint) -> Self {
        print.to_string()
    }
}

// === impl ConversationKey ===

impl ConversationKey {
    /// BLAKE3 over a domain tag, a presence byte, and the length-prefixed tenant before the name.
    #[must_use]
    pub fn of(tenant: Option<&str>, conversation: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"engram.conversation.1\0");
        match tenant {
            None => hasher.update(&[0]),
            Some(tenant) => {
                let len = tenant.len() as u64;
                hasher.update(&[1]).update(&len.to_le_bytes());
                hasher.update(tenant.as_bytes())
            }
        };
        hasher.update(conversation.as_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    /// Its digits.
    #[must_use]
    pub fn to_hex(self) -> String {
        hex::encode(&self.0)
    }
}

// === impl ConversationRef ===

impl ConversationRef {
    /// The version written here.
    pub const FORMAT: u32 = 2;

    /// A conversation without turns.
    #[must_use]
    pub fn new(tenant: Option<String>, conversation: String, now: Millis) -> Self {
        Self {
            format_version: Self::FORMAT,
            conversation,
            tenant,
            turns: Vec::new(),
            branches: BTreeMap::new(),
            updated: now,
            unnamed: false,
            origin: None,
            marks: BTreeMap::new(),
            rules: None,
        }
    }

    /// It names no snapshot: what it has is what was said.
    #[must_use]
    pub fn is_bare(&self) -> bool {
        let named = self.turns.iter().any(|turn| turn.snapshot.is_some());
        !named && self.branches.is_empty() && self.marks.is_empty() && self.rules.is_none()
    }

    /// It has only what version 1 has.
    fn is_plain(&self) -> bool {
        let plain = |t: &TurnRef| {
            t.tail.is_none() && t.print.is_none() && t.said.is_none() && t.prompt_tokens.is_none()
        };
        !self.unnamed
            && self.origin.is_none()
            && self.marks.is_empty()
            && self.rules.is_none()
            && self.turns.iter().all(plain)
    }

    /// The key of its file.
    #[must_use]
    pub fn key(&self) -> ConversationKey {
        ConversationKey::of(self.tenant.as_deref(), &self.conversation)
    }
}

impl Record for ConversationRef {
    const FORMAT: u32 = Self::FORMAT;
    const OLDEST: u32 = 1;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn upgrade(&mut self) -> Result<(), String> {
        if self.format_version < Self::FORMAT && !self.is_plain() {
            return Err("it has more than its version".into());
        }
        self.format_version = Self::FORMAT;
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let long = |text: &str| text.len() > MAX_NAME;
        if self.conversation.is_empty()
            || long(&self.conversation)
            || self.tenant.as_deref().is_some_and(long)
            || self.turns.iter().any(|t| long(&t.rid) || long(&t.finish))
            || self.branches.keys().any(|name| long(name))
            || self
                .origin
                .as_ref()
                .is_some_and(|o| o.conversation.is_empty() || long(&o.conversation))
        {
            return Err("an empty or too long name".into());
        }
        if let Some(rules) = &self.rules
            && (rules.every_n_turns == 0 || long(&rules.policy))
        {
            return Err("rules that are none".into());
        }
        let labels = self.marks.values().filter_map(|mark| mark.label.as_deref());
        if labels.into_iter().any(long) {
            return Err("a too long label".into());
        }
        if self.turns.len() > MAX_TURNS
            || self.branches.len() > MAX_BRANCHES
            || self.marks.len() > MAX_MARKS
        {
            return Err("too many turns, branches or marks".into());
        }
        if !self.turns.is_sorted_by(|a, b| a.turn < b.turn) {
            return Err("turns out of order".into());
        }
        for turn in &self.turns {
            let fits = turn.boundary <= turn.total_tokens;
            let prompt = turn.prompt_tokens.unwrap_or(0) <= turn.total_tokens;
            if turn.turn == 0 || !fits || !prompt || (turn.snapshot.is_none() && turn.boundary != 0)
            {
                return Err(format!("turn {} contradicts itself", turn.turn));
            }
            let beyond = turn.total_tokens - turn.boundary;
            if turn
                .tail
                .as_ref()
                .is_some_and(|t| t.len() != beyond as usize)
            {
                return Err(format!("turn {} has not {beyond} more tokens", turn.turn));
            }
        }
        Ok(())
    }
}

/// Tokens as a list of numbers.
mod tokens {
    use super::{Arc, Deserialize, Serialize, TokenId};

    pub fn serialize<S: serde::Serializer>(
        tokens: &Option<Arc<[TokenId]>>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        tokens.as_deref().serialize(to)
    }

    pub fn deserialize<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Arc<[TokenId]>>, D::Error> {
        Ok(Option::<Vec<TokenId>>::deserialize(from)?.map(Arc::from))
    }
}

/// A shared text.
mod text {
    use super::{Arc, Deserialize, Serialize};

    pub fn serialize<S: serde::Serializer>(
        text: &Option<Arc<str>>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        text.as_deref().serialize(to)
    }

    pub fn deserialize<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Arc<str>>, D::Error> {
        Ok(Option::<String>::deserialize(from)?.map(Arc::from))
    }
}

#[cfg(test)]
mod tests;
