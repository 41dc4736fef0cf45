//! Requests for the inference server, as they were sent, and what they ask of a conversation.

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;

use super::error::{ApiError, ErrorType};
use super::generate::refusal;
use super::guard::Admitted;
use super::names::checked;
use super::selected::one_of;
use super::state::Shared;
use crate::gateway::{Ask, PassRequest, Reply, Target};

/// What is read of the query. All else in it is the inference server's.
#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct Tenant {
    tenant: Option<String>,
}

/// A request as it was sent.
pub(super) struct Sent {
    head: axum::http::request::Parts,
    pub(super) body: Bytes,
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
}
