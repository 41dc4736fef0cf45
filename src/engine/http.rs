//! The engine's HTTP surface, as SGLang's where SGLang has the same.
//!
//! Handlers check and translate; everything else is the scheduler's. A client that goes away drops
//! its handler, and with it the receiving end of the reply, which the scheduler sees.

#[cfg(feature = "testing")]
mod testing;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use crossbeam_channel::Sender;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::attach::Control;
use super::cache::Namespace;
use super::model::VOCAB;
use super::request::{Answer, FinishReason, Refusal, Request, RequestId, RequestInfo, Sampling};
use super::scheduler::Command;

/// Largest request body. A prompt of the longest length fits several times.
const MAX_BODY: usize = 8 << 20;
/// `max_new_tokens` where a request says nothing, as SGLang's.
const DEFAULT_NEW_TOKENS: usize = 128;

/// What handlers share.
#[derive(Clone, Debug)]
struct Front {
    commands: Sender<Command>,
    next_id: Arc<AtomicU64>,
    #[cfg_attr(
        not(feature = "testing"),
        expect(dead_code, reason = "only tests throw switches")
    )]
    control: Arc<Control>,
}

/// `POST /generate`. Fields that SGLang has and this engine does not are ignored.
#[derive(Debug, Deserialize)]
struct GenerateBody {
    input_ids: Option<Vec<i64>>,
    #[serde(default)]
    sampling_params: SamplingBody,
    rid: Option<String>,
    session_id: Option<String>,
    extra_key: Option<String>,
    cache_salt: Option<String>,
    #[serde(default)]
    stream: bool,
}

#[derive(Debug, Default, Deserialize)]
struct SamplingBody {
    max_new_tokens: Option<usize>,
    temperature: Option<f64>,
    stop_token_ids: Option<Vec<u32>>,
    n: Option<u32>,
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

/// All routes. `control` has the switches that tests throw.
pub fn router(commands: Sender<Command>, control: Arc<Control>) -> Router {
    let front = Front {
        commands,
        next_id: Arc::new(AtomicU64::new(1)),
        control,
    };
    let router = Router::new();
    #[cfg(feature = "testing")]
    let router = testing::routes(router);
    router
        .route("/generate", post(generate))
        .route("/abort_request", post(abort))
        .route("/flush_cache", get(flush).post(flush))
        .route("/health", get(health))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(front)
}

async fn generate(State(front): State<Front>, body: Bytes) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let body: GenerateBody = parse(&body)?;
    let (info, sampling) = body.into_request(&front)?;
    info.check(&sampling).map_err(Failure::Refused)?;
    let rid = info.rid.clone();
    let (reply, answer) = oneshot::channel();
    let request = Request {
        info,
        sampling,
        arrived,
        reply,
    };
    front.send(Command::Submit(Box::new(request)))?;
    let answer = answer
        .await
        .map_err(|_| Failure::Gone)?
        .map_err(Failure::Refused)?;
    let seconds = arrived.elapsed().as_secs_f64();
    Ok(Json(reply_body(&rid, &answer, seconds)).into_response())
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

fn reply_body(rid: &str, answer: &Answer, seconds: f64) -> serde_json::Value {
    let Answer {
        output_ids,
        finish_reason,
        prompt_tokens,
        cached_tokens,
        restored,
    } = answer;
    let restored = restored.as_ref().map(|restored| {
        json!({
            "restored_tokens": restored.restored_tokens,
            "reused_tokens": restored.reused_tokens,
            "tier": restored.tier,
            "restore_ms": restored.took.as_secs_f64() * 1000.0,
        })
    });
    let finish_reason = match finish_reason {
        FinishReason::Length => json!({ "type": "length", "length": output_ids.len() }),
        FinishReason::Stop(token) => json!({ "type": "stop", "matched": token }),
        FinishReason::Abort => json!({ "type": "abort", "message": "Aborted" }),
    };
    json!({
        "output_ids": output_ids,
        "meta_info": {
            "id": rid,
            "finish_reason": finish_reason,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_ids.len(),
            "cached_tokens": cached_tokens,
            "e2e_latency": seconds,
            "engram": restored,
        },
    })
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
}

// === impl GenerateBody ===

impl GenerateBody {
    fn into_request(self, front: &Front) -> Result<(RequestInfo, Sampling), Failure> {
        let Self {
            input_ids,
            sampling_params,
            rid,
            session_id,
            extra_key,
            cache_salt,
            stream,
        } = self;
        let SamplingBody {
            max_new_tokens,
            temperature,
            stop_token_ids,
            n,
        } = sampling_params;
        if stream {
            return Err(Failure::Unsupported(
                "stream: the engine answers in one piece",
            ));
        }
        if temperature.is_some_and(|temperature| temperature != 0.0) {
            return Err(Failure::Unsupported("temperature: the engine is greedy"));
        }
        if n.is_some_and(|n| n != 1) {
            return Err(Failure::Unsupported("n: the engine gives one answer"));
        }
        let Some(input_ids) = input_ids else {
            return Err(Failure::Unsupported(
                "a prompt without input_ids: there is no tokenizer",
            ));
        };
        let prompt = input_ids.iter().enumerate().map(|(index, token)| {
            let id = u32::try_from(*token)
                .ok()
                .filter(|id| (*id as usize) < VOCAB);
            id.ok_or(Refusal::Vocabulary {
                index,
                token: *token,
            })
        });
        let prompt = prompt.collect::<Result<_, _>>().map_err(Failure::Refused)?;
        let info = RequestInfo {
            id: RequestId(front.next_id.fetch_add(1, Ordering::Relaxed)),
            rid: rid.unwrap_or_else(|| Uuid::new_v4().simple().to_string()),
            session_id,
            // SGLang takes an empty key or salt for none.
            namespace: Namespace {
                extra_key: extra_key.filter(|key| !key.is_empty()),
                cache_salt: cache_salt.filter(|salt| !salt.is_empty()),
            },
            prompt,
        };
        let sampling = Sampling {
            max_new_tokens: max_new_tokens.unwrap_or(DEFAULT_NEW_TOKENS),
            stop_token_ids: stop_token_ids.unwrap_or_default(),
        };
        Ok((info, sampling))
    }
}

// === impl Failure ===

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
        let error = json!({ "type": kind, "message": message, "code": status.as_u16() });
        (status, Json(json!({ "error": error }))).into_response()
    }
}

#[cfg(test)]
mod tests;
