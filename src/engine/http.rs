//! The engine's HTTP surface, as SGLang's where SGLang has the same.
//!
//! # What
//! `/generate` with tokens, whole or streamed; and where the engine was given a tokenizer also with
//! text, beside `/v1/chat/completions`, `/v1/completions`, `/tokenize` and `/detokenize`.
//!
//! Handlers check and translate; everything else is the scheduler's. A client that goes away drops
//! its handler, and with it the receiving end of the reply, which the scheduler sees.

mod generate;
mod openai;
mod run;
#[cfg(feature = "testing")]
mod testing;
mod tokens;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use crossbeam_channel::Sender;
use futures_util::Stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::attach::Control;
use super::request::{Refusal, RequestId};
use super::scheduler::Command;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Largest request body. A prompt of the longest length fits several times.
const MAX_BODY: usize = 8 << 20;

/// What the surface is made of beside the scheduler.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Switches that tests throw.
    pub control: Arc<Control>,
    /// The model's tokenizer, if it has one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The model's name.
    pub model: String,
    /// Streamed answers say only what is new.
    pub incremental: bool,
}

/// What handlers share.
#[derive(Clone, Debug)]
struct Front {
    commands: Sender<Command>,
    next_id: Arc<AtomicU64>,
    parts: Arc<Parts>,
}

#[derive(Debug, Deserialize)]
struct AbortBody {
    rid: String,
}

/// What a handler answers when it cannot do what was asked.
#[derive(Debug)]
enum Failure {
    /// The body is not what it should be.
    Body(String),
    /// This engine cannot do that.
    Unsupported(&'static str),
    /// The request is not taken.
    Refused(Refusal),
    /// Not now.
    Busy(String),
    /// The scheduler is gone.
    Gone,
}

/// All routes.
pub fn router(commands: Sender<Command>, parts: Parts) -> Router {
    let front = Front {
        commands,
        next_id: Arc::new(AtomicU64::new(1)),
        parts: Arc::new(parts),
    };
    let router = Router::new();
    #[cfg(feature = "testing")]
    let router = testing::routes(router);
    router
        .route("/generate", post(generate::generate))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/completions", post(openai::complete))
        .route("/v1/models", get(openai::models))
        .route("/tokenize", post(tokens::tokenize))
        .route("/v1/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/detokenize", post(tokens::detokenize))
        .route("/abort_request", post(abort))
        .route("/flush_cache", get(flush).post(flush))
        .route("/health", get(health))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(front)
}

async fn abort(State(front): State<Front>, body: Bytes) -> Result<Response, Failure> {
    let AbortBody { rid } = parse(&body)?;
    let found = front.ask(|reply| Command::Abort(rid, reply)).await?;
    Ok(Json(json!({ "aborted": found })).into_response())
}

async fn flush(State(front): State<Front>) -> Result<Response, Failure> {
    front.ask(Command::Flush).await?.map_err(Failure::Busy)?;
    Ok(Json(json!({ "success": true, "message": "Cache flushed." })).into_response())
}

async fn health(State(front): State<Front>) -> Result<Response, Failure> {
    front.ask(Command::Report).await?;
    Ok(Json(json!({ "status": "ok" })).into_response())
}

async fn server_info(State(front): State<Front>) -> Result<Response, Failure> {
    Ok(Json(front.ask(Command::Report).await?).into_response())
}

fn parse<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| Failure::Body(error.to_string()))
}

/// An answer of server-sent events.
fn event_stream(events: impl Stream<Item = Value> + Send + 'static) -> Response {
    use futures_util::StreamExt as _;

    let done = futures_util::stream::once(async { Bytes::from_static(b"data: [DONE]\n\n") });
    let events = events.map(|event| Bytes::from(format!("data: {event}\n\n")));
    let body = Body::from_stream(events.chain(done).map(Ok::<_, std::convert::Infallible>));
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

// === impl Front ===

impl Front {
    fn send(&self, command: Command) -> Result<(), Failure> {
        self.commands.send(command).map_err(|_| Failure::Gone)
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, Failure> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer.await.map_err(|_| Failure::Gone)
    }

    fn fresh_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn tokenizer(&self) -> Result<&Arc<Tokenizer>, Failure> {
        let missing = Failure::Unsupported("a prompt without input_ids: there is no tokenizer");
        self.parts.tokenizer.as_ref().ok_or(missing)
    }
}

// === impl Failure ===

impl From<TokenizerError> for Failure {
    fn from(error: TokenizerError) -> Self {
        Self::Body(error.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, kind, message) = match self {
            Self::Body(message) => (StatusCode::BAD_REQUEST, "bad_body", message),
            Self::Unsupported(what) => (
                StatusCode::BAD_REQUEST,
                "unsupported",
                format!("not supported: {what}"),
            ),
            Self::Refused(refusal) => {
                let status = match refusal {
                    Refusal::Stopping => StatusCode::SERVICE_UNAVAILABLE,
                    _ => StatusCode::BAD_REQUEST,
                };
                (status, refusal.kind(), refusal.to_string())
            }
            Self::Busy(message) => (StatusCode::BAD_REQUEST, "busy", message),
            Self::Gone => {
                let message = "the engine's scheduler has ended".to_owned();
                (StatusCode::SERVICE_UNAVAILABLE, "stopping", message)
            }
        };
        let code = status.as_u16();
        let error = json!({ "type": kind, "message": message, "code": code });
        // The first is how `/generate` says it, the others how the OpenAI endpoints do.
        let body = json!({
            "error": error, "object": "error", "message": message, "type": kind, "param": null,
            "code": code,
        });
        (status, Json(body)).into_response()
    }
}

#[cfg(test)]
mod tests;
