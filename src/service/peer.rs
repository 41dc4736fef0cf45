//! Who may attach: the daemon's own user and configured ones over a Unix socket, holders of the token over
//! TCP.

use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;

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
#[derive(Clone)]
pub struct Gate {
    uids: Vec<u32>,
    /// Digest of the token.
    token: Option<blake3::Hash>,
}

/// Why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// It cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        error: std::io::Error,
    },
    /// It holds something else.
    #[error("{path}: not one line of 16 to 4096 visible ASCII characters")]
    Malformed {
        /// The file.
        path: String,
    },
}

/// Longest token in bytes.
const TOKEN_MAX: usize = 4096;

// === impl Gate ===

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("uids", &self.uids).finish_non_exhaustive()
    }
}

impl Gate {
    /// Lets in this process' own user, `uids`, and who knows the token in the file.
    ///
    /// # Errors
    /// The file cannot be read or holds no token.
    pub fn new(uids: &[u32], token_file: Option<&Path>) -> Result<Self, TokenError> {
        let own = nix::unistd::geteuid().as_raw();
        let uids = std::iter::once(own).chain(uids.iter().copied()).collect();
        let token = token_file.map(read_token).transpose()?;
        Ok(Self { uids, token })
    }

    /// Whether the peer may attach; `token` is what it showed.
    pub fn admits(&self, peer: &Peer, token: Option<&str>) -> bool {
        match peer {
            Peer::Unix { uid, .. } => self.uids.contains(uid),
            // Digests are compared in constant time.
            Peer::Tcp(_) => match (&self.token, token) {
                (Some(known), Some(shown)) => *known == blake3::hash(shown.as_bytes()),
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

fn read_token(path: &Path) -> Result<blake3::Hash, TokenError> {
    let name = || path.display().to_string();
    let io = |error| TokenError::Io { path: name(), error };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(io)?;
    file.take(TOKEN_MAX as u64 + 3).read_to_end(&mut bytes).map_err(io)?;
    let text = std::str::from_utf8(&bytes).unwrap_or_default();
    let text = text.strip_suffix('\n').unwrap_or(text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
    if !visible || !(16..=TOKEN_MAX).contains(&text.len()) {
        return Err(TokenError::Malformed { path: name() });
    }
    Ok(blake3::hash(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: Peer = Peer::Tcp(SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1));

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

    #[test]
    fn bad_token_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        assert!(matches!(Gate::new(&[], Some(&path)), Err(TokenError::Io { .. })));
        for bad in ["short", "a token with blanks in it", "two-lines-of-text\nmore-of-it"] {
            std::fs::write(&path, bad).unwrap();
            assert!(matches!(Gate::new(&[], Some(&path)), Err(TokenError::Malformed { .. })));
        }
    }
}
