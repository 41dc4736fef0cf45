//! Finding records of a slab by their ids.
//!
//! The table has the number of each record and 32 bits of its id's hash, so that a record, which lies
//! somewhere else, is looked at only when it is most likely the right one. With millions of them each
//! look is a miss of every cache.

use hashbrown::HashTable;

use super::{node::mix, slab::Ix};

/// Numbers of records, by 64 bits of their ids that are as good as random.
pub(super) struct Ids<I> {
    table: HashTable<(I, u32)>,
}

// === impl Ids ===

impl<I: Ix> Ids<I> {
    pub(super) fn new() -> Self {
        Self {
            table: HashTable::new(),
        }
    }

    pub(super) fn reserve(&mut self, more: usize) {
        self.table.reserve(more, |(_, tag)| hash(*tag));
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// The record of this id, which `is` tells from others.
    pub(super) fn find(&self, id: u64, is: impl Fn(I) -> bool) -> Option<I> {
        let tag = tag(id);
        let found = self
            .table
            .find(hash(tag), |(ix, other)| *other == tag && is(*ix));
        found.map(|(ix, _)| *ix)
    }

    /// Adds a record whose id is in none of those that are there.
    pub(super) fn insert(&mut self, id: u64, ix: I) {
        let tag = tag(id);
        self.table
            .insert_unique(hash(tag), (ix, tag), |(_, tag)| hash(*tag));
    }

    /// Takes a record out.
    pub(super) fn remove(&mut self, id: u64, ix: I) {
        let there = self.table.find_entry(hash(tag(id)), |(it, _)| *it == ix);
        there.ok().expect("every record is in the table").remove();
    }
}

fn tag(id: u64) -> u32 {
    mix(id) as u32
}

fn hash(tag: u32) -> u64 {
    mix(u64::from(tag))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::slab::ObjIx;

    #[test]
    fn every_record_is_found_until_it_is_removed() {
        let mut ids: Ids<ObjIx> = Ids::new();
        let id = |n: u32| u64::from(n).wrapping_mul(0x1234_5678_9abc_def1);
        for n in 0..10_000 {
            ids.insert(id(n), ObjIx::new(n));
        }
        for n in (0..10_000).step_by(3) {
            ids.remove(id(n), ObjIx::new(n));
        }
        for n in 0..10_000 {
            let found = ids.find(id(n), |ix| ix.raw() == n);
            assert_eq!(found.map(Ix::raw), (n % 3 != 0).then_some(n));
        }
    }

    #[test]
    fn records_with_the_same_bits_are_told_apart() {
        let mut ids: Ids<ObjIx> = Ids::new();
        for n in 0..100 {
            ids.insert(7, ObjIx::new(n));
        }
        ids.remove(7, ObjIx::new(50));
        for n in 0..100 {
            let found = ids.find(7, |ix| ix.raw() == n);
            assert_eq!(found.is_some(), n != 50);
        }
    }
}
