//! The end of a save: its blocks become objects, and the snapshot becomes visible.
//!
//! # Order
//! Objects enter the RAM tier before the index names them, under the one lock of the service: no
//! lookup can find a snapshot that is not whole. Others may have stored the same meanwhile: whoever
//! commits first wins, and what the second brought is dropped.

use std::io;
use std::sync::Arc;

use super::Service;
use super::api::Event;
use super::conversations::{ConversationKey, Owner};
use super::core::{Core, Model, Record};
use super::limits::Over;
use super::room::Reservation;
use super::save_state::SaveState;
use crate::index::{IndexError, KvRef, NewSnapshot, ObjectEntry, Retain, TierSet, TreeKey};
use crate::pool::PrefixHasher;
use crate::proto::channel::layout::Status;
use crate::store::{
    Encoding, Object, ObjectMeta, Segment, SegmentHeader, StoreError, Stored, Tier, pieces,
};
use crate::types::{Namespace, ObjectKind, SnapshotId, TierKind, TokenId, TokenRange};

/// One piece of one shard that came in.
#[derive(Debug)]
pub(super) struct Block {
    /// Its tokens.
    pub range: TokenRange,
    /// Its bytes.
    pub segment: Arc<Segment>,
}

/// One shard of a save. All shards of a save have the same pieces.
#[derive(Debug)]
pub(super) struct ShardBlocks {
    /// The state.
    pub state: Arc<Segment>,
    /// KV of `[base, boundary)`, in order.
    pub kv: Vec<Block>,
}

/// A whole save.
#[derive(Debug)]
pub(super) struct Commit<'a> {
    pub model: &'a Arc<Model>,
    pub namespace: &'a Arc<Namespace>,
    pub key: TreeKey,
    /// Tokens up to the boundary.
    pub tokens: &'a [TokenId],
    /// KV before it was stored when the save was planned.
    pub base: u32,
    /// By rank.
    pub shards: Vec<ShardBlocks>,
    /// Room in the RAM tier for all of them.
    pub rooms: Vec<Reservation>,
    pub conversation: &'a ConversationKey,
    pub owner: Owner,
    pub rid: &'a Arc<str>,
}

/// Why a whole save did not become visible.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommitError {
    /// KV that was stored when the save was planned is gone.
    #[error("stored KV ends at token {stored}, {base} was counted on")]
    BaseLost { stored: u32, base: u32 },
    /// What its request goes on from was deleted.
    #[error("what the request goes on from was deleted")]
    Forgotten,
    /// The namespace holds its quota.
    #[error("the namespace holds {} of {} bytes, {} are needed", .0.used, .0.quota, .0.need)]
    Quota(Over),
    /// The RAM tier did not take it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The index did not take it.
    #[error(transparent)]
    Index(#[from] IndexError),
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

// === impl CommitError ===

impl CommitError {
    /// What the worker is told.
    pub fn status(&self) -> Status {
        match self {
            Self::BaseLost { .. } => Status::Lost,
            Self::Forgotten => Status::Cancelled,
            Self::Quota(_) | Self::Store(StoreError::NoSpace { .. }) => Status::NoRoom,
            Self::Index(IndexError::Log(error)) if is_full(error) => Status::NoRoom,
            Self::Store(_) | Self::Index(_) => Status::Failed,
        }
    }
}

// === impl Service ===

impl Service {
    /// Makes a whole save visible, or finds that it is.
    pub(super) fn commit(&self, mut commit: Commit<'_>) -> Result<SnapshotId, CommitError> {
        let mut hasher = PrefixHasher::new(commit.key.fingerprint, commit.key.namespace);
        hasher.update(commit.tokens);
        let now = self.clock.now();
        let mut core = self.core.lock();
        if core.conversations.is_forgotten(commit.owner) {
            drop(core);
            return Err(CommitError::Forgotten);
        }
        let rooms = std::mem::take(&mut commit.rooms);
        let id = match self.commit_locked(&mut core, &hasher, &commit, rooms) {
            Ok(id) => id,
            Err(error) => {
                drop(core);
                self.metrics.error("commit");
                return Err(error);
            }
        };
        let boundary = commit.boundary();
        let conversation = core.conversations.home(commit.owner, commit.conversation);
        let turn = core
            .conversations
            .saw(commit.conversation, commit.owner, id, boundary, now);
        drop(core);
        if let Some(turn_number) = turn {
            self.announce(Event::Turn {
                conversation_id: conversation.name.to_string(),
                turn_number,
                snapshot_id: Some(id),
            });
        }
        self.changed.notify_waiters();
        Ok(id)
    }

    fn commit_locked(
        &self,
        core: &mut Core,
        hasher: &PrefixHasher,
        commit: &Commit<'_>,
        rooms: Vec<Reservation>,
    ) -> Result<SnapshotId, CommitError> {
        let Commit {
            model,
            namespace,
            key,
            tokens,
            base,
            shards,
            ..
        } = commit;
        let boundary = commit.boundary();
        let now = self.clock.now();
        if let Some(id) = core.index.has_snapshot(key, tokens, boundary) {
            core.index.touch(&id, now);
            self.metrics.already_stored.inc();
            return Ok(id);
        }
        let stored = core.index.coverage(key, tokens).kv;
        if stored < *base {
            return Err(CommitError::BaseLost {
                stored,
                base: *base,
            });
        }
        // Pieces that others stored meanwhile are not kept a second time.
        let own = |shard: &ShardBlocks| -> Vec<Arc<Segment>> {
            let own = shard.kv.iter().filter(|block| block.range.end > stored);
            own.map(|block| Arc::clone(&block.segment)).collect()
        };
        let blocks = shards.iter().flat_map(|shard| &shard.kv);
        let start = blocks
            .filter(|block| block.range.end > stored)
            .map(|block| block.range.start)
            .min()
            .unwrap_or(boundary);
        let generation = core.next_generation();
        let ram = TierSet::of(&[TierKind::Ram]);
        let meta = |kind, range: TokenRange, generation| ObjectMeta {
            id: hasher.object(range.start, kind),
            kind,
            range,
            fingerprint: key.fingerprint,
            namespace: key.namespace,
            generation,
            shards: model.shards,
            pieces: pieces(&model.geometry, kind, range),
            encoding: Encoding::Raw,
        };
        let entry = |object: &Object| ObjectEntry {
            id: object.meta.id,
            kind: object.meta.kind,
            range: object.meta.range,
            bytes: object.bytes(),
            tiers: ram,
        };
        let mut fresh = Vec::with_capacity(2);
        let at = TokenRange::at(boundary);
        fresh.push(Object {
            meta: Arc::new(meta(ObjectKind::State, at, generation)),
            tokens: Arc::from([]),
            shards: shards
                .iter()
                .map(|shard| vec![Arc::clone(&shard.state)])
                .collect(),
        });
        let mut refs = core.index.kv_refs(key, tokens, start);
        if start < boundary {
            let range = TokenRange {
                start,
                end: boundary,
            };
            let object = Object {
                meta: Arc::new(meta(ObjectKind::Kv, range, generation)),
                tokens: tokens.get(start as usize..).unwrap_or_default().into(),
                shards: shards.iter().map(own).collect(),
            };
            refs.push(KvRef {
                object: object.meta.id,
                range,
                object_range: range,
            });
            fresh.push(object);
        }
        let need = fresh.iter().map(Object::bytes).fold(0, u64::saturating_add);
        // Others of the namespace may have come since the save was planned.
        if let Err(over) = self.check_quota(core, key, need) {
            self.metrics.limits.declined.inc();
            return Err(CommitError::Quota(over));
        }
        let mut put = Vec::with_capacity(2);
        let mut put_all = || {
            for object in &fresh {
                // If it is there, whoever brought it, it is the KV or the state of the same prefix.
                if let Stored::Written { .. } = self.store.ram.put(object)? {
                    put.push(object.meta.id);
                    self.seal(object);
                }
            }
            Ok::<(), StoreError>(())
        };
        if let Err(error) = Reservation::spend(rooms, &mut put_all) {
            self.drop_from_ram(core, &put);
            return Err(error.into());
        }
        let id = SnapshotId::new();
        let new = NewSnapshot {
            id,
            state: entry(fresh.first().expect("the state was pushed above")),
            kv: refs,
            new_objects: fresh.iter().skip(1).map(entry).collect(),
            created: now,
            durable: false,
            retain: Retain::Ordinary,
        };
        let inserted = match core.index.insert(key, tokens, new) {
            Ok(inserted) => inserted,
            Err(error) => {
                self.drop_from_ram(core, &put);
                return Err(error.into());
            }
        };
        self.drop_from_ram(core, &inserted.unused);
        let record = Record {
            model: Arc::clone(model),
            namespace: Arc::clone(namespace),
            state: SaveState::Visible,
            generation,
            parent: core.index.snapshot(&id).and_then(|info| info.parent),
            created: now,
            conversation: Some(core.conversations.home(commit.owner, commit.conversation)),
            rid: Some(Arc::clone(commit.rid)),
            written: 0,
            failure: None,
            waiters: 0,
        };
        core.know(model);
        core.records.insert(id, record);
        self.supersede(core, commit, id, boundary);
        self.keep(core, commit.conversation, commit.owner, id);
        let bytes = fresh.iter().map(Object::bytes).fold(0, u64::saturating_add);
        self.metrics
            .saved_tokens
            .inc_by(u64::from(boundary.saturating_sub(start)));
        self.metrics.saved_bytes.inc_by(bytes);
        self.metrics.saved_snapshots.inc();
        self.announce(Event::Saved {
            snapshot_id: id,
            conversation_id: commit.conversation.name.to_string(),
            boundary,
        });
        Ok(id)
    }

    /// Shallower snapshots that the same request made, and that nothing names, are not written any
    /// more.
    fn supersede(&self, core: &mut Core, commit: &Commit<'_>, id: SnapshotId, boundary: u32) {
        let mut next = core.index.snapshot(&id).and_then(|info| info.parent);
        while let Some(older) = next {
            let Some(info) = core.index.snapshot(&older) else {
                return;
            };
            let same = core.records.get(&older).is_some_and(|record| {
                record.rid.as_ref() == Some(commit.rid)
                    && record.conversation.as_ref() == Some(commit.conversation)
            });
            if !same || info.boundary >= boundary {
                return;
            }
            let waiting = core.queue.contains(&older);
            // A policy may have it wait for RAM's need of the room instead.
            let left = self.store.disk.is_some()
                && info.retain != Retain::Transient
                && core.records.get(&older).is_some_and(|record| {
                    record.state == SaveState::Visible && record.failure.is_none()
                });
            let named = core.conversations.is_named(older) || info.retain == Retain::Promised;
            let superseded = match waiting {
                _ if named => false,
                true => core.queue.cancel(&older),
                false => left,
            };
            if superseded {
                core.index.set_retain(&older, Retain::Transient);
                self.metrics.superseded.inc();
            }
            next = info.parent;
        }
    }

    /// Says in the blocks themselves what they hold.
    fn seal(&self, object: &Object) {
        for (shard, segments) in (0..).zip(&object.shards) {
            for (piece, segment) in (0..).zip(segments) {
                if let Some(header) = SegmentHeader::of(&object.meta, shard, piece) {
                    self.store.arena.seal(segment, &header);
                }
            }
        }
    }
}

// === impl Commit ===

impl Commit<'_> {
    fn boundary(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("a request's tokens are bounded by a u32")
    }
}
