//! Descriptors over a Unix socket (`SCM_RIGHTS`).
//!
//! A peer may send any number of any descriptors with any byte. Every descriptor that arrives is
//! owned at once, so none leaks; more than [`MAX_FDS`] in one message, or a message whose control
//! part was cut, is an error and closes them all. What a descriptor is must be checked by its user.

#![expect(unsafe_code, reason = "control messages are parsed from raw memory")]

use std::{
    io::{self, ErrorKind, IoSlice, Read, Write},
    mem,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    ptr,
};

use nix::{
    libc,
    sys::socket::{ControlMessage, MsgFlags, sendmsg},
};
use tokio::io::Interest;

/// Most descriptors in one message.
pub const MAX_FDS: usize = 4;

/// Most descriptors that the kernel passes in one message: room for them all means that a hostile
/// sender cannot make the control part overflow.
const KERNEL_MAX_FDS: usize = 253;

/// Control buffer, in words so that it is aligned for `cmsghdr`.
const CONTROL_WORDS: usize = KERNEL_MAX_FDS * mem::size_of::<RawFd>() / 8 + 8;

/// One `sendmsg`: some first part of `bytes`, with all of `fds`. Says how many bytes went; the
/// descriptors went with them if any did.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > MAX_FDS || (bytes.is_empty() && !fds.is_empty()) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let fd = socket.as_fd().as_raw_fd();
    let sent = sendmsg::<()>(
        fd,
        &[IoSlice::new(bytes)],
        control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(sent)
}

/// One `recvmsg` into `buffer`: bytes read (0 at the end of the stream) and the descriptors that
/// came with them, close-on-exec.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = [0_u64; CONTROL_WORDS];
    let mut iov = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: all zeros is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = ptr::from_mut(&mut iov);
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = mem::size_of_val(&control) as _;
    // SAFETY: `message` points to `iov`, `buffer` and `control`, all live and exclusively ours for
    // the call, with their true sizes.
    let received = unsafe {
        libc::recvmsg(
            socket.as_fd().as_raw_fd(),
            &raw mut message,
            libc::MSG_CMSG_CLOEXEC,
        )
    };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has just filled `message` and `control`.
    let fds = unsafe { take_fds(&message) };
    let cut = message.msg_flags & libc::MSG_CTRUNC != 0;
    if cut || fds.len() > MAX_FDS {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "too many descriptors in one message",
        ));
    }
    Ok((received, fds))
}

/// Sends all of `bytes`, `fds` with the first of them. For blocking sockets.
pub fn send_with_fds(
    mut stream: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let sent = retry(|| send(stream, bytes, fds))?;
    let rest = bytes.get(sent..).unwrap_or_default();
    stream.write_all(rest)
}

/// Fills `buffer` and gives the descriptors that came with any of it. For blocking sockets, which
/// should have a read timeout.
pub fn recv_with_fds(stream: &UnixStream, buffer: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let mut fds = Vec::new();
    let mut filled = 0;
    while filled < buffer.len() {
        let rest = buffer.get_mut(filled..).unwrap_or_default();
        let (n, more) = retry(|| receive(stream, rest))?;
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        filled += n;
        add_fds(&mut fds, more)?;
    }
    Ok(fds)
}

/// [`send_with_fds`] for a socket of the runtime.
pub async fn send_with_fds_async(
    stream: &tokio::net::UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut sent = stream
        .async_io(Interest::WRITABLE, || send(stream, bytes, fds))
        .await?;
    while sent < bytes.len() {
        let rest = bytes.get(sent..).unwrap_or_default();
        sent += stream
            .async_io(Interest::WRITABLE, || send(stream, rest, &[]))
            .await?;
    }
    Ok(())
}

/// [`recv_with_fds`] for a socket of the runtime. If it is cancelled, descriptors that came are
/// closed and bytes that came are lost: the connection is of no more use.
pub async fn recv_with_fds_async(
    stream: &tokio::net::UnixStream,
    buffer: &mut [u8],
) -> io::Result<Vec<OwnedFd>> {
    let mut fds = Vec::new();
    let mut filled = 0;
    while filled < buffer.len() {
        let rest = buffer.get_mut(filled..).unwrap_or_default();
        let (n, more) = stream
            .async_io(Interest::READABLE, || receive(stream, rest))
            .await?;
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        filled += n;
        add_fds(&mut fds, more)?;
    }
    Ok(fds)
}

/// Waits on a blocking socket for the peer's end: `Ok` once it is closed or reset, an error if the
/// peer says something unexpected.
pub fn wait_closed(mut stream: &UnixStream) -> io::Result<()> {
    match retry(|| stream.read(&mut [0])) {
        Ok(0) => Ok(()),
        Ok(_) => Err(ErrorKind::InvalidData.into()),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(()),
        Err(error) => Err(error),
    }
}

fn add_fds(fds: &mut Vec<OwnedFd>, more: Vec<OwnedFd>) -> io::Result<()> {
    fds.extend(more);
    if fds.len() > MAX_FDS {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "too many descriptors",
        ));
    }
    Ok(())
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Takes ownership of every descriptor in a received message.
///
/// # Safety
/// `message` must come from a successful `recvmsg`, not looked at by this function before.
unsafe fn take_fds(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the control part, so the macros walk whole headers inside it.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: not null, so a whole header, by the same reason.
    while let Some(cmsg) = unsafe { header.as_ref() } {
        if cmsg.cmsg_level == libc::SOL_SOCKET && cmsg.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: `header` is a whole header with its data behind it.
            let data = unsafe { libc::CMSG_DATA(header) };
            let skip = data.addr() - header.addr();
            let len: usize = cmsg.cmsg_len as _;
            let count = len.saturating_sub(skip) / mem::size_of::<RawFd>();
            for i in 0..count {
                // SAFETY: `count` descriptors lie behind the header, perhaps not aligned.
                let raw = unsafe { data.cast::<RawFd>().add(i).read_unaligned() };
                // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
                fds.push(unsafe { OwnedFd::from_raw_fd(raw) });
            }
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    fds
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn descriptors_arrive_with_their_bytes_and_close_on_exec() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let null = File::open("/dev/null").unwrap();
        send_with_fds(&a, b"hello", &[writer.as_fd(), null.as_fd()]).unwrap();
        drop(writer);
        let mut buffer = [0; 5];
        let fds = recv_with_fds(&b, &mut buffer).unwrap();
        assert_eq!(&buffer, b"hello");
        assert_eq!(fds.len(), 2);
        for fd in &fds {
            let flags = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFD).unwrap();
            assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        }
        let mut through = File::from(fds.into_iter().next().unwrap());
        through.write_all(b"x").unwrap();
        drop(through);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn a_flood_of_descriptors_is_refused_and_none_leaks() {
        let (a, b) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        assert!(send(&a, b"x", &[null.as_fd(); MAX_FDS + 1]).is_err());
        for count in [MAX_FDS + 1, 100, KERNEL_MAX_FDS] {
            // A descriptor that leaked would keep the pipe from ending.
            let (mut reader, writer) = std::io::pipe().unwrap();
            let raw = vec![writer.as_raw_fd(); count];
            let rights = [ControlMessage::ScmRights(&raw)];
            sendmsg::<()>(
                a.as_raw_fd(),
                &[IoSlice::new(b"x")],
                &rights,
                MsgFlags::empty(),
                None,
            )
            .unwrap();
            drop(writer);
            let error = receive(&b, &mut [0; 8]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData);
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn no_more_than_the_limit_over_several_messages() {
        let (a, b) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        for _ in 0..2 {
            send_with_fds(&a, b"xyz", &[null.as_fd(); 3]).unwrap();
        }
        assert!(recv_with_fds(&b, &mut [0; 6]).is_err());
    }

    #[test]
    fn the_end_of_the_stream_is_an_error_inside_a_message() {
        let (a, b) = UnixStream::pair().unwrap();
        send_with_fds(&a, b"hel", &[]).unwrap();
        drop(a);
        let error = recv_with_fds(&b, &mut [0; 5]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        wait_closed(&b).unwrap();
        assert!(send_with_fds(&b, b"x", &[]).is_err(), "no signal, an error");
    }

    #[tokio::test]
    async fn async_ends_wait_for_each_other() {
        let (a, b) = tokio::net::UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let big = vec![7; 4 << 20];
        let mut got = vec![0; big.len()];
        let fds = [null.as_fd()];
        let (sent, received) = tokio::join!(
            send_with_fds_async(&a, &big, &fds),
            recv_with_fds_async(&b, &mut got),
        );
        sent.unwrap();
        assert_eq!(received.unwrap().len(), 1);
        assert_eq!(got, big);
    }
}
