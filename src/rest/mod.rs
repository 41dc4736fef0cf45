//! The REST surface: HTTP/1.1 and JSON over TCP and a Unix socket. It holds no logic: it reads
//! requests, asks the service, and writes answers.
//!
//! # What
//! - the compatible surface at the root, see [`snapshots`];
//! - what generates: `/v1/generate` ([`generate`]), `/v1/chat/completions` and `/v1/completions`
//!   ([`openai`]), `/tokenize_chat` ([`tokenize`]), and what passes through to the server;
//! - `/v1/…`, see [`native`], [`conversations`] and [`events`]; `/v1/export` and `/v1/import`, see
//!   [`portable`];
//! - `/healthz`, `/readyz` and `/metrics`.
//!
//! # Errors
//! Every failure is a JSON object `{success: false, message, error: {type, message, retryable}}`
//! with a status code of its own, see [`ErrorType`].

mod body;
mod config;
pub mod conversations;
mod error;
pub mod events;
pub mod generate;
mod guard;
mod host;
mod metrics;
mod names;
pub mod native;
pub mod openai;
#[cfg(test)]
pub(crate) mod parsers;
pub mod portable;
mod probes;
mod server;
pub mod snapshots;
mod stall;
mod state;
pub mod tokenize;

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{delete, get, post};
use tokio::sync::Semaphore;

pub use config::Config;
pub use error::{ApiError, ErrorType};
pub use guard::REQUEST_ID;
pub use metrics::Metrics;
pub use server::{BindError, Server};
pub use state::Shared;

use guard::Guard;

use crate::service::{ErrorKind, ServiceError};
use crate::util::secret::{Token, TokenError};

/// All routes, behind the guard.
///
/// # Errors
/// The token file cannot be used.
pub fn router(config: &Config, shared: Shared, metrics: Metrics) -> Result<Router, TokenError> {
    let guard = Guard {
        token: config.token_file.as_deref().map(Token::read).transpose()?,
        open_probes: config.open_probes,
        allowed_hosts: config.allowed_hosts.clone(),
        max_body: usize::try_from(config.max_body.as_u64()).unwrap_or(usize::MAX),
        max_generate_body: usize::try_from(config.max_generate_body.as_u64()).unwrap_or(usize::MAX),
        timeout: config.timeout,
        in_flight: Arc::new(Semaphore::new(config.max_requests as usize)),
        metrics,
    };
    Ok(Router::new()
        .route("/save_snapshot", post(snapshots::save))
        .route("/restore_snapshot", post(snapshots::restore))
        .route("/list_snapshots", post(snapshots::list))
        .route("/get_snapshot_info", post(snapshots::info))
        .route("/delete_snapshot", post(snapshots::delete))
        .route("/v1/generate", post(generate::generate))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/completions", post(openai::complete))
        .route("/tokenize_chat", post(tokenize::chat))
        .route("/generate", post(generate::native))
        .route("/tokenize", post(generate::pass))
        .route("/detokenize", post(generate::pass))
        .route("/v1/tokenize", post(generate::pass))
        .route("/v1/detokenize", post(generate::pass))
        .route("/v1/models", get(generate::pass))
        .route("/health", get(generate::pass))
        .route("/server_info", get(generate::pass))
        .route("/v1/status", get(native::status))
        .route("/v1/tiers", get(native::tiers))
        .route("/v1/workers", get(native::workers))
        .route("/v1/conversations", get(native::conversations))
        .merge(talks())
        .route("/v1/events", get(events::events))
        .route("/v1/snapshots", get(native::snapshots))
        .route(
            "/v1/snapshots/{snapshot_id}",
            get(native::snapshot)
                .patch(conversations::mark)
                .delete(conversations::delete_snapshot),
        )
        .route("/v1/namespaces", get(native::namespaces))
        .route("/v1/export", post(portable::export))
        .route(portable::IMPORT, post(portable::import))
        .route("/v1/import/check", post(portable::check))
        .route("/healthz", get(probes::healthz))
        .route("/readyz", get(probes::readyz))
        .route("/metrics", get(probes::metrics))
        .fallback(|| async { ApiError::new(ErrorType::NotFound, "There is no such path") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(
                ErrorType::MethodNotAllowed,
                "This path is for another method",
            )
        })
        // The guard has read and limited the body before any handler sees it.
        .layer(axum::extract::DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::new(guard), guard::guard))
        .with_state(shared))
}

/// One conversation.
fn talks() -> Router<Shared> {
    let at = |part: &str| format!("/v1/conversations/{{conversation_id}}{part}");
    Router::new()
        .route(
            &at(""),
            get(conversations::show).delete(conversations::delete),
        )
        .route(
            &at("/turns/{turn_number}"),
            delete(conversations::delete_turn),
        )
        .route(
            &at("/branches/{branch_name}"),
            delete(conversations::delete_branch),
        )
        .route(&at("/tree"), get(conversations::tree))
        .route(&at("/tokens"), get(conversations::tokens))
        .route(&at("/compare"), get(conversations::compare))
        .route(&at("/fork"), post(conversations::fork))
        .route(
            &at("/policy"),
            get(conversations::policy)
                .put(conversations::set_policy)
                .delete(conversations::unset_policy),
        )
        .route(&at("/tool_call"), post(conversations::tool_call))
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> Self {
        let kind = match error.kind() {
            ErrorKind::NotFound => ErrorType::NotFound,
            ErrorKind::NoState => ErrorType::NoState,
            ErrorKind::TokensUnknown => ErrorType::TokensUnknown,
            ErrorKind::Exists => ErrorType::AlreadyExists,
            ErrorKind::Mismatch => ErrorType::Mismatch,
            ErrorKind::Invalid => ErrorType::InvalidRequest,
            ErrorKind::Unauthorized => ErrorType::Unauthorized,
            ErrorKind::Busy => ErrorType::Busy,
            ErrorKind::Unavailable => ErrorType::Unavailable,
            ErrorKind::NoSpace | ErrorKind::TooLarge => ErrorType::NoSpace,
            ErrorKind::Quota => ErrorType::QuotaExceeded,
            ErrorKind::Data => ErrorType::Data,
            ErrorKind::Internal => ErrorType::Internal,
        };
        let answer = ApiError::new(kind, error.to_string());
        match error {
            ServiceError::TooLarge(_) => answer.for_good(),
            ServiceError::Quota {
                used, quota, need, ..
            } => {
                // What alone is larger than the quota never fits.
                let answer = if need > quota {
                    answer.for_good()
                } else {
                    answer
                };
                answer.with([
                    ("used_bytes", used),
                    ("quota_bytes", quota),
                    ("need_bytes", need),
                ])
            }
            _ => answer,
        }
    }
}
