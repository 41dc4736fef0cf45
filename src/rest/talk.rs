//! What is asked of conversations in query strings, and answered in shapes of this surface alone.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::types::{SnapshotId, TokenId};

/// Whose it is.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Whose {
    /// Whose conversation it is. Default: nobody's.
    #[param(min_length = 1, max_length = 255)]
    pub(super) tenant: Option<String>,
}

/// Which turns.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct TurnPage {
    /// Whose conversation it is. Default: nobody's.
    #[param(min_length = 1, max_length = 255)]
    pub(super) tenant: Option<String>,
    /// At most so many turns. Default: 1000.
    #[param(minimum = 1, maximum = 10000)]
    pub(super) limit: Option<usize>,
    /// Skip so many turns.
    pub(super) offset: usize,
}

/// What to compare.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Beside {
    /// Whose conversation it is. Default: nobody's.
    #[param(min_length = 1, max_length = 255)]
    pub(super) tenant: Option<String>,
    /// One side: `N` or `turn:N`, `NAME` or `branch:NAME`; the latest turn without it.
    pub(super) a: Option<String>,
    /// The other.
    pub(super) b: Option<String>,
    /// The conversation that `b` is of, if it is another.
    pub(super) with: Option<String>,
}

/// Whose tokens.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Which {
    /// Whose conversation it is. Default: nobody's.
    #[param(min_length = 1, max_length = 255)]
    pub(super) tenant: Option<String>,
    /// The turn, counted from 1; the latest without it.
    #[param(minimum = 1)]
    pub(super) turn: Option<u32>,
    /// The branch.
    pub(super) branch: Option<String>,
}

/// All tokens up to the end of a turn.
#[derive(Debug, Serialize, ToSchema)]
pub struct Stream {
    /// The turn, counted from 1; 0: a snapshot that is no turn's.
    pub(super) turn_number: u32,
    /// How many of the tokens the snapshot holds; 0 without one.
    pub(super) boundary: u32,
    /// The deepest snapshot on them.
    pub(super) snapshot_id: Option<SnapshotId>,
    /// The request that the turn was; empty if that is not known.
    pub(super) rid: String,
    /// How many they are.
    pub(super) token_count: usize,
    /// All of them.
    pub(super) token_ids: Vec<TokenId>,
    /// What was said, if that is known of every turn.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(super) messages: Option<Vec<Value>>,
}

/// It is done.
#[derive(Debug, Serialize, ToSchema)]
pub struct Done {
    /// Always `true`.
    pub(super) success: bool,
}
