//! Token ids and ranges of token positions.

use std::{fmt, io};

use serde::{Deserialize, Serialize};

/// A token id of the model.
pub type TokenId = u32;

/// Tokens of a block: the unit of sharing, checking and partial reading of KV.
pub const BLOCK_TOKENS: u32 = 1024;

/// Token positions `[start, end)`, `start <= end`. In JSON: `[start, end]`.
#[derive(
    Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Default, Serialize, Deserialize,
)]
#[serde(try_from = "(u32, u32)", into = "(u32, u32)")]
pub struct TokenRange {
    /// First position.
    pub start: u32,
    /// One past the last position.
    pub end: u32,
}

/// A range that ends before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("token range [{start}, {end}) ends before it starts")]
pub struct BadRange {
    /// Said start.
    pub start: u32,
    /// Said end.
    pub end: u32,
}

/// An append-only list of token ids that outlives what points into it: RAM use does not grow with
/// the length of prompts. Offsets count tokens.
pub trait Tokens {
    /// Adds tokens at the end; says the offset of the first. After an error nothing was added.
    fn append(&mut self, tokens: &[TokenId]) -> io::Result<u64>;

    /// Calls `f` with consecutive runs, in order, that make up `[offset, offset + len)`. Tokens
    /// beyond the end are left out, so a caller that compares must count what it saw.
    fn get(&self, offset: u64, len: u32, f: &mut dyn FnMut(&[TokenId]));

    /// Something points at `[offset, offset + len)`, which an earlier process wrote; whether all of
    /// it is there.
    fn hold(&mut self, _offset: u64, _len: u32) -> bool {
        false
    }

    /// Nothing points at `[offset, offset + len)` any more: its room may be given back. Offsets of
    /// other tokens stay what they are. Default: keeps the room.
    fn release(&mut self, _offset: u64, _len: u32) {}
}

// === impl TokenRange ===

impl TokenRange {
    /// The range, if it does not end before it starts.
    pub fn new(start: u32, end: u32) -> Result<Self, BadRange> {
        if start <= end {
            Ok(Self { start, end })
        } else {
            Err(BadRange { start, end })
        }
    }

    /// The empty range at `at`: where a state stands.
    #[must_use]
    pub fn at(at: u32) -> Self {
        Self { start: at, end: at }
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(self) -> u32 {
        self.end.saturating_sub(self.start)
    }

    /// No token at all.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether `position` lies inside.
    #[must_use]
    pub fn contains(self, position: u32) -> bool {
        self.start <= position && position < self.end
    }

    /// Whether all of `other` lies inside.
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// What both have, if that is at least one token.
    #[must_use]
    pub fn overlap(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        (start < end).then_some(Self { start, end })
    }
}

impl TryFrom<(u32, u32)> for TokenRange {
    type Error = BadRange;

    fn try_from((start, end): (u32, u32)) -> Result<Self, BadRange> {
        Self::new(start, end)
    }
}

impl From<TokenRange> for (u32, u32) {
    fn from(range: TokenRange) -> Self {
        (range.start, range.end)
    }
}

impl fmt::Display for TokenRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let range = TokenRange::new(3, 9).unwrap();
        assert_eq!(range.len(), 6);
        assert!(range.contains(3) && range.contains(8) && !range.contains(9));
        assert!(range.covers(TokenRange::at(9)) && !range.covers(TokenRange::at(10)));
        let other = TokenRange { start: 8, end: 20 };
        assert_eq!(range.overlap(other), Some(TokenRange { start: 8, end: 9 }));
        assert_eq!(range.overlap(TokenRange { start: 9, end: 20 }), None);
        assert_eq!(TokenRange::new(9, 3), Err(BadRange { start: 9, end: 3 }));
    }

    #[test]
    fn json_refuses_a_range_that_ends_before_it_starts() {
        let range = TokenRange { start: 3, end: 9 };
        assert_eq!(serde_json::to_string(&range).unwrap(), "[3,9]");
        assert_eq!(serde_json::from_str::<TokenRange>("[3,9]").unwrap(), range);
        assert!(serde_json::from_str::<TokenRange>("[9,3]").is_err());
    }
}
