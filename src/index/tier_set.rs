//! Sets of tiers, and one value for each tier.

use std::{
    fmt,
    ops::{Index, IndexMut},
};

use crate::types::TierKind;

/// Tiers that hold a whole copy of an object.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Default)]
pub struct TierSet(u8);

/// One value for each tier.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PerTier<T> {
    vram: T,
    ram: T,
    disk: T,
    remote: T,
}

// === impl TierSet ===

impl TierSet {
    /// No tier.
    pub const EMPTY: Self = Self(0);

    /// Exactly these tiers.
    #[must_use]
    pub fn of(tiers: &[TierKind]) -> Self {
        tiers.iter().fold(Self::EMPTY, |set, tier| set.with(*tier))
    }

    /// These and `tier`.
    #[must_use]
    pub fn with(self, tier: TierKind) -> Self {
        Self(self.0 | bit(tier))
    }

    /// These without `tier`.
    #[must_use]
    pub fn without(self, tier: TierKind) -> Self {
        Self(self.0 & !bit(tier))
    }

    /// Tiers in either.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Tiers in both.
    #[must_use]
    pub fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Those of these that are slower than `tier`.
    #[must_use]
    pub fn below(self, tier: TierKind) -> Self {
        Self(self.0 & !(bit(tier) | (bit(tier) - 1)))
    }

    /// Whether `tier` is one of them.
    #[must_use]
    pub fn contains(self, tier: TierKind) -> bool {
        self.0 & bit(tier) != 0
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The tiers, fastest first.
    pub fn iter(self) -> impl Iterator<Item = TierKind> {
        TierKind::ALL
            .into_iter()
            .filter(move |tier| self.contains(*tier))
    }
}

fn bit(tier: TierKind) -> u8 {
    match tier {
        TierKind::Vram => 1,
        TierKind::Ram => 2,
        TierKind::Disk => 4,
        TierKind::Remote => 8,
    }
}

impl FromIterator<TierKind> for TierSet {
    fn from_iter<I: IntoIterator<Item = TierKind>>(tiers: I) -> Self {
        tiers
            .into_iter()
            .fold(Self::EMPTY, |set, tier| set.with(tier))
    }
}

impl fmt::Debug for TierSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(self.iter().map(TierKind::as_str))
            .finish()
    }
}

// === impl PerTier ===

impl<T> Index<TierKind> for PerTier<T> {
    type Output = T;

    fn index(&self, tier: TierKind) -> &T {
        match tier {
            TierKind::Vram => &self.vram,
            TierKind::Ram => &self.ram,
            TierKind::Disk => &self.disk,
            TierKind::Remote => &self.remote,
        }
    }
}

impl<T> IndexMut<TierKind> for PerTier<T> {
    fn index_mut(&mut self, tier: TierKind) -> &mut T {
        match tier {
            TierKind::Vram => &mut self.vram,
            TierKind::Ram => &mut self.ram,
            TierKind::Disk => &mut self.disk,
            TierKind::Remote => &mut self.remote,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn below_means_slower() {
        let all: TierSet = TierKind::ALL.into_iter().collect();
        assert_eq!(
            all.below(TierKind::Ram),
            TierSet::of(&[TierKind::Disk, TierKind::Remote])
        );
        assert!(all.below(TierKind::Remote).is_empty());
        assert!(TierSet::EMPTY.below(TierKind::Vram).is_empty());
        assert_eq!(
            all.without(TierKind::Vram).iter().next(),
            Some(TierKind::Ram)
        );
        assert_eq!(format!("{:?}", all.below(TierKind::Disk)), r#"{"remote"}"#);
    }
}
