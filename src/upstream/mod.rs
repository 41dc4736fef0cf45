//! The inference server behind the daemon: an HTTP client of SGLang's own surface.
//!
//! # What
//! JSON asked and answered, answers of server-sent events, and requests passed on as they came.
//!
//! # Bounds
//! One answer, and one event of a stream, are at most `upstream.max_answer` long. A stream is read
//! only as fast as its reader takes it. Every wait has an end: for a connection, for the next piece,
//! for the whole.
//!
//! # Cancellation
//! A dropped answer closes its connection, which ends the request in the server. [`Upstream::abort`]
//! says it besides, as a server that still waits for its turn notices a closed connection late.
//!
//! # Errors
//! [`UpstreamError`]: one kind for each thing that a client can do about it.

mod config;
mod error;
mod events;
#[cfg(test)]
pub(crate) mod parsers;

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Method, Response, StatusCode};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

pub use config::Config;
pub use error::{Refusal, UpstreamError};
pub use events::{Event, Events};

/// A connection that turns out to be closed does so at once.
const STALE_WITHIN: Duration = Duration::from_millis(500);
/// How long an abort is tried.
const ABORT_WAIT: Duration = Duration::from_secs(5);

/// The client. Clones share its connections.
#[derive(Clone, Debug)]
pub struct Upstream {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    http: reqwest::Client,
    /// Keeps no connection.
    fresh: reqwest::Client,
    base: String,
    key: Option<HeaderValue>,
    limits: Limits,
}

/// What one answer may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    idle: Duration,
    whole: Duration,
    max_answer: usize,
}

// === impl Upstream ===

impl Upstream {
    /// A client of the server that the configuration names; `None` where it names none.
    ///
    /// # Errors
    /// What is wrong with the configuration, for people.
    pub fn new(config: &Config) -> Result<Option<Upstream>, String> {
        let Some(base) = config.base()? else {
            return Ok(None);
        };
        let client = |idle: usize| {
            let client = reqwest::Client::builder()
                // A proxy of the environment is never meant for the server beside us.
                .no_proxy()
                .redirect(reqwest::redirect::Policy::none())
                .tcp_nodelay(true)
                .connect_timeout(config.connect_timeout)
                .pool_max_idle_per_host(idle);
            client.build().map_err(|error| error.to_string())
        };
        let http = client(config.pool as usize)?;
        let fresh = client(0)?;
        let limits = Limits {
            idle: config.idle_timeout,
            whole: config.timeout,
            max_answer: usize::try_from(config.max_answer.as_u64()).unwrap_or(usize::MAX),
        };
        Ok(Some(Upstream {
            inner: Arc::new(Inner {
                http,
                fresh,
                base,
                key: config.key()?,
                limits,
            }),
        }))
    }

    /// Sends JSON and reads the JSON of a good answer.
    ///
    /// # Errors
    /// All of [`UpstreamError`].
    pub async fn json(&self, path: &str, body: &Value) -> Result<Value, UpstreamError> {
        let deadline = self.deadline();
        let response = self.ask(path, body, deadline).await?;
        let bytes = self.read(response, deadline).await?;
        serde_json::from_slice(&bytes)
            .map_err(|error| UpstreamError::Bad(format!("its answer is not JSON: {error}")))
    }

    /// Sends JSON and begins to read the events of a good answer.
    ///
    /// # Errors
    /// All of [`UpstreamError`].
    pub async fn events(&self, path: &str, body: &Value) -> Result<Events, UpstreamError> {
        let deadline = self.deadline();
        // The first piece comes with the head.
        let first = deadline.min(Instant::now() + self.inner.limits.idle);
        let response = self.ask(path, body, first).await?;
        let streams = response
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if !streams {
            let text = "it answered a streamed request with something else than events";
            return Err(UpstreamError::Bad(text.to_owned()));
        }
        Ok(Events::new(response, self.inner.limits, deadline))
    }

    /// Sends what a client sent, and returns whatever comes back, good or bad, once its head is
    /// there.
    ///
    /// # Errors
    /// `Unreachable` and `Timeout`.
    pub async fn pass(
        &self,
        method: Method,
        path: &str,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> Result<Passed, UpstreamError> {
        let deadline = self.deadline();
        if let Some(key) = &self.inner.key {
            headers.insert(AUTHORIZATION, key.clone());
        }
        let request = self.inner.http.request(method, self.url(path));
        let request = request.headers(headers).body(body);
        let response = self.send(request, deadline).await?;
        let idle = self.inner.limits.idle;
        Ok(Passed {
            response,
            idle,
            deadline,
        })
    }

    /// Tells the server, in the background, that nobody waits for this request any more.
    pub fn abort(&self, rid: String) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let upstream = self.clone();
        runtime.spawn(async move {
            let body = serde_json::json!({ "rid": rid });
            let asked = upstream.ask("/abort_request", &body, Instant::now() + ABORT_WAIT);
            if let Err(error) = asked.await {
                tracing::debug!(rid, %error, "The server was not told of an abort");
            }
        });
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.inner.limits.whole
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.inner.base)
    }

    /// The head of a good answer.
    async fn ask(
        &self,
        path: &str,
        body: &Value,
        deadline: Instant,
    ) -> Result<Response, UpstreamError> {
        let mut request = self.inner.http.post(self.url(path)).json(body);
        if let Some(key) = &self.inner.key {
            request = request.header(AUTHORIZATION, key.clone());
        }
        let response = self.send(request, deadline).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let kind = response.headers().get(CONTENT_TYPE).cloned();
        let body = self.read(response, deadline).await?;
        Err(error::refused(status, kind, body))
    }

    async fn send(
        &self,
        request: reqwest::RequestBuilder,
        deadline: Instant,
    ) -> Result<Response, UpstreamError> {
        let late = || UpstreamError::Timeout("no answer in time");
        let request = request.build().map_err(|error| error::failed(&error))?;
        let again = request.try_clone();
        let asked = Instant::now();
        let sent = timeout_at(deadline, self.inner.http.execute(request)).await;
        let error = match sent.map_err(|_| late())? {
            Ok(response) => return Ok(response),
            Err(error) => error,
        };
        // A server closes a connection that was idle just when it is used again: nothing of this request
        // was done, and nothing came back. One that it worked on for a while is not sent twice.
        let stale = !error.is_connect() && !error.is_timeout() && asked.elapsed() < STALE_WITHIN;
        let Some(again) = again.filter(|_| stale) else {
            return Err(error::failed(&error));
        };
        let sent = timeout_at(deadline, self.inner.fresh.execute(again)).await;
        sent.map_err(|_| late())?
            .map_err(|error| error::failed(&error))
    }

    /// The whole body.
    async fn read(
        &self,
        mut response: Response,
        deadline: Instant,
    ) -> Result<Bytes, UpstreamError> {
        let mut all = BytesMut::new();
        loop {
            let chunk = match timeout_at(deadline, response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => return Ok(all.freeze()),
                Ok(Err(error)) => return Err(error::broken(&error)),
                Err(_) => return Err(UpstreamError::Timeout("the answer did not end in time")),
            };
            if all.len().saturating_add(chunk.len()) > self.inner.limits.max_answer {
                return Err(UpstreamError::TooLarge);
            }
            all.extend_from_slice(&chunk);
        }
    }
}

/// An answer that is passed on as it comes.
#[derive(Debug)]
pub struct Passed {
    response: Response,
    idle: Duration,
    deadline: Instant,
}

// === impl Passed ===

impl Passed {
    /// Its status.
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// Its headers.
    pub fn headers(&self) -> &HeaderMap {
        self.response.headers()
    }

    /// The next bytes of its body; `None` at its end.
    ///
    /// # Errors
    /// `Broken` and `Timeout`.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, UpstreamError> {
        let by = self.deadline.min(Instant::now() + self.idle);
        match timeout_at(by, self.response.chunk()).await {
            Ok(Ok(chunk)) => Ok(chunk),
            Ok(Err(error)) => Err(error::broken(&error)),
            Err(_) => Err(UpstreamError::Timeout("nothing more came in time")),
        }
    }
}
