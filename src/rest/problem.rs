//! Bodies of errors, one shape for each surface.

use std::collections::BTreeMap;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::ApiError;
use super::surface::Surface;

const JSON: &str = "application/json";

/// An error of the native surface: problem details of RFC 9457, as `application/problem+json`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Problem {
    /// What kind of problem it is: `urn:engram:problem:` and the `code`.
    #[schema(pattern = "^urn:engram:problem:[a-z_]+$")]
    r#type: String,
    /// The kind, for people; always the same for one `code`.
    title: &'static str,
    /// The status code of the answer.
    #[schema(minimum = 400, maximum = 599)]
    status: u16,
    /// What happened, for people.
    detail: String,
    /// The kind, for programs.
    #[schema(pattern = "^[a-z_]+$")]
    code: &'static str,
    /// The same request may succeed later.
    retryable: bool,
    /// Bytes that the namespace holds; of `quota_exceeded`, like `quota_bytes` and `need_bytes`.
    #[serde(flatten)]
    #[schema(value_type = QuotaNumbers)]
    numbers: BTreeMap<&'static str, u64>,
    /// Always `false`.
    success: bool,
    /// The same as `detail`.
    message: String,
    /// The same once more, in the shape of the other surfaces.
    error: Detail,
}

/// An error of the compatible surface at the root.
#[derive(Debug, Serialize, ToSchema)]
pub struct Failure {
    /// Always `false`.
    success: bool,
    /// What happened, for people.
    message: String,
    /// What happened.
    error: Detail,
}

/// What happened, as the compatible surface says it.
#[derive(Debug, Serialize, ToSchema)]
pub struct Detail {
    /// The kind, for programs.
    #[schema(pattern = "^[a-z_]+$")]
    r#type: &'static str,
    /// What happened, for people.
    message: String,
    /// The same request may succeed later.
    retryable: bool,
    /// See [`Problem`].
    #[serde(flatten)]
    #[schema(value_type = QuotaNumbers)]
    numbers: BTreeMap<&'static str, u64>,
}

/// An error of the endpoints that clients of OpenAI's API call.
#[derive(Debug, Serialize, ToSchema)]
pub struct OpenAiFailure {
    /// Always `false`.
    success: bool,
    /// What happened, for people.
    message: String,
    /// What happened.
    error: OpenAiDetail,
}

/// What happened, in the shape of OpenAI's errors.
#[derive(Debug, Serialize, ToSchema)]
pub struct OpenAiDetail {
    /// The field that is wrong; never told.
    param: Option<String>,
    /// The kind, for programs: the same as `type`.
    #[schema(pattern = "^[a-z_]+$")]
    code: &'static str,
    /// The rest.
    #[serde(flatten)]
    detail: Detail,
}

/// Numbers of `quota_exceeded`.
#[derive(Debug, Serialize, ToSchema)]
pub struct QuotaNumbers {
    /// Bytes that the namespace holds.
    used_bytes: Option<u64>,
    /// Bytes that it may hold.
    quota_bytes: Option<u64>,
    /// Bytes that would have come.
    need_bytes: Option<u64>,
}

/// The media type of [`Problem`].
pub const PROBLEM_JSON: &str = "application/problem+json";

// === impl ApiError ===

impl ApiError {
    /// The body of a response that carries an error becomes that of a surface; what else it says
    /// stays. Other responses stay as they are.
    pub fn shape(response: &mut Response, surface: Surface) {
        let Some(error) = response.extensions_mut().remove::<ApiError>() else {
            return;
        };
        let (kind, body) = match surface {
            Surface::Native => (PROBLEM_JSON, serde_json::to_vec(&Problem::from(&error))),
            Surface::Compatible => (JSON, serde_json::to_vec(&Failure::from(&error))),
            Surface::OpenAi => (JSON, serde_json::to_vec(&OpenAiFailure::from(&error))),
        };
        // Texts and numbers alone: it cannot fail.
        *response.body_mut() = Body::from(body.unwrap_or_default());
        let headers = response.headers_mut();
        headers.remove(header::CONTENT_LENGTH);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    }
}

// === impl From ===

impl From<&ApiError> for Detail {
    fn from(error: &ApiError) -> Self {
        Detail {
            r#type: error.kind.as_str(),
            message: error.message.clone(),
            retryable: error.retryable,
            numbers: error.numbers.iter().copied().collect(),
        }
    }
}

impl From<&ApiError> for Problem {
    fn from(error: &ApiError) -> Self {
        let code = error.kind.as_str();
        Problem {
            r#type: format!("urn:engram:problem:{code}"),
            title: error.kind.title(),
            status: error.kind.status().as_u16(),
            detail: error.message.clone(),
            code,
            retryable: error.retryable,
            numbers: error.numbers.iter().copied().collect(),
            success: false,
            message: error.message.clone(),
            error: error.into(),
        }
    }
}

impl From<&ApiError> for Failure {
    fn from(error: &ApiError) -> Self {
        Failure {
            success: false,
            message: error.message.clone(),
            error: error.into(),
        }
    }
}

impl From<&ApiError> for OpenAiFailure {
    fn from(error: &ApiError) -> Self {
        OpenAiFailure {
            success: false,
            message: error.message.clone(),
            error: OpenAiDetail {
                param: None,
                code: error.kind.as_str(),
                detail: error.into(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse as _;

    use super::super::error::ErrorType;
    use super::*;

    async fn body_of(error: ApiError, surface: Surface) -> (String, serde_json::Value) {
        let mut response = error.into_response();
        ApiError::shape(&mut response, surface);
        let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap();
        let kind = kind.to_owned();
        let body = axum::body::to_bytes(response.into_body(), 4096).await;
        (kind, serde_json::from_slice(&body.unwrap()).unwrap())
    }

    #[tokio::test]
    async fn each_surface_has_its_shape() {
        let error = ApiError::new(ErrorType::QuotaExceeded, "full").with([("need_bytes", 7)]);
        let (kind, body) = body_of(error.clone(), Surface::Native).await;
        assert_eq!(kind, "application/problem+json");
        assert_eq!(body["type"], "urn:engram:problem:quota_exceeded");
        assert_eq!(
            (&body["status"], &body["retryable"]),
            (&507.into(), &true.into())
        );
        assert_eq!(
            (&body["detail"], &body["need_bytes"]),
            (&"full".into(), &7.into())
        );
        assert_eq!(body["error"]["type"], body["code"]);
        let (kind, body) = body_of(error.clone(), Surface::Compatible).await;
        assert_eq!(kind, "application/json");
        let expected = serde_json::json!({
            "success": false,
            "message": "full",
            "error": {"type": "quota_exceeded", "message": "full", "retryable": true, "need_bytes": 7},
        });
        assert_eq!(body, expected);
        let (_, body) = body_of(error, Surface::OpenAi).await;
        assert_eq!(body["error"]["code"], "quota_exceeded");
        assert_eq!(
            (&body["error"]["message"], &body["error"]["param"]),
            (&"full".into(), &serde_json::Value::Null)
        );
    }
}
