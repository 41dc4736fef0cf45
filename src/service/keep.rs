//! What the policies of saving do: a state is queued for the disk, or is not.
//!
//! # When
//! A state is judged when it becomes visible and again when its turn ends, as only then it is known
//! which turn it was and whether that calls a tool. What is not to be written may vanish when RAM is
//! needed; the newest such state of each conversation is pinned for a while (`unsaved`), in at most
//! half of RAM.

use super::Service;
use super::api::Selector;
use super::by_name::check_names;
use super::conversations::{ConversationKey, Deferred, Need, Owner, Pace};
use super::core::Core;
use super::error::ServiceError;
use super::saving::{Action, Facts, RulesRow, SavingRules, decide};
use super::seen::Expected;
use super::unsaved::Held;
use crate::index::{Pin, PinKind, Retain};
use crate::store::Tier;
use crate::types::SnapshotId;

// === impl Service ===

impl Service {
    /// A state of a request is visible, or its turn is over: it goes to disk or does not.
    pub(super) fn keep(
        &self,
        core: &mut Core,
        key: &ConversationKey,
        owner: Owner,
        id: SnapshotId,
    ) {
        let key = core.conversations.home(owner, key);
        let turn = core.conversations.turn_of(owner, &key);
        self.keep_turn(core, &key, id, turn);
    }

    fn keep_turn(
        &self,
        core: &mut Core,
        key: &ConversationKey,
        id: SnapshotId,
        (turn, tool_call): (u32, bool),
    ) {
        let Some(info) = core.index.snapshot(&id) else {
            return;
        };
        let failed = core.records.get(&id).is_none_or(|it| it.failure.is_some());
        if info.durable || failed || core.queue.contains(&id) || info.retain == Retain::Promised {
            return;
        }
        let now = self.clock.monotonic();
        let pace = core.conversations.pace(key);
        let facts = Facts {
            turn,
            tool_call,
            since_last: pace
                .last(now)
                .filter(|(other, _)| *other != turn)
                .map(|(_, at)| now.saturating_sub(at)),
            write_after: self.config.write_after,
        };
        let rules = core.conversations.rules(key);
        let rules = rules.unwrap_or_else(|| self.config.saving.rules());
        match decide(&rules, &facts) {
            Action::Write { after, deferred } => {
                if self.store.disk.is_none() {
                    return;
                }
                core.index.set_retain(&id, Retain::Ordinary);
                core.queue.push(id, now.saturating_add(after));
                // Of those that wait for the interval only the newest is written.
                let older = pace.deferred.map(|older| older.snapshot);
                if let Some(older) = older.filter(|older| *older != id)
                    && !core.is_durable(&older)
                    && !core.is_kept(&older)
                    && core.queue.cancel(&older)
                {
                    core.index.set_retain(&older, Retain::Transient);
                    self.metrics.superseded.inc();
                }
                let pace = match deferred {
                    false => Pace {
                        last: Some((turn, now)),
                        deferred: None,
                    },
                    true => Pace {
                        last: pace.last(now),
                        deferred: Some(Deferred {
                            snapshot: id,
                            turn,
                            due: now.saturating_add(after),
                        }),
                    },
                };
                core.conversations.set_pace(key, pace);
                // What was held is no longer the newest.
                if let Some(held) = core.unsaved.take(key) {
                    unpin(core, &held);
                }
                self.wake.notify_one();
            }
            Action::WhenEvicted => {}
            Action::Hold => self.hold_unsaved(core, key, id),
        }
    }

    /// It is not written, and stays in RAM for a while.
    fn hold_unsaved(&self, core: &mut Core, key: &ConversationKey, id: SnapshotId) {
        if core.is_kept(&id) {
            return;
        }
        let Some(info) = core.index.snapshot(&id) else {
            return;
        };
        core.index.set_retain(&id, Retain::Transient);
        let now = self.clock.now();
        let held = Held {
            snapshot: id,
            until: now.after(self.config.saving.unsaved_for),
            bytes: info.state_bytes.saturating_add(info.kv_bytes),
        };
        core.index.pin(&id, Pin::Until(held.until));
        let most = self.store.ram.usage().budget / 2;
        for gone in core.unsaved.hold(key, held, most, now) {
            unpin(core, &gone);
        }
    }

    /// The rules of saving of a conversation, and whether they are its own.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`.
    pub fn rules(&self, select: &Selector) -> Result<RulesRow, ServiceError> {
        check_names(select)?;
        let core = self.core.lock();
        let key = core.conversations.key_of(select)?;
        Ok(self.rules_of(&core, &key))
    }

    fn rules_of(&self, core: &Core, key: &ConversationKey) -> RulesRow {
        let own = core.conversations.rules(key);
        let rules = own.unwrap_or_else(|| self.config.saving.rules());
        RulesRow {
            policy: rules.policy,
            every_n_turns: rules.every_n_turns,
            min_interval_seconds: rules.min_interval.as_secs_f64(),
            own: own.is_some(),
        }
    }

    /// Gives a conversation rules of its own, or takes them away, if the rules are still as they were
    /// seen. A conversation that nothing was said in yet may have some. The rules as they are then.
    ///
    /// # Errors
    /// `Invalid`, `Changed`; `NotFound` if there is no such conversation to take them from.
    pub fn set_rules(
        &self,
        select: &Selector,
        rules: Option<SavingRules>,
        expected: &Expected,
    ) -> Result<RulesRow, ServiceError> {
        check_names(select)?;
        if let Some(Err((field, problem))) = rules.as_ref().map(SavingRules::check) {
            return Err(ServiceError::Invalid(format!("`{field}` {problem}")));
        }
        let mut core = self.core.lock();
        let key = match (core.conversations.key_of(select), &select.conversation_id) {
            (Err(ServiceError::NotFound { .. }), Some(name)) if rules.is_some() => {
                ConversationKey::new(select.tenant.as_deref(), name)
            }
            (found, _) => found?,
        };
        expected.check(|| Ok(self.rules_of(&core, &key)))?;
        let now = self.clock.now();
        core.conversations.set_rules(&key, rules, now);
        let row = self.rules_of(&core, &key);
        drop(core);
        self.wake.notify_one();
        Ok(row)
    }

    /// The client says that a turn calls a tool: of a request under way, or of one that ended.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`.
    pub fn calls_tool(&self, select: &Selector) -> Result<(), ServiceError> {
        check_names(select)?;
        let mut core = self.core.lock();
        let found = core.conversations.find(select, Need::Existing)?;
        let (key, rid) = (found.key, found.rid);
        if let Some(rid) = &rid {
            core.conversations.note_tool_call(&key, rid);
        }
        if let Some((id, turn)) = found.snapshot.zip(found.turn) {
            self.keep_turn(&mut core, &key, id, (turn, true));
        }
        Ok(())
    }
}

// === impl Core ===

impl Core {
    /// Somebody named, promised or pinned it: policies leave it alone.
    fn is_kept(&self, id: &SnapshotId) -> bool {
        let info = self.index.snapshot(id);
        info.is_some_and(|info| info.names > 0 || info.retain == Retain::Promised)
    }
}

/// Lets a held state go, unless a restore holds it for longer.
fn unpin(core: &mut Core, held: &Held) {
    let info = core.index.snapshot(&held.snapshot);
    if info.is_some_and(|info| info.pinned_until == Some(held.until)) {
        core.index.unpin(&held.snapshot, PinKind::Timed);
    }
}
