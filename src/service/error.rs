//! What can go wrong in a request to the service, and what the caller can do about it.

use crate::types::{Fingerprint, SnapshotId};

/// Error of a request to [`Service`](super::Service). [`kind`](Self::kind) says what to do about
/// it.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// Neither a conversation nor a request of this name is known.
    #[error("nothing is known of {what} `{name}`")]
    NotFound {
        /// "conversation", "request", "turn", "branch" or "snapshot".
        what: &'static str,
        /// The name as it was asked for.
        name: String,
    },
    /// The conversation is known, but no state of it is stored.
    #[error("`{name}` is known, but no state of it is stored")]
    NoState {
        /// Conversation or request.
        name: String,
    },
    /// The turn is known, but not what was said in it.
    #[error("`{name}` is known, but its tokens are not: {why}")]
    TokensUnknown {
        /// Conversation or request.
        name: String,
        /// Why not.
        why: &'static str,
    },
    /// There is one of this name already.
    #[error("there is a {what} `{name}` already")]
    Exists {
        /// "conversation".
        what: &'static str,
        /// The name as it was asked for.
        name: String,
    },
    /// It was there when the request came, and was deleted before the request was done.
    #[error("snapshot {snapshot} was deleted meanwhile")]
    Deleted {
        /// The snapshot that was meant.
        snapshot: SnapshotId,
    },
    /// It is not, or not any more, as the one who changes it saw it.
    #[error("it has changed since it was looked at")]
    Changed,
    /// Workers are attached, and none of them can read this snapshot.
    #[error("snapshot {snapshot} was made by model {fingerprint}; no attached worker runs it")]
    Mismatch {
        /// The snapshot asked for.
        snapshot: SnapshotId,
        /// The fingerprint it was made with.
        fingerprint: Fingerprint,
    },
    /// What is to be imported is of a model that nothing here is of.
    #[error(
        "the snapshot is of model {theirs}, and this store holds {ours}; `new_model` takes it all \
         the same"
    )]
    OtherModel {
        /// The model that it was exported from, for people.
        theirs: String,
        /// The models that are here, for people.
        ours: String,
    },
    /// The request itself is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The peer may not ask this.
    #[error("not allowed")]
    Unauthorized,
    /// Too much is going on, or a deadline passed; the same request may succeed later.
    #[error("busy: {0}")]
    Busy(String),
    /// The daemon is starting, stopping, or has lost its disk.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// Neither RAM nor disk has room for it.
    #[error("no space: {0}")]
    NoSpace(String),
    /// Its namespace may not hold more.
    #[error(
        "{namespace} holds {used} of the {quota} bytes that it may hold, and {need} more are needed"
    )]
    Quota {
        /// Which, for people.
        namespace: String,
        /// Bytes that it holds.
        used: u64,
        /// Bytes that it may hold.
        quota: u64,
        /// Bytes that would have come.
        need: u64,
    },
    /// It is larger than a whole tier: there will never be room for it.
    #[error("too large: {0}")]
    TooLarge(String),
    /// Stored bytes went away or failed their checks.
    #[error("stored data was lost: {0}")]
    Data(String),
    /// A fault of the daemon.
    #[error("internal error: {0}")]
    Internal(String),
}

/// The classes of [`ServiceError`], each with one HTTP status and one gRPC code at the edge.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// 404.
    NotFound,
    /// 409 `no_state`.
    NoState,
    /// 409 `tokens_unknown`.
    TokensUnknown,
    /// 409 `already_exists`.
    Exists,
    /// 409 `mismatch`.
    Mismatch,
    /// 412.
    Changed,
    /// 400.
    Invalid,
    /// 401.
    Unauthorized,
    /// 503, try again.
    Busy,
    /// 503.
    Unavailable,
    /// 507, try again once there is room.
    NoSpace,
    /// 507 `quota_exceeded`, try again once the namespace has room.
    Quota,
    /// 507, for good.
    TooLarge,
    /// 500, the stored bytes are at fault.
    Data,
    /// 500.
    Internal,
}

// === impl ServiceError ===

impl ServiceError {
    /// What the caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } | Self::Deleted { .. } => ErrorKind::NotFound,
            Self::NoState { .. } => ErrorKind::NoState,
            Self::TokensUnknown { .. } => ErrorKind::TokensUnknown,
            Self::Exists { .. } => ErrorKind::Exists,
            Self::Mismatch { .. } | Self::OtherModel { .. } => ErrorKind::Mismatch,
            Self::Changed => ErrorKind::Changed,
            Self::Invalid(_) => ErrorKind::Invalid,
            Self::Unauthorized => ErrorKind::Unauthorized,
            Self::Busy(_) => ErrorKind::Busy,
            Self::Unavailable(_) => ErrorKind::Unavailable,
            Self::NoSpace(_) => ErrorKind::NoSpace,
            Self::Quota { .. } => ErrorKind::Quota,
            Self::TooLarge(_) => ErrorKind::TooLarge,
            Self::Data(_) => ErrorKind::Data,
            Self::Internal(_) => ErrorKind::Internal,
        }
    }
}

// === impl ErrorKind ===

impl ErrorKind {
    /// The name used in bodies and metrics: `not_found`, `no_state`, …
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::NoState => "no_state",
            Self::TokensUnknown => "tokens_unknown",
            Self::Exists => "already_exists",
            Self::Mismatch => "mismatch",
            Self::Changed => "precondition_failed",
            Self::Invalid => "invalid",
            Self::Unauthorized => "unauthorized",
            Self::Busy => "busy",
            Self::Unavailable => "unavailable",
            Self::NoSpace => "no_space",
            Self::Quota => "quota_exceeded",
            Self::TooLarge => "too_large",
            Self::Data => "data",
            Self::Internal => "internal",
        }
    }
}
