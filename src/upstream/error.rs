//! What can go wrong with the server, and what a client can do about it.

use bytes::Bytes;
use reqwest::StatusCode;
use reqwest::header::HeaderValue;
use serde_json::Value;

/// Longest part of a server's words that is repeated.
const WORDS_MAX: usize = 500;

/// Why there is no good answer of the server.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// Nobody answers there; or the server says that it is not there for requests now.
    #[error("the inference server cannot be reached: {0}")]
    Unreachable(String),
    /// It took too long.
    #[error("the inference server: {0}")]
    Timeout(&'static str),
    /// The connection ended in the middle of an answer.
    #[error("the inference server ended its answer early: {0}")]
    Broken(String),
    /// The answer is larger than `upstream.max_answer`.
    #[error("the inference server's answer is larger than upstream.max_answer")]
    TooLarge,
    /// The server failed, or answered what it never should.
    #[error("the inference server failed: {0}")]
    Bad(String),
    /// The server refuses the request, with a reason for who sent it.
    #[error("the inference server refuses: status {}", .0.status)]
    Refused(Box<Refusal>),
}

/// A refusal as the server wrote it: a status of 400 to 499.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Its status.
    pub status: u16,
    /// The type of its body.
    pub content_type: Option<HeaderValue>,
    /// Its body.
    pub body: Bytes,
}

/// What a bad status means.
pub(super) fn refused(
    status: StatusCode,
    content_type: Option<HeaderValue>,
    body: Bytes,
) -> UpstreamError {
    if status.is_client_error() {
        return UpstreamError::Refused(Box::new(Refusal {
            status: status.as_u16(),
            content_type,
            body,
        }));
    }
    let text = format!("status {}{}", status.as_u16(), words(&body));
    match status {
        StatusCode::SERVICE_UNAVAILABLE => UpstreamError::Unreachable(text),
        StatusCode::GATEWAY_TIMEOUT => UpstreamError::Timeout("it says that it took too long"),
        _ => UpstreamError::Bad(text),
    }
}

/// What the server says in an error, wherever in the body it says it.
fn words(body: &[u8]) -> String {
    let said: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    let said = ["/error/message", "/message", "/error"]
        .iter()
        .find_map(|at| said.pointer(at).and_then(Value::as_str));
    said.map_or_else(String::new, |said| {
        format!(": {}", said.chars().take(WORDS_MAX).collect::<String>())
    })
}

/// A request that got no head of an answer.
pub(super) fn failed(error: &reqwest::Error) -> UpstreamError {
    let reason = root_cause(error);
    match error.is_timeout() {
        true => UpstreamError::Timeout("connecting took too long"),
        false if error.is_connect() => UpstreamError::Unreachable(reason),
        false => UpstreamError::Broken(reason),
    }
}

/// An answer that broke off.
pub(super) fn broken(error: &reqwest::Error) -> UpstreamError {
    UpstreamError::Broken(root_cause(error))
}

fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_what_can_be_done() {
        let of = |status: u16, body: &'static str| {
            let status = StatusCode::from_u16(status).unwrap();
            refused(status, None, Bytes::from_static(body.as_bytes()))
        };
        assert!(matches!(of(400, "x"), UpstreamError::Refused(_)));
        assert!(matches!(of(429, ""), UpstreamError::Refused(_)));
        assert!(matches!(of(503, "{}"), UpstreamError::Unreachable(_)));
        assert!(matches!(of(504, ""), UpstreamError::Timeout(_)));
        let error = of(500, r#"{"error":{"message":"out of memory"}}"#).to_string();
        assert!(error.ends_with("status 500: out of memory"), "{error}");
        assert!(of(302, "").to_string().ends_with("status 302"));
    }
}
