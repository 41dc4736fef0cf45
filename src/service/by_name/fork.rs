//! A conversation that begins as another one went up to some turn.
//!
//! No payload is copied: the new conversation's turns name the same snapshots, which stay until
//! neither names them.

use std::sync::Arc;
use std::time::Duration;

use super::super::Service;
use super::super::api::Selector;
use super::super::conversations::{ConversationKey, ConversationView, Origin, Pick, Turn};
use super::super::core::Core;
use super::super::error::ServiceError;
use super::check_names;
use super::gone;
use super::save::refused;

/// Turns of the answer.
const SHOWN: usize = 1000;

/// Forks a conversation.
#[derive(Clone, Debug, Default)]
pub struct ForkRequest {
    /// Which, and at which turn or branch; without either at its latest turn.
    pub select: Selector,
    /// The name of the new one.
    pub new_id: String,
    /// How long to wait until it is on disk.
    pub timeout: Duration,
}

impl Service {
    /// Lets a conversation of a new name begin with the turns of another one, up to the one selected.
    /// It is on disk when this returns, if there is one.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`, `Exists`; `Busy` if the deadline passes, `NoSpace` and `Unavailable` if
    /// the disk does not take it: then there is no new conversation.
    pub async fn fork(&self, request: ForkRequest) -> Result<ConversationView, ServiceError> {
        let ForkRequest {
            select,
            new_id,
            timeout,
        } = request;
        check_names(&select)?;
        check_names(&Selector {
            tenant: select.tenant.clone(),
            ..Selector::conversation(new_id.clone())
        })?;
        let deadline = tokio::time::Instant::now() + timeout;
        let to = ConversationKey::new(select.tenant.as_deref(), &new_id);
        let from = self.core.lock().conversations.key_of(&select)?;
        self.bring_back(&from).await?;
        let mut planted = {
            let mut core = self.core.lock();
            let mark = core.queue.trouble.mark();
            plant(&mut core, &select, &to)?;
            Planted {
                service: self,
                key: to.clone(),
                mark,
                kept: false,
            }
        };
        self.wake.notify_one();
        if self.store.refs.is_some() {
            let mark = planted.mark;
            self.wait(deadline, |core| {
                if !core.conversations.is_dirty(&to) && core.queue.writing_refs == 0 {
                    return Ok(true);
                }
                let trouble = &core.queue.trouble;
                refused(trouble, trouble.since(mark), "")?;
                Ok(false)
            })
            .await?;
        }
        planted.kept = true;
        let core = self.core.lock();
        core.view(&to, SHOWN, 0).ok_or(ServiceError::NotFound {
            what: "conversation",
            name: new_id,
        })
    }

    /// What was said in the conversation is in memory.
    pub(super) async fn bring_back(&self, key: &ConversationKey) -> Result<(), ServiceError> {
        while self.core.lock().conversations.is_shelved(key) {
            self.unshelve(key.clone()).await?;
        }
        Ok(())
    }
}

/// A new conversation, taken back on drop unless it is kept.
struct Planted<'a> {
    service: &'a Service,
    key: ConversationKey,
    /// What failed before does not concern it.
    mark: u64,
    kept: bool,
}

impl Drop for Planted<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let mut core = self.service.core.lock();
        // Its snapshots have other names.
        core.conversations.delete_all(&self.key);
        drop(core);
        self.service.wake.notify_one();
    }
}

fn plant(core: &mut Core, select: &Selector, to: &ConversationKey) -> Result<(), ServiceError> {
    if core.conversations.alias(to).is_some() {
        return Err(ServiceError::Exists {
            what: "conversation",
            name: to.name.to_string(),
        });
    }
    let (from, pick) = core.conversations.pick(select)?;
    let Some(source) = core.conversations.get(&from) else {
        return Err(ServiceError::NotFound {
            what: "conversation",
            name: from.name.to_string(),
        });
    };

    let (turns, last): (Vec<Turn>, u32) = match pick {
        Pick::Turn(last) => {
            let turns = source.turns.iter().filter(|turn| turn.number <= last);
            (turns.cloned().collect(), last)
        }
        Pick::Branch(id) => {
            let info = core.index.snapshot(&id).ok_or_else(|| gone(core, id))?;
            // What was said before it, as far as turns of the same line tell.
            let line: Vec<_> = core.line(id).into_iter().map(|(id, _)| id).collect();
            let before = source.turns.iter().filter(|turn| {
                turn.snapshot.is_some_and(|id| line.contains(&id))
                    && turn.total_tokens <= info.boundary
            });
            let mut turns: Vec<Turn> = before.cloned().collect();
            let last = turns.last().map_or(0, |turn| turn.number);
            let rid = core.records.get(&id).and_then(|record| record.rid.clone());
            turns.push(Turn {
                number: last + 1,
                snapshot: Some(id),
                boundary: info.boundary,
                total_tokens: info.boundary,
                prompt_tokens: None,
                rid: rid.unwrap_or_else(|| Arc::clone(&to.name)),
                finished: info.created,
                finish: "stop",
                tail: None,
                print: None,
                said: None,
                namespace: core.namespace_of(&id),
            });
            (turns, last)
        }
    };
    for turn in turns {
        core.conversations.put_turn(to, turn);
    }
    let origin = Origin {
        conversation: Arc::clone(&from.name),
        turn: last,
    };
    core.conversations.set_origin(to, origin);
    Ok(())
}
