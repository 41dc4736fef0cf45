//! The compatible surface: `/save_snapshot`, `/restore_snapshot`, `/list_snapshots`,
//! `/get_snapshot_info` and `/delete_snapshot`.
//!
//! Field names are those that clients of snapshot servers send and read; replies have more fields,
//! and failures have status codes of their own instead of 200. With several selectors in one
//! request `snapshot_id` goes first, then `branch_name`, then `turn_number`.

use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use serde::Serialize;
use serde_json::Value;

use super::answers::{Deleted, Described, Listed, Metadata, Restored, Saved};
use super::bodies::{DeleteBody, InfoBody, ListBody, RestoreBody, SaveBody};
use super::body::Fields;
use super::error::{ApiError, ErrorType};
use super::generate;
use super::guard::Admitted;
use super::names::checked;
use super::selected::one_of;
use super::state::Shared;
use crate::gateway::{Fields as Object, Resume};
use crate::service::{
    DeleteRequest, InfoRequest, ListReply, ListRequest, RestoreReply, RestoreRequest, SaveReply,
    SaveRequest, Selector, ServiceError,
};
use crate::types::{SnapshotId, TokenId};

/// The longest pin that a client may ask for.
const PIN_MAX_SECONDS: f64 = 86_400.0;

/// Keep the state of a conversation.
#[utoipa::path(
    post,
    path = "/save_snapshot",
    tag = "compatible",
    request_body = SaveBody,
    responses((status = 200, body = Saved))
)]
pub async fn save(State(shared): State<Shared>, mut body: Fields) -> Result<Json<Saved>, ApiError> {
    let (select, durable, label) = save_of(&mut body)?;
    let request = SaveRequest {
        durable,
        timeout: shared.patience(),
        ..SaveRequest::new(select)
    };
    let SaveReply {
        mut row,
        written_bytes,
    } = shared.service()?.save(request).await?;
    let message = match row.durable {
        true => "Saved; it survives a crash",
        false => "Saved in memory; it goes to disk later",
    };
    // What somebody else called it is not what this client did.
    row.label = None;
    Ok(Json(Saved {
        success: true,
        message,
        label,
        written_bytes,
        row,
    }))
}

/// Bring a snapshot into RAM, or generate from it.
#[utoipa::path(
    post,
    path = "/restore_snapshot",
    tags = ["compatible", "generate"],
    request_body = RestoreBody,
    responses((status = 200, body = Restored))
)]
pub async fn restore(
    State(shared): State<Shared>,
    Extension(admitted): Extension<Admitted>,
    mut body: Fields,
) -> Result<Response, Response> {
    let RestoreOrder {
        select,
        pin_for,
        request_id,
        create,
    } = restore_of(&mut body).map_err(ApiError::into_response)?;
    if let Some(create) = create {
        return resume(&shared, admitted, select, request_id, create).await;
    }
    let reply = restore_only(&shared, select, pin_for, request_id).await;
    reply
        .map(Json::into_response)
        .map_err(ApiError::into_response)
}

/// An answer from a snapshot and what follows it.
async fn resume(
    shared: &Shared,
    admitted: Admitted,
    select: Selector,
    request_id: Option<String>,
    create: Create,
) -> Result<Response, Response> {
    let Create {
        continuation,
        max_new_tokens,
        sampling,
        append_to,
        namespace,
    } = create;
    let resume = Resume {
        request_id: admitted.id.clone(),
        select,
        continuation,
        max_new_tokens,
        sampling,
        append_to,
        rid: None,
        namespace,
    };
    let gateway = shared.gateway().map_err(generate::refusal)?;
    let resumed = gateway.resume(resume).await;
    let (row, mut more) = resumed.map_err(generate::refusal)?;
    if let Some(more) = more.as_object_mut() {
        more.insert(
            "request_id".into(),
            request_id.unwrap_or(admitted.id).into(),
        );
        more.insert("mamba_pool_idx".into(), Value::Null);
        more.insert("fill_ids".into(), Value::Null);
        let text = format!(
            "Created new request from snapshot at {} tokens",
            row.boundary
        );
        more.insert("message".into(), text.into());
    }
    let reply = success(&row, more);
    reply
        .map(Json::into_response)
        .map_err(ApiError::into_response)
}

async fn restore_only(
    shared: &Shared,
    select: Selector,
    pin_for: Option<Duration>,
    request_id: Option<String>,
) -> Result<Json<Restored>, ApiError> {
    let rid = select.rid.clone();
    let reply = shared
        .service()?
        .restore(RestoreRequest { select, pin_for })
        .await?;
    let RestoreReply {
        mut row,
        from_tier,
        moved_bytes,
        restore_time_ms,
        pinned_until,
    } = reply;
    let message = format!(
        "{} tokens are in RAM for the next request, from tier {from_tier}",
        row.boundary
    );
    let own = row.rid.take();
    Ok(Json(Restored {
        success: true,
        message,
        rid: rid.or(own),
        request_id,
        mamba_pool_idx: None,
        output_ids: None,
        output_text: None,
        from_tier: Some(from_tier),
        moved_bytes: Some(moved_bytes),
        restore_time_ms: Some(restore_time_ms),
        pinned_until: Some(pinned_until),
        row,
    }))
}

/// The snapshots of a conversation. One that nobody knows has none.
#[utoipa::path(
    post,
    path = "/list_snapshots",
    tag = "compatible",
    request_body = ListBody,
    responses((status = 200, body = Listed))
)]
pub async fn list(
    State(shared): State<Shared>,
    mut body: Fields,
) -> Result<Json<Listed>, ApiError> {
    let request = list_of(&mut body)?;
    // A conversation that nobody knows has no snapshots: clients ask before there is one.
    let ListReply { snapshots, total } = match shared.service()?.list(request) {
        Err(ServiceError::NotFound { .. }) => ListReply::default(),
        reply => reply?,
    };
    Ok(Json(Listed {
        success: true,
        snapshots: snapshots.into_iter().map(Metadata::from).collect(),
        total,
    }))
}

/// One snapshot, with its tokens.
#[utoipa::path(
    post,
    path = "/get_snapshot_info",
    tag = "compatible",
    request_body = InfoBody,
    responses((status = 200, body = Described))
)]
pub async fn info(
    State(shared): State<Shared>,
    mut body: Fields,
) -> Result<Json<Described>, ApiError> {
    let (select, with_tokens) = info_of(&mut body)?;
    let row = shared.service()?.info(InfoRequest {
        select,
        with_tokens,
    })?;
    Ok(Json(Described {
        success: true,
        metadata: Metadata::from(row),
    }))
}

/// Delete a turn, a branch, a snapshot, or a whole conversation, from every tier.
#[utoipa::path(
    post,
    path = "/delete_snapshot",
    tag = "compatible",
    request_body = DeleteBody,
    responses((status = 200, body = Deleted))
)]
pub async fn delete(
    State(shared): State<Shared>,
    mut body: Fields,
) -> Result<Json<Deleted>, ApiError> {
    let (select, whole) = delete_of(&mut body)?;
    let service = shared.service()?;
    let conversation = service.name_selected(&select);
    let reply = service.delete(DeleteRequest { select, whole }).await;
    shared.deleted(conversation.as_deref());
    let reply = reply?;
    Ok(Json(Deleted {
        success: true,
        message: told(reply.names),
        deleted: true,
        reply,
    }))
}

/// What was deleted, for people.
fn told(names: usize) -> String {
    match names {
        0 => "Deleted; no turn or branch had it".to_owned(),
        1 => "1 turn or branch deleted".to_owned(),
        more => format!("{more} turns and branches deleted"),
    }
}

/// `success` and the fields of a row, with more fields that win over them.
pub(super) fn success(row: &impl Serialize, more: Value) -> Result<Json<Value>, ApiError> {
    let mut all = serde_json::to_value(row)
        .map_err(|error| ApiError::new(ErrorType::Internal, error.to_string()))?;
    if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
        all.extend(more);
        all.insert("success".into(), Value::Bool(true));
    }
    Ok(Json(all))
}

// === What the bodies say ===

/// Which snapshot to save, whether at once to disk, and what the client calls it.
pub(super) fn save_of(body: &mut Fields) -> Result<(Selector, bool, Option<String>), ApiError> {
    // A name that a client makes up for its snapshot is a label: it selects nothing.
    let id: Option<String> = body.take("snapshot_id")?;
    let snapshot = id.as_ref().and_then(|text| text.parse::<SnapshotId>().ok());
    let label = id.filter(|_| snapshot.is_none());
    let durable = body.take("durable")?.unwrap_or(true);
    let select = selector(body, snapshot, Need::Conversation)?;
    Ok((select, durable, label))
}

/// What [`restore_of`] finds.
#[derive(Debug)]
pub(super) struct RestoreOrder {
    pub select: Selector,
    /// How long it stays in RAM.
    pub pin_for: Option<Duration>,
    /// The client's name of the request.
    pub request_id: Option<String>,
    /// Generate from it.
    pub create: Option<Create>,
}

/// What to generate.
#[derive(Debug)]
pub(super) struct Create {
    pub continuation: Vec<TokenId>,
    pub max_new_tokens: u32,
    pub sampling: Option<Object>,
    pub append_to: Option<String>,
    /// `cache_salt`, `extra_key` and `lora_path`, as far as they are said.
    pub namespace: Object,
}

/// Which snapshot to bring into RAM, or to generate from.
pub(super) fn restore_of(body: &mut Fields) -> Result<RestoreOrder, ApiError> {
    let create_new_request: Option<bool> = body.take("create_new_request")?;
    let continuation_ids: Option<Vec<TokenId>> = body.take("continuation_ids")?;
    let max_new_tokens: Option<u32> = body.take("max_new_tokens")?;
    let request_id: Option<String> = body.take("request_id")?;
    let sampling: Option<Object> = body.take("sampling_params")?;
    let append_to: Option<String> = body.take("append_to")?;
    let mut namespace = Object::new();
    for name in ["cache_salt", "extra_key", "lora_path"] {
        if let Some(text) = body.take::<String>(name)? {
            namespace.insert(name.to_owned(), text.into());
        }
    }
    let pin_seconds: Option<f64> = body.take("pin_seconds")?;
    let snapshot = snapshot_id(body)?;
    let select = selector(body, snapshot, Need::Conversation)?;
    let create = match (
        create_new_request.unwrap_or(false),
        continuation_ids,
        max_new_tokens,
    ) {
        (false, None, None) => None,
        (false, ..) => {
            return Err(ApiError::invalid(
                "`continuation_ids` and `max_new_tokens` need `create_new_request`",
            ));
        }
        (true, Some(continuation), Some(max_new_tokens)) => Some(Create {
            continuation,
            max_new_tokens,
            sampling,
            append_to,
            namespace,
        }),
        (true, ..) => {
            return Err(ApiError::invalid(
                "`create_new_request` needs `continuation_ids` and `max_new_tokens`",
            ));
        }
    };
    let pin_for = match pin_seconds {
        None => None,
        Some(seconds) if (0.0..=PIN_MAX_SECONDS).contains(&seconds) => {
            Some(Duration::from_secs_f64(seconds))
        }
        Some(_) => {
            return Err(ApiError::invalid(
                "`pin_seconds` is not between 0 and 86400",
            ));
        }
    };
    Ok(RestoreOrder {
        select,
        pin_for,
        request_id,
        create,
    })
}

/// Which part of which list.
pub(super) fn list_of(body: &mut Fields) -> Result<ListRequest, ApiError> {
    let conversation_id = checked("conversation_id", body.take("conversation_id")?)?;
    let session = checked("session_id", body.take("session_id")?)?;
    let conversation_id = one_of("conversation_id", conversation_id, "session_id", session)?;
    if conversation_id.is_none() {
        return Err(ApiError::invalid("`conversation_id` is needed"));
    }
    Ok(ListRequest {
        tenant: checked("tenant", body.take("tenant")?)?,
        conversation_id,
        limit: body.take("limit")?.unwrap_or(0),
        offset: body.take("offset")?.unwrap_or(0),
        ..ListRequest::default()
    })
}

/// Which snapshot to tell of, and whether with its tokens.
pub(super) fn info_of(body: &mut Fields) -> Result<(Selector, bool), ApiError> {
    let with_tokens = body.take("with_tokens")?.unwrap_or(true);
    let snapshot = snapshot_id(body)?;
    Ok((selector(body, snapshot, Need::One)?, with_tokens))
}

/// What to delete, and whether all of the conversation.
pub(super) fn delete_of(body: &mut Fields) -> Result<(Selector, bool), ApiError> {
    let whole = body.take("whole")?.unwrap_or(false);
    let snapshot = snapshot_id(body)?;
    let need = if whole { Need::Conversation } else { Need::One };
    Ok((selector(body, snapshot, need)?, whole))
}

/// What a request has to name.
#[derive(Copy, Clone, PartialEq, Eq)]
pub(super) enum Need {
    /// A conversation, a request or a snapshot; without a turn or branch the latest is meant.
    Conversation,
    /// Exactly one snapshot: a request names its own.
    One,
}

/// The field `snapshot_id` where it selects.
pub(super) fn snapshot_id(body: &mut Fields) -> Result<Option<SnapshotId>, ApiError> {
    let Some(text) = body.take::<String>("snapshot_id")? else {
        return Ok(None);
    };
    text.parse()
        .map(Some)
        .map_err(|_| ApiError::invalid("`snapshot_id` is not a UUID"))
}

/// The selector in a body.
pub(super) fn selector(
    body: &mut Fields,
    snapshot_id: Option<SnapshotId>,
    need: Need,
) -> Result<Selector, ApiError> {
    let turn_number: Option<u32> = body.take("turn_number")?;
    if turn_number == Some(0) {
        return Err(ApiError::invalid("`turn_number` counts from 1"));
    }
    let mut name = |field: &str| checked(field, body.take(field)?);
    let (conversation, session) = (name("conversation_id")?, name("session_id")?);
    let select = Selector {
        tenant: name("tenant")?,
        rid: name("rid")?,
        conversation_id: one_of("conversation_id", conversation, "session_id", session)?,
        turn_number,
        branch_name: name("branch_name")?,
        snapshot_id,
    };
    if select.snapshot_id.is_some() {
        return Ok(select);
    }
    if select.rid.is_none() && select.conversation_id.is_none() {
        return Err(ApiError::invalid("`conversation_id` or `rid` is needed"));
    }
    let named = select.turn_number.is_some() || select.branch_name.is_some();
    if need == Need::One && !named && select.rid.is_none() {
        return Err(ApiError::invalid(
            "`turn_number`, `branch_name`, `rid` or `snapshot_id` is needed",
        ));
    }
    Ok(select)
}
