//! The tree against a naive model, and the cases that have a name.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::engine::ids::PoolId;

type Key = (u8, Vec<u32>);

/// Every whole-page prefix has one page, perhaps a state; no tree.
#[derive(Default)]
struct Naive {
    clock: u64,
    pages: BTreeMap<Key, (PageId, u64)>,
    states: BTreeMap<Key, (SlotId, u64)>,
    locks: Vec<(Key, NodeId)>,
    pins: Vec<(Key, NodeId)>,
    next_page: u32,
    next_slot: u32,
}

#[derive(Clone, Debug)]
enum Op {
    Insert {
        ns: u8,
        tokens: Vec<u32>,
        state: bool,
    },
    Match {
        ns: u8,
        tokens: Vec<u32>,
        limit: usize,
        keep: u8,
    },
    EvictState,
    EvictLeaf,
    Release {
        at: usize,
    },
    TakeState {
        ns: u8,
        tokens: Vec<u32>,
    },
    Flush,
}

fn namespace(ns: u8) -> Namespace {
    Namespace {
        extra_key: (ns > 0).then(|| ns.to_string()),
        cache_salt: None,
    }
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = || prop::collection::vec(0_u32..2, 0..14);
    prop_oneof![
        6 => (0_u8..2, tokens(), any::<bool>())
            .prop_map(|(ns, tokens, state)| Op::Insert { ns, tokens, state }),
        4 => (0_u8..2, tokens(), 0_usize..14, 0_u8..3)
            .prop_map(|(ns, tokens, limit, keep)| Op::Match { ns, tokens, limit, keep }),
        2 => Just(Op::EvictState),
        2 => Just(Op::EvictLeaf),
        2 => any::<usize>().prop_map(|at| Op::Release { at }),
        1 => (0_u8..2, tokens()).prop_map(|(ns, tokens)| Op::TakeState { ns, tokens }),
        1 => Just(Op::Flush),
    ]
}

impl Naive {
    fn touch(&mut self, key: &Key) {
        self.clock += 1;
        for ((ns, prefix), (_, used)) in &mut self.pages {
            if *ns == key.0 && key.1.starts_with(prefix) {
                *used = self.clock;
            }
        }
        if let Some((_, used)) = self.states.get_mut(key) {
            *used = self.clock;
        }
    }

    fn usable(&self, ns: u8, tokens: &[u32], limit: usize) -> Option<(Key, SlotId)> {
        self.states
            .iter()
            .filter(|((n, p), _)| *n == ns && p.len() <= limit && tokens.starts_with(p))
            .max_by_key(|((_, p), _)| p.len())
            .map(|(key, (slot, _))| (key.clone(), *slot))
    }

    fn kv_tokens(&self, ns: u8, tokens: &[u32]) -> usize {
        let cached = self
            .pages
            .keys()
            .filter(|(n, p)| *n == ns && tokens.starts_with(p));
        cached.map(|(_, p)| p.len()).max().unwrap_or(0)
    }

    fn is_leaf(&self, key: &Key) -> bool {
        !self
            .pages
            .keys()
            .any(|(n, p)| *n == key.0 && p.len() > key.1.len() && p.starts_with(&key.1))
    }

    fn apply(&mut self, cache: &mut Cache, size: usize, op: Op) {
        match op {
            Op::Insert { ns, tokens, state } => self.insert(cache, size, ns, &tokens, state),
            Op::Match {
                ns,
                tokens,
                limit,
                keep,
            } => {
                let found = cache.match_prefix(&namespace(ns), &tokens, limit);
                assert_eq!(found.kv_tokens, self.kv_tokens(ns, &tokens));
                let want = self.usable(ns, &tokens, limit);
                assert_eq!(found.slot, want.as_ref().map(|(_, slot)| *slot));
                assert_eq!(
                    found.boundary,
                    want.as_ref().map_or(0, |(key, _)| key.1.len())
                );
                let Some(((key, _), node)) = want.zip(found.node) else {
                    return;
                };
                self.touch(&key);
                if keep > 0 {
                    cache.lock(node);
                    self.locks.push((key.clone(), node));
                }
                if keep > 1 {
                    cache.pin_state(node);
                    self.pins.push((key, node));
                }
            }
            Op::EvictState => {
                let free = self
                    .states
                    .iter()
                    .filter(|(key, _)| self.pins.iter().all(|p| p.0 != **key));
                let oldest = free
                    .min_by_key(|(_, (_, used))| *used)
                    .map(|(key, _)| key.clone());
                let want = oldest
                    .and_then(|key| self.states.remove(&key))
                    .map(|(slot, _)| slot);
                assert_eq!(cache.evict_state(), want);
            }
            Op::EvictLeaf => self.evict_leaf(cache),
            Op::Release { at } => {
                if !self.pins.is_empty() {
                    let (_, node) = self.pins.swap_remove(at % self.pins.len());
                    cache.unpin_state(node);
                } else if !self.locks.is_empty() {
                    let (_, node) = self.locks.swap_remove(at % self.locks.len());
                    cache.unlock(node);
                }
            }
            Op::TakeState { ns, tokens } => {
                let found = cache.peek(&namespace(ns), &tokens, tokens.len());
                let Some(node) = found.node else { return };
                let key = (ns, tokens[..found.boundary].to_vec());
                let pinned = self.pins.iter().any(|pin| pin.0 == key);
                let want = if pinned {
                    None
                } else {
                    self.states.remove(&key).map(|s| s.0)
                };
                assert_eq!(cache.take_state(node), want);
            }
            Op::Flush => match cache.flush() {
                Ok(mut flushed) => {
                    assert!(self.locks.is_empty());
                    let mut pages: Vec<PageId> =
                        self.pages.values().map(|(page, _)| *page).collect();
                    let mut slots: Vec<SlotId> =
                        self.states.values().map(|(slot, _)| *slot).collect();
                    for ids in [&mut flushed.pages, &mut pages] {
                        ids.sort_unstable();
                    }
                    for ids in [&mut flushed.slots, &mut slots] {
                        ids.sort_unstable();
                    }
                    assert_eq!((flushed.pages, flushed.slots), (pages, slots));
                    self.pages.clear();
                    self.states.clear();
                }
                Err(error) => {
                    assert_eq!(error, CacheError::Locked);
                    assert!(!self.locks.is_empty());
                }
            },
        }
    }

    fn insert(&mut self, cache: &mut Cache, size: usize, ns: u8, tokens: &[u32], state: bool) {
        let tokens = &tokens[..tokens.len() / size * size];
        let cached = self.kv_tokens(ns, tokens);
        // Some inserts bring pages for what is cached too, as a request that recomputed it does.
        let start = if state { 0 } else { cached };
        let pages: Vec<PageId> = (start..tokens.len())
            .step_by(size)
            .map(|_| {
                self.next_page += 1;
                PageId::from_raw(self.next_page)
            })
            .collect();
        let result = cache.insert(&namespace(ns), tokens, start, &pages);
        if tokens.is_empty() {
            assert_eq!(result, Err(CacheError::NotWholePages { tokens: 0, start }));
            return;
        }
        let inserted = result.unwrap();
        assert_eq!(inserted.duplicates, (cached - start) / size);
        for (index, page) in pages.iter().enumerate().skip(inserted.duplicates) {
            let end = start + (index + 1) * size;
            self.pages.insert((ns, tokens[..end].to_vec()), (*page, 0));
        }
        let key = (ns, tokens.to_vec());
        self.touch(&key);
        let want: Vec<PageId> = (size..=tokens.len())
            .step_by(size)
            .map(|end| self.pages[&(ns, tokens[..end].to_vec())].0)
            .collect();
        assert_eq!(cache.pages_to(inserted.node), Some(want));
        if state {
            self.next_slot += 1;
            let slot = SlotId::from_raw(self.next_slot);
            let result = cache.set_state(inserted.node, slot);
            if self.states.contains_key(&key) {
                assert_eq!(result, Err(slot));
            } else {
                assert_eq!(result, Ok(()));
                self.states.insert(key.clone(), (slot, 0));
                self.touch(&key);
            }
        }
    }

    fn evict_leaf(&mut self, cache: &mut Cache) {
        let evicted = cache.evict_leaf();
        let candidates = self.pages.iter().filter(|(key, _)| {
            self.is_leaf(key) && self.locks.iter().all(|(locked, _)| locked != *key)
        });
        let want = candidates.min_by_key(|(key, (_, used))| (self.states.contains_key(key), *used));
        let Some(mut key) = want.map(|(key, _)| key.clone()) else {
            assert_eq!(evicted, None);
            return;
        };
        let evicted = evicted.unwrap();
        assert_eq!(evicted.slot, self.states.remove(&key).map(|(slot, _)| slot));
        assert!(!evicted.pages.is_empty());
        let size = key.1.len() - self.longest_proper_prefix(&key);
        for (index, page) in evicted.pages.iter().rev().enumerate() {
            assert!(self.is_leaf(&key), "only the end of a branch goes");
            assert!(
                self.locks.iter().all(|(locked, _)| *locked != key),
                "nothing locked goes"
            );
            assert!(
                index == 0 || !self.states.contains_key(&key),
                "no state goes unseen"
            );
            assert_eq!(self.pages.remove(&key).map(|(page, _)| page), Some(*page));
            let shorter = key.1.len() - size;
            key.1.truncate(shorter);
        }
    }

    fn longest_proper_prefix(&self, key: &Key) -> usize {
        let shorter = self
            .pages
            .keys()
            .filter(|(n, p)| *n == key.0 && p.len() < key.1.len() && key.1.starts_with(p));
        shorter.map(|(_, p)| p.len()).max().unwrap_or(0)
    }
}

proptest! {
    #[test]
    fn behaves_as_the_naive_model(size in 1_usize..4, ops in prop::collection::vec(op(), 1..80)) {
        let mut cache = Cache::new(size);
        let mut naive = Naive::default();
        for op in ops {
            naive.apply(&mut cache, size, op);
            prop_assert_eq!(cache.sanity_check(), Ok(()));
            prop_assert_eq!(cache.counts().pages, naive.pages.len());
            prop_assert_eq!(cache.counts().slots, naive.states.len());
        }
        // What is not locked can be had back to the last page.
        for (_, node) in naive.pins.drain(..) {
            cache.unpin_state(node);
        }
        for (_, node) in naive.locks.drain(..) {
            cache.unlock(node);
        }
        prop_assert_eq!(cache.counts().evictable_pages, naive.pages.len());
        while cache.evict_leaf().is_some() {}
        prop_assert_eq!(cache.counts(), CacheCounts::default());
        prop_assert!(cache.is_empty() && cache.nodes.is_empty());
    }
}

fn pages(from: u32, count: u32) -> Vec<PageId> {
    (from..from + count).map(PageId::from_raw).collect()
}

fn slot(raw: u32) -> SlotId {
    SlotId::from_raw(raw)
}

#[test]
fn an_evicted_state_leaves_a_tombstone() {
    let mut cache = Cache::new(2);
    let ns = Namespace::default();
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    let upper = cache
        .insert(&ns, &tokens[..4], 0, &pages(1, 2))
        .unwrap()
        .node;
    cache.set_state(upper, slot(1)).unwrap();
    let lower = cache.insert(&ns, &tokens, 4, &pages(3, 2)).unwrap().node;
    cache.set_state(lower, slot(2)).unwrap();
    cache.touch(upper);
    // The lower one is the older use: its state goes, its KV stays.
    assert_eq!(cache.evict_state(), Some(slot(2)));
    let found = cache.peek(&ns, &tokens, 8);
    assert_eq!(
        (found.boundary, found.slot, found.kv_tokens),
        (4, Some(slot(1)), 8)
    );
    // KV that no state can reach goes before KV that one can, though it was used later.
    cache.touch(lower);
    let other = cache.insert(&ns, &[9, 9], 0, &pages(9, 1)).unwrap().node;
    cache.set_state(other, slot(3)).unwrap();
    cache.touch(lower);
    assert_eq!(
        cache.evict_leaf(),
        Some(EvictedLeaf {
            pages: pages(3, 2),
            slot: None
        })
    );
    let leaf = cache.evict_leaf();
    assert_eq!(
        leaf,
        Some(EvictedLeaf {
            pages: pages(9, 1),
            slot: Some(slot(3))
        })
    );
    assert_eq!(
        cache.evict_leaf().map(|leaf| leaf.slot),
        Some(Some(slot(1)))
    );
    assert_eq!(cache.evict_leaf(), None);
}

#[test]
fn a_state_comes_back_to_a_tombstone() {
    let mut cache = Cache::new(1);
    let ns = Namespace::default();
    let node = cache.insert(&ns, &[1, 2, 3], 0, &pages(1, 3)).unwrap().node;
    cache.set_state(node, slot(1)).unwrap();
    assert_eq!(cache.evict_state(), Some(slot(1)));
    assert_eq!(cache.peek(&ns, &[1, 2, 3, 4], 3).boundary, 0);
    let again = cache.insert(&ns, &[1, 2, 3], 3, &[]).unwrap();
    assert_eq!(
        again,
        Inserted {
            node,
            duplicates: 0
        }
    );
    cache.set_state(node, slot(7)).unwrap();
    assert_eq!(cache.peek(&ns, &[1, 2, 3, 4], 3).slot, Some(slot(7)));
}

#[test]
fn locked_kv_and_pinned_states_stay() {
    let mut cache = Cache::new(1);
    let ns = Namespace::default();
    let node = cache.insert(&ns, &[1, 2, 3], 0, &pages(1, 3)).unwrap().node;
    cache.set_state(node, slot(1)).unwrap();
    cache.lock(node);
    cache.pin_state(node);
    // A branch inside the locked edge splits it; the lock covers both parts.
    cache.insert(&ns, &[1, 2, 9], 0, &pages(4, 3)).unwrap();
    assert_eq!(cache.evict_leaf().map(|leaf| leaf.pages), Some(pages(6, 1)));
    assert_eq!((cache.evict_leaf(), cache.evict_state()), (None, None));
    assert_eq!(cache.flush(), Err(CacheError::Locked));
    cache.unpin_state(node);
    assert_eq!(cache.evict_state(), Some(slot(1)));
    cache.unlock(node);
    assert_eq!(cache.counts().evictable_pages, 3);
    assert_eq!(cache.flush().map(|flushed| flushed.pages.len()), Ok(3));
}

#[test]
fn namespaces_share_nothing() {
    let mut cache = Cache::new(1);
    let salted = Namespace {
        extra_key: None,
        cache_salt: Some("a".to_owned()),
    };
    let keyed = Namespace {
        extra_key: Some("a".to_owned()),
        cache_salt: None,
    };
    let node = cache
        .insert(&salted, &[1, 2], 0, &pages(1, 2))
        .unwrap()
        .node;
    cache.set_state(node, slot(1)).unwrap();
    for other in [Namespace::default(), keyed] {
        assert_eq!(cache.peek(&other, &[1, 2], 2), Match::default());
    }
    assert_eq!(cache.peek(&salted, &[1, 2], 2).boundary, 2);
}

#[test]
fn bad_inserts_change_nothing() {
    let mut cache = Cache::new(2);
    let ns = Namespace::default();
    let partial = cache.insert(&ns, &[1, 2, 3], 0, &pages(1, 2));
    assert_eq!(
        partial,
        Err(CacheError::NotWholePages {
            tokens: 3,
            start: 0
        })
    );
    let count = cache.insert(&ns, &[1, 2, 3, 4], 0, &pages(1, 1));
    assert_eq!(
        count,
        Err(CacheError::PageCount {
            expected: 2,
            got: 1
        })
    );
    let gap = cache.insert(&ns, &[1, 2, 3, 4], 2, &pages(1, 1));
    assert_eq!(
        gap,
        Err(CacheError::Gap {
            cached: 0,
            start: 2
        })
    );
    assert!(cache.nodes.is_empty());
}
