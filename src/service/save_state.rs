//! Where a save stands, from a worker's offer to a durable snapshot.
//!
//! ```text
//! Offered → Reserving → Wanted → Draining → Committing → Visible → Writing → Sealing → Durable
//! ```
//!
//! - *Offered*: the worker has a state at a boundary; nothing is known yet.
//! - *Reserving*: pieces are missing, and RAM for them is being found.
//! - *Wanted*: the worker was told which pieces; none has arrived in the ring.
//! - *Draining*: pieces move from the ring into the arena.
//! - *Committing*: all pieces are in the arena; no lookup finds them.
//! - *Visible*: lookups find it. The end of what the worker sees, and of a superseded snapshot.
//! - *Writing*: its objects are being written to disk.
//! - *Sealing*: its objects are durable, its manifest is not. The manifest is the commit point.
//! - *Durable*: it survives a crash.
//!
//! A save may be dropped in every state before *Visible*: then nothing of it remains. A step takes
//! the state by value, so that a machine is never in two.

use std::fmt;

/// Where a save stands.
#[derive(PartialEq, Eq, Hash, Debug)]
pub enum SaveState {
    /// Offered by the worker.
    Offered,
    /// Looking for room.
    Reserving,
    /// The worker knows what is wanted.
    Wanted,
    /// Pieces move out of the ring.
    Draining,
    /// All pieces are in, invisible.
    Committing,
    /// Lookups find it.
    Visible,
    /// Objects go to disk.
    Writing,
    /// Objects are on disk, the manifest is not.
    Sealing,
    /// On disk.
    Durable,
}

/// A step that the machine does not have: a fault of the daemon.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a save cannot go from {from} to {to}")]
pub struct BadStep {
    /// Where it was.
    pub from: &'static str,
    /// Where it was to go.
    pub to: &'static str,
}

// === impl SaveState ===

impl SaveState {
    /// Every state, in order.
    pub const ALL: [Self; 9] = [
        Self::Offered,
        Self::Reserving,
        Self::Wanted,
        Self::Draining,
        Self::Committing,
        Self::Visible,
        Self::Writing,
        Self::Sealing,
        Self::Durable,
    ];

    /// The name in logs, metrics and holds.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Offered => "Offered",
            Self::Reserving => "Reserving",
            Self::Wanted => "Wanted",
            Self::Draining => "Draining",
            Self::Committing => "Committing",
            Self::Visible => "Visible",
            Self::Writing => "Writing",
            Self::Sealing => "Sealing",
            Self::Durable => "Durable",
        }
    }

    /// The next state. A failed write goes back to *Visible* and is tried again.
    pub fn step(self, to: Self) -> Result<Self, BadStep> {
        use SaveState::{
            Committing, Draining, Durable, Offered, Reserving, Sealing, Visible, Wanted, Writing,
        };
        match (&self, &to) {
            (Offered, Reserving)
            | (Reserving, Wanted)
            | (Wanted, Draining)
            | (Draining, Committing)
            | (Committing, Visible)
            | (Visible, Writing)
            | (Writing, Sealing | Visible)
            | (Sealing, Durable | Visible) => Ok(to),
            _ => Err(BadStep {
                from: self.as_str(),
                to: to.as_str(),
            }),
        }
    }

    /// Lookups find it.
    pub fn is_visible(&self) -> bool {
        match self {
            Self::Offered | Self::Reserving | Self::Wanted | Self::Draining | Self::Committing => {
                false
            }
            Self::Visible | Self::Writing | Self::Sealing | Self::Durable => true,
        }
    }
}

impl fmt::Display for SaveState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_straight_way_passes_every_state_once() {
        let mut all = SaveState::ALL.into_iter();
        let mut state = all.next().unwrap();
        for next in all {
            state = state.step(next).unwrap();
        }
        assert_eq!(state, SaveState::Durable);
    }

    #[test]
    fn nothing_becomes_visible_before_it_is_whole_or_durable_before_it_is_sealed() {
        for from in [
            SaveState::Offered,
            SaveState::Reserving,
            SaveState::Wanted,
            SaveState::Draining,
        ] {
            assert!(from.step(SaveState::Visible).is_err());
        }
        for from in SaveState::ALL {
            let sealing = from == SaveState::Sealing;
            assert_eq!(from.step(SaveState::Durable).is_ok(), sealing);
        }
    }
}
