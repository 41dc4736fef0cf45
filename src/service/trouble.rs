//! What the disk refuses: remembered until it is over, and told without flooding the log.

use std::time::Duration;

use super::Service;
use super::core::Failure;
use super::metrics::{self, ByReason, Name};
use crate::store::{ErrorKind, StoreError};
use crate::types::Millis;

/// How often the same complaint is logged at most.
const EVERY: Duration = Duration::from_secs(60);

/// First pause after a failure; it doubles up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longest pause after failures.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// What is asked for again when nobody knows how much was refused.
const SOME: u64 = 1 << 20;

/// Failed writes.
#[derive(Debug, Default)]
pub struct Trouble {
    /// How many there were.
    count: u64,
    /// The last one that any other write would meet, too.
    general: Option<(u64, Failure)>,
    full: Option<Full>,
    no_room: Complaint,
    other: Complaint,
    removals: Complaint,
}

/// A disk without room.
#[derive(Clone, Debug)]
pub struct Full {
    /// Since when.
    pub since: Millis,
    /// The last write that it refused.
    pub last: Millis,
    /// Writes that it refused since.
    pub failures: u64,
    /// Why the last one failed.
    pub error: String,
    /// Bytes that it asked for.
    pub need: u64,
}

/// Something that may come again and again: logged at once, then once a minute.
#[derive(Debug, Default)]
pub struct Complaint {
    last: Option<Duration>,
    more: u64,
    told: bool,
}

// === impl Complaint ===

impl Complaint {
    /// It came again. Says how often since it was logged last, if it is to be logged now.
    pub fn came(&mut self, now: Duration) -> Option<u64> {
        self.more += 1;
        if self
            .last
            .is_some_and(|last| now.saturating_sub(last) < EVERY)
        {
            return None;
        }
        self.last = Some(now);
        self.told = true;
        Some(std::mem::take(&mut self.more))
    }

    /// It is over; `true`: that is to be logged.
    pub fn over(&mut self) -> bool {
        self.more = 0;
        std::mem::take(&mut self.told)
    }
}

// === impl Trouble ===

impl Trouble {
    /// A write failed. Says how often since it was logged last, if it is to be logged now.
    pub fn failed(
        &mut self,
        failure: Failure,
        error: &StoreError,
        (now, monotonic): (Millis, Duration),
    ) -> Option<u64> {
        self.count += 1;
        if matches!(failure, Failure::NoSpace | Failure::Unavailable) {
            self.general = Some((self.count, failure));
        }
        if failure != Failure::NoSpace {
            return self.other.came(monotonic);
        }
        let need = match error {
            StoreError::NoSpace { need, .. } | StoreError::Floor { need, .. } => *need,
            _ => SOME,
        };
        let before = self.full.take();
        self.full = Some(Full {
            since: before.as_ref().map_or(now, |full| full.since),
            last: now,
            failures: before.map_or(0, |full| full.failures) + 1,
            error: error.to_string(),
            need,
        });
        self.no_room.came(monotonic)
    }

    /// A removal failed. As [`Self::failed`].
    pub fn not_removed(&mut self, monotonic: Duration) -> Option<u64> {
        self.removals.came(monotonic)
    }

    /// A place in time, for [`Self::since`].
    pub fn mark(&self) -> u64 {
        self.count
    }

    /// What went wrong after the mark for every write, if something did.
    pub fn since(&self, mark: u64) -> Option<Failure> {
        let (at, failure) = self.general?;
        (at > mark).then_some(failure)
    }

    /// The disk has no room, as far as is known.
    pub fn full(&self) -> Option<&Full> {
        self.full.as_ref()
    }

    /// Writing works. Returns what is to be logged as over.
    pub fn over(&mut self) -> (Option<Full>, bool) {
        let full = self.full.take();
        let room = self.no_room.over();
        (full.filter(|_| room), self.other.over())
    }
}

// === impl Full ===

impl Full {
    /// For people.
    pub fn tell(&self) -> String {
        let Self {
            since,
            last,
            failures,
            error,
            need: _,
        } = self;
        format!(
            "the disk is full since {}: {failures} writes failed, the last at {}: {error}",
            since.rfc3339(),
            last.rfc3339(),
        )
    }
}

// === impl Service ===

impl Service {
    /// A disk that was full, and of which nobody wants anything now, may have room again.
    pub(super) fn look_for_room(&self) {
        let need = {
            let core = self.core.lock();
            let wanted = !core.queue.is_idle() || core.conversations.any_dirty();
            core.queue
                .trouble
                .full()
                .filter(|_| !wanted)
                .map(|full| full.need)
        };
        if need.is_some_and(|need| self.store.disk_has_room(need)) {
            self.write_succeeded();
        }
    }

    /// Counts a failed write, and makes the thread wait before the next.
    pub(super) fn write_failed(&self, error: &StoreError) -> Failure {
        let failure = match error {
            StoreError::TooLarge { .. } => Failure::TooLarge,
            error => match error.kind() {
                ErrorKind::NoSpace => Failure::NoSpace,
                ErrorKind::Unavailable => Failure::Unavailable,
                _ => Failure::Other,
            },
        };
        let label = ByReason {
            reason: Name(failure.as_str()),
        };
        self.metrics.write_failures.get_or_create(&label).inc();
        let now = (self.clock.now(), self.clock.monotonic());
        let mut core = self.core.lock();
        // What is too large is not tried again, and says nothing of the others.
        if failure != Failure::TooLarge {
            let pause = FIRST_PAUSE
                .saturating_mul(1 << core.queue.failures.min(16))
                .min(MAX_PAUSE);
            core.queue.failures += 1;
            if !core.queue.is_hopeless(failure) {
                core.queue.not_before = now.1.saturating_add(pause);
            }
        }
        let tell = core.queue.trouble.failed(failure, error, now);
        drop(core);
        if let Some(failures) = tell {
            tracing::warn!(%error, failures, "Could not write to disk");
        }
        self.note_poison();
        failure
    }

    pub(super) fn disk_failed(&self, what: &'static str, error: &StoreError) {
        metrics::count(&self.metrics.write_failures, what);
        let now = self.clock.monotonic();
        let tell = self.core.lock().queue.trouble.not_removed(now);
        if let Some(failures) = tell {
            tracing::warn!(%error, failures, "Could not remove from disk");
        }
        self.note_poison();
    }

    /// A disk that takes no more writes is not ready.
    fn note_poison(&self) {
        if self
            .store
            .disk
            .as_ref()
            .is_some_and(|disk| disk.poisoned().is_some())
        {
            self.latches.hold(super::DISK_FAILED);
        }
    }

    /// A write went well.
    pub(super) fn write_succeeded(&self) {
        let mut core = self.core.lock();
        core.queue.failures = 0;
        core.queue.not_before = Duration::ZERO;
        let (full, other) = core.queue.trouble.over();
        drop(core);
        if let Some(full) = full {
            let (failures, since) = (full.failures, full.since.rfc3339());
            tracing::info!(failures, since, "The disk has room again");
        }
        if other {
            tracing::info!("The disk takes writes again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::TierKind;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn no_space(need: u64) -> StoreError {
        StoreError::NoSpace {
            tier: TierKind::Disk,
            need,
            free: 0,
        }
    }

    #[test]
    fn a_complaint_is_told_at_once_and_then_once_a_minute_with_its_number() {
        let mut trouble = Trouble::default();
        let mut fail = |at: u64| {
            let now = (Millis(1000 * at), s(at));
            trouble.failed(Failure::NoSpace, &no_space(7), now)
        };
        assert_eq!(fail(5), Some(1));
        for at in 6..65 {
            assert_eq!(fail(at), None);
        }
        assert_eq!(fail(65), Some(60));
        assert_eq!(fail(66), None);
        let full = trouble.full().unwrap();
        assert_eq!((full.since, full.last), (Millis(5000), Millis(66_000)));
        assert_eq!((full.failures, full.need), (62, 7));
        let text = full.tell();
        assert!(text.contains("since 1970-01-01T00:00:05"), "{text}");
        let (over, other) = trouble.over();
        assert_eq!((over.unwrap().failures, other), (62, false));
        assert!(trouble.full().is_none());
        // What comes and goes within a minute is neither told nor taken back.
        let again = trouble.failed(Failure::NoSpace, &no_space(7), (Millis(70_000), s(70)));
        assert_eq!(again, None);
        assert!(trouble.full().is_some());
        assert!(trouble.over().0.is_none());
        let again = trouble.failed(Failure::NoSpace, &no_space(7), (Millis(126_000), s(126)));
        assert_eq!(again, Some(1));
    }

    #[test]
    fn who_waits_hears_of_what_concerns_every_write() {
        let mut trouble = Trouble::default();
        let now = (Millis(0), s(0));
        let first = trouble.mark();
        trouble.failed(Failure::Other, &no_space(1), now);
        trouble.failed(Failure::TooLarge, &no_space(1), now);
        assert_eq!(trouble.since(first), None);
        assert!(trouble.full().is_none());
        trouble.failed(Failure::NoSpace, &no_space(1), now);
        assert_eq!(trouble.since(first), Some(Failure::NoSpace));
        assert_eq!(trouble.since(trouble.mark()), None);
    }
}
