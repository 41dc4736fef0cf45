//! What a worker says of its requests: their begin, tokens, turns and end, and the weights' epochs.

use std::sync::Arc;

use super::requests::Poison;
use super::{Ended, Session};
use crate::index::TreeKey;
use crate::proto::channel::layout::{DeclineReason, RevokeReason, Status};
use crate::proto::channel::msg::{Epoch, RequestOpen, Tokens, TokensWide, TurnFinished};
use crate::service::api;
use crate::service::conversations::{Chain, Ending, Tail, digest_of, print_of};
use crate::types::Namespace;

impl Session {
    pub(super) async fn request_open(&mut self, open: RequestOpen) -> Ended {
        let req = open.req;
        if self.requests.get(req).is_some() {
            // The worker begins it anew: what was under way belongs to other tokens.
            let (status, reason) = (Status::Cancelled, DeclineReason::Superseded);
            self.drop_saves(Some(req), status, reason).await?;
            self.forget_request(req);
        }
        let now = self.service.clock.now();
        let owner = (self.worker.session, req);
        match self.requests.open(open) {
            Some(request) => {
                if let Some(poison) = request.poison {
                    self.service.metrics.error(poison.as_str());
                }
                if self.worker.shard.rank != 0 {
                    // One rank speaks of it: what is not opened as a turn does not become one.
                    return Ok(());
                }
                let mut core = self.service.core.lock();
                let name = (&request.rid, request.unnamed);
                core.conversations
                    .open(&request.conversation, owner, name, now);
            }
            None => self.service.metrics.error("too_many_requests"),
        }
        Ok(())
    }

    pub(super) fn tokens(&mut self, tokens: Tokens) {
        let Tokens { req, offset, ids } = tokens;
        let poison = self.requests.add(req, offset, &ids);
        self.poisoned(req, poison);
    }

    pub(super) fn tokens_wide(&mut self, tokens: TokensWide) {
        let TokensWide { req, offset, ids } = tokens;
        let poison = self.requests.add_wide(req, offset, &ids);
        self.poisoned(req, poison);
    }

    fn poisoned(&self, req: u64, poison: Option<Poison>) {
        if let Some(poison) = poison {
            self.service.metrics.error(poison.as_str());
            let reason = poison.as_str();
            tracing::warn!(
                req,
                reason,
                "A request is not saved: its tokens are not known"
            );
        }
    }

    /// The request ended: it becomes a turn of its conversation.
    pub(super) fn turn_finished(&mut self, turn: &TurnFinished) {
        let Some(request) = self.requests.get_mut(turn.req) else {
            return;
        };
        if turn.attempt < request.attempt {
            return;
        }
        request.attempt = turn.attempt;
        let known = turn.total_tokens == request.len() && request.poison.is_none();
        let known = known && !request.not_saved;
        let (namespace, unnamed) = (request.namespace_id, request.unnamed);
        let Some(request) = self.requests.get(turn.req) else {
            return;
        };
        let now = self.service.clock.now();
        let owner = (self.worker.session, turn.req);
        let spoken = known && self.leads();
        let chain = (spoken && unnamed).then(|| Chain::of(&namespace, &request.tokens));
        let mut core = self.service.core.lock();
        if let Some(model) = self.model.as_ref().filter(|_| known) {
            let key = TreeKey {
                fingerprint: model.fingerprint,
                namespace,
            };
            if let Some(hit) = core.index.lookup(&key, &request.tokens, turn.total_tokens) {
                let (conversation, boundary) = (&request.conversation, hit.boundary);
                core.conversations
                    .saw(conversation, owner, hit.snapshot, boundary, now);
            }
        }
        let boundary = core.conversations.boundary(owner);
        let prompt = turn.prompt_tokens.min(turn.total_tokens);
        let ancestor = chain.and_then(|chain| core.conversations.ancestor(&chain, prompt));
        drop(core);
        // What is long is copied and hashed without the lock.
        let ancestor = ancestor.filter(|known| {
            let prefix = request.prefix(known.tokens);
            prefix.is_some_and(|prefix| digest_of(prefix) == known.print.digest)
        });
        let answer = request.tokens.get(prompt as usize..).unwrap_or_default();
        let calls_tool = spoken && self.service.config.saving.calls_tool(answer);
        let tail = request.tokens.get(boundary as usize..);
        let ending = Ending {
            total_tokens: turn.total_tokens,
            prompt_tokens: Some(turn.prompt_tokens),
            finish: turn.finish.as_str(),
            tail: tail
                .filter(|_| spoken)
                .map(|tail| Tail::new(boundary, Arc::from(tail))),
            print: spoken.then(|| print_of(&namespace, &request.tokens)),
            namespace: (*request.namespace != Namespace::default())
                .then(|| Arc::clone(&request.namespace)),
        };
        let mut core = self.service.core.lock();
        if let Some(known) = &ancestor {
            core.go_on(owner, known);
        }
        let conversation = core.conversations.home(owner, &request.conversation);
        let number = core.conversations.finish(&conversation, owner, ending, now);
        if calls_tool {
            core.conversations.calls_tool(owner);
        }
        let snapshot = number.and_then(|number| {
            let conversation = core.conversations.get(&conversation)?;
            conversation.turn(number)?.snapshot
        });
        if let Some(id) = snapshot {
            self.service.keep(&mut core, &conversation, owner, id);
        }
        drop(core);
        if !self.leads() {
            return;
        }
        let metrics = &self.service.metrics;
        metrics.turns.inc();
        metrics.prompt_tokens.inc_by(turn.prompt_tokens.into());
        metrics.cached_tokens.inc_by(turn.cached_tokens.into());
        metrics
            .prefilled_tokens
            .inc_by(turn.prefilled_tokens.into());
        if let Some(turn_number) = number {
            self.service.announce(api::Event::Turn {
                conversation_id: conversation.name.to_string(),
                turn_number,
                snapshot_id: snapshot,
            });
        }
        self.service.changed.notify_waiters();
        self.service.wake.notify_one();
    }

    /// Nothing more comes for the request but completions of its saves.
    pub(super) fn request_close(&mut self, req: u64) {
        if let Some(request) = self.requests.get_mut(req) {
            request.closed = true;
            if request.saves == 0 {
                self.forget_request(req);
            }
        }
    }

    pub(super) fn forget_request(&mut self, req: u64) {
        if let Some(request) = self.requests.remove(req) {
            let owner = (self.worker.session, req);
            self.service
                .core
                .lock()
                .conversations
                .close(&request.conversation, owner);
            self.service.changed.notify_waiters();
        }
    }

    pub(super) fn close_all_requests(&mut self) {
        let all: Vec<u64> = self.requests.iter().map(|(req, _)| req).collect();
        for req in all {
            self.forget_request(req);
        }
    }

    /// The weights changed: nothing of the old ones is saved or restored any more.
    pub(super) async fn new_epoch(&mut self, message: &Epoch) -> Ended {
        let Epoch {
            epoch,
            weights_digest,
        } = *message;
        self.epoch = epoch;
        let known = weights_digest != [0; 32];
        self.model = self
            .worker
            .set_epoch(epoch, known.then_some(weights_digest));
        let (status, reason) = (Status::StaleEpoch, DeclineReason::StaleEpoch);
        self.drop_saves(None, status, reason).await?;
        self.revoke_all(RevokeReason::StaleEpoch).await
    }
}
