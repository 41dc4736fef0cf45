//! Errors of the REST surface: one type, a status code each, and a body in the shape that clients of
//! each surface read.
//!
//! A handler answers with an [`ApiError`]; what it looks like is known only with the path. So the
//! response carries the error itself, and the guard writes the body, see [`ApiError::shape`].

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::problem::Failure;

/// What went wrong, as clients see it in `error.type`.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ErrorType {
    /// The request is malformed or breaks a rule: 400.
    InvalidRequest,
    /// The token is missing or wrong: 401.
    Unauthorized,
    /// The `Host` header names another machine: 403.
    HostNotAllowed,
    /// There is no such path, conversation or snapshot: 404.
    NotFound,
    /// The path exists, for another method: 405.
    MethodNotAllowed,
    /// The body did not arrive in time: 408.
    RequestTimeout,
    /// The conversation is known, and no state of it was kept: 409.
    NoState,
    /// The turn is known, and not what was said in it: 409.
    TokensUnknown,
    /// There is one of that name: 409.
    AlreadyExists,
    /// The snapshot belongs to another model, shape or namespace: 409.
    Mismatch,
    /// Something that is being read or written is in the way: 409.
    Conflict,
    /// It is not, or not any more, what `If-Match` names: 412.
    PreconditionFailed,
    /// The body is larger than `rest.max_body`: 413.
    TooLarge,
    /// The body is not declared as `application/json`: 415.
    UnsupportedMediaType,
    /// A fault of the daemon: 500.
    Internal,
    /// Stored bytes are missing or damaged: 500.
    Data,
    /// The daemon cannot do this: 501.
    NotImplemented,
    /// Too much at a time, try again: 503.
    Busy,
    /// The request asks for what a conversation has no room for: 400.
    Unsupported,
    /// The chat template or the tokenizer refuses the messages: 400.
    Tokenization,
    /// The inference server failed, or broke its answer off: 502.
    BadUpstream,
    /// The inference server cannot be reached, or takes no requests: 503.
    UpstreamUnavailable,
    /// The inference server took too long: 504.
    UpstreamTimeout,
    /// Not ready, shutting down, or without what this needs: 503.
    Unavailable,
    /// The answer took too long; the work may still be done: 503.
    Timeout,
    /// No room in a tier: 507.
    NoSpace,
    /// The namespace holds its quota: 507.
    QuotaExceeded,
}

/// An error response.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub(super) kind: ErrorType,
    pub(super) message: String,
    pub(super) retryable: bool,
    /// Numbers that belong to it.
    pub(super) numbers: Vec<(&'static str, u64)>,
}

// === impl ErrorType ===

impl ErrorType {
    /// Every type, for documents and tests.
    pub const ALL: [ErrorType; 27] = [
        ErrorType::InvalidRequest,
        ErrorType::Unauthorized,
        ErrorType::HostNotAllowed,
        ErrorType::NotFound,
        ErrorType::MethodNotAllowed,
        ErrorType::RequestTimeout,
        ErrorType::NoState,
        ErrorType::TokensUnknown,
        ErrorType::AlreadyExists,
        ErrorType::Mismatch,
        ErrorType::Conflict,
        ErrorType::PreconditionFailed,
        ErrorType::TooLarge,
        ErrorType::UnsupportedMediaType,
        ErrorType::Internal,
        ErrorType::Data,
        ErrorType::NotImplemented,
        ErrorType::Busy,
        ErrorType::Unavailable,
        ErrorType::Timeout,
        ErrorType::NoSpace,
        ErrorType::QuotaExceeded,
        ErrorType::Unsupported,
        ErrorType::Tokenization,
        ErrorType::BadUpstream,
        ErrorType::UpstreamUnavailable,
        ErrorType::UpstreamTimeout,
    ];

    /// The kind for people, in a few words.
    pub fn title(self) -> &'static str {
        match self {
            ErrorType::InvalidRequest => "The request breaks a rule",
            ErrorType::Unauthorized => "The token is missing or wrong",
            ErrorType::HostNotAllowed => "The Host header names another machine",
            ErrorType::NotFound => "There is no such thing",
            ErrorType::MethodNotAllowed => "The path is for another method",
            ErrorType::RequestTimeout => "The request did not arrive in time",
            ErrorType::NoState => "No state is stored",
            ErrorType::TokensUnknown => "The tokens are not known",
            ErrorType::AlreadyExists => "There is one of that name",
            ErrorType::Mismatch => "It belongs to another model",
            ErrorType::Conflict => "Something is in the way",
            ErrorType::PreconditionFailed => "It has changed",
            ErrorType::TooLarge => "The body is too large",
            ErrorType::UnsupportedMediaType => "The body is of another type",
            ErrorType::Internal => "The daemon failed",
            ErrorType::Data => "Stored bytes are missing or damaged",
            ErrorType::NotImplemented => "The daemon cannot do this",
            ErrorType::Busy => "Too much at a time",
            ErrorType::Unavailable => "Not now",
            ErrorType::Timeout => "No answer in time",
            ErrorType::NoSpace => "No room",
            ErrorType::QuotaExceeded => "The namespace holds its quota",
            ErrorType::Unsupported => "A conversation has no room for this",
            ErrorType::Tokenization => "The messages cannot be tokenized",
            ErrorType::BadUpstream => "The inference server failed",
            ErrorType::UpstreamUnavailable => "The inference server cannot be reached",
            ErrorType::UpstreamTimeout => "The inference server took too long",
        }
    }

    /// The name in `error.type` and `code`.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorType::InvalidRequest => "invalid_request",
            ErrorType::Unauthorized => "unauthorized",
            ErrorType::HostNotAllowed => "host_not_allowed",
            ErrorType::NotFound => "not_found",
            ErrorType::MethodNotAllowed => "method_not_allowed",
            ErrorType::RequestTimeout => "request_timeout",
            ErrorType::NoState => "no_state",
            ErrorType::TokensUnknown => "tokens_unknown",
            ErrorType::AlreadyExists => "already_exists",
            ErrorType::Mismatch => "mismatch",
            ErrorType::Conflict => "conflict",
            ErrorType::PreconditionFailed => "precondition_failed",
            ErrorType::TooLarge => "too_large",
            ErrorType::UnsupportedMediaType => "unsupported_media_type",
            ErrorType::Internal => "internal",
            ErrorType::Data => "data",
            ErrorType::NotImplemented => "not_implemented",
            ErrorType::Busy => "busy",
            ErrorType::Unavailable => "unavailable",
            ErrorType::Timeout => "timeout",
            ErrorType::NoSpace => "no_space",
            ErrorType::QuotaExceeded => "quota_exceeded",
            ErrorType::Unsupported => "unsupported",
            ErrorType::Tokenization => "tokenization_error",
            ErrorType::BadUpstream => "bad_upstream",
            ErrorType::UpstreamUnavailable => "upstream_unavailable",
            ErrorType::UpstreamTimeout => "upstream_timeout",
        }
    }

    /// The status code.
    pub fn status(self) -> StatusCode {
        match self {
            ErrorType::InvalidRequest | ErrorType::Unsupported | ErrorType::Tokenization => {
                StatusCode::BAD_REQUEST
            }
            ErrorType::BadUpstream => StatusCode::BAD_GATEWAY,
            ErrorType::UpstreamTimeout => StatusCode::GATEWAY_TIMEOUT,
            ErrorType::Unauthorized => StatusCode::UNAUTHORIZED,
            ErrorType::HostNotAllowed => StatusCode::FORBIDDEN,
            ErrorType::NotFound => StatusCode::NOT_FOUND,
            ErrorType::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            ErrorType::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            ErrorType::NoState
            | ErrorType::TokensUnknown
            | ErrorType::AlreadyExists
            | ErrorType::Mismatch
            | ErrorType::Conflict => StatusCode::CONFLICT,
            ErrorType::PreconditionFailed => StatusCode::PRECONDITION_FAILED,
            ErrorType::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorType::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorType::Internal | ErrorType::Data => StatusCode::INTERNAL_SERVER_ERROR,
            ErrorType::NotImplemented => StatusCode::NOT_IMPLEMENTED,
            ErrorType::Busy
            | ErrorType::Unavailable
            | ErrorType::UpstreamUnavailable
            | ErrorType::Timeout => StatusCode::SERVICE_UNAVAILABLE,
            ErrorType::NoSpace | ErrorType::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
        }
    }

    /// Whether the same request may succeed later.
    fn retryable(self) -> bool {
        matches!(
            self,
            ErrorType::RequestTimeout
                | ErrorType::Conflict
                | ErrorType::Busy
                | ErrorType::Unavailable
                | ErrorType::BadUpstream
                | ErrorType::UpstreamUnavailable
                | ErrorType::UpstreamTimeout
                | ErrorType::Timeout
                | ErrorType::NoSpace
                | ErrorType::QuotaExceeded
        )
    }

    /// Seconds after which the same request is worth another try.
    fn retry_after(self) -> Option<&'static str> {
        match self {
            ErrorType::Busy
            | ErrorType::Unavailable
            | ErrorType::UpstreamUnavailable
            | ErrorType::Timeout => Some("1"),
            // Somebody has to make room first.
            ErrorType::NoSpace | ErrorType::QuotaExceeded => Some("10"),
            _ => None,
        }
    }
}

// === impl ApiError ===

impl ApiError {
    /// An error with a sentence for people.
    pub fn new(kind: ErrorType, message: impl Into<String>) -> ApiError {
        ApiError {
            kind,
            message: message.into(),
            retryable: kind.retryable(),
            numbers: Vec::new(),
        }
    }

    /// With numbers in `error`, for programs.
    pub fn with(self, numbers: impl IntoIterator<Item = (&'static str, u64)>) -> ApiError {
        ApiError {
            numbers: numbers.into_iter().collect(),
            ..self
        }
    }

    /// The same request never succeeds, although others of its kind may.
    pub fn for_good(self) -> ApiError {
        ApiError {
            retryable: false,
            ..self
        }
    }

    /// A broken rule of the request.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(ErrorType::InvalidRequest, message)
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorType {
        self.kind
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.kind.status(), Json(Failure::from(&self))).into_response();
        let headers = response.headers_mut();
        if self.kind == ErrorType::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.kind.retry_after().filter(|_| self.retryable) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(seconds));
        }
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_a_name_of_its_own_and_an_error_status() {
        let mut names: Vec<_> = ErrorType::ALL.iter().map(|kind| kind.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ErrorType::ALL.len());
        let mut titles: Vec<_> = ErrorType::ALL.iter().map(|kind| kind.title()).collect();
        titles.sort_unstable();
        titles.dedup();
        assert_eq!(titles.len(), ErrorType::ALL.len());
        for kind in ErrorType::ALL {
            let status = kind.status();
            assert!(
                status.is_client_error() || status.is_server_error(),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn only_what_may_succeed_later_says_when() {
        let after = |error: ApiError| {
            let response = error.into_response();
            let after = response.headers().get(header::RETRY_AFTER).cloned();
            (response.status().as_u16(), after)
        };
        let full = ApiError::new(ErrorType::NoSpace, "the disk is full");
        let (status, seconds) = after(full.clone());
        assert_eq!((status, seconds.unwrap().to_str().unwrap()), (507, "10"));
        assert_eq!(after(full.for_good()), (507, None));
        assert_eq!(after(ApiError::invalid("x")), (400, None));
        assert!(after(ApiError::new(ErrorType::Busy, "x")).1.is_some());
    }
}
