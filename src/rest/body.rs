//! Request bodies: JSON objects and query strings, read strictly where it matters.
//!
//! Unknown fields are ignored, as clients of the compatible surface send fields of their own
//! (`rid`, `http_worker_ipc` and others); a known field of a wrong type is refused. A body must be
//! declared as JSON: what a form of a foreign web page can send is not.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::header;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::{ApiError, ErrorType};

/// The fields of a JSON object, taken one by one, so that a refusal names the field.
#[derive(Debug)]
pub struct Fields(Map<String, Value>);

/// The query string. A type that denies unknown fields refuses unknown parameters.
#[derive(Debug)]
pub struct Params<T>(pub T);

/// No parameter at all.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let declared = request
            .headers()
            .get(header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split(';').next())
            .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"));
        if !declared {
            return Err(ApiError::new(
                ErrorType::UnsupportedMediaType,
                "Send the body with `Content-Type: application/json`",
            ));
        }
        let bytes = Bytes::from_request(request, state)
            .await
            .map_err(|error| ApiError::invalid(error.body_text()))?;
        Fields::parse(&bytes)
    }
}

impl Fields {
    /// The fields in the bytes of a body.
    ///
    /// # Errors
    /// 400 when they are not a JSON object.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(ApiError::invalid("The body must be a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("The body is not JSON: {error}"))),
        }
    }

    /// The field is there, null or not.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// A field, if it is there and not null.
    ///
    /// # Errors
    /// 400 when it has another type.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => T::deserialize(value)
                .map(Some)
                .map_err(|error| ApiError::invalid(format!("`{name}`: {error}"))),
        }
    }
}

impl Fields {
    /// All of it as one type, which denies what it does not know.
    ///
    /// # Errors
    /// 400 which names the field.
    pub fn whole<T: DeserializeOwned>(self) -> Result<T, ApiError> {
        T::deserialize(Value::Object(self.0)).map_err(|error| ApiError::invalid(error.to_string()))
    }

    /// What was not taken.
    pub fn rest(&self) -> &Map<String, Value> {
        &self.0
    }
}

/// Each `%` begins an escape, and together they are UTF-8: others would be read as something that
/// nobody wrote.
///
/// # Errors
/// 400.
pub fn check_escapes(text: &str) -> Result<(), ApiError> {
    let bad = || ApiError::invalid("The path or the query is not percent-encoded UTF-8");
    let mut pieces = text.split('%');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let (digits, rest) = piece.split_at_checked(2).ok_or_else(bad)?;
        let hexadecimal = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        let byte = u8::from_str_radix(digits, 16).ok().filter(|_| hexadecimal);
        bytes.push(byte.ok_or_else(bad)?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    std::str::from_utf8(&bytes).map(|_| ()).map_err(|_| bad())
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        check_escapes(parts.uri.query().unwrap_or_default())?;
        match Query::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(Params(value)),
            Err(error) => Err(ApiError::invalid(error.body_text())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_whole_and_utf8() {
        for good in ["", "a=b", "%41", "%C3%A4", "a%2Fb?", "%f0%9f%a6%80", "ä"] {
            assert!(check_escapes(good).is_ok(), "{good}");
        }
        for bad in [
            "%",
            "%4",
            "a%zz",
            "%+1",
            "%ff",
            "%C3",
            "%C3%C3%A4",
            "%ä",
            "%%41",
        ] {
            assert!(check_escapes(bad).is_err(), "{bad}");
        }
    }
}
