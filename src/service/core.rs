//! What the service knows, under one short lock.
//!
//! The lock is held for lookups and bookkeeping only: never over a copy, an await or a file. What
//! is kept here beside the index: what each snapshot is called, where its save stands, and what the
//! disk thread has to do next.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::conversations::{ConversationKey, Conversations};
use super::promises::Promises;
use super::save_state::SaveState;
use super::trouble::Trouble;
use super::unsaved::Unsaved;
use crate::index::{Index, LeaseToken, Removed};
use crate::pool::Geometry;
use crate::store::TokenLog;
use crate::types::{Fingerprint, Generation, Millis, Namespace, ObjectId, SnapshotId, TierKind};
use crate::util::id_map::IdMap;

/// Deleted snapshots that are remembered: 1 MiB of ids.
const DELETED_KEPT: usize = 1 << 16;

/// A model whose states are stored: what an object of it looks like.
#[derive(Debug)]
pub struct Model {
    /// What its bytes are interchangeable with.
    pub fingerprint: Fingerprint,
    /// For people.
    pub name: String,
    /// Names, types and sizes of what is stored of one shard.
    pub geometry: Geometry,
    /// Shards of each object.
    pub shards: u32,
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
    /// The nearest snapshot that it extended when it was made.
    pub parent: Option<SnapshotId>,
    /// When it was made.
    pub created: Millis,
    /// The conversation whose request made it.
    pub conversation: Option<ConversationKey>,
    /// That request.
    pub rid: Option<Arc<str>>,
    /// Payload bytes that writing it down took.
    pub written: u64,
    /// Why the last attempt to write it failed, and [`Trouble::mark`] after that.
    pub failure: Option<(Failure, u64)>,
    /// Saves by name that wait for it to become durable.
    pub waiters: u32,
}

/// Why a snapshot is not durable although that was tried.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Failure {
    /// The disk or its budget is full.
    NoSpace,
    /// It is larger than the whole disk tier.
    TooLarge,
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
    /// Objects to write without their snapshot, so that RAM can let go of them.
    pub demotions: VecDeque<ObjectId>,
    /// The thread is writing a snapshot.
    pub writing: bool,
    /// Conversations that the thread is writing.
    pub writing_refs: usize,
    /// The service ends: nothing waits for its time any more.
    pub draining: bool,
    /// Nothing more is written before the service ends: nobody needs to wait for it.
    pub closed: bool,
    /// Snapshots that the disk refused while draining: they are not tried again.
    given_up: HashSet<SnapshotId>,
    /// Conversations were refused while draining.
    pub names_given_up: bool,
    /// The last attempt to write conversations failed.
    pub refs_failed: bool,
    /// No write before this, after a failure.
    pub not_before: Duration,
    /// Failures in a row.
    pub failures: u32,
    /// What failed.
    pub trouble: Trouble,
    /// Removals whose manifests could not be removed.
    pub stuck: VecDeque<Removal>,
    /// When those are tried again.
    pub remove_after: Duration,
    /// No look at conversations without a state before this.
    pub trim_after: Duration,
    /// But where there are so many conversations.
    pub trim_at: usize,
    /// Removals asked for, in all.
    pub asked: u64,
    /// Removals done, in all.
    pub done: u64,
}

/// Something to take off the disk: manifests first, then objects.
#[derive(Clone, Debug, Default)]
pub struct Removal {
    /// Manifests.
    pub snapshots: Vec<SnapshotId>,
    /// Objects that nothing names any longer.
    pub objects: Vec<ObjectId>,
}

/// All of it.
pub struct Core {
    /// Which prefixes are known.
    pub index: Index<TokenLog>,
    /// What snapshots are called.
    pub conversations: Conversations,
    /// One for each snapshot in the index.
    pub records: IdMap<SnapshotId, Record>,
    /// What the disk thread is to do.
    pub queue: Queue,
    /// Room in RAM that restores are promised.
    pub promises: Promises,
    /// Objects on disk that were written before, or without, a manifest that names them.
    pub unnamed: HashSet<ObjectId>,
    /// Conversations with names that a save gave and that may yet be taken back.
    pub in_doubt: HashSet<ConversationKey>,
    /// Newest states that are not written.
    pub unsaved: Unsaved,
    /// Snapshots that were deleted by name, the latest last: who waits for one learns why it went.
    deleted: VecDeque<SnapshotId>,
    /// Models of which something is, or was lately, kept.
    models: HashMap<Fingerprint, Weak<Model>>,
    generation: u64,
}

// === impl Model ===

impl Model {
    /// For people who look into the data directory.
    pub fn description(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("name".to_owned(), self.name.clone())])
    }
}

// === impl Failure ===

impl Failure {
    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoSpace => "no_space",
            Self::TooLarge => "too_large",
            Self::Unavailable => "unavailable",
            Self::Other => "io",
        }
    }
}

// === impl Queue ===

impl Queue {
    /// Lets a snapshot be written at `at`, or earlier if that was asked for before.
    pub fn push(&mut self, snapshot: SnapshotId, at: Duration) {
        if self.given_up.contains(&snapshot) {
            return;
        }
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

    /// The service ends, and the disk refused the snapshot.
    pub fn give_up(&mut self, snapshot: SnapshotId) {
        self.given_up.insert(snapshot);
    }

    /// It is not tried again.
    pub fn is_given_up(&self, snapshot: &SnapshotId) -> bool {
        self.given_up.contains(snapshot)
    }

    /// A failure of every write lets nothing wait when the service ends: each is tried once more.
    pub fn is_hopeless(&self, failure: Failure) -> bool {
        self.draining && failure != Failure::Other
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

    /// Nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.at.is_empty()
            && self.removals.is_empty()
            && self.demotions.is_empty()
            && self.done == self.asked
            && self.writing_refs == 0
            && !self.writing
    }

    /// How many wait or are being written.
    pub fn len(&self) -> usize {
        self.at.len() + usize::from(self.writing)
    }

    /// Takes manifests and objects off the disk. Returns the number that `done` then reaches.
    pub fn remove(&mut self, removal: Removal) -> u64 {
        if !removal.snapshots.is_empty() || !removal.objects.is_empty() {
            self.removals.push_back(removal);
            self.asked += 1;
        }
        self.asked
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

// === impl Core ===

impl Core {
    /// An empty one. `generation` is above every number that an earlier start gave out.
    pub fn new(index: Index<TokenLog>, generation: u64) -> Self {
        Self {
            index,
            conversations: Conversations::default(),
            records: IdMap::default(),
            queue: Queue::default(),
            promises: Promises::default(),
            unnamed: HashSet::new(),
            in_doubt: HashSet::new(),
            unsaved: Unsaved::default(),
            deleted: VecDeque::new(),
            models: HashMap::new(),
            generation,
        }
    }

    /// Remembers the model for as long as anything of it is kept.
    pub fn know(&mut self, model: &Arc<Model>) {
        let known = self.models.get(&model.fingerprint);
        if known.is_none_or(|known| known.strong_count() == 0) {
            self.models.retain(|_, model| model.strong_count() > 0);
            self.models.insert(model.fingerprint, Arc::downgrade(model));
        }
    }

    /// The model of something that is kept.
    pub fn model(&self, fingerprint: &Fingerprint) -> Option<Arc<Model>> {
        self.models.get(fingerprint)?.upgrade()
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

    /// Lets the save of a snapshot take a step, if the snapshot is still there.
    pub fn advance(&mut self, snapshot: &SnapshotId, to: SaveState) {
        if let Some(record) = self.records.get_mut(snapshot) {
            let from = std::mem::replace(&mut record.state, SaveState::Visible);
            match from.step(to) {
                Ok(state) => record.state = state,
                Err(bad) => unreachable!("the disk thread alone moves a visible save: {bad}"),
            }
        }
    }

    /// Who may share with the snapshot, if that is anything else than everybody.
    pub fn namespace_of(&self, snapshot: &SnapshotId) -> Option<Arc<Namespace>> {
        let namespace = &self.records.get(snapshot)?.namespace;
        (**namespace != Namespace::default()).then(|| Arc::clone(namespace))
    }

    /// The snapshot is on disk.
    pub fn is_durable(&self, snapshot: &SnapshotId) -> bool {
        self.records
            .get(snapshot)
            .is_some_and(|record| record.state == SaveState::Durable)
    }

    /// Bookkeeping for what went out of the index. Returns the objects and the snapshots that may
    /// be on disk.
    pub fn gone(&mut self, removed: Removed, instead: Option<(SnapshotId, u32)>) -> Removal {
        let Removed { snapshots, objects } = removed;
        for snapshot in &snapshots {
            self.queue.cancel(snapshot);
            let record = self.records.swap_remove(snapshot);
            let instead = instead.or_else(|| {
                let parent = record?.parent?;
                Some((parent, self.index.snapshot(&parent)?.boundary))
            });
            self.conversations.lost(*snapshot, instead);
        }
        Removal { snapshots, objects }
    }

    /// These go because somebody asked for it.
    pub fn note_deleted(&mut self, snapshots: &[SnapshotId]) {
        self.deleted.extend(snapshots);
        let over = self.deleted.len().saturating_sub(DELETED_KEPT);
        self.deleted.drain(..over);
    }

    /// It went lately because somebody asked for it.
    pub fn was_deleted(&self, snapshot: &SnapshotId) -> bool {
        self.deleted.contains(snapshot)
    }

    /// Ends a lease. What it alone kept of a snapshot that went meanwhile goes, too; returned.
    pub fn release(&mut self, token: LeaseToken) -> Removal {
        let snapshot = token.snapshot();
        let gone = !self.records.contains_key(&snapshot);
        let objects: Vec<ObjectId> = if gone {
            token.objects().collect()
        } else {
            Vec::new()
        };
        self.index.release(token);
        let mut removal = Removal::default();
        for id in objects {
            let info = self.index.object(&id);
            let Some(info) = info.filter(|info| info.leases == 0 && !info.needed) else {
                continue;
            };
            for tier in TierKind::ALL
                .into_iter()
                .filter(|tier| info.tiers.contains(*tier))
            {
                let _ = self.index.set_tier(&id, tier, false);
            }
            removal.objects.push(id);
        }
        removal
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
        assert_eq!(queue.len(), 0);
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

    #[test]
    fn given_up_ones_do_not_come_back() {
        let mut queue = Queue::default();
        let a = SnapshotId::new();
        assert!(!queue.is_hopeless(Failure::NoSpace));
        queue.draining = true;
        assert!(queue.is_hopeless(Failure::NoSpace) && !queue.is_hopeless(Failure::Other));
        queue.give_up(a);
        queue.push(a, s(1));
        assert!(queue.is_given_up(&a) && queue.is_idle());
    }
}
