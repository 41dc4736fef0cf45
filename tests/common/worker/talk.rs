//! What a worker says and hears.

use std::os::fd::AsRawFd;

use super::*;

impl Worker {
    /// Says something.
    pub fn say(&mut self, message: impl Into<Up>) {
        self.end.tx.push(&message.into()).unwrap();
        self.ring_bell();
    }

    /// Wakes the daemon.
    pub fn ring_bell(&self) {
        self.bell.ring().unwrap();
    }

    /// A number that this worker has not used.
    pub fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The next message that `wanted` takes; others stay for later.
    pub fn hear<T>(&mut self, mut wanted: impl FnMut(&Down) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            while let Some(message) = self.end.rx.pop().unwrap() {
                self.inbox.push_back(message);
            }
            let mut found = self.inbox.iter().enumerate();
            let found = found.find_map(|(at, message)| Some((at, wanted(message)?)));
            if let Some((at, found)) = found {
                self.inbox.remove(at);
                return found;
            }
            let names: Vec<_> = self.inbox.iter().map(|it| it.name()).collect();
            assert!(
                Instant::now() < deadline,
                "nothing came; waiting: {names:?}"
            );
            assert_eq!(self.end.link.peer_closed(), None, "waiting: {names:?}");
            assert!(!self.hung_up(), "{GONE}, waiting: {names:?}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits until everything said was read.
    pub fn heard_all(&mut self) {
        let req = self.fresh();
        self.say(Lookup {
            req,
            attempt: 0,
            max_boundary: 1,
            device_boundary: 0,
            device_kv: 0,
        });
        self.hear(|message| match message {
            Down::LookupResult(result) if result.req == req => Some(()),
            _ => None,
        });
    }

    /// Whether the daemon's process has closed the connection, as a killed one does.
    fn hung_up(&self) -> bool {
        use nix::sys::socket::{MsgFlags, recv};

        let look = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        recv(self.connection.as_raw_fd(), &mut [0], look) == Ok(0)
    }

    /// Waits until the daemon ends the session.
    pub fn closed(&mut self) -> CloseReason {
        crate::common::wait_for("the end of the session", || self.end.link.peer_closed())
    }

    /// Opens a request of a conversation and sends its tokens.
    pub fn open(&mut self, conversation: &str, tokens: &[u32]) -> u64 {
        let names = Names {
            session_id: Some(conversation).filter(|name| !name.is_empty()),
            ..Names::default()
        };
        self.open_as(&names, tokens)
    }

    /// Opens a request with these names and sends its tokens.
    pub fn open_as(&mut self, names: &Names, tokens: &[u32]) -> u64 {
        let req = self.fresh();
        let text = |value: Option<&str>| value.unwrap_or_default().to_owned();
        let flags = RequestFlags::NONE
            .with(RequestFlags::HAS_SESSION, names.session_id.is_some())
            .with(RequestFlags::HAS_TENANT, names.tenant.is_some())
            .with(RequestFlags::HAS_EXTRA_KEY, names.extra_key.is_some())
            .with(RequestFlags::HAS_CACHE_SALT, names.cache_salt.is_some())
            .with(RequestFlags::HAS_ADAPTER, names.adapter.is_some());
        self.say(RequestOpen {
            req,
            attempt: 0,
            flags,
            epoch: self.epoch,
            rid: Uuid::new_v4().simple().to_string(),
            session_id: text(names.session_id),
            tenant: text(names.tenant),
            extra_key: text(names.extra_key),
            cache_salt: text(names.cache_salt),
            adapter: names.adapter.unwrap_or_default(),
        });
        let mut sent = 0;
        crate::common::wait_for("room in the channel", || {
            let written = self.end.tx.push_tokens(req, sent as u32, &tokens[sent..]);
            self.bell.ring().unwrap();
            sent += written.unwrap();
            (sent == tokens.len()).then_some(())
        });
        req
    }

    /// The request ends and is closed.
    pub fn finish(&mut self, req: u64, total: usize) {
        let total = total as u32;
        self.say(TurnFinished {
            req,
            attempt: 0,
            prompt_tokens: total,
            total_tokens: total,
            cached_tokens: 0,
            prefilled_tokens: total,
            finish: Finish::Stop,
        });
        self.say(RequestClose { req });
    }
}
