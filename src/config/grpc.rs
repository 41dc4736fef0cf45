//! Section `[grpc]`: where workers attach.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::util::socket::PATH_MAX;

/// Sockets of the control plane. Who may attach there is in `[service]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Grpc {
    /// Unix socket; the peer's user decides who may attach (`service.allow_uids`). Default:
    /// `"/run/engram/engram.sock"`.
    pub socket: PathBuf,
    /// TCP address and port, for workers that cannot share a folder; needs `service.token_file`.
    /// Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
}

// === impl Grpc ===

impl Default for Grpc {
    fn default() -> Self {
        Grpc {
            socket: "/run/engram/engram.sock".into(),
            listen: None,
        }
    }
}

impl Grpc {
    /// Adds every problem of this section to `problems`.
    pub fn validate(&self, problems: &mut Vec<String>) {
        let Grpc { socket, listen: _ } = self;
        if !socket.is_absolute() || socket.as_os_str().len() > PATH_MAX {
            problems.push(format!(
                "grpc.socket: {} is not an absolute path of at most {PATH_MAX} bytes",
                socket.display()
            ));
        }
    }
}
