//! Records in a list, named by 4-byte numbers that are used again once free.

use std::{
    marker::PhantomData,
    ops::{Index, IndexMut},
};

/// A number that names a record of one slab. `NONE` names nothing.
pub(super) trait Ix: Copy + Eq {
    const NONE: Self;

    fn new(raw: u32) -> Self;
    fn raw(self) -> u32;

    fn is_none(self) -> bool {
        self == Self::NONE
    }

    fn some(self) -> Option<Self> {
        (!self.is_none()).then_some(self)
    }
}

macro_rules! ix {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
        pub(super) struct $name(u32);

        impl Ix for $name {
            const NONE: Self = Self(u32::MAX);

            fn new(raw: u32) -> Self {
                Self(raw)
            }

            fn raw(self) -> u32 {
                self.0
            }
        }
    };
}

ix! {
    /// Names a node of a tree.
    NodeIx
}
ix! {
    /// Names an object.
    ObjIx
}
ix! {
    /// Names a snapshot.
    SnapIx
}

/// The list. Naming a free record is a fault of the index itself, and panics.
pub(super) struct Slab<I, T> {
    items: Vec<Option<T>>,
    free: Vec<u32>,
    ix: PhantomData<I>,
}

// === impl Slab ===

impl<I: Ix, T> Slab<I, T> {
    pub(super) fn new() -> Self {
        Self {
            items: Vec::new(),
            free: Vec::new(),
            ix: PhantomData,
        }
    }

    pub(super) fn reserve(&mut self, more: usize) {
        self.items.reserve(more.saturating_sub(self.free.len()));
    }

    pub(super) fn len(&self) -> usize {
        self.items.len() - self.free.len()
    }

    pub(super) fn insert(&mut self, item: T) -> I {
        if let Some(raw) = self.free.pop() {
            let place = self.items.get_mut(raw as usize);
            *place.expect("free numbers lie in the list") = Some(item);
            return I::new(raw);
        }
        let raw = u32::try_from(self.items.len()).expect("fewer than 2^32 records");
        assert!(raw != u32::MAX, "fewer than 2^32 records");
        self.items.push(Some(item));
        I::new(raw)
    }

    pub(super) fn remove(&mut self, ix: I) -> T {
        let place = self.items.get_mut(ix.raw() as usize);
        let item = place.and_then(Option::take);
        self.free.push(ix.raw());
        item.expect("only live records are removed")
    }

    /// The record, if `ix` still names one.
    pub(super) fn peek(&self, ix: I) -> Option<&T> {
        self.items.get(ix.raw() as usize)?.as_ref()
    }

    /// All records, in the order of their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (I, &T)> {
        (0..).zip(&self.items).filter_map(|(raw, item)| {
            let item = item.as_ref()?;
            Some((I::new(raw), item))
        })
    }
}

impl<I: Ix, T> Index<I> for Slab<I, T> {
    type Output = T;

    fn index(&self, ix: I) -> &T {
        self.peek(ix).expect("names a live record")
    }
}

impl<I: Ix, T> IndexMut<I> for Slab<I, T> {
    fn index_mut(&mut self, ix: I) -> &mut T {
        let place = self.items.get_mut(ix.raw() as usize);
        place.and_then(Option::as_mut).expect("names a live record")
    }
}
