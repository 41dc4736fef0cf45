//! What a client knows: what it said, and what it was told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::common::worker::prompt;

/// Tokens with which most conversations begin.
pub const COMMON: usize = 1100;

/// Tokens of the longest conversation.
pub const LONGEST: usize = 6000;

/// Conversations at a time; beyond it some go.
pub const AT_ONCE: usize = 16;

/// Numbers that follow from a seed.
pub struct Dice(pub u64);

/// A conversation that a client has.
pub struct Talk {
    pub name: String,
    pub tokens: Arc<Vec<u32>>,
    /// Tokens so far.
    pub len: usize,
}

/// What the client was told.
#[derive(Default)]
pub struct Ledger {
    pub talks: Vec<Talk>,
    /// Everything ever said, by conversation.
    pub said: BTreeMap<String, Arc<Vec<u32>>>,
    /// Snapshots that were called durable: conversation and boundary.
    pub durable: BTreeMap<String, (String, usize)>,
    /// Those of them that a branch names: they may not be evicted either.
    pub named: BTreeSet<String>,
    /// Conversations that were called deleted.
    pub gone: BTreeSet<String>,
    /// Snapshots that were read after some kill.
    pub read: BTreeSet<String>,
    pub counts: BTreeMap<&'static str, u64>,
}

// === impl Dice ===

impl Dice {
    pub fn roll(&mut self, below: usize) -> usize {
        let Dice(x) = self;
        *x ^= *x << 13;
        *x ^= *x >> 7;
        *x ^= *x << 17;
        (*x % below as u64) as usize
    }
}

// === impl Ledger ===

impl Ledger {
    /// A new conversation: most begin as all others do, some leave another one in its middle.
    pub fn open(&mut self, dice: &mut Dice) -> usize {
        let number = self.said.len();
        let own = prompt(number as u32 + 10, LONGEST);
        let mut tokens = match self.talks.get(dice.roll(self.talks.len() + 2)) {
            // Boundaries are even.
            Some(other) if other.len > 4 => other.tokens[..dice.roll(other.len) | 1].to_vec(),
            _ => prompt(1, COMMON),
        };
        tokens.extend(&own[..LONGEST.saturating_sub(tokens.len())]);
        let tokens = Arc::new(tokens);
        let name = format!("c{number}");
        self.said.insert(name.clone(), Arc::clone(&tokens));
        self.talks.push(Talk {
            name,
            tokens,
            len: 0,
        });
        self.talks.len() - 1
    }

    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// The conversation may be gone from here on.
    pub fn doubt(&mut self, name: &str) {
        self.talks.retain(|talk| talk.name != name);
        let gone: Vec<String> = self
            .durable
            .iter()
            .filter(|(_, (of, _))| of == name)
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            self.durable.remove(&id);
            self.named.remove(&id);
        }
    }
}
