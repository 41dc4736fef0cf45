//! Conversations on their way back: read by threads of their own from the first moment of a start, as
//! they need nothing of the catalog. Which of their snapshots are there is asked at its end.

use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::super::Service;
use super::joined;
use crate::service::conversations::{Back, Conversations, Missing};
use crate::store::{ConversationRef, StoreError};

/// Threads that read conversations.
const READERS: usize = 4;

/// All conversations, and those of them whose branches or marks name snapshots.
#[derive(Default)]
pub(in super::super) struct Names {
    pub(super) conversations: Conversations,
    branches: Vec<ConversationRef>,
}

type Read = Result<Names, StoreError>;

/// Conversations that are being read.
pub(in super::super) struct Reading<'a> {
    thread: Option<thread::ScopedJoinHandle<'a, Read>>,
    snapshots: &'a AtomicUsize,
}

// === impl Reading ===

impl<'a> Reading<'a> {
    /// Begins. How many snapshots they name is not known yet.
    pub(in super::super) fn begin<'e>(
        service: &'e Service,
        scope: &'a thread::Scope<'a, 'e>,
        snapshots: &'e AtomicUsize,
    ) -> Self {
        Self {
            thread: Some(scope.spawn(|| read(service, snapshots))),
            snapshots,
        }
    }

    /// They name about so many snapshots.
    pub(super) fn expect(&self, snapshots: usize) {
        self.snapshots.store(snapshots, Ordering::Relaxed);
    }

    /// Waits for them.
    pub(in super::super) fn take(&mut self) -> Read {
        self.thread
            .take()
            .map_or_else(|| Ok(Names::default()), joined)
    }
}

fn read(service: &Service, snapshots: &AtomicUsize) -> Read {
    let mut names = Names::default();
    let Some(refs) = &service.store.refs else {
        return Ok(names);
    };
    let make = |mut stored: ConversationRef| {
        let turns = mem::take(&mut stored.turns);
        let back = Back::new(&stored, turns);
        let more = !stored.branches.is_empty() || !stored.marks.is_empty();
        (back, more.then_some(stored))
    };
    let threads = thread::available_parallelism().map_or(1, |count| count.get().min(READERS));
    refs.scan_by(threads, &make, &mut |made| match made {
        Ok((back, stored)) => {
            names
                .conversations
                .reserve(snapshots.swap(0, Ordering::Relaxed));
            names.conversations.take_back(back, stored.is_none());
            names.branches.extend(stored);
        }
        Err(bad) => tracing::warn!(?bad, "A conversation went to quarantine"),
    })?;
    Ok(names)
}

// === impl Service ===

impl Service {
    /// Lets everybody see the conversations. `missing`: turns whose snapshots were not there when
    /// those of the catalog were.
    pub(super) fn name_all(&self, names: Names, missing: Vec<Missing>) {
        let Names {
            conversations,
            branches,
        } = names;
        let mut core = self.core.lock();
        core.conversations = conversations;
        core.name_missing(missing);
        for conversation in branches {
            core.name_branches(&conversation);
        }
    }

    /// Conversations take their snapshots as names, where these were read without a catalog.
    pub(in super::super) fn name_read(&self, names: Names) {
        let missing = {
            let mut core = self.core.lock();
            names.conversations.name_records(&mut core.records)
        };
        self.name_all(names, missing);
    }
}
