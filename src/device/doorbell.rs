//! An eventfd by which one process wakes another.

#![expect(unsafe_code, reason = "registration with the runtime has no safe form")]

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::eventfd::{EfdFlags, EventFd},
    unistd,
};
use tokio::io::{Interest, unix::AsyncFd};

/// The end that rings; ringing never blocks.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnedFd,
}

/// The end that sleeps, inside a runtime.
///
/// It never reads the counter: each ring makes the edge-triggered descriptor ready again. So a peer
/// that empties the counter, or makes the shared descriptor blocking, cannot stop the reader. A ring
/// that gets lost costs only the reader's next poll of the memory, which it must make anyway from
/// time to time.
#[derive(Debug)]
pub struct Listener {
    fd: AsyncFd<OwnedFd>,
}

// === impl Doorbell ===

impl Doorbell {
    /// A new one.
    pub fn new() -> io::Result<Self> {
        let fd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { fd: fd.into() })
    }

    /// One that a peer made. Ringing something else than an eventfd is an error or has no effect
    /// here.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Wakes the listener.
    pub fn ring(&self) -> io::Result<()> {
        match unistd::write(&self.fd, &1_u64.to_ne_bytes()) {
            // A full counter: the listener has been woken more than enough.
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The descriptor to give away.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A listener for the rings of this doorbell. Must be called inside a runtime with IO.
    pub fn listen(&self) -> io::Result<Listener> {
        let fd = self.fd.try_clone()?;
        // SAFETY: the AsyncFd owns the descriptor, which so stays open and the same.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(Listener { fd })
    }
}

// === impl Listener ===

impl Listener {
    /// Returns after the bell rang since the last return. Cancel safe.
    pub async fn wait(&self) -> io::Result<()> {
        self.fd.readable().await?.clear_ready();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use tokio::time::timeout;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn each_ring_wakes_and_rings_before_the_wait_are_not_lost() {
        let bell = Doorbell::new().unwrap();
        let listener = bell.listen().unwrap();
        for _ in 0..3 {
            bell.ring().unwrap();
            bell.ring().unwrap();
            timeout(LONG, listener.wait()).await.unwrap().unwrap();
        }
        let later = tokio::spawn(async move { bell.ring() });
        timeout(LONG, listener.wait()).await.unwrap().unwrap();
        later.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_peer_that_plays_with_the_descriptor_cannot_block_the_listener() {
        let bell = Doorbell::new().unwrap();
        let listener = bell.listen().unwrap();
        let peer = bell.fd().try_clone_to_owned().unwrap();
        fcntl(&peer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        for _ in 0..3 {
            bell.ring().unwrap();
            let mut counter = [0; 8];
            unistd::read(&peer, &mut counter).unwrap();
            // Whether the stolen ring still wakes is the kernel's choice; that nothing hangs is ours.
            let _ = timeout(Duration::from_millis(1), listener.wait()).await;
        }
        bell.ring().unwrap();
        timeout(LONG, listener.wait()).await.unwrap().unwrap();
    }

    #[test]
    fn a_full_counter_is_no_error_and_does_not_block() {
        let bell = Doorbell::new().unwrap();
        unistd::write(bell.fd(), &(u64::MAX - 1).to_ne_bytes()).unwrap();
        bell.ring().unwrap();
    }
}
