//! What the disk refuses: remembered until it is over, and told without flooding the log.

use std::time::Duration;

use super::Service;
use super::core::Failure;
use super::metrics::{self, ByReason, Name};
use crate::store::{Ailment, ErrorKind, StoreError};
use crate::types::Millis;

/// How often the same complaint is logged at most.
const EVERY: Duration = Duration::from_secs(60);

/// First pause after a failure; it doubles up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longest pause after failures.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// What is asked for again when nobody knows how much was refused.
const SOME: u64 = 1 << 20;

/// Failures of the system in a row after which who waits is not told to wait on.
const PATIENCE: u32 = 3;

/// How often a disk is looked at that nobody writes to.
const LOOK: Duration = Duration::from_secs(2);

/// Failed writes.
#[derive(Debug, Default)]
pub struct Trouble {
    /// How many there were.
    count: u64,
    /// The last one that any other write would meet, too.
    general: Option<(u64, Failure)>,
    ill: Option<Ill>,
    /// The last ailment that there was.
    last: Option<Ailment>,
    /// Of what it is ill.
    complaint: Complaint,
    other: Complaint,
    stuck: Option<Stuck>,
    removals: Complaint,
    looked: Option<Duration>,
}

/// A disk that takes no writes.
#[derive(Clone, Debug)]
pub struct Ill {
    /// Why.
    pub what: Ailment,
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

/// Files that cannot be removed.
#[derive(Clone, Debug)]
pub struct Stuck {
    /// Since when.
    pub since: Millis,
    /// Attempts since.
    pub failures: u64,
    /// Why the last one failed.
    pub error: String,
    /// [`Trouble::mark`] after that.
    at: u64,
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
        (what, error): (Option<Ailment>, &StoreError),
        (now, monotonic): (Millis, Duration),
    ) -> Option<u64> {
        self.count += 1;
        if matches!(failure, Failure::NoSpace | Failure::Unavailable) {
            self.general = Some((self.count, failure));
        }
        match what {
            Some(what) if failure != Failure::TooLarge => {
                self.fell_ill(what, error, (now, monotonic))
            }
            _ => self.other.came(monotonic),
        }
    }

    /// Something keeps the disk from taking writes. As [`Self::failed`].
    pub fn fell_ill(
        &mut self,
        what: Ailment,
        error: &StoreError,
        (now, monotonic): (Millis, Duration),
    ) -> Option<u64> {
        let need = match error {
            StoreError::NoSpace { need, .. } | StoreError::Floor { need, .. } => *need,
            _ => SOME,
        };
        let before = self.ill.take().filter(|ill| ill.what == what);
        if self.last.replace(what).is_some_and(|last| last != what) {
            // Another one is told at once.
            self.complaint = Complaint {
                told: self.complaint.told,
                ..Complaint::default()
            };
        }
        self.ill = Some(Ill {
            what,
            since: before.as_ref().map_or(now, |ill| ill.since),
            last: now,
            failures: before.map_or(0, |ill| ill.failures) + 1,
            error: error.to_string(),
            need,
        });
        self.complaint.came(monotonic)
    }

    /// A removal failed. As [`Self::failed`].
    pub fn not_removed(
        &mut self,
        error: &StoreError,
        (now, monotonic): (Millis, Duration),
    ) -> Option<u64> {
        self.count += 1;
        let before = self.stuck.take();
        self.stuck = Some(Stuck {
            since: before.as_ref().map_or(now, |stuck| stuck.since),
            failures: before.map_or(0, |stuck| stuck.failures) + 1,
            error: error.to_string(),
            at: self.count,
        });
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

    /// A removal that failed after the mark.
    pub fn stuck_since(&self, mark: u64) -> Option<&Stuck> {
        self.stuck.as_ref().filter(|stuck| stuck.at > mark)
    }

    /// What keeps the disk from taking writes, as far as is known.
    pub fn ill(&self) -> Option<&Ill> {
        self.ill.as_ref()
    }

    /// The disk has no room, as far as is known.
    pub fn full(&self) -> Option<&Ill> {
        self.ill().filter(|ill| ill.what.lacks_room())
    }

    /// It has been ill for some attempts: nobody should rely on its getting well soon.
    pub fn lasts(&self) -> bool {
        let patience = u64::from(PATIENCE);
        self.ill().is_some_and(|ill| ill.failures >= patience)
    }

    /// Files could not be removed.
    pub fn stuck(&self) -> Option<&Stuck> {
        self.stuck.as_ref()
    }

    /// All of them could. Says whether that is to be logged.
    pub fn unstuck(&mut self) -> bool {
        self.stuck = None;
        self.removals.over()
    }

    /// Writing works. Returns what is to be logged as over.
    pub fn over(&mut self) -> (Option<Ill>, bool) {
        let ill = self.ill.take();
        let told = self.complaint.over();
        (ill.filter(|_| told), self.other.over())
    }

    /// All that is wrong, for people.
    pub fn tell(&self) -> Vec<String> {
        let ill = self.ill().map(Ill::tell);
        ill.into_iter()
            .chain(self.stuck().map(Stuck::tell))
            .collect()
    }
}

// === impl Ill ===

impl Ill {
    /// For people.
    pub fn tell(&self) -> String {
        let Self {
            what,
            since,
            last,
            failures,
            error,
            need: _,
        } = self;
        format!(
            "{} since {}: {failures} attempts failed, the last at {}: {error}",
            what.tell(),
            since.rfc3339(),
            last.rfc3339(),
        )
    }
}

// === impl Stuck ===

impl Stuck {
    /// For people.
    pub fn tell(&self) -> String {
        format!(
            "files cannot be removed since {}: {} attempts failed, the last: {}",
            self.since.rfc3339(),
            self.failures,
            self.error
        )
    }
}

// === impl Service ===

impl Service {
    /// Looks now and then at a disk that nobody writes to: one that was ill may be well again, and
    /// one that takes no writes any more is told of before somebody relies on it.
    pub(super) fn look_at_disk(&self) {
        let now = (self.clock.now(), self.clock.monotonic());
        let (wanted, full, ill, due) = {
            let mut core = self.core.lock();
            let queue = &mut core.queue;
            let last = queue.trouble.looked.unwrap_or_default();
            let due = now.1.saturating_sub(last) >= LOOK;
            if due {
                queue.trouble.looked = Some(now.1);
            }
            let full = queue.trouble.full().map(|full| full.need);
            let ill = queue.trouble.ill().is_some();
            let wanted = !core.queue.is_idle() || core.conversations.any_dirty();
            (wanted, full, ill, due)
        };
        if let Some(need) = full {
            if !wanted && self.store.disk_has_room(need) {
                self.write_succeeded();
            }
            return;
        }
        if !due || self.is_poisoned() {
            return;
        }
        match self.store.look_at_disk(ill) {
            // Whatever waits is tried at once, and tells whether it is over.
            Ok(()) if ill && wanted => self.core.lock().queue.not_before = Duration::ZERO,
            Ok(()) if ill => self.write_succeeded(),
            Ok(()) => {}
            Err(error) => {
                let Some(what) = error.ailment() else {
                    return;
                };
                let mut core = self.core.lock();
                let trouble = &mut core.queue.trouble;
                if trouble.ill().is_some_and(|ill| ill.what == what) {
                    return;
                }
                let tell = trouble.fell_ill(what, &error, now);
                drop(core);
                self.warn(tell, &error);
            }
        }
    }

    /// Counts a failed write, and makes the thread wait before the next.
    pub(super) fn write_failed(&self, error: &StoreError) -> Failure {
        let poisoned = self.is_poisoned();
        let what = match poisoned {
            true => Some(Ailment::Fsync),
            false => error.ailment(),
        };
        let now = (self.clock.now(), self.clock.monotonic());
        let mut core = self.core.lock();
        let failure = match error {
            StoreError::TooLarge { .. } => Failure::TooLarge,
            error => match error.kind() {
                ErrorKind::NoSpace => Failure::NoSpace,
                ErrorKind::Unavailable => Failure::Unavailable,
                _ if poisoned => Failure::Unavailable,
                // What fails once may not fail again.
                _ if what.is_some() && core.queue.failures + 1 >= PATIENCE => Failure::Unavailable,
                _ => Failure::Other,
            },
        };
        // What is too large is not tried again, and says nothing of the others.
        if failure != Failure::TooLarge {
            let pause = FIRST_PAUSE
                .saturating_mul(1 << core.queue.failures.min(16))
                .min(MAX_PAUSE);
            core.queue.failures = core.queue.failures.saturating_add(1);
            if !core.queue.is_hopeless(failure) {
                core.queue.not_before = now.1.saturating_add(pause);
            }
        }
        let tell = core.queue.trouble.failed(failure, (what, error), now);
        drop(core);
        let label = ByReason {
            reason: Name(failure.as_str()),
        };
        self.metrics.write_failures.get_or_create(&label).inc();
        self.warn(tell, error);
        self.note_poison();
        failure
    }

    fn warn(&self, tell: Option<u64>, error: &StoreError) {
        if let Some(failures) = tell {
            let ailment = error.ailment().map_or("none", Ailment::as_str);
            tracing::warn!(%error, failures, ailment, "Could not write to disk");
        }
    }

    pub(super) fn disk_failed(&self, what: &'static str, error: &StoreError) {
        metrics::count(&self.metrics.write_failures, what);
        let now = (self.clock.now(), self.clock.monotonic());
        let tell = self.core.lock().queue.trouble.not_removed(error, now);
        if let Some(failures) = tell {
            tracing::warn!(%error, failures, "Could not remove from disk");
        }
        self.note_poison();
    }

    /// What could not be removed before is gone.
    pub(super) fn all_removed(&self) {
        if self.core.lock().queue.trouble.unstuck() {
            tracing::info!("What could not be removed from disk is gone");
        }
    }

    /// Nothing is written to disk before the next start.
    pub(super) fn is_poisoned(&self) -> bool {
        let disk = self.store.disk.as_ref();
        disk.is_some_and(|disk| disk.poisoned().is_some())
    }

    /// A disk that takes no more writes is not ready.
    fn note_poison(&self) {
        if self.is_poisoned() {
            self.latches.hold(super::DISK_FAILED);
        }
    }

    /// A write went well.
    pub(super) fn write_succeeded(&self) {
        let mut core = self.core.lock();
        core.queue.failures = 0;
        core.queue.not_before = Duration::ZERO;
        let (ill, other) = core.queue.trouble.over();
        drop(core);
        if let Some(ill) = ill {
            let (failures, since) = (ill.failures, ill.since.rfc3339());
            let ailment = ill.what.as_str();
            match ill.what.lacks_room() {
                true => tracing::info!(failures, since, ailment, "The disk has room again"),
                false => tracing::info!(failures, since, ailment, "The disk takes writes again"),
            }
        }
        if other {
            tracing::info!("The disk takes writes again");
        }
    }
}

#[cfg(test)]
mod tests;
