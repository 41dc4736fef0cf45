//! What was imported becomes durable, and gets its names.

use std::sync::Arc;

use super::super::Service;
use super::super::api::{SaveRequest, Selector, SnapshotRow};
use super::super::conversations::{ConversationKey, Turn};
use super::super::error::ServiceError;
use super::super::rows::unknown_snapshot;
use super::ImportRequest;
use crate::store::bundle::Names;
use crate::types::SnapshotId;

// === impl Service ===

impl Service {
    /// Makes it durable, then gives it its names.
    pub(super) async fn adopt(
        &self,
        request: &ImportRequest,
        id: SnapshotId,
        names: Names,
    ) -> Result<(SnapshotRow, Vec<String>), ServiceError> {
        let ask = |select| SaveRequest {
            select,
            durable: request.durable,
            timeout: request.timeout,
        };
        let select = Selector::snapshot(id);
        let mut row = self.save(ask(select.clone())).await?.row;
        let name = request.conversation_id.clone().or(names.conversation);
        let mut taken = Vec::new();
        let Some(name) = name.filter(|_| request.names) else {
            return Ok((row, taken));
        };
        let key = ConversationKey::new(names.tenant.as_deref(), &name);
        let select = Selector {
            tenant: names.tenant.clone(),
            conversation_id: Some(name),
            ..select
        };
        if let Some(number) = names.turn {
            let rid: Arc<str> = Arc::from(names.rid.as_deref().unwrap_or(&key.name));
            let total = names.total_tokens.unwrap_or(0);
            if !self.put_turn(&key, id, (number, total), &rid)? {
                taken.push(format!("turn {number}"));
            }
            row = self.save(ask(select.clone())).await?.row;
        }
        for branch in names.branches {
            let other = {
                let core = self.core.lock();
                let conversation = core.conversations.get(&key);
                conversation
                    .and_then(|it| it.branches.get(&branch))
                    .copied()
            };
            if other.is_some_and(|other| other != id) {
                taken.push(format!("branch {branch}"));
                continue;
            }
            let select = Selector {
                branch_name: Some(branch),
                ..select.clone()
            };
            row = self.save(ask(select)).await?.row;
        }
        Ok((row, taken))
    }

    /// Makes it a turn, unless another snapshot is that turn; says whether it is one.
    fn put_turn(
        &self,
        key: &ConversationKey,
        id: SnapshotId,
        (number, total_tokens): (u32, u32),
        rid: &Arc<str>,
    ) -> Result<bool, ServiceError> {
        let now = self.clock.now();
        let mut core = self.core.lock();
        let info = core.index.snapshot(&id);
        let boundary = info.ok_or_else(|| unknown_snapshot(&id))?.boundary;
        let conversation = core.conversations.get(key);
        let there = conversation.and_then(|it| it.turn(number));
        if let Some(turn) = there {
            return Ok(turn.snapshot == Some(id));
        }
        let finished = now.max(conversation.map_or(now, |it| it.updated));
        let turn = Turn {
            number,
            snapshot: Some(id),
            boundary,
            total_tokens: total_tokens.max(boundary),
            prompt_tokens: None,
            rid: Arc::clone(rid),
            finished,
            finish: "stop",
            tail: None,
            print: None,
            said: None,
            namespace: core.namespace_of(&id),
        };
        core.conversations.put_turn(key, turn);
        Ok(true)
    }
}
