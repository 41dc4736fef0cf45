//! The protocol between a worker and the daemon: gRPC for attaching and administration, the
//! shared-memory channel for everything else, and the socket that passes descriptors.

pub mod channel;
pub mod handshake;
#[cfg(test)]
pub(crate) mod parsers;

use crate::types::TransferMode;

/// Messages and services of `engram.proto`.
#[expect(
    missing_docs,
    reason = "generated; the description carries the comments"
)]
#[expect(
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated"
)]
pub mod v1 {
    tonic::include_proto!("engram.v1");
}

/// Version of the control plane: major * 1000 + minor.
pub const PROTOCOL: u32 = 1001;

/// A transfer mode that is not known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no transfer mode")]
pub struct UnknownMode(pub i32);

// === impl v1::TransferMode ===

impl From<TransferMode> for v1::TransferMode {
    fn from(mode: TransferMode) -> Self {
        match mode {
            TransferMode::Ipc => Self::Ipc,
            TransferMode::Engine => Self::Engine,
        }
    }
}

impl TryFrom<v1::TransferMode> for TransferMode {
    type Error = UnknownMode;

    fn try_from(mode: v1::TransferMode) -> Result<Self, UnknownMode> {
        match mode {
            v1::TransferMode::Ipc => Ok(Self::Ipc),
            v1::TransferMode::Engine => Ok(Self::Engine),
            v1::TransferMode::Unspecified => Err(UnknownMode(mode.into())),
        }
    }
}
