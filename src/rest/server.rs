//! Listeners and connections: HTTP/1.1 over TCP and over a Unix socket.
//!
//! # Cancellation
//! When the token is cancelled no connection is accepted any more, idle ones are closed, and
//! requests in flight are answered; [`Server::run`] returns when the last connection is gone.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use super::stall::Stall;
use crate::service::Complaint;
use crate::types::Millis;
use crate::util::clock::{Clock as _, SystemClock};
use crate::util::socket::{SocketFile, bind};

/// Largest head of a request.
const HEAD_MAX: usize = 64 << 10;

/// From where a connection came.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// TCP on a loopback address of this machine.
    Loopback,
    /// TCP on another address.
    Remote,
    /// The Unix socket.
    Unix,
}

/// Bound sockets that do not answer yet.
#[derive(Debug)]
pub struct Server {
    tcp: Option<TcpListener>,
    unix: Option<(UnixListener, SocketFile)>,
    limits: Limits,
}

#[derive(Clone, Debug)]
struct Limits {
    head_timeout: Duration,
    write_timeout: Duration,
    places: Arc<Semaphore>,
}

/// Why a socket could not be bound.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {place}: {error}")]
pub struct BindError {
    /// Address or path.
    pub place: String,
    /// What the system said.
    pub error: io::Error,
}

// === impl Server ===

impl Server {
    /// Binds what the configuration names.
    ///
    /// # Errors
    /// An address is in use, or not this machine's; a path is taken by another daemon or by a file
    /// that is no socket.
    pub async fn bind(config: &super::Config) -> Result<Server, BindError> {
        let tcp = match config.listen {
            Some(address) => Some(
                TcpListener::bind(address)
                    .await
                    .map_err(|error| BindError {
                        place: address.to_string(),
                        error,
                    })?,
            ),
            None => None,
        };
        let unix = match &config.socket {
            Some(path) => Some(
                bind(path)
                    .and_then(|(listener, file)| Ok((UnixListener::from_std(listener)?, file)))
                    .map_err(|error| BindError {
                        place: path.display().to_string(),
                        error,
                    })?,
            ),
            None => None,
        };
        let limits = Limits {
            head_timeout: config.timeout,
            write_timeout: config.write_timeout,
            places: Arc::new(Semaphore::new(config.max_connections as usize)),
        };
        Ok(Server { tcp, unix, limits })
    }

    /// The TCP address, with the port that the system chose.
    pub fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref()?.local_addr().ok()
    }

    /// Serves until `stop` is cancelled and every request in flight is answered.
    pub async fn run(self, router: Router, stop: CancellationToken) {
        let Server { tcp, unix, limits } = self;
        let connections = Connections {
            limits,
            router,
            stop,
            tasks: TaskTracker::new(),
            clock: SystemClock::new(),
            closed: Mutex::default(),
            not_accepted: Mutex::default(),
        };
        let accept_tcp = async {
            let Some(listener) = tcp else { return };
            while let Some((stream, _)) = connections.next(|| listener.accept()).await {
                let peer = match stream.local_addr() {
                    Ok(address) if address.ip().to_canonical().is_loopback() => Peer::Loopback,
                    _ => Peer::Remote,
                };
                // Small answers should not wait for each other; failing is no reason to refuse.
                stream.set_nodelay(true).ok();
                connections.serve(stream, peer);
            }
        };
        let accept_unix = async {
            let Some((listener, _file)) = unix else {
                return;
            };
            while let Some((stream, _)) = connections.next(|| listener.accept()).await {
                connections.serve(stream, Peer::Unix);
            }
        };
        tokio::join!(accept_tcp, accept_unix);
        connections.stop.cancelled().await;
        connections.tasks.close();
        connections.tasks.wait().await;
    }
}

/// All connections of one server.
struct Connections {
    limits: Limits,
    router: Router,
    stop: CancellationToken,
    tasks: TaskTracker,
    clock: SystemClock,
    /// Connections closed because there were too many.
    closed: Mutex<Complaint>,
    not_accepted: Mutex<Complaint>,
}

/// How long to wait after accept failed: it is out of descriptors, or the peer left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

// === impl Connections ===

impl Connections {
    /// The next connection, or none once stopping.
    async fn next<T, F>(&self, accept: impl Fn() -> F) -> Option<T>
    where
        F: Future<Output = io::Result<T>>,
    {
        let accepted = async {
            loop {
                match accept().await {
                    Ok(connection) => return connection,
                    Err(error) => {
                        self.complain(&self.not_accepted, |times| {
                            tracing::warn!(%error, times, "Accepting a connection failed");
                        });
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        };
        self.stop.run_until_cancelled(accepted).await
    }

    /// Logs what may come again and again: at once, then once a minute with how often it came.
    fn complain(&self, complaint: &Mutex<Complaint>, log: impl FnOnce(u64)) {
        if let Some(times) = complaint.lock().came(self.clock.monotonic()) {
            log(times);
        }
    }

    /// Answers one connection in a task of its own, or closes it when there are too many.
    fn serve<S>(&self, stream: S, peer: Peer)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let Ok(place) = Arc::clone(&self.limits.places).try_acquire_owned() else {
            self.complain(&self.closed, |times| {
                tracing::warn!(times, "Too many connections: closed at once");
            });
            return;
        };
        let router = self.router.clone();
        let answer = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(peer);
            router.clone().oneshot(request)
        });
        let stop = self.stop.clone();
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head_timeout)
            .max_buf_size(HEAD_MAX)
            // A time before 1970 cannot be written as a date.
            .auto_date_header(self.clock.now() > Millis::default())
            .serve_connection(
                TokioIo::new(Stall::new(stream, self.limits.write_timeout)),
                answer,
            );
        self.tasks.spawn(async move {
            let _place = place;
            let mut connection = std::pin::pin!(connection);
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = stop.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "A connection ended early");
            }
        });
    }
}
