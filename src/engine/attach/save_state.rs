//! Where a save stands, as the worker sees it.
//!
//! ```text
//! Offered → Gathering → Draining → Finishing
//! ```
//!
//! - *Offered*: the daemon was told of a state; nothing is locked.
//! - *Gathering*: the daemon said what it lacks. The KV is locked, and goes piece by piece into the
//!   ring; the state goes first, as it may be evicted at any time.
//! - *Draining*: all pieces are gathered and the KV is unlocked; some still lie in the ring.
//! - *Finishing*: the daemon has all pieces, and has not said how the save ended.
//!
//! A save ends in every state: by the daemon's word, by a deadline, by a deeper state, or with the
//! session. A step takes the state by value, so that a save is never in two.

use std::fmt;

/// Where a save stands.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum SaveState {
    /// The daemon was told.
    Offered,
    /// Pieces go into the ring.
    Gathering,
    /// All pieces are or were in the ring.
    Draining,
    /// The daemon has all pieces.
    Finishing,
}

// === impl SaveState ===

impl SaveState {
    /// Every state, in order.
    pub const ALL: [Self; 4] = [
        Self::Offered,
        Self::Gathering,
        Self::Draining,
        Self::Finishing,
    ];

    /// The name in reports and holds.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Offered => "Offered",
            Self::Gathering => "Gathering",
            Self::Draining => "Draining",
            Self::Finishing => "Finishing",
        }
    }

    /// The daemon said what it wants.
    ///
    /// # Errors
    ///
    /// The state as it is, if the daemon was not asked.
    pub fn wanted(self) -> Result<Self, Self> {
        match self {
            Self::Offered => Ok(Self::Gathering),
            other => Err(other),
        }
    }

    /// The last piece is gathered.
    ///
    /// # Errors
    ///
    /// The state as it is, if it does not gather.
    pub fn gathered(self) -> Result<Self, Self> {
        match self {
            Self::Gathering => Ok(Self::Draining),
            other => Err(other),
        }
    }

    /// The last piece is out of the ring.
    ///
    /// # Errors
    ///
    /// The state as it is, if pieces are still to be gathered.
    pub fn drained(self) -> Result<Self, Self> {
        match self {
            Self::Draining => Ok(Self::Finishing),
            other => Err(other),
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
    fn the_way_passes_every_state_and_no_step_is_skipped() {
        type Step = fn(SaveState) -> Result<SaveState, SaveState>;
        let steps: [Step; 3] = [SaveState::wanted, SaveState::gathered, SaveState::drained];
        for (at, mut state) in SaveState::ALL.into_iter().enumerate() {
            let name = state.as_str();
            for (_, step) in steps.iter().enumerate().filter(|(number, _)| *number != at) {
                state = step(state).unwrap_err();
                assert_eq!(state.as_str(), name);
            }
            if let Some(step) = steps.get(at) {
                assert_eq!(step(state).as_ref(), Ok(&SaveState::ALL[at + 1]));
            }
        }
    }
}
