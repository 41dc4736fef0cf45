//! Where a restore stands, from a lookup that hit to the end of its lease.
//!
//! ```text
//! Leased ─┬─────────────► Ready ⇄ Filling ⇄ Filled ──► Released
//!         └► Promoting ──► ┘
//! ```
//!
//! - *Leased*: the snapshot is held; the worker was not told yet.
//! - *Promoting*: objects come from disk into RAM. Pieces of those that are in are filled already.
//! - *Ready*: all objects are in RAM, nothing moves.
//! - *Filling*: pieces move from the arena into the ring.
//! - *Filled*: what was asked for is in the ring; the worker scatters it.
//! - *Released*: the worker, a deadline or the end of the session ended the lease. Copies under way
//!   still hold the memory that they read.

use std::fmt;

/// Where a restore stands.
#[derive(PartialEq, Eq, Hash, Debug)]
pub enum RestoreState {
    /// The snapshot is held.
    Leased,
    /// Objects come into RAM.
    Promoting,
    /// All is in RAM.
    Ready,
    /// Pieces move into the ring.
    Filling,
    /// Pieces asked for are in the ring.
    Filled,
    /// The lease is over.
    Released,
}

/// A step that the machine does not have: a fault of the daemon.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a restore cannot go from {from} to {to}")]
pub struct BadStep {
    /// Where it was.
    pub from: &'static str,
    /// Where it was to go.
    pub to: &'static str,
}

// === impl RestoreState ===

impl RestoreState {
    /// Every state, in order.
    pub const ALL: [Self; 6] = [
        Self::Leased,
        Self::Promoting,
        Self::Ready,
        Self::Filling,
        Self::Filled,
        Self::Released,
    ];

    /// The name in logs, metrics and holds.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Leased => "Leased",
            Self::Promoting => "Promoting",
            Self::Ready => "Ready",
            Self::Filling => "Filling",
            Self::Filled => "Filled",
            Self::Released => "Released",
        }
    }

    /// The next state.
    pub fn step(self, to: Self) -> Result<Self, BadStep> {
        use RestoreState::{Filled, Filling, Leased, Promoting, Ready, Released};
        match (&self, &to) {
            (Leased, Promoting | Ready)
            | (Promoting, Ready | Filling)
            | (Ready | Filled, Filling)
            | (Filling, Filled | Promoting)
            | (Leased | Promoting | Ready | Filling | Filled, Released) => Ok(to),
            _ => Err(BadStep {
                from: self.as_str(),
                to: to.as_str(),
            }),
        }
    }
}

impl fmt::Display for RestoreState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_but_the_last_can_be_released_and_the_last_leads_nowhere() {
        for from in RestoreState::ALL {
            let end = from == RestoreState::Released;
            assert_eq!(from.step(RestoreState::Released).is_err(), end);
        }
        for to in RestoreState::ALL {
            assert!(RestoreState::Released.step(to).is_err());
        }
    }

    #[test]
    fn with_and_without_promotion_it_comes_to_filled() {
        use RestoreState::{Filled, Filling, Leased, Promoting, Ready};
        for way in [
            vec![Ready, Filling, Filled, Filling],
            vec![Promoting, Ready, Filling, Filled],
        ] {
            way.into_iter()
                .try_fold(Leased, RestoreState::step)
                .unwrap();
        }
    }
}
