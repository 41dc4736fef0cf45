//! Tokens for benchmarks.

use engram::types::TokenId;

/// Tokens are below it.
pub const VOCABULARY: u32 = 150_000;

/// A small generator of numbers (SplitMix64): the same tokens every time.
pub struct Numbers(pub u64);

impl Numbers {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Adds so many tokens.
    pub fn tokens(&mut self, len: u32, out: &mut Vec<TokenId>) {
        out.extend((0..len).map(|_| (self.next() % u64::from(VOCABULARY)) as TokenId));
    }
}
