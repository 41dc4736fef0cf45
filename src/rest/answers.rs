//! Answers of the compatible surface.

use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::service::{DeleteReply, SnapshotRow};
use crate::types::TierKind;

/// A snapshot as the compatible surface describes it: a row, and fields that only a server which
/// owns the pools could fill.
#[derive(Debug, Serialize, ToSchema)]
pub struct Metadata {
    #[serde(flatten)]
    pub(super) row: SnapshotRow,
    /// Always null.
    pub(super) mamba_pool_idx: Option<u32>,
    /// Always null.
    pub(super) req_pool_idx: Option<u32>,
    /// The model's kind.
    #[schema(value_type = Object)]
    pub(super) layer_config: Value,
    /// Always null.
    #[schema(value_type = Option<Object>)]
    pub(super) active_tool_context: Option<Value>,
}

/// A snapshot that is kept.
#[derive(Debug, Serialize, ToSchema)]
pub struct Saved {
    /// Always `true`.
    pub(super) success: bool,
    /// What became of it, for people.
    pub(super) message: &'static str,
    /// What the client called it, where `snapshot_id` was no snapshot's id.
    pub(super) label: Option<String>,
    /// Payload bytes that were written to disk for this; 0 when all was there.
    pub(super) written_bytes: u64,
    #[serde(flatten)]
    pub(super) row: SnapshotRow,
}

/// A snapshot that is in RAM; with `create_new_request` the answer that was generated from it, too.
#[derive(Debug, Serialize, ToSchema)]
pub struct Restored {
    /// Always `true`.
    pub(super) success: bool,
    /// What happened, for people.
    pub(super) message: String,
    /// Its request; of what was generated, the new one.
    pub(super) rid: Option<String>,
    /// As the client said, or else the request's own.
    pub(super) request_id: Option<String>,
    /// Always null.
    pub(super) mamba_pool_idx: Option<u32>,
    /// The tokens that were generated.
    pub(super) output_ids: Option<Vec<u32>>,
    /// The text that was generated.
    pub(super) output_text: Option<String>,
    /// The lowest tier that something came from. Not of an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from_tier: Option<TierKind>,
    /// Bytes that were moved; 0: all was in RAM. Not of an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) moved_bytes: Option<u64>,
    /// Time it took. Not of an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) restore_time_ms: Option<f64>,
    /// Pinned until then, unix time in seconds. Not of an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pinned_until: Option<f64>,
    #[serde(flatten)]
    pub(super) row: SnapshotRow,
}

/// A page of snapshots.
#[derive(Debug, Serialize, ToSchema)]
pub struct Listed {
    /// Always `true`.
    pub(super) success: bool,
    /// Turns ascending, then branches by name.
    pub(super) snapshots: Vec<Metadata>,
    /// How many there are in all.
    pub(super) total: usize,
}

/// One snapshot.
#[derive(Debug, Serialize, ToSchema)]
pub struct Described {
    /// Always `true`.
    pub(super) success: bool,
    /// The snapshot.
    pub(super) metadata: Metadata,
}

/// What is gone.
#[derive(Debug, Serialize, ToSchema)]
pub struct Deleted {
    /// Always `true`.
    pub(super) success: bool,
    /// What happened, for people.
    pub(super) message: String,
    /// Always `true`.
    pub(super) deleted: bool,
    #[serde(flatten)]
    pub(super) reply: DeleteReply,
}

// === impl Metadata ===

impl From<SnapshotRow> for Metadata {
    fn from(row: SnapshotRow) -> Self {
        Metadata {
            row,
            mamba_pool_idx: None,
            req_pool_idx: None,
            layer_config: json!({ "model_type": "hybrid" }),
            active_tool_context: None,
        }
    }
}
