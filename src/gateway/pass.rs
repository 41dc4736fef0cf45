//! Requests that pass through as they came.
//!
//! The body is not touched, nor is the answer's. Of headers those pass that say what a body is or
//! what a client wants; those of the connection, and the daemon's own token, do not.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use reqwest::Method;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::flight::Flight;
use super::native_stream::ended_badly;
use super::{Bodies, Gateway, GatewayError, Reply};
use crate::upstream::Passed;

/// Headers that are about one connection, or are made anew.
const OWN: [&str; 13] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "host",
    "expect",
    "x-request-id",
];

/// A request as it came.
#[derive(Clone, Debug)]
pub struct PassRequest {
    /// Its method.
    pub method: Method,
    /// Its path and query.
    pub path: String,
    /// Its headers.
    pub headers: Vec<(String, Vec<u8>)>,
    /// Its body.
    pub body: Bytes,
    /// Its `Authorization` is the daemon's own, so the server must not see it.
    pub hide_token: bool,
}

struct PassStream {
    passed: Passed,
    flight: Flight,
    events: bool,
    over: bool,
}

// === impl Gateway ===

impl Gateway {
    /// Sends a request on and its answer back.
    ///
    /// # Errors
    /// `Stopping`, `TooMany` and those of the server. What the server answers is no error.
    pub async fn pass(self: &Arc<Self>, request: PassRequest) -> Result<Reply, GatewayError> {
        let PassRequest {
            method,
            path,
            headers,
            body,
            hide_token,
        } = request;
        let flight = self.takeoff(None)?;
        let mut passing = HeaderMap::new();
        for (name, value) in &headers {
            let own = OWN.contains(&name.as_str()) || (hide_token && name == "authorization");
            let header = HeaderName::try_from(name).ok();
            if let Some(header) = header.filter(|_| !own)
                && let Ok(value) = HeaderValue::from_bytes(value)
            {
                passing.append(header, value);
            }
        }
        let asked = self.upstream.pass(method, &path, passing, body);
        let passed = flight.or_cut(asked).await?;
        let status = passed.status().as_u16();
        let headers = passed.headers().iter();
        let headers: Vec<_> = headers
            .filter(|(name, _)| !OWN.contains(&name.as_str()))
            .map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec()))
            .collect();
        let events = headers
            .iter()
            .any(|(name, value)| name == "content-type" && value.starts_with(b"text/event-stream"));
        let stream = PassStream {
            passed,
            flight,
            events,
            over: false,
        };
        Ok(Reply::Passed {
            status,
            headers,
            body: stream.into_bodies(),
        })
    }
}

// === impl PassStream ===

impl PassStream {
    fn into_bodies(self) -> Bodies {
        Box::pin(futures_util::stream::unfold(
            self,
            |mut stream| async move {
                let next = stream.next().await?;
                Some((next, stream))
            },
        ))
    }

    async fn next(&mut self) -> Option<Result<Bytes, io::Error>> {
        if self.over {
            return None;
        }
        match self.flight.or_cut(self.passed.chunk()).await {
            Ok(Some(chunk)) => Some(Ok(chunk)),
            Ok(None) => {
                self.over = true;
                None
            }
            Err(error) => {
                self.over = true;
                match self.events {
                    true => Some(Ok(ended_badly(&error))),
                    // Whoever reads it must see that it is not whole.
                    false => Some(Err(io::Error::other(error.to_string()))),
                }
            }
        }
    }
}
