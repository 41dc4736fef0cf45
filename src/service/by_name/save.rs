//! Keeping a state: waiting for what is under way, naming it, making it durable.

use std::time::Duration;

use super::super::Service;
use super::super::api::{SaveReply, SaveRequest, Selector};
use super::super::conversations::{ConversationKey, Found, MAX_BRANCHES, Need, Turn};
use super::super::core::{Core, Failure};
use super::super::error::ServiceError;
use super::super::rows::{Called, called, unknown_snapshot};
use super::super::save_state::SaveState;
use super::{check_names, gone};
use crate::index::{Pin, PinKind, Retain};
use crate::types::SnapshotId;

/// How long a worker may take to offer what it is asked for.
const OFFERED_WITHIN: Duration = Duration::from_secs(1);

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
        let mut asked = None;
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
                // It may be on the device: once, the worker is asked to offer it.
                None if found.saves == 0 && asked.is_none() && self.ask_again(&found.key) => {
                    asked = Some(tokio::time::Instant::now() + OFFERED_WITHIN);
                }
                None if found.saves == 0
                    && !last
                    && asked.is_some_and(|until| tokio::time::Instant::now() < until) => {}
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
                core.queue.not_before = Duration::ZERO;
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
