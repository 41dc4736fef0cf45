//! The tokens of a turn that its snapshot does not hold.

use std::sync::Arc;

use zerocopy::IntoBytes;

use super::Turn;
use crate::store::StreamPrint;
use crate::types::{NamespaceId, TokenId};

/// Tokens `[start, start + len)` of a turn; they may lie in memory of a later turn's tail.
#[derive(Clone, PartialEq, Eq)]
pub struct Tail {
    start: u32,
    base: Arc<[TokenId]>,
    /// Where they begin and end in `base`.
    from: usize,
    to: usize,
    /// The memory is counted with another turn.
    shared: bool,
}

/// Sums of every prefix of a token stream, for [`StreamPrint::chain`].
#[derive(Debug)]
pub struct Chain(Vec<u64>);

/// Odd, and with bits in no order: the multiplier of FxHash.
const FACTOR: u64 = 0x517c_c1b7_2722_0a95;

// === impl Tail ===

impl Tail {
    /// These tokens, of which the first is number `start` of the stream.
    pub fn new(start: u32, tokens: Arc<[TokenId]>) -> Self {
        Self {
            start,
            from: 0,
            to: tokens.len(),
            base: tokens,
            shared: false,
        }
    }

    /// The number of its first token.
    pub fn start(&self) -> u32 {
        self.start
    }

    fn tokens(&self) -> &[TokenId] {
        self.base.get(self.from..self.to).unwrap_or_default()
    }

    /// Its tokens from number `boundary` of the stream on; `None`: it begins later.
    pub fn beyond(&self, boundary: u32) -> Option<&[TokenId]> {
        let skip = boundary.checked_sub(self.start)? as usize;
        Some(self.tokens().get(skip..).unwrap_or_default())
    }

    /// All of it, and what `rest` has beyond it; what does not join on stays as it is.
    pub(super) fn followed_by(self, rest: Self) -> Self {
        let end = u32::try_from(self.tokens().len()).ok();
        let end = end.and_then(|len| self.start.checked_add(len));
        match end.and_then(|end| rest.beyond(end)) {
            Some(more) if !more.is_empty() => {
                let all = [self.tokens(), more].concat();
                Self::new(self.start, Arc::from(all))
            }
            _ => self,
        }
    }

    /// Bytes that it keeps in memory.
    fn weight(&self) -> usize {
        match self.shared {
            true => 0,
            false => size_of_val(&*self.base),
        }
    }

    /// A snapshot holds what is before `boundary`.
    fn shrink(&mut self, boundary: u32) {
        let Some(rest) = self.beyond(boundary).filter(|_| boundary > self.start) else {
            return;
        };
        *self = Self::new(boundary, Arc::from(rest));
    }

    /// The same tokens within a longer tail, if that has them; `proven`: it does where it reaches.
    fn within(&self, longer: &Self, proven: bool) -> Option<Self> {
        let skip = self.start.checked_sub(longer.start)? as usize;
        let from = longer.from.checked_add(skip)?;
        let to = from.checked_add(self.to - self.from)?;
        let view = Self {
            start: self.start,
            base: Arc::clone(&longer.base),
            from,
            to,
            shared: true,
        };
        let same = to <= longer.to && (proven || view.tokens() == self.tokens());
        same.then_some(view)
    }
}

impl std::fmt::Debug for Tail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tail({}, +{})", self.start, self.to - self.from)
    }
}

// === impl Turn ===

impl Turn {
    /// Its tokens from its snapshot's boundary on; `None`: they are not known.
    pub fn beyond(&self) -> Option<&[TokenId]> {
        match &self.tail {
            Some(tail) => tail.beyond(self.boundary),
            None if self.snapshot.is_some() && self.boundary == self.total_tokens => Some(&[]),
            None => None,
        }
    }

    /// Bytes that its tail and its messages keep in memory.
    pub(super) fn weight(&self) -> usize {
        let said = self.said.as_deref().map_or(0, str::len);
        self.tail.as_ref().map_or(0, Tail::weight) + said
    }

    /// Its tail needs no more than what its snapshot does not hold.
    pub(super) fn shrink_tail(&mut self) {
        if self.snapshot.is_some()
            && let Some(tail) = &mut self.tail
        {
            tail.shrink(self.boundary);
        }
    }

    /// The tokens of its tail lie in that of a later turn, still.
    pub(super) fn shares_tail(&self, later: &Turn) -> bool {
        let tails = self.tail.as_ref().zip(later.tail.as_ref());
        tails.is_some_and(|(tail, later)| tail.shared && Arc::ptr_eq(&tail.base, &later.base))
    }
}

/// Of turns in their order, those whose tokens the tail of a later one has keep no memory of their own.
/// Returns how many bytes that gives back.
pub(super) fn share(turns: &mut [Turn], later: &Tail) -> usize {
    let mut last: Option<Arc<[TokenId]>> = None;
    let mut freed = 0;
    for turn in turns.iter_mut().rev() {
        let Some(tail) = &turn.tail else { break };
        let base = Arc::clone(&tail.base);
        let proven = last.is_some_and(|last| Arc::ptr_eq(&last, &base));
        let Some(shared) = tail.within(later, proven) else {
            break;
        };
        freed += tail.weight();
        turn.tail = Some(shared);
        last = Some(base);
    }
    freed
}

// === impl Chain ===

impl Chain {
    /// The sums of all prefixes.
    pub fn of(namespace: &NamespaceId, tokens: &[TokenId]) -> Self {
        let mut sum = start_of(namespace);
        let mut sums = Vec::with_capacity(tokens.len() + 1);
        sums.push(sum);
        sums.extend(tokens.iter().map(|token| {
            sum = next_sum(sum, token);
            sum
        }));
        Self(sums)
    }

    /// The sum of the first `count` tokens.
    pub fn at(&self, count: u32) -> Option<u64> {
        self.0.get(count as usize).copied()
    }
}

/// What the tokens are known by in their namespace.
pub fn print_of(namespace: &NamespaceId, tokens: &[TokenId]) -> StreamPrint {
    StreamPrint {
        digest: digest_of(tokens),
        chain: tokens.iter().fold(start_of(namespace), next_sum),
    }
}

fn start_of(namespace: &NamespaceId) -> u64 {
    let (first, _) = namespace.0.split_first_chunk().expect("it has 32 bytes");
    u64::from_le_bytes(*first)
}

fn next_sum(sum: u64, token: &TokenId) -> u64 {
    (sum.rotate_left(5) ^ u64::from(*token)).wrapping_mul(FACTOR)
}

/// The digest of a [`StreamPrint`].
pub fn digest_of(tokens: &[TokenId]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(b"engram.stream.1\0")
        .update(tokens.as_bytes());
    let mut digest = [0; 16];
    hasher.finalize_xof().fill(&mut digest);
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(start: u32, tokens: &[TokenId]) -> Tail {
        Tail::new(start, Arc::from(tokens))
    }

    #[test]
    fn it_tells_only_what_it_has() {
        let mut it = tail(10, &[1, 2, 3, 4]);
        assert_eq!(it.beyond(9), None);
        assert_eq!(it.beyond(10), Some(&[1, 2, 3, 4][..]));
        assert_eq!(it.beyond(13), Some(&[4][..]));
        assert_eq!(it.beyond(14), Some(&[][..]));
        it.shrink(12);
        assert_eq!(it.beyond(12), Some(&[3, 4][..]));
        assert_eq!(it.beyond(11), None);
        it.shrink(5);
        assert_eq!(it.start(), 12);
    }

    #[test]
    fn what_was_kept_apart_joins_on() {
        let joined = |head: &Tail, rest: &Tail| head.clone().followed_by(rest.clone());
        let head = tail(2, &[3, 4]);
        for rest in [
            tail(4, &[5, 6]),
            tail(3, &[4, 5, 6]),
            tail(0, &[1, 2, 3, 4, 5, 6]),
        ] {
            assert_eq!(joined(&head, &rest).beyond(2), Some(&[3, 4, 5, 6][..]));
        }
        for rest in [tail(5, &[6]), tail(2, &[3, 4]), tail(2, &[3])] {
            assert_eq!(joined(&head, &rest).beyond(2), Some(&[3, 4][..]));
        }
    }

    #[test]
    fn a_later_turn_keeps_the_tokens_of_both_only_if_they_are_the_same() {
        let early = tail(2, &[3, 4, 5]);
        let late = tail(1, &[2, 3, 4, 5, 6, 7]);
        let shared = early.within(&late, false).unwrap();
        assert_eq!(shared.beyond(2), early.beyond(2));
        assert_eq!((shared.weight(), late.weight()), (0, 24));
        for other in [
            tail(1, &[2, 3, 4, 6, 6]),
            tail(3, &[4, 5, 6]),
            tail(1, &[2, 3, 4]),
        ] {
            assert_eq!(early.within(&other, false), None, "{other:?}");
        }
        // What the later one no longer needs is still there.
        drop(late);
        assert_eq!(shared.beyond(4), Some(&[5][..]));
    }

    #[test]
    fn prints_differ_by_namespace_by_order_and_by_length() {
        let (one, other) = (NamespaceId([1; 32]), NamespaceId([2; 32]));
        let print = |namespace, tokens: &[TokenId]| print_of(namespace, tokens);
        let first = print(&one, &[1, 2, 3]);
        assert_eq!(first, print(&one, &[1, 2, 3]));
        assert_eq!(first.digest, print(&other, &[1, 2, 3]).digest);
        assert_ne!(first.chain, print(&other, &[1, 2, 3]).chain);
        assert_ne!(first.chain, print(&one, &[2, 1, 3]).chain);
        assert_ne!(first.digest, print(&one, &[1, 2]).digest);
        let chain = Chain::of(&one, &[1, 2, 3, 4]);
        assert_eq!(chain.at(3), Some(first.chain));
        assert_eq!(chain.at(5), None);
    }
}
