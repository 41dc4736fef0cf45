//! The native surface of conversations, `/v1/conversations/{conversation_id}/…`: look at one, fork
//! it, compare, delete; and what is noted of snapshots.
//!
//! Names in a path are percent-encoded, `/` as `%2F`. `conversation_id` may be any name of a
//! conversation: its `session_id`, or the rid of one of its requests. Everywhere `?tenant=` says whose
//! it is. What answers with a list takes `limit` and `offset`.

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::bodies::{ForkBody, MarkBody, PolicyBody, ToolCallBody};
use super::body::{Fields, Nothing, Params, check_escapes};
use super::error::ApiError;
use super::etag::IfMatch;
use super::names::checked;
use super::selected::{number, part, side, which};
use super::state::Shared;
use super::talk::{Beside, Done, Stream, TurnPage, Which, Whose};
use crate::service::{
    Comparison, ConversationView, DeleteReply, DeleteRequest, Expected, ForkRequest, MarkRequest,
    Policy, RulesRow, SHOWN_TURNS, SavingRules, Selector, SnapshotRow, TokenStream, TreeNode,
};
use crate::types::SnapshotId;

/// Turns of a page at most.
const PAGE_MAX: usize = 10_000;

/// The named parts of a path, decoded.
#[derive(Debug)]
pub struct Segments<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Segments<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        check_escapes(parts.uri.path())?;
        match Path::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(Segments(value)),
            Err(error) => Err(ApiError::invalid(error.body_text())),
        }
    }
}

/// A conversation: its turns, branches and forks.
#[utoipa::path(
    get,
    path = "/v1/conversations/{conversation_id}",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), TurnPage),
    responses((status = 200, body = ConversationView))
)]
pub async fn show(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(page): Params<TurnPage>,
) -> Result<Json<ConversationView>, ApiError> {
    let TurnPage {
        tenant,
        limit,
        offset,
    } = page;
    let limit = match limit.unwrap_or(SHOWN_TURNS) {
        limit @ 1..=PAGE_MAX => limit,
        _ => {
            let text = format!("`limit` is not between 1 and {PAGE_MAX}");
            return Err(ApiError::invalid(text));
        }
    };
    let select = conversation(id, tenant)?;
    let service = shared.service()?;
    Ok(Json(service.conversation(&select, limit, offset)?))
}

/// Delete all of a conversation, from every tier.
#[utoipa::path(
    delete,
    path = "/v1/conversations/{conversation_id}",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Whose, ("if-match" = Option<String>, Header, description = "Only if the conversation is still as it was seen, by its `ETag`")),
    responses((status = 200, body = DeleteReply))
)]
pub async fn delete(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
    IfMatch(expected): IfMatch,
) -> Result<Json<DeleteReply>, ApiError> {
    let select = conversation(id, tenant)?;
    remove(&shared, select, true, &expected).await
}

/// Delete a turn.
#[utoipa::path(
    delete,
    path = "/v1/conversations/{conversation_id}/turns/{turn_number}",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), ("turn_number" = u32, Path, description = "Counted from 1", minimum = 1), Whose, ("if-match" = Option<String>, Header, description = "Only if the conversation is still as it was seen, by its `ETag`")),
    responses((status = 200, body = DeleteReply))
)]
pub async fn delete_turn(
    State(shared): State<Shared>,
    Segments((id, turn)): Segments<(String, String)>,
    Params(Whose { tenant }): Params<Whose>,
    IfMatch(expected): IfMatch,
) -> Result<Json<DeleteReply>, ApiError> {
    let select = Selector {
        turn_number: Some(number("turn_number", &turn)?),
        ..conversation(id, tenant)?
    };
    remove(&shared, select, false, &expected).await
}

/// Delete a branch.
#[utoipa::path(
    delete,
    path = "/v1/conversations/{conversation_id}/branches/{branch_name}",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), ("branch_name" = String, Path, description = "Its name"), Whose, ("if-match" = Option<String>, Header, description = "Only if the conversation is still as it was seen, by its `ETag`")),
    responses((status = 200, body = DeleteReply))
)]
pub async fn delete_branch(
    State(shared): State<Shared>,
    Segments((id, branch)): Segments<(String, String)>,
    Params(Whose { tenant }): Params<Whose>,
    IfMatch(expected): IfMatch,
) -> Result<Json<DeleteReply>, ApiError> {
    let select = Selector {
        branch_name: checked("branch_name", Some(branch))?,
        ..conversation(id, tenant)?
    };
    remove(&shared, select, false, &expected).await
}

/// All that parted from one another around a conversation.
#[utoipa::path(
    get,
    path = "/v1/conversations/{conversation_id}/tree",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Whose),
    responses((status = 200, body = TreeNode))
)]
pub async fn tree(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
) -> Result<Json<TreeNode>, ApiError> {
    let select = conversation(id, tenant)?;
    Ok(Json(shared.service()?.tree(&select)?))
}

/// Prompt and answer, to the last token; without a word those of the latest turn.
#[utoipa::path(
    get,
    path = "/v1/conversations/{conversation_id}/tokens",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Which),
    responses((status = 200, body = Stream))
)]
pub async fn tokens(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(which): Params<Which>,
) -> Result<Json<Stream>, ApiError> {
    let Which {
        tenant,
        turn,
        branch,
    } = which;
    let select = part(conversation(id, tenant)?, turn, branch)?;
    let stream = shared.service()?.token_stream(&select).await?;
    let TokenStream {
        tokens,
        turn,
        boundary,
        snapshot,
        rid,
        messages,
        namespace: _,
    } = stream;
    Ok(Json(Stream {
        turn_number: turn,
        boundary,
        snapshot_id: snapshot,
        rid: rid.to_string(),
        token_count: tokens.len(),
        token_ids: tokens,
        messages,
    }))
}

/// Say where two turns or branches part.
#[utoipa::path(
    get,
    path = "/v1/conversations/{conversation_id}/compare",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Beside),
    responses((status = 200, body = Comparison))
)]
pub async fn compare(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(beside): Params<Beside>,
) -> Result<Json<Comparison>, ApiError> {
    let Beside { tenant, a, b, with } = beside;
    let own = conversation(id, tenant.clone())?;
    let other = match with {
        Some(with) => conversation(with, tenant)?,
        None => own.clone(),
    };
    let (a, b) = (side("a", own, a)?, side("b", other, b)?);
    Ok(Json(shared.service()?.compare(&a, &b).await?))
}

/// Let a new conversation begin with the turns up to one of this.
#[utoipa::path(
    post,
    path = "/v1/conversations/{conversation_id}/fork",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Whose),
    request_body = ForkBody,
    responses((status = 201, body = ConversationView))
)]
pub async fn fork(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
    mut body: Fields,
) -> Result<(StatusCode, Json<ConversationView>), ApiError> {
    let new_id = checked("new_id", body.take("new_id")?)?;
    let new_id = new_id.ok_or_else(|| ApiError::invalid("`new_id` is needed"))?;
    let tenant = body.take("tenant")?.or(tenant);
    let (turn, branch) = which(&mut body)?;
    let request = ForkRequest {
        select: part(conversation(id, tenant)?, turn, branch)?,
        new_id,
        timeout: shared.patience(),
    };
    let view = shared.service()?.fork(request).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

/// Which states of a conversation go to disk, and whether these rules are its own.
#[utoipa::path(
    get,
    path = "/v1/conversations/{conversation_id}/policy",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Whose),
    responses((status = 200, body = RulesRow))
)]
pub async fn policy(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
) -> Result<Json<RulesRow>, ApiError> {
    Ok(Json(shared.service()?.rules(&conversation(id, tenant)?)?))
}

/// Give a conversation rules of its own; also before its first turn.
#[utoipa::path(
    put,
    path = "/v1/conversations/{conversation_id}/policy",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Whose, ("if-match" = Option<String>, Header, description = "Only if it is still as it was seen, by its `ETag`")),
    request_body = PolicyBody,
    responses((status = 200, body = RulesRow))
)]
pub async fn set_policy(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
    IfMatch(expected): IfMatch,
    mut body: Fields,
) -> Result<Json<RulesRow>, ApiError> {
    let service = shared.service()?;
    let default = service.config().saving.rules();
    let policy: Option<Policy> = body.take("policy")?;
    let seconds: Option<f64> = body.take("min_interval_seconds")?;
    let min_interval = seconds.map(Duration::try_from_secs_f64).transpose();
    let min_interval = min_interval
        .map_err(|_| ApiError::invalid("`min_interval_seconds` is not a time from 0"))?;
    let rules = SavingRules {
        policy: policy.ok_or_else(|| ApiError::invalid("`policy` is needed"))?,
        every_n_turns: body.take("every_n_turns")?.unwrap_or(default.every_n_turns),
        min_interval: min_interval.unwrap_or(default.min_interval),
    };
    let select = conversation(id, tenant)?;
    Ok(Json(service.set_rules(&select, Some(rules), &expected)?))
}

/// As configured from now on.
#[utoipa::path(
    delete,
    path = "/v1/conversations/{conversation_id}/policy",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Whose, ("if-match" = Option<String>, Header, description = "Only if it is still as it was seen, by its `ETag`")),
    responses((status = 200, body = RulesRow))
)]
pub async fn unset_policy(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
    IfMatch(expected): IfMatch,
) -> Result<Json<RulesRow>, ApiError> {
    let select = conversation(id, tenant)?;
    let rules = shared.service()?.set_rules(&select, None, &expected)?;
    Ok(Json(rules))
}

/// Say that a turn calls a tool.
#[utoipa::path(
    post,
    path = "/v1/conversations/{conversation_id}/tool_call",
    tag = "conversations",
    params(("conversation_id" = String, Path, description = "Any of its names"), Whose),
    request_body = ToolCallBody,
    responses((status = 200, body = Done))
)]
pub async fn tool_call(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
    mut body: Fields,
) -> Result<Json<Done>, ApiError> {
    let select = Selector {
        rid: checked("rid", body.take("rid")?)?,
        ..part(conversation(id, tenant)?, which(&mut body)?.0, None)?
    };
    shared.service()?.calls_tool(&select)?;
    Ok(Json(Done { success: true }))
}

/// Pin or label a snapshot.
#[utoipa::path(
    patch,
    path = "/v1/snapshots/{snapshot_id}",
    tag = "snapshots",
    params(("snapshot_id" = SnapshotId, Path, description = "Its id"), ("if-match" = Option<String>, Header, description = "Only if it is still as it was seen, by its `ETag`")),
    request_body = MarkBody,
    responses((status = 200, body = SnapshotRow))
)]
pub async fn mark(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    _: Params<Nothing>,
    IfMatch(expected): IfMatch,
    mut body: Fields,
) -> Result<Json<SnapshotRow>, ApiError> {
    let label = match body.has("label") {
        true => Some(body.take("label")?),
        false => None,
    };
    let request = MarkRequest {
        snapshot: snapshot(&id)?,
        pinned: body.take("pinned")?,
        label,
        timeout: shared.patience(),
    };
    if let (None, None) = (&request.pinned, &request.label) {
        return Err(ApiError::invalid("`pinned` or `label` is needed"));
    }
    Ok(Json(shared.service()?.mark_seen(request, &expected).await?))
}

/// Delete a snapshot with all its names.
#[utoipa::path(
    delete,
    path = "/v1/snapshots/{snapshot_id}",
    tag = "snapshots",
    params(("snapshot_id" = SnapshotId, Path, description = "Its id"), ("if-match" = Option<String>, Header, description = "Only if it is still as it was seen, by its `ETag`")),
    responses((status = 200, body = DeleteReply))
)]
pub async fn delete_snapshot(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    _: Params<Nothing>,
    IfMatch(expected): IfMatch,
) -> Result<Json<DeleteReply>, ApiError> {
    let select = Selector::snapshot(snapshot(&id)?);
    remove(&shared, select, false, &expected).await
}

async fn remove(
    shared: &Shared,
    select: Selector,
    whole: bool,
    expected: &Expected,
) -> Result<Json<DeleteReply>, ApiError> {
    let service = shared.service()?;
    let conversation = service.name_selected(&select);
    let request = DeleteRequest { select, whole };
    let reply = service.delete_seen(request, expected).await;
    // Also if the disk did not answer in time: the names are gone.
    shared.deleted(conversation.as_deref());
    Ok(Json(reply?))
}

/// The conversation of a path.
pub(super) fn conversation(id: String, tenant: Option<String>) -> Result<Selector, ApiError> {
    Ok(Selector {
        tenant: checked("tenant", tenant)?,
        conversation_id: checked("conversation_id", Some(id))?,
        ..Selector::default()
    })
}

fn snapshot(id: &str) -> Result<SnapshotId, ApiError> {
    id.parse()
        .map_err(|_| ApiError::invalid("The snapshot id is not a UUID"))
}
