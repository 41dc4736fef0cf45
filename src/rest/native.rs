//! The native surface, `/v1/…`: what the daemon holds and who is attached. What changes
//! conversations is in [`super::conversations`].

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::body::{Fields, Nothing, Params};
use super::conversations::Segments;
use super::error::ApiError;
use super::names::checked;
use super::state::Shared;
use crate::service::{
    BudgetChange, ConversationRow, ConversationsRequest, InfoRequest, ListReply, ListRequest,
    NamespaceRow, RefusalRow, Selector, SnapshotRow, StatusReply, TierRow, WorkerRow,
};
use crate::types::{SnapshotId, TierKind};

/// Rows of a page, when the client does not say.
const PAGE: usize = 100;
/// Rows of a page at most.
const PAGE_MAX: usize = 1000;

/// A part of a list.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Page {
    /// At most so many rows. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Skip so many rows.
    offset: usize,
}

/// Which conversations.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ConversationFilter {
    /// Of this tenant; of all without one.
    #[param(min_length = 1, max_length = 255)]
    tenant: Option<String>,
    /// Its name begins so.
    #[param(min_length = 1, max_length = 255)]
    prefix: Option<String>,
    /// It changed after this, unix time in seconds.
    updated_after: Option<f64>,
    /// At most so many rows. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Skip so many rows.
    offset: usize,
}

/// Which snapshots: those that all of it holds for.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SnapshotFilter {
    /// Only of this conversation: turns ascending, then branches by name. Without it every stored
    /// snapshot of the tenant, newest first.
    #[param(min_length = 1, max_length = 255)]
    conversation_id: Option<String>,
    /// Whose; without it those of nobody.
    #[param(min_length = 1, max_length = 255)]
    tenant: Option<String>,
    /// The highest tier that holds all of it.
    tier: Option<TierKind>,
    /// It survives a crash, or does not.
    durable: Option<bool>,
    /// It is kept from eviction now, or is not.
    pinned: Option<bool>,
    /// What somebody called it.
    label: Option<String>,
    /// At most so many rows. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Skip so many rows.
    offset: usize,
}

/// All tiers.
#[derive(Debug, Serialize, ToSchema)]
pub struct Tiers {
    /// Fastest first.
    tiers: Vec<TierRow>,
}

/// A page of namespaces.
#[derive(Debug, Serialize, ToSchema)]
pub struct Namespaces {
    /// Those that hold most first.
    namespaces: Vec<NamespaceRow>,
    /// How many there are in all.
    total: usize,
}

/// All workers.
#[derive(Debug, Serialize, ToSchema)]
pub struct Workers {
    /// Those attached, in the order in which they came.
    workers: Vec<WorkerRow>,
    /// The last attaches that were refused, the newest last.
    refused: Vec<RefusalRow>,
}

/// A page of conversations.
#[derive(Debug, Serialize, ToSchema)]
pub struct Conversations {
    /// Last changed first.
    conversations: Vec<ConversationRow>,
    /// How many there are of those asked for.
    total: usize,
}

/// The daemon at a glance.
#[utoipa::path(get, path = "/v1/status", tag = "daemon", responses((status = 200, body = StatusReply)))]
pub async fn status(
    State(shared): State<Shared>,
    _: Params<Nothing>,
) -> Result<Json<StatusReply>, ApiError> {
    Ok(Json(shared.service()?.status()))
}

/// What the tiers hold and may hold.
#[utoipa::path(get, path = "/v1/tiers", tag = "tiers", responses((status = 200, body = Tiers)))]
pub async fn tiers(
    State(shared): State<Shared>,
    _: Params<Nothing>,
) -> Result<Json<Tiers>, ApiError> {
    let tiers = shared.service()?.tiers();
    Ok(Json(Tiers { tiers }))
}

/// Change budgets, until the next start.
///
/// All that are named, or none. In force at once: what is too much leaves, told as `evicted`; the
/// change itself is told as `budget_changed`. Not written down: the next start takes what the
/// configuration says.
#[utoipa::path(
    patch,
    path = "/v1/tiers",
    tag = "tiers",
    request_body = BudgetChange,
    responses((status = 200, body = Tiers))
)]
pub async fn set_budgets(
    State(shared): State<Shared>,
    _: Params<Nothing>,
    body: Fields,
) -> Result<Json<Tiers>, ApiError> {
    let change: BudgetChange = body.whole()?;
    let tiers = shared.service()?.set_budgets(change)?;
    Ok(Json(Tiers { tiers }))
}

/// Who holds how much, those that hold most first.
#[utoipa::path(
    get,
    path = "/v1/namespaces",
    tag = "daemon",
    params(Page),
    responses((status = 200, body = Namespaces))
)]
pub async fn namespaces(
    State(shared): State<Shared>,
    Params(Page { limit, offset }): Params<Page>,
) -> Result<Json<Namespaces>, ApiError> {
    let (namespaces, total) = shared.service()?.namespaces(rows(limit)?, offset);
    Ok(Json(Namespaces { namespaces, total }))
}

/// The workers that are attached, and those that were refused.
#[utoipa::path(get, path = "/v1/workers", tag = "daemon", responses((status = 200, body = Workers)))]
pub async fn workers(
    State(shared): State<Shared>,
    _: Params<Nothing>,
) -> Result<Json<Workers>, ApiError> {
    let service = shared.service()?;
    Ok(Json(Workers {
        workers: service.workers(),
        refused: service.refusals(),
    }))
}

/// List conversations, last changed first.
#[utoipa::path(
    get,
    path = "/v1/conversations",
    tag = "conversations",
    params(ConversationFilter),
    responses((status = 200, body = Conversations))
)]
pub async fn conversations(
    State(shared): State<Shared>,
    Params(filter): Params<ConversationFilter>,
) -> Result<Json<Conversations>, ApiError> {
    let ConversationFilter {
        tenant,
        prefix,
        updated_after,
        limit,
        offset,
    } = filter;
    if updated_after.is_some_and(|after| !after.is_finite()) {
        return Err(ApiError::invalid("`updated_after` is not a time"));
    }
    let (conversations, total) = shared.service()?.conversations(&ConversationsRequest {
        tenant: checked("tenant", tenant)?,
        prefix,
        updated_after,
        limit: rows(limit)?,
        offset,
    });
    Ok(Json(Conversations {
        conversations,
        total,
    }))
}

/// List snapshots.
#[utoipa::path(
    get,
    path = "/v1/snapshots",
    tag = "snapshots",
    params(SnapshotFilter),
    responses((status = 200, body = ListReply))
)]
pub async fn snapshots(
    State(shared): State<Shared>,
    Params(filter): Params<SnapshotFilter>,
) -> Result<Json<ListReply>, ApiError> {
    let SnapshotFilter {
        conversation_id,
        tenant,
        tier,
        durable,
        pinned,
        label,
        limit,
        offset,
    } = filter;
    let reply = shared.service()?.list(ListRequest {
        tenant: checked("tenant", tenant)?,
        conversation_id: checked("conversation_id", conversation_id)?,
        tier,
        durable,
        pinned,
        label,
        limit: rows(limit)?,
        offset,
    })?;
    Ok(Json(reply))
}

/// One snapshot.
#[utoipa::path(
    get,
    path = "/v1/snapshots/{snapshot_id}",
    tag = "snapshots",
    params(("snapshot_id" = SnapshotId, Path, description = "Its id")),
    responses((status = 200, body = SnapshotRow))
)]
pub async fn snapshot(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    _: Params<Nothing>,
) -> Result<Json<SnapshotRow>, ApiError> {
    let id = id
        .parse()
        .map_err(|_| ApiError::invalid("The snapshot id is not a UUID"))?;
    let request = InfoRequest {
        select: Selector::snapshot(id),
        with_tokens: false,
    };
    Ok(Json(shared.service()?.info(request)?))
}

fn rows(limit: Option<usize>) -> Result<usize, ApiError> {
    match limit.unwrap_or(PAGE) {
        rows @ 1..=PAGE_MAX => Ok(rows),
        _ => Err(ApiError::invalid(format!(
            "`limit` is not between 1 and {PAGE_MAX}"
        ))),
    }
}
