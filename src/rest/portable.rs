//! `/v1/export` and `/v1/import`: a snapshot as a stream of bytes.
//!
//! An export answers with the safetensors file, `x-engram-tensor-bytes` long, and behind it the JSON
//! file; an answer without the whole JSON broke off. An import sends the other way round: 8 bytes,
//! little-endian, with the length of the JSON file, the JSON file, the safetensors file. Neither is
//! ever in memory as a whole, so `rest.max_body` and `rest.timeout` do not hold for them; a side that
//! stands still for a minute ends them.

use std::io;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::body::{Fields, Params};
use super::error::{ApiError, ErrorType};
use super::names::checked;
use super::snapshots::{Need, selector, snapshot_id, success};
use super::state::Shared;
use crate::service::{Export, ExportRequest, ImportRequest};

/// The path whose body is read as it comes.
pub const IMPORT: &str = "/v1/import";

/// Length of the safetensors file.
const TENSOR_BYTES: HeaderName = HeaderName::from_static("x-engram-tensor-bytes");
/// The snapshot.
const SNAPSHOT: HeaderName = HeaderName::from_static("x-engram-snapshot");

/// How long an import waits for the disk once all has come.
const DISK: Duration = Duration::from_secs(600);
/// How long the rest of what was refused is listened to.
const LINGER: Duration = Duration::from_secs(2);
/// Pieces of a body that wait to be read.
const AHEAD: usize = 4;

/// How to take a pair in.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub struct Way {
    new_model: bool,
    names: bool,
    durable: bool,
    conversation_id: Option<String>,
}

// === impl Way ===

impl Default for Way {
    fn default() -> Self {
        Self {
            new_model: false,
            names: true,
            durable: true,
            conversation_id: None,
        }
    }
}

impl Way {
    fn request(self) -> Result<ImportRequest, ApiError> {
        let Self {
            new_model,
            names,
            durable,
            conversation_id,
        } = self;
        Ok(ImportRequest {
            new_model,
            names,
            conversation_id: checked("conversation_id", conversation_id)?,
            durable,
            timeout: DISK,
        })
    }
}

/// `POST /v1/export`, with a selector of one snapshot, or of a conversation for its latest.
pub async fn export(State(shared): State<Shared>, mut body: Fields) -> Result<Response, ApiError> {
    let snapshot = snapshot_id(&mut body)?;
    let select = selector(&mut body, snapshot, Need::Conversation)?;
    let Export {
        snapshot,
        tensor_bytes,
        chunks,
    } = shared.service()?.export(ExportRequest { select }).await?;
    let chunks = ReceiverStream::new(chunks)
        .map(|chunk| chunk.map_err(|error| io::Error::other(error.to_string())));
    let mut response = Body::from_stream(chunks).into_response();
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(TENSOR_BYTES, HeaderValue::from(tensor_bytes));
    if let Ok(id) = HeaderValue::try_from(snapshot.to_string()) {
        headers.insert(SNAPSHOT, id);
    }
    Ok(response)
}

/// `POST /v1/import/check`, with the JSON file: whether the pair would be taken.
pub async fn check(
    State(shared): State<Shared>,
    Params(way): Params<Way>,
    description: Bytes,
) -> Result<Json<Value>, ApiError> {
    shared
        .service()?
        .check_import(&way.request()?, &description)?;
    Ok(Json(json!({ "success": true })))
}

/// `POST /v1/import`
pub async fn import(
    State(shared): State<Shared>,
    Params(way): Params<Way>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let declared = request.headers().get(header::CONTENT_TYPE);
    // What a form of a foreign web page can send is not taken.
    if declared.is_none_or(|kind| kind != "application/octet-stream") {
        return Err(ApiError::new(
            ErrorType::UnsupportedMediaType,
            "Send the pair with `Content-Type: application/octet-stream`",
        ));
    }
    let (to, body) = mpsc::channel(AHEAD);
    let mut stream = request.into_body().into_data_stream();
    let import = shared.service()?.import(way.request()?, body);
    let mut import = std::pin::pin!(import);
    let forward = async {
        while let Some(chunk) = stream.next().await {
            let chunk: io::Result<Bytes> = chunk.map_err(io::Error::other);
            if to.send(chunk).await.is_err() {
                return;
            }
        }
        drop(to);
    };
    let reply = tokio::select! {
        reply = &mut import => reply,
        () = forward => import.await,
    };
    if reply.is_err() {
        // A client that is still sending would see a broken connection instead of the answer.
        let rest = async { while let Some(Ok(_)) = stream.next().await {} };
        let _ = tokio::time::timeout(LINGER, rest).await;
    }
    let message = json!({ "message": "Imported" });
    success(&reply?, message)
}
