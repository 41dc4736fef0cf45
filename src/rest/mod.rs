//! The REST surface: HTTP/1.1 and JSON over TCP and a Unix socket. It holds no logic: it reads
//! requests, asks the service, and writes answers.
//!
//! # What
//! - the compatible surface at the root, see [`snapshots`];
//! - what generates: `/v1/generate` ([`generate`]), `/v1/chat/completions` and `/v1/completions`
//!   ([`openai`]), `/tokenize_chat` ([`tokenize`]), and what passes through to the server;
//! - `/v1/…`, see [`native`], [`conversations`] and [`events`]; `/v1/export` and `/v1/import`, see
//!   [`portable`];
//! - `/healthz`, `/readyz` and `/metrics`;
//! - `/openapi.json` and `/docs`, see [`openapi`]: made from the annotations of the handlers, of which
//!   the router is made, too.
//!
//! # Errors
//! Every failure has a kind with a status code of its own, see [`ErrorType`], and a body in the shape
//! of its surface: problem details (RFC 9457) on the native one, `{success: false, message, error:
//! {type, message, retryable}}` on the compatible one, `{error: {message, type, param, code}}` for
//! clients of OpenAI's API.

pub mod answers;
pub mod bodies;
mod body;
mod config;
pub mod conversations;
mod error;
pub mod etag;
pub mod events;
pub mod generate;
mod guard;
mod host;
mod metrics;
mod names;
pub mod native;
pub mod openai;
pub mod openapi;
#[cfg(test)]
pub(crate) mod parsers;
pub mod portable;
pub mod probes;
pub mod problem;
mod selected;
mod sent;
mod server;
pub mod snapshots;
mod stall;
mod state;
mod surface;
pub mod talk;
pub mod tokenize;

use std::sync::Arc;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use tokio::sync::Semaphore;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub use config::Config;
pub use error::{ApiError, ErrorType};
pub use guard::REQUEST_ID;
pub use metrics::Metrics;
pub use server::{BindError, Server};
pub use state::Shared;

use guard::Guard;
use openapi::Document;

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
    let (router, document) = routes().split_for_parts();
    Ok(router
        .layer(Document::finish(document).layer())
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

/// All routes, each as its handler describes it.
fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::with_openapi(openapi::base())
        .merge(shown())
        .routes(routes!(snapshots::save))
        .routes(routes!(snapshots::restore))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::info))
        .routes(routes!(snapshots::delete))
        .routes(routes!(tokenize::chat))
        .routes(routes!(generate::generate))
        .routes(routes!(openai::chat))
        .routes(routes!(openai::complete))
        .routes(routes!(generate::native))
        .routes(routes!(generate::tokenize))
        .routes(routes!(generate::detokenize))
        .routes(routes!(generate::tokenize_v1))
        .routes(routes!(generate::detokenize_v1))
        .routes(routes!(generate::models))
        .routes(routes!(generate::health))
        .routes(routes!(generate::server_info))
        .routes(routes!(native::status))
        .routes(routes!(native::workers))
        .routes(routes!(conversations::delete_turn))
        .routes(routes!(conversations::delete_branch))
        .routes(routes!(conversations::compare))
        .routes(routes!(conversations::fork))
        .routes(routes!(conversations::tool_call))
        .routes(routes!(events::events))
        .routes(routes!(portable::export))
        .routes(routes!(portable::import))
        .routes(routes!(portable::check))
        .routes(routes!(probes::healthz))
        .routes(routes!(probes::readyz))
        .routes(routes!(probes::metrics))
        .routes(routes!(openapi::document))
        .routes(routes!(openapi::page))
}

/// What is read again and again: with entity tags.
fn shown() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(
            native::snapshot,
            conversations::mark,
            conversations::delete_snapshot
        ))
        .routes(routes!(native::snapshots))
        .routes(routes!(native::conversations))
        .routes(routes!(native::namespaces))
        .routes(routes!(native::tiers, native::set_budgets))
        .routes(routes!(conversations::show, conversations::delete))
        .routes(routes!(conversations::tree))
        .routes(routes!(conversations::tokens))
        .routes(routes!(
            conversations::policy,
            conversations::set_policy,
            conversations::unset_policy
        ))
        .layer(from_fn(etag::tagged))
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> Self {
        let kind = match error.kind() {
            ErrorKind::NotFound => ErrorType::NotFound,
            ErrorKind::NoState => ErrorType::NoState,
            ErrorKind::TokensUnknown => ErrorType::TokensUnknown,
            ErrorKind::Exists => ErrorType::AlreadyExists,
            ErrorKind::Mismatch => ErrorType::Mismatch,
            ErrorKind::Changed => ErrorType::PreconditionFailed,
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
