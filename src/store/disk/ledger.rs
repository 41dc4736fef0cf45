//! How many bytes the store has on disk, and how many it may have.
//!
//! Room is reserved before a byte is written, so the budget holds at every moment, not only after.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Unit in which files take space.
const BLOCK: u64 = 4096;

/// Bytes of all files, in whole blocks.
#[derive(Debug)]
pub(crate) struct Ledger {
    used: AtomicU64,
    /// Reserved and not kept yet: may not show in the file system's own count.
    pending: AtomicU64,
    budget: AtomicU64,
}

/// Room for bytes about to be written; given back on drop unless kept.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    ledger: &'a Ledger,
    bytes: u64,
}

/// Why there is no room.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full {
    pub(crate) need: u64,
    pub(crate) free: u64,
}

/// What a file of this length takes.
pub(crate) fn on_disk(len: u64) -> u64 {
    len.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX)
}

// === impl Ledger ===

impl Ledger {
    pub(crate) fn new(budget: u64) -> Self {
        Self {
            used: AtomicU64::new(0),
            pending: AtomicU64::new(0),
            budget: AtomicU64::new(budget),
        }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    pub(crate) fn pending(&self) -> u64 {
        self.pending.load(Relaxed)
    }

    pub(crate) fn budget(&self) -> u64 {
        self.budget.load(Relaxed)
    }

    pub(crate) fn set_budget(&self, bytes: u64) {
        self.budget.store(bytes, Relaxed);
    }

    /// Counts bytes that are there.
    pub(crate) fn add(&self, bytes: u64) {
        self.used.fetch_add(bytes, Relaxed);
    }

    /// Counts bytes that are gone.
    pub(crate) fn sub(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        let _ = self.used.fetch_update(Relaxed, Relaxed, less);
    }

    /// Room for `bytes` more beside what is used and `besides`.
    pub(crate) fn reserve(&self, bytes: u64, besides: u64) -> Result<Reservation<'_>, Full> {
        let budget = self.budget();
        let more = |used: u64| {
            let all = used.checked_add(bytes)?;
            (all.checked_add(besides)? <= budget).then_some(all)
        };
        match self.used.fetch_update(Relaxed, Relaxed, more) {
            Ok(_) => {
                self.pending.fetch_add(bytes, Relaxed);
                Ok(Reservation {
                    ledger: self,
                    bytes,
                })
            }
            Err(used) => Err(Full {
                need: bytes,
                free: budget.saturating_sub(used.saturating_add(besides)),
            }),
        }
    }
}

// === impl Reservation ===

impl Reservation<'_> {
    /// The bytes are there now.
    pub(crate) fn keep(mut self) {
        self.ledger.pending.fetch_sub(self.bytes, Relaxed);
        self.bytes = 0;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.ledger.pending.fetch_sub(self.bytes, Relaxed);
        self.ledger.sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_taken_before_and_given_back() {
        let ledger = Ledger::new(100);
        ledger.add(30);
        let a = ledger.reserve(40, 10).unwrap();
        assert_eq!(
            ledger.reserve(21, 10).unwrap_err(),
            Full { need: 21, free: 20 }
        );
        assert!(ledger.reserve(u64::MAX, 0).is_err());
        let b = ledger.reserve(20, 10).unwrap();
        assert_eq!((ledger.used(), ledger.pending()), (90, 60));
        drop(a);
        b.keep();
        assert_eq!((ledger.used(), ledger.pending()), (50, 0));
        ledger.set_budget(10);
        assert_eq!(ledger.reserve(1, 0).unwrap_err(), Full { need: 1, free: 0 });
        ledger.sub(1000);
        assert_eq!(ledger.used(), 0);
    }
}
