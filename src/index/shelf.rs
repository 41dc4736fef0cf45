//! What could leave a tier, in the order in which it would.

use std::collections::BTreeSet;

use super::{Usage, slab::ObjIx, tier_set::PerTier};
use crate::types::{Millis, ObjectKind, TierKind};

/// What may become of an object's copy in one tier.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub(super) enum Class {
    /// No copy, or one that stays: leased, pinned, promised, or needed and without a lower copy.
    #[default]
    Kept,
    /// No live snapshot needs it.
    Orphan,
    /// A lower tier has a copy too.
    Spare,
    /// The last copy of a state.
    LastState,
    /// The last copy of KV that a live snapshot needs, and that can be written down.
    LastKv,
}

/// Least recently used first; of the same time, deepest first, so leaves go before parents.
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Debug)]
pub(super) struct Place {
    last_use: u64,
    order: u32,
    object: ObjIx,
}

/// The objects of one tier.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    pub(super) usage: Usage,
    pub(super) orphans: BTreeSet<Place>,
    pub(super) spare: BTreeSet<Place>,
    pub(super) states: BTreeSet<Place>,
    pub(super) kv: BTreeSet<Place>,
}

/// The shelves of all tiers.
pub(super) type Shelves = PerTier<Shelf>;

// === impl Place ===

impl Place {
    /// `end` is where the object ends, below 2^31.
    pub(super) fn new(last_use: Millis, end: u32, kind: ObjectKind, object: ObjIx) -> Self {
        let kv = u32::from(kind == ObjectKind::Kv);
        Self {
            last_use: last_use.0,
            order: (!end << 1) | kv,
            object,
        }
    }

    pub(super) fn object(self) -> ObjIx {
        self.object
    }
}

// === impl Shelf ===

impl Shelf {
    pub(super) fn set(&self, class: Class) -> Option<&BTreeSet<Place>> {
        match class {
            Class::Kept => None,
            Class::Orphan => Some(&self.orphans),
            Class::Spare => Some(&self.spare),
            Class::LastState => Some(&self.states),
            Class::LastKv => Some(&self.kv),
        }
    }

    /// Puts many places onto an empty shelf.
    pub(super) fn fill(&mut self, class: Class, places: Vec<Place>) {
        if let Some(set) = self.set_mut(class) {
            debug_assert!(set.is_empty(), "nothing is on a shelf before it is filled");
            // Sorts, and builds the tree from below.
            *set = places.into_iter().collect();
        }
    }

    fn set_mut(&mut self, class: Class) -> Option<&mut BTreeSet<Place>> {
        match class {
            Class::Kept => None,
            Class::Orphan => Some(&mut self.orphans),
            Class::Spare => Some(&mut self.spare),
            Class::LastState => Some(&mut self.states),
            Class::LastKv => Some(&mut self.kv),
        }
    }
}

/// Takes a copy from one place to another.
pub(super) fn move_place(
    shelves: &mut Shelves,
    tier: TierKind,
    from: (Class, Place),
    to: (Class, Place),
) {
    let shelf = &mut shelves[tier];
    if let Some(set) = shelf.set_mut(from.0) {
        let was = set.remove(&from.1);
        debug_assert!(was, "{from:?} was not where its object says");
    }
    if let Some(set) = shelf.set_mut(to.0) {
        set.insert(to.1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::slab::Ix;
    use super::*;

    #[test]
    fn places_sort_by_use_then_deepest_first_then_states_first() {
        let place = |used, end, kind| Place::new(Millis(used), end, kind, ObjIx::new(0));
        let places = [
            place(1, 5, ObjectKind::Kv),
            place(2, (1 << 31) - 1, ObjectKind::State),
            place(2, 900, ObjectKind::State),
            place(2, 900, ObjectKind::Kv),
            place(2, 5, ObjectKind::Kv),
            place(2, 1, ObjectKind::State),
        ];
        assert!(places.is_sorted());
    }
}
