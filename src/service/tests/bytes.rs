//! What a worker's pools hold: functions of the tokens, so that whatever comes back can be checked.

use super::fake::{ROW, STATE};
use crate::pool::cut;
use crate::types::{TokenId, TokenRange};

pub fn ranges(pairs: &[u32]) -> Vec<TokenRange> {
    pairs
        .chunks(2)
        .map(|pair| TokenRange {
            start: pair[0],
            end: pair[1],
        })
        .collect()
}

/// Tokens of a made-up conversation.
pub fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32)
        .map(|i| (i ^ seed.wrapping_mul(2_654_435_761)).wrapping_mul(747_796_405))
        .collect()
}

/// A number that depends on all tokens before.
fn digests(seed: u8, tokens: &[TokenId]) -> Vec<u64> {
    let mut digest = 0xcbf2_9ce4_8422_2325 ^ u64::from(seed);
    let next = |token: &TokenId| {
        digest = (digest ^ u64::from(*token))
            .wrapping_mul(0x0100_0000_01b3)
            .rotate_left(23);
        digest
    };
    tokens.iter().map(next).collect()
}

fn stream(seed: u64, len: u64) -> impl Iterator<Item = u8> {
    (0..len).map(move |i| {
        let x = (seed ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x >> 40) as u8
    })
}

/// The packed state after all of `tokens`.
pub fn state_bytes(seed: u8, tokens: &[TokenId]) -> Vec<u8> {
    let last = *digests(seed, tokens).last().unwrap();
    stream(last ^ 0x57, STATE).collect()
}

/// One row of one layer and role.
fn row(digest: u64, place: u64) -> impl Iterator<Item = u8> {
    stream(digest.wrapping_add(place), 32)
}

/// The packed KV of a range.
pub fn kv_bytes(seed: u8, tokens: &[TokenId], range: TokenRange) -> Vec<u8> {
    let digests = digests(seed, &tokens[..range.end as usize]);
    let mut out = Vec::with_capacity((u64::from(range.len()) * ROW) as usize);
    for place in 0..4 {
        for digest in &digests[range.start as usize..] {
            out.extend(row(*digest, place));
        }
    }
    out
}

/// Rows `used` of the packed piece `part` must be those of the tokens.
pub fn assert_rows(seed: u8, tokens: &[TokenId], part: TokenRange, used: TokenRange, got: &[u8]) {
    let digests = digests(seed, tokens);
    for place in 0..4 {
        for token in used.start..used.end {
            let at = (place * u64::from(part.len()) + u64::from(token - part.start)) * 32;
            let row: Vec<u8> = row(digests[token as usize], place).collect();
            let got = &got[at as usize..at as usize + 32];
            assert!(got == row, "foreign KV of token {token} in {part}");
        }
    }
}

/// Pieces as the daemon must cut them.
pub fn pieces(start: u32, end: u32) -> Vec<TokenRange> {
    cut(TokenRange { start, end }).collect()
}
