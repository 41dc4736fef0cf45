//! Server-sent events, read piece by piece.

use bytes::{Buf as _, Bytes, BytesMut};
use reqwest::Response;
use tokio::time::{Instant, timeout_at};

use super::error::broken;
use super::{Limits, UpstreamError};

/// The events of one answer.
#[derive(Debug)]
pub struct Events {
    response: Response,
    limits: Limits,
    deadline: Instant,
    buffer: Buffer,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Its data.
    Data(Bytes),
    /// `[DONE]`: nothing more comes.
    Done,
}

/// Bytes that came, and are no whole event yet.
#[derive(Debug, Default)]
struct Buffer {
    bytes: BytesMut,
    /// No end of a line before here.
    looked: usize,
    /// Data of the event whose end has not come.
    data: BytesMut,
    any: bool,
}

// === impl Events ===

impl Events {
    pub(super) fn new(response: Response, limits: Limits, deadline: Instant) -> Events {
        Events {
            response,
            limits,
            deadline,
            buffer: Buffer::default(),
        }
    }

    /// The next event.
    ///
    /// # Errors
    /// `Timeout`, `TooLarge`, and `Broken` also for an answer that ends without saying that it is
    /// done.
    pub async fn next(&mut self) -> Result<Event, UpstreamError> {
        loop {
            if let Some(event) = self.buffer.take() {
                return Ok(event);
            }
            if self.buffer.held() > self.limits.max_answer {
                return Err(UpstreamError::TooLarge);
            }
            let by = self.deadline.min(Instant::now() + self.limits.idle);
            match timeout_at(by, self.response.chunk()).await {
                Ok(Ok(Some(chunk))) => self.buffer.bytes.extend_from_slice(&chunk),
                Ok(Ok(None)) => {
                    return Err(UpstreamError::Broken("the stream just ended".to_owned()));
                }
                Ok(Err(error)) => return Err(broken(&error)),
                Err(_) => return Err(UpstreamError::Timeout("nothing more came in time")),
            }
        }
    }
}

// === impl Buffer ===

impl Buffer {
    fn held(&self) -> usize {
        self.bytes.len() + self.data.len()
    }

    /// The next whole event, if there is one.
    fn take(&mut self) -> Option<Event> {
        loop {
            let from = self.bytes.get(self.looked..).unwrap_or_default();
            let Some(at) = from.iter().position(|byte| *byte == b'\n') else {
                self.looked = self.bytes.len();
                return None;
            };
            let mut line = self.bytes.split_to(self.looked + at);
            self.bytes.advance(1);
            self.looked = 0;
            let kept = line.iter().rev().skip_while(|byte| **byte == b'\r').count();
            line.truncate(kept);
            if line.is_empty() {
                if !std::mem::take(&mut self.any) {
                    continue;
                }
                let data = self.data.split().freeze();
                return Some(match &data[..] {
                    b"[DONE]" => Event::Done,
                    _ => Event::Data(data),
                });
            }
            // Comments and other fields say nothing here.
            if let Some(data) = line.strip_prefix(b"data:") {
                if std::mem::replace(&mut self.any, true) {
                    self.data.extend_from_slice(b"\n");
                }
                self.data
                    .extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
            }
        }
    }
}

/// All events of a whole answer, up to the last.
#[cfg(test)]
pub(super) fn read_all(bytes: &[u8]) -> Result<Vec<Event>, String> {
    let mut buffer = Buffer::default();
    buffer.bytes.extend_from_slice(bytes);
    let mut events = Vec::new();
    while let Some(event) = buffer.take() {
        let done = event == Event::Done;
        events.push(event);
        if done {
            return Ok(events);
        }
    }
    Err("the stream just ended".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(pieces: &[&[u8]]) -> Vec<Event> {
        let mut buffer = Buffer::default();
        let mut events = Vec::new();
        for piece in pieces {
            buffer.bytes.extend_from_slice(piece);
            while let Some(event) = buffer.take() {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let text = b"data: {\"a\": 1}\n\n: ping\n\nevent: x\r\ndata: b\r\ndata:  c\r\n\r\n\n\
            data: [DONE]\n\ndata: open";
        let whole = events(&[text]);
        let data = |text: &'static str| Event::Data(Bytes::from_static(text.as_bytes()));
        assert_eq!(whole, [data("{\"a\": 1}"), data("b\n c"), Event::Done]);
        for cut in 0..text.len() {
            assert_eq!(events(&[&text[..cut], &text[cut..]]), whole, "{cut}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(events(&bytes), whole);
    }
}
