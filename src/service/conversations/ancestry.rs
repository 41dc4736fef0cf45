//! Which turn a prompt goes on with.

use std::collections::{BTreeMap, HashMap};

use super::tail::Chain;
use super::{ConversationKey, Conversations, Origin, Owner, Turn};
use crate::store::StreamPrint;

/// A turn whose tokens are known by their print.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Known {
    /// Its conversation.
    pub key: ConversationKey,
    /// Its number.
    pub turn: u32,
    /// How many tokens it has, prompt and answer.
    pub tokens: u32,
    /// What they are known by.
    pub print: StreamPrint,
}

/// Turns of conversations that no client named, by their tokens.
#[derive(Debug, Default)]
pub struct Prints {
    by_chain: HashMap<u64, Known>,
    /// How many there are of each length.
    lengths: BTreeMap<u32, usize>,
}

// === impl Prints ===

impl Prints {
    /// Of two with the same tokens the later one is found.
    fn learn(&mut self, known: Known) {
        let (chain, tokens) = (known.print.chain, known.tokens);
        if let Some(before) = self.by_chain.insert(chain, known) {
            self.drop_length(before.tokens);
        }
        *self.lengths.entry(tokens).or_default() += 1;
    }

    /// A turn of a conversation that no client named.
    pub(super) fn learn_turn(&mut self, key: &ConversationKey, turn: &Turn) {
        if let Some(print) = turn.print {
            self.learn(Known {
                key: key.clone(),
                turn: turn.number,
                tokens: turn.total_tokens,
                print,
            });
        }
    }

    pub(super) fn forget(&mut self, key: &ConversationKey, turn: &Turn) {
        let Some(print) = turn.print else { return };
        let its = |known: &Known| known.key == *key && known.turn == turn.number;
        if self.by_chain.get(&print.chain).is_some_and(its)
            && let Some(known) = self.by_chain.remove(&print.chain)
        {
            self.drop_length(known.tokens);
        }
    }

    fn drop_length(&mut self, tokens: u32) {
        if let Some(count) = self.lengths.get_mut(&tokens) {
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&tokens);
            }
        }
    }

    /// The longest of at most `most` tokens that seems to be a prefix.
    fn find(&self, chain: &Chain, most: u32) -> Option<&Known> {
        let lengths = self.lengths.range(1..=most).rev();
        let mut found = lengths.filter_map(|(tokens, _)| {
            let known = self.by_chain.get(&chain.at(*tokens)?)?;
            (known.tokens == *tokens).then_some(known)
        });
        found.next()
    }
}

// === impl Conversations ===

impl Conversations {
    /// The turn whose tokens the first `prompt` seem to go on with. Whether they do is to be proven by
    /// the digest of its print.
    pub fn ancestor(&self, chain: &Chain, prompt: u32) -> Option<Known> {
        self.prints.find(chain, prompt).cloned()
    }

    /// The request goes on with `known`: it moves into that conversation if it is the next turn there;
    /// else its own conversation notes where it parted. Returns the conversation it moved into.
    pub fn go_on(&mut self, owner: Owner, known: &Known) -> Option<ConversationKey> {
        let from = self.open.get(&owner)?.clone();
        let own = self.all.get(&from)?;
        let named = !own.branches.is_empty() || !own.marks.is_empty() || own.rules.is_some();
        let fresh = own.turns.is_empty() && !named;
        let last = self.all.get(&known.key)?.turns.last()?;
        let next = last.number == known.turn && last.print == Some(known.print);
        if from == known.key || !own.unnamed || !fresh {
            return None;
        }
        if !next || own.live.len() > 1 {
            let origin = Origin {
                conversation: known.key.name.clone(),
                turn: known.turn,
            };
            self.all.get_mut(&from)?.origin = Some(origin);
            return None;
        }
        let live = self.all.get_mut(&from)?.live.remove(&owner)?;
        self.rids
            .insert((from.tenant.clone(), live.rid.clone()), known.key.clone());
        let to = self.all.get_mut(&known.key)?;
        to.updated = to.updated.max(live.changed);
        to.live.insert(owner, live);
        self.open.insert(owner, known.key.clone());
        self.all.remove(&from);
        Some(known.key.clone())
    }

    pub(super) fn learn_print(&mut self, key: &ConversationKey, number: u32) {
        let conversation = self.all.get(key).filter(|it| it.unnamed);
        let Some(turn) = conversation.and_then(|it| it.turn(number)) else {
            return;
        };
        self.prints.learn_turn(key, turn);
    }
}
