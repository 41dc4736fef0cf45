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

use crate::types::{Millis, SnapshotId, TokenId, hex};

use super::sealed_json::Record;

const MAX_NAME: usize = 16 << 10;
const MAX_TURNS: usize = 100_000;
const MAX_BRANCHES: usize = 4096;

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
        }
    }

    /// It has only what version 1 has.
    fn is_plain(&self) -> bool {
        let plain = |t: &TurnRef| t.tail.is_none() && t.print.is_none() && t.said.is_none();
        !self.unnamed && self.origin.is_none() && self.turns.iter().all(plain)
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
        if self.turns.len() > MAX_TURNS || self.branches.len() > MAX_BRANCHES {
            return Err("too many turns or branches".into());
        }
        if !self.turns.is_sorted_by(|a, b| a.turn < b.turn) {
            return Err("turns out of order".into());
        }
        for turn in &self.turns {
            let fits = turn.boundary <= turn.total_tokens;
            if turn.turn == 0 || !fits || (turn.snapshot.is_none() && turn.boundary != 0) {
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
mod tests {
    use super::*;
    use crate::store::sealed_json;

    fn turn(turn: u32) -> TurnRef {
        TurnRef {
            turn,
            snapshot: Some(SnapshotId::new()),
            boundary: 256,
            total_tokens: 300,
            rid: "r".into(),
            finished: Millis(5),
            finish: "stop".into(),
            tail: None,
            print: None,
            said: None,
        }
    }

    /// A file as version 1 had it.
    fn of_version_1(turn: &str) -> Vec<u8> {
        let body = format!(
            r#"{{"format_version":1,"conversation":"c","tenant":null,"turns":[{{"turn":1,"snapshot":null,"boundary":0,"total_tokens":3,"rid":"r","finished":5,"finish":"stop"{turn}}}],"branches":{{}},"updated":7"#
        );
        let sum = blake3::hash(body.as_bytes()).to_hex();
        format!("{body},\"checksum\":\"{sum}\"}}\n").into_bytes()
    }

    #[test]
    fn version_1_is_read_and_has_nothing_of_version_2() {
        let read: ConversationRef = sealed_json::decode(&of_version_1("")).unwrap();
        assert_eq!(read.format_version, ConversationRef::FORMAT);
        assert_eq!((read.turns.len(), &read.turns[0].tail), (1, &None));
        let again = sealed_json::encode(&read).unwrap();
        assert_eq!(
            sealed_json::decode::<ConversationRef>(&again).unwrap(),
            read
        );
        let newer = of_version_1(r#","tail":[1,2,3]"#);
        let bad = sealed_json::decode::<ConversationRef>(&newer).unwrap_err();
        assert!(bad.detail.contains("more than its version"), "{bad:?}");
        let future = ConversationRef {
            format_version: 3,
            ..read
        };
        assert!(sealed_json::encode(&future).is_err());
    }

    #[test]
    fn a_print_is_its_digits() {
        let print = StreamPrint {
            digest: [0xab; 16],
            chain: 7,
        };
        let text = print.to_string();
        assert_eq!(text.len(), PRINT_DIGITS);
        assert_eq!(text.parse(), Ok(print));
        for bad in [
            "",
            &text[1..],
            &text.to_uppercase(),
            &format!("{text}0"),
            "é",
        ] {
            assert_eq!(bad.parse::<StreamPrint>(), Err(NoPrint), "{bad}");
        }
    }

    #[test]
    fn round_trip_and_limits() {
        let mut conversation = ConversationRef::new(None, "c".into(), Millis(1));
        conversation.turns = vec![turn(1), turn(2), turn(5)];
        conversation.turns[1].tail = Some(Arc::from([9; 44]));
        conversation.turns[1].print = Some(StreamPrint {
            digest: [1; 16],
            chain: u64::MAX,
        });
        conversation.turns[2].said = Some(Arc::from(r#"[{"role":"user"}]"#));
        conversation.unnamed = true;
        conversation.origin = Some(OriginRef {
            conversation: "d".into(),
            turn: 4,
        });
        conversation
            .branches
            .insert("main".into(), SnapshotId::new());
        let bytes = sealed_json::encode(&conversation).unwrap();
        let read: ConversationRef = sealed_json::decode(&bytes).unwrap();
        assert_eq!(read, conversation);

        let refused = |change: &dyn Fn(&mut ConversationRef)| {
            let mut bad = conversation.clone();
            change(&mut bad);
            assert!(sealed_json::encode(&bad).is_err());
        };
        refused(&|c| c.conversation.clear());
        refused(&|c| c.conversation = "x".repeat(MAX_NAME + 1));
        refused(&|c| c.turns.swap(0, 1));
        refused(&|c| c.turns[1].turn = 1);
        refused(&|c| c.turns[0].turn = 0);
        refused(&|c| c.turns[0].boundary = 301);
        refused(&|c| c.turns[0].snapshot = None);
        refused(&|c| c.turns[0].tail = Some(Arc::from([1; 43])));
        refused(&|c| {
            c.origin = Some(OriginRef {
                conversation: String::new(),
                turn: 1,
            });
        });
    }

    #[test]
    fn hostile_names_only_become_hashes() {
        let names = [
            "../x",
            "/abs",
            "a\0b",
            ".",
            "",
            "é\u{202E}",
            &"x".repeat(300),
        ];
        let mut keys: Vec<String> = names
            .iter()
            .flat_map(|name| [None, Some(""), Some("a"), Some("../x")].map(|t| (t, name)))
            .map(|(tenant, name)| ConversationKey::of(tenant, name).to_hex())
            .collect();
        assert!(
            keys.iter()
                .all(|key| { key.len() == 64 && key.chars().all(|c| c.is_ascii_hexdigit()) })
        );
        let all = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), all);
        // A tenant cannot run into a name.
        let (a, b) = (
            ConversationKey::of(Some("a"), "bc"),
            ConversationKey::of(Some("ab"), "c"),
        );
        assert_ne!(a, b);
    }
}
