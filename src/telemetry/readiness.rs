//! Readiness: start-up steps each hold a latch, and the process is ready when none is held.
//!
//! A latch that is taken later (a poisoned tier, a drain) makes the process unready again, with its
//! reason shown on `/readyz`.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// The set of reasons why the process is not ready. Cheap to clone; clones share the set.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    held: Arc<Mutex<Held>>,
}

#[derive(Debug, Default)]
struct Held {
    next: u64,
    reasons: BTreeMap<u64, String>,
}

/// Keeps the process unready until it is dropped.
#[derive(Debug)]
#[must_use = "a dropped latch says that its step is done"]
pub struct Latch {
    held: Arc<Mutex<Held>>,
    number: u64,
}

// === impl Readiness ===

impl Readiness {
    /// Takes a latch with a reason for people, such as "index is being read".
    pub fn latch(&self, reason: impl Into<String>) -> Latch {
        let mut held = self.held.lock();
        let number = held.next;
        held.next += 1;
        held.reasons.insert(number, reason.into());
        Latch {
            held: Arc::clone(&self.held),
            number,
        }
    }

    /// Why the process is not ready, oldest first; empty when it is.
    pub fn reasons(&self) -> Vec<String> {
        self.held.lock().reasons.values().cloned().collect()
    }
}

// === impl Latch ===

impl Drop for Latch {
    fn drop(&mut self) {
        self.held.lock().reasons.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_only_when_every_latch_is_dropped() {
        let readiness = Readiness::default();
        assert!(readiness.reasons().is_empty());
        let store = readiness.latch("store");
        let index = readiness.latch("index");
        assert_eq!(readiness.reasons(), ["store", "index"]);
        drop(store);
        assert_eq!(readiness.reasons(), ["index"]);
        drop(index);
        assert!(readiness.reasons().is_empty());
        let _drain = readiness.latch("drain");
        assert_eq!(readiness.reasons(), ["drain"]);
    }
}
