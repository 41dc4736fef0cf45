//! Addresses of objects: by the prefix that they belong to, not by their bytes.

use zerocopy::IntoBytes;

use crate::types::{
    BLOCK_TOKENS, Fingerprint, NamespaceId, ObjectId, ObjectKind, TokenId, TokenRange,
};

/// Pieces of a range: cut at multiples of [`BLOCK_TOKENS`], none empty.
pub fn cut(range: TokenRange) -> impl Iterator<Item = TokenRange> + Clone {
    let TokenRange { mut start, end } = range;
    std::iter::from_fn(move || {
        if start >= end {
            return None;
        }
        let block_end = (start / BLOCK_TOKENS)
            .saturating_add(1)
            .saturating_mul(BLOCK_TOKENS);
        let piece = TokenRange {
            start,
            end: block_end.min(end),
        };
        start = piece.end;
        Some(piece)
    })
}

/// Hashes a growing prefix once and gives the addresses of all that ends at its current end:
/// BLAKE3 of a tag, fingerprint, namespace, tokens `[0, b)`, then `a`, `b` and the kind. All but
/// the tokens has a fixed length, so no two inputs are the same.
#[derive(Clone, Debug)]
pub struct PrefixHasher {
    hasher: blake3::Hasher,
    len: u32,
}

// === impl PrefixHasher ===

impl PrefixHasher {
    /// The empty prefix.
    #[must_use]
    pub fn new(fingerprint: Fingerprint, namespace: NamespaceId) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(b"engram.object.1\0")
            .update(&fingerprint.0)
            .update(&namespace.0);
        Self { hasher, len: 0 }
    }

    /// Adds the next tokens. A prefix holds at most `u32::MAX` tokens; the caller's own limit is far
    /// below.
    pub fn update(&mut self, tokens: &[TokenId]) {
        // Little endian on every machine that this crate builds for.
        self.hasher.update(tokens.as_bytes());
        self.len = u32::try_from(tokens.len())
            .ok()
            .and_then(|more| self.len.checked_add(more))
            .expect("prompts are limited far below 2^32 tokens");
    }

    /// Tokens so far: the `b` of [`Self::object`].
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// No token so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The object of tokens `[a, b)` after the prefix `[0, b)`, `b` being the current length. A state
    /// stands at a boundary: `a` is `b`.
    #[must_use]
    pub fn object(&self, a: u32, kind: ObjectKind) -> ObjectId {
        debug_assert!(a <= self.len, "an object lies inside its prefix");
        let mut hasher = self.hasher.clone();
        let kind = match kind {
            ObjectKind::State => 1,
            ObjectKind::Kv => 2_u8,
        };
        hasher
            .update(&a.to_le_bytes())
            .update(&self.len.to_le_bytes())
            .update(&[kind]);
        ObjectId(*hasher.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn ranges(pairs: &[(u32, u32)]) -> Vec<TokenRange> {
        pairs
            .iter()
            .map(|&(start, end)| TokenRange { start, end })
            .collect()
    }

    #[test]
    fn pieces_end_at_blocks() {
        let cut = |start, end| cut(TokenRange { start, end }).collect::<Vec<_>>();
        assert_eq!(cut(0, 0), []);
        assert_eq!(cut(5, 5), []);
        assert_eq!(cut(0, 1024), ranges(&[(0, 1024)]));
        assert_eq!(
            cut(5, 2049),
            ranges(&[(5, 1024), (1024, 2048), (2048, 2049)])
        );
        assert_eq!(
            cut(u32::MAX - 1, u32::MAX),
            ranges(&[(u32::MAX - 1, u32::MAX)])
        );
    }

    #[test]
    fn every_input_counts() {
        let mut ids = HashSet::new();
        let mut count = 0;
        for fingerprint in [Fingerprint([0; 32]), Fingerprint([1; 32])] {
            for namespace in [NamespaceId([0; 32]), NamespaceId([1; 32])] {
                for tokens in [&[][..], &[0], &[0, 0], &[1, 0], &[0, 1]] {
                    let mut hasher = PrefixHasher::new(fingerprint, namespace);
                    hasher.update(tokens);
                    for a in 0..=hasher.len() {
                        for kind in ObjectKind::ALL {
                            ids.insert(hasher.object(a, kind));
                            count += 1;
                        }
                    }
                }
            }
        }
        assert_eq!(ids.len(), count);
    }

    /// Addresses are on disk: they may only change with the tag.
    #[test]
    fn addresses_are_fixed() {
        let mut hasher = PrefixHasher::new(Fingerprint([7; 32]), NamespaceId([9; 32]));
        hasher.update(&[1, 2, 0xffff_ffff]);
        let mut bytes = b"engram.object.1\0".to_vec();
        bytes.extend([7; 32]);
        bytes.extend([9; 32]);
        bytes.extend([1, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 255]);
        bytes.extend([2, 0, 0, 0, 3, 0, 0, 0, 2]);
        assert_eq!(
            hasher.object(2, ObjectKind::Kv).0,
            *blake3::hash(&bytes).as_bytes()
        );
    }

    proptest! {
        #[test]
        fn how_tokens_come_does_not_matter(
            tokens in prop::collection::vec(any::<u32>(), 0..300),
            cuts in prop::collection::vec(0_usize..300, 0..5),
            a in 0_u32..300,
        ) {
            let new = || PrefixHasher::new(Fingerprint([1; 32]), NamespaceId([2; 32]));
            let mut whole = new();
            whole.update(&tokens);
            let mut parts = new();
            let mut at = 0;
            let mut cuts = cuts;
            cuts.sort_unstable();
            for cut in cuts.into_iter().map(|cut| cut.min(tokens.len())) {
                parts.update(&tokens[at..cut]);
                at = cut;
            }
            parts.update(&tokens[at..]);
            let a = a.min(whole.len());
            prop_assert_eq!(whole.object(a, ObjectKind::Kv), parts.object(a, ObjectKind::Kv));
        }

        #[test]
        fn pieces_cover_the_range(start in 0_u32..5000, len in 0_u32..5000) {
            let range = TokenRange { start, end: start + len };
            let mut at = start;
            for piece in cut(range) {
                prop_assert_eq!(piece.start, at);
                prop_assert!(!piece.is_empty() && piece.end <= range.end);
                prop_assert_eq!(piece.start / BLOCK_TOKENS, (piece.end - 1) / BLOCK_TOKENS);
                prop_assert!(piece.end % BLOCK_TOKENS == 0 || piece.end == range.end);
                at = piece.end;
            }
            prop_assert_eq!(at, range.end);
        }
    }
}
