//! A token log in plain memory, and reading of any log.

use std::io;

use crate::types::{TokenId, Tokens};

/// Tokens at the start of an edge that its `head` is a hash of.
pub(super) const HEAD_TOKENS: u32 = 64;

/// Compared at once before the first difference is searched for.
const STRIDE: usize = 1024;

/// A token log in memory, for tests and for a daemon without a disk.
#[derive(Clone, Debug, Default)]
pub struct VecLog {
    tokens: Vec<TokenId>,
    released: u64,
}

// === impl VecLog ===

impl VecLog {
    /// An empty log.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Tokens in it, in all.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// Whether nothing was ever added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens that nothing points at any more.
    #[must_use]
    pub fn released(&self) -> u64 {
        self.released
    }
}

impl Tokens for VecLog {
    fn append(&mut self, tokens: &[TokenId]) -> io::Result<u64> {
        let offset = self.len();
        self.tokens.try_reserve(tokens.len())?;
        self.tokens.extend_from_slice(tokens);
        Ok(offset)
    }

    fn get(&self, offset: u64, len: u32, f: &mut dyn FnMut(&[TokenId])) {
        let Ok(start) = usize::try_from(offset) else {
            return;
        };
        let from = self.tokens.get(start..).unwrap_or_default();
        f(from.get(..len as usize).unwrap_or(from));
    }

    fn hold(&mut self, offset: u64, len: u32) -> bool {
        let end = offset.checked_add(u64::from(len));
        end.is_some_and(|end| end <= self.len())
    }

    fn release(&mut self, _offset: u64, len: u32) {
        self.released += u64::from(len);
    }
}

/// How many tokens of `tokens`, from its start, stand in the log at `offset`.
pub(super) fn common(log: &impl Tokens, offset: u64, tokens: &[TokenId]) -> u32 {
    let want = u32::try_from(tokens.len()).expect("prompts are checked to be shorter");
    let mut rest = tokens;
    let mut same = 0_usize;
    let mut differs = false;
    log.get(offset, want, &mut |run| {
        if differs {
            return;
        }
        let len = run.len().min(rest.len());
        let (head, tail) = rest.split_at(len);
        let equal = first_difference(run.split_at(len).0, head);
        same += equal;
        differs = equal < len;
        rest = tail;
    });
    u32::try_from(same).expect("at most the tokens asked for")
}

/// How many tokens of the log at `a` and at `b` are the same, of at most `len`.
pub(super) fn common_runs(log: &impl Tokens, a: u64, b: u64, len: u32) -> u32 {
    let (mut same, mut differs) = (0_u32, false);
    log.get(b, len, &mut |run| {
        if differs {
            return;
        }
        let fit = common(log, a + u64::from(same), run);
        differs = (fit as usize) < run.len();
        same += fit;
    });
    same
}

/// Reads a short run; `None` if the log is shorter.
pub(super) fn read(log: &impl Tokens, offset: u64, len: u32) -> Option<Vec<TokenId>> {
    let mut out = Vec::with_capacity(len as usize);
    log.get(offset, len, &mut |run| out.extend_from_slice(run));
    (out.len() == len as usize).then_some(out)
}

/// Position of the first difference of two runs of the same length.
fn first_difference(a: &[TokenId], b: &[TokenId]) -> usize {
    let mut same = 0;
    for (a, b) in a.chunks(STRIDE).zip(b.chunks(STRIDE)) {
        if a == b {
            same += a.len();
            continue;
        }
        let differing = a.iter().zip(b).take_while(|(a, b)| a == b);
        return same + differing.count();
    }
    same
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log that answers in runs of a few tokens, as one mapped in pieces does.
    struct Pieces(VecLog);

    impl Tokens for Pieces {
        fn append(&mut self, tokens: &[TokenId]) -> io::Result<u64> {
            self.0.append(tokens)
        }

        fn get(&self, offset: u64, len: u32, f: &mut dyn FnMut(&[TokenId])) {
            self.0
                .get(offset, len, &mut |run| run.chunks(7).for_each(&mut *f));
        }
    }

    #[test]
    fn common_finds_every_first_difference_in_any_runs() {
        let tokens: Vec<TokenId> = (0..2500).collect();
        let mut log = Pieces(VecLog::new());
        log.append(&[9; 3]).unwrap();
        let offset = log.append(&tokens).unwrap();
        assert_eq!(common(&log, offset, &tokens), 2500);
        for at in [0, 1, 6, 7, 8, 1023, 1024, 1025, 2499] {
            let mut other = tokens.clone();
            other[at] = 99_999;
            assert_eq!(common(&log, offset, &other), at as u32);
            assert_eq!(common(&log.0, offset, &other), at as u32);
        }
    }

    #[test]
    fn a_log_that_is_too_short_matches_only_what_it_has() {
        let mut log = VecLog::new();
        log.append(&[1, 2, 3]).unwrap();
        assert_eq!(common(&log, 1, &[2, 3, 4]), 2);
        assert_eq!(common(&log, 9, &[2]), 0);
        assert_eq!(read(&log, 1, 2), Some(vec![2, 3]));
        assert_eq!(read(&log, 1, 3), None);
    }
}
