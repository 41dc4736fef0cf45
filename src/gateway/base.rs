//! From where in a conversation a request goes on, and whose turn it is.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use super::{Gateway, GatewayError, Target};
use crate::service::{
    ErrorKind, NO_TURN, RestoreRequest, Selector, Service, ServiceError, TOO_LONG, TokenStream,
};
use crate::types::{Namespace, SnapshotId};

/// Heads that are remembered though nobody goes on there.
const HEADS_MAX: usize = 16_384;
/// How long an answered turn may take to be recorded.
const RECORD_WAIT: Duration = Duration::from_secs(10);
/// The same where a turn is named, perhaps another one.
const NAMED_WAIT: Duration = Duration::from_secs(1);
/// How long a snapshot stays in RAM for a request that is on its way to the server.
const PREFETCH_PIN: Duration = Duration::from_secs(30);

/// The rid of a conversation's last answered turn, which its worker may not have told of yet. Locked
/// by the request that goes on from there.
pub(super) type Head = Arc<tokio::sync::Mutex<Option<String>>>;
/// The head of each conversation.
pub(super) type Heads = Mutex<HashMap<String, Head>>;
/// The right to go on from a head.
pub(super) type Held = OwnedMutexGuard<Option<String>>;

/// What a request goes on from.
#[derive(Clone, Debug, Default)]
pub(super) struct Base {
    /// All tokens so far.
    pub tokens: Vec<u32>,
    /// The turn; 0 before the first, and at a branch's snapshot.
    pub turn: u32,
    /// How many of the tokens its snapshot holds.
    pub boundary: u32,
    /// All that was said, if it is known.
    pub messages: Option<Vec<Value>>,
    /// It is the conversation's latest turn, so what is said next may be noted.
    pub is_head: bool,
    /// Who may share with it.
    pub namespace: Arc<Namespace>,
}

// === impl Gateway ===

impl Gateway {
    /// Where the target says to go on, once it is this request's turn.
    ///
    /// # Errors
    /// `HeadTaken`, `TurnUnknown`, and those of the service: a turn that is not known, or whose tokens
    /// are not. A conversation that is not known is a new one.
    pub(super) async fn base(&self, target: &Target) -> Result<(Base, Option<Held>), GatewayError> {
        let head = self.head(&target.conversation);
        let named = target.turn.is_some() || target.branch.is_some();
        let mut held = if named {
            head.try_lock_owned().ok()
        } else {
            let wait = tokio::time::timeout(self.turn_wait, head.lock_owned()).await;
            Some(wait.map_err(|_| GatewayError::HeadTaken)?)
        };
        // Who names a turn may mean the one that was just answered, and goes on without it if not.
        let wait = if named { NAMED_WAIT } else { RECORD_WAIT };
        if let Some(head) = &mut held
            && let Some(rid) = head.as_deref()
        {
            let recorded = self.recorded(&target.conversation, rid, wait).await;
            // Whether it was or not: it is waited for once, as it may be gone for good.
            if !named || recorded.is_ok() {
                **head = None;
            }
            match recorded {
                Err(error) if !named => return Err(error),
                Err(_) => held = None,
                Ok(()) => {}
            }
        }
        let latest = self.of(&target.conversation);
        let select = Selector {
            turn_number: target.turn,
            branch_name: target.branch.clone(),
            ..latest.clone()
        };
        let stream = match self.service.token_stream(&select).await {
            Ok(stream) => stream,
            Err(error) if !named && is_new(&error) => {
                let base = Base {
                    is_head: true,
                    ..Base::default()
                };
                return Ok((base, held));
            }
            Err(ServiceError::TokensUnknown { why, .. }) if why == TOO_LONG => {
                let most = self.service.config().max_prompt_tokens;
                return Err(GatewayError::TooLong(most));
            }
            Err(error) => return Err(error.into()),
        };
        self.prefetch(stream.snapshot);
        let is_head = match (named, &held) {
            (false, _) => true,
            (true, None) => false,
            (true, Some(_)) => {
                let latest = self.service.token_stream(&latest).await;
                latest.is_ok_and(|latest| latest.turn == stream.turn && latest.turn > 0)
            }
        };
        // Who goes on from elsewhere keeps nobody from the head.
        let held = held.filter(|_| is_head);
        Ok((Base::of(stream, is_head), held))
    }

    /// What was answered there last is waited for no more: it was deleted.
    pub fn forget(&self, conversation: &str) {
        self.heads.lock().remove(conversation);
    }

    /// A conversation of the server's tenant.
    fn of(&self, conversation: &str) -> Selector {
        Selector {
            tenant: self.tenant.clone(),
            ..Selector::conversation(conversation)
        }
    }

    fn head(&self, conversation: &str) -> Head {
        let mut heads = self.heads.lock();
        if heads.len() >= HEADS_MAX {
            heads.retain(|_, head| Arc::strong_count(head) > 1);
        }
        Arc::clone(heads.entry(conversation.to_owned()).or_default())
    }

    /// Waits until the turn of an answered request is recorded.
    async fn recorded(
        &self,
        conversation: &str,
        rid: &str,
        wait: Duration,
    ) -> Result<(), GatewayError> {
        let select = Selector {
            rid: Some(rid.to_owned()),
            ..self.of(conversation)
        };
        let deadline = Instant::now() + wait;
        let mut pause = Duration::from_millis(1);
        loop {
            match self.service.token_stream(&select).await {
                Err(error) if !is_finished(&error, rid) => {
                    if Instant::now() >= deadline {
                        return Err(GatewayError::TurnUnknown(rid.to_owned()));
                    }
                }
                // Recorded; whether its tokens are known is seen when they are needed.
                _ => return Ok(()),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Begins to bring a snapshot into RAM. That it fails is no reason not to go on: the server's
    /// worker asks for it again.
    fn prefetch(&self, snapshot: Option<SnapshotId>) {
        let Some(snapshot) = snapshot else { return };
        let service: Arc<Service> = Arc::clone(&self.service);
        tokio::spawn(async move {
            let request = RestoreRequest {
                select: Selector::snapshot(snapshot),
                pin_for: Some(PREFETCH_PIN),
            };
            if let Err(error) = service.restore(request).await {
                tracing::debug!(%snapshot, %error, "Not prefetched");
            }
        });
    }
}

/// Whether the request became a turn, although its tokens cannot be told.
fn is_finished(error: &ServiceError, rid: &str) -> bool {
    match error {
        // Said of the request itself: no turn of it has finished.
        ServiceError::TokensUnknown { name, .. } => name != rid,
        error => !is_unknown(error),
    }
}

/// Nothing is known of the conversation, the request or the turn.
fn is_unknown(error: &ServiceError) -> bool {
    error.kind() == ErrorKind::NotFound
}

/// There is nothing to go on from: the conversation is not known, or has rules and no turn yet.
fn is_new(error: &ServiceError) -> bool {
    let no_turn = matches!(error, ServiceError::TokensUnknown { why, .. } if *why == NO_TURN);
    no_turn || is_unknown(error)
}

// === impl Base ===

impl Base {
    pub fn of(stream: TokenStream, is_head: bool) -> Base {
        Base {
            tokens: stream.tokens,
            turn: stream.turn,
            boundary: stream.boundary,
            messages: stream.messages,
            is_head,
            namespace: stream.namespace,
        }
    }
}
