//! Who is at the other end of a Unix socket, and whether it still lives.

#![expect(
    unsafe_code,
    reason = "pidfd_open and registration with the runtime have no safe form"
)]

use std::{
    io,
    os::fd::{AsFd, FromRawFd, OwnedFd, RawFd},
};

use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{getsockopt, sockopt},
};
use tokio::io::{Interest, unix::AsyncFd};

/// Credentials of the process that connected, as the kernel knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id in our PID namespace; 0 if it has none there.
    pub pid: i32,
    /// Effective user at the time of the connect.
    pub uid: u32,
    /// Effective group at the time of the connect.
    pub gid: u32,
}

/// A process, by a descriptor that cannot come to mean another one.
#[derive(Debug)]
pub struct PeerProcess {
    fd: OwnedFd,
}

// === impl Peer ===

impl Peer {
    /// The peer of a connected Unix socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let credentials = getsockopt(&socket.as_fd(), sockopt::PeerCredentials)?;
        Ok(Self {
            pid: credentials.pid(),
            uid: credentials.uid(),
            gid: credentials.gid(),
        })
    }
}

// === impl PeerProcess ===

impl PeerProcess {
    /// The process that connected, or none if it is in a PID namespace that we cannot see: then only
    /// the connection tells whether it lives.
    pub fn of(socket: impl AsFd) -> io::Result<Option<Self>> {
        let socket = socket.as_fd();
        // Race-free, but only since Linux 6.5.
        match getsockopt(&socket, sockopt::PeerPidfd) {
            Ok(fd) => return Ok(Some(Self { fd })),
            Err(Errno::ENOPROTOOPT | Errno::ENODATA | Errno::EOPNOTSUPP) => {}
            Err(errno) => return Err(errno.into()),
        }
        match Peer::of(socket)?.pid {
            0 => Ok(None),
            pid => Self::open(pid).map(Some),
        }
    }

    /// The process that has this id now.
    pub fn open(pid: i32) -> io::Result<Self> {
        // SAFETY: a system call with two plain numbers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0_u32) };
        let fd = RawFd::try_from(Errno::result(fd)?).map_err(|_| io::ErrorKind::InvalidData)?;
        // SAFETY: the kernel has just made this descriptor (close-on-exec) for us alone.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    /// Whether it has not ended yet. A stopped process lives.
    pub fn alive(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut fds, PollTimeout::ZERO)? == 0)
    }

    /// Returns when it has ended. Must be called inside a runtime with IO. Cancel safe.
    pub async fn ended(&self) -> io::Result<()> {
        // SAFETY: the descriptor is borrowed from `self`, which outlives the registration.
        let fd = unsafe { AsyncFd::register_with_interest(self.fd.as_fd(), Interest::READABLE) }?;
        fd.readable().await?.retain_ready();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::net::UnixStream,
        process::{Command, Stdio},
        time::Duration,
    };

    use super::*;

    #[test]
    fn the_peer_of_our_own_pair_is_us() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = Peer::of(&a).unwrap();
        assert_eq!(peer.pid, i32::try_from(std::process::id()).unwrap());
        assert_eq!(peer.uid, nix::unistd::geteuid().as_raw());
        assert!(PeerProcess::of(&a).unwrap().unwrap().alive().unwrap());
        assert!(Peer::of(std::fs::File::open("/dev/null").unwrap()).is_err());
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_seen() {
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let process = PeerProcess::open(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(process.alive().unwrap());
        child.kill().unwrap();
        tokio::time::timeout(Duration::from_secs(30), process.ended())
            .await
            .unwrap()
            .unwrap();
        assert!(!process.alive().unwrap());
        child.wait().unwrap();
        assert!(!process.alive().unwrap());
    }

    #[test]
    fn no_such_process() {
        assert!(PeerProcess::open(-1).is_err());
        assert!(PeerProcess::open(0).is_err());
    }
}
