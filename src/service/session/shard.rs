//! A worker that is one rank of several: its saves wait for those of the other ranks.

use super::save::Save;
use super::{Ended, Session};
use crate::pool::PrefixHasher;
use crate::proto::channel::layout::{DeclineReason, Status};
use crate::proto::channel::msg::Saved;
use crate::service::commit::{Commit, ShardBlocks};
use crate::service::hold::Point;
use crate::service::save_state::SaveState;
use crate::service::shards::{Brought, Leader, Member, Plan, SaveName, Whole};
use crate::types::{ObjectId, ObjectKind, SnapshotId, TokenId};

impl Session {
    /// Its server has several ranks.
    pub(super) fn is_shard(&self) -> bool {
        self.worker.shard.size > 1
    }

    /// It speaks for its server: each request counts once, however many ranks there are.
    pub(super) fn leads(&self) -> bool {
        self.worker.shard.rank == 0
    }

    pub(super) fn save_name(&self, number: u64) -> SaveName {
        let instance = self.worker.instance;
        SaveName { instance, number }
    }

    /// Takes part in the save that the other ranks have planned, or plan by the same numbers.
    pub(super) fn join(&self, number: u64, save: &Save, tokens: &[TokenId]) -> bool {
        let plan = Plan {
            key: save.key,
            state: state_of(save, tokens),
            base: save.base,
            after: save.after,
        };
        let member = Member {
            session: self.worker.session,
            events: self.events_tx.clone(),
            serial: save.serial,
        };
        let name = self.save_name(number);
        self.service
            .shards
            .join(name, self.worker.shard, plan, member)
    }

    /// The other ranks lose the save, too.
    pub(super) fn leave(&self, number: u64) {
        if self.is_shard() {
            let name = self.save_name(number);
            self.service.shards.leave(name, self.worker.session);
        }
    }

    /// All pieces of this rank are in. Answers how the save ended, if it did.
    pub(super) fn bring(&mut self, id: u64) -> Option<Result<[u8; 16], Status>> {
        let name = self.save_name(id);
        let leads = self.leads();
        let save = self.saves.get_mut(&id)?;
        let Some(request) = self.requests.get(save.req) else {
            return Some(Err(Status::Cancelled));
        };
        if save.brought {
            return None;
        }
        let Some(tokens) = request.prefix(save.boundary) else {
            return Some(Err(Status::BadRequest));
        };
        let Some(ShardBlocks { state, kv }) = save.take_blocks() else {
            return Some(Err(Status::Failed));
        };
        save.brought = true;
        let leader = leads.then(|| Leader {
            conversation: request.conversation.clone(),
            owner: (self.worker.session, save.req),
            rid: request.rid.clone(),
        });
        let brought = Brought {
            state,
            kv,
            room: save.room.take(),
            leader,
        };
        let (shard, session) = (self.worker.shard, self.worker.session);
        let whole = match self.service.shards.bring(name, shard, session, brought) {
            Ok(Some(whole)) => whole,
            Ok(None) => return None,
            Err(status) => return Some(Err(status)),
        };
        let Whole { shards, others } = whole;
        let leader = shards.iter().find_map(|shard| shard.leader.clone());
        let result = leader.ok_or(Status::Failed).and_then(|leader| {
            let (mut blocks, mut rooms) = (Vec::new(), Vec::new());
            for Brought {
                state, kv, room, ..
            } in shards
            {
                blocks.push(ShardBlocks { state, kv });
                rooms.extend(room);
            }
            let commit = Commit {
                model: &save.model,
                namespace: &request.namespace,
                key: save.key,
                tokens,
                base: save.base,
                shards: blocks,
                rooms,
                conversation: &leader.conversation,
                owner: leader.owner,
                rid: &leader.rid,
            };
            match self.service.commit(commit) {
                Ok(SnapshotId(uuid)) => Ok(uuid.into_bytes()),
                Err(error) => {
                    tracing::warn!(%error, save = id, "A save could not be made visible");
                    Err(error.status())
                }
            }
        });
        for member in others {
            member.tell(id, result);
        }
        Some(result)
    }

    /// The ranks' save ended: all shards are in, or one is not coming.
    pub(super) async fn joined(
        &mut self,
        id: u64,
        serial: u64,
        result: Result<[u8; 16], Status>,
    ) -> Ended {
        let Some(save) = self.saves.get(&id).filter(|save| save.serial == serial) else {
            return Ok(());
        };
        match result {
            Err(status) => self.drop_save(id, status, DeclineReason::OtherRank).await,
            // It cannot be: the snapshot has a shard that this rank did not bring.
            Ok(_) if save.state != SaveState::Committing => Ok(()),
            Ok(snapshot) => {
                self.say(Saved {
                    save: id,
                    status: Status::Ok,
                    snapshot,
                })?;
                self.hold(Point::Save(&SaveState::Visible)).await;
                match self.end_save(id) {
                    Some(next) => self.whole(next).await,
                    None => Ok(()),
                }
            }
        }
    }
}

/// The address of the state: what ranks compare, so that they save the same.
fn state_of(save: &Save, tokens: &[TokenId]) -> ObjectId {
    let mut hasher = PrefixHasher::new(save.key.fingerprint, save.key.namespace);
    hasher.update(tokens);
    hasher.object(save.boundary, ObjectKind::State)
}
