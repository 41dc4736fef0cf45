//! Pinning a snapshot, and calling it something.

use std::time::Duration;

use super::super::Service;
use super::super::api::SnapshotRow;
use super::super::conversations::{ConversationKey, Mark};
use super::super::error::ServiceError;
use super::super::rows::{called, unknown_snapshot};
use super::super::seen::Expected;
use super::save::refused;
use crate::index::{Pin, PinKind};
use crate::types::SnapshotId;

/// Longest label in bytes.
const MAX_LABEL: usize = 1024;

/// Marks of one conversation.
const MAX_MARKS: usize = 4096;

/// Notes something of a snapshot.
#[derive(Clone, Debug)]
pub struct MarkRequest {
    /// Which.
    pub snapshot: SnapshotId,
    /// Keep it from eviction, or no longer; `None`: as it is.
    pub pinned: Option<bool>,
    /// Call it so, or nothing; `None`: as it is.
    pub label: Option<Option<String>>,
    /// How long to wait until that is on disk.
    pub timeout: Duration,
}

impl Service {
    /// Pins or labels a snapshot. A pin keeps it from eviction until it is taken away, and has it written
    /// to disk at once; what is on disk keeps its mark over a restart.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`; `Busy` if the deadline passes, `NoSpace` and `Unavailable` if the disk
    /// does not take it: it is in force all the same, until a restart.
    pub async fn mark(&self, request: MarkRequest) -> Result<SnapshotRow, ServiceError> {
        self.mark_seen(request, &Expected::Anything).await
    }

    /// The same, if the snapshot is still as it was seen.
    ///
    /// # Errors
    /// Those of [`Service::mark`], and `Changed`.
    pub async fn mark_seen(
        &self,
        request: MarkRequest,
        expected: &Expected,
    ) -> Result<SnapshotRow, ServiceError> {
        let MarkRequest {
            snapshot: id,
            pinned,
            label,
            timeout,
        } = request;
        if let Some(Some(label)) = &label
            && (label.is_empty() || label.len() > MAX_LABEL)
        {
            let text = format!("`label` is not a text of 1 to {MAX_LABEL} bytes");
            return Err(ServiceError::Invalid(text));
        }
        let deadline = tokio::time::Instant::now() + timeout;
        let (key, mark, on_disk) = {
            let mut core = self.core.lock();
            let Some(record) = core.records.get(&id) else {
                return Err(unknown_snapshot(&id));
            };
            expected.check(|| {
                let row = self.row(&core, id, &called(&core, id));
                row.ok_or_else(|| unknown_snapshot(&id))
            })?;
            let tenant = record.namespace.tenant.as_deref();
            let nobodys = ConversationKey::new(tenant, &id.to_string());
            let own = called(&core, id).key.unwrap_or(nobodys);
            let before = core.conversations.mark_of(id).cloned().unwrap_or_default();
            let new = Mark {
                pinned: pinned.unwrap_or(before.pinned),
                label: label.map_or_else(|| before.label.clone(), |it| it.map(String::into)),
            };
            let most = core.conversations.get(&own).map_or(0, |it| it.marks.len());
            if most >= MAX_MARKS && before.is_empty() {
                let text = format!("more than {MAX_MARKS} marks in one conversation");
                return Err(ServiceError::Invalid(text));
            }
            let mark = core.queue.trouble.mark();
            let (pin, unpin) = (new.pinned && !before.pinned, before.pinned && !new.pinned);
            let (_, key) = core.conversations.set_mark(&own, id, new);
            if unpin {
                core.index.unpin(&id, PinKind::Named);
            }
            if pin {
                core.index.pin(&id, Pin::Named);
                if !core.is_durable(&id) && self.store.disk.is_some() {
                    core.queue.push(id, Duration::ZERO);
                }
            }
            (key, mark, core.is_durable(&id))
        };
        self.wake.notify_one();
        if on_disk {
            self.wait(deadline, |core| {
                if !core.conversations.is_dirty(&key) && core.queue.writing_refs == 0 {
                    return Ok(true);
                }
                let trouble = &core.queue.trouble;
                refused(trouble, trouble.since(mark), "")?;
                Ok(false)
            })
            .await?;
        }
        let core = self.core.lock();
        let name = called(&core, id);
        let row = self.row(&core, id, &name);
        row.ok_or_else(|| unknown_snapshot(&id))
    }
}
