//! Which rows of which pieces a restore takes. Pure.

use crate::proto::channel::layout::Piece;
use crate::types::{BLOCK_TOKENS, TokenRange};

/// One piece that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    /// State or KV.
    pub piece: Piece,
    /// Its number in the daemon's message.
    pub index: u32,
    /// The tokens whose KV the piece holds; empty for a state.
    pub range: TokenRange,
    /// Those of them that are taken.
    pub rows: TokenRange,
    /// Its size.
    pub bytes: u64,
}

/// Why a daemon's list of pieces cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadParts {
    /// An odd number of ends.
    #[error("a piece has one end only")]
    Odd,
    /// An empty, reversed or too long piece.
    #[error("a piece of tokens {0} to {1}")]
    Range(u32, u32),
    /// The pieces leave a gap.
    #[error("no piece brings token {0}")]
    Gap(u32),
}

/// The daemon's pairs as ranges, each of 1 to [`BLOCK_TOKENS`] tokens.
///
/// # Errors
///
/// [`BadParts::Odd`], [`BadParts::Range`].
pub fn ranges(parts: &[u32]) -> Result<Vec<TokenRange>, BadParts> {
    let (pairs, rest) = parts.as_chunks();
    if !rest.is_empty() {
        return Err(BadParts::Odd);
    }
    let range = |[start, end]: &[u32; 2]| {
        let (start, end) = (*start, *end);
        let sized = start < end && end - start <= BLOCK_TOKENS;
        sized
            .then_some(TokenRange { start, end })
            .ok_or(BadParts::Range(start, end))
    };
    pairs.iter().map(range).collect()
}

/// What to take of a snapshot at `boundary`, of which KV is needed from `kv_from` on: the state and
/// the pieces that bring a row which no later piece brings. A piece may reach beyond what its
/// snapshot uses of it; the rows there are the next one's.
///
/// # Errors
///
/// [`BadParts`].
pub fn takes(
    parts: &[u32],
    kv_from: u32,
    boundary: u32,
    state_bytes: u64,
    row_bytes: u64,
) -> Result<Vec<Take>, BadParts> {
    let mut end = boundary;
    let mut takes = Vec::new();
    for (index, range) in ranges(parts)?.into_iter().enumerate().rev() {
        let rows = TokenRange {
            start: range.start.max(kv_from),
            end: range.end.min(end),
        };
        if rows.start >= rows.end {
            continue;
        }
        if rows.end != end {
            return Err(BadParts::Gap(rows.end));
        }
        end = rows.start;
        takes.push(Take {
            piece: Piece::Kv,
            // Half of the count of numbers in one message.
            index: index as u32,
            range,
            rows,
            bytes: u64::from(range.end - range.start).saturating_mul(row_bytes),
        });
    }
    if end > kv_from {
        return Err(BadParts::Gap(kv_from));
    }
    let nothing = TokenRange {
        start: boundary,
        end: boundary,
    };
    takes.push(Take {
        piece: Piece::State,
        index: 0,
        range: nothing,
        rows: nothing,
        bytes: state_bytes,
    });
    takes.reverse();
    Ok(takes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(parts: &[u32], kv_from: u32, boundary: u32) -> Result<Vec<[u32; 3]>, BadParts> {
        let takes = takes(parts, kv_from, boundary, 10, 2)?;
        assert_eq!((takes[0].piece, takes[0].bytes), (Piece::State, 10));
        let kv = takes.iter().skip(1);
        Ok(kv.map(|t| [t.index, t.rows.start, t.rows.end]).collect())
    }

    #[test]
    fn each_row_is_taken_once_from_the_last_piece_that_brings_it() {
        assert_eq!(
            rows(&[0, 1024, 1024, 1280], 0, 1280),
            Ok(vec![[0, 0, 1024], [1, 1024, 1280]])
        );
        // The device has the first 1088; a longer parent's block is used in part, and the branch's
        // own takes over at 1536.
        assert_eq!(
            rows(&[1024, 2048, 1536, 2048, 2048, 2304], 1088, 2100),
            Ok(vec![[0, 1088, 1536], [1, 1536, 2048], [2, 2048, 2100]])
        );
        // A piece that a later one covers whole is not asked for.
        assert_eq!(
            rows(&[1024, 1100, 1024, 2048], 1024, 2048),
            Ok(vec![[1, 1024, 2048]])
        );
        // The state alone.
        assert_eq!(rows(&[], 512, 512), Ok(vec![]));
        assert_eq!(rows(&[0, 512], 512, 512), Ok(vec![]));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(rows(&[0], 0, 512), Err(BadParts::Odd));
        assert_eq!(rows(&[5, 5], 0, 512), Err(BadParts::Range(5, 5)));
        assert_eq!(rows(&[9, 5], 0, 512), Err(BadParts::Range(9, 5)));
        assert_eq!(rows(&[0, 1025], 0, 512), Err(BadParts::Range(0, 1025)));
        assert_eq!(rows(&[], 0, 512), Err(BadParts::Gap(0)));
        assert_eq!(rows(&[0, 256], 0, 512), Err(BadParts::Gap(256)));
        assert_eq!(rows(&[0, 100, 256, 512], 0, 512), Err(BadParts::Gap(100)));
        assert_eq!(rows(&[256, 512], 0, 512), Err(BadParts::Gap(0)));
    }
}
