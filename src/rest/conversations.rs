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
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::body::{Fields, Params};
use super::error::ApiError;
use super::names::checked;
use super::state::Shared;
use crate::service::{
    Comparison, ConversationView, DeleteReply, DeleteRequest, ForkRequest, MarkRequest, Policy,
    SavingRules, Selector, SnapshotRow, TokenStream, TreeNode,
};
use crate::types::SnapshotId;

/// Turns of a page, when the client does not say.
const PAGE: usize = 1000;
/// Turns of a page at most.
const PAGE_MAX: usize = 10_000;

/// The named parts of a path, decoded.
#[derive(Debug)]
pub struct Segments<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Segments<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(Segments(value)),
            Err(error) => Err(ApiError::invalid(error.body_text())),
        }
    }
}

/// Whose it is.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Whose {
    pub(super) tenant: Option<String>,
}

/// Which turns.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct TurnPage {
    tenant: Option<String>,
    limit: Option<usize>,
    offset: usize,
}

/// What to compare.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Beside {
    tenant: Option<String>,
    a: Option<String>,
    b: Option<String>,
    with: Option<String>,
}

/// Whose tokens.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Which {
    tenant: Option<String>,
    turn: Option<u32>,
    branch: Option<String>,
}

/// `GET /v1/conversations/{conversation_id}?limit=&offset=`: its turns, branches and forks.
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
    let limit = match limit.unwrap_or(PAGE) {
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

/// `DELETE /v1/conversations/{conversation_id}`: all of it, from every tier.
pub async fn delete(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
) -> Result<Json<DeleteReply>, ApiError> {
    let select = conversation(id, tenant)?;
    remove(&shared, select, true).await
}

/// `DELETE /v1/conversations/{conversation_id}/turns/{turn_number}`
pub async fn delete_turn(
    State(shared): State<Shared>,
    Segments((id, turn)): Segments<(String, String)>,
    Params(Whose { tenant }): Params<Whose>,
) -> Result<Json<DeleteReply>, ApiError> {
    let select = Selector {
        turn_number: Some(number("turn_number", &turn)?),
        ..conversation(id, tenant)?
    };
    remove(&shared, select, false).await
}

/// `DELETE /v1/conversations/{conversation_id}/branches/{branch_name}`
pub async fn delete_branch(
    State(shared): State<Shared>,
    Segments((id, branch)): Segments<(String, String)>,
    Params(Whose { tenant }): Params<Whose>,
) -> Result<Json<DeleteReply>, ApiError> {
    let select = Selector {
        branch_name: checked("branch_name", Some(branch))?,
        ..conversation(id, tenant)?
    };
    remove(&shared, select, false).await
}

/// `GET /v1/conversations/{conversation_id}/tree`: all that parted from one another around it.
pub async fn tree(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
) -> Result<Json<TreeNode>, ApiError> {
    let select = conversation(id, tenant)?;
    Ok(Json(shared.service()?.tree(&select)?))
}

/// `GET /v1/conversations/{conversation_id}/tokens?turn=&branch=`: prompt and answer, to the last
/// token; without a word those of the latest turn.
pub async fn tokens(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(which): Params<Which>,
) -> Result<Json<Value>, ApiError> {
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
    Ok(Json(json!({
        "turn_number": turn,
        "boundary": boundary,
        "snapshot_id": snapshot,
        "rid": &*rid,
        "token_count": tokens.len(),
        "token_ids": tokens,
        "messages": messages,
    })))
}

/// `GET /v1/conversations/{conversation_id}/compare?a=&b=&with=`: `a` and `b` are `N` or `turn:N`, or
/// `NAME` or `branch:NAME`, or absent for the latest turn; with `with`, `b` is of that conversation.
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

/// `POST /v1/conversations/{conversation_id}/fork` with `new_id`, and `turn` (`turn_number`) or `branch`
/// (`branch_name`): a
/// conversation of that name begins with the turns up to that one. 201.
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

/// `GET /v1/conversations/{conversation_id}/policy`: which of its states are written, and whether these
/// rules are its own.
pub async fn policy(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
) -> Result<Json<Value>, ApiError> {
    let (rules, own) = shared.service()?.rules(&conversation(id, tenant)?)?;
    Ok(Json(told(&rules, own)))
}

/// `PUT /v1/conversations/{conversation_id}/policy` with `policy`, and `every_n_turns` and
/// `min_interval_seconds` if they are not as configured; also before its first turn.
pub async fn set_policy(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
    mut body: Fields,
) -> Result<Json<Value>, ApiError> {
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
    service.set_rules(&conversation(id, tenant)?, Some(rules))?;
    Ok(Json(told(&rules, true)))
}

/// `DELETE /v1/conversations/{conversation_id}/policy`: as configured from now on.
pub async fn unset_policy(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
) -> Result<Json<Value>, ApiError> {
    let service = shared.service()?;
    service.set_rules(&conversation(id, tenant)?, None)?;
    Ok(Json(told(&service.config().saving.rules(), false)))
}

/// `POST /v1/conversations/{conversation_id}/tool_call` with `rid` or `turn`: that turn, or without a
/// word the latest, calls a tool.
pub async fn tool_call(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
    Params(Whose { tenant }): Params<Whose>,
    mut body: Fields,
) -> Result<Json<Value>, ApiError> {
    let select = Selector {
        rid: checked("rid", body.take("rid")?)?,
        ..part(conversation(id, tenant)?, which(&mut body)?.0, None)?
    };
    shared.service()?.calls_tool(&select)?;
    Ok(Json(json!({ "success": true })))
}

fn told(rules: &SavingRules, own: bool) -> Value {
    json!({
        "policy": rules.policy,
        "every_n_turns": rules.every_n_turns,
        "min_interval_seconds": rules.min_interval.as_secs_f64(),
        "own": own,
    })
}

/// `PATCH /v1/snapshots/{snapshot_id}` with `pinned` and `label`, each if it is to change; a `label` of
/// null takes it away.
pub async fn mark(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
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
    Ok(Json(shared.service()?.mark(request).await?))
}

/// `DELETE /v1/snapshots/{snapshot_id}`: with all its names.
pub async fn delete_snapshot(
    State(shared): State<Shared>,
    Segments(id): Segments<String>,
) -> Result<Json<DeleteReply>, ApiError> {
    remove(&shared, Selector::snapshot(snapshot(&id)?), false).await
}

async fn remove(
    shared: &Shared,
    select: Selector,
    whole: bool,
) -> Result<Json<DeleteReply>, ApiError> {
    let service = shared.service()?;
    let conversation = service.name_selected(&select);
    let request = DeleteRequest { select, whole };
    let reply = service.delete(request).await;
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

fn number(field: &str, text: &str) -> Result<u32, ApiError> {
    match text.parse() {
        Ok(number @ 1..) => Ok(number),
        _ => Err(ApiError::invalid(format!(
            "`{field}` is not a number from 1"
        ))),
    }
}

/// The turn or the branch that a body names, by either name of the field.
fn which(body: &mut Fields) -> Result<(Option<u32>, Option<String>), ApiError> {
    let turn = one_of(
        "turn",
        body.take("turn")?,
        "turn_number",
        body.take("turn_number")?,
    )?;
    let branch = (body.take("branch")?, body.take("branch_name")?);
    let branch = one_of("branch", branch.0, "branch_name", branch.1)?;
    Ok((turn, branch))
}

/// Two names of one field.
///
/// # Errors
/// 400 when they say different things.
pub(super) fn one_of<T: PartialEq>(
    name: &str,
    value: Option<T>,
    other: &str,
    alias: Option<T>,
) -> Result<Option<T>, ApiError> {
    match (value, alias) {
        (Some(value), Some(alias)) if value != alias => Err(ApiError::invalid(format!(
            "`{name}` and `{other}` are the same, and say different things"
        ))),
        (value, alias) => Ok(value.or(alias)),
    }
}

/// A turn or a branch of a conversation.
fn part(select: Selector, turn: Option<u32>, branch: Option<String>) -> Result<Selector, ApiError> {
    match (turn, &branch) {
        (Some(0), _) => Err(ApiError::invalid("`turn` counts from 1")),
        (Some(_), Some(_)) => Err(ApiError::invalid("`turn` and `branch`: give one of them")),
        _ => Ok(Selector {
            turn_number: turn,
            branch_name: checked("branch", branch)?,
            ..select
        }),
    }
}

/// One side of a comparison.
fn side(field: &str, select: Selector, text: Option<String>) -> Result<Selector, ApiError> {
    let Some(text) = text else { return Ok(select) };
    if let Some(turn) = text.strip_prefix("turn:") {
        return part(select, Some(number(field, turn)?), None);
    }
    if let Some(branch) = text.strip_prefix("branch:") {
        return part(select, None, Some(branch.to_owned()));
    }
    match number(field, &text) {
        Ok(turn) => part(select, Some(turn), None),
        Err(_) => part(select, None, Some(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_is_a_turn_a_branch_or_the_latest() {
        let of = |text: &str| {
            let select = Selector::conversation("c");
            let found = side("a", select, Some(text.to_owned())).ok()?;
            Some((found.turn_number, found.branch_name))
        };
        let branch = |name: &str| Some((None, Some(name.to_owned())));
        assert_eq!(of("3"), Some((Some(3), None)));
        assert_eq!(of("turn:3"), Some((Some(3), None)));
        assert_eq!(of("before"), branch("before"));
        assert_eq!(of("branch:3"), branch("3"));
        assert_eq!(of("0"), branch("0"));
        for bad in ["turn:0", "turn:x", "branch:", "", "branch:../x"] {
            assert_eq!(of(bad), None, "{bad}");
        }
        let latest = side("a", Selector::conversation("c"), None).unwrap();
        assert_eq!(latest, Selector::conversation("c"));
    }
}
