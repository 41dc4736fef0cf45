//! Saves of servers with several ranks: shards that become one snapshot, or nothing.
//!
//! # What
//! Each rank of an instance offers the same save under the same number, to its own session. The
//! first offer is planned; the others take over its plan, so that all ranks bring the same pieces.
//! A rank whose pieces are in *brings* them here. Who brings the last shard commits all of them
//! as one object set of one generation.
//!
//! # Cancellation
//! A rank that leaves (an abort, a deadline, the end of its session) takes the save from all: the
//! others are told through their sessions' events. Until the commit, no other part of the service
//! knows any of it.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::commit::Block;
use super::conversations::{ConversationKey, Owner};
use super::room::Reservation;
use super::session::Event;
use crate::index::TreeKey;
use crate::pool::Shard;
use crate::proto::channel::layout::Status;
use crate::store::Segment;
use crate::types::{InstanceId, ObjectId, SessionId};

/// A save of an instance.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct SaveName {
    /// The server.
    pub instance: InstanceId,
    /// Its number of the save.
    pub number: u64,
}

/// What all ranks bring.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    /// Model and namespace.
    pub key: TreeKey,
    /// Address of the state: says the tokens, and how many.
    pub state: ObjectId,
    /// KV before it is not brought.
    pub base: u32,
    /// The save that brings KV up to `base`.
    pub after: Option<u64>,
}

/// A rank that takes part.
#[derive(Debug)]
pub(super) struct Member {
    /// Its session.
    pub session: SessionId,
    /// How to tell it.
    pub events: UnboundedSender<Event>,
    /// Tells apart saves of the session that have the same number.
    pub serial: u64,
}

/// All pieces of one shard.
#[derive(Debug)]
pub(super) struct Brought {
    /// The state.
    pub state: Arc<Segment>,
    /// KV, in order.
    pub kv: Vec<Block>,
    /// Their room in the RAM tier.
    pub room: Option<Reservation>,
    /// Of rank 0: whose save it is.
    pub leader: Option<Leader>,
}

/// Rank 0 speaks for the instance where people are concerned.
#[derive(Clone, Debug)]
pub(super) struct Leader {
    /// The conversation.
    pub conversation: ConversationKey,
    /// The request.
    pub owner: Owner,
    /// Its name.
    pub rid: Arc<str>,
}

/// A save of which all shards are there.
#[derive(Debug)]
pub(super) struct Whole {
    /// By rank.
    pub shards: Vec<Brought>,
    /// The other ranks, to be told.
    pub others: Vec<Member>,
}

#[derive(Debug)]
struct Join {
    plan: Plan,
    ranks: Vec<Option<(Member, Option<Brought>)>>,
}

/// All saves that wait for shards.
#[derive(Debug, Default)]
pub(super) struct Shards {
    all: Mutex<HashMap<SaveName, Join>>,
}

// === impl Shards ===

impl Shards {
    /// What another rank planned, if one did.
    pub fn planned(&self, name: &SaveName) -> Option<Plan> {
        self.all.lock().get(name).map(|join| join.plan)
    }

    /// A rank takes part. `false`: it offers something else than the others, or takes part already.
    pub fn join(&self, name: SaveName, shard: Shard, plan: Plan, member: Member) -> bool {
        let mut all = self.all.lock();
        let join = all.entry(name).or_insert_with(|| Join {
            plan,
            ranks: (0..shard.size).map(|_| None).collect(),
        });
        let same = join.plan == plan && join.ranks.len() == shard.size as usize;
        match join.ranks.get_mut(shard.rank as usize) {
            Some(place @ None) if same => {
                *place = Some((member, None));
                true
            }
            _ => false,
        }
    }

    /// The pieces of a rank are in. Returns all shards if these were the last.
    ///
    /// # Errors
    /// The save is over.
    pub fn bring(
        &self,
        name: SaveName,
        shard: Shard,
        session: SessionId,
        brought: Brought,
    ) -> Result<Option<Whole>, Status> {
        let mut all = self.all.lock();
        let join = all.get_mut(&name).ok_or(Status::OtherRank)?;
        let place = join.ranks.get_mut(shard.rank as usize);
        match place {
            Some(Some((member, pieces @ None))) if member.session == session => {
                *pieces = Some(brought);
            }
            _ => return Err(Status::OtherRank),
        }
        let there = |rank: &Option<(Member, Option<Brought>)>| matches!(rank, Some((_, Some(_))));
        if !join.ranks.iter().all(there) {
            return Ok(None);
        }
        let join = all.remove(&name).ok_or(Status::OtherRank)?;
        let ranks = join.ranks.into_iter().flatten();
        let (members, shards): (Vec<_>, Vec<_>) = ranks.unzip();
        let others = members.into_iter();
        Ok(Some(Whole {
            shards: shards.into_iter().flatten().collect(),
            others: others.filter(|member| member.session != session).collect(),
        }))
    }

    /// A rank gives its save up, and so do the others.
    pub fn leave(&self, name: SaveName, session: SessionId) {
        let mut all = self.all.lock();
        let Some(join) = all.get(&name) else { return };
        let takes_part = |member: &Member| member.session == session;
        if !join
            .ranks
            .iter()
            .flatten()
            .any(|(member, _)| takes_part(member))
        {
            return;
        }
        let join = all.remove(&name);
        drop(all);
        let members = join.into_iter().flat_map(|join| join.ranks).flatten();
        for (member, _) in members.filter(|(member, _)| !takes_part(member)) {
            member.tell(name.number, Err(Status::OtherRank));
        }
    }

    /// How many wait.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.all.lock().len()
    }
}

// === impl Member ===

impl Member {
    /// How the save ended.
    pub fn tell(&self, save: u64, result: Result<[u8; 16], Status>) {
        // A session that is over needs no telling.
        let _ = self.events.send(Event::Joined {
            save,
            serial: self.serial,
            result,
        });
    }
}
