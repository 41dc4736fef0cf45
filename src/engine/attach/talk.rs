//! What the worker has to say to the daemon, in order, while the channel may be full.
//!
//! Order matters: a request's tokens come before the offers that need them. So everything waits in
//! one line, and what is at its front waits for room. A daemon that lets too much wait is given up.

use std::collections::{HashMap, VecDeque};

use crate::engine::request::RequestInfo;
use crate::proto::channel::layout::RequestFlags;
use crate::proto::channel::msg::{RequestClose, RequestOpen, Up};
use crate::proto::channel::{Broken, PushError, Writer};

/// Things that may wait.
const LIMIT: usize = 1 << 16;

/// Weight epoch of every request: this engine never changes its weights.
pub const EPOCH: u64 = 1;

/// The line to the daemon.
#[derive(Debug)]
pub struct Talk {
    tx: Writer<Up>,
    line: VecDeque<Say>,
    open: HashMap<u64, Open>,
}

/// A request that the daemon knows of, or will.
#[derive(Debug)]
struct Open {
    attempt: u32,
    tokens: Vec<u32>,
    /// Tokens that are in the channel.
    sent: usize,
}

#[derive(Debug)]
enum Say {
    Up(Up),
    /// Tokens of a request up to this many.
    Tokens(u64, usize),
    Close(u64),
}

/// Why nothing more can be said.
#[derive(Debug, thiserror::Error)]
pub enum TalkError {
    /// The daemon does not read.
    #[error("the daemon does not read")]
    NotRead,
    /// The daemon breaks the protocol.
    #[error(transparent)]
    Broken(#[from] Broken),
}

// === impl Talk ===

impl Talk {
    /// Nothing to say yet.
    pub fn new(tx: Writer<Up>) -> Self {
        Self {
            tx,
            line: VecDeque::new(),
            open: HashMap::new(),
        }
    }

    /// Tells the daemon of a request and its prompt, unless it was told.
    pub fn open(&mut self, request: &RequestInfo) {
        let RequestInfo {
            id,
            rid,
            session_id,
            namespace,
            prompt,
        } = request;
        if self.open.contains_key(&id.0) {
            return;
        }
        let open = Open {
            attempt: 1,
            tokens: Vec::new(),
            sent: 0,
        };
        self.open.insert(id.0, open);
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let flags = RequestFlags::NONE
            .with(RequestFlags::HAS_SESSION, session_id.is_some())
            .with(RequestFlags::HAS_EXTRA_KEY, namespace.extra_key.is_some())
            .with(RequestFlags::HAS_CACHE_SALT, namespace.cache_salt.is_some());
        self.say(RequestOpen {
            req: id.0,
            attempt: 1,
            flags,
            epoch: EPOCH,
            rid: rid.clone(),
            session_id: text(session_id),
            tenant: String::new(),
            extra_key: text(&namespace.extra_key),
            cache_salt: text(&namespace.cache_salt),
            adapter: [0; 32],
        });
        self.tokens(id.0, prompt);
    }

    /// Sends what is new of a request's tokens, given from its first one on.
    pub fn tokens(&mut self, req: u64, tokens: &[u32]) {
        let Some(open) = self.open.get_mut(&req) else {
            return;
        };
        if let Some(new) = tokens
            .get(open.tokens.len()..)
            .filter(|new| !new.is_empty())
        {
            open.tokens.extend_from_slice(new);
            self.line.push_back(Say::Tokens(req, tokens.len()));
        }
    }

    /// Tokens of a request that were said or wait to be.
    pub fn known(&self, req: u64) -> u32 {
        let tokens = self.open.get(&req).map_or(0, |open| open.tokens.len());
        u32::try_from(tokens).unwrap_or(u32::MAX)
    }

    /// The present attempt of a request.
    pub fn attempt(&self, req: u64) -> u32 {
        self.open.get(&req).map_or(1, |open| open.attempt)
    }

    /// Begins the next attempt of a request.
    pub fn next_attempt(&mut self, req: u64) -> u32 {
        if let Some(open) = self.open.get_mut(&req) {
            open.attempt += 1;
        }
        self.attempt(req)
    }

    /// Says something, now or when its turn comes.
    pub fn say(&mut self, message: impl Into<Up>) {
        self.line.push_back(Say::Up(message.into()));
    }

    /// Takes an offer back that is not said yet.
    pub fn unsay_offer(&mut self, save: u64) -> bool {
        let offer = |say: &Say| matches!(say, Say::Up(Up::Offer(offer)) if offer.save == save);
        let at = self.line.iter().position(offer);
        at.and_then(|at| self.line.remove(at)).is_some()
    }

    /// Nothing more comes of a request.
    pub fn close(&mut self, req: u64) {
        if self.open.contains_key(&req) {
            self.line.push_back(Say::Close(req));
        }
    }

    /// Says what waits, as far as there is room. Returns whether the daemon is to be woken.
    ///
    /// # Errors
    ///
    /// [`TalkError`]: the session is over.
    pub fn flush(&mut self) -> Result<bool, TalkError> {
        while let Some(say) = self.line.front() {
            let message = match say {
                Say::Tokens(req, upto) => {
                    let (req, upto) = (*req, *upto);
                    if !self.flush_tokens(req, upto)? {
                        break;
                    }
                    self.line.pop_front();
                    continue;
                }
                Say::Up(message) => message,
                Say::Close(req) => &RequestClose { req: *req }.into(),
            };
            match self.tx.push(message) {
                Ok(()) => {}
                Err(PushError::Full) => break,
                // Names are bounded and every other message is small: only a channel smaller than
                // any real one comes here. The daemon then knows less, and nothing wrong.
                Err(PushError::TooLarge(bytes)) => {
                    tracing::warn!(message = message.name(), bytes, "Too large for the channel");
                }
                Err(PushError::Broken(broken)) => return Err(broken.into()),
            }
            if let Some(Say::Close(req)) = self.line.pop_front() {
                self.open.remove(&req);
            }
        }
        if self.line.len() > LIMIT {
            return Err(TalkError::NotRead);
        }
        Ok(self.tx.take_written())
    }

    /// Whether all tokens up to `upto` are in the channel.
    fn flush_tokens(&mut self, req: u64, upto: usize) -> Result<bool, Broken> {
        let Some(open) = self.open.get_mut(&req) else {
            return Ok(true);
        };
        let Some(rest) = open.tokens.get(open.sent..upto) else {
            return Ok(true);
        };
        let offset = u32::try_from(open.sent).unwrap_or(u32::MAX);
        open.sent += self.tx.push_tokens(req, offset, rest)?;
        Ok(open.sent >= upto)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::shm::SharedMap;
    use crate::engine::cache::Namespace;
    use crate::engine::request::RequestId;
    use crate::proto::channel::msg::{Offer, RequestOpen};
    use crate::proto::channel::{Capacities, DaemonEnd, WorkerEnd};

    #[test]
    fn order_is_kept_over_a_full_channel_and_deltas_have_no_gap() {
        let capacities = Capacities {
            up: 4096,
            down: 4096,
        };
        let map = Arc::new(SharedMap::anonymous(capacities.bytes()).unwrap());
        let mut daemon = DaemonEnd::create(&map, capacities, [1; 16], [2; 16]).unwrap();
        let worker = WorkerEnd::open(&map).unwrap();
        let mut talk = Talk::new(worker.tx);
        let mut info = RequestInfo {
            id: RequestId(7),
            rid: "r".to_owned(),
            session_id: Some("s".to_owned()),
            namespace: Namespace {
                extra_key: Some("k".to_owned()),
                cache_salt: None,
            },
            prompt: (0..5000).collect(),
        };
        talk.open(&info);
        talk.open(&info);
        let offer = |save| Offer {
            save,
            req: 7,
            attempt: 1,
            boundary: 5000,
            epoch: EPOCH,
        };
        talk.say(offer(1));
        talk.say(offer(2));
        info.prompt.extend([1, 2, 3]);
        talk.tokens(7, &info.prompt);
        talk.close(7);
        assert!(talk.unsay_offer(1) && !talk.unsay_offer(1));
        let mut said = Vec::new();
        for _ in 0..100 {
            talk.flush().unwrap();
            while let Some(message) = daemon.rx.pop().unwrap() {
                said.push(message);
            }
        }
        let Some(Up::RequestOpen(RequestOpen { flags, .. })) = said.first() else {
            panic!("{said:?}");
        };
        assert!(flags.contains(RequestFlags::HAS_SESSION));
        assert!(!flags.contains(RequestFlags::HAS_CACHE_SALT));
        let mut tokens: Vec<u32> = Vec::new();
        let mut names = Vec::new();
        for message in &said {
            match message {
                Up::Tokens(delta) => {
                    assert_eq!(delta.offset as usize, tokens.len());
                    tokens.extend(&delta.ids);
                }
                other => names.push((other.name(), tokens.len())),
            }
        }
        assert_eq!(tokens, info.prompt);
        assert_eq!(
            names,
            [("RequestOpen", 0), ("Offer", 5000), ("RequestClose", 5003)]
        );
        talk.tokens(7, &[0; 6000]);
        assert!(!talk.flush().unwrap(), "a closed request says nothing");
    }

    #[test]
    fn a_daemon_that_does_not_read_is_given_up() {
        let capacities = Capacities {
            up: 4096,
            down: 4096,
        };
        let map = Arc::new(SharedMap::anonymous(capacities.bytes()).unwrap());
        let _daemon = DaemonEnd::create(&map, capacities, [1; 16], [2; 16]).unwrap();
        let mut talk = Talk::new(WorkerEnd::open(&map).unwrap().tx);
        for _ in 0..LIMIT {
            talk.say(RequestClose { req: 1 });
        }
        talk.flush().unwrap();
        for _ in 0..LIMIT {
            talk.say(RequestClose { req: 1 });
        }
        assert!(matches!(talk.flush(), Err(TalkError::NotRead)));
    }
}
