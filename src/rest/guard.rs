//! What every request passes before its handler, and every answer after it.
//!
//! # Order
//! Request id, `Host` header or token, a place among the requests in flight, the body, then the
//! handler in a task of its own. The body of an import is read by its handler: it may be of any
//! length, and is never in memory as a whole.
//!
//! # Cancellation
//! A client that goes away, or an answer that takes longer than `rest.timeout`, does not stop the
//! handler: what it began is finished, and its place is free only then. So no snapshot is left half
//! deleted by an impatient client, and work in flight stays bounded. What generates is another
//! matter: it ends with its client, and takes the time and the place that the gateway gives it.
//!
//! # Errors
//! A panic in a handler is an answer 500 and a log line, and ends nothing else.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::extract::{MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures_util::FutureExt as _;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tokio::sync::Semaphore;
use tracing::Instrument as _;
use uuid::Uuid;

use super::error::{ApiError, ErrorType};
use super::generate::generates;
use super::host::host_is_local;
use super::metrics::Metrics;
use super::openapi::OPEN;
use super::portable::IMPORT;
use super::server::Peer;
use super::surface::Surface;
use crate::util::secret::Token;

/// The header that carries a request's id, both ways.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A request id of a client longer than this is replaced.
const REQUEST_ID_MAX: usize = 128;

/// The rules, shared by all requests.
#[derive(Debug)]
pub struct Guard {
    pub(super) token: Option<Token>,
    pub(super) open_probes: bool,
    pub(super) allowed_hosts: Vec<String>,
    pub(super) max_body: usize,
    pub(super) max_generate_body: usize,
    pub(super) timeout: Duration,
    pub(super) in_flight: Arc<Semaphore>,
    pub(super) metrics: Metrics,
}

/// What handlers know of a request that passed.
#[derive(Clone, Debug)]
pub struct Admitted {
    /// Its id.
    pub id: String,
    /// Its `Authorization` is this daemon's own token.
    pub by_token: bool,
}

/// The middleware: see the module.
pub async fn guard(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let id = request_id(&request);
    request.extensions_mut().insert(Admitted {
        id: id.to_str().unwrap_or_default().to_owned(),
        by_token: guard.token.is_some(),
    });
    let route = request.extensions().get::<MatchedPath>().cloned();
    let surface = Surface::of(request.uri().path());
    let method = request.method().clone();
    let span = tracing::info_span!(
        "request",
        id = id.to_str().unwrap_or_default(),
        method = %request.method(),
        path = request.uri().path(),
    );
    let answer = async {
        let probe = guard.admit(&request)?;
        guard.run(request, next, probe).await
    };
    let mut response = answer.instrument(span.clone()).await.into_response();
    ApiError::shape(&mut response, surface);
    let route = route.as_ref().map_or("other", MatchedPath::as_str);
    guard.metrics.answered(route, &method, response.status());
    span.in_scope(|| tracing::debug!(status = response.status().as_u16(), "Answered"));
    response.headers_mut().insert(REQUEST_ID, id);
    response.headers_mut().insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    response
}

/// The client's own id when it is a short visible word, else a fresh one.
fn request_id(request: &Request) -> HeaderValue {
    request
        .headers()
        .get(REQUEST_ID)
        .filter(|value| {
            let bytes = value.as_bytes();
            (1..=REQUEST_ID_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
        })
        .cloned()
        .unwrap_or_else(|| {
            let mut text = Uuid::encode_buffer();
            let text = Uuid::new_v4().simple().encode_lower(&mut text);
            HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("none"))
        })
}

/// Runs a handler that ends with its client.
async fn inline(request: Request, next: Next) -> Result<Response, ApiError> {
    let answer = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    answer.map_err(|_| {
        tracing::error!("A request handler failed");
        failed_to_answer()
    })
}

fn failed_to_answer() -> ApiError {
    ApiError::new(
        ErrorType::Internal,
        "The daemon failed to answer this request",
    )
}

// === impl Guard ===

impl Guard {
    /// Whether the request may be served; `Ok(true)` for a probe.
    fn admit(&self, request: &Request) -> Result<bool, ApiError> {
        let probe = OPEN.contains(&request.uri().path());
        match &self.token {
            // Without a token, a page in a browser on this machine must not be able to ask: its
            // requests carry the name of its own site.
            None => self.check_host(request)?,
            Some(_) if probe && self.open_probes => {}
            Some(token) => {
                let header = request.headers().get(header::AUTHORIZATION);
                if !token.admits(header.map(HeaderValue::as_bytes)) {
                    return Err(ApiError::new(
                        ErrorType::Unauthorized,
                        "Send the token as `Authorization: Bearer TOKEN`",
                    ));
                }
            }
        }
        Ok(probe)
    }

    fn check_host(&self, request: &Request) -> Result<(), ApiError> {
        let Some(Peer::Loopback) = request.extensions().get::<Peer>() else {
            return Ok(());
        };
        // A request line with a whole URL says the host there; it wins over the header.
        let host = request
            .uri()
            .authority()
            .map(|authority| authority.as_str())
            .or_else(|| request.headers().get(header::HOST)?.to_str().ok());
        match host {
            Some(host) if host_is_local(host, &self.allowed_hosts) => Ok(()),
            _ => Err(ApiError::new(
                ErrorType::HostNotAllowed,
                "The Host header must name localhost, a loopback address, or one of \
                 rest.allowed_hosts",
            )),
        }
    }

    async fn run(&self, request: Request, next: Next, probe: bool) -> Result<Response, ApiError> {
        let path = request.uri().path();
        // Probes answer under any load; what generates has places of its own.
        let place = match probe || generates(path, None) {
            true => None,
            false => Some(
                Arc::clone(&self.in_flight)
                    .try_acquire_owned()
                    .map_err(|_| ApiError::new(ErrorType::Busy, "Too many requests at a time"))?,
            ),
        };
        // Whoever reads that one as it comes bounds it, and how long it may stand still.
        let streams = path == IMPORT;
        let request = match streams {
            true => request,
            false => {
                let (head, body) = self.with_body(request).await?;
                let generates = generates(head.uri.path(), Some(&body));
                let request = Request::from_parts(head, Body::from(body));
                if generates {
                    drop(place);
                    return inline(request, next).await;
                }
                request
            }
        };
        let work = async move {
            let response = next.run(request).await;
            drop(place);
            response
        };
        let task = tokio::spawn(work.in_current_span());
        let answer = match streams {
            true => Ok(task.await),
            false => tokio::time::timeout(self.timeout, task).await,
        };
        match answer {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(failed)) => {
                tracing::error!(error = %failed, "A request handler failed");
                Err(failed_to_answer())
            }
            Err(_) => Err(ApiError::new(
                ErrorType::Timeout,
                "No answer in time; what was asked for may still be done",
            )),
        }
    }

    /// A request with its whole body in memory.
    async fn with_body(&self, request: Request) -> Result<(Parts, Bytes), ApiError> {
        let (head, body) = request.into_parts();
        let most = match generates(head.uri.path(), None) {
            true => self.max_generate_body,
            false => self.max_body,
        };
        let too_large = || {
            let message = format!("The body is larger than {most} bytes");
            ApiError::new(ErrorType::TooLarge, message)
        };
        if body.size_hint().lower() > most as u64 {
            return Err(too_large());
        }
        let body = Limited::new(body, most).collect();
        match tokio::time::timeout(self.timeout, body).await {
            Ok(Ok(body)) => Ok((head, body.to_bytes())),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
            Ok(Err(_)) => Err(ApiError::invalid("The body could not be read")),
            Err(_) => Err(ApiError::new(
                ErrorType::RequestTimeout,
                "The body did not arrive in time",
            )),
        }
    }
}
