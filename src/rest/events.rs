//! `GET /v1/events`: what happens, as Server-Sent Events.
//!
//! Each has an `id`, a name (`saved`, `durable`, `restored`, `evicted`, `deleted`, `turn_finished`,
//! `budget_changed`, `attached`, `detached`) and its fields as JSON. A client that comes back with
//! `Last-Event-ID` gets what it missed, as far as it is kept; else an event `missed` comes first,
//! whose `count` is null if the daemon was started anew since, or never told an event of that id.
//! A slow client is told the same.
//! Nothing happening for a while is a comment line. `turn_finished` comes again when the turn gets a
//! deeper state. `?types=saved,durable` and `?conversation_id=` leave the others out; events of
//! snapshots alone have no conversation.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::IntoParams;

use super::bodies::ServerSentEvent;
use super::body::Params;
use super::error::ApiError;
use super::names::checked;
use super::state::Shared;
use crate::service::{Batch, Event, EventReader, EventRow};

/// Where a client says what it read last.
const LAST_EVENT_ID: &str = "last-event-id";

/// Between two signs of life.
const ALIVE: Duration = Duration::from_secs(15);

/// Which events.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Filter {
    /// Only of these names, with commas between.
    types: Option<String>,
    /// Only of this conversation.
    #[param(min_length = 1, max_length = 255)]
    conversation_id: Option<String>,
    /// Go on after this one; also the header `Last-Event-ID`.
    last_event_id: Option<String>,
}

/// What happens, as it happens: server-sent events.
///
/// Each has an id, a name and its fields as JSON. The answer never ends by itself.
#[utoipa::path(
    get,
    path = "/v1/events",
    tag = "events",
    params(
        Filter,
        ("last-event-id" = Option<String>, Header, description = "Go on after this one")
    ),
    responses((status = 200, body = ServerSentEvent, content_type = "text/event-stream"))
)]
pub async fn events(
    State(shared): State<Shared>,
    headers: HeaderMap,
    Params(filter): Params<Filter>,
) -> Result<Response, ApiError> {
    let Filter {
        types,
        conversation_id,
        last_event_id,
    } = filter;
    let types = types.map(|types| types_of(&types)).transpose()?;
    let wanted = Wanted {
        types,
        conversation: checked("conversation_id", conversation_id)?,
    };
    let last = match headers.get(LAST_EVENT_ID).map(HeaderValue::to_str) {
        Some(Ok(id)) => Some(id.to_owned()),
        Some(Err(_)) => return Err(ApiError::invalid("`Last-Event-ID` is no text")),
        None => last_event_id,
    };
    let last = last.filter(|id| !id.is_empty());
    let last = last.map(|id| id.parse()).transpose()?;
    let reader = shared.service()?.watch(last)?;
    let first = Some((reader, wanted));
    let stream = futures_util::stream::unfold(first, |at| async {
        let (mut reader, wanted) = at?;
        let text = match tokio::time::timeout(ALIVE, reader.next()).await {
            Ok(Some(batch)) => told(&reader, &wanted, &batch),
            // The daemon ends.
            Ok(None) => return None,
            Err(_) => ":\n\n".to_owned(),
        };
        Some((
            Ok::<_, Infallible>(Bytes::from(text)),
            Some((reader, wanted)),
        ))
    });
    let head = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    Ok((head, Body::from_stream(stream)).into_response())
}

/// What a client wants to see.
#[derive(Debug)]
struct Wanted {
    types: Option<Vec<&'static str>>,
    conversation: Option<String>,
}

// === impl Wanted ===

impl Wanted {
    fn wants(&self, name: &str, fields: &Value) -> bool {
        let named = self.types.as_ref().is_none_or(|all| all.contains(&name));
        let its = |name: &String| fields.get("conversation_id") == Some(&json!(name));
        named && self.conversation.as_ref().is_none_or(its)
    }
}

fn types_of(text: &str) -> Result<Vec<&'static str>, ApiError> {
    let known = |name: &str| Event::NAMES.into_iter().find(|known| *known == name);
    let all = text.split(',').map(|name| {
        known(name).ok_or_else(|| {
            let all = Event::NAMES.join(", ");
            ApiError::invalid(format!("`types` is not a list of {all}"))
        })
    });
    all.collect()
}

/// The text of some events.
fn told(reader: &EventReader, wanted: &Wanted, batch: &Batch) -> String {
    // A first line, so that a client knows the answer although nothing of it is wanted.
    let mut text = String::from(":\n\n");
    let Batch { missed, events } = batch;
    if *missed != Some(0) {
        let _ = write!(
            text,
            "event: missed\ndata: {}\n\n",
            json!({ "count": missed })
        );
    }
    for event in events {
        let (name, row) = (event.event.name(), EventRow::from(event));
        if !wanted.wants(name, &row.fields) {
            continue;
        }
        let data = serde_json::to_string(&row).unwrap_or_default();
        let id = reader.id(event);
        let _ = write!(text, "id: {id}\nevent: {name}\ndata: {data}\n\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_wanted_is_told() {
        let types = types_of("saved,turn_finished").unwrap();
        let mut wanted = Wanted {
            types: Some(types),
            conversation: None,
        };
        let of = |name: &str| json!({ "conversation_id": name });
        assert!(wanted.wants("saved", &of("c")) && !wanted.wants("durable", &of("c")));
        wanted.conversation = Some("c".to_owned());
        assert!(wanted.wants("saved", &of("c")) && !wanted.wants("saved", &of("d")));
        assert!(!wanted.wants("saved", &json!({})));
        for bad in ["", "saved,", "Saved", "saved durable"] {
            assert!(types_of(bad).is_err(), "{bad}");
        }
    }
}
