//! The only place that asks what time it is; tests set the time by hand.

use std::{
    fmt,
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;

use crate::types::Millis;

/// Says the time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Wall clock: may jump; for what people see and what is kept on disk.
    fn now(&self) -> Millis;

    /// Time since some fixed start; never goes back; for deadlines and intervals.
    fn monotonic(&self) -> Duration;
}

/// The clock of this machine.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

/// A clock that moves only when told.
#[derive(Debug)]
pub struct ManualClock {
    state: Mutex<(Millis, Duration)>,
}

// === impl SystemClock ===

impl SystemClock {
    /// A clock whose monotonic time starts now.
    #[must_use]
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that reads the wall clock"
    )]
    fn now(&self) -> Millis {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Millis::default().after(since.unwrap_or_default())
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

// === impl ManualClock ===

impl ManualClock {
    /// A clock that stands at `now`.
    #[must_use]
    pub fn new(now: Millis) -> Self {
        Self {
            state: Mutex::new((now, Duration::ZERO)),
        }
    }

    /// Moves both times forward.
    pub fn advance(&self, by: Duration) {
        let mut state = self.state.lock();
        state.0 = state.0.after(by);
        state.1 = state.1.saturating_add(by);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Millis {
        self.state.lock().0
    }

    fn monotonic(&self) -> Duration {
        self.state.lock().1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_clock_moves_when_told() {
        let clock = ManualClock::new(Millis(1000));
        clock.advance(Duration::from_secs(2));
        assert_eq!(clock.now(), Millis(3000));
        assert_eq!(clock.monotonic(), Duration::from_secs(2));
    }

    #[test]
    fn system_clock_is_after_2020() {
        let clock = SystemClock::new();
        assert!(clock.now() > Millis(1_577_836_800_000));
        let before = clock.monotonic();
        assert!(clock.monotonic() >= before);
    }
}
