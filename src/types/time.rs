//! Points in time as plain numbers; `util::clock` says what time it is.

use std::{
    fmt,
    time::{Duration, UNIX_EPOCH},
};

use humantime_serde::re::humantime::format_rfc3339_seconds;
use serde::{Deserialize, Serialize};

/// Unix time in milliseconds.
#[derive(
    Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Millis(pub u64);

impl Millis {
    /// This time and `duration` later; stops at the end of time.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(millis))
    }

    /// Time passed since `earlier`; zero if the wall clock went back.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// As RFC 3339 in UTC, to the second: `2026-02-03T04:05:06Z`.
    #[must_use]
    pub fn rfc3339(self) -> String {
        // The formatter refuses years past 9999.
        let last = Duration::from_secs(253_402_300_799);
        let time = UNIX_EPOCH.checked_add(Duration::from_millis(self.0).min(last));
        format_rfc3339_seconds(time.unwrap_or(UNIX_EPOCH)).to_string()
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(Millis(5).after(Duration::from_millis(7)), Millis(12));
        assert_eq!(Millis(5).after(Duration::MAX), Millis(u64::MAX));
        assert_eq!(Millis(5).since(Millis(9)), Duration::ZERO);
        assert_eq!(Millis(9).since(Millis(5)), Duration::from_millis(4));
    }

    #[test]
    fn every_time_can_be_told() {
        assert_eq!(Millis(1999).rfc3339(), "1970-01-01T00:00:01Z");
        assert_eq!(Millis(u64::MAX).rfc3339(), "9999-12-31T23:59:59Z");
    }
}
