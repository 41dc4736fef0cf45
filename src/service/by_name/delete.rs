//! Deleting: names, snapshots, objects, files.

use std::collections::HashSet;
use std::time::Duration;

use super::super::Service;
use super::super::api::{DeleteReply, DeleteRequest, Event, Selector};
use super::super::conversations::{ConversationKey, Found, Need, SHOWN_TURNS};
use super::super::core::{Core, Failure, Removal};
use super::super::error::ServiceError;
use super::super::rows::{called, unknown_snapshot};
use super::super::seen::Expected;
use super::check_names;
use super::save::{refused, still_open};
use crate::index::PinKind;
use crate::types::{Namespace, NamespaceId, ObjectId, SnapshotId};

/// The longest that a deletion waits for the disk.
const DELETE_WITHIN: Duration = Duration::from_secs(30);

impl Service {
    /// Deletes a turn, a branch, a snapshot or a whole conversation, from every tier.
    ///
    /// # Errors
    /// `NotFound`, `NoState`, `Invalid` (a part beside the whole, too); `Busy` if the disk takes too long: then it goes on;
    /// `Unavailable` if its files cannot be removed; `NoSpace` if all is gone but the name in its conversation's file, which a full disk refused.
    pub async fn delete(&self, request: DeleteRequest) -> Result<DeleteReply, ServiceError> {
        self.delete_seen(request, &Expected::Anything).await
    }

    /// The same, if what is named is still as it was seen: the snapshot, or else the conversation,
    /// of which a part may be what is to go.
    ///
    /// # Errors
    /// Those of [`Service::delete`], and `Changed`.
    pub async fn delete_seen(
        &self,
        request: DeleteRequest,
        expected: &Expected,
    ) -> Result<DeleteReply, ServiceError> {
        let DeleteRequest { select, whole } = request;
        check_names(&select)?;
        if select.snapshot_id.is_none() && !whole {
            // What was said in a turn may be what others know their tokens by.
            let key = self.core.lock().conversations.key_of(&select)?;
            self.bring_back(&key).await?;
        }
        let (reply, asked, keys, mark) = {
            let mut core = self.core.lock();
            match select.snapshot_id {
                Some(id) => expected.check(|| {
                    let row = self.row(&core, id, &called(&core, id));
                    row.ok_or_else(|| unknown_snapshot(&id))
                })?,
                None => expected.check(|| {
                    let key = core.conversations.key_of(&select)?;
                    core.view(&key, SHOWN_TURNS, 0).ok_or(ServiceError::Changed)
                })?,
            }
            let mark = core.queue.trouble.mark();
            let spaces = spaces_of(&core, &select);
            let (keys, names, doomed) = unname(&mut core, &select, whole)?;
            let (reply, asked) = self.remove_all(&mut core, names, doomed, &spaces);
            // Room comes from here: what waited for some is tried again.
            core.queue.not_before = Duration::ZERO;
            (reply, asked, keys, mark)
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
            self.wait_removed(asked, &keys, mark).await?;
        }
        Ok(reply)
    }

    /// Snapshots leave the index, RAM, and soon the disk, and with them KV of the same namespaces that
    /// no snapshot needs: some of it may be left of states that went before.
    fn remove_all(
        &self,
        core: &mut Core,
        names: usize,
        doomed: Vec<SnapshotId>,
        spaces: &HashSet<NamespaceId>,
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
            core.keep_tokens(id, instead.map_or(0, |(_, boundary)| boundary));
            let removed = core.index.remove_snapshot(&id);
            core.note_deleted(&removed.snapshots);
            let removal = core.gone(removed, instead);
            for object in &removal.objects {
                let size = sizes.iter().find(|(other, _)| other == object);
                reply.bytes = reply
                    .bytes
                    .saturating_add(size.map_or(0, |(_, bytes)| *bytes));
            }
            self.drop_from_ram(core, &removal.objects);
            reply.objects += removal.objects.len();
            reply.snapshots.extend(removal.snapshots.iter().copied());
            all.snapshots.extend(removal.snapshots);
            all.objects.extend(removal.objects);
        }
        let spare = spaces.iter().map(|space| core.index.spare_kv(space));
        let spare: Vec<ObjectId> = spare.flatten().collect();
        for object in spare {
            let bytes = core.index.object(&object).map_or(0, |known| known.bytes);
            if core.index.forget_object(&object).is_ok() {
                self.drop_from_ram(core, &[object]);
                reply.bytes = reply.bytes.saturating_add(bytes);
                reply.objects += 1;
                all.objects.push(object);
            }
        }
        let asked = if self.store.disk.is_some() {
            core.queue.remove(all)
        } else {
            0
        };
        (reply, asked)
    }

    async fn wait_removed(
        &self,
        asked: u64,
        keys: &[ConversationKey],
        mark: u64,
    ) -> Result<(), ServiceError> {
        let deadline = tokio::time::Instant::now() + DELETE_WITHIN;
        loop {
            let changed = self.changed.notified();
            {
                let core = self.core.lock();
                let dirty = keys.iter().any(|key| core.conversations.is_dirty(key));
                let refs = core.queue.writing_refs == 0 && !dirty;
                if core.queue.done >= asked
                    && let Some(stuck) = core.queue.trouble.stuck_since(mark)
                {
                    return Err(ServiceError::Unavailable(format!(
                        "it is deleted, but files of it cannot be removed, and it may be known \
                         again after a restart: {}",
                        stuck.error
                    )));
                }
                if core.queue.done >= asked && refs {
                    return Ok(());
                }
                let trouble = core.queue.trouble.since(mark);
                if core.queue.done >= asked && trouble == Some(Failure::NoSpace) {
                    return Err(ServiceError::NoSpace(
                        "it is deleted, but the disk is full: its conversation may name it again \
                         after a restart"
                            .to_owned(),
                    ));
                }
                refused(&core.queue.trouble, trouble, "")?;
                still_open(&core)?;
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

/// A deletion that says two things would do one of them: it does neither.
///
/// # Errors
/// `Invalid`.
fn check_one(select: &Selector) -> Result<(), ServiceError> {
    let Selector {
        turn_number,
        branch_name,
        snapshot_id,
        ..
    } = select;
    let parts = [
        (turn_number.is_some(), "turn_number"),
        (branch_name.is_some(), "branch_name"),
        (snapshot_id.is_some(), "snapshot_id"),
    ];
    match parts.iter().find(|(named, _)| *named) {
        None => Ok(()),
        Some((_, field)) => Err(ServiceError::Invalid(format!(
            "`{field}` names a part of what `whole` deletes: give one of them"
        ))),
    }
}

/// The namespaces of what is named.
fn spaces_of(core: &Core, select: &Selector) -> HashSet<NamespaceId> {
    if let Some(id) = select.snapshot_id {
        let record = core.records.get(&id).into_iter();
        return record.map(|record| record.namespace.id()).collect();
    }
    let key = core.conversations.key_of(select).ok();
    let conversation = key.and_then(|key| core.conversations.get(&key));
    let turns = conversation.into_iter().flat_map(|it| &it.turns);
    let spaces = turns.map(|turn| turn.namespace.as_deref());
    let spaces: HashSet<Option<&Namespace>> = spaces.collect();
    spaces
        .into_iter()
        .map(|space| space.map_or_else(|| Namespace::default().id(), Namespace::id))
        .collect()
}

/// Takes the names away.
fn unname(core: &mut Core, select: &Selector, whole: bool) -> Result<Unnamed, ServiceError> {
    if whole {
        check_one(select)?;
    }
    if let Some(id) = select.snapshot_id {
        if !core.records.contains_key(&id) {
            return Err(unknown_snapshot(&id));
        }
        let keys = core.conversations.named_by(id).to_vec();
        let names = core.conversations.count_names(id);
        return Ok((keys, names, vec![id]));
    }
    if whole {
        let key = core.conversations.key_of(select)?;
        let branches = core.conversations.get(&key).map(|it| it.branches.clone());
        let (names, mut doomed) = core.conversations.delete_all(&key);
        let unmarked = core.conversations.unmark_all(&key);
        for id in branches.unwrap_or_default().into_values().chain(unmarked) {
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
    if select.turn_number.is_none()
        && select.branch_name.is_none()
        && let Some(rid) = &select.rid
    {
        check_only_turn(core, &found, rid)?;
    }
    match (&found.branch, found.turn) {
        (Some(branch), _) => {
            if let Some(id) = found.snapshot {
                core.index.unpin(&id, PinKind::Named);
            }
            let doomed = core.conversations.delete_branch(&found.key, branch);
            Ok((vec![found.key], 1, doomed.into_iter().collect()))
        }
        (None, Some(turn)) => {
            core.hand_over(&found.key, turn);
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

/// A request alone names its turn if it is the only one that it became.
///
/// # Errors
/// `NotFound` if the name is only that of a conversation; `Invalid` if there are several turns.
fn check_only_turn(core: &Core, found: &Found, rid: &str) -> Result<(), ServiceError> {
    if found.rid.as_deref() != Some(rid) {
        return Err(ServiceError::NotFound {
            what: "request",
            name: rid.to_owned(),
        });
    }
    let conversation = core.conversations.get(&found.key);
    let turns = conversation.map_or(&[][..], |it| it.turns.as_slice());
    if turns.iter().filter(|turn| *turn.rid == *rid).count() > 1 {
        return Err(ServiceError::Invalid(format!(
            "request `{rid}` has several turns: `turn_number` is needed"
        )));
    }
    Ok(())
}

/// Snapshots that a conversation's requests made and that nothing names: states on the way to its
/// turns.
fn made_by(core: &Core, key: &ConversationKey, rid: Option<&str>) -> Vec<SnapshotId> {
    let made = core.records.iter().filter(|(id, record)| {
        record.conversation.as_ref() == Some(key)
            && rid.is_none_or(|rid| record.rid.as_deref() == Some(rid))
            && !core.conversations.is_named(**id)
    });
    made.map(|(id, _)| *id).collect()
}
