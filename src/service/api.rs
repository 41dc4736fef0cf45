//! Requests and replies of the service: plain data, the same for REST, gRPC and tests.
//!
//! Names of fields that clients of snapshot servers already know are kept (`conversation_id`,
//! `turn_number`, `timestamp`, `token_count`, `model_name`, `branch_name`, `parent_snapshot`,
//! `fill_ids`); the others are ours.

use std::time::Duration;

use serde::Serialize;

use crate::types::{
    BootId, Fingerprint, InstanceId, SessionId, SnapshotId, TierKind, TokenId, TransferMode,
};

/// Names one snapshot, or the newest of a conversation.
///
/// `snapshot_id` alone is enough. Otherwise one of `rid` and `conversation_id` is needed (either is
/// also tried as the other); then `branch_name`, or `turn_number`, or, with neither, the latest by
/// time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// Tenant of the conversation. Default: none.
    pub tenant: Option<String>,
    /// Request id, as the inference server knows it.
    pub rid: Option<String>,
    /// Conversation: the `session_id` of its requests, or the rid of a request without one.
    pub conversation_id: Option<String>,
    /// Turn, counted from 1.
    pub turn_number: Option<u32>,
    /// Named branch of the conversation.
    pub branch_name: Option<String>,
    /// The snapshot itself.
    pub snapshot_id: Option<SnapshotId>,
}

/// Keeps the state of a conversation.
///
/// With both `rid` and `conversation_id`, the state is that of the request, and it becomes a turn
/// of the conversation (`turn_number`, or the next one).
#[derive(Clone, Debug)]
pub struct SaveRequest {
    /// What to save. `branch_name` gives the snapshot that name, which also keeps it from eviction.
    pub select: Selector,
    /// Wait until it is durable. Default: `true`.
    pub durable: bool,
    /// How long to wait for saves in flight and for the disk. Default: 30 s.
    pub timeout: Duration,
}

/// A snapshot that is kept.
#[derive(Clone, Debug, Serialize)]
pub struct SaveReply {
    /// The snapshot, with `boundary` and `tokens_after_boundary`.
    #[serde(flatten)]
    pub row: SnapshotRow,
    /// Payload bytes that this request caused to be written to disk; 0 when all was there.
    pub written_bytes: u64,
}

/// Brings a snapshot into RAM and keeps it there for the next request.
#[derive(Clone, Debug, Default)]
pub struct RestoreRequest {
    /// What to restore.
    pub select: Selector,
    /// How long to keep it in RAM. Default: the configured `pin_for` (5 min).
    pub pin_for: Option<Duration>,
}

/// A snapshot that is in RAM and pinned.
#[derive(Clone, Debug, Serialize)]
pub struct RestoreReply {
    /// The snapshot, after the promotion.
    #[serde(flatten)]
    pub row: SnapshotRow,
    /// The lowest tier that something came from.
    pub from_tier: TierKind,
    /// Bytes that were moved (0: all was in RAM).
    pub moved_bytes: u64,
    /// Time it took.
    pub restore_time_ms: f64,
    /// Pinned until then, unix time in seconds.
    pub pinned_until: f64,
}

/// Lists snapshots.
#[derive(Clone, Debug, Default)]
pub struct ListRequest {
    /// Tenant of the conversation. Default: none.
    pub tenant: Option<String>,
    /// Only of this conversation (or rid): turns ascending, then branches by name. `None`: every
    /// stored snapshot, newest first.
    pub conversation_id: Option<String>,
    /// At most so many rows; 0: the default of 1000.
    pub limit: usize,
    /// Skip so many rows.
    pub offset: usize,
}

/// Rows of a list.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ListReply {
    /// The rows asked for.
    pub snapshots: Vec<SnapshotRow>,
    /// How many there are in all.
    pub total: usize,
}

/// Describes one snapshot.
#[derive(Clone, Debug, Default)]
pub struct InfoRequest {
    /// Which.
    pub select: Selector,
    /// Also give the token ids (`fill_ids`).
    pub with_tokens: bool,
}

/// Deletes one turn, one branch, one snapshot, or a whole conversation.
#[derive(Clone, Debug, Default)]
pub struct DeleteRequest {
    /// Which. Without a turn, branch or snapshot, `whole` must be set.
    pub select: Selector,
    /// The whole conversation with all its turns and branches.
    pub whole: bool,
}

/// What a deletion removed.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DeleteReply {
    /// Snapshots that are gone. A snapshot that another turn or branch names stays and is not here.
    pub snapshots: Vec<SnapshotId>,
    /// Turns and branches that are gone.
    pub names: usize,
    /// Objects that nothing refers to any longer, removed from every tier.
    pub objects: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// One snapshot as a turn or branch of a conversation.
#[derive(Clone, Debug, Serialize)]
pub struct SnapshotRow {
    /// The snapshot.
    pub snapshot_id: SnapshotId,
    /// Conversation that names it; `None`: no conversation does.
    pub conversation_id: Option<String>,
    /// Turn, counted from 1.
    pub turn_number: Option<u32>,
    /// Branch name.
    pub branch_name: Option<String>,
    /// The request whose tokens these are.
    pub rid: Option<String>,
    /// When the turn finished, or else when the snapshot was made; unix time in seconds.
    pub timestamp: f64,
    /// When the snapshot was made; unix time in seconds.
    pub created_at: f64,
    /// Tokens that the snapshot holds: the same as `boundary`, and the length of `fill_ids`.
    pub token_count: u32,
    /// Token count at which the state was taken.
    pub boundary: u32,
    /// Tokens of the turn past the boundary: they are prefilled again.
    pub tokens_after_boundary: u32,
    /// For people.
    pub model_name: String,
    /// Identity of the model.
    pub fingerprint: Fingerprint,
    /// The deepest stored snapshot that this one extends.
    pub parent_snapshot: Option<SnapshotId>,
    /// The highest tier that holds all of it.
    pub tier: TierKind,
    /// Bytes of the state and of all KV from token 0, shared ones included.
    pub size_bytes: u64,
    /// It survives a crash.
    pub durable: bool,
    /// It is kept from eviction now (by name, by a pin, or by a restore).
    pub pinned: bool,
    /// What somebody called it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Token ids of `[0, boundary)`, only when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fill_ids: Option<Vec<TokenId>>,
}

/// One conversation.
#[derive(Clone, Debug, Serialize)]
pub struct ConversationRow {
    /// Its name.
    pub conversation_id: String,
    /// Its tenant.
    pub tenant: Option<String>,
    /// Finished turns.
    pub turns: u32,
    /// Names of its branches.
    pub branches: Vec<String>,
    /// Distinct snapshots that it names.
    pub snapshots: usize,
    /// Tokens of the latest turn.
    pub total_tokens: u32,
    /// Last change, unix time in seconds.
    pub updated_at: f64,
}

/// One tier.
#[derive(Clone, Debug, Serialize)]
pub struct TierRow {
    /// Which.
    pub tier: TierKind,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes that may be used.
    pub budget_bytes: u64,
    /// Objects in it.
    pub objects: u64,
    /// Whether files bypass the page cache, and who moves their bytes (`threads` or `uring`). Of the disk
    /// only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct_io: Option<bool>,
    /// See `direct_io`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_engine: Option<&'static str>,
    /// It takes writes, but for a lack of room: the disk did not fail.
    pub healthy: bool,
    /// It has no room and refuses writes; what it holds is served.
    pub full: bool,
    /// Since then, unix time in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_since: Option<f64>,
    /// Why it refuses writes: `full`, `quota`, `read_only`, `removed`, `failing` or `fsync`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<&'static str>,
    /// Since then, unix time in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble_since: Option<f64>,
    /// When it last refused a write, unix time in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure_at: Option<f64>,
    /// Why it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
}

/// One attached worker.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerRow {
    /// Its session.
    pub session: SessionId,
    /// The server it belongs to.
    pub instance: InstanceId,
    /// Attention tensor-parallel size and rank.
    pub attn_tp_size: u32,
    /// See `attn_tp_size`.
    pub attn_tp_rank: u32,
    /// For people.
    pub model_name: String,
    /// What its states are interchangeable with; `None` while its weights change.
    pub fingerprint: Option<Fingerprint>,
    /// Who copies between its ring and memory that the daemon reaches.
    pub mode: TransferMode,
    /// Why it is this mode, for people.
    pub mode_why: String,
    /// `host` or `cuda`.
    pub device: &'static str,
    /// Size of its staging ring.
    pub ring_bytes: u64,
    /// Tokens a page.
    pub page_size: u32,
    /// Weight epoch.
    pub epoch: u64,
    /// Peer process, when known.
    pub pid: Option<i32>,
    /// The ring is bound, the channel is open.
    pub bound: bool,
    /// Requests, saves and leases that are open.
    pub requests: usize,
    /// See `requests`.
    pub saves: usize,
    /// See `requests`.
    pub leases: usize,
    /// Versions that the worker told.
    pub versions: std::collections::BTreeMap<String, String>,
    /// Attached since, unix time in seconds.
    pub attached_at: f64,
    /// What the worker said of itself last.
    pub load: Option<WorkerLoad>,
    /// What its prefill and restores take.
    pub cost: CostRow,
}

/// What was learned of a worker's speed.
#[derive(Clone, Debug, Serialize)]
pub struct CostRow {
    /// Tokens a second of prefill; absent until it was seen often enough.
    pub prefill_tokens_per_second: Option<f64>,
    /// Bytes a second of copies between RAM and its ring; a guess before there were any.
    pub copy_bytes_per_second: f64,
    /// Bytes a second that reading from disk reaches; absent without a disk.
    pub disk_bytes_per_second: Option<f64>,
    /// From how many tokens on a restore is faster than their prefill.
    pub break_even_tokens: BreakEven,
}

/// Token counts, by the tier that holds the bytes; absent: not known, or never.
#[derive(Clone, Debug, Serialize)]
pub struct BreakEven {
    /// In RAM.
    pub ram: Option<u64>,
    /// On disk.
    pub disk: Option<u64>,
}

/// A worker's own numbers.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WorkerLoad {
    /// Scheduler ticks.
    pub ticks: u64,
    /// State slots that are free.
    pub slots_free: u64,
    /// State slots in all.
    pub slots_total: u64,
    /// KV rows that are free.
    pub rows_free: u64,
    /// KV rows in all.
    pub rows_total: u64,
    /// Running requests.
    pub running: u32,
    /// Waiting requests.
    pub waiting: u32,
    /// How long its hooks keep the scheduler thread, by name.
    pub hooks: std::collections::BTreeMap<String, HookRow>,
}

/// How long one hook took since the worker's start, in nanoseconds.
#[derive(Copy, Clone, Debug, Default, Serialize)]
pub struct HookRow {
    /// How often it was called.
    pub calls: u64,
    /// On average.
    pub mean_ns: u64,
    /// Upper bound of 99 of 100 calls.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// The daemon at a glance.
#[derive(Clone, Debug, Serialize)]
pub struct StatusReply {
    /// Version of the daemon.
    pub version: &'static str,
    /// This start of the daemon.
    pub boot: BootId,
    /// It can do its work.
    pub ready: bool,
    /// What it waits for, or what is broken.
    pub not_ready: Vec<String>,
    /// What is wrong although it does its work.
    pub warnings: Vec<String>,
    /// Attached workers.
    pub workers: usize,
    /// Snapshots that are visible.
    pub snapshots: usize,
    /// Conversations that are known.
    pub conversations: usize,
    /// Snapshots that wait to be written to disk.
    pub pending_writes: usize,
    /// Conversations whose names and turns wait to be written to disk.
    pub pending_names: usize,
    /// States of the save and restore machines in which something is held now (tests only).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
}

/// Something that happened, for those who watch.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A worker attached.
    Attached {
        /// Its session.
        session: SessionId,
        /// For people.
        model_name: String,
    },
    /// A worker is gone.
    Detached {
        /// Its session.
        session: SessionId,
        /// Why.
        reason: String,
    },
    /// A snapshot became visible.
    Saved {
        /// The snapshot.
        snapshot_id: SnapshotId,
        /// Its conversation.
        conversation_id: String,
        /// Its boundary.
        boundary: u32,
    },
    /// A snapshot became durable.
    Durable {
        /// The snapshot.
        snapshot_id: SnapshotId,
    },
    /// A worker took a snapshot.
    Restored {
        /// The snapshot.
        snapshot_id: SnapshotId,
        /// Tokens that were not prefilled again.
        reused: u32,
        /// The lowest tier that it came from.
        tier: TierKind,
    },
    /// A turn finished.
    Turn {
        /// Its conversation.
        conversation_id: String,
        /// Its number.
        turn_number: u32,
        /// Its snapshot.
        snapshot_id: Option<SnapshotId>,
    },
    /// A snapshot is gone.
    Removed {
        /// The snapshot.
        snapshot_id: SnapshotId,
        /// "deleted", "evicted", "quota", "expired" or "lost".
        reason: &'static str,
    },
}

// === impl SaveRequest ===

impl SaveRequest {
    /// Saves what `select` names, durably, within 30 s.
    pub fn new(select: Selector) -> Self {
        Self {
            select,
            durable: true,
            timeout: Duration::from_secs(30),
        }
    }
}

// === impl Selector ===

impl Selector {
    /// The latest of one conversation.
    pub fn conversation(name: impl Into<String>) -> Self {
        Self {
            conversation_id: Some(name.into()),
            ..Self::default()
        }
    }

    /// The latest of one request.
    pub fn rid(rid: impl Into<String>) -> Self {
        Self {
            rid: Some(rid.into()),
            ..Self::default()
        }
    }

    /// One snapshot.
    pub fn snapshot(id: SnapshotId) -> Self {
        Self {
            snapshot_id: Some(id),
            ..Self::default()
        }
    }
}
