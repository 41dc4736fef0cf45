//! Two turns or branches beside each other, in a reply.

use serde::Serialize;
use utoipa::ToSchema;

use crate::types::SnapshotId;

/// One side of a comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Compared {
    /// Its conversation, as it was asked for.
    pub conversation_id: String,
    /// Its turn; 0: a branch that is no turn's snapshot.
    pub turn_number: u32,
    /// How many tokens it has.
    pub tokens: u32,
    /// Its snapshot.
    pub snapshot_id: Option<SnapshotId>,
}

/// How two token streams stand to each other.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Relation {
    /// They are the same.
    Same,
    /// The first begins with all of the second.
    AExtendsB,
    /// The second begins with all of the first.
    BExtendsA,
    /// They part.
    Parted,
}

/// Two turns or branches beside each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Comparison {
    /// The first.
    pub a: Compared,
    /// The second.
    pub b: Compared,
    /// Tokens that both begin with: token number `common_tokens`, counted from 0, is the first that differs.
    pub common_tokens: u32,
    /// How they stand to each other.
    pub relation: Relation,
    /// The deepest snapshot that both go on from.
    pub common_snapshot: Option<SnapshotId>,
    /// Its boundary.
    pub common_boundary: u32,
}
