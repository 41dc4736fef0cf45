//! What the daemon wants of workers by itself: states that are on the device, to be offered again.
//!
//! An order goes to all ranks of a server or to none, under one number, so that they can agree on
//! it; they act once all of them have it.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Service;
use super::conversations::ConversationKey;
use crate::proto::v1;
use crate::proto::v1::work::Work;
use crate::types::{InstanceId, SessionId};

/// Orders that may wait for one worker.
const MOST: usize = 16;

/// Orders of one worker, in order.
#[derive(Debug, Default)]
pub(super) struct Orders {
    waiting: Mutex<State>,
    bell: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<v1::Work>,
    /// The last number.
    last: u64,
}

// === impl Orders ===

impl Orders {
    /// The next one. Cancel safe.
    pub async fn next(&self) -> v1::Work {
        loop {
            if let Some(work) = self.waiting.lock().waiting.pop_front() {
                return work;
            }
            self.bell.notified().await;
        }
    }
}

// === impl Service ===

impl Service {
    /// Asks the server of a conversation's open request to offer its states again. `false`: there is
    /// none that can be asked.
    pub(super) fn ask_again(&self, key: &ConversationKey) -> bool {
        let owner: Option<SessionId> = {
            let core = self.core.lock();
            let conversation = core.conversations.get(key);
            conversation.and_then(|it| it.live.keys().map(|(session, _)| *session).next())
        };
        let worker = owner.and_then(|session| self.workers.get(session));
        worker.is_some_and(|worker| self.order(worker.instance, &key.name))
    }

    /// Asks all ranks of a server, or none.
    fn order(&self, instance: InstanceId, conversation: &str) -> bool {
        let Some(ranks) = self.workers.ranks(instance) else {
            return false;
        };
        // In one order of locks, as two may ask at a time.
        let mut ranks = ranks;
        ranks.sort_by_key(|worker| worker.shard.rank);
        let mut states: Vec<_> = ranks
            .iter()
            .map(|worker| worker.orders.waiting.lock())
            .collect();
        if states.iter().any(|state| state.waiting.len() >= MOST) {
            return false;
        }
        // A rank that attached later goes on with the numbers of the others.
        let number = states.iter().map(|state| state.last).max().unwrap_or(0) + 1;
        for state in &mut states {
            state.last = number;
            state.waiting.push_back(v1::Work {
                number,
                work: Some(Work::OfferAgain(v1::OfferAgain {
                    conversation: conversation.to_owned(),
                })),
            });
        }
        drop(states);
        for worker in &ranks {
            worker.orders.bell.notify_one();
        }
        true
    }
}
