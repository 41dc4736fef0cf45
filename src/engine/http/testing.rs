//! Switches for tests: `POST /testing/hold` with `{"machine": "save", "state": "Draining"}`,
//! `POST /testing/release`, `POST /testing/tamper` with `{"restored": "state" | "kv" | null}`.

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Failure, Front, parse};
use crate::engine::attach::Tamper;

#[derive(Debug, Deserialize)]
struct HoldBody {
    machine: String,
    state: String,
}

#[derive(Debug, Deserialize)]
struct TamperBody {
    restored: Option<Tamper>,
}

/// Adds the switches.
pub(super) fn routes(router: Router<Front>) -> Router<Front> {
    router
        .route("/testing/hold", post(hold))
        .route("/testing/release", post(release))
        .route("/testing/tamper", post(tamper))
}

async fn hold(State(front): State<Front>, body: Bytes) -> Result<Json<Value>, Failure> {
    let HoldBody { machine, state } = parse(&body)?;
    front
        .parts
        .control
        .hold(&machine, &state)
        .map_err(Failure::Body)?;
    Ok(Json(json!({ "hold": format!("{machine}:{state}") })))
}

async fn release(State(front): State<Front>) -> Json<Value> {
    front.parts.control.release();
    Json(json!({ "hold": null }))
}

async fn tamper(State(front): State<Front>, body: Bytes) -> Result<Json<Value>, Failure> {
    let TamperBody { restored } = parse(&body)?;
    front.parts.control.set_tamper(restored);
    Ok(Json(json!({ "tamper": restored })))
}
