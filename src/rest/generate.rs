//! What generates: `POST /v1/generate`, and requests that pass through to the inference server.

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;

use super::bodies::{GenerateBody, ServerSentEvent};
use super::conversations::one_of;
use super::error::{ApiError, ErrorType};
use super::guard::Admitted;
use super::names::checked;
use super::state::Shared;
use crate::gateway::{Ask, Fields, GatewayError, PassRequest, Reply, Target};
use crate::upstream::{Refusal, UpstreamError};

/// What is read of the query. All else in it is the inference server's.
#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct Tenant {
    tenant: Option<String>,
}

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

/// Text as tokens.
#[utoipa::path(
    post,
    path = "/tokenize",
    tag = "passed",
    request_body = Object,
    responses((status = 200, description = "The inference server's", content((Object = "application/json"))))
)]
pub async fn tokenize(
    shared: State<Shared>,
    admitted: Extension<Admitted>,
    request: Request,
) -> Response {
    pass(shared, admitted, request).await
}

/// Tokens as text.
#[utoipa::path(
    post,
    path = "/detokenize",
    tag = "passed",
    request_body = Object,
    responses((status = 200, description = "The inference server's", content((Object = "application/json"))))
)]
pub async fn detokenize(
    shared: State<Shared>,
    admitted: Extension<Admitted>,
    request: Request,
) -> Response {
    pass(shared, admitted, request).await
}

/// Text as tokens.
#[utoipa::path(
    post,
    path = "/v1/tokenize",
    tag = "passed",
    request_body = Object,
    responses((status = 200, description = "The inference server's", content((Object = "application/json"))))
)]
pub async fn tokenize_v1(
    shared: State<Shared>,
    admitted: Extension<Admitted>,
    request: Request,
) -> Response {
    pass(shared, admitted, request).await
}

/// Tokens as text.
#[utoipa::path(
    post,
    path = "/v1/detokenize",
    tag = "passed",
    request_body = Object,
    responses((status = 200, description = "The inference server's", content((Object = "application/json"))))
)]
pub async fn detokenize_v1(
    shared: State<Shared>,
    admitted: Extension<Admitted>,
    request: Request,
) -> Response {
    pass(shared, admitted, request).await
}

/// The models that the inference server has.
#[utoipa::path(
    get,
    path = "/v1/models",
    tag = "passed",
    responses((status = 200, description = "The inference server's", content((Object = "application/json"))))
)]
pub async fn models(
    shared: State<Shared>,
    admitted: Extension<Admitted>,
    request: Request,
) -> Response {
    pass(shared, admitted, request).await
}

/// Whether the inference server answers.
#[utoipa::path(
    get,
    path = "/health",
    tag = "passed",
    responses((status = 200, description = "The inference server's", content((Object = "application/json"))))
)]
pub async fn health(
    shared: State<Shared>,
    admitted: Extension<Admitted>,
    request: Request,
) -> Response {
    pass(shared, admitted, request).await
}

/// The inference server's own settings.
#[utoipa::path(
    get,
    path = "/server_info",
    tag = "passed",
    responses((status = 200, description = "The inference server's", content((Object = "application/json"))))
)]
pub async fn server_info(
    shared: State<Shared>,
    admitted: Extension<Admitted>,
    request: Request,
) -> Response {
    pass(shared, admitted, request).await
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

/// A request as it was sent.
pub(super) struct Sent {
    head: axum::http::request::Parts,
    body: Bytes,
}

// === impl Sent ===

impl Sent {
    /// Reads all of it. A body must be declared as JSON: what a form of a foreign web page can send
    /// is not.
    pub async fn read(request: Request) -> Result<Sent, Response> {
        let (head, body) = request.into_parts();
        let declared = head
            .headers
            .get(header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split(';').next())
            .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"));
        // The guard has read and limited it.
        let body = axum::body::to_bytes(body, usize::MAX)
            .await
            .map_err(|error| ApiError::invalid(error.to_string()).into_response())?;
        if head.method == axum::http::Method::POST && !declared {
            return Err(ApiError::new(
                ErrorType::UnsupportedMediaType,
                "Send the body with `Content-Type: application/json`",
            )
            .into_response());
        }
        Ok(Sent { head, body })
    }

    /// What it asks of a conversation; `None` where it names none by these fields, or is not JSON.
    pub fn ask(&self, admitted: &Admitted, names: &[&str]) -> Result<Option<Ask>, ApiError> {
        let Some(mut ask) = ask_of(&self.body, admitted, names)? else {
            return Ok(None);
        };
        let query = self.head.uri.query().unwrap_or_default();
        let uri: axum::http::Uri = format!("/?{query}").parse().unwrap_or_default();
        let whose = axum::extract::Query::<Tenant>::try_from_uri(&uri);
        let Tenant { tenant } = whose
            .map_err(|error| ApiError::invalid(error.body_text()))?
            .0;
        let tenant = checked("tenant", tenant)?;
        ask.target.tenant = one_of("tenant", ask.target.tenant, "?tenant=", tenant)?;
        Ok(Some(ask))
    }

    /// Sends it on.
    pub async fn pass(self, shared: &Shared, admitted: &Admitted) -> Result<Reply, Response> {
        let Sent { head, body } = self;
        let path = head.uri.path_and_query();
        let headers = head.headers.iter();
        let request = PassRequest {
            method: head.method.clone(),
            path: path.map_or("/", |path| path.as_str()).to_owned(),
            headers: headers
                .map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec()))
                .collect(),
            body,
            hide_token: admitted.by_token,
        };
        let gateway = shared.gateway().map_err(refusal)?;
        gateway.pass(request).await.map_err(refusal)
    }
}

fn names_conversation(body: &[u8]) -> bool {
    let name = b"conversation_id";
    body.windows(name.len()).any(|bytes| bytes == name)
}

/// What a body asks of a conversation.
pub(super) fn ask_of(
    body: &[u8],
    admitted: &Admitted,
    names: &[&str],
) -> Result<Option<Ask>, ApiError> {
    let mut body = match serde_json::from_slice(body) {
        Ok(Value::Object(body)) => body,
        Ok(_) => return Ok(None),
        // Another reader might take it, and forget the conversation that it names.
        Err(error) if names_conversation(body) => {
            return Err(ApiError::invalid(format!("The body is not JSON: {error}")));
        }
        Err(_) => return Ok(None),
    };
    let given = |name: &&str| body.get(*name).is_some_and(|value| !value.is_null());
    if !names.iter().any(given) {
        return Ok(None);
    }
    let mut text = |name: &str| match body.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => checked(name, Some(text)),
        Some(_) => Err(ApiError::invalid(format!("`{name}` is not a text"))),
    };
    let tenant = text("tenant")?;
    let mut conversation = None;
    for name in names {
        conversation = one_of("conversation_id", conversation, name, text(name)?)?;
    }
    let conversation = conversation.unwrap_or_default();
    let branch = one_of(
        "branch",
        text("branch")?,
        "branch_name",
        text("branch_name")?,
    )?;
    let mut turn = None;
    for name in ["turn", "turn_number"] {
        match body.remove(name) {
            None | Some(Value::Null) => {}
            Some(value) => {
                let number = value.as_u64().and_then(|it| u32::try_from(it).ok());
                let number = number.filter(|number| *number > 0);
                if number.is_none() {
                    let text = format!("`{name}` is not a number that counts from 1");
                    return Err(ApiError::invalid(text));
                }
                turn = one_of("turn", turn, name, number)?;
            }
        }
    }
    if turn.is_some() && branch.is_some() {
        return Err(ApiError::invalid("either a turn or a branch"));
    }
    Ok(Some(Ask {
        request_id: admitted.id.clone(),
        target: Target {
            tenant,
            conversation,
            turn,
            branch,
        },
        body,
    }))
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

    fn ask(body: &str) -> Result<Option<Ask>, ApiError> {
        let admitted = Admitted {
            id: "r".into(),
            by_token: false,
        };
        ask_of(
            body.as_bytes(),
            &admitted,
            &["conversation_id", "session_id"],
        )
    }

    #[test]
    fn a_conversation_is_asked_for_by_name() {
        let good = ask(r#"{"conversation_id":"c:1","turn_number":3,"x":[1]}"#);
        let Ask { target, body, .. } = good.unwrap().unwrap();
        assert_eq!((&*target.conversation, target.turn), ("c:1", Some(3)));
        assert_eq!(Value::Object(body).to_string(), r#"{"x":[1]}"#);
        let branch = ask(r#"{"conversation_id":"c","branch":"b","turn":null}"#);
        assert_eq!(branch.unwrap().unwrap().target.branch.as_deref(), Some("b"));
        for none in [
            "",
            "[]",
            "{",
            "{}",
            r#"{"conversation_id":null,"turn":"x"}"#,
        ] {
            assert!(ask(none).unwrap().is_none(), "{none}");
        }
    }

    #[test]
    fn every_name_of_a_field_says_the_same() {
        let session = ask(r#"{"session_id":"c","tenant":"t"}"#).unwrap().unwrap();
        let Target {
            tenant,
            conversation,
            ..
        } = session.target;
        assert_eq!((tenant.as_deref(), &*conversation), (Some("t"), "c"));
        assert!(session.body.is_empty());
        for bad in [
            r#"{"session_id":"c","conversation_id":"d"}"#,
            r#"{"session_id":"c","turn":1,"turn_number":2}"#,
            r#"{"session_id":"c","branch":"a","branch_name":"b"}"#,
        ] {
            assert!(ask(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bad_targets_are_refused() {
        for more in [
            r#""turn":0"#,
            r#""turn":-1"#,
            r#""turn":"1""#,
            r#""turn_number":4294967296"#,
            r#""branch":"../x""#,
            r#""branch":7"#,
            r#""turn":1,"branch":"b""#,
        ] {
            let error = ask(&format!(r#"{{"conversation_id":"c",{more}}}"#)).unwrap_err();
            assert_eq!(error.kind(), ErrorType::InvalidRequest, "{more}");
        }
        for name in ["7", r#""""#, r#""/x""#, r#""a\u0000""#] {
            assert!(
                ask(&format!(r#"{{"conversation_id":{name}}}"#)).is_err(),
                "{name}"
            );
        }
    }

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
