//! A service without threads, and what a worker does with it.

use std::collections::HashMap;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytesize::ByteSize;
use prometheus_client::registry::Registry;
use tokio::sync::broadcast;

use super::super::bytes::{assert_rows, kv_bytes, state_bytes};
use super::super::describe::{Variant, attach_request};
use super::super::fake::STATE;
use super::dice::Dice;
use crate::index::{Hit, TreeKey};
use crate::pool::{Geometry, cut, fingerprint};
use crate::service::commit::{Block, Commit, CommitError, ShardBlocks};
use crate::service::conversations::{ConversationKey, Ending, Tail, print_of};
use crate::service::core::Model;
use crate::service::lease::{Lease, Leased, NoLease, Wanted};
use crate::service::promote::PromoteError;
use crate::service::room::Reservation;
use crate::service::scrub::Scrubber;
use crate::service::{Config, Event, Service};
use crate::store::fault::Faults;
use crate::store::{self, DiskConfig, Object, Segment};
use crate::types::{Namespace, ObjectId, SessionId, SnapshotId, TokenId, TokenRange};
use crate::util::clock::{Clock, ManualClock};

/// Rounds that a request by name gets before its client goes away.
const ROUNDS: usize = 60;

/// How large it is.
#[derive(Copy, Clone, Debug)]
pub struct Size {
    pub ram: ByteSize,
    pub disk: ByteSize,
    pub shards: u32,
    /// From how many snapshots on a start trusts the catalog.
    pub catalog_from: usize,
}

/// The daemon.
pub struct Daemon {
    pub service: Arc<Service>,
    pub faults: Faults,
    pub clock: Arc<ManualClock>,
    pub events: broadcast::Receiver<Event>,
    model: Arc<Model>,
    namespace: Arc<Namespace>,
    scrubber: Option<Scrubber>,
    requests: u64,
}

/// A request whose state is being saved.
pub struct Offer {
    pub conversation: ConversationKey,
    pub tokens: Vec<TokenId>,
    pub boundary: usize,
    owner: (SessionId, u64),
    rid: Arc<str>,
    base: u32,
    segments: Vec<Segment>,
    room: Reservation,
}

/// A restore under way.
pub struct Restore {
    pub snapshot: SnapshotId,
    hit: Hit,
    lease: Lease,
    there: HashMap<ObjectId, Object>,
    tokens: Vec<TokenId>,
}

// === impl Daemon ===

impl Daemon {
    /// Starts one in the folder, and reads what is there.
    pub fn start(folder: &Path, size: Size, clock: &Arc<ManualClock>) -> Self {
        let shared: Arc<dyn Clock> = Arc::clone(clock) as _;
        let faults = Faults::default();
        let disk = DiskConfig {
            bytes: size.disk,
            min_free: ByteSize::b(0),
            io_threads: 1,
            ..DiskConfig::at(folder.join("data"))
        };
        let store = store::Config {
            ram: size.ram,
            ram_headroom: None,
            disk: Some(disk),
        };
        let store = store.build_faulty(Arc::clone(&shared), faults.clone());
        let config = Config {
            // Nobody else is there who would make room meanwhile.
            room_wait: Duration::ZERO,
            preload: ByteSize::b(0),
            scrub_every: Duration::from_secs(3600),
            catalog_from: size.catalog_from,
            ..Config::default()
        };
        let mut registry = Registry::default();
        let service = Service::assemble(config, store.unwrap(), vec![], shared, &mut registry);
        let service = service.unwrap();
        let events = service.events();
        service.load();
        assert!(service.is_loaded(), "what a daemon left can be read");
        let request = attach_request(&Variant::default());
        let geometry = Geometry::try_from(&request).unwrap();
        let identity = request.model.as_ref().unwrap();
        let model = Arc::new(Model {
            fingerprint: fingerprint(identity, &geometry, size.shards).unwrap(),
            name: "a model".into(),
            geometry,
            shards: size.shards,
        });
        let scrubber = service.scrubber().ok();
        Self {
            service,
            faults,
            clock: Arc::clone(clock),
            events,
            model,
            namespace: Arc::default(),
            scrubber,
            requests: 0,
        }
    }

    pub fn key(&self) -> TreeKey {
        TreeKey {
            fingerprint: self.model.fingerprint,
            namespace: self.namespace.id(),
        }
    }

    // --- What its threads do

    pub fn disk_round(&self) {
        self.service.move_things();
    }

    pub fn read_one(&self) -> bool {
        self.service.promoter.step(&self.service)
    }

    pub fn scrub_one(&mut self) {
        if let Some(scrubber) = &mut self.scrubber {
            self.service.scrub_some(scrubber);
        }
    }

    /// Waits for an answer while the threads work; `None`: its client goes away before.
    pub fn drive<T>(&self, dice: &mut Dice, answer: impl Future<Output = T>) -> Option<T> {
        let mut answer = pin!(answer);
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..ROUNDS {
            if let Poll::Ready(done) = answer.as_mut().poll(&mut context) {
                return Some(done);
            }
            match dice.below(5) {
                0 => drop(self.read_one()),
                1 => self.clock.advance(Duration::from_millis(300)),
                _ => self.disk_round(),
            }
        }
        None
    }

    /// An orderly end.
    pub fn shut_down(self, dice: &mut Dice) {
        let service = Arc::clone(&self.service);
        let done = self.drive(dice, service.shutdown());
        if done.is_none() {
            // It took too long; the service manager kills it.
            return;
        }
        assert!(service.core.lock().queue.closed);
    }

    // --- What a worker does

    /// A request comes, and offers its state at `boundary`; `None`: it is stored, or there is no
    /// room.
    pub fn offer(&mut self, name: &str, tokens: &[TokenId], boundary: usize) -> Option<Offer> {
        self.requests += 1;
        let conversation = ConversationKey::new(None, name);
        let owner = (SessionId::from_bytes([9; 16]), self.requests);
        let rid: Arc<str> = format!("{name}-{}", self.requests).into();
        let now = self.clock.now();
        {
            let mut core = self.service.core.lock();
            core.conversations
                .open(&conversation, owner, (&rid, false), now);
        }
        let prefix = &tokens[..boundary];
        let base = self
            .service
            .coverage(&self.key(), prefix, &conversation, owner);
        let offered = base.and_then(|base| {
            let kv = TokenRange {
                start: base,
                end: boundary as u32,
            };
            let kv = cut(kv).map(|range| self.model.geometry.kv_bytes(range));
            let shard: Vec<u64> = std::iter::once(STATE).chain(kv).collect();
            let (segments, room) = self
                .service
                .allocate(&shard.repeat(self.model.shards as usize))?;
            Some((base, segments, room))
        });
        match offered {
            Some((base, segments, room)) => Some(Offer {
                conversation,
                tokens: tokens.to_vec(),
                boundary,
                owner,
                rid,
                base,
                segments,
                room,
            }),
            None => {
                self.finish(&conversation, owner, tokens);
                None
            }
        }
    }

    /// All of an offer is in.
    pub fn commit(&self, offer: Offer) -> Result<SnapshotId, CommitError> {
        let Offer {
            conversation,
            tokens,
            boundary,
            owner,
            rid,
            base,
            segments,
            room,
        } = offer;
        let prefix = &tokens[..boundary];
        let kv = TokenRange {
            start: base,
            end: boundary as u32,
        };
        let mut segments = segments.into_iter().map(Arc::new);
        let shards = (0..self.model.shards).map(|shard| {
            let seed = seed_of(shard);
            let mut next = |bytes: Vec<u8>| {
                let segment = segments.next().unwrap();
                segment.write(0, &bytes).unwrap();
                segment
            };
            let state = next(state_bytes(seed, prefix));
            let kv = cut(kv).map(|range| Block {
                range,
                segment: next(kv_bytes(seed, prefix, range)),
            });
            let kv = kv.collect();
            ShardBlocks { state, kv }
        });
        let shards = shards.collect();
        let committed = self.service.commit(Commit {
            model: &self.model,
            namespace: &self.namespace,
            key: self.key(),
            tokens: prefix,
            base,
            shards,
            rooms: vec![room],
            conversation: &conversation,
            owner,
            rid: &rid,
        });
        self.finish(&conversation, owner, &tokens);
        committed
    }

    /// The worker lets go of an offer.
    pub fn abort(&self, offer: Offer) {
        self.finish(&offer.conversation, offer.owner, &offer.tokens);
    }

    /// The request becomes a turn, and is over.
    fn finish(&self, key: &ConversationKey, owner: (SessionId, u64), tokens: &[TokenId]) {
        let now = self.clock.now();
        let mut core = self.service.core.lock();
        let hit = core.index.lookup(&self.key(), tokens, u32::MAX);
        if let Some(hit) = hit {
            core.conversations
                .saw(key, owner, hit.snapshot, hit.boundary, now);
        }
        let boundary = core.conversations.boundary(owner);
        let ending = Ending {
            total_tokens: tokens.len() as u32,
            prompt_tokens: None,
            finish: "stop",
            tail: Some(Tail::new(boundary, Arc::from(&tokens[boundary as usize..]))),
            print: Some(print_of(&self.key().namespace, tokens)),
            namespace: None,
        };
        core.conversations.finish(key, owner, ending, now);
        core.conversations.close(key, owner);
    }

    /// A prompt is looked up, and held.
    pub fn look_up(&self, tokens: &[TokenId]) -> Result<Restore, NoLease> {
        let key = self.key();
        let wanted = Wanted {
            key: &key,
            model: &self.model,
            tokens,
            max_boundary: tokens.len() as u32,
            device_kv: 0,
            ticket: None,
        };
        let Leased { hit, lease, there } = self.service.lease(&wanted, |_, _| true)?;
        Ok(Restore {
            snapshot: hit.snapshot,
            tokens: tokens[..hit.boundary as usize].to_vec(),
            hit,
            lease,
            there,
        })
    }

    /// Brings what is missing into RAM and compares every byte with what was saved.
    pub fn fill(&self, restore: &mut Restore) -> Result<(), PromoteError> {
        let kv = restore.hit.kv.iter().map(|part| part.object);
        for id in kv.chain([restore.hit.state]) {
            if let std::collections::hash_map::Entry::Vacant(slot) = restore.there.entry(id) {
                slot.insert(self.service.promote_now(&id)?);
            }
        }
        let tokens = &restore.tokens;
        for part in &restore.hit.kv {
            let object = &restore.there[&part.object];
            for (shard, segments) in (0..).zip(&object.shards) {
                for (segment, piece) in segments.iter().zip(&object.meta.pieces) {
                    // Tokens of a branch may follow in the object.
                    if let Some(used) = piece.range.overlap(part.range) {
                        let got = segment.to_vec();
                        assert_rows(seed_of(shard), tokens, piece.range, used, &got);
                    }
                }
            }
        }
        let state = &restore.there[&restore.hit.state];
        assert_eq!(state.shards.len(), self.model.shards as usize);
        for (shard, segments) in (0..).zip(&state.shards) {
            let right = state_bytes(seed_of(shard), tokens);
            assert!(
                segments[0].to_vec() == right,
                "foreign state of {}",
                restore.snapshot
            );
        }
        Ok(())
    }

    pub fn let_go(&self, restore: Restore) {
        let Restore { lease, there, .. } = restore;
        drop(there);
        self.service.release(lease);
    }
}

// === impl Restore ===

impl Restore {
    /// The objects that it holds.
    pub fn leased(&self) -> impl Iterator<Item = ObjectId> {
        self.lease.token.objects()
    }
}

/// Shards differ, though they are of one model.
fn seed_of(shard: u32) -> u8 {
    (100 * shard) as u8
}
