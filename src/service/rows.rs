//! What is shown: snapshots, conversations, tiers, workers, the daemon itself. Reads only.

use std::cmp::Reverse;

use super::Service;
use super::api::{
    ConversationRow, ConversationsRequest, InfoRequest, ListReply, ListRequest, Selector,
    SnapshotRow, StatusReply, TierRow, WorkerRow,
};
use super::conversations::{ConversationKey, Need, Turn};
use super::core::Core;
use super::error::ServiceError;
use super::metrics::{ByReason, Name};
use super::refusals::RefusalRow;
use super::save_state::SaveState;
use super::workers::seconds;
use crate::index::SnapshotInfo;
use crate::store::{Ailment, IoEngine, Tier, Usage};
use crate::types::{Millis, SnapshotId, TierKind};

/// Rows of a list when nothing is said.
const DEFAULT_ROWS: usize = 1000;

/// Which name of a snapshot a row is about.
#[derive(Clone, Debug, Default)]
pub(super) struct Called {
    pub key: Option<ConversationKey>,
    pub turn: Option<u32>,
    pub branch: Option<String>,
}

// === impl Service ===

impl Service {
    /// Snapshots of a conversation, or all.
    ///
    /// # Errors
    /// `NotFound` if there is no such conversation.
    pub fn list(&self, request: ListRequest) -> Result<ListReply, ServiceError> {
        let ListRequest {
            tenant,
            conversation_id,
            tier,
            durable,
            pinned,
            label,
            limit,
            offset,
        } = request;
        let limit = if limit == 0 { DEFAULT_ROWS } else { limit };
        let now = self.clock.now();
        let core = self.core.lock();
        let asked = tier.is_some() || durable.is_some() || pinned.is_some() || label.is_some();
        let wanted = |id: &SnapshotId| {
            let Some(info) = core.index.snapshot(id).filter(|_| asked) else {
                return !asked;
            };
            let its = || core.conversations.mark_of(*id)?.label.as_deref();
            tier.is_none_or(|tier| tier == tier_of(&info))
                && durable.is_none_or(|durable| durable == core.is_durable(id))
                && pinned.is_none_or(|pinned| pinned == is_pinned(&info, now))
                && label.as_deref().is_none_or(|label| its() == Some(label))
        };
        let (called, total) = match conversation_id {
            Some(name) => {
                let select = Selector {
                    tenant,
                    ..Selector::conversation(name)
                };
                let mut all = of_conversation(&core, &core.conversations.key_of(&select)?);
                all.retain(|(id, _)| wanted(id));
                let total = all.len();
                (all.into_iter().skip(offset).take(limit).collect(), total)
            }
            None => everything(&core, tenant.as_deref(), wanted, offset, limit),
        };
        let rows = called.into_iter();
        let snapshots = rows
            .filter_map(|(id, called)| self.row(&core, id, &called))
            .collect();
        Ok(ListReply { snapshots, total })
    }

    /// Conversations, last changed first, and how many there are of those asked for.
    pub fn conversations(&self, request: &ConversationsRequest) -> (Vec<ConversationRow>, usize) {
        let ConversationsRequest {
            tenant,
            prefix,
            updated_after,
            limit,
            offset,
        } = request;
        let limit = if *limit == 0 { DEFAULT_ROWS } else { *limit };
        let core = self.core.lock();
        let all = core.conversations.iter().filter(|(key, it)| {
            let begins = |prefix: &String| key.name.starts_with(prefix.as_str());
            key.tenant.as_deref() == tenant.as_deref()
                && prefix.as_ref().is_none_or(begins)
                && updated_after.is_none_or(|after| seconds(it.updated) > after)
        });
        let mut all: Vec<_> = all.collect();
        let total = all.len();
        all.sort_by(|(a, one), (b, other)| (other.updated, a).cmp(&(one.updated, b)));
        let page = all.into_iter().skip(*offset).take(limit);
        let rows = page.map(|(key, it)| ConversationRow {
            conversation_id: key.name.to_string(),
            tenant: key.tenant.as_deref().map(str::to_owned),
            turns: u32::try_from(it.turns.len()).unwrap_or(u32::MAX),
            branches: it.branches.keys().cloned().collect(),
            snapshots: it.snapshots().len(),
            total_tokens: it.turns.last().map_or(0, |turn| turn.total_tokens),
            updated_at: seconds(it.updated),
        });
        (rows.collect(), total)
    }

    /// One snapshot.
    ///
    /// # Errors
    /// `NotFound`, `NoState`, `Invalid`; `Data` if the token ids cannot be read.
    pub fn info(&self, request: InfoRequest) -> Result<SnapshotRow, ServiceError> {
        let InfoRequest {
            select,
            with_tokens,
        } = request;
        let core = self.core.lock();
        let (id, called) = existing(&core, &select)?;
        let mut row = self
            .row(&core, id, &called)
            .ok_or_else(|| unknown_snapshot(&id))?;
        if with_tokens {
            let mut tokens = Vec::with_capacity(row.boundary as usize);
            if !core.index.read_tokens(&id, &mut tokens) {
                return Err(ServiceError::Data(format!("the tokens of snapshot {id}")));
            }
            row.fill_ids = Some(tokens);
        }
        Ok(row)
    }

    /// The daemon at a glance.
    pub fn status(&self) -> StatusReply {
        let mut not_ready = self.latches.reasons();
        if self.stopping() {
            not_ready.push("stopping".to_owned());
        }
        let core = self.core.lock();
        StatusReply {
            version: env!("CARGO_PKG_VERSION"),
            boot: self.boot,
            ready: not_ready.is_empty(),
            not_ready,
            warnings: core.queue.trouble.tell(),
            workers: self.workers.len(),
            snapshots: core.records.len(),
            conversations: core.conversations.len(),
            pending_writes: core.queue.len(),
            pending_names: core.conversations.dirty() + core.queue.writing_refs,
            held: self.hold.held(),
        }
    }

    /// The tiers that there are.
    pub fn tiers(&self) -> Vec<TierRow> {
        let row = |tier, usage: Usage, healthy| TierRow {
            tier,
            used_bytes: usage.bytes,
            budget_bytes: usage.budget,
            objects: usage.objects,
            min_free_bytes: None,
            direct_io: None,
            io_engine: None,
            healthy,
            full: false,
            full_since: None,
            trouble: None,
            trouble_since: None,
            last_failure_at: None,
            last_failure: None,
        };
        let ram = row(TierKind::Ram, self.store.ram.usage(), true);
        let disk = self.store.disk.as_ref();
        let disk = disk.map(|disk| {
            let (usage, poisoned) = (disk.usage(), disk.poisoned().is_some());
            let core = self.core.lock();
            let ill = core.queue.trouble.ill();
            let full = ill.filter(|ill| ill.what.lacks_room());
            TierRow {
                min_free_bytes: self.store.disk_min_free(),
                direct_io: Some(disk.direct()),
                io_engine: Some(disk.engine().as_str()),
                full: full.is_some(),
                full_since: full.map(|full| seconds(full.since)),
                trouble: ill.map(|ill| ill.what.as_str()),
                trouble_since: ill.map(|ill| seconds(ill.since)),
                last_failure_at: ill.map(|ill| seconds(ill.last)),
                last_failure: ill.map(|ill| ill.error.clone()),
                ..row(
                    TierKind::Disk,
                    usage,
                    !poisoned && (ill.is_none() || full.is_some()),
                )
            }
        });
        std::iter::once(ram).chain(disk).collect()
    }

    /// The attached workers, in the order in which they came.
    pub fn workers(&self) -> Vec<WorkerRow> {
        let disk = self.store.disk.as_ref().map(|_| self.promoter.speed());
        self.workers
            .all()
            .iter()
            .map(|worker| worker.row(disk))
            .collect()
    }

    /// The last attaches that were refused, the newest last.
    pub fn refusals(&self) -> Vec<RefusalRow> {
        self.refusals.rows()
    }

    pub(super) fn row(&self, core: &Core, id: SnapshotId, called: &Called) -> Option<SnapshotRow> {
        let info = core.index.snapshot(&id)?;
        let record = core.records.get(&id)?;
        let conversation = called
            .key
            .as_ref()
            .and_then(|key| core.conversations.get(key));
        let turn = called
            .turn
            .zip(conversation)
            .and_then(|(turn, it)| it.turn(turn));
        let created = seconds(info.created);
        let mark = core.conversations.mark_of(id);
        let label = mark.and_then(|mark| mark.label.as_deref());
        let beyond = turn.map_or(0, |turn| turn.total_tokens.saturating_sub(info.boundary));
        let rid = turn.map(|turn| turn.rid.to_string());
        Some(SnapshotRow {
            snapshot_id: id,
            conversation_id: called.key.as_ref().map(|key| key.name.to_string()),
            turn_number: called.turn,
            branch_name: called.branch.clone(),
            rid: rid.or_else(|| record.rid.as_deref().map(str::to_owned)),
            timestamp: turn.map_or(created, |turn| seconds(turn.finished)),
            created_at: created,
            token_count: info.boundary,
            boundary: info.boundary,
            tokens_after_boundary: beyond,
            model_name: record.model.name.clone(),
            fingerprint: record.model.fingerprint,
            parent_snapshot: info.parent,
            tier: tier_of(&info),
            size_bytes: info.state_bytes.saturating_add(info.kv_bytes),
            durable: record.state == SaveState::Durable,
            pinned: is_pinned(&info, self.clock.now()),
            pinned_by: pinned_by(core, &info, self.clock.now()),
            label: label.map(str::to_owned),
            fill_ids: None,
        })
    }

    /// Tells the levels of tiers and the like to the metrics.
    pub(super) fn refresh_levels(&self) {
        for tier in self.tiers() {
            let label = tier.tier.into();
            self.metrics
                .tier_bytes
                .get_or_create(&label)
                .set(tier.used_bytes);
            self.metrics
                .tier_budget
                .get_or_create(&label)
                .set(tier.budget_bytes);
            self.metrics
                .tier_objects
                .get_or_create(&label)
                .set(tier.objects);
            if tier.tier == TierKind::Disk {
                self.metrics.disk_full.set(u64::from(tier.full));
                let direct = tier.direct_io == Some(true);
                self.metrics.disk_direct.set(u64::from(direct));
                let uring = tier.io_engine == Some(IoEngine::Uring.as_str());
                self.metrics.disk_uring.set(u64::from(uring));
                for ailment in Ailment::ALL {
                    let reason = Name(ailment.as_str());
                    let level = self
                        .metrics
                        .disk_trouble
                        .get_or_create(&ByReason { reason });
                    level.set(u64::from(tier.trouble == Some(ailment.as_str())));
                }
            }
        }
        self.metrics.arena_bytes.set(self.store.arena.used());
        let counts = self.store.counts();
        self.metrics.catalog_lost.set(counts.catalog_lost);
        for (reason, count) in counts.quarantined {
            let label = super::metrics::ByReason {
                reason: super::metrics::Name(reason.as_str()),
            };
            self.metrics.quarantined.get_or_create(&label).set(count);
        }
        let core = self.core.lock();
        self.refresh_namespaces(&core);
        self.metrics.snapshots.set(core.records.len() as u64);
        self.metrics
            .conversations
            .set(core.conversations.len() as u64);
        self.metrics.pending_writes.set(core.queue.len() as u64);
    }
}

/// The snapshot that a selector names, and how it names it.
pub(super) fn existing(
    core: &Core,
    select: &Selector,
) -> Result<(SnapshotId, Called), ServiceError> {
    if let Some(id) = select.snapshot_id {
        if !core.records.contains_key(&id) {
            return Err(unknown_snapshot(&id));
        }
        return Ok((id, called(core, id)));
    }
    let found = core.conversations.find(select, Need::Existing)?;
    let name = found.key.name.to_string();
    let id = found.snapshot.ok_or(ServiceError::NoState { name })?;
    let called = Called {
        key: Some(found.key),
        turn: found.turn,
        branch: found.branch,
    };
    Ok((id, called))
}

/// Some name of a snapshot: its latest turn, or a branch, or that of the request that made it.
pub(super) fn called(core: &Core, id: SnapshotId) -> Called {
    let Some(key) = core.conversations.named_by(id).first() else {
        let record = core.records.get(&id);
        let key = record.and_then(|record| record.conversation.clone());
        return Called {
            key,
            turn: None,
            branch: None,
        };
    };
    let conversation = core.conversations.get(key);
    let turns = conversation.map_or(&[][..], |it| it.turns.as_slice());
    let turn = turns.iter().rev().find(|turn| turn.snapshot == Some(id));
    let branches = conversation.into_iter().flat_map(|it| &it.branches);
    let branch = branches.into_iter().find(|(_, other)| **other == id);
    Called {
        key: Some(key.clone()),
        turn: turn.map(|turn| turn.number),
        branch: branch
            .filter(|_| turn.is_none())
            .map(|(name, _)| name.clone()),
    }
}

/// Turns ascending, then branches by name.
fn of_conversation(core: &Core, key: &ConversationKey) -> Vec<(SnapshotId, Called)> {
    let Some(conversation) = core.conversations.get(key) else {
        return Vec::new();
    };
    let turn = |turn: &Turn| {
        let called = Called {
            key: Some(key.clone()),
            turn: Some(turn.number),
            branch: None,
        };
        Some((turn.snapshot?, called))
    };
    let branch = |(name, id): (&String, &SnapshotId)| {
        let called = Called {
            key: Some(key.clone()),
            turn: None,
            branch: Some(name.clone()),
        };
        (*id, called)
    };
    let turns = conversation.turns.iter().filter_map(turn);
    turns
        .chain(conversation.branches.iter().map(branch))
        .collect()
}

/// A page of the wanted snapshots of a tenant, newest first, and how many there are.
fn everything(
    core: &Core,
    tenant: Option<&str>,
    wanted: impl Fn(&SnapshotId) -> bool,
    offset: usize,
    limit: usize,
) -> (Vec<(SnapshotId, Called)>, usize) {
    let mut all: Vec<_> = core
        .records
        .iter()
        .filter(|(id, record)| record.namespace.tenant.as_deref() == tenant && wanted(id))
        .map(|(id, record)| Reverse((record.created, *id)))
        .collect();
    let total = all.len();
    // Only what comes up to the end of the page is put in order.
    let end = offset.saturating_add(limit);
    if end < total {
        all.select_nth_unstable(end);
        all.truncate(end);
    }
    all.sort_unstable();
    let page = all
        .into_iter()
        .skip(offset)
        .map(|Reverse((_, id))| (id, called(core, id)));
    (page.collect(), total)
}

/// The highest tier that holds all of it.
pub(super) fn tier_of(info: &SnapshotInfo) -> TierKind {
    let whole = info.state_tiers.both(info.kv_tiers);
    let lowest = TierKind::ALL.into_iter().rev();
    let scattered = || {
        let mut tiers =
            lowest.filter(|tier| info.state_tiers.contains(*tier) || info.kv_tiers.contains(*tier));
        tiers.next().unwrap_or(TierKind::Disk)
    };
    whole.iter().next().unwrap_or_else(scattered)
}

fn is_pinned(info: &SnapshotInfo, now: Millis) -> bool {
    info.names > 0 || info.pinned_until.is_some_and(|until| until > now)
}

fn pinned_by(core: &Core, info: &SnapshotInfo, now: Millis) -> Vec<&'static str> {
    let mark = core.conversations.mark_of(info.id);
    let record = core.records.get(&info.id);
    let holds = [
        ("pin", mark.is_some_and(|mark| mark.pinned)),
        ("branch", core.conversations.is_branch(info.id)),
        (
            "restore",
            info.pinned_until.is_some_and(|until| until > now),
        ),
        ("save", record.is_some_and(|record| record.waiters > 0)),
    ];
    let holds = holds.into_iter().filter(|(_, holds)| *holds);
    holds.map(|(name, _)| name).collect()
}

pub(super) fn unknown_snapshot(id: &SnapshotId) -> ServiceError {
    ServiceError::NotFound {
        what: "snapshot",
        name: id.to_string(),
    }
}
