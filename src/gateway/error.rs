//! Why a request does not generate.

use crate::service::ServiceError;
use crate::upstream::UpstreamError;

/// Error of a request that generates.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// No server is behind this daemon.
    #[error(
        "this daemon does not generate: set upstream.url, or restore without \
         `create_new_request` and send the whole prompt to the inference server"
    )]
    NotConfigured,
    /// The body breaks a rule.
    #[error("{0}")]
    Invalid(String),
    /// It asks for what cannot be honoured in a conversation.
    #[error("not supported in a conversation: {0}")]
    Unsupported(String),
    /// The chat template or the tokenizer refuses.
    #[error("{0}")]
    Tokenization(String),
    /// Another request under way has this id.
    #[error("a request with rid `{0}` is under way")]
    DuplicateRid(String),
    /// The conversation's head is taken.
    #[error("another request of this conversation is under way")]
    HeadTaken,
    /// The turn before was answered, and is not recorded.
    #[error(
        "the turn before this one (rid `{0}`) was answered, and no worker has told of its end: is \
         the server attached to this daemon?"
    )]
    TurnUnknown(String),
    /// Too many answers under way.
    #[error("too many answers are under way")]
    TooMany,
    /// The daemon starts.
    #[error("The daemon is starting")]
    Starting,
    /// The daemon stops.
    #[error("the daemon is stopping")]
    Stopping,
    /// It needs the model's own tokenizer.
    #[error("{0}")]
    NotImplemented(&'static str),
    /// Of the store of conversations.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// Of the server.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
}

// === impl GatewayError ===

impl GatewayError {
    /// The name used in events and bodies.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotConfigured | Self::NotImplemented(_) => "not_implemented",
            Self::Invalid(_) => "invalid_request",
            Self::Unsupported(_) => "unsupported",
            Self::Tokenization(_) => "tokenization_error",
            Self::DuplicateRid(_) => "conflict",
            Self::HeadTaken | Self::TooMany => "busy",
            Self::TurnUnknown(_) | Self::Starting | Self::Stopping => "unavailable",
            Self::Service(error) => error.kind().as_str(),
            Self::Upstream(error) => match error {
                UpstreamError::Unreachable(_) => "upstream_unavailable",
                UpstreamError::Timeout(_) => "upstream_timeout",
                UpstreamError::Refused(_) => "upstream_refused",
                UpstreamError::Broken(_) | UpstreamError::TooLarge | UpstreamError::Bad(_) => {
                    "bad_upstream"
                }
            },
        }
    }
}
