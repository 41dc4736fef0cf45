//! Who may attach: the daemon's own user and configured ones over a Unix socket, holders of the
//! token over TCP.

use std::net::SocketAddr;
use std::path::Path;

use crate::util::secret::{Token, TokenError};

/// The other end of a connection.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Peer {
    /// A process of this host, as the kernel knows it.
    Unix {
        /// Its user.
        uid: u32,
        /// Its process id, if it has one here.
        pid: Option<i32>,
    },
    /// Somebody on the network.
    Tcp(SocketAddr),
}

/// Decides who may attach.
#[derive(Clone, Debug)]
pub struct Gate {
    uids: Vec<u32>,
    token: Option<Token>,
}

// === impl Gate ===

impl Gate {
    /// Lets in this process' own user, `uids`, and who knows the token in the file.
    ///
    /// # Errors
    /// The file cannot be read or holds no token.
    pub fn new(uids: &[u32], token_file: Option<&Path>) -> Result<Self, TokenError> {
        let own = nix::unistd::geteuid().as_raw();
        let uids = std::iter::once(own).chain(uids.iter().copied()).collect();
        let token = token_file.map(Token::read).transpose()?;
        Ok(Self { uids, token })
    }

    /// Whether the peer may attach; `token` is what it showed.
    pub fn admits(&self, peer: &Peer, token: Option<&str>) -> bool {
        match peer {
            Peer::Unix { uid, .. } => self.uids.contains(uid),
            Peer::Tcp(_) => match (&self.token, token) {
                (Some(known), Some(shown)) => known.is(shown.as_bytes()),
                _ => false,
            },
        }
    }
}

// === impl Peer ===

impl Peer {
    /// Its process, if it is one of this host.
    pub fn pid(&self) -> Option<i32> {
        match self {
            Self::Unix { pid, .. } => *pid,
            Self::Tcp(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: Peer = Peer::Tcp(SocketAddr::new(
        std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        1,
    ));

    #[test]
    fn users_over_unix_and_the_token_over_tcp() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "a-token-of-16-ch\n").unwrap();
        let gate = Gate::new(&[4242], Some(&path)).unwrap();
        let own = nix::unistd::geteuid().as_raw();
        let unix = |uid| Peer::Unix { uid, pid: None };
        assert!(gate.admits(&unix(own), None));
        assert!(gate.admits(&unix(4242), None));
        assert!(!gate.admits(&unix(4243), Some("a-token-of-16-ch")));
        assert!(gate.admits(&TCP, Some("a-token-of-16-ch")));
        assert!(!gate.admits(&TCP, Some("a-token-of-16-cx")));
        assert!(!gate.admits(&TCP, None));
        let gate = Gate::new(&[], None).unwrap();
        assert!(!gate.admits(&TCP, Some("")));
    }
}
