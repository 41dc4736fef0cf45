//! Entity tags: `ETag` and `If-None-Match` of what is read, `If-Match` of what changes it.
//!
//! A tag is a digest of the JSON that is shown, so it is another as soon as anything in it is. What
//! changes a thing compares the tag inside the service, under the lock of the change.

use axum::body::Body;
use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::error::{ApiError, ErrorType};
use crate::service::{Expected, Tag};

/// Tags of one header at most.
const TAGS_MAX: usize = 64;

/// The middleware of what is read: tags a good answer, and leaves it out if the client has it.
pub async fn tagged(request: Request, next: Next) -> Response {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    let known = request.headers().get(header::IF_NONE_MATCH).cloned();
    let response = next.run(request).await;
    if !reads || response.status() != StatusCode::OK {
        return response;
    }
    let (mut head, body) = response.into_parts();
    // A handler wrote it in one piece.
    let Ok(body) = axum::body::to_bytes(body, usize::MAX).await else {
        let text = "The answer could not be read";
        return ApiError::new(ErrorType::Internal, text).into_response();
    };
    let tag = Tag::of_json(&body);
    if let Ok(value) = HeaderValue::try_from(format!("\"{tag}\"")) {
        head.headers.insert(header::ETAG, value);
    }
    let again = HeaderValue::from_static("no-cache");
    head.headers.insert(header::CACHE_CONTROL, again);
    let known = known.as_ref().and_then(|value| value.to_str().ok());
    if known.is_some_and(|known| names(known, tag)) {
        head.status = StatusCode::NOT_MODIFIED;
        head.headers.remove(header::CONTENT_TYPE);
        head.headers.remove(header::CONTENT_LENGTH);
        return Response::from_parts(head, Body::empty());
    }
    Response::from_parts(head, Body::from(body))
}

/// Whether a list of tags has this one. Weak ones count: what is read is the same.
fn names(list: &str, tag: Tag) -> bool {
    let tag = format!("\"{tag}\"");
    let mut all = list.split(',').map(str::trim);
    all.any(|it| it == "*" || it.strip_prefix("W/").unwrap_or(it) == tag)
}

/// What `If-Match` asks.
#[derive(Debug)]
pub struct IfMatch(pub Expected);

impl<S: Send + Sync> FromRequestParts<S> for IfMatch {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        expected(&parts.headers).map(Self)
    }
}

/// # Errors
/// 400 for what is no list of tags. A tag that is not ours, or weak, is one that nothing has.
fn expected(headers: &HeaderMap) -> Result<Expected, ApiError> {
    let mut seen = Vec::new();
    let mut asked = false;
    for value in headers.get_all(IF_MATCH) {
        asked = true;
        let bad = || ApiError::invalid("`If-Match` is not a list of entity tags");
        let list = value.to_str().map_err(|_| bad())?;
        for tag in list.split(',').map(str::trim) {
            if tag == "*" {
                return Ok(Expected::Anything);
            }
            let weak = tag.strip_prefix("W/");
            let text = weak.unwrap_or(tag);
            let text = text.strip_prefix('"').and_then(|it| it.strip_suffix('"'));
            let text = text.ok_or_else(bad)?;
            if seen.len() >= TAGS_MAX {
                return Err(bad());
            }
            seen.extend(text.parse::<Tag>().ok().filter(|_| weak.is_none()));
        }
    }
    Ok(match asked {
        true => Expected::Seen(seen),
        false => Expected::Anything,
    })
}

const IF_MATCH: HeaderName = header::IF_MATCH;

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[&'static str]) -> Result<Option<usize>, ApiError> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(IF_MATCH, HeaderValue::from_static(value));
        }
        expected(&headers).map(|expected| match expected {
            Expected::Anything => None,
            Expected::Seen(seen) => Some(seen.len()),
        })
    }

    #[test]
    fn tags_are_read_as_they_are_written() {
        const TAG: &str = "\"00112233445566778899aabbccddeeff\"";
        assert_eq!(of(&[]).unwrap(), None);
        assert_eq!(of(&["*"]).unwrap(), None);
        assert_eq!(of(&[TAG]).unwrap(), Some(1));
        assert_eq!(of(&[TAG, TAG]).unwrap(), Some(2));
        // Somebody else's, and a weak one: nothing has them.
        assert_eq!(of(&["\"abc\""]).unwrap(), Some(0));
        assert_eq!(
            of(&["W/\"00112233445566778899aabbccddeeff\""]).unwrap(),
            Some(0)
        );
        for bad in ["", "abc", "\"abc", "\"a\",", "W/a"] {
            assert_eq!(
                of(&[bad]).unwrap_err().kind(),
                ErrorType::InvalidRequest,
                "{bad}"
            );
        }
        let tag = Tag::of_json(b"x");
        assert!(names("*", tag) && names(&format!("\"a\", W/\"{tag}\""), tag));
        assert!(!names("\"a\"", tag) && !names(&tag.to_string(), tag));
    }
}
