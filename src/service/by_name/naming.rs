//! Names that a save gives, and takes back when it is refused.
//!
//! # State
//! From its names' being given until they are on disk a conversation is *in doubt*: another save
//! that names something in it waits, so that what is taken back is never what another was
//! promised. What had a name before keeps its pin until then.
//!
//! # Cancellation
//! A save that ends early, its client gone, takes its names back.

use super::super::Service;
use super::super::api::Selector;
use super::super::conversations::{ConversationKey, Found, MAX_BRANCHES, Turn};
use super::super::core::Core;
use super::super::error::ServiceError;
use super::super::rows::Called;
use super::gone;
use crate::index::{Pin, PinKind, Retain};
use crate::types::SnapshotId;

/// Names given, and taken back on drop unless kept.
pub(super) struct Naming<'a> {
    service: &'a Service,
    id: SnapshotId,
    key: ConversationKey,
    called: Called,
    /// The turn that was put, and the one of its number before.
    turn: Option<(Turn, Option<Turn>)>,
    /// The branch that was given, and what bore the name before.
    branch: Option<(String, Option<SnapshotId>)>,
    /// What failed before does not concern it.
    mark: u64,
    kept: bool,
}

/// The conversation in which the snapshot gets its names, if it is not its own.
fn other_key(select: &Selector, found: &Found) -> Option<ConversationKey> {
    let name = select.conversation_id.as_deref()?;
    let key = ConversationKey::new(select.tenant.as_deref(), name);
    let named_by_request = select.rid.is_some() || select.snapshot_id.is_some();
    (named_by_request && key != found.key).then_some(key)
}

/// Another branch may be given.
///
/// # Errors
/// `Invalid`.
pub(super) fn check_branches(
    core: &Core,
    select: &Selector,
    found: &Found,
) -> Result<(), ServiceError> {
    let Some(name) = &select.branch_name else {
        return Ok(());
    };
    let other = other_key(select, found);
    let conversation = core.conversations.get(other.as_ref().unwrap_or(&found.key));
    let most = |branches: usize| branches >= MAX_BRANCHES;
    if conversation.is_some_and(|it| most(it.branches.len()) && !it.branches.contains_key(name)) {
        return Err(ServiceError::Invalid(format!(
            "more than {MAX_BRANCHES} branches"
        )));
    }
    Ok(())
}

// === impl Service ===

impl Service {
    /// Gives the snapshot the names asked for, once no other save may take names back there.
    pub(super) async fn name(
        &self,
        select: &Selector,
        found: &Found,
        id: SnapshotId,
        deadline: tokio::time::Instant,
    ) -> Result<Naming<'_>, ServiceError> {
        // The request may have gone on with another conversation meanwhile.
        let key = self.core.lock().conversations.alias(&found.key);
        let found = &Found {
            key: key.unwrap_or_else(|| found.key.clone()),
            ..found.clone()
        };
        let other = other_key(select, found);
        let key = other.as_ref().unwrap_or(&found.key);
        loop {
            self.wait(deadline, |core| Ok(!core.in_doubt.contains(key)))
                .await?;
            let mut core = self.core.lock();
            // Between the two looks another may have come first.
            if !core.in_doubt.contains(key) {
                return self.give_names(&mut core, select, found, id);
            }
        }
    }

    fn give_names(
        &self,
        core: &mut Core,
        select: &Selector,
        found: &Found,
        id: SnapshotId,
    ) -> Result<Naming<'_>, ServiceError> {
        let now = self.clock.now();
        let info = core.index.snapshot(&id).ok_or_else(|| gone(core, id))?;
        check_branches(core, select, found)?;
        let other = other_key(select, found);
        let mut turn = found.turn;
        let mut put = None;
        if let Some(key) = &other {
            let conversation = core.conversations.get(key);
            let next = conversation.map_or(1, |it| it.next_number());
            let same = conversation.and_then(|it| {
                let rid = found.rid.as_deref()?;
                let mut turns = it.turns.iter();
                Some(turns.find(|turn| *turn.rid == *rid)?.number)
            });
            let number = select.turn_number.or(same).unwrap_or(next);
            let before = conversation.and_then(|it| it.turn(number)).cloned();
            let total = found.total_tokens.unwrap_or(info.boundary);
            // What was said is the same under another name.
            let source = found
                .turn
                .and_then(|turn| core.conversations.get(&found.key)?.turn(turn));
            let source = source.filter(|turn| turn.total_tokens == total.max(info.boundary));
            let ours = Turn {
                number,
                snapshot: Some(id),
                boundary: info.boundary,
                total_tokens: total.max(info.boundary),
                prompt_tokens: source.and_then(|turn| turn.prompt_tokens),
                rid: found.rid.clone().unwrap_or_else(|| key.name.clone()),
                finished: now.max(conversation.map_or(now, |it| it.updated)),
                finish: "stop",
                tail: source.and_then(|turn| turn.tail.clone()),
                print: source.and_then(|turn| turn.print),
                said: source.and_then(|turn| turn.said.clone()),
                namespace: source.and_then(|turn| turn.namespace.clone()),
            };
            turn = Some(number);
            core.conversations.put_turn(key, ours.clone());
            put = Some((ours, before));
        }
        let key = other.unwrap_or_else(|| found.key.clone());
        let mut given = None;
        if let Some(name) = &select.branch_name {
            let conversation = core.conversations.get(&key);
            let before = conversation.and_then(|it| it.branches.get(name)).copied();
            if before != Some(id) {
                core.conversations.set_branch(&key, name, id, now);
                core.index.pin(&id, Pin::Named);
                given = Some((name.clone(), before));
            }
        }
        if info.retain == Retain::Transient {
            core.index.set_retain(&id, Retain::Ordinary);
        }
        core.conversations.mark_dirty(key.clone());
        core.queue.not_before = std::time::Duration::ZERO;
        core.in_doubt.insert(key.clone());
        Ok(Naming {
            service: self,
            id,
            called: Called {
                key: Some(key.clone()),
                turn,
                branch: select.branch_name.clone(),
            },
            key,
            turn: put,
            branch: given,
            mark: core.queue.trouble.mark(),
            kept: false,
        })
    }
}

// === impl Naming ===

impl Naming<'_> {
    /// The conversation.
    pub(super) fn key(&self) -> &ConversationKey {
        &self.key
    }

    /// What the queue had failed at before.
    pub(super) fn mark(&self) -> u64 {
        self.mark
    }

    /// The names stay.
    pub(super) fn keep(mut self) -> Called {
        self.kept = true;
        std::mem::take(&mut self.called)
    }

    fn take_back(&mut self, core: &mut Core) {
        let now = self.service.clock.now();
        let key = &self.key;
        // What somebody changed meanwhile is not ours any more.
        if let Some((name, before)) = &self.branch {
            let conversation = core.conversations.get(key);
            let there = conversation.and_then(|it| it.branches.get(name)).copied();
            let before = before.filter(|id| core.records.contains_key(id));
            if there == Some(self.id) {
                core.index.unpin(&self.id, PinKind::Named);
                match before {
                    Some(before) => {
                        core.conversations.set_branch(key, name, before, now);
                    }
                    None => {
                        core.conversations.delete_branch(key, name);
                    }
                }
            } else if let Some(before) = before {
                core.index.unpin(&before, PinKind::Named);
            }
        }
        if let Some((ours, before)) = &self.turn {
            let conversation = core.conversations.get(key);
            let there = conversation.and_then(|it| it.turn(ours.number));
            if there == Some(ours) {
                match before.clone() {
                    Some(mut before) => {
                        let there = |id: &SnapshotId| core.records.contains_key(id);
                        if !before.snapshot.as_ref().is_some_and(there) {
                            (before.snapshot, before.boundary) = (None, 0);
                        }
                        core.conversations.put_turn(key, before);
                    }
                    None => {
                        core.conversations.delete_turn(key, ours.number);
                    }
                }
            }
        }
    }
}

impl Drop for Naming<'_> {
    fn drop(&mut self) {
        let service = self.service;
        let mut core = service.core.lock();
        core.in_doubt.remove(&self.key);
        if !self.kept {
            self.take_back(&mut core);
        } else if let Some((_, Some(before))) = self.branch {
            core.index.unpin(&before, PinKind::Named);
        }
        drop(core);
        service.changed.notify_waiters();
    }
}
