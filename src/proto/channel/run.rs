//! Runs of pieces: which ones, and where in the ring they lie. Pure.

use std::ops::Range;

use super::layout::{Piece, RUN_ALIGN};
use super::msg::{Drain, Drained, Fill, Filled};

/// The pieces that a message speaks of.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// State or KV.
    pub piece: Piece,
    /// The first one.
    pub index: u32,
    /// How many.
    pub count: u32,
}

/// What a message speaks of.
macro_rules! runs_of {
    ($($message:ty),*) => {$(
        impl From<&$message> for Run {
            fn from(message: &$message) -> Self {
                Self {
                    piece: message.piece,
                    index: message.index,
                    count: message.count,
                }
            }
        }
    )*};
}

runs_of!(Drain, Drained, Fill, Filled);

// === impl Run ===

impl Run {
    /// One piece.
    #[must_use]
    pub const fn one(piece: Piece, index: u32) -> Self {
        Self {
            piece,
            index,
            count: 1,
        }
    }

    /// The piece at this place of a list that has the state first and then all KV.
    #[must_use]
    pub fn of_part(part: usize) -> Self {
        match part.checked_sub(1) {
            None => Self::one(Piece::State, 0),
            Some(index) => Self::one(Piece::Kv, u32::try_from(index).unwrap_or(u32::MAX)),
        }
    }

    /// Its pieces in a list that has the state first and then all KV. `None`: there are none, or
    /// they are not all in a list of `len`.
    #[must_use]
    pub fn of_list(self, len: usize) -> Option<Range<usize>> {
        let first = match self.piece {
            Piece::State => usize::try_from(self.index).ok()?,
            Piece::Kv => usize::try_from(self.index).ok()?.checked_add(1)?,
        };
        let end = first.checked_add(usize::try_from(self.count).ok()?)?;
        let len = match self.piece {
            Piece::State => len.min(1),
            Piece::Kv => len,
        };
        (first < end && end <= len).then_some(first..end)
    }

    /// The numbers of its pieces. `None`: there are none, or numbers beyond all.
    #[must_use]
    pub fn indices(self) -> Option<Range<u32>> {
        let end = self.index.checked_add(self.count)?;
        (self.count > 0).then_some(self.index..end)
    }

    /// Takes `next` in, if it follows.
    pub fn join(&mut self, next: Self) -> bool {
        let follows =
            self.piece == next.piece && self.index.checked_add(self.count) == Some(next.index);
        let count = self.count.checked_add(next.count).filter(|_| follows);
        self.count = count.unwrap_or(self.count);
        count.is_some()
    }
}

/// Where pieces of these sizes start if the first one does at `ring_offset`, and the bytes from
/// there to the end of the last one. `None`: beyond all numbers.
pub fn places(ring_offset: u64, sizes: impl IntoIterator<Item = u64>) -> Option<(Vec<u64>, u64)> {
    let mut starts = Vec::new();
    let (mut next, mut end) = (ring_offset, ring_offset);
    for size in sizes {
        starts.push(next);
        end = next.checked_add(size)?;
        next = next.checked_add(size.checked_next_multiple_of(RUN_ALIGN)?)?;
    }
    Some((starts, end - ring_offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn kv(index: u32, count: u32) -> Run {
        Run {
            piece: Piece::Kv,
            index,
            count,
        }
    }

    #[test]
    fn a_run_is_inside_its_list_or_is_none() {
        assert_eq!(Run::one(Piece::State, 0).of_list(4), Some(0..1));
        assert_eq!(Run::one(Piece::State, 1).of_list(4), None);
        assert_eq!(Run::one(Piece::State, 0).of_list(0), None);
        assert_eq!(kv(0, 3).of_list(4), Some(1..4));
        assert_eq!(kv(2, 1).of_list(4), Some(3..4));
        for bad in [
            kv(0, 0),
            kv(0, 4),
            kv(3, 1),
            kv(1, u32::MAX),
            kv(u32::MAX, 1),
            kv(u32::MAX, u32::MAX),
        ] {
            assert_eq!(bad.of_list(4), None, "{bad:?}");
        }
        assert_eq!(kv(3, 2).indices(), Some(3..5));
        assert_eq!(kv(3, 0).indices(), None);
        assert_eq!(kv(u32::MAX, 1).indices(), None);
    }

    #[test]
    fn runs_join_only_what_follows() {
        let mut run = kv(2, 3);
        assert!(run.join(kv(5, 1)));
        assert_eq!(run, kv(2, 4));
        for other in [
            kv(5, 1),
            kv(7, 1),
            Run::one(Piece::State, 6),
            kv(6, u32::MAX),
        ] {
            assert!(!run.join(other), "{other:?}");
            assert_eq!(run, kv(2, 4));
        }
    }

    #[test]
    fn pieces_lie_one_behind_another() {
        assert_eq!(
            places(64, [100, 4096, 5]),
            Some((vec![64, 4160, 8256], 8197))
        );
        assert_eq!(places(7, []), Some((vec![], 0)));
        assert_eq!(places(u64::MAX, [1]), None);
        assert_eq!(places(0, [u64::MAX, 1]), None);
    }
}
