//! One attach: the call, the handshake that passes descriptors, the self-test of the window.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::transport::Channel;

use super::dial::{Linked, Over};
use crate::device::shm::{OutOfBounds, SharedMap, ShmError};
use crate::proto::channel::layout::{
    HANDSHAKE_SELF_TEST_BYTES, HEADER_BYTES, MAX_CAPACITY, VERSION,
};
use crate::proto::channel::{BadChannel, WorkerEnd};
use crate::proto::handshake::{self, HandshakeError, self_test_byte};
use crate::proto::v1;
use crate::proto::v1::attach_response::Result as Answer;
use crate::proto::v1::worker_client::WorkerClient;
use crate::types::{BLOCK_TOKENS, TransferMode};

/// What Attach may take, as the protocol says.
const ATTACH_WITHIN: Duration = Duration::from_secs(10);
/// What the handshake may take.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// Heartbeats that are believed.
const HEARTBEAT: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(60));

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub(super) enum AttachError {
    /// No daemon is there.
    #[error("no daemon answers: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The call failed.
    #[error("attaching failed: {}", .0.message())]
    Call(#[from] tonic::Status),
    /// It took too long.
    #[error("the daemon does not answer in time")]
    Slow,
    /// The daemon said no.
    #[error("the daemon refuses ({}): {message}", .reason.as_str_name())]
    Refused {
        /// Why.
        reason: v1::refusal::Reason,
        /// Why, for people.
        message: String,
        /// When to try again; zero: not soon.
        retry_after: Duration,
    },
    /// An answer that cannot be.
    #[error("the daemon's answer cannot be: {0}")]
    Garbled(&'static str),
    /// Descriptors did not change hands.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The window came back other than it should.
    #[error("the self-test failed at byte {0} of the window")]
    SelfTest(usize),
    /// Ring or window could not be made, or a socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The channel's memory is none.
    #[error("the channel's memory: {0}")]
    Shm(#[from] ShmError),
    /// The memory is no channel.
    #[error(transparent)]
    Channel(#[from] BadChannel),
    /// The ring is smaller than the self-test.
    #[error(transparent)]
    Ring(#[from] OutOfBounds),
}

/// A session, but for its stream.
pub(super) struct Attached {
    pub session: [u8; 16],
    pub secret: [u8; 32],
    pub heartbeat: Duration,
    /// The session's sign of life.
    pub connection: UnixStream,
    /// For the scheduler.
    pub linked: Linked,
}

/// What Attach said, checked.
struct Grant {
    session: [u8; 16],
    secret: [u8; 32],
    boot: [u8; 16],
    fd_socket: PathBuf,
    heartbeat: Duration,
    mode: TransferMode,
}

// === impl AttachError ===

impl AttachError {
    /// When the daemon says to try again.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }
}

/// Attaches.
///
/// # Errors
///
/// [`AttachError`]; nothing is left then.
pub(super) async fn attach(
    client: &mut WorkerClient<Channel>,
    request: &v1::AttachRequest,
    ring_bytes: u64,
    over: Over,
) -> Result<Attached, AttachError> {
    let answer = timeout(ATTACH_WITHIN, client.attach(request.clone())).await;
    let answer = answer.map_err(|_| AttachError::Slow)??.into_inner();
    let Grant {
        session,
        secret,
        boot,
        fd_socket,
        heartbeat,
        mode,
    } = check(answer, request)?;
    let (shared, shared_fd) = SharedMap::create("engram-window", ring_bytes)?;
    let pattern: Vec<u8> = (0..HANDSHAKE_SELF_TEST_BYTES).map(self_test_byte).collect();
    shared.write(0, &pattern)?;
    let passed = spawn_blocking(move || {
        let window = std::os::fd::AsFd::as_fd(&shared_fd);
        handshake::connect(&fd_socket, session, secret, Some(window), HANDSHAKE_WITHIN)
    });
    let passed = passed.await.map_err(io::Error::other)??;
    check_window(&shared, pattern)?;
    let handshake::Passed {
        connection,
        channel,
        channel_bytes,
        doorbell,
        mode: last_word,
    } = passed;
    if last_word != mode {
        // It may only change for a ring that is harder to open than memory.
        return Err(AttachError::Garbled("another transfer mode than before"));
    }
    let (ring, window) = match mode {
        TransferMode::Ipc => (shared, None),
        TransferMode::Engine => (SharedMap::anonymous(ring_bytes)?, Some(shared)),
    };
    if channel_bytes > HEADER_BYTES + 2 * MAX_CAPACITY {
        return Err(AttachError::Garbled("the channel is too large"));
    }
    let map = Arc::new(SharedMap::open(channel, channel_bytes)?);
    let end = WorkerEnd::open(&map)?;
    if (end.session, end.boot) != (session, boot) {
        return Err(AttachError::Garbled("the channel is of another session"));
    }
    connection.set_nonblocking(true)?;
    let connection = UnixStream::from_std(connection)?;
    // Its failure would only cost the daemon's next look.
    let bell = Box::new(move || drop(doorbell.ring()));
    Ok(Attached {
        session,
        secret,
        heartbeat,
        connection,
        linked: Linked {
            id: session,
            boot,
            end,
            ring,
            window,
            bell,
            over,
        },
    })
}

fn check(response: v1::AttachResponse, request: &v1::AttachRequest) -> Result<Grant, AttachError> {
    let attached = match response.result {
        Some(Answer::Attached(attached)) => attached,
        Some(Answer::Refusal(refusal)) => {
            return Err(AttachError::Refused {
                reason: refusal.reason(),
                retry_after: Duration::from_millis(refusal.retry_after_ms.into()),
                message: refusal.message,
            });
        }
        None => return Err(AttachError::Garbled("neither a session nor a refusal")),
    };
    let garbled = AttachError::Garbled;
    let offered = |mode: &TransferMode| request.modes().any(|it| it == (*mode).into());
    let mode = attached.mode().try_into().ok().filter(offered);
    let mode = mode.ok_or_else(|| garbled("a transfer mode that was not offered"))?;
    if attached.channel_version != VERSION {
        return Err(garbled("another version of the channel"));
    }
    if attached.block_tokens != BLOCK_TOKENS {
        return Err(garbled("another size of blocks"));
    }
    let id = |bytes: &[u8]| <[u8; 16]>::try_from(bytes);
    let session = id(&attached.session).map_err(|_| garbled("a session is 16 bytes"))?;
    let boot = id(&attached.boot).map_err(|_| garbled("a boot is 16 bytes"))?;
    let secret = attached.secret.as_ref().try_into();
    let secret = secret.map_err(|_| garbled("a secret is 32 bytes"))?;
    let fd_socket = PathBuf::from(attached.fd_socket);
    if !fd_socket.is_absolute() {
        return Err(garbled("no absolute path of the socket for descriptors"));
    }
    let heartbeat = Duration::from_millis(attached.heartbeat_ms.into());
    Ok(Grant {
        session,
        secret,
        boot,
        fd_socket,
        mode,
        heartbeat: heartbeat.clamp(HEARTBEAT.0, HEARTBEAT.1),
    })
}

/// The daemon answered with each byte's complement. Clears it.
fn check_window(window: &SharedMap, pattern: Vec<u8>) -> Result<(), AttachError> {
    let mut answer = pattern;
    let expected: Vec<u8> = answer.iter().map(|byte| !byte).collect();
    window.read(0, &mut answer)?;
    let wrong = answer.iter().zip(&expected).position(|(a, b)| a != b);
    if let Some(at) = wrong {
        return Err(AttachError::SelfTest(at));
    }
    Ok(window.fill(0, HANDSHAKE_SELF_TEST_BYTES, 0)?)
}

/// Returns when the daemon closes the connection, or says anything: nothing more is to be said on it.
pub(super) async fn closed(connection: &UnixStream) {
    loop {
        if connection.readable().await.is_err() {
            return;
        }
        match connection.try_read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}
