//! A request from its arrival to its answer.

use std::fmt;
use std::time::Instant;

use tokio::sync::oneshot;

use super::cache::{Namespace, NodeId};
use super::ids::{PageId, SlotId};
use super::memory::Restored;
use super::model::{MAX_TOKENS, Predicted, VOCAB};

/// Longest `rid`, `session_id`, `extra_key` or `cache_salt`, in bytes.
pub const MAX_NAME: usize = 512;

/// Number of one request in one engine process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Who asks, and with what prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInfo {
    /// Its number here.
    pub id: RequestId,
    /// The client's name for it, unique among the live ones.
    pub rid: String,
    /// The conversation that it belongs to, if the client says.
    pub session_id: Option<String>,
    /// What it may share with.
    pub namespace: Namespace,
    /// The prompt.
    pub prompt: Vec<u32>,
}

/// When to stop, and what is wanted with each token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sampling {
    /// Most tokens of the answer.
    pub max_new_tokens: usize,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Whether log probabilities are wanted, and of how many likely others.
    pub logprobs: Option<usize>,
}

/// Hears of each token of an answer on the scheduler's thread, so it must not wait. Says when the
/// text of the answer has come to one of its ends, and to which.
pub struct Listener(pub Box<Hear>);
/// What a [`Listener`] does.
pub type Hear = dyn FnMut(&Predicted) -> Option<usize> + Send;

/// A request that waits.
#[derive(Debug)]
pub struct Request {
    /// Who and what.
    pub info: RequestInfo,
    /// When to stop.
    pub sampling: Sampling,
    /// When it arrived.
    pub arrived: Instant,
    /// Hears of each token, if anybody does.
    pub listener: Option<Listener>,
    /// Where the answer goes. Its other end is dropped when the client has gone.
    pub reply: oneshot::Sender<Result<Answer, Refusal>>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It reached `max_new_tokens`.
    Length,
    /// This stop token came.
    Stop(u32),
    /// The text came to its end of this number.
    Text(usize),
    /// The engine was stopped or told to abort it.
    Abort,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The tokens.
    pub output_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were not computed.
    pub cached_tokens: usize,
    /// What the external memory brought.
    pub restored: Option<Restored>,
}

/// Why a request is not taken.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refusal {
    /// No tokens.
    #[error("input_ids must hold at least one token")]
    Empty,
    /// A token that the model has not.
    #[error("input_ids[{index}] is {token}, token ids are 0 to {}", VOCAB - 1)]
    Vocabulary {
        /// Where in the prompt.
        index: usize,
        /// What was given.
        token: i64,
    },
    /// More than the model takes.
    #[error(
        "{prompt} prompt tokens and {answer} new ones are more than {}",
        MAX_TOKENS
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// `max_new_tokens`.
        answer: usize,
    },
    /// More than the KV pool holds, however empty.
    #[error("the request needs {needed} pages, the pool has {total}")]
    TooLarge {
        /// Pages needed.
        needed: usize,
        /// Pages of the pool.
        total: usize,
    },
    /// A name that is too long or empty.
    #[error("{field} must have 1 to {MAX_NAME} bytes")]
    Name {
        /// Which.
        field: &'static str,
    },
    /// A live request has this `rid`.
    #[error("a request with rid {0:?} is in progress")]
    DuplicateRid(String),
    /// The engine is stopping.
    #[error("the engine is stopping")]
    Stopping,
}

/// A request that was admitted.
#[derive(Debug)]
pub struct Running {
    /// The request.
    pub request: Request,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    /// Tokens whose KV and state are computed.
    pub done: usize,
    /// Its own slot, with the state at `done`.
    pub slot: SlotId,
    /// Pages of all its tokens, those to come too. Those of the first `protected` tokens are the
    /// cache's, the others its own.
    pub pages: Vec<PageId>,
    /// Tokens whose pages are the cache's, kept by the lock on `node`.
    pub protected: usize,
    /// The node that it has locked.
    pub node: Option<NodeId>,
    /// Tokens of the prompt that it did not compute.
    pub cached: usize,
    /// Where its prompt leaves what is cached: a boundary worth a state.
    pub branch: Option<usize>,
    /// The newest boundary reached in decoding, and a copy of the state there.
    pub tracked: Option<(usize, SlotId)>,
    /// The end to which the text has come.
    pub ended: Option<usize>,
}

// === impl Listener ===

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listener(..)")
    }
}

// === impl RequestInfo ===

impl RequestInfo {
    /// Checks all that can be checked without the engine's state.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn check(&self, sampling: &Sampling) -> Result<(), Refusal> {
        let Self {
            id: _,
            rid,
            session_id,
            namespace,
            prompt,
        } = self;
        if prompt.is_empty() {
            return Err(Refusal::Empty);
        }
        if let Some((index, token)) = prompt
            .iter()
            .enumerate()
            .find(|(_, t)| **t as usize >= VOCAB)
        {
            return Err(Refusal::Vocabulary {
                index,
                token: i64::from(*token),
            });
        }
        let answer = sampling.max_new_tokens;
        if answer > MAX_TOKENS || prompt.len() > MAX_TOKENS - answer {
            return Err(Refusal::TooLong {
                prompt: prompt.len(),
                answer,
            });
        }
        let names = [
            ("rid", Some(rid)),
            ("session_id", session_id.as_ref()),
            ("extra_key", namespace.extra_key.as_ref()),
            ("cache_salt", namespace.cache_salt.as_ref()),
        ];
        let bad = |name: &&String| name.is_empty() || name.len() > MAX_NAME;
        match names
            .into_iter()
            .find(|(_, name)| name.as_ref().is_some_and(bad))
        {
            Some((field, _)) => Err(Refusal::Name { field }),
            None => Ok(()),
        }
    }
}

// === impl Request ===

impl Request {
    /// Tokens whose KV it will have computed at its end: all but the last one of the answer.
    pub fn most_tokens(&self) -> usize {
        self.info.prompt.len() + self.sampling.max_new_tokens.saturating_sub(1)
    }
}

// === impl Refusal ===

impl Refusal {
    /// The type in an error body.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Empty => "empty_input",
            Self::Vocabulary { .. } => "token_out_of_vocabulary",
            Self::TooLong { .. } => "too_long",
            Self::TooLarge { .. } => "too_large",
            Self::Name { .. } => "bad_name",
            Self::DuplicateRid(_) => "duplicate_rid",
            Self::Stopping => "stopping",
        }
    }
}

// === impl Running ===

impl Running {
    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.request.info.prompt.len()
    }

    /// Whether part of the prompt is still to be computed.
    pub fn prefilling(&self) -> bool {
        self.done < self.prompt_len()
    }

    /// Tokens of the answer so far.
    pub fn output(&self) -> &[u32] {
        self.tokens.get(self.prompt_len()..).unwrap_or_default()
    }

    /// One more token of the answer.
    pub fn push(&mut self, next: Predicted) {
        self.tokens.push(next.token);
        if let Some(Listener(hear)) = &mut self.request.listener {
            self.ended = hear(&next);
        }
    }

    /// Why the answer is complete, if it is.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        let output = self.output();
        let stops = &self.request.sampling.stop_token_ids;
        if let Some(last) = output.last().filter(|last| stops.contains(last)) {
            return Some(FinishReason::Stop(*last));
        }
        if let Some(end) = self.ended {
            return Some(FinishReason::Text(end));
        }
        let full = output.len() >= self.request.sampling.max_new_tokens;
        (full && !self.prefilling()).then_some(FinishReason::Length)
    }

    /// Its own pages among those of all its tokens.
    pub fn own_pages(&self, page_size: usize) -> &[PageId] {
        self.pages
            .get(self.protected / page_size..)
            .unwrap_or_default()
    }
}
