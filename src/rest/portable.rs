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
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::{IntoParams, ToSchema};

use super::bodies::ExportBody;
use super::body::{Fields, Params};
use super::error::{ApiError, ErrorType};
use super::names::checked;
use super::snapshots::{Need, selector, snapshot_id};
use super::state::Shared;
use crate::service::{Export, ExportRequest, ImportReply, ImportRequest};

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
#[derive(Debug, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Way {
    /// Take it although nothing here is of its model. Default: false.
    new_model: bool,
    /// Give it the names that it had. Default: true.
    names: bool,
    /// Wait until it is on disk. Default: true.
    durable: bool,
    /// The conversation that it becomes a part of, instead of its own.
    #[param(min_length = 1, max_length = 255)]
    conversation_id: Option<String>,
}

/// What would be taken.
#[derive(Debug, Serialize, ToSchema)]
pub struct Accepted {
    /// Always `true`.
    success: bool,
}

/// A snapshot that was taken in.
#[derive(Debug, Serialize, ToSchema)]
pub struct Imported {
    /// Always `true`.
    success: bool,
    /// What happened, for people.
    message: &'static str,
    #[serde(flatten)]
    reply: ImportReply,
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

/// A snapshot as a stream: the safetensors file, then the JSON file.
///
/// `x-engram-tensor-bytes` says how long the first is. An answer without the whole JSON broke off.
#[utoipa::path(
    post,
    path = "/v1/export",
    tag = "portable",
    request_body = ExportBody,
    responses((
        status = 200,
        content_type = "application/octet-stream",
        headers(("x-engram-tensor-bytes" = u64), ("x-engram-snapshot" = String))
    ))
)]
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

/// Whether a pair would be taken, from its JSON file.
#[utoipa::path(
    post,
    path = "/v1/import/check",
    tag = "portable",
    params(Way),
    request_body(content = Object, content_type = "application/json"),
    responses((status = 200, body = Accepted))
)]
pub async fn check(
    State(shared): State<Shared>,
    Params(way): Params<Way>,
    description: Bytes,
) -> Result<Json<Accepted>, ApiError> {
    shared
        .service()?
        .check_import(&way.request()?, &description)?;
    Ok(Json(Accepted { success: true }))
}

/// Take a snapshot in: 8 bytes, little-endian, with the length of the JSON file, the JSON file, the
/// safetensors file.
#[utoipa::path(
    post,
    path = "/v1/import",
    tag = "portable",
    params(Way),
    request_body(content_type = "application/octet-stream"),
    responses((status = 200, body = Imported))
)]
pub async fn import(
    State(shared): State<Shared>,
    Params(way): Params<Way>,
    request: Request,
) -> Result<Json<Imported>, ApiError> {
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
    Ok(Json(Imported {
        success: true,
        message: "Imported",
        reply: reply?,
    }))
}
