//! Conversations: which snapshot each turn ended with. Small JSON files that are rewritten whole.
//!
//! On disk each is a sealed JSON file (see `sealed_json`) with the fields of [`ConversationRef`], at
//! `refs/<first two digits>/<hash>.json`. The hash is that of tenant and conversation; names given
//! by clients reach the file system in no other form.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::types::{Millis, SnapshotId, hex};

use super::sealed_json::Record;

const MAX_NAME: usize = 16 << 10;
const MAX_TURNS: usize = 100_000;
const MAX_BRANCHES: usize = 4096;

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
}

/// All that is known of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversationRef {
    /// 1.
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
    /// The version written and read here.
    pub const FORMAT: u32 = 1;

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
        }
    }

    /// The key of its file.
    #[must_use]
    pub fn key(&self) -> ConversationKey {
        ConversationKey::of(self.tenant.as_deref(), &self.conversation)
    }
}

impl Record for ConversationRef {
    const FORMAT: u32 = Self::FORMAT;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn check(&self) -> Result<(), String> {
        let long = |text: &str| text.len() > MAX_NAME;
        if self.conversation.is_empty()
            || long(&self.conversation)
            || self.tenant.as_deref().is_some_and(long)
            || self.turns.iter().any(|t| long(&t.rid) || long(&t.finish))
            || self.branches.keys().any(|name| long(name))
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
        }
        Ok(())
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
        }
    }

    #[test]
    fn round_trip_and_limits() {
        let mut conversation = ConversationRef::new(None, "c".into(), Millis(1));
        conversation.turns = vec![turn(1), turn(2), turn(5)];
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
