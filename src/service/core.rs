//! What the service knows, under one short lock.
//!
//! The lock is held for lookups and bookkeeping only: never over a copy, an await or a file. What is kept
//! here beside the index: what each snapshot is called, where its save stands, and what the disk
//! thread has to do next.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::conversations::{ConversationKey, Conversations};
use super::save_state::SaveState;
use crate::index::{Index, VecLog};
use crate::store::{ObjectShape, TokenLog};
use crate::types::{
    Fingerprint, Generation, Namespace, ObjectId, SnapshotId, TokenId, Tokens,
};

/// A model whose states are stored: what an object of it looks like.
#[derive(Debug)]
pub struct Model {
    /// What its bytes are interchangeable with.
    pub fingerprint: Fingerprint,
    /// For people.
    pub name: String,
    /// Names, types and sizes of what is stored.
    pub shape: ObjectShape,
}

/// What is known of a snapshot beside the index.
#[derive(Debug)]
pub struct Record {
    /// The model.
    pub model: Arc<Model>,
    /// Who may share it.
    pub namespace: Arc<Namespace>,
    /// Where its save stands: visible or further.
    pub state: SaveState,
    /// The save that made it.
    pub generation: Generation,
    /// The conversation whose request made it.
    pub conversation: Option<ConversationKey>,
    /// That request.
    pub rid: Option<Arc<str>>,
    /// To be deleted as soon as the disk thread is done with it.
    pub doomed: bool,
    /// Why the last attempt to write it failed.
    pub failure: Option<Failure>,
}

/// Why a snapshot is not durable although that was tried.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The disk or its budget is full.
    NoSpace,
    /// The disk takes no more writes.
    Unavailable,
    /// Something else; it is tried again.
    Other,
}

/// What the disk thread is to do.
#[derive(Debug, Default)]
pub struct Queue {
    /// Snapshots to write, by time due.
    due: BTreeSet<(Duration, SnapshotId)>,
    at: HashMap<SnapshotId, Duration>,
    /// Removals, which come first.
    pub removals: VecDeque<Removal>,
    /// Removals handed out, not done yet.
    pub removing: usize,
    /// The service ends: nothing waits for its time any more.
    pub draining: bool,
    /// The thread is to end.
    pub stop: bool,
    /// No write before this, after a failure.
    pub not_before: Duration,
    /// Failures in a row.
    pub failures: u32,
}

/// Something to take off the disk: manifests first, then objects.
#[derive(Debug, Default)]
pub struct Removal {
    /// Manifests.
    pub snapshots: Vec<(Fingerprint, SnapshotId)>,
    /// Objects that nothing names any longer.
    pub objects: Vec<ObjectId>,
}

/// The token log: a file, or memory when there is no disk.
#[derive(Debug)]
pub enum Log {
    /// In the data directory.
    File(TokenLog),
    /// Without a disk.
    Memory(VecLog),
}

/// All of it.
pub struct Core {
    /// Which prefixes are known.
    pub index: Index<Log>,
    /// What snapshots are called.
    pub conversations: Conversations,
    /// One for each snapshot in the index.
    pub records: HashMap<SnapshotId, Record>,
    /// What the disk thread is to do.
    pub queue: Queue,
    generation: u64,
}

// === impl Failure ===

impl Failure {
    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoSpace => "no_space",
            Self::Unavailable => "unavailable",
            Self::Other => "io",
        }
    }
}

// === impl Queue ===

impl Queue {
    /// Lets a snapshot be written at `at`, or earlier if that was asked for before.
    pub fn push(&mut self, snapshot: SnapshotId, at: Duration) {
        match self.at.get(&snapshot) {
            Some(before) if *before <= at => return,
            Some(before) => {
                self.due.remove(&(*before, snapshot));
            }
            None => {}
        }
        self.at.insert(snapshot, at);
        self.due.insert((at, snapshot));
    }

    /// The snapshot is not to be written.
    pub fn cancel(&mut self, snapshot: &SnapshotId) -> bool {
        match self.at.remove(snapshot) {
            Some(at) => self.due.remove(&(at, *snapshot)),
            None => false,
        }
    }

    /// It waits.
    pub fn contains(&self, snapshot: &SnapshotId) -> bool {
        self.at.contains_key(snapshot)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.at.len()
    }

    /// None waits.
    pub fn is_empty(&self) -> bool {
        self.at.is_empty()
    }

    /// When the first is due.
    pub fn next_at(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| (*at).max(self.not_before))
    }

    /// Takes the first that is due.
    pub fn pop(&mut self, now: Duration) -> Option<SnapshotId> {
        if now < self.not_before {
            return None;
        }
        let (at, snapshot) = *self.due.first()?;
        if at > now && !self.draining {
            return None;
        }
        self.due.remove(&(at, snapshot));
        self.at.remove(&snapshot);
        Some(snapshot)
    }
}

// === impl Log ===

impl Tokens for Log {
    fn append(&mut self, tokens: &[TokenId]) -> io::Result<u64> {
        match self {
            Self::File(log) => log.append(tokens),
            Self::Memory(log) => log.append(tokens),
        }
    }

    fn get(&self, offset: u64, len: u32, f: &mut dyn FnMut(&[TokenId])) {
        match self {
            Self::File(log) => log.get(offset, len, f),
            Self::Memory(log) => log.get(offset, len, f),
        }
    }

    fn release(&mut self, offset: u64, len: u32) {
        match self {
            Self::File(log) => log.release(offset, len),
            Self::Memory(log) => log.release(offset, len),
        }
    }
}

// === impl Core ===

impl Core {
    /// An empty one. `generation` is above every number that an earlier start gave out.
    pub fn new(index: Index<Log>, generation: u64) -> Self {
        Self {
            index,
            conversations: Conversations::default(),
            records: HashMap::new(),
            queue: Queue::default(),
            generation,
        }
    }

    /// A number that no other save has.
    pub fn next_generation(&mut self) -> Generation {
        self.generation += 1;
        Generation(self.generation)
    }

    /// The nearest ancestor that fits, and its boundary.
    pub fn ancestor(
        &self,
        snapshot: &SnapshotId,
        fits: impl Fn(&Self, &SnapshotId) -> bool,
    ) -> Option<(SnapshotId, u32)> {
        let mut next = self.index.snapshot(snapshot)?.parent;
        while let Some(id) = next {
            let info = self.index.snapshot(&id)?;
            if fits(self, &id) {
                return Some((id, info.boundary));
            }
            next = info.parent;
        }
        None
    }

    /// The snapshot is on disk.
    pub fn is_durable(&self, snapshot: &SnapshotId) -> bool {
        self.records.get(snapshot).is_some_and(|record| record.state == SaveState::Durable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn oldest_first_and_only_when_due() {
        let mut queue = Queue::default();
        let [a, b, c] = std::array::from_fn(|_| SnapshotId::new());
        queue.push(b, s(20));
        queue.push(a, s(10));
        queue.push(c, s(30));
        assert_eq!(queue.pop(s(5)), None);
        assert_eq!(queue.next_at(), Some(s(10)));
        // Asked for earlier, and never later again.
        queue.push(c, s(5));
        queue.push(c, s(50));
        assert_eq!(queue.pop(s(10)), Some(c));
        assert_eq!(queue.pop(s(10)), Some(a));
        assert_eq!(queue.pop(s(10)), None);
        queue.not_before = s(100);
        assert_eq!((queue.pop(s(60)), queue.next_at()), (None, Some(s(100))));
        queue.not_before = s(0);
        queue.draining = true;
        assert_eq!(queue.pop(s(11)), Some(b));
        assert!(queue.is_empty());
    }

    #[test]
    fn cancelled_ones_never_come() {
        let mut queue = Queue::default();
        let a = SnapshotId::new();
        queue.push(a, s(1));
        assert!(queue.cancel(&a));
        assert!(!queue.cancel(&a));
        assert_eq!(queue.pop(s(9)), None);
        assert_eq!(queue.next_at(), None);
    }
}
