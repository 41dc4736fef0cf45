//! What happened, numbered, for those who watch.
//!
//! The last so many events are kept. Who reads says after which one to go on; who was away for too
//! long learns how many are gone. Numbers begin anew with each start of the daemon, which is why an
//! event is named by the start and its number.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::Service;
use super::api::Event;
use super::error::ServiceError;
use crate::types::{BootId, Millis};

/// Events that are kept.
const KEPT: usize = 8192;

/// Events that a reader gets at a time.
const AT_ONCE: usize = 256;

/// Readers at a time.
const READERS: usize = 64;

/// An event and its number.
#[derive(Clone, Debug)]
pub struct Numbered {
    /// Counted from 1 in each start of the daemon.
    pub number: u64,
    /// When it happened.
    pub at: Millis,
    /// What happened.
    pub event: Event,
}

/// The last events.
#[derive(Debug)]
pub struct EventLog {
    kept: Mutex<VecDeque<Numbered>>,
    /// The number of the last one; told when there is another, or when no more come.
    last: watch::Sender<u64>,
    readers: Arc<Semaphore>,
}

/// Names an event over restarts: `<start>-<number>`.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct EventId {
    /// The start of the daemon.
    pub boot: BootId,
    /// Its number there.
    pub number: u64,
}

/// Reads events as they come.
#[derive(Debug)]
pub struct EventReader {
    service: Arc<Service>,
    /// The last one that was read.
    after: u64,
    /// Events of an earlier start may have been missed: nobody knows how many.
    restarted: bool,
    changed: watch::Receiver<u64>,
    _place: Option<OwnedSemaphorePermit>,
}

/// What a reader gets.
#[derive(Debug, Default)]
pub struct Batch {
    /// Events before these that are gone; `None`: the daemon was started anew since, and it is not
    /// known how many.
    pub missed: Option<u64>,
    /// The next ones.
    pub events: Vec<Numbered>,
}

// === impl EventLog ===

impl Default for EventLog {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            last: watch::Sender::new(0),
            readers: Arc::new(Semaphore::new(READERS)),
        }
    }
}

impl EventLog {
    /// Notes an event.
    pub fn push(&self, event: Event, at: Millis) {
        let mut kept = self.kept.lock();
        let number = kept.back().map_or(0, |last| last.number) + 1;
        if kept.len() >= KEPT {
            kept.pop_front();
        }
        kept.push_back(Numbered { number, at, event });
        drop(kept);
        self.last.send_replace(number);
    }

    /// Wakes every reader.
    pub fn wake(&self) {
        self.last.send_modify(|_| ());
    }

    /// Some events after number `after`, and how many between are gone.
    fn since(&self, after: u64) -> (u64, Vec<Numbered>) {
        let kept = self.kept.lock();
        let Some(first) = kept.front().map(|first| first.number) else {
            return (0, Vec::new());
        };
        let missed = first.saturating_sub(after.saturating_add(1));
        let skip = after.saturating_add(1).saturating_sub(first);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let events = kept.iter().skip(skip).take(AT_ONCE).cloned().collect();
        (missed, events)
    }
}

// === impl EventId ===

impl std::fmt::Display for EventId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.boot.0.simple(), self.number)
    }
}

impl std::str::FromStr for EventId {
    type Err = ServiceError;

    fn from_str(text: &str) -> Result<Self, ServiceError> {
        let parse = || {
            let (boot, number) = text.split_once('-')?;
            let boot = BootId(uuid::Uuid::try_parse(boot).ok()?);
            let digits = number.bytes().all(|c| c.is_ascii_digit());
            let number = number.parse().ok().filter(|_| digits)?;
            Some(Self { boot, number })
        };
        parse().ok_or_else(|| ServiceError::Invalid("that is the id of no event".to_owned()))
    }
}

// === impl Event ===

impl Event {
    /// Its name for those who watch.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Attached { .. } => "attached",
            Self::Detached { .. } => "detached",
            Self::Saved { .. } => "saved",
            Self::Durable { .. } => "durable",
            Self::Restored { .. } => "restored",
            Self::Turn { .. } => "turn_finished",
            Self::Budget { .. } => "budget_changed",
            Self::Removed {
                reason: "deleted", ..
            } => "deleted",
            Self::Removed { .. } => "evicted",
        }
    }

    /// Its fields, without a name.
    pub fn fields(&self) -> Value {
        let mut fields = serde_json::to_value(self).unwrap_or_default();
        if let Value::Object(fields) = &mut fields {
            fields.remove("event");
        }
        fields
    }

    /// The names there are.
    pub const NAMES: [&'static str; 9] = [
        "attached",
        "detached",
        "saved",
        "durable",
        "restored",
        "turn_finished",
        "budget_changed",
        "deleted",
        "evicted",
    ];
}

// === impl Service ===

impl Service {
    /// Reads what happens from now on, for a part of the daemon: it takes no reader's place.
    pub fn follow(self: &Arc<Self>) -> EventReader {
        let changed = self.event_log.last.subscribe();
        let after = *changed.borrow();
        EventReader {
            service: Arc::clone(self),
            after,
            restarted: false,
            changed,
            _place: None,
        }
    }

    /// Reads what happens from now on, or after the event of an id.
    ///
    /// # Errors
    /// `Busy` if too many do.
    pub fn watch(self: &Arc<Self>, after: Option<EventId>) -> Result<EventReader, ServiceError> {
        let place = Arc::clone(&self.event_log.readers).try_acquire_owned();
        let place =
            place.map_err(|_| ServiceError::Busy(format!("{READERS} read the events already")))?;
        let changed = self.event_log.last.subscribe();
        let last = *changed.borrow();
        let restarted = after.is_some_and(|after| after.boot != self.boot());
        // Nobody can have read a number of the future: what was missed is not known, either.
        let future = after.is_some_and(|after| !restarted && after.number > last);
        let after = match after {
            None => last,
            Some(_) if restarted => 0,
            Some(after) => after.number.min(last),
        };
        let restarted = restarted || future;
        Ok(EventReader {
            service: Arc::clone(self),
            after,
            restarted,
            changed,
            _place: Some(place),
        })
    }
}

// === impl EventReader ===

impl EventReader {
    /// The next events, as soon as there are some; `None`: the daemon ends.
    pub async fn next(&mut self) -> Option<Batch> {
        loop {
            self.changed.borrow_and_update();
            let (missed, events) = self.service.event_log.since(self.after);
            if let Some(last) = events.last() {
                self.after = last.number;
                let missed = Some(missed).filter(|_| !std::mem::take(&mut self.restarted));
                return Some(Batch { missed, events });
            }
            if std::mem::take(&mut self.restarted) {
                return Some(Batch::default());
            }
            if self.service.stopping() || self.changed.changed().await.is_err() {
                return None;
            }
        }
    }

    /// The id of an event.
    pub fn id(&self, event: &Numbered) -> EventId {
        EventId {
            boot: self.service.boot(),
            number: event.number,
        }
    }
}

/// An event in a reply.
#[derive(Debug, Serialize)]
pub struct EventRow {
    /// When it happened, in unix seconds.
    pub at: f64,
    /// Its fields.
    #[serde(flatten)]
    pub fields: Value,
}

impl From<&Numbered> for EventRow {
    fn from(event: &Numbered) -> Self {
        Self {
            at: super::workers::seconds(event.at),
            fields: event.event.fields(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::SnapshotId;

    fn event() -> Event {
        Event::Durable {
            snapshot_id: SnapshotId::new(),
        }
    }

    fn numbers(events: &[Numbered]) -> Vec<u64> {
        events.iter().map(|it| it.number).collect()
    }

    #[test]
    fn who_was_away_for_too_long_learns_how_many_are_gone() {
        let log = EventLog::default();
        assert_eq!(log.since(0).1.len(), 0);
        for _ in 0..3 {
            log.push(event(), Millis(1));
        }
        let (missed, events) = log.since(1);
        assert_eq!((missed, numbers(&events)), (0, vec![2, 3]));
        assert_eq!(log.since(3).1.len(), 0);
        assert_eq!(log.since(u64::MAX).1.len(), 0);
        for _ in 0..KEPT {
            log.push(event(), Millis(1));
        }
        let (missed, events) = log.since(1);
        assert_eq!((missed, events[0].number, events.len()), (2, 4, AT_ONCE));
        assert_eq!(log.kept.lock().len(), KEPT);
    }

    #[test]
    fn ids_are_of_one_start() {
        let id = EventId {
            boot: BootId::random(),
            number: 42,
        };
        assert_eq!(id.to_string().parse::<EventId>().unwrap(), id);
        for bad in [
            "",
            "-",
            "1",
            "x-1",
            &format!("{}-", id.boot.0),
            &format!("{id}x"),
        ] {
            assert!(bad.parse::<EventId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn every_event_has_a_name_that_is_listed() {
        let removed = |reason| Event::Removed {
            snapshot_id: SnapshotId::new(),
            reason,
        };
        assert_eq!(removed("deleted").name(), "deleted");
        for reason in ["evicted", "quota", "expired", "lost"] {
            assert_eq!(removed(reason).name(), "evicted");
            assert_eq!(removed(reason).fields()["reason"], reason);
        }
        assert!(Event::NAMES.contains(&event().name()));
        assert_eq!(event().fields().get("event"), None);
    }
}
