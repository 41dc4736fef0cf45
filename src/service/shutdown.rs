//! The end of the service.
//!
//! # Order
//! No new workers, and those attached are told why; copies under way end; what is pending is written
//! down, each once more at most if the disk refuses it; who waits for it is answered. Then readers
//! stop. All of it within the configured time.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::Service;
use super::core::Core;
use super::save_state::SaveState;
use crate::index::Retain;
use crate::proto::channel::layout::CloseReason;
use crate::types::SnapshotId;

/// How often is looked whether all is written: a wake-up can get lost.
const LOOK: Duration = Duration::from_millis(50);

// === impl Service ===

impl Service {
    /// No workers any more: those attached are told that the daemon ends.
    pub fn begin_shutdown(&self) {
        self.stopping.store(true, Ordering::Release);
        self.event_log.wake();
        self.end_by();
        for worker in self.workers.all() {
            self.send_away(&worker, CloseReason::Shutdown);
        }
    }

    /// Ends sessions and writes down what is pending, within the configured time. When it returns,
    /// nothing waits for the disk any longer: requests under way have their answers.
    pub async fn drain(&self) {
        self.begin_shutdown();
        let deadline = self.end_by();
        self.tasks.close();
        if tokio::time::timeout_at(deadline, self.tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!("Some sessions did not end in time");
        }
        {
            let mut core = self.core.lock();
            // RAM ends: what was to be written when it leaves RAM is written now.
            let left: Vec<_> = match self.store.disk {
                Some(_) => core.unwritten().copied().collect(),
                None => Vec::new(),
            };
            for id in left {
                core.queue.push(id, Duration::ZERO);
            }
            core.queue.draining = true;
            // What a full disk refused is tried now, and not again.
            core.queue.not_before = Duration::ZERO;
        }
        loop {
            self.wake.notify_one();
            let changed = self.changed.notified();
            if self.core.lock().is_drained() || Instant::now() >= deadline {
                break;
            }
            let _ = tokio::time::timeout_at(deadline.min(Instant::now() + LOOK), changed).await;
        }
        self.core.lock().queue.closed = true;
        self.changed.notify_waiters();
    }

    /// [`Self::drain`], and the end of all reading; says what is not on disk.
    pub async fn shutdown(&self) {
        self.drain().await;
        self.promoter.stop();
        self.wake.notify_one();
        if self.store.disk.is_none() {
            return;
        }
        let core = self.core.lock();
        let (snapshots, conversations) = core.not_durable();
        if self.is_loaded() {
            self.store.close_catalog(core.index.log());
        }
        if snapshots == 0 && conversations == 0 {
            return;
        }
        let ill = core.queue.trouble.ill();
        let reason = ill.map_or("not written in time, or not writable", |ill| &ill.error);
        tracing::warn!(
            snapshots,
            conversations,
            full = core.queue.trouble.full().is_some(),
            reason,
            "Stopping with {snapshots} snapshots that are not durable"
        );
    }

    fn end_by(&self) -> Instant {
        *self
            .end_by
            .get_or_init(|| Instant::now() + self.config.drain_timeout)
    }
}

// === impl Core ===

impl Core {
    /// All is written that the disk takes.
    fn is_drained(&self) -> bool {
        let named = !self.conversations.any_dirty() || self.queue.names_given_up;
        self.queue.is_idle() && named
    }

    /// How many snapshots are in RAM alone, beside those that are never to be written, and how many
    /// conversations changed since they were written.
    pub(super) fn not_durable(&self) -> (usize, usize) {
        (self.unwritten().count(), self.conversations.dirty())
    }

    /// Snapshots in RAM alone, beside those that are never to be written.
    fn unwritten(&self) -> impl Iterator<Item = &SnapshotId> {
        // Of most the record says enough, and the index would walk up the whole conversation.
        let waiting = self
            .records
            .iter()
            .filter(|(_, record)| record.state != SaveState::Durable);
        let lost = waiting.filter(|(id, _)| {
            let info = self.index.snapshot(id);
            info.is_some_and(|info| info.retain != Retain::Transient)
        });
        lost.map(|(id, _)| id)
    }
}
