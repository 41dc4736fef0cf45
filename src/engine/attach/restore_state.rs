//! Where a restore stands, as the worker sees it.
//!
//! ```text
//! LookingUp → Leased → Filling → Placing → Placed → Releasing
//! ```
//!
//! - *LookingUp*: the daemon was asked what it has.
//! - *Leased*: the daemon keeps a snapshot for the request, which is not considered for admission
//!   yet, or for which the ring has no room yet.
//! - *Filling*: pieces come into the ring. Only a prefix larger than the ring's share holds pages
//!   and a slot by now, and each of its pieces moves on from the ring as it comes.
//! - *Placing*: all bytes are here. Pages and a slot are taken as soon as what runs leaves some.
//! - *Placed*: state and KV are in the device's cache, locked until the request has its own lock.
//! - *Releasing*: nothing of the device is held any more, and the lease is to be given back. Rooms of
//!   the ring that the daemon may still write to are kept until it answers.
//!
//! A restore ends in every state; a request whose restore ended is prefilled as far as the device
//! does not have it. A step takes the state by value, so that a restore is never in two.

use std::fmt;

/// Where a restore stands.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum RestoreState {
    /// The daemon was asked.
    LookingUp,
    /// The daemon keeps a snapshot.
    Leased,
    /// Pieces come into the ring.
    Filling,
    /// All bytes are here.
    Placing,
    /// It is in the device's cache.
    Placed,
    /// The lease is given back.
    Releasing,
}

// === impl RestoreState ===

impl RestoreState {
    /// Every state, in order.
    pub const ALL: [Self; 6] = [
        Self::LookingUp,
        Self::Leased,
        Self::Filling,
        Self::Placing,
        Self::Placed,
        Self::Releasing,
    ];

    /// The name in reports and holds.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::LookingUp => "LookingUp",
            Self::Leased => "Leased",
            Self::Filling => "Filling",
            Self::Placing => "Placing",
            Self::Placed => "Placed",
            Self::Releasing => "Releasing",
        }
    }

    /// The daemon has something.
    ///
    /// # Errors
    ///
    /// The state as it is, if it was not asked.
    pub fn found(self) -> Result<Self, Self> {
        match self {
            Self::LookingUp => Ok(Self::Leased),
            other => Err(other),
        }
    }

    /// The first pieces were asked for.
    ///
    /// # Errors
    ///
    /// The state as it is, if there is no lease or they were asked for before.
    pub fn asked(self) -> Result<Self, Self> {
        match self {
            Self::Leased => Ok(Self::Filling),
            other => Err(other),
        }
    }

    /// The last piece is here.
    ///
    /// # Errors
    ///
    /// The state as it is, if none was asked for.
    pub fn filled(self) -> Result<Self, Self> {
        match self {
            Self::Filling => Ok(Self::Placing),
            other => Err(other),
        }
    }

    /// State and KV are in the cache.
    ///
    /// # Errors
    ///
    /// The state as it is, if bytes are missing.
    pub fn placed(self) -> Result<Self, Self> {
        match self {
            Self::Placing => Ok(Self::Placed),
            other => Err(other),
        }
    }

    /// It is over, well or not; the lease is left.
    ///
    /// # Errors
    ///
    /// The state as it is, if there is no lease or it is given back already.
    pub fn ended(self) -> Result<Self, Self> {
        match self {
            Self::Leased | Self::Filling | Self::Placing | Self::Placed => Ok(Self::Releasing),
            other => Err(other),
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
    use super::RestoreState::{Filling, Leased, LookingUp, Placed, Placing, Releasing};
    use super::*;

    #[test]
    fn the_way_passes_every_state_once() {
        type Step = fn(RestoreState) -> Result<RestoreState, RestoreState>;
        let steps: [Step; 5] = [
            RestoreState::found,
            RestoreState::asked,
            RestoreState::filled,
            RestoreState::placed,
            RestoreState::ended,
        ];
        let mut state = LookingUp;
        for (step, to) in steps
            .into_iter()
            .zip([Leased, Filling, Placing, Placed, Releasing])
        {
            state = step(state).unwrap();
            assert_eq!(state, to);
        }
        for step in steps {
            state = step(state).unwrap_err();
        }
        for state in [Leased, Filling, Placing, Placed] {
            assert_eq!(state.ended(), Ok(Releasing));
        }
        assert_eq!(
            LookingUp.ended(),
            Err(LookingUp),
            "there is no lease to give back"
        );
        assert_eq!(Leased.placed(), Err(Leased));
    }
}
