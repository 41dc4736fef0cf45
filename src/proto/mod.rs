//! The protocol between a worker and the daemon: gRPC for attaching and administration, the
//! shared-memory channel for everything else, and the socket that passes descriptors.

pub mod channel;
pub mod handshake;
#[cfg(test)]
pub(crate) mod parsers;

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
