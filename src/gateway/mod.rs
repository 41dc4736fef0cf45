//! Generating from state: the client sends what is new, the daemon knows the rest.
//!
//! # What
//! The daemon composes the exact tokens of a conversation and what is new, begins to bring its
//! snapshot into RAM, forwards the request to the inference server with the conversation as its
//! `session_id`, and passes the answer on. What the server's worker tells of the turn is what is
//! recorded; the gateway adds what was said in words. A request without a conversation passes
//! through as it is.
//!
//! # State
//! A [`Flight`] is one request under way: its place among all, its id that no other one under way
//! has, and the head of its conversation if it goes on there. Nothing else is shared: an answer
//! belongs to the connection that asked the server for it.
//!
//! # One at a time
//! A conversation has one *head*: its latest turn. Requests that name no turn go on from the head one
//! after another, each once the turn before it is recorded. A request that names a turn which is not
//! the head, or the head while another request goes on from it, is a *branch*: it does not wait, it
//! goes on from that turn, and becomes the next turn of the conversation, with another past. A
//! branch's words are not noted, so prompts after it are told by tokens alone.
//!
//! # Whose
//! A server's conversations are those of one tenant, `upstream.tenant`: a request of another is refused.
//! A conversation goes on in the namespace of its last turn: a request that says nothing of it gets that
//! turn's `cache_salt` and `extra_key`, one that names others is refused.
//!
//! # Cancellation
//! A client that goes away drops its flight, which tells the server to abort; the turn that the server
//! still tells of is not gone on from without a word. A stream is read ahead of its client by a bounded
//! number of bytes ([`pump`]), so that a client that reads slowly, or not at all, keeps nobody from the
//! conversation once the server is done; one that takes nothing for `rest.write_timeout` is gone. At a shutdown new
//! requests are refused and those under way go on for `upstream.drain_timeout`; what is left then
//! ends with an error event.
//!
//! # Errors
//! [`GatewayError`] before an answer begins; afterwards an event with an `error`, then the end of the
//! stream.

mod base;
mod body;
mod chat;
mod chat_stream;
mod completions;
mod compose;
mod error;
mod facts;
mod flight;
mod generate;
mod metrics;
mod native_stream;
mod pass;
mod pump;
mod resume;
mod tokens;

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use compose::Fallback;
pub use error::GatewayError;
pub use pass::PassRequest;
pub use resume::Resume;

use crate::service::Service;
use crate::tokenizer::Tokenizer;
use crate::upstream::{self, Upstream};
use base::Heads;
use metrics::Metrics;
use tokens::Tokens;

/// The fields of a JSON body.
pub type Fields = Map<String, Value>;

/// Generates from state. One for each daemon that has a server behind it.
pub struct Gateway {
    service: Arc<Service>,
    upstream: Upstream,
    tokens: Tokens,
    /// Whose conversations the server's are.
    tenant: Option<String>,
    turn_wait: Duration,
    drain_timeout: Duration,
    heads: Heads,
    metrics: Metrics,
    /// Ids of the requests under way.
    live: Mutex<HashSet<String>>,
    places: Arc<Semaphore>,
    flights: TaskTracker,
    /// No new requests.
    closing: CancellationToken,
    /// No old ones either.
    cut: CancellationToken,
}

/// Which conversation, and from where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Whose it is.
    pub tenant: Option<String>,
    /// Its name, or the id of one of its requests.
    pub conversation: String,
    /// A turn, counted from 1; the latest if there is neither.
    pub turn: Option<u32>,
    /// A named branch.
    pub branch: Option<String>,
}

/// A request that goes on with a conversation.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The id of the HTTP request.
    pub request_id: String,
    /// Where to go on.
    pub target: Target,
    /// The body without what says that.
    pub body: Fields,
}

/// Bytes of an answer as they come. An error ends the connection.
pub type Bodies = Pin<Box<dyn Stream<Item = Result<Bytes, std::io::Error>> + Send>>;

/// An answer.
pub enum Reply {
    /// In one piece.
    Json(Value),
    /// Server-sent events.
    Events(Bodies),
    /// The server's own answer.
    Passed {
        /// Its status.
        status: u16,
        /// Headers that matter to clients.
        headers: Vec<(String, Vec<u8>)>,
        /// Its body.
        body: Bodies,
    },
}

// === impl Gateway ===

impl Gateway {
    /// A gateway to the server that the configuration names; `None` where it names none.
    ///
    /// # Errors
    /// The key or the tokenizer cannot be used, for people.
    pub fn new(
        config: &upstream::Config,
        service: Arc<Service>,
        registry: &mut Registry,
    ) -> Result<Option<Arc<Gateway>>, String> {
        let Some(upstream) = Upstream::new(config)? else {
            return Ok(None);
        };
        let tokens = match &config.tokenizer {
            Some(folder) => {
                let tokenizer = Tokenizer::load(folder);
                let tokenizer =
                    tokenizer.map_err(|error| format!("upstream.tokenizer: {error}"))?;
                Tokens::Own(Arc::new(tokenizer))
            }
            None => Tokens::Server(upstream.clone()),
        };
        Ok(Some(Arc::new(Gateway {
            service,
            upstream,
            tokens,
            tenant: config.tenant.clone(),
            turn_wait: config.turn_wait,
            drain_timeout: config.drain_timeout,
            heads: Mutex::new(HashMap::new()),
            metrics: Metrics::register(registry),
            live: Mutex::default(),
            places: Arc::new(Semaphore::new(config.max_requests as usize)),
            flights: TaskTracker::new(),
            closing: CancellationToken::new(),
            cut: CancellationToken::new(),
        })))
    }

    /// No new requests; waits for those under way, and cuts off what is left at the end of its time.
    pub async fn drain(&self) {
        self.closing.cancel();
        self.flights.close();
        let ended = tokio::time::timeout(self.drain_timeout, self.flights.wait()).await;
        if ended.is_err() {
            tracing::warn!("Answers under way are cut off");
        }
        self.cut.cancel();
    }
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").finish_non_exhaustive()
    }
}
