//! What people and programs ask for by name: keep a state, bring it into RAM, delete it.
//!
//! # Errors
//! Never a success that did nothing: a save that cannot become durable in time says so, a restore answers
//! only when all is in RAM, a deletion when nothing is left.

use std::time::Duration;

use super::Service;
use super::api::{
    DeleteReply, DeleteRequest, Event, RestoreReply, RestoreRequest, SaveReply, SaveRequest,
    Selector,
};
use super::conversations::{ConversationKey, Found, MAX_BRANCHES, Need, Turn};
use super::core::{Core, Failure, Removal};
use super::error::ServiceError;
use super::promote::PromoteError;
use super::rows::{Called, called, existing, unknown_snapshot};
use super::save_state::SaveState;
use super::workers::seconds;
use crate::index::{Pin, PinKind, Retain};
use crate::store::Tier as _;
use crate::types::{ObjectId, SnapshotId, TierKind};

/// The longest that a deletion waits for the disk.
const DELETE_WITHIN: Duration = Duration::from_secs(30);

/// Longest name in bytes.
const MAX_NAME: usize = 4096;

// === impl Service: save ===

impl Service {
    /// Keeps the state of a conversation or request, durably if asked.
    ///
    /// # Errors
    /// `NotFound`, `NoState`, `Invalid`; `Busy` if the deadline passes; `NoSpace` and `Unavailable`
    /// if the disk does not take it.
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
        let (id, called, was_durable) = self.keep(&select, &found)?;
        if durable {
            self.wait_durable(id, called.key.as_ref(), deadline).await?;
        }
        let core = self.core.lock();
        let row = self.row(&core, id, &called).ok_or_else(|| gone(id))?;
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
        loop {
            let changed = self.changed.notified();
            let found = {
                let core = self.core.lock();
                match select.snapshot_id {
                    Some(id) if core.records.contains_key(&id) => found_by_id(&core, select, id),
                    Some(id) => return Err(unknown_snapshot(&id)),
                    None => core.conversations.find(select, Need::Source)?,
                }
            };
            let last = tokio::time::Instant::now() >= deadline;
            match found.snapshot {
                Some(_) if found.saves == 0 || last => return Ok(found),
                None if found.saves == 0 => {
                    return Err(ServiceError::NoState {
                        name: found.key.name.to_string(),
                    });
                }
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

    /// Gives the snapshot the names asked for, and keeps its last copy.
    fn keep(
        &self,
        select: &Selector,
        found: &Found,
    ) -> Result<(SnapshotId, Called, bool), ServiceError> {
        let now = self.clock.now();
        let mut core = self.core.lock();
        let no_state = || ServiceError::NoState {
            name: found.key.name.to_string(),
        };
        let id = found.snapshot.ok_or_else(no_state)?;
        let info = core.index.snapshot(&id).ok_or_else(no_state)?;
        let was_durable = core.is_durable(&id);
        let other = select
            .conversation_id
            .as_deref()
            .map(|name| ConversationKey::new(select.tenant.as_deref(), name));
        let named_by_request = select.rid.is_some() || select.snapshot_id.is_some();
        let other = other.filter(|key| named_by_request && *key != found.key);
        let mut turn = found.turn;
        if let Some(key) = &other {
            let next = core.conversations.get(key).map_or(1, |it| it.next_number());
            let same = core.conversations.get(key).and_then(|it| {
                let rid = found.rid.as_deref()?;
                it.turns
                    .iter()
                    .find(|turn| *turn.rid == *rid)
                    .map(|turn| turn.number)
            });
            let number = select.turn_number.or(same).unwrap_or(next);
            let total = found
                .total_tokens
                .unwrap_or(info.boundary)
                .max(info.boundary);
            let rid = found.rid.clone().unwrap_or_else(|| key.name.clone());
            turn = Some(number);
            core.conversations.put_turn(
                key,
                Turn {
                    number,
                    snapshot: Some(id),
                    boundary: info.boundary,
                    total_tokens: total,
                    rid,
                    finished: now,
                    finish: "stop",
                },
            );
        }
        let key = other.unwrap_or_else(|| found.key.clone());
        let mut branch = None;
        if let Some(name) = &select.branch_name {
            let branches = core
                .conversations
                .get(&key)
                .map_or(0, |it| it.branches.len());
            if branches >= MAX_BRANCHES {
                return Err(ServiceError::Invalid(format!(
                    "more than {MAX_BRANCHES} branches"
                )));
            }
            let before = core
                .conversations
                .get(&key)
                .and_then(|it| it.branches.get(name))
                .copied();
            if before != Some(id) {
                core.conversations.set_branch(&key, name, id, now);
                core.index.pin(&id, Pin::Named);
                if let Some(before) = before {
                    core.index.unpin(&before, PinKind::Named);
                }
            }
            branch = Some(name.clone());
        }
        if info.retain == Retain::Transient {
            core.index.set_retain(&id, Retain::Ordinary);
        }
        core.conversations.mark_dirty(key.clone());
        Ok((
            id,
            Called {
                key: Some(key),
                turn,
                branch,
            },
            was_durable,
        ))
    }

    /// Waits until the snapshot and the conversation that names it are on disk.
    async fn wait_durable(
        &self,
        id: SnapshotId,
        key: Option<&ConversationKey>,
        deadline: tokio::time::Instant,
    ) -> Result<(), ServiceError> {
        {
            let mut core = self.core.lock();
            if let Some(record) = core.records.get_mut(&id) {
                record.failure = None;
            }
            if !core.is_durable(&id) {
                core.index.set_retain(&id, Retain::Promised);
                core.queue.push(id, Duration::ZERO);
            }
        }
        self.wake.notify_one();
        loop {
            let changed = self.changed.notified();
            {
                let core = self.core.lock();
                let record = core.records.get(&id).ok_or_else(|| gone(id))?;
                let named = key.is_none_or(|key| !core.conversations.is_dirty(key));
                match record.failure {
                    _ if record.state == SaveState::Durable => {
                        if named && core.queue.writing_refs == 0 {
                            return Ok(());
                        }
                    }
                    Some(Failure::NoSpace) => {
                        return Err(ServiceError::NoSpace("the disk is full".to_owned()));
                    }
                    Some(Failure::Unavailable) => {
                        let text = "the disk takes no more writes".to_owned();
                        return Err(ServiceError::Unavailable(text));
                    }
                    Some(Failure::Other) | None => {}
                }
            }
            if tokio::time::Instant::now() >= deadline {
                return Err(ServiceError::Busy("it is not durable yet".to_owned()));
            }
            let look = tokio::time::Instant::now() + Duration::from_millis(100);
            let _ = tokio::time::timeout_at(deadline.min(look), changed).await;
        }
    }
}

// === impl Service: restore ===

impl Service {
    /// Brings a snapshot into RAM and keeps it there for the next request.
    ///
    /// # Errors
    /// `NotFound`, `NoState`, `Invalid`, `Mismatch`; `NoSpace` if RAM has no room; `Data` if a part
    /// is missing or bad.
    pub async fn restore(&self, request: RestoreRequest) -> Result<RestoreReply, ServiceError> {
        let RestoreRequest { select, pin_for } = request;
        check_names(&select)?;
        let start = self.clock.monotonic();
        let until = self
            .clock
            .now()
            .after(pin_for.unwrap_or(self.config.pin_for));
        let (id, called, token, lacking) = {
            let mut core = self.core.lock();
            let (id, called) = existing(&core, &select)?;
            self.check_match(&core, id)?;
            let token = core.index.lease(&id).ok_or_else(|| unknown_snapshot(&id))?;
            core.index.touch(&id, self.clock.now());
            core.index.pin(&id, Pin::Until(until));
            let lacking: Vec<(ObjectId, u64)> = token
                .objects()
                .filter_map(|object| Some((object, core.index.object(&object)?)))
                .filter(|(_, info)| !info.tiers.contains(TierKind::Ram))
                .map(|(object, info)| (object, info.bytes))
                .collect();
            (id, called, token, lacking)
        };
        // The lease is given back whatever happens to this request.
        let held = HeldLease {
            service: self,
            token: Some(token),
        };
        let objects = lacking.iter().map(|(object, _)| self.promote(*object));
        let promoted = futures_util::future::join_all(objects).await;
        let failed = promoted.iter().find_map(|result| result.as_ref().err());
        let moved_bytes = lacking
            .iter()
            .map(|(_, bytes)| *bytes)
            .fold(0, u64::saturating_add);
        drop(held);
        let mut core = self.core.lock();
        if let Some(error) = failed {
            core.index.unpin(&id, PinKind::Timed);
            return Err(match error {
                PromoteError::NoRoom => ServiceError::NoSpace("RAM has no room for it".to_owned()),
                PromoteError::Lost => ServiceError::Data(format!("a part of snapshot {id}")),
                PromoteError::Failed => ServiceError::Busy("the disk did not answer".to_owned()),
            });
        }
        let row = self.row(&core, id, &called).ok_or_else(|| gone(id))?;
        if row.tier != TierKind::Ram {
            core.index.unpin(&id, PinKind::Timed);
            return Err(ServiceError::NoSpace("RAM has no room for it".to_owned()));
        }
        drop(core);
        let took = self.clock.monotonic().saturating_sub(start);
        let from_tier = if lacking.is_empty() {
            TierKind::Ram
        } else {
            TierKind::Disk
        };
        Ok(RestoreReply {
            row,
            from_tier,
            moved_bytes,
            restore_time_ms: took.as_secs_f64() * 1000.0,
            pinned_until: seconds(until),
        })
    }

    /// Some attached worker can read it, or none is attached.
    fn check_match(&self, core: &Core, id: SnapshotId) -> Result<(), ServiceError> {
        let record = core.records.get(&id).ok_or_else(|| unknown_snapshot(&id))?;
        let fingerprint = record.model.fingerprint;
        let workers = self.workers.all();
        let runs = |worker: &super::workers::Worker| {
            worker
                .model()
                .0
                .is_some_and(|model| model.fingerprint == fingerprint)
        };
        if workers.is_empty() || workers.iter().any(|worker| runs(worker)) {
            Ok(())
        } else {
            Err(ServiceError::Mismatch {
                snapshot: id,
                fingerprint,
            })
        }
    }
}

/// A lease that ends with its scope.
struct HeldLease<'a> {
    service: &'a Service,
    token: Option<crate::index::LeaseToken>,
}

impl Drop for HeldLease<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token.take() {
            self.service.release(token);
        }
    }
}

// === impl Service: delete ===

impl Service {
    /// Deletes a turn, a branch, a snapshot or a whole conversation, from every tier.
    ///
    /// # Errors
    /// `NotFound`, `NoState`, `Invalid`; `Busy` if the disk takes too long: then it goes on.
    pub async fn delete(&self, request: DeleteRequest) -> Result<DeleteReply, ServiceError> {
        let DeleteRequest { select, whole } = request;
        check_names(&select)?;
        let (reply, asked, keys) = {
            let mut core = self.core.lock();
            let (keys, names, doomed) = unname(&mut core, &select, whole)?;
            let (reply, asked) = self.remove_all(&mut core, names, doomed);
            (reply, asked, keys)
        };
        for snapshot_id in &reply.snapshots {
            self.announce(Event::Removed {
                snapshot_id: *snapshot_id,
                reason: "deleted",
            });
        }
        self.changed.notify_waiters();
        self.wake.notify_one();
        if self.store.disk.is_some() {
            self.wait_removed(asked, &keys).await?;
        }
        Ok(reply)
    }

    /// Snapshots leave the index, RAM, and soon the disk.
    fn remove_all(
        &self,
        core: &mut Core,
        names: usize,
        doomed: Vec<SnapshotId>,
    ) -> (DeleteReply, u64) {
        let mut reply = DeleteReply {
            names,
            ..DeleteReply::default()
        };
        let mut all = Removal::default();
        for id in doomed {
            let Some(hit) = core.index.hit(&id) else {
                continue;
            };
            let sizes: Vec<(ObjectId, u64)> = hit
                .kv
                .iter()
                .map(|part| part.object)
                .chain([hit.state])
                .filter_map(|object| Some((object, core.index.object(&object)?.bytes)))
                .collect();
            let instead = core.ancestor(&id, |_, _| true);
            let removed = core.index.remove_snapshot(&id);
            let removal = core.gone(removed, instead);
            for object in &removal.objects {
                let size = sizes.iter().find(|(other, _)| other == object);
                reply.bytes = reply
                    .bytes
                    .saturating_add(size.map_or(0, |(_, bytes)| *bytes));
                if let Err(error) = self.store.ram.remove(object) {
                    tracing::error!(%error, "RAM did not let go of an object");
                }
            }
            reply.objects += removal.objects.len();
            reply.snapshots.extend(removal.snapshots.iter().copied());
            all.snapshots.extend(removal.snapshots);
            all.objects.extend(removal.objects);
        }
        let asked = if self.store.disk.is_some() {
            core.queue.remove(all)
        } else {
            0
        };
        (reply, asked)
    }

    async fn wait_removed(&self, asked: u64, keys: &[ConversationKey]) -> Result<(), ServiceError> {
        let deadline = tokio::time::Instant::now() + DELETE_WITHIN;
        loop {
            let changed = self.changed.notified();
            {
                let core = self.core.lock();
                let dirty = keys.iter().any(|key| core.conversations.is_dirty(key));
                let refs = core.queue.writing_refs == 0 && !dirty;
                if core.queue.done >= asked && refs {
                    return Ok(());
                }
            }
            if tokio::time::Instant::now() >= deadline {
                return Err(ServiceError::Busy(
                    "the disk takes long to let go of it".to_owned(),
                ));
            }
            let look = tokio::time::Instant::now() + Duration::from_millis(100);
            let _ = tokio::time::timeout_at(deadline.min(look), changed).await;
        }
    }
}

/// Conversations that changed, names that went, snapshots that are to go.
type Unnamed = (Vec<ConversationKey>, usize, Vec<SnapshotId>);

/// Takes the names away.
fn unname(core: &mut Core, select: &Selector, whole: bool) -> Result<Unnamed, ServiceError> {
    if let Some(id) = select.snapshot_id {
        if !core.records.contains_key(&id) {
            return Err(unknown_snapshot(&id));
        }
        let keys = core.conversations.named_by(id).to_vec();
        let names = keys.len();
        return Ok((keys, names, vec![id]));
    }
    if whole {
        let key = core.conversations.key_of(select)?;
        let branches = core.conversations.get(&key).map(|it| it.branches.clone());
        let (names, mut doomed) = core.conversations.delete_all(&key);
        for id in branches.unwrap_or_default().into_values() {
            core.index.unpin(&id, PinKind::Named);
        }
        doomed.extend(made_by(core, &key, None));
        return Ok((vec![key], names, doomed));
    }
    if select.turn_number.is_none() && select.branch_name.is_none() && select.rid.is_none() {
        let text = "a turn, a branch or a snapshot is needed, or the whole conversation";
        return Err(ServiceError::Invalid(text.to_owned()));
    }
    let found = core.conversations.find(select, Need::Existing)?;
    match (&found.branch, found.turn) {
        (Some(branch), _) => {
            if let Some(id) = found.snapshot {
                core.index.unpin(&id, PinKind::Named);
            }
            let doomed = core.conversations.delete_branch(&found.key, branch);
            Ok((vec![found.key], 1, doomed.into_iter().collect()))
        }
        (None, Some(turn)) => {
            let doomed = core.conversations.delete_turn(&found.key, turn);
            let mut doomed: Vec<SnapshotId> = doomed.into_iter().collect();
            doomed.extend(made_by(core, &found.key, found.rid.as_deref()));
            Ok((vec![found.key], 1, doomed))
        }
        (None, None) => Err(ServiceError::Busy(
            "the request is still running".to_owned(),
        )),
    }
}

/// Snapshots that a conversation's requests made and that nothing names: states on the way to its turns.
fn made_by(core: &Core, key: &ConversationKey, rid: Option<&str>) -> Vec<SnapshotId> {
    let made = core.records.iter().filter(|(id, record)| {
        record.conversation.as_ref() == Some(key)
            && rid.is_none_or(|rid| record.rid.as_deref() == Some(rid))
            && !core.conversations.is_named(**id)
    });
    made.map(|(id, _)| *id).collect()
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
    }
}

fn check_names(select: &Selector) -> Result<(), ServiceError> {
    let Selector {
        tenant,
        rid,
        conversation_id,
        turn_number,
        branch_name,
        snapshot_id: _,
    } = select;
    let names = [
        ("tenant", tenant),
        ("rid", rid),
        ("conversation_id", conversation_id),
        ("branch_name", branch_name),
    ];
    for (field, name) in names {
        let Some(name) = name else { continue };
        if name.is_empty() || name.len() > MAX_NAME {
            let text = format!("`{field}` is not a name of 1 to {MAX_NAME} bytes");
            return Err(ServiceError::Invalid(text));
        }
    }
    if *turn_number == Some(0) {
        return Err(ServiceError::Invalid("turns count from 1".to_owned()));
    }
    Ok(())
}

fn gone(id: SnapshotId) -> ServiceError {
    ServiceError::Data(format!("snapshot {id} went meanwhile"))
}
