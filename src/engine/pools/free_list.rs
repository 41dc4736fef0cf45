//! Free ids of one pool, handed out in a scrambled order.
//!
//! A real engine's free list is scrambled by use. This one is scrambled from the start (by a seed),
//! so that a sequence lands on other slots and pages after a restore than it had when it was saved.

use std::marker::PhantomData;

use crate::engine::ids::PoolId;
use crate::engine::rng::SplitMix64;

/// The free ids of a pool of ids `1..=capacity`.
#[derive(Debug)]
pub struct FreeList<I> {
    ids: Vec<u32>,
    /// Whether an id is in `ids`, by number: what makes a double free impossible to miss.
    is_free: Vec<bool>,
    rng: SplitMix64,
    _id: PhantomData<fn() -> I>,
}

// === impl FreeList ===

impl<I: PoolId> FreeList<I> {
    /// All ids `1..=capacity`, free.
    pub fn new(capacity: u32, seed: u64) -> Self {
        let mut is_free = vec![true; capacity as usize + 1];
        if let Some(reserved) = is_free.first_mut() {
            *reserved = false;
        }
        let ids = (1..=capacity).collect();
        Self {
            ids,
            is_free,
            rng: SplitMix64::new(seed),
            _id: PhantomData,
        }
    }

    /// Number of free ids.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether nothing is free.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Takes one id, or none if nothing is free.
    pub fn alloc(&mut self) -> Option<I> {
        if self.ids.is_empty() {
            return None;
        }
        let at = self.rng.below(self.ids.len() as u64) as usize;
        let raw = self.ids.swap_remove(at);
        if let Some(flag) = self.is_free.get_mut(raw as usize) {
            *flag = false;
        }
        Some(I::from_raw(raw))
    }

    /// Gives an id back.
    ///
    /// # Panics
    ///
    /// If the id is free already or was never of this list: the accounting would be lost.
    pub fn free(&mut self, id: I) {
        let flag = self.is_free.get_mut(id.index());
        let flag = flag.expect("an id given back is one of this pool");
        assert!(id.raw() != 0 && !*flag, "{id:?} is given back twice");
        *flag = true;
        self.ids.push(id.raw());
    }

    /// Whether this id is free.
    pub fn contains(&self, id: I) -> bool {
        self.is_free.get(id.index()).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ids::PageId;

    #[test]
    fn hands_out_each_id_once_and_never_zero() {
        let mut list: FreeList<PageId> = FreeList::new(50, 3);
        let mut seen: Vec<u32> = std::iter::from_fn(|| list.alloc())
            .map(PoolId::raw)
            .collect();
        assert!(list.is_empty());
        assert_ne!(seen, (1..=50).collect::<Vec<_>>(), "the order is scrambled");
        seen.sort_unstable();
        assert_eq!(seen, (1..=50).collect::<Vec<_>>());
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn double_free_is_caught() {
        let mut list: FreeList<PageId> = FreeList::new(2, 3);
        let id = list.alloc().expect("two are free");
        list.free(id);
        list.free(id);
    }
}
