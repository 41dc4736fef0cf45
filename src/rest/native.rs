//! The native surface, `/v1/…`: what the daemon holds and who is attached. Reading only; what
//! changes conversations is in [`super::conversations`].

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::Params;
use super::conversations::Segments;
use super::error::ApiError;
use super::names::checked;
use super::state::Shared;
use crate::service::{InfoRequest, ListRequest, Selector, SnapshotRow, StatusReply};

/// Rows of a page, when the client does not say.
const PAGE: usize = 100;
/// Rows of a page at most.
const PAGE_MAX: usize = 1000;

/// A part of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Page {
    limit: Option<usize>,
    offset: usize,
}

/// Which snapshots.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SnapshotFilter {
    conversation_id: Option<String>,
    tenant: Option<String>,
    limit: Option<usize>,
    offset: usize,
}

/// Whose conversations.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ConversationFilter {
    tenant: Option<String>,
    limit: Option<usize>,
    offset: usize,
}

/// `GET /v1/status`
pub async fn status(State(shared): State<Shared>) -> Result<Json<StatusReply>, ApiError> {
    Ok(Json(shared.service()?.status()))
}

/// `GET /v1/tiers`
pub async fn tiers(State(shared): State<Shared>) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({ "tiers": shared.service()?.tiers() })))
}

/// `GET /v1/namespaces?limit=&offset=`, those that hold most first.
pub async fn namespaces(
    State(shared): State<Shared>,
    Params(Page { limit, offset }): Params<Page>,
) -> Result<Json<Value>, ApiError> {
    let (namespaces, total) = shared.service()?.namespaces(rows(limit)?, offset);
    Ok(Json(json!({ "namespaces": namespaces, "total": total })))
}

/// `GET /v1/workers`
pub async fn workers(State(shared): State<Shared>) -> Result<Json<Value>, ApiError> {
    let service = shared.service()?;
    Ok(Json(
        json!({ "workers": service.workers(), "refused": service.refusals() }),
    ))
}

/// `GET /v1/conversations?tenant=&limit=&offset=`, last changed first.
pub async fn conversations(
    State(shared): State<Shared>,
    Params(filter): Params<ConversationFilter>,
) -> Result<Json<Value>, ApiError> {
    let ConversationFilter {
        tenant,
        limit,
        offset,
    } = filter;
    let (tenant, limit) = (checked("tenant", tenant)?, rows(limit)?);
    let service = shared.service()?;
    let (conversations, total) = service.conversations(tenant.as_deref(), limit, offset);
    Ok(Json(
        json!({ "conversations": conversations, "total": total }),
    ))
}

/// `GET /v1/snapshots?conversation_id=&tenant=&limit=&offset=`
pub async fn snapshots(
    State(shared): State<Shared>,
    Params(filter): Params<SnapshotFilter>,
) -> Result<Json<Value>, ApiError> {
    let SnapshotFilter {
        conversation_id,
        tenant,
        limit,
        offset,
    } = filter;
    let reply = shared.service()?.list(ListRequest {
        tenant: checked("tenant", tenant)?,
        conversation_id: checked("conversation_id", conversation_id)?,
        limit: rows(limit)?,
        offset,
    })?;
    Ok(Json(
        json!({ "snapshots": reply.snapshots, "total": reply.total }),
    ))
}

/// `GET /v1/snapshots/{snapshot_id}`
pub async fn snapshot(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
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
