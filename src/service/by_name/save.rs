//! Keeping a state: waiting for what is under way, naming it, making it durable.

use std::time::Duration;

use super::super::Service;
use super::super::api::{SaveReply, SaveRequest, Selector};
use super::super::conversations::{ConversationKey, Found, Need, NoRoom};
use super::super::core::{Core, Failure};
use super::super::error::ServiceError;
use super::super::rows::{Called, called, unknown_snapshot};
use super::super::save_state::SaveState;
use super::super::trouble::Trouble;
use super::naming::{Naming, check_branches};
use super::{check_names, gone};
use crate::index::{Pin, PinKind, Retain};
use crate::store::Ailment;
use crate::types::SnapshotId;

/// How long a worker may take to offer what it is asked for.
const OFFERED_WITHIN: Duration = Duration::from_secs(1);

impl Service {
    /// Keeps the state of a conversation or request, durably if asked. It gets its names once it is
    /// durable; a refusal leaves it with those that it had.
    ///
    /// # Errors
    /// `NotFound`, `Deleted`, `NoState`, `Invalid`; `Busy` if the deadline passes; `NoSpace`, `TooLarge` and
    /// `Unavailable` if the disk does not take it; `Quota` if its namespace may not.
    pub async fn save(&self, request: SaveRequest) -> Result<SaveReply, ServiceError> {
        let SaveRequest {
            select,
            durable,
            timeout,
        } = request;
        check_names(&select)?;
        if durable && self.store.disk.is_none() {
            return Err(ServiceError::Unavailable(
                "there is no disk tier".to_owned(),
            ));
        }
        let deadline = tokio::time::Instant::now() + timeout;
        let found = self.settled(&select, deadline).await?;
        let (id, was_durable) = {
            let core = self.core.lock();
            let id = found.snapshot.ok_or_else(|| no_state(&found))?;
            check_branches(&core, &select, &found)?;
            (id, core.is_durable(&id))
        };
        if !was_durable {
            self.quota_for(id)?;
        }
        let called = if durable {
            let promise = self.promise(id)?;
            self.wait_durable(&promise, deadline).await?;
            let naming = self.name(&select, &found, id, deadline).await?;
            self.wait_named(&naming, deadline).await?;
            naming.keep()
        } else {
            let naming = self.name(&select, &found, id, deadline).await?;
            naming.keep()
        };
        let core = self.core.lock();
        let row = self
            .row(&core, id, &called)
            .ok_or_else(|| gone(&core, id))?;
        let written = core.records.get(&id).map_or(0, |record| record.written);
        let written_bytes = if was_durable { 0 } else { written };
        Ok(SaveReply { row, written_bytes })
    }

    /// What the selector names, once no save under way can change it any more.
    async fn settled(
        &self,
        select: &Selector,
        deadline: tokio::time::Instant,
    ) -> Result<Found, ServiceError> {
        let mut asked = None;
        loop {
            let changed = self.changed.notified();
            let found = {
                let core = self.core.lock();
                still_open(&core)?;
                match select.snapshot_id {
                    Some(id) if core.records.contains_key(&id) => found_by_id(&core, select, id),
                    Some(id) => return Err(unknown_snapshot(&id)),
                    None => core.conversations.find(select, Need::Source)?,
                }
            };
            let last = tokio::time::Instant::now() >= deadline;
            match found.snapshot {
                Some(_) if found.saves == 0 || last => return Ok(found),
                // It may be on the device: once, the worker is asked to offer it.
                None if found.saves == 0 && asked.is_none() && self.ask_again(&found.key) => {
                    asked = Some(tokio::time::Instant::now() + OFFERED_WITHIN);
                }
                None if found.saves == 0
                    && !last
                    && asked.is_some_and(|until| tokio::time::Instant::now() < until) => {}
                None if found.saves == 0 => return Err(no_state(&found)),
                None if last => {
                    return Err(ServiceError::Busy(
                        "its state is still being saved".to_owned(),
                    ));
                }
                _ => {}
            }
            // A look now and then costs little beside a wake-up that got lost.
            let look = tokio::time::Instant::now() + Duration::from_millis(100);
            let _ = tokio::time::timeout_at(deadline.min(look), changed).await;
        }
    }

    /// Keeps the snapshot from eviction while a save waits for it, and has it written at once.
    fn promise(&self, id: SnapshotId) -> Result<Promise<'_>, ServiceError> {
        let mut core = self.core.lock();
        let mark = core.queue.trouble.mark();
        let Some(record) = core.records.get_mut(&id) else {
            return Err(gone(&core, id));
        };
        record.waiters += 1;
        core.index.pin(&id, Pin::Named);
        if !core.is_durable(&id) {
            core.index.set_retain(&id, Retain::Promised);
            core.queue.push(id, Duration::ZERO);
            core.queue.not_before = Duration::ZERO;
        }
        drop(core);
        self.wake.notify_one();
        Ok(Promise {
            service: self,
            id,
            mark,
        })
    }

    /// Waits until the snapshot is on disk, or the disk refuses it, or everything.
    async fn wait_durable(
        &self,
        promise: &Promise<'_>,
        deadline: tokio::time::Instant,
    ) -> Result<(), ServiceError> {
        let Promise { id, mark, .. } = *promise;
        self.wait(deadline, |core| {
            let record = core.records.get(&id).ok_or_else(|| gone(core, id))?;
            if record.state == SaveState::Durable {
                return Ok(true);
            }
            let own = record.failure.filter(|(_, at)| *at > mark);
            let own = own.map(|(failure, _)| failure);
            let trouble = &core.queue.trouble;
            let failure = own.or(trouble.since(mark));
            refused(trouble, failure, &record_size(core, id))?;
            if core.queue.is_given_up(&id) {
                return Err(full(trouble));
            }
            Ok(false)
        })
        .await
    }

    /// Waits until what names the snapshot is on disk, too.
    async fn wait_named(
        &self,
        naming: &Naming<'_>,
        deadline: tokio::time::Instant,
    ) -> Result<(), ServiceError> {
        self.wake.notify_one();
        self.wait(deadline, |core| {
            if !core.conversations.is_dirty(naming.key()) && core.queue.writing_refs == 0 {
                return Ok(true);
            }
            let trouble = &core.queue.trouble;
            refused(trouble, trouble.since(naming.mark()), "")?;
            Ok(false)
        })
        .await
    }

    /// Looks again at every change until it is done.
    pub(super) async fn wait(
        &self,
        deadline: tokio::time::Instant,
        done: impl Fn(&Core) -> Result<bool, ServiceError>,
    ) -> Result<(), ServiceError> {
        loop {
            let changed = self.changed.notified();
            {
                let core = self.core.lock();
                if done(&core)? {
                    return Ok(());
                }
                still_open(&core)?;
            }
            if tokio::time::Instant::now() >= deadline {
                return Err(ServiceError::Busy("it is not durable yet".to_owned()));
            }
            let look = tokio::time::Instant::now() + Duration::from_millis(100);
            let _ = tokio::time::timeout_at(deadline.min(look), changed).await;
        }
    }
}

/// A save that waits for a snapshot to become durable.
struct Promise<'a> {
    service: &'a Service,
    id: SnapshotId,
    /// What failed before does not concern it.
    mark: u64,
}

// === impl Promise ===

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        let mut core = self.service.core.lock();
        core.index.unpin(&self.id, PinKind::Named);
        let last = core.records.get_mut(&self.id).is_some_and(|record| {
            record.waiters -= 1;
            record.waiters == 0
        });
        let info = core.index.snapshot(&self.id);
        let promised = info.is_some_and(|info| info.retain == Retain::Promised && !info.durable);
        if last && promised {
            // Nobody was promised anything: it goes to disk when there is room, as any other.
            core.index.set_retain(&self.id, Retain::Ordinary);
        }
    }
}

/// The service ends and writes nothing more.
pub(super) fn still_open(core: &Core) -> Result<(), ServiceError> {
    match core.queue.closed {
        false => Ok(()),
        true => Err(ServiceError::Unavailable(
            "the daemon stops before it is done".to_owned(),
        )),
    }
}

fn full(trouble: &Trouble) -> ServiceError {
    let what = trouble.full().map_or(Ailment::Full, |full| full.what);
    ServiceError::NoSpace(what.tell().to_owned())
}

/// What a failed write means to who waits for it.
pub(super) fn refused(
    trouble: &Trouble,
    failure: Option<Failure>,
    size: &str,
) -> Result<(), ServiceError> {
    match failure {
        Some(Failure::NoSpace) => Err(full(trouble)),
        Some(Failure::TooLarge) => Err(ServiceError::TooLarge(format!(
            "{size} on disk are more than the whole tier may hold (store.disk.budget)"
        ))),
        Some(Failure::Unavailable) => {
            let ill = trouble
                .ill()
                .map(|ill| format!("{} ({})", ill.what.tell(), ill.error));
            let text = ill.unwrap_or_else(|| Ailment::Failing.tell().to_owned());
            Err(ServiceError::Unavailable(text))
        }
        Some(Failure::Other) | None => Ok(()),
    }
}

fn record_size(core: &Core, id: SnapshotId) -> String {
    let info = core.index.snapshot(&id);
    let bytes = info.map_or(0, |info| info.state_bytes.saturating_add(info.kv_bytes));
    format!("its {bytes} bytes")
}

pub(super) fn no_state(found: &Found) -> ServiceError {
    let name = found.key.name.to_string();
    match found.no_room {
        None => ServiceError::NoState { name },
        Some(NoRoom::Now) => ServiceError::NoSpace(format!(
            "RAM had no room for the state of `{name}` when the server offered it (store.ram)"
        )),
        Some(NoRoom::Ever) => ServiceError::TooLarge(format!(
            "the state of `{name}` is larger than RAM can ever hold (store.ram)"
        )),
        Some(NoRoom::Quota { used, quota, need }) => ServiceError::Quota {
            namespace: format!("the namespace of `{name}`"),
            used,
            quota,
            need,
        },
    }
}

fn found_by_id(core: &Core, select: &Selector, id: SnapshotId) -> Found {
    let Called {
        key,
        turn,
        branch: _,
    } = called(core, id);
    let record = core.records.get(&id);
    let rid = record.and_then(|record| record.rid.clone());
    let named = select
        .conversation_id
        .as_deref()
        .map(|name| ConversationKey::new(select.tenant.as_deref(), name));
    let id_text = id.to_string();
    let key = key.or(named).unwrap_or_else(|| {
        ConversationKey::new(select.tenant.as_deref(), rid.as_deref().unwrap_or(&id_text))
    });
    let conversation = core.conversations.get(&key);
    let total = turn.zip(conversation).and_then(|(turn, it)| it.turn(turn));
    Found {
        total_tokens: total.map(|turn| turn.total_tokens),
        key,
        turn,
        branch: None,
        rid,
        snapshot: Some(id),
        saves: 0,
        no_room: None,
    }
}
