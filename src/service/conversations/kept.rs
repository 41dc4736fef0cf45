//! Tokens that outlive the state they came with.
//!
//! A state may go while its turn stays: by retention, by eviction, because somebody deleted it. What was
//! said is not its to take along: before it leaves the index, a turn whose tokens no later turn begins
//! with gets them into its tail. Going on from there prefills more, and is the same.

use std::sync::Arc;

use super::super::core::Core;
use super::{ConversationKey, Tail, Turn, digest_of, tail};
use crate::types::{ObjectId, SnapshotId, TierKind, TokenId};

/// Later turns in which the tokens of one are looked for.
pub(super) const LATER: usize = 16;

/// Turns that a deleted one may have kept the tokens of, which are looked at.
const HEIRS: usize = 16;

/// Bytes of tails and messages beyond which nothing more is kept at once: what is damaged may be a
/// beginning that very many conversations share.
const MOST: usize = 256 << 20;

// === impl Core ===

impl Core {
    /// The snapshot is about to leave the index, and its turns fall back to `from`, the boundary of an
    /// ancestor or 0.
    pub fn keep_tokens(&mut self, going: SnapshotId, from: u32) {
        let keys = self.conversations.named_by(going).to_vec();
        if keys.is_empty() || self.conversations.weight > MOST {
            return;
        }
        let mut held = None;
        for key in keys {
            for number in self.bereft(&key, going) {
                let held: &Vec<TokenId> = held.get_or_insert_with(|| {
                    let mut tokens = Vec::new();
                    // What cannot be read is not known: that is what is answered then.
                    let _ = self.index.read_tokens(&going, &mut tokens);
                    tokens
                });
                self.conversations.lengthen(&key, number, held, from);
            }
        }
    }

    /// A copy of the object is about to be lost: what is said of the snapshots that go with it stays.
    pub fn keep_tokens_of(&mut self, object: &ObjectId, tier: TierKind) {
        let last = |tiers: crate::index::TierSet| tiers.without(tier).is_empty();
        if self.index.object(object).is_some_and(|it| last(it.tiers)) {
            for going in self.index.lost_with(object) {
                self.keep_tokens(going, 0);
            }
        }
    }

    /// Turns of a conversation that would not be known without the snapshot.
    fn bereft(&self, key: &ConversationKey, going: SnapshotId) -> Vec<u32> {
        let Some(conversation) = self.conversations.get(key) else {
            return Vec::new();
        };
        let shelved = conversation.shelved;
        let mut found = Vec::new();
        let turns = conversation.turns.iter().enumerate();
        for (at, turn) in turns.filter(|(_, turn)| turn.snapshot == Some(going)) {
            let later = conversation.turns.get(at + 1..).unwrap_or_default().iter();
            let mut later = later
                .filter(|it| it.total_tokens >= turn.total_tokens && it.snapshot != Some(going));
            let covered = match self.tokens_of(turn) {
                Some(tokens) => later
                    .filter(|it| it.beyond().is_some())
                    .take(LATER)
                    .any(|it| {
                        self.tokens_of(it)
                            .is_some_and(|all| all.starts_with(&tokens))
                    }),
                // The rest is on disk: what goes on from the state very likely goes on from it all.
                None if shelved => later.any(|it| {
                    let line = it.snapshot.map(|id| self.line(id)).unwrap_or_default();
                    line.iter().any(|(id, _)| *id == going)
                }),
                // Nothing is lost that was known.
                None => true,
            };
            if !covered {
                found.push(turn.number);
            }
        }
        found
    }

    /// A turn is about to be deleted: the longest turn that is known by its tokens alone gets them.
    pub fn hand_over(&mut self, key: &ConversationKey, number: u32) {
        let Some(conversation) = self.conversations.get(key) else {
            return;
        };
        let Some(tokens) = conversation.turn(number).and_then(|it| self.tokens_of(it)) else {
            return;
        };
        let heir = |it: &&Turn| {
            it.number != number && it.beyond().is_none() && it.total_tokens as usize <= tokens.len()
        };
        let mut heirs: Vec<&Turn> = conversation.turns.iter().filter(heir).collect();
        heirs.sort_by_key(|it| std::cmp::Reverse((it.total_tokens, it.number)));
        // Shorter ones are found in the first that fits.
        let heir = heirs.into_iter().take(HEIRS).find(|it| {
            let prefix = tokens.get(..it.total_tokens as usize);
            let print = it.print.zip(prefix);
            print.is_some_and(|(print, prefix)| print.digest == digest_of(prefix))
        });
        if let Some((heir, total)) = heir.map(|it| (it.number, it.total_tokens)) {
            let prefix = tokens.get(..total as usize).unwrap_or_default();
            self.conversations
                .give_tail(key, heir, Tail::new(0, Arc::from(prefix)));
        }
    }
}

// === impl Conversations ===

impl super::Conversations {
    /// The tail of a turn begins at `from`, by what its snapshot `held`, which goes.
    fn lengthen(&mut self, key: &ConversationKey, number: u32, held: &[TokenId], from: u32) {
        let turn = self.all.get(key).and_then(|it| it.turn(number));
        let Some((turn, head)) = turn.zip(held.get(from as usize..)) else {
            return;
        };
        // What is on disk alone comes behind it when it is read.
        let beyond = turn.beyond().unwrap_or_default();
        let tail = Tail::new(from, Arc::from([head, beyond].concat()));
        self.give_tail(key, number, tail);
    }

    fn give_tail(&mut self, key: &ConversationKey, number: u32, tail: Tail) {
        let Some(conversation) = self.all.get_mut(key) else {
            return;
        };
        let at = conversation.turns.iter().position(|it| it.number == number);
        let Some(at) = at else { return };
        let (earlier, later) = conversation.turns.split_at_mut(at);
        let freed = tail::share(earlier, &tail);
        if let Some(turn) = later.first_mut() {
            let before = turn.weight();
            turn.tail = Some(tail);
            let after = turn.weight();
            self.weigh(before + freed, after);
        }
        self.dirty.insert(key.clone());
    }
}
