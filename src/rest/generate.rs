//! What generates: `POST /v1/generate`, and requests that pass through to the inference server.

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;

use super::bodies::{GenerateBody, ServerSentEvent};
use super::error::{ApiError, ErrorType};
use super::guard::Admitted;
use super::sent::Sent;
use super::state::Shared;
use crate::gateway::{Ask, Fields, GatewayError, Reply};
use crate::upstream::{Refusal, UpstreamError};

/// Paths of requests that the inference server answers.
const PATHS: [&str; 12] = [
    "/v1/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize_chat",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/models",
    "/health",
    "/server_info",
];
/// How a conversation is named where `session_id` is the server's own.
pub(super) const NAMED: [&str; 1] = ["conversation_id"];
/// Here the body says it.
const RESTORE: &str = "/restore_snapshot";

/// Whether a request is the inference server's to answer, as far as is known of it.
pub(super) fn generates(path: &str, body: Option<&Bytes>) -> bool {
    let creates = |body: &Bytes| {
        let body: Option<Fields> = serde_json::from_slice(body).ok();
        body.is_some_and(|body| body.get("create_new_request") == Some(&Value::Bool(true)))
    };
    PATHS.contains(&path) || (path == RESTORE && body.is_some_and(creates))
}

/// Go on with a conversation: tokens or text, only what is new.
#[utoipa::path(
    post,
    path = "/v1/generate",
    tag = "generate",
    request_body = GenerateBody,
    responses((status = 200, description = "As SGLang's, with `usage` and `engram`", content(
        (Object = "application/json"),
        (ServerSentEvent = "text/event-stream"),
    )))
)]
pub async fn generate(
    State(shared): State<Shared>,
    Extension(admitted): Extension<Admitted>,
    request: Request,
) -> Response {
    let work = async {
        let sent = Sent::read(request).await?;
        let ask = sent.ask(&admitted, &["conversation_id", "session_id"]);
        let Some(ask) = ask.map_err(ApiError::into_response)? else {
            return Err(ApiError::invalid("`conversation_id` is needed").into_response());
        };
        let gateway = shared.gateway().map_err(refusal)?;
        gateway.generate(ask).await.map_err(refusal)
    };
    answer(work.await)
}

/// The server's own, where a `conversation_id` is the name of the conversation that a whole prompt
/// belongs to.
#[utoipa::path(
    post,
    path = "/generate",
    tag = "passed",
    request_body = Object,
    responses((status = 200, description = "The inference server's", content(
        (Object = "application/json"),
        (ServerSentEvent = "text/event-stream"),
    )))
)]
pub async fn native(
    State(shared): State<Shared>,
    Extension(admitted): Extension<Admitted>,
    request: Request,
) -> Response {
    let work = async {
        let mut sent = Sent::read(request).await?;
        let ask = sent.ask(&admitted, &NAMED);
        if let Some(Ask {
            target, mut body, ..
        }) = ask.map_err(ApiError::into_response)?
        {
            let target = shared
                .gateway()
                .and_then(|gateway| gateway.resolved(target));
            let conversation = target.map_err(refusal)?.conversation;
            body.insert("session_id".into(), conversation.into());
            sent.body = Bytes::from(Value::Object(body).to_string());
        }
        sent.pass(&shared, &admitted).await
    };
    answer(work.await)
}

/// Handlers of what the inference server answers by itself, each with its place in the document.
macro_rules! passed {
    ($($(#[$doc:meta])* $name:ident: $method:ident $path:literal $(, $body:ident = $object:ident)?;)*) => {$(
        $(#[$doc])*
        #[utoipa::path(
            $method,
            path = $path,
            tag = "passed",
            $($body = $object,)?
            responses((status = 200, description = "The inference server's", content((Object = "application/json"))))
        )]
        pub async fn $name(
            shared: State<Shared>,
            admitted: Extension<Admitted>,
            request: Request,
        ) -> Response {
            pass(shared, admitted, request).await
        }
    )*};
}

passed! {
    /// Text as tokens.
    tokenize: post "/tokenize", request_body = Object;
    /// Tokens as text.
    detokenize: post "/detokenize", request_body = Object;
    /// Text as tokens.
    tokenize_v1: post "/v1/tokenize", request_body = Object;
    /// Tokens as text.
    detokenize_v1: post "/v1/detokenize", request_body = Object;
    /// The models that the inference server has.
    models: get "/v1/models";
    /// Whether the inference server answers.
    health: get "/health";
    /// The inference server's own settings.
    server_info: get "/server_info";
}

/// Whatever the server says to it.
async fn pass(
    State(shared): State<Shared>,
    Extension(admitted): Extension<Admitted>,
    request: Request,
) -> Response {
    let work = async {
        let sent = Sent::read(request).await?;
        sent.pass(&shared, &admitted).await
    };
    answer(work.await)
}

/// The response of an answer.
pub(super) fn answer(reply: Result<Reply, Response>) -> Response {
    match reply {
        Ok(Reply::Json(value)) => axum::Json(value).into_response(),
        Ok(Reply::Events(events)) => {
            let kind = [
                (header::CONTENT_TYPE, "text/event-stream"),
                (header::CACHE_CONTROL, "no-cache"),
            ];
            (kind, Body::from_stream(events)).into_response()
        }
        Ok(Reply::Passed {
            status,
            headers,
            body,
        }) => {
            let mut response = Response::new(Body::from_stream(body));
            *response.status_mut() =
                StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
            for (name, value) in headers {
                if let Ok(name) = HeaderName::try_from(name)
                    && let Ok(value) = HeaderValue::from_bytes(&value)
                {
                    response.headers_mut().append(name, value);
                }
            }
            response
        }
        Err(response) => response,
    }
}

/// The response of an error. What the server refuses is said in its own words.
pub(super) fn refusal(error: GatewayError) -> Response {
    let kind = match error {
        GatewayError::Service(error) => return ApiError::from(error).into_response(),
        GatewayError::Upstream(UpstreamError::Refused(refusal)) => return refused(*refusal),
        GatewayError::NotConfigured | GatewayError::NotImplemented(_) => ErrorType::NotImplemented,
        GatewayError::Invalid(_) | GatewayError::TooLong(_) => ErrorType::InvalidRequest,
        GatewayError::OtherNamespace(_) | GatewayError::OtherTenant => ErrorType::Mismatch,
        // The same id never becomes free again there.
        GatewayError::UsedRid(_) => {
            let error = ApiError::new(ErrorType::Conflict, error.to_string());
            return error.for_good().into_response();
        }
        GatewayError::Unsupported(_) => ErrorType::Unsupported,
        GatewayError::Tokenization(_) => ErrorType::Tokenization,
        GatewayError::DuplicateRid(_) => ErrorType::Conflict,
        GatewayError::HeadTaken | GatewayError::TooMany => ErrorType::Busy,
        GatewayError::TurnUnknown(_) | GatewayError::Starting | GatewayError::Stopping => {
            ErrorType::Unavailable
        }
        GatewayError::Upstream(UpstreamError::Unreachable(_)) => ErrorType::UpstreamUnavailable,
        GatewayError::Upstream(UpstreamError::Timeout(_)) => ErrorType::UpstreamTimeout,
        GatewayError::Upstream(_) => ErrorType::BadUpstream,
    };
    ApiError::new(kind, error.to_string()).into_response()
}

fn refused(refusal: Refusal) -> Response {
    let Refusal {
        status,
        content_type,
        body,
    } = refusal;
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST);
    if let Some(kind) = content_type {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_generates_is_known_by_its_path_or_its_body() {
        let creates = Bytes::from_static(br#"{"create_new_request": true}"#);
        let restores = Bytes::from_static(br#"{"create_new_request": false}"#);
        assert!(generates("/v1/generate", None));
        assert!(generates(RESTORE, Some(&creates)));
        assert!(!generates(RESTORE, Some(&restores)) && !generates(RESTORE, None));
        assert!(!generates("/save_snapshot", Some(&creates)));
    }
}
