//! `/healthz`, `/readyz` and `/metrics`.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::error::{ApiError, ErrorType};
use super::state::Shared;

/// What scrapers are told `/metrics` is.
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// The process answers.
pub async fn healthz() -> Response {
    Json(json!({ "status": "ok" })).into_response()
}

/// 200 when the daemon can do its work, else 503 with every reason. `warnings` is what is wrong
/// although it works: a full disk, from which is still restored.
pub async fn readyz(State(shared): State<Shared>) -> Response {
    let reasons = shared.not_ready();
    let status = match reasons.is_empty() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut body = json!({ "ready": reasons.is_empty(), "reasons": reasons });
    let warnings = shared.warnings();
    if !warnings.is_empty() {
        with_warnings(&mut body, warnings);
    }
    (status, Json(body)).into_response()
}

fn with_warnings(body: &mut Value, warnings: Vec<String>) {
    if let Value::Object(body) = body {
        body.insert("warnings".to_owned(), warnings.into());
    }
}

/// OpenMetrics text.
pub async fn metrics(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, shared.registry()?)
        .map_err(|_| ApiError::new(ErrorType::Internal, "The metrics could not be written"))?;
    Ok(([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}
