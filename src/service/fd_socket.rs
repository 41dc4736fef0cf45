//! The Unix socket that passes descriptors, and the connections that show that workers live.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use super::refusals::refuse;
use super::{Peer, Service};
use crate::device;
use crate::proto::channel::layout::CloseReason;
use crate::proto::handshake::{self, Grant, HandshakeError};
use crate::proto::v1::refusal::Reason;
use crate::types::SessionId;
use crate::util::socket::{self, SocketFile};

/// What a worker may take for its handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// Connections at once: more than there can be workers would be somebody else's.
const MAX_CONNECTIONS: usize = 1024;

/// The socket, bound.
#[derive(Debug)]
pub struct FdSocket {
    listener: UnixListener,
    file: SocketFile,
}

// === impl FdSocket ===

impl FdSocket {
    /// Binds the socket that the service tells its workers. Must be called inside a runtime.
    ///
    /// # Errors
    /// Somebody else listens there, or the system refuses.
    pub fn bind(service: &Service) -> io::Result<Self> {
        let (listener, file) = socket::bind(&service.config().fd_socket)?;
        Ok(Self {
            listener: UnixListener::from_std(listener)?,
            file,
        })
    }

    /// Serves connections until `stop`.
    pub async fn run(self, service: Arc<Service>, stop: impl Future<Output = ()>) {
        let Self { listener, file } = self;
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        tokio::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => match Arc::clone(&places).try_acquire_owned() {
                    Ok(place) => {
                        let service = Arc::clone(&service);
                        tokio::spawn(async move {
                            serve(&service, stream).await;
                            drop(place);
                        });
                    }
                    Err(_) => drop(stream),
                },
                Err(error) => {
                    tracing::warn!(%error, "Accepting on the socket for descriptors");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        drop(file);
    }
}

/// One connection: the handshake, then its end is the session's end, and the other way round.
async fn serve(service: &Arc<Service>, stream: UnixStream) {
    let peer = match device::Peer::of(&stream) {
        Ok(peer) => Peer::Unix {
            uid: peer.uid,
            pid: Some(peer.pid).filter(|pid| *pid > 0),
        },
        Err(error) => return tracing::warn!(%error, "A peer without credentials"),
    };
    let shaken = tokio::time::timeout(HANDSHAKE_WITHIN, shake(service, &stream, peer)).await;
    let session = match shaken {
        Ok(Ok(session)) => session,
        Ok(Err(error)) => return tracing::warn!(%error, "A handshake failed"),
        Err(_) => return tracing::warn!("A handshake took too long"),
    };
    let Some(worker) = service.workers.get(session) else {
        return;
    };
    let mut stop = worker.stop();
    tokio::select! {
        _ = stop.wait() => {}
        () = closed(&stream) => service.send_away(&worker, CloseReason::SilentPeer),
    }
    // To the worker the end of the connection says that its ring is its own again.
    worker.ring_closed().await;
}

async fn shake(
    service: &Arc<Service>,
    stream: &UnixStream,
    peer: Peer,
) -> Result<SessionId, HandshakeError> {
    let request = match handshake::receive(stream).await {
        Ok(request) => request,
        Err(error) => {
            if !matches!(error, HandshakeError::Socket(_)) {
                let reason = match error {
                    HandshakeError::Version(_) => Reason::ChannelVersion,
                    _ => Reason::Unsupported,
                };
                handshake::refuse(stream, reason, &error.to_string()).await?;
            }
            return Err(error);
        }
    };
    let session = SessionId::from_bytes(request.session);
    let (other, secret, window) = (Arc::clone(service), request.secret, request.window);
    let bind = move || other.bind_ring(session, &secret, window, &peer);
    let bound = tokio::task::spawn_blocking(bind).await;
    let bound = bound.unwrap_or_else(|_| Err(refuse(Reason::NotReady, "the daemon failed")));
    match bound {
        Ok(fds) => {
            let grant = Grant {
                channel: std::os::fd::AsFd::as_fd(&fds.channel),
                channel_bytes: fds.channel_bytes,
                doorbell: std::os::fd::AsFd::as_fd(&fds.doorbell),
                mode: fds.mode,
            };
            let granted = handshake::grant(stream, grant).await;
            if granted.is_err() {
                service.detach(session, "the handshake was not taken");
            }
            granted?;
            Ok(session)
        }
        Err(refusal) => {
            let (reason, text) = (refusal.reason(), refusal.message);
            handshake::refuse(stream, reason, &text).await?;
            Err(HandshakeError::Refused { reason, text })
        }
    }
}

/// Returns when the peer closes the connection, or says anything: nothing more is to be said on it.
async fn closed(stream: &UnixStream) {
    if stream.readable().await.is_ok() {
        let mut byte = [0];
        loop {
            match stream.try_read(&mut byte) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if stream.readable().await.is_err() {
                        return;
                    }
                }
                _ => return,
            }
        }
    }
}
