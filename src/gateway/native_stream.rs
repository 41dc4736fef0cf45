//! A streamed answer of the server's native surface, passed on event by event.

use bytes::Bytes;
use serde_json::{Value, json};

use super::facts::Facts;
use super::flight::Flight;
use super::generate::finish;
use super::pump::read_ahead;
use super::{Bodies, GatewayError};
use crate::upstream::{Event, Events};

/// How the server writes that an answer goes on. In the text of an answer its quotes are escaped.
const GOES_ON: [&[u8]; 2] = [b"\"finish_reason\":null", b"\"finish_reason\": null"];
/// The last event.
pub(super) const DONE: &[u8] = b"data: [DONE]\n\n";

/// An answer under way.
pub(super) struct NativeStream {
    events: Events,
    flight: Flight,
    facts: Facts,
    over: bool,
}

// === impl NativeStream ===

impl NativeStream {
    pub fn new(events: Events, flight: Flight, facts: Facts) -> NativeStream {
        NativeStream {
            events,
            flight,
            facts,
            over: false,
        }
    }

    pub fn into_bodies(self) -> Bodies {
        read_ahead(futures_util::stream::unfold(self, |mut stream| async {
            let next = stream.next().await?;
            Some((Ok(next), stream))
        }))
    }

    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        match self.flight.or_cut(self.events.next()).await {
            Ok(Event::Data(data)) => Some(self.pass(&data)),
            Ok(Event::Done) => {
                self.over = true;
                self.flight.ended();
                Some(Bytes::from_static(DONE))
            }
            Err(error) => {
                self.over = true;
                Some(ended_badly(&error))
            }
        }
    }

    fn pass(&mut self, data: &[u8]) -> Bytes {
        let goes_on = GOES_ON.iter().any(|mark| contains(data, mark));
        let last = (!goes_on)
            .then(|| serde_json::from_slice::<Value>(data).ok())
            .flatten()
            .filter(|event| event.get("meta_info").is_some());
        match last {
            Some(mut event) => {
                finish(&mut self.flight, &self.facts, &mut event);
                frame(event.to_string().as_bytes())
            }
            None => frame(data),
        }
    }
}

/// One event.
pub(super) fn frame(data: &[u8]) -> Bytes {
    [b"data: ", data, b"\n\n"].concat().into()
}

/// The last events of a stream that cannot go on.
pub(super) fn ended_badly(error: &GatewayError) -> Bytes {
    tracing::info!(%error, "A streamed answer ends early");
    let error = json!({ "error": { "type": error.kind(), "message": error.to_string() } });
    [&frame(error.to_string().as_bytes())[..], DONE]
        .concat()
        .into()
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_event_says_why_it_ended() {
        let goes_on = |text: &str| GOES_ON.iter().any(|mark| contains(text.as_bytes(), mark));
        assert!(goes_on(r#"{"meta_info":{"id":"x","finish_reason":null}}"#));
        assert!(goes_on(
            r#"{"meta_info": {"finish_reason": null, "id": "x"}}"#
        ));
        let said = json!({
            "text": "\"finish_reason\":null \"finish_reason\": null",
            "meta_info": { "finish_reason": { "type": "stop" } },
        });
        assert!(!goes_on(&said.to_string()));
    }
}
