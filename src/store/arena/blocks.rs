//! Which ranges of an arena are free. Pure: numbers only.

use std::collections::{BTreeMap, BTreeSet};

/// Free ranges, never touching each other. Every call takes `O(log n)` of their number.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    by_offset: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    free: u64,
}

impl Blocks {
    /// One free range `[start, end)`.
    pub(super) fn new(start: u64, end: u64) -> Self {
        let mut blocks = Self::default();
        if start < end {
            blocks.insert(start, end - start);
        }
        blocks
    }

    /// Takes `len > 0` bytes out of the smallest free range that has them, lowest offset first.
    pub(super) fn alloc(&mut self, len: u64) -> Option<u64> {
        let &(range_len, offset) = self.by_len.range((len, 0)..).next()?;
        self.remove(offset, range_len);
        if range_len > len {
            self.insert(offset + len, range_len - len);
        }
        Some(offset)
    }

    /// Takes exactly this range, if all of it is free.
    pub(super) fn take(&mut self, offset: u64, len: u64) -> bool {
        let Some(end) = offset.checked_add(len) else {
            return false;
        };
        let Some((&start, &range_len)) = self.by_offset.range(..=offset).next_back() else {
            return false;
        };
        let range_end = start + range_len;
        if len == 0 || range_end < end {
            return false;
        }
        self.remove(start, range_len);
        if start < offset {
            self.insert(start, offset - start);
        }
        if end < range_end {
            self.insert(end, range_end - end);
        }
        true
    }

    /// Gives a range back that `alloc` or `take` gave out; it grows together with its neighbours.
    pub(super) fn free(&mut self, offset: u64, len: u64) {
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&before, &before_len)) = self.by_offset.range(..offset).next_back()
            && before + before_len == start
        {
            self.remove(before, before_len);
            start = before;
        }
        if let Some(&after_len) = self.by_offset.get(&end) {
            self.remove(end, after_len);
            end += after_len;
        }
        self.insert(start, end - start);
    }

    /// Sum of all free ranges.
    pub(super) fn free_bytes(&self) -> u64 {
        self.free
    }

    /// The longest free range.
    pub(super) fn longest(&self) -> u64 {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    fn insert(&mut self, offset: u64, len: u64) {
        self.by_offset.insert(offset, len);
        self.by_len.insert((len, offset));
        self.free += len;
    }

    fn remove(&mut self, offset: u64, len: u64) {
        self.by_offset.remove(&offset);
        self.by_len.remove(&(len, offset));
        self.free -= len;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNITS: usize = 64;

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(u64),
        Take(u64, u64),
        Free(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (1u64..20).prop_map(Step::Alloc),
            1 => (0u64..70, 0u64..20).prop_map(|(at, len)| Step::Take(at, len)),
            3 => any::<usize>().prop_map(Step::Free),
        ];
        prop::collection::vec(step, 0..200)
    }

    /// Longest run of free units, and all free units, by looking at each.
    fn naive(used: &[bool]) -> (u64, u64) {
        let runs = used.split(|used| *used).map(|run| run.len() as u64);
        (
            runs.max().unwrap_or(0),
            used.iter().filter(|u| !**u).count() as u64,
        )
    }

    proptest! {
        #[test]
        fn agrees_with_a_map_of_units(steps in steps()) {
            let mut blocks = Blocks::new(0, UNITS as u64);
            let mut used = [false; UNITS];
            let mut live: Vec<(u64, u64)> = Vec::new();
            for step in steps {
                match step {
                    Step::Alloc(len) => {
                        let fits = naive(&used).0 >= len;
                        let got = blocks.alloc(len);
                        prop_assert_eq!(got.is_some(), fits);
                        if let Some(at) = got {
                            for unit in &mut used[at as usize..(at + len) as usize] {
                                prop_assert!(!*unit, "overlap");
                                *unit = true;
                            }
                            live.push((at, len));
                        }
                    }
                    Step::Take(at, len) => {
                        let range = used.get(at as usize..(at + len) as usize);
                        let fits = len > 0 && range.is_some_and(|range| !range.contains(&true));
                        prop_assert_eq!(blocks.take(at, len), fits);
                        if fits {
                            used[at as usize..(at + len) as usize].fill(true);
                            live.push((at, len));
                        }
                    }
                    Step::Free(which) => {
                        if live.is_empty() {
                            continue;
                        }
                        let (at, len) = live.swap_remove(which % live.len());
                        blocks.free(at, len);
                        used[at as usize..(at + len) as usize].fill(false);
                    }
                }
                let (longest, free) = naive(&used);
                prop_assert_eq!(blocks.longest(), longest, "neighbours grow together");
                prop_assert_eq!(blocks.free_bytes(), free);
                prop_assert_eq!(blocks.by_offset.len(), blocks.by_len.len());
            }
            for (at, len) in live {
                blocks.free(at, len);
            }
            prop_assert_eq!(blocks.longest(), UNITS as u64);
            prop_assert_eq!(blocks.by_offset.len(), 1);
        }
    }
}
