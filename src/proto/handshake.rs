//! The socket that passes descriptors, from both ends.
//!
//! # What
//!
//! After Attach the worker connects to the daemon's Unix socket, says which session it is, and hands
//! over the memfd of its window, if it has one. The daemon answers with the channel, its doorbell and
//! the mode; or with a refusal. Bytes and descriptors are laid out in `channel.toml`, `[handshake]`.
//!
//! # State
//!
//! None is kept. The connection stays open and silent: its end is the end of the session. The daemon
//! hangs up only when nothing of it reaches the worker's memory any more.
//!
//! # Order of writes
//!
//! Descriptors travel with the first byte of their message, so they are there once it is read.
//!
//! # Cancellation
//!
//! Descriptors that were received are closed when an answer fails or its future is dropped. A
//! connection on which either happened is of no more use.
//!
//! # Errors
//!
//! [`HandshakeError`]. A peer that goes away, lies about its descriptors or speaks another version
//! is an error, never a wait: the worker's side has a deadline; the daemon's callers set one.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, socket};

use super::channel::DecodeError;
use super::channel::layout::{
    HANDSHAKE_MAGIC, HANDSHAKE_MAX_DESCRIPTORS, HANDSHAKE_MAX_REASON_BYTES, HandshakeReply,
    HandshakeRequest, VERSION,
};
use super::v1;
use super::v1::refusal::Reason;
use crate::device::{Doorbell, fds};
use crate::types::TransferMode;

/// Size of a request: all its fields are of fixed size.
const REQUEST_BYTES: usize = 64;

/// Size of a reply up to its reason, whose count is the last of it.
const REPLY_BYTES: usize = 36;

/// What a worker says.
pub struct Request {
    /// The session that Attach gave.
    pub session: [u8; 16],
    /// Its secret. Compare it in constant time.
    pub secret: [u8; 32],
    /// The window: the staging ring itself, or memory beside it.
    pub window: Option<OwnedFd>,
}

/// What the daemon hands over; all of it stays its own, too.
#[derive(Copy, Clone, Debug)]
pub struct Grant<'a> {
    /// The channel's memory.
    pub channel: BorrowedFd<'a>,
    /// Its size in bytes.
    pub channel_bytes: u64,
    /// The eventfd that wakes the daemon.
    pub doorbell: BorrowedFd<'a>,
    /// Who copies between ring and window.
    pub mode: TransferMode,
}

/// What a worker got.
#[derive(Debug)]
pub struct Passed {
    /// The sign of life: the session ends when either side closes it.
    pub connection: UnixStream,
    /// The channel's memory.
    pub channel: OwnedFd,
    /// Its size in bytes.
    pub channel_bytes: u64,
    /// What wakes the daemon.
    pub doorbell: Doorbell,
    /// Who copies between ring and window.
    pub mode: TransferMode,
}

/// Why descriptors did not change hands.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The daemon said no.
    #[error("the daemon refuses: {text} ({reason:?})")]
    Refused {
        /// Why.
        reason: Reason,
        /// Why, for people.
        text: String,
    },
    /// The peer's first word is another.
    #[error("the peer speaks another protocol")]
    Magic,
    /// The peer has another version of the channel.
    #[error("the peer's channel has version {0}, not {expected}", expected = VERSION)]
    Version(u32),
    /// The descriptors that came are not those that were said, or that belong there.
    #[error("{came} descriptors came, and {said} were said")]
    Descriptors {
        /// How many the message says.
        said: u32,
        /// How many there were.
        came: usize,
    },
    /// A mode that is not known.
    #[error("{0} is no transfer mode")]
    Mode(u32),
    /// A reason that is too long.
    #[error("a reason of {0} bytes")]
    Reason(usize),
    /// The bytes are no message.
    #[error(transparent)]
    Message(#[from] DecodeError),
    /// The socket failed, or the peer went away or was too slow.
    #[error("the socket for descriptors: {0}")]
    Socket(#[from] io::Error),
}

// === impl Request ===

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the secret.
        let Self {
            session,
            secret: _,
            window,
        } = self;
        f.debug_struct("Request")
            .field("session", session)
            .field("window", window)
            .finish_non_exhaustive()
    }
}

/// Byte number `i` of the pattern that the worker leaves in the ring's first
/// [`HANDSHAKE_SELF_TEST_BYTES`](super::channel::layout::HANDSHAKE_SELF_TEST_BYTES). The daemon
/// answers there with the complement of each.
pub fn self_test_byte(i: u64) -> u8 {
    (i % 256 * 31 + 7) as u8
}

/// The worker's side. Takes `timeout` at most.
///
/// # Errors
///
/// [`HandshakeError`].
pub fn connect(
    path: &Path,
    session: [u8; 16],
    secret: [u8; 32],
    window: Option<BorrowedFd<'_>>,
    timeout: Duration,
) -> Result<Passed, HandshakeError> {
    let deadline = Instant::now() + timeout;
    let connection = dial(path)?;
    let window = window.as_slice();
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    HandshakeRequest {
        magic: HANDSHAKE_MAGIC,
        version: VERSION,
        descriptors: window.len() as u32,
        session,
        secret,
    }
    .encode(&mut bytes);
    connection.set_write_timeout(Some(left(deadline)?))?;
    fds::send_with_fds(&connection, &bytes, window)?;

    let mut received = Vec::new();
    let mut bytes = vec![0; REPLY_BYTES];
    read(&connection, &mut bytes, &mut received, deadline)?;
    let reason = reason_bytes(&bytes)?;
    bytes.resize(REPLY_BYTES + reason, 0);
    let (_, rest) = bytes.split_at_mut(REPLY_BYTES);
    read(&connection, rest, &mut received, deadline)?;
    connection.set_read_timeout(None)?;
    connection.set_write_timeout(None)?;
    passed(connection, HandshakeReply::decode(&bytes)?, received)
}

/// The daemon's side: what the worker says. Waits as long as the worker takes.
///
/// # Errors
///
/// [`HandshakeError`]; a refusal can still be sent, except after an error of the socket.
pub async fn receive(stream: &tokio::net::UnixStream) -> Result<Request, HandshakeError> {
    let mut bytes = [0; REQUEST_BYTES];
    let received = fds::recv_with_fds_async(stream, &mut bytes).await?;
    let HandshakeRequest {
        magic,
        version,
        descriptors,
        session,
        secret,
    } = HandshakeRequest::decode(&bytes)?;
    check(magic, version, descriptors, received.len())?;
    if received.len() > 1 {
        return Err(HandshakeError::Descriptors {
            said: descriptors,
            came: received.len(),
        });
    }
    let window = received.into_iter().next();
    Ok(Request {
        session,
        secret,
        window,
    })
}

/// The daemon's side: hands the descriptors over.
///
/// # Errors
///
/// If the socket fails.
pub async fn grant(stream: &tokio::net::UnixStream, grant: Grant<'_>) -> io::Result<()> {
    let Grant {
        channel,
        channel_bytes,
        doorbell,
        mode,
    } = grant;
    let descriptors = [channel, doorbell];
    let reply = HandshakeReply {
        magic: HANDSHAKE_MAGIC,
        version: VERSION,
        status: 0,
        descriptors: descriptors.len() as u32,
        channel_bytes,
        mode: mode_word(mode),
        reason: String::new(),
    };
    let mut bytes = Vec::with_capacity(REPLY_BYTES);
    reply.encode(&mut bytes);
    fds::send_with_fds_async(stream, &bytes, &descriptors).await
}

/// The daemon's side: says no. A text that is too long is cut.
///
/// # Errors
///
/// If the socket fails.
pub async fn refuse(stream: &tokio::net::UnixStream, reason: Reason, text: &str) -> io::Result<()> {
    let end = text.floor_char_boundary(HANDSHAKE_MAX_REASON_BYTES);
    let reply = HandshakeReply {
        magic: HANDSHAKE_MAGIC,
        version: VERSION,
        status: status(reason),
        descriptors: 0,
        channel_bytes: 0,
        mode: 0,
        reason: text.get(..end).unwrap_or_default().to_owned(),
    };
    let mut bytes = Vec::with_capacity(REPLY_BYTES + reply.reason.len());
    reply.encode(&mut bytes);
    fds::send_with_fds_async(stream, &bytes, &[]).await
}

/// Connects at once or not at all: a stopped daemon whose queue is full must not hold the worker.
fn dial(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    nix::sys::socket::connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    let connection = UnixStream::from(socket);
    connection.set_nonblocking(false)?;
    Ok(connection)
}

/// The number of a mode, as `engram.proto` has it.
fn mode_word(mode: TransferMode) -> u32 {
    v1::TransferMode::from(mode) as u32
}

fn mode_of(word: u32) -> Result<TransferMode, HandshakeError> {
    let known = TransferMode::ALL
        .into_iter()
        .find(|mode| mode_word(*mode) == word);
    known.ok_or(HandshakeError::Mode(word))
}

/// A status of 0 would be a grant.
fn status(reason: Reason) -> u32 {
    match u32::try_from(i32::from(reason)) {
        Ok(status) if status != 0 => status,
        _ => Reason::Unsupported as u32,
    }
}

fn check(magic: u64, version: u32, said: u32, came: usize) -> Result<(), HandshakeError> {
    if magic != HANDSHAKE_MAGIC {
        return Err(HandshakeError::Magic);
    }
    if version != VERSION {
        return Err(HandshakeError::Version(version));
    }
    if said as usize != came {
        return Err(HandshakeError::Descriptors { said, came });
    }
    Ok(())
}

fn passed(
    connection: UnixStream,
    reply: HandshakeReply,
    received: Vec<OwnedFd>,
) -> Result<Passed, HandshakeError> {
    let HandshakeReply {
        magic,
        version,
        status,
        descriptors,
        channel_bytes,
        mode,
        reason: text,
    } = reply;
    let came = received.len();
    if magic != HANDSHAKE_MAGIC {
        return Err(HandshakeError::Magic);
    }
    if status != 0 {
        // Of any version: a daemon that refuses the version says so.
        let reason = i32::try_from(status)
            .ok()
            .and_then(|status| Reason::try_from(status).ok());
        return Err(HandshakeError::Refused {
            reason: reason.unwrap_or_default(),
            text,
        });
    }
    check(magic, version, descriptors, came)?;
    let mut received = received.into_iter();
    match (received.next(), received.next(), received.next()) {
        (Some(channel), Some(doorbell), None) => Ok(Passed {
            connection,
            channel,
            channel_bytes,
            doorbell: Doorbell::from_fd(doorbell),
            mode: mode_of(mode)?,
        }),
        _ => Err(HandshakeError::Descriptors {
            said: descriptors,
            came,
        }),
    }
}

/// The count of the reason's bytes, which ends the fixed part of a reply.
fn reason_bytes(reply: &[u8]) -> Result<usize, HandshakeError> {
    let count = reply
        .last_chunk()
        .map_or(0, |count| u32::from_le_bytes(*count)) as usize;
    if count > HANDSHAKE_MAX_REASON_BYTES {
        return Err(HandshakeError::Reason(count));
    }
    Ok(count)
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(ErrorKind::TimedOut.into())
    } else {
        Ok(left)
    }
}

/// Fills `buffer`, and adds the descriptors that come with any of it to `received`.
fn read(
    connection: &UnixStream,
    buffer: &mut [u8],
    received: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        connection.set_read_timeout(Some(left(deadline)?))?;
        let (count, descriptors) = match fds::receive(connection, rest) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(io::Error::from(ErrorKind::TimedOut).into());
            }
            result => result?,
        };
        if count == 0 {
            return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
        }
        filled += count;
        received.extend(descriptors);
        if received.len() > HANDSHAKE_MAX_DESCRIPTORS {
            let (said, came) = (HANDSHAKE_MAX_DESCRIPTORS as u32, received.len());
            return Err(HandshakeError::Descriptors { said, came });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
