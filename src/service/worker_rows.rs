//! A worker in a reply.

use serde::Serialize;
use utoipa::ToSchema;

use crate::types::{Fingerprint, InstanceId, SessionId, TransferMode};

/// One attached worker.
#[derive(Clone, Debug, Serialize, ToSchema)]
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
#[derive(Clone, Debug, Serialize, ToSchema)]
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
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct BreakEven {
    /// In RAM.
    pub ram: Option<u64>,
    /// On disk.
    pub disk: Option<u64>,
}

/// A worker's own numbers.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
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
#[derive(Copy, Clone, Debug, Default, Serialize, ToSchema)]
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
