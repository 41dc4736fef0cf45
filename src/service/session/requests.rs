//! Requests that a worker has open: their tokens, and what was found wrong with them.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::conversations::ConversationKey;
use super::super::cost::Mark;
use crate::proto::channel::layout::RequestFlags;
use crate::proto::channel::msg::RequestOpen;
use crate::types::{Namespace, NamespaceId, TokenId};

/// Longest name of a request, conversation or part of a namespace, in bytes.
const MAX_NAME: usize = 4096;

/// Bounds on what one worker may have open.
#[derive(Copy, Clone, Debug)]
pub struct Limits {
    /// Tokens of one request.
    pub request_tokens: u32,
    /// Tokens of all.
    pub session_tokens: u64,
    /// Requests.
    pub requests: usize,
}

/// Why a request is neither saved nor restored any more.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Poison {
    /// Tokens are missing, or came twice.
    Gap,
    /// More tokens than allowed.
    TooLong,
    /// A token id that is none.
    BadToken,
    /// A name that is too long.
    BadName,
}

/// One request.
#[derive(Debug)]
pub struct Request {
    /// Counts resubmissions and retractions.
    pub attempt: u32,
    /// Weight epoch at its start.
    pub epoch: u64,
    /// Its name at the server.
    pub rid: Arc<str>,
    /// The conversation that it belongs to.
    pub conversation: ConversationKey,
    /// That bears its rid, as no client named it.
    pub unnamed: bool,
    /// Who may share with it.
    pub namespace: Arc<Namespace>,
    /// Digest of that.
    pub namespace_id: NamespaceId,
    /// All tokens so far.
    pub tokens: Vec<TokenId>,
    /// It is neither saved nor restored, by its nature.
    pub not_saved: bool,
    /// Likewise, by a fault.
    pub poison: Option<Poison>,
    /// The last attempt whose lookup was answered.
    pub answered: Option<u32>,
    /// The last state of its prompt, where prefill goes on from.
    pub mark: Option<Mark>,
    /// Saves that are not over.
    pub saves: u32,
    /// Nothing but completions of its saves will come.
    pub closed: bool,
}

/// All open requests of one worker.
#[derive(Debug)]
pub struct Requests {
    limits: Limits,
    open: HashMap<u64, Request>,
    /// Tokens of all.
    tokens: u64,
}

// === impl Poison ===

impl Poison {
    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gap => "token_gap",
            Self::TooLong => "too_many_tokens",
            Self::BadToken => "bad_token",
            Self::BadName => "bad_name",
        }
    }
}

// === impl Request ===

impl Request {
    fn new(open: RequestOpen) -> Self {
        let RequestOpen {
            req: _,
            attempt,
            flags,
            epoch,
            rid,
            session_id,
            tenant,
            extra_key,
            cache_salt,
            adapter,
        } = open;
        let parts = [&rid, &session_id, &tenant, &extra_key, &cache_salt];
        let bad_name = parts.iter().any(|part| part.len() > MAX_NAME);
        let given = |flag, text: String| flags.contains(flag).then_some(text);
        let session = given(RequestFlags::HAS_SESSION, session_id).filter(|text| !text.is_empty());
        let namespace = Namespace {
            tenant: given(RequestFlags::HAS_TENANT, tenant),
            extra_key: given(RequestFlags::HAS_EXTRA_KEY, extra_key),
            cache_salt: given(RequestFlags::HAS_CACHE_SALT, cache_salt),
            adapter: flags.contains(RequestFlags::HAS_ADAPTER).then_some(adapter),
        };
        let tenant = namespace.tenant.as_deref();
        let conversation = ConversationKey::new(tenant, session.as_deref().unwrap_or(&rid));
        Self {
            attempt,
            epoch,
            rid: Arc::from(rid),
            conversation,
            unnamed: session.is_none(),
            namespace_id: namespace.id(),
            namespace: Arc::new(namespace),
            tokens: Vec::new(),
            not_saved: flags.contains(RequestFlags::NOT_SAVED),
            poison: bad_name.then_some(Poison::BadName),
            answered: None,
            mark: None,
            saves: 0,
            closed: false,
        }
    }

    /// Tokens known so far.
    pub fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("a request's tokens are bounded by a u32")
    }

    /// The first `count` tokens, if they are known.
    pub fn prefix(&self, count: u32) -> Option<&[TokenId]> {
        self.tokens.get(..count as usize)
    }
}

// === impl Requests ===

impl Requests {
    /// None yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            open: HashMap::new(),
            tokens: 0,
        }
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// The request of this number.
    pub fn get(&self, req: u64) -> Option<&Request> {
        self.open.get(&req)
    }

    /// The request of this number.
    pub fn get_mut(&mut self, req: u64) -> Option<&mut Request> {
        self.open.get_mut(&req)
    }

    /// All, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Request)> {
        self.open.iter().map(|(req, request)| (*req, request))
    }

    /// Opens one. `None`: there are too many. One of the same number must have been removed.
    pub fn open(&mut self, open: RequestOpen) -> Option<&Request> {
        if self.open.len() >= self.limits.requests {
            return None;
        }
        let req = open.req;
        let request = Request::new(open);
        Some(self.open.entry(req).insert_entry(request).into_mut())
    }

    /// Takes one out.
    pub fn remove(&mut self, req: u64) -> Option<Request> {
        let request = self.open.remove(&req)?;
        self.tokens -= u64::from(request.len());
        Some(request)
    }

    /// Adds tokens that start at `offset`. Returns what is wrong with them, once.
    pub fn add(&mut self, req: u64, offset: u32, ids: &[TokenId]) -> Option<Poison> {
        let request = self.open.get_mut(&req)?;
        if request.poison.is_some() || request.not_saved {
            return None;
        }
        let count = u32::try_from(ids.len()).ok();
        let end = count.and_then(|count| request.len().checked_add(count));
        let all = self.tokens.checked_add(ids.len() as u64);
        let poison = if offset != request.len() || request.closed {
            Poison::Gap
        } else if end.is_none_or(|end| end > self.limits.request_tokens)
            || all.is_none_or(|all| all > self.limits.session_tokens)
        {
            Poison::TooLong
        } else {
            request.tokens.extend_from_slice(ids);
            self.tokens += ids.len() as u64;
            return None;
        };
        self.poison(req, poison);
        Some(poison)
    }

    /// The same with wide ids.
    pub fn add_wide(&mut self, req: u64, offset: u32, ids: &[u64]) -> Option<Poison> {
        let narrow: Result<Vec<TokenId>, _> = ids.iter().map(|id| TokenId::try_from(*id)).collect();
        match narrow {
            Ok(ids) => self.add(req, offset, &ids),
            Err(_) => {
                let sound = self
                    .open
                    .get(&req)
                    .is_some_and(|request| request.poison.is_none());
                self.poison(req, Poison::BadToken);
                sound.then_some(Poison::BadToken)
            }
        }
    }

    /// The request is neither saved nor restored from here on; its tokens stay for the saves under
    /// way.
    fn poison(&mut self, req: u64, poison: Poison) {
        if let Some(request) = self.open.get_mut(&req) {
            request.poison.get_or_insert(poison);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        request_tokens: 10,
        session_tokens: 16,
        requests: 2,
    };

    fn request(req: u64) -> RequestOpen {
        RequestOpen {
            req,
            attempt: 0,
            flags: RequestFlags::NONE,
            epoch: 1,
            rid: format!("r{req}"),
            session_id: "ignored".into(),
            tenant: "ignored".into(),
            extra_key: String::new(),
            cache_salt: String::new(),
            adapter: [7; 32],
        }
    }

    #[test]
    fn tokens_come_in_order_or_poison() {
        let mut requests = Requests::new(LIMITS);
        requests.open(request(1)).unwrap();
        assert_eq!(requests.add(1, 0, &[1, 2, 3]), None);
        assert_eq!(requests.add(1, 3, &[4]), None);
        assert_eq!(requests.get(1).unwrap().prefix(4), Some(&[1, 2, 3, 4][..]));
        assert_eq!(requests.get(1).unwrap().prefix(5), None);
        assert_eq!(requests.add(1, 5, &[6]), Some(Poison::Gap));
        assert_eq!(requests.add(1, 4, &[5]), None);
        assert_eq!(requests.get(1).unwrap().len(), 4);
        assert_eq!(requests.get(1).unwrap().poison, Some(Poison::Gap));
        assert_eq!(requests.add(9, 0, &[1]), None);
    }

    #[test]
    fn bounds_hold_for_one_and_for_all() {
        let mut requests = Requests::new(LIMITS);
        requests.open(request(1)).unwrap();
        requests.open(request(2)).unwrap();
        assert!(requests.open(request(3)).is_none());
        assert_eq!(requests.add(1, 0, &[0; 11]), Some(Poison::TooLong));
        assert_eq!(requests.add(2, 0, &[0; 10]), None);
        requests.remove(1).unwrap();
        requests.open(request(3)).unwrap();
        assert_eq!(requests.add(3, 0, &[0; 7]), Some(Poison::TooLong));
        requests.remove(2).unwrap();
        requests.remove(3).unwrap();
        requests.open(request(4)).unwrap();
        assert_eq!(requests.add(4, 0, &[0; 10]), None);
    }

    #[test]
    fn wide_ids_must_fit() {
        let mut requests = Requests::new(LIMITS);
        requests.open(request(1)).unwrap();
        assert_eq!(requests.add_wide(1, 0, &[1, u64::from(u32::MAX)]), None);
        assert_eq!(requests.add_wide(1, 2, &[1 << 32]), Some(Poison::BadToken));
        assert_eq!(requests.add_wide(1, 2, &[1 << 32]), None);
    }

    #[test]
    fn absent_parts_are_not_looked_at_and_names_are_bounded() {
        let mut requests = Requests::new(LIMITS);
        let plain = requests.open(request(1)).unwrap();
        assert_eq!(*plain.namespace, Namespace::default());
        assert_eq!(&*plain.conversation.name, "r1");
        let flags = RequestFlags::HAS_SESSION
            .with(RequestFlags::HAS_TENANT, true)
            .with(RequestFlags::HAS_EXTRA_KEY, true);
        let long = "x".repeat(MAX_NAME + 1);
        let named = RequestOpen {
            flags,
            session_id: long,
            ..request(2)
        };
        let named = requests.open(named).unwrap();
        assert_eq!(named.poison, Some(Poison::BadName));
        assert_eq!(named.namespace.extra_key.as_deref(), Some(""));
        assert_eq!(named.conversation.tenant.as_deref(), Some("ignored"));
    }
}
