//! Ids, units and small words that every layer shares. No IO, no clock, nothing of this crate.

pub mod hex;

mod hash;
mod id;
mod kind;
mod mode;
mod namespace;
mod time;
mod token;

pub use hash::{Fingerprint, NamespaceId, ObjectId};
#[cfg(test)]
pub(crate) use id::scripted;
pub use id::{BootId, Generation, InstanceId, LeaseId, SessionId, SnapshotId};
pub use kind::{ObjectKind, TierKind};
pub use mode::{BadMode, ModeChoice, TransferMode};
pub use namespace::Namespace;
pub use time::Millis;
pub use token::{BLOCK_TOKENS, BadRange, TokenId, TokenRange, Tokens};
