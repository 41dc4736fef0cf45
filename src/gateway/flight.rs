//! One request under way.

use std::sync::Arc;

use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::task_tracker::TaskTrackerToken;
use uuid::Uuid;

use super::base::Held;
use super::facts::{Counts, Facts};
use super::{Gateway, GatewayError};
use crate::upstream::UpstreamError;

/// A request under way. Dropped before its answer is whole, it is aborted in the server.
pub(super) struct Flight {
    pub gateway: Arc<Gateway>,
    /// Its id in the server, and the id of its answer.
    pub rid: String,
    head: Option<Held>,
    /// The conversation that it is a turn of.
    conversation: Option<String>,
    sent: bool,
    ended: bool,
    _place: OwnedSemaphorePermit,
    _token: TaskTrackerToken,
}

// === impl Gateway ===

impl Gateway {
    /// A place for a request. `rid` is the client's id for it; without one it gets its own.
    ///
    /// # Errors
    /// `Stopping`, `TooMany`, `Invalid` and `DuplicateRid`.
    pub(super) fn takeoff(self: &Arc<Self>, rid: Option<String>) -> Result<Flight, GatewayError> {
        if self.closing.is_cancelled() {
            return Err(GatewayError::Stopping);
        }
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_| GatewayError::TooMany)?;
        let rid = match rid {
            Some(rid) if rid.is_empty() || rid.len() > 255 || rid.chars().any(char::is_control) => {
                let text = "`rid` is not a name of 1 to 255 bytes without control characters";
                return Err(GatewayError::Invalid(text.to_owned()));
            }
            Some(rid) => rid,
            None => Uuid::new_v4().simple().to_string(),
        };
        if !self.live.lock().insert(rid.clone()) {
            return Err(GatewayError::DuplicateRid(rid));
        }
        self.metrics.began();
        Ok(Flight {
            gateway: Arc::clone(self),
            rid,
            head: None,
            conversation: None,
            sent: false,
            ended: false,
            _place: place,
            _token: self.flights.token(),
        })
    }
}

// === impl Flight ===

impl Flight {
    /// It goes on from its conversation's head.
    pub fn hold(&mut self, head: Option<Held>) {
        self.head = head;
    }

    /// From now on the server may work for it.
    pub fn sent(&mut self, conversation: &str) {
        self.sent = true;
        self.conversation = Some(conversation.to_owned());
    }

    /// The answer is whole: the conversation's head is this turn, once it is recorded.
    pub fn answered(&mut self, facts: &Facts, counts: Counts, said: Option<Vec<Value>>) {
        self.gateway.metrics.answered(facts, counts);
        if let Some(said) = said {
            let service = &self.gateway.service;
            let tenant = self.gateway.tenant.as_deref();
            service.note_messages(tenant, &facts.conversation, &self.rid, said);
        }
        if let Some(head) = &mut self.head {
            **head = Some(self.rid.clone());
        }
        self.ended();
    }

    /// The server works for it no longer.
    pub fn ended(&mut self) {
        self.ended = true;
        self.head = None;
    }

    /// What the server says, or the end of a daemon that waits no longer.
    pub async fn ask<T>(
        &mut self,
        work: impl Future<Output = Result<T, UpstreamError>>,
    ) -> Result<T, GatewayError> {
        let said = self.or_cut(work).await;
        let refused = |error: &UpstreamError| {
            matches!(
                error,
                UpstreamError::Refused(_) | UpstreamError::Unreachable(_)
            )
        };
        if matches!(&said, Err(GatewayError::Upstream(error)) if refused(error)) {
            // It does nothing for this request, and tells of none.
            self.sent = false;
        }
        said
    }

    /// What comes, or the end of a daemon that waits no longer.
    pub async fn or_cut<T, E: Into<GatewayError>>(
        &self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, GatewayError> {
        tokio::select! {
            done = work => done.map_err(Into::into),
            () = self.gateway.cut.cancelled() => Err(GatewayError::Stopping),
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.gateway.live.lock().remove(&self.rid);
        self.gateway.metrics.ended();
        if self.sent && !self.ended {
            self.gateway.upstream.abort(self.rid.clone());
            if let Some(conversation) = &self.conversation {
                let tenant = self.gateway.tenant.as_deref();
                let service = &self.gateway.service;
                service.client_left(tenant, conversation, &self.rid);
            }
        }
    }
}
