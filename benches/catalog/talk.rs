//! Conversations of which stores are made.

use std::collections::BTreeMap;

use engram::{
    index::{KvRef, NewSnapshot, ObjectEntry, Retain, TierSet, TreeKey},
    pool::PrefixHasher,
    store::{self, ConversationRef, Manifest, ObjectRef, TurnRef, sample},
    types::{Generation, Millis, Namespace, ObjectKind, SnapshotId, TierKind, TokenId, TokenRange},
};

use crate::numbers::Numbers;

pub const TURNS: u32 = 50;
pub const SYSTEMS: u32 = 100;
pub const SYSTEM_TOKENS: u32 = 512;
pub const DEEP: u32 = 8;
pub const DEEP_TURN: u32 = 2560;
pub const TURN: u32 = 64;
pub fn turn_tokens(conversation: u32) -> u32 {
    if conversation < DEEP { DEEP_TURN } else { TURN }
}

pub fn prompt(conversation: u32) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    Numbers(u64::from(conversation % SYSTEMS)).tokens(SYSTEM_TOKENS, &mut tokens);
    let own = TURNS * turn_tokens(conversation);
    Numbers(1000 + u64::from(conversation)).tokens(own, &mut tokens);
    tokens
}

pub fn key() -> TreeKey {
    TreeKey {
        fingerprint: sample::MODEL,
        namespace: Namespace::default().id(),
    }
}

/// A conversation on its way.
pub struct Talk {
    pub tokens: Vec<TokenId>,
    hasher: PrefixHasher,
    kv: Vec<store::KvRef>,
    parent: Option<SnapshotId>,
    pub at: u32,
    pub stored: ConversationRef,
}

impl Talk {
    pub fn new(number: u32) -> Self {
        Self {
            tokens: prompt(number),
            hasher: PrefixHasher::new(key().fingerprint, key().namespace),
            kv: Vec::new(),
            parent: None,
            at: 0,
            stored: ConversationRef::new(None, format!("conversation-{number}"), Millis(1)),
        }
    }

    /// The next turn: its manifest, and what an index takes.
    pub fn turn(&mut self, number: u32, turn: u32, now: u64) -> (Manifest, NewSnapshot) {
        let geometry = sample::geometry();
        let boundary = SYSTEM_TOKENS + turn * turn_tokens(number);
        let range = TokenRange {
            start: self.at,
            end: boundary,
        };
        let own = self.tokens.get(self.at as usize..boundary as usize);
        self.hasher.update(own.expect("a turn"));
        let object = self.hasher.object(range.start, ObjectKind::Kv);
        let state = self.hasher.object(boundary, ObjectKind::State);
        let generation = Generation(now << 20);
        self.kv.push(store::KvRef {
            object,
            generation,
            range,
            object_range: range,
        });
        let id = SnapshotId::new();
        let manifest = Manifest {
            format_version: Manifest::FORMAT,
            snapshot: id,
            parent: self.parent,
            fingerprint: sample::MODEL,
            namespace: Namespace::default(),
            own: range,
            boundary,
            state: ObjectRef {
                object: state,
                generation,
            },
            kv: self.kv.clone(),
            shards: 1,
            generation,
            created: Millis(now),
            bytes: geometry.state_bytes() + geometry.kv_bytes(range),
            labels: BTreeMap::from([("model".to_owned(), "sample".to_owned())]),
        };
        let tiers = TierSet::of(&[TierKind::Disk]);
        let entry = |id, kind, range, bytes| ObjectEntry {
            id,
            kind,
            range,
            bytes,
            tiers,
        };
        let new = NewSnapshot {
            id,
            state: entry(
                state,
                ObjectKind::State,
                TokenRange::at(boundary),
                geometry.state_bytes(),
            ),
            kv: self
                .kv
                .iter()
                .map(|part| KvRef {
                    object: part.object,
                    range: part.range,
                    object_range: part.object_range,
                })
                .collect(),
            new_objects: vec![entry(
                object,
                ObjectKind::Kv,
                range,
                geometry.kv_bytes(range),
            )],
            created: Millis(now),
            durable: true,
            retain: Retain::Ordinary,
        };
        self.stored.turns.push(TurnRef {
            turn,
            snapshot: Some(id),
            boundary,
            total_tokens: boundary,
            rid: format!("{:032x}", (u64::from(number) << 32) | u64::from(turn)),
            finished: Millis(now),
            finish: "stop".to_owned(),
            prompt_tokens: None,
            tail: None,
            print: None,
            said: None,
            namespace: None,
        });
        (self.parent, self.at) = (Some(id), boundary);
        (manifest, new)
    }
}
