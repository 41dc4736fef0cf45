//! `/healthz`, `/readyz` and `/metrics`.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorType};
use super::problem::Problem;
use super::state::Shared;

/// What scrapers are told `/metrics` is.
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// The process answers.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// Always `ok`.
    status: &'static str,
}

/// Whether the daemon can do its work.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReadinessReply {
    /// It can.
    ready: bool,
    /// Why not.
    reasons: Vec<String>,
    /// What is wrong although it works.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// The process answers.
#[utoipa::path(get, path = "/healthz", tag = "probes", responses((status = 200, body = Health)))]
pub async fn healthz() -> Json<Health> {
    Json(Health { status: "ok" })
}

/// 200 when the daemon can do its work, else 503 with every reason. `warnings` is what is wrong
/// although it works: a full disk, from which is still restored.
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "probes",
    responses(
        (status = 200, body = ReadinessReply),
        (status = 503, description = "Not ready", content(
            (ReadinessReply = "application/json"),
            (Problem = "application/problem+json"),
        ))
    )
)]
pub async fn readyz(State(shared): State<Shared>) -> Response {
    let reasons = shared.not_ready();
    let status = match reasons.is_empty() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = ReadinessReply {
        ready: reasons.is_empty(),
        reasons,
        warnings: shared.warnings(),
    };
    (status, Json(body)).into_response()
}

/// OpenMetrics text.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "probes",
    responses((
        status = 200,
        body = String,
        content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    ))
)]
pub async fn metrics(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, shared.registry()?)
        .map_err(|_| ApiError::new(ErrorType::Internal, "The metrics could not be written"))?;
    Ok(([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}
