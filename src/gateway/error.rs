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
    /// A turn of the conversation is of a request with this id.
    #[error("a turn of this conversation is of a request with rid `{0}` already")]
    UsedRid(String),
    /// The conversation is of another namespace.
    #[error("the conversation was held with {0}")]
    OtherNamespace(&'static str),
    /// The server is another tenant's.
    #[error(
        "the inference server behind this daemon is not that tenant's: `tenant` must be \
         upstream.tenant"
    )]
    OtherTenant,
    /// The conversation is as long as it may be.
    #[error(
        "the conversation has as many tokens as it may have, with what is new: {0} \
         (service.max_prompt_tokens)"
    )]
    TooLong(u32),
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
            Self::Invalid(_) | Self::TooLong(_) => "invalid_request",
            Self::OtherNamespace(_) | Self::OtherTenant => "mismatch",
            Self::Unsupported(_) => "unsupported",
            Self::Tokenization(_) => "tokenization_error",
            Self::DuplicateRid(_) | Self::UsedRid(_) => "conflict",
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
