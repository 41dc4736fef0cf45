//! The daemon's end of a session, in the same thread: it saves and restores truly, and withholds
//! the answers that a test names.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::shm::SharedMap;
use crate::engine::attach::dial::{Linked, Over};
use crate::proto::channel::layout::{Miss, Piece, Status, Tier};
use crate::proto::channel::msg::{
    Down, Drain, Drained, Fill, Filled, Lookup, LookupResult, Offer, Saved, Up, Want,
};
use crate::proto::channel::{Capacities, DaemonEnd, WorkerEnd};
use crate::types::{BLOCK_TOKENS, TokenRange, TransferMode};

/// A stored snapshot.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub tokens: Vec<u32>,
    pub state: Vec<u8>,
    pub kv: Vec<(TokenRange, Vec<u8>)>,
}

/// What survives a session.
#[derive(Clone, Debug, Default)]
pub struct Store {
    pub snapshots: Vec<Snapshot>,
    /// Saves under way, by number.
    saves: HashMap<u64, (usize, Snapshot)>,
    leases: HashMap<u64, Snapshot>,
}

/// A daemon.
pub struct Fake {
    pub end: DaemonEnd,
    /// What this side reaches.
    window: SharedMap,
    pub store: Store,
    requests: HashMap<u64, Vec<u32>>,
    /// Everything heard.
    pub heard: Vec<Up>,
    /// Names of messages that are not said.
    pub mute: Vec<&'static str>,
    /// Messages that were not said.
    pub withheld: Vec<Down>,
    next_lease: u64,
}

impl Fake {
    /// A session of this number, and the worker's part of it.
    pub fn new(number: u8, ring_bytes: u64, mode: TransferMode, store: Store) -> (Self, Linked) {
        let capacities = Capacities {
            up: 64 << 10,
            down: 64 << 10,
        };
        let map = Arc::new(SharedMap::anonymous(capacities.bytes()).unwrap());
        let end = DaemonEnd::create(&map, capacities, [9; 16], [number; 16]).unwrap();
        let (shared, fd) = SharedMap::create("window", ring_bytes).unwrap();
        let own = || SharedMap::anonymous(ring_bytes).unwrap();
        let (ring, window) = match mode {
            TransferMode::Ipc => (shared, None),
            TransferMode::Engine => (own(), Some(shared)),
        };
        let fake = Self {
            end,
            window: SharedMap::open(fd, ring_bytes).unwrap(),
            store,
            requests: HashMap::new(),
            heard: Vec::new(),
            mute: Vec::new(),
            withheld: Vec::new(),
            next_lease: u64::from(number) << 32,
        };
        let linked = Linked {
            id: [number; 16],
            boot: [9; 16],
            end: WorkerEnd::open(&map).unwrap(),
            ring,
            window,
            bell: Box::new(|| ()),
            over: Over::new().0,
        };
        (fake, linked)
    }

    /// Hears and answers everything that is there.
    pub fn serve(&mut self) {
        self.end.link.beat();
        while let Some(message) = self.end.rx.pop().unwrap() {
            self.heard.push(message.clone());
            match message {
                Up::RequestOpen(open) => {
                    self.requests.insert(open.req, Vec::new());
                }
                Up::Tokens(tokens) => {
                    let known = self.requests.get_mut(&tokens.req).unwrap();
                    assert_eq!(known.len(), tokens.offset as usize, "no gap");
                    known.extend(tokens.ids);
                }
                Up::Offer(offer) => self.offer(&offer),
                Up::Drain(drain) => self.drain(&drain),
                Up::Lookup(lookup) => self.lookup(&lookup),
                Up::Fill(fill) => self.fill(&fill),
                Up::RequestClose(close) => {
                    self.requests.remove(&close.req).unwrap();
                }
                _ => {}
            }
        }
    }

    /// Says something, whatever is muted.
    pub fn say(&mut self, message: impl Into<Down>) {
        self.end.tx.push(&message.into()).unwrap();
    }

    /// Says what was withheld.
    pub fn unmute(&mut self) {
        self.mute.clear();
        for message in std::mem::take(&mut self.withheld) {
            self.say(message);
        }
    }

    /// How many messages of this name were heard.
    pub fn count(&self, name: &str) -> usize {
        self.heard
            .iter()
            .filter(|message| message.name() == name)
            .count()
    }

    fn answer(&mut self, message: impl Into<Down>) {
        let message = message.into();
        if self.mute.contains(&message.name()) {
            self.withheld.push(message);
        } else {
            self.say(message);
        }
    }

    fn offer(&mut self, offer: &Offer) {
        let Offer {
            save,
            req,
            boundary,
            ..
        } = *offer;
        let tokens = self.requests[&req][..boundary as usize].to_vec();
        let ends = (0..=boundary)
            .step_by(BLOCK_TOKENS as usize)
            .chain([boundary]);
        let mut ends: Vec<u32> = ends.collect();
        ends.dedup();
        let parts: Vec<u32> = ends.windows(2).flatten().copied().collect();
        let snapshot = Snapshot {
            tokens,
            state: Vec::new(),
            kv: parts
                .chunks(2)
                .map(|pair| {
                    (
                        TokenRange {
                            start: pair[0],
                            end: pair[1],
                        },
                        Vec::new(),
                    )
                })
                .collect(),
        };
        self.store
            .saves
            .insert(save, (1 + snapshot.kv.len(), snapshot));
        self.answer(Want {
            save,
            need_state: true,
            parts,
        });
    }

    fn drain(&mut self, drain: &Drain) {
        let Drain {
            save,
            piece,
            index,
            count,
            ring_offset,
            bytes,
        } = *drain;
        assert_eq!(count, 1, "the engine moves piece by piece");
        let mut copy = vec![0; bytes as usize];
        self.window.read(ring_offset, &mut copy).unwrap();
        let (missing, snapshot) = self.store.saves.get_mut(&save).unwrap();
        match piece {
            Piece::State => snapshot.state = copy,
            Piece::Kv => snapshot.kv[index as usize].1 = copy,
        }
        *missing -= 1;
        let whole = *missing == 0;
        self.answer(Drained {
            save,
            piece,
            index,
            count,
            status: Status::Ok,
        });
        if whole {
            let (_, snapshot) = self.store.saves.remove(&save).unwrap();
            self.store.snapshots.push(snapshot);
            self.answer(Saved {
                save,
                status: Status::Ok,
                snapshot: [1; 16],
            });
        }
    }

    fn lookup(&mut self, lookup: &Lookup) {
        let Lookup {
            req,
            attempt,
            max_boundary,
            device_boundary,
            device_kv,
        } = *lookup;
        let prompt = &self.requests[&req];
        let fits = |snapshot: &&Snapshot| {
            let boundary = snapshot.tokens.len() as u32;
            let useful = boundary > device_boundary && boundary <= max_boundary;
            useful && prompt.starts_with(&snapshot.tokens)
        };
        let found = self.store.snapshots.iter().filter(fits);
        let Some(snapshot) = found.max_by_key(|snapshot| snapshot.tokens.len()).cloned() else {
            let reason = Some(Miss::NothingStored);
            let miss = LookupResult {
                req,
                attempt,
                lease: 0,
                boundary: 0,
                kv_from: 0,
                tier: None,
                reason,
                bytes: 0,
                parts: Vec::new(),
            };
            return self.answer(miss);
        };
        self.next_lease += 1;
        let boundary = snapshot.tokens.len() as u32;
        let kv_from = device_kv.min(boundary);
        let mut leased = snapshot.clone();
        leased.kv.retain(|(range, _)| range.end > kv_from);
        let parts = leased
            .kv
            .iter()
            .flat_map(|(range, _)| [range.start, range.end])
            .collect();
        self.store.leases.insert(self.next_lease, leased);
        self.answer(LookupResult {
            req,
            attempt,
            lease: self.next_lease,
            boundary,
            kv_from,
            tier: Some(Tier::Ram),
            reason: None,
            bytes: 1,
            parts,
        });
    }

    fn fill(&mut self, fill: &Fill) {
        let Fill {
            lease,
            piece,
            index,
            count,
            ring_offset,
            bytes,
        } = *fill;
        assert_eq!(count, 1, "the engine moves piece by piece");
        let leased = &self.store.leases[&lease];
        let piece_bytes = match piece {
            Piece::State => &leased.state,
            Piece::Kv => &leased.kv[index as usize].1,
        };
        assert_eq!(piece_bytes.len() as u64, bytes);
        self.window.write(ring_offset, piece_bytes).unwrap();
        self.answer(Filled {
            lease,
            piece,
            index,
            count,
            status: Status::Ok,
        });
    }
}
