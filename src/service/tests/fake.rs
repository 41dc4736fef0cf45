//! A worker for tests.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub use super::bytes::{assert_rows, kv_bytes, pieces, prompt, ranges, state_bytes};
pub use super::describe::{Variant, attach_request, own_peer};
pub use super::world::{LONG, Settings, World, eventually};
use crate::device::Doorbell;
use crate::device::shm::SharedMap;
use crate::proto::channel::WorkerEnd;
use crate::proto::channel::layout::{self, Finish, Outcome, Piece, RequestFlags, Status};
use crate::proto::channel::msg::*;
use crate::proto::channel::run::places;
use crate::proto::handshake::self_test_byte;
use crate::types::{SessionId, SnapshotId, TokenId, TokenRange};

pub const RING: u64 = 4 << 20;
pub const STATE: u64 = 2 * 8 * 3 * 2 + 2 * 4 * 8 * 4;
pub const ROW: u64 = 2 * 2 * 32;

/// The worker.
pub struct Fake {
    pub end: WorkerEnd,
    pub ring: Arc<SharedMap>,
    pub session: SessionId,
    pub epoch: u64,
    bell: Doorbell,
    map: Arc<SharedMap>,
    records: u64,
    inbox: VecDeque<Down>,
    next: u64,
    at: u64,
    /// Tells apart the bytes of workers with other weights.
    seed: u8,
}

/// What became of an offer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SaveEnd {
    Declined(layout::DeclineReason),
    /// Parts that were wanted, and the snapshot.
    Saved(Vec<TokenRange>, SnapshotId),
    Failed(Status),
}

/// What a restore brought.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Got {
    pub boundary: u32,
    pub parts: Vec<TokenRange>,
    pub tier: layout::Tier,
    pub bytes: u64,
}

impl Fake {
    pub async fn attach(world: &World) -> Self {
        Self::attach_as(world, &Variant::default()).await
    }

    pub async fn attach_as(world: &World, variant: &Variant) -> Self {
        let attached = world
            .service
            .attach(attach_request(variant), &own_peer())
            .unwrap();
        let session = SessionId::from_bytes(attached.session.as_ref().try_into().unwrap());
        let (ring, fd) = SharedMap::create("ring", RING).unwrap();
        let pattern: Vec<u8> = (0..layout::HANDSHAKE_SELF_TEST_BYTES)
            .map(self_test_byte)
            .collect();
        ring.write(0, &pattern).unwrap();
        let service = Arc::clone(&world.service);
        let secret = attached.secret.clone();
        let bind = move || service.bind_ring(session, &secret, Some(fd), &own_peer());
        let fds = tokio::task::spawn_blocking(bind).await.unwrap().unwrap();
        let mut answer = vec![0; pattern.len()];
        ring.read(0, &mut answer).unwrap();
        assert!(answer.iter().zip(&pattern).all(|(a, b)| *a == !*b));
        let map = Arc::new(SharedMap::open(fds.channel, fds.channel_bytes).unwrap());
        Self {
            end: WorkerEnd::open(&map).unwrap(),
            ring: Arc::new(ring),
            session,
            epoch: 1,
            bell: Doorbell::from_fd(fds.doorbell),
            map,
            records: 0,
            inbox: VecDeque::new(),
            next: 1,
            at: 0,
            // Shards differ, though the weights of all ranks are of one model.
            seed: variant.weights + variant.rank.map_or(0, |(rank, _)| 100 * rank as u8),
        }
    }

    pub fn say(&mut self, message: impl Into<Up>) {
        self.end.tx.push(&message.into()).unwrap();
        self.records += 1;
        self.bell.ring().unwrap();
    }

    /// Writes a record of a kind that there is not, past all checks of the writing end.
    pub async fn break_record(&mut self) {
        self.heard_all().await;
        let at = self
            .map
            .load_u64(layout::header::UP_TAIL, Ordering::Acquire)
            .unwrap();
        let at = at
            + self
                .map
                .load_u64(layout::header::UP_OFFSET, Ordering::Relaxed)
                .unwrap();
        let head = 999_u64 << 32;
        self.map.store_u64(at + 8, head, Ordering::Relaxed).unwrap();
        self.map
            .store_u64(at, self.records + 1, Ordering::Release)
            .unwrap();
        self.bell.ring().unwrap();
    }

    pub fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The next message that `wanted` takes; others stay for later.
    pub async fn hear<T>(&mut self, mut wanted: impl FnMut(&Down) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            while let Some(message) = self.end.rx.pop().unwrap() {
                self.inbox.push_back(message);
            }
            let found = self.inbox.iter().enumerate();
            let found = found
                .filter_map(|(at, message)| Some((at, wanted(message)?)))
                .next();
            if let Some((at, found)) = found {
                self.inbox.remove(at);
                return found;
            }
            assert!(
                start.elapsed() < LONG,
                "nothing came; waiting: {:?}",
                self.inbox
            );
            assert_eq!(self.end.link.peer_closed(), None);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Opens a request of a conversation and sends its tokens.
    pub fn open(&mut self, conversation: &str, tokens: &[TokenId]) -> u64 {
        self.open_as(
            conversation,
            &format!("{conversation}-{}", self.next),
            tokens,
            |_| (),
        )
    }

    pub fn open_as(
        &mut self,
        conversation: &str,
        rid: &str,
        tokens: &[TokenId],
        change: impl FnOnce(&mut RequestOpen),
    ) -> u64 {
        let req = self.fresh();
        let named = !conversation.is_empty();
        let mut open = RequestOpen {
            req,
            attempt: 0,
            flags: RequestFlags::NONE.with(RequestFlags::HAS_SESSION, named),
            epoch: self.epoch,
            rid: rid.to_owned(),
            session_id: conversation.to_owned(),
            tenant: String::new(),
            extra_key: String::new(),
            cache_salt: String::new(),
            adapter: [0; 32],
        };
        change(&mut open);
        self.say(open);
        self.tokens(req, 0, tokens);
        req
    }

    pub fn tokens(&mut self, req: u64, offset: u32, tokens: &[TokenId]) {
        let written = self.end.tx.push_tokens(req, offset, tokens).unwrap();
        assert_eq!(written, tokens.len());
        self.records += u64::from(!tokens.is_empty());
        self.bell.ring().unwrap();
    }

    pub fn offer(&mut self, req: u64, boundary: usize) -> u64 {
        let save = self.fresh();
        let boundary = boundary as u32;
        self.say(Offer {
            save,
            req,
            attempt: 0,
            boundary,
            epoch: self.epoch,
        });
        save
    }

    /// The answer to an offer: wanted parts, or a decline.
    pub async fn answer(&mut self, save: u64) -> Result<Vec<TokenRange>, layout::DeclineReason> {
        self.hear(|message| match message {
            Down::Want(want) if want.save == save => {
                assert!(want.need_state);
                Some(Ok(ranges(&want.parts)))
            }
            Down::Decline(decline) if decline.save == save => Some(Err(decline.reason)),
            _ => None,
        })
        .await
    }

    /// Room in the ring for a piece.
    pub fn place(&mut self, bytes: u64) -> u64 {
        if self.at + bytes > RING {
            self.at = 0;
        }
        let at = self.at;
        self.at += bytes;
        at
    }

    /// Gathers one piece and waits until it is drained.
    pub async fn drain(&mut self, save: u64, piece: Piece, index: usize, bytes: &[u8]) -> Status {
        let ring_offset = self.place(bytes.len() as u64);
        self.ring.write(ring_offset, bytes).unwrap();
        let (index, bytes) = (index as u32, bytes.len() as u64);
        self.say(Drain {
            save,
            piece,
            index,
            count: 1,
            ring_offset,
            bytes,
        });
        self.hear(|message| match message {
            Down::Drained(it) if (it.save, it.piece, it.index) == (save, piece, index) => {
                Some(it.status)
            }
            _ => None,
        })
        .await
    }

    pub async fn drain_all(&mut self, save: u64, tokens: &[TokenId], parts: &[TokenRange]) {
        for (index, part) in parts.iter().enumerate() {
            let bytes = kv_bytes(self.seed, tokens, *part);
            assert_eq!(self.drain(save, Piece::Kv, index, &bytes).await, Status::Ok);
        }
        let bytes = state_bytes(self.seed, tokens);
        assert_eq!(self.drain(save, Piece::State, 0, &bytes).await, Status::Ok);
    }

    pub async fn saved(&mut self, save: u64) -> Result<SnapshotId, Status> {
        self.hear(|message| match message {
            Down::Saved(saved) if saved.save == save => Some(match saved.status {
                Status::Ok => Ok(SnapshotId::from_bytes(saved.snapshot)),
                status => Err(status),
            }),
            _ => None,
        })
        .await
    }

    /// Saves the state at `boundary` of an open request.
    pub async fn save_at(&mut self, req: u64, tokens: &[TokenId], boundary: usize) -> SaveEnd {
        let save = self.offer(req, boundary);
        match self.answer(save).await {
            Err(reason) => SaveEnd::Declined(reason),
            Ok(parts) => {
                self.drain_all(save, &tokens[..boundary], &parts).await;
                match self.saved(save).await {
                    Ok(id) => SaveEnd::Saved(parts, id),
                    Err(status) => SaveEnd::Failed(status),
                }
            }
        }
    }

    pub fn finish(&mut self, req: u64, total: usize) {
        self.say(TurnFinished {
            req,
            attempt: 0,
            prompt_tokens: total as u32,
            total_tokens: total as u32,
            cached_tokens: 0,
            prefilled_tokens: total as u32,
            finish: Finish::Stop,
        });
    }

    /// A whole turn: a request, its state at `boundary`, its end.
    pub async fn turn(
        &mut self,
        conversation: &str,
        tokens: &[TokenId],
        boundary: usize,
    ) -> SnapshotId {
        let req = self.open(conversation, tokens);
        let end = self.save_at(req, tokens, boundary).await;
        self.finish(req, tokens.len());
        self.say(RequestClose { req });
        match end {
            SaveEnd::Saved(_, id) => id,
            other => panic!("{other:?}"),
        }
    }

    /// Looks a prompt up.
    /// Asks, and does not wait for the answer.
    pub fn ask(&mut self, req: u64, max: usize, device: (u32, u32)) {
        let max_boundary = max as u32;
        let (device_boundary, device_kv) = device;
        self.say(Lookup {
            req,
            attempt: 0,
            max_boundary,
            device_boundary,
            device_kv,
        });
    }

    pub async fn lookup(&mut self, req: u64, max: usize, device: (u32, u32)) -> LookupResult {
        self.ask(req, max, device);
        self.hear(|message| match message {
            Down::LookupResult(result) if result.req == req => Some(result.clone()),
            _ => None,
        })
        .await
    }

    pub async fn fill(
        &mut self,
        lease: u64,
        piece: Piece,
        index: usize,
        bytes: u64,
    ) -> Result<Vec<u8>, Status> {
        let ring_offset = self.place(bytes);
        let index = index as u32;
        self.ring.fill(ring_offset, bytes, 0xee).unwrap();
        self.say(Fill {
            lease,
            piece,
            index,
            count: 1,
            ring_offset,
            bytes,
        });
        let status = self
            .hear(|message| match message {
                Down::Filled(it) if (it.lease, it.piece, it.index) == (lease, piece, index) => {
                    Some(it.status)
                }
                _ => None,
            })
            .await;
        if status != Status::Ok {
            return Err(status);
        }
        let mut out = vec![0; bytes as usize];
        self.ring.read(ring_offset, &mut out).unwrap();
        Ok(out)
    }

    /// Fills everything of a lease and compares each byte that belongs to the prompt.
    pub async fn fill_all(&mut self, hit: &LookupResult, tokens: &[TokenId]) -> Result<(), Status> {
        let parts = ranges(&hit.parts);
        let tokens = &tokens[..hit.boundary as usize];
        let mut next = hit.kv_from;
        for (index, part) in parts.iter().enumerate() {
            let bytes = u64::from(part.len()) * ROW;
            let got = self.fill(hit.lease, Piece::Kv, index, bytes).await?;
            // A piece counts up to where the next one begins.
            let end = parts.get(index + 1).map_or(hit.boundary, |next| next.start);
            let used = TokenRange {
                start: part.start.max(next),
                end: part.end.min(end),
            };
            assert_rows(self.seed, tokens, *part, used, &got);
            next = used.end;
        }
        assert_eq!(next, hit.boundary, "all KV must come: {parts:?}");
        let got = self.fill(hit.lease, Piece::State, 0, STATE).await?;
        assert!(got == state_bytes(self.seed, tokens), "foreign state");
        Ok(())
    }

    /// Where pieces of a run lie from the start of the ring on, and the bytes of all.
    fn run(parts: &[TokenRange], run: &Range<usize>) -> (Vec<u64>, u64) {
        let sizes = parts[run.clone()].iter();
        places(0, sizes.map(|part| u64::from(part.len()) * ROW)).unwrap()
    }

    /// Gathers a run of KV and waits until all of it is drained.
    pub async fn drain_run(
        &mut self,
        save: u64,
        tokens: &[TokenId],
        parts: &[TokenRange],
        run: Range<usize>,
    ) {
        let (starts, bytes) = Self::run(parts, &run);
        for (part, at) in parts[run.clone()].iter().zip(starts) {
            let kv = kv_bytes(self.seed, tokens, *part);
            self.ring.write(at, &kv).unwrap();
        }
        let (index, count) = (run.start as u32, run.len() as u32);
        self.say(Drain {
            save,
            piece: Piece::Kv,
            index,
            count,
            ring_offset: 0,
            bytes,
        });
        let mut left: Vec<u32> = (index..index + count).collect();
        while !left.is_empty() {
            let done = self
                .hear(|message| match message {
                    Down::Drained(it) if it.save == save => Some(it.clone()),
                    _ => None,
                })
                .await;
            assert_eq!((done.piece, done.status), (Piece::Kv, Status::Ok));
            for index in done.index..done.index + done.count {
                let at = left.iter().position(|left| *left == index);
                left.remove(at.expect("each piece is answered once"));
            }
        }
    }

    /// Fills a run of KV and compares each byte.
    pub async fn fill_run(
        &mut self,
        lease: u64,
        tokens: &[TokenId],
        parts: &[TokenRange],
        run: Range<usize>,
    ) {
        let (starts, bytes) = Self::run(parts, &run);
        self.ring.fill(0, bytes, 0xee).unwrap();
        let (index, count) = (run.start as u32, run.len() as u32);
        self.say(Fill {
            lease,
            piece: Piece::Kv,
            index,
            count,
            ring_offset: 0,
            bytes,
        });
        let mut left: Vec<u32> = (index..index + count).collect();
        while !left.is_empty() {
            let done = self
                .hear(|message| match message {
                    Down::Filled(it) if it.lease == lease => Some(it.clone()),
                    _ => None,
                })
                .await;
            assert_eq!((done.piece, done.status), (Piece::Kv, Status::Ok));
            for index in done.index..done.index + done.count {
                let at = left.iter().position(|left| *left == index);
                left.remove(at.expect("each piece is answered once"));
            }
        }
        for (part, at) in parts[run].iter().zip(starts) {
            let mut got = vec![0; part.len() as usize * ROW as usize];
            self.ring.read(at, &mut got).unwrap();
            assert!(got == kv_bytes(self.seed, tokens, *part), "foreign KV");
        }
    }

    pub fn give_back(&mut self, lease: u64) {
        self.say(Release {
            lease,
            outcome: Outcome::Aborted,
            reused: 0,
        });
    }

    /// Restores the longest prefix of `tokens`, checks every byte, and lets go. `None`: a miss.
    pub async fn restore(&mut self, tokens: &[TokenId]) -> Option<Got> {
        let req = self.open("", tokens);
        let hit = self.lookup(req, tokens.len(), (0, 0)).await;
        if hit.lease == 0 {
            self.say(RequestClose { req });
            return None;
        }
        self.fill_all(&hit, tokens).await.unwrap();
        let (lease, reused) = (hit.lease, hit.boundary);
        self.say(Release {
            lease,
            outcome: Outcome::Used,
            reused,
        });
        self.say(RequestClose { req });
        let (boundary, bytes, tier) = (hit.boundary, hit.bytes, hit.tier.unwrap());
        Some(Got {
            boundary,
            parts: ranges(&hit.parts),
            tier,
            bytes,
        })
    }

    /// Waits until everything said was read.
    pub async fn heard_all(&mut self) {
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
        })
        .await;
    }

    pub async fn closed(&mut self) -> layout::CloseReason {
        let start = Instant::now();
        loop {
            if let Some(reason) = self.end.link.peer_closed() {
                return reason;
            }
            assert!(start.elapsed() < LONG, "the session does not end");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
