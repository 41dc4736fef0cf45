//! The engine's device memory: the pools, who owns what in them, and the cache.
//!
//! # Order
//!
//! Whoever needs memory takes it here; if nothing is free, the cache is evicted, KV leaf by leaf
//! and state by state. What is taken is *held* until it is released or inserted. A lock or a pin
//! keeps cached things from eviction.

use super::cache::{Cache, CacheCounts, CacheError, Match, Namespace, NodeId};
use super::ids::{PageId, SlotId};
use super::ledger::{Account, Ledger};
use super::model::ModelConfig;
use super::pools::{KvPool, Layout, PoolError, StatePool};

/// Capacity and layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Usable slots of the state pool.
    pub slots: u32,
    /// Usable pages of the KV pool.
    pub pages: u32,
    /// Tokens of a page, at least 1.
    pub page_size: usize,
    /// Layout of both pools.
    pub layout: Layout,
    /// Scrambles the order in which slots and pages are handed out.
    pub scramble: u64,
}

/// Pools, owners, cache.
#[derive(Debug)]
pub struct DeviceMemory {
    /// The state pool. Its bytes may be read and written freely for slots that one holds.
    pub state: StatePool,
    /// The KV pool. Its bytes may be read and written freely for pages that one holds.
    pub kv: KvPool,
    slots: Ledger<SlotId>,
    pages: Ledger<PageId>,
    cache: Cache,
    evicted: Evicted,
}

/// Evictions so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Evicted {
    /// States evicted.
    pub states: u64,
    /// KV pages evicted.
    pub pages: u64,
}

/// A node after an insert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The node that ends where the inserted tokens end.
    pub node: NodeId,
    /// The cache's pages of all these tokens.
    pub pages: Vec<PageId>,
}

// === impl DeviceMemory ===

impl DeviceMemory {
    /// Empty pools for a model.
    ///
    /// # Errors
    ///
    /// [`PoolError::TooLarge`].
    pub fn new(model: &ModelConfig, config: &DeviceConfig) -> Result<Self, PoolError> {
        let DeviceConfig {
            slots,
            pages,
            page_size,
            layout,
            scramble,
        } = *config;
        Ok(Self {
            state: StatePool::new(model.state_spec(), layout, slots)?,
            kv: KvPool::new(model.kv_spec(), layout, pages, page_size)?,
            slots: Ledger::new(slots, scramble),
            pages: Ledger::new(pages, scramble.rotate_left(32)),
            cache: Cache::new(page_size),
            evicted: Evicted::default(),
        })
    }

    /// The cache, to be looked at.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Where the slots are.
    pub fn slot_account(&self) -> Account {
        self.slots.account()
    }

    /// Where the pages are.
    pub fn page_account(&self) -> Account {
        self.pages.account()
    }

    /// Evictions so far.
    pub fn evicted(&self) -> Evicted {
        self.evicted
    }

    /// Pages that [`Self::take_pages`] could get now.
    pub fn available_pages(&self) -> usize {
        self.pages.account().free + self.cache.counts().evictable_pages
    }

    /// Slots that [`Self::take_slot`] could get now.
    pub fn available_slots(&self) -> usize {
        self.slots.account().free + self.cache.counts().evictable_slots
    }

    /// Takes `count` pages, evicting if needed; none at all if there are not so many.
    pub fn take_pages(&mut self, count: usize) -> Option<Vec<PageId>> {
        if count > self.available_pages() {
            return None;
        }
        while self.pages.account().free < count {
            let leaf = self.cache.evict_leaf()?;
            self.evicted.pages += leaf.pages.len() as u64;
            for page in leaf.pages {
                self.pages.take_from_cache(page);
                self.pages.release(page);
            }
            if let Some(slot) = leaf.slot {
                self.evicted.states += 1;
                self.slots.take_from_cache(slot);
                self.slots.release(slot);
            }
        }
        (0..count).map(|_| self.pages.take()).collect()
    }

    /// Takes a slot, evicting a state if needed. Its content is whatever was there.
    pub fn take_slot(&mut self) -> Option<SlotId> {
        if self.slots.account().free == 0 {
            let slot = self.cache.evict_state()?;
            self.evicted.states += 1;
            self.slots.take_from_cache(slot);
            self.slots.release(slot);
        }
        self.slots.take()
    }

    /// Takes a node's state out of the cache, unless it is pinned; the caller holds the slot then.
    pub fn take_state(&mut self, node: NodeId) -> Option<SlotId> {
        let slot = self.cache.take_state(node)?;
        self.slots.take_from_cache(slot);
        Some(slot)
    }

    /// Gives held pages back.
    pub fn release_pages(&mut self, pages: impl IntoIterator<Item = PageId>) {
        for page in pages {
            self.pages.release(page);
        }
    }

    /// Gives a held slot back.
    pub fn release_slot(&mut self, slot: SlotId) {
        self.slots.release(slot);
    }

    /// What is cached of `tokens`, see [`Cache::peek`].
    pub fn peek(&self, namespace: &Namespace, tokens: &[u32], limit: usize) -> Match {
        self.cache.peek(namespace, tokens, limit)
    }

    /// As [`Self::peek`], and counts as a use.
    pub fn match_prefix(&mut self, namespace: &Namespace, tokens: &[u32], limit: usize) -> Match {
        self.cache.match_prefix(namespace, tokens, limit)
    }

    /// Inserts the KV of `tokens`; `pages`, all held by the caller, hold tokens `[start, ..)`. All
    /// of them leave the caller: to the cache, or to the free ones where the tokens were cached
    /// already. The new node is not locked.
    ///
    /// # Errors
    ///
    /// As [`Cache::insert`]; then nothing has changed and the caller holds all pages still.
    pub fn insert(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        start: usize,
        pages: &[PageId],
    ) -> Result<Stored, CacheError> {
        let inserted = self.cache.insert(namespace, tokens, start, pages)?;
        let (duplicates, new) = pages.split_at(inserted.duplicates);
        self.release_pages(duplicates.iter().copied());
        for page in new {
            self.pages.give_to_cache(*page);
        }
        let pages = self
            .cache
            .pages_to(inserted.node)
            .expect("the node was just inserted");
        Ok(Stored {
            node: inserted.node,
            pages,
        })
    }

    /// Gives a node the state in a held slot. The slot leaves the caller: it is freed if the node
    /// has a state already (then the answer is `false`).
    pub fn set_state(&mut self, node: NodeId, slot: SlotId) -> bool {
        match self.cache.set_state(node, slot) {
            Ok(()) => {
                self.slots.give_to_cache(slot);
                true
            }
            Err(slot) => {
                self.slots.release(slot);
                false
            }
        }
    }

    /// Keeps the KV from the root to a node.
    pub fn lock(&mut self, node: NodeId) {
        self.cache.lock(node);
    }

    /// Undoes one [`Self::lock`].
    pub fn unlock(&mut self, node: NodeId) {
        self.cache.unlock(node);
    }

    /// Keeps the state of a locked node.
    pub fn pin_state(&mut self, node: NodeId) {
        self.cache.pin_state(node);
    }

    /// Undoes one [`Self::pin_state`].
    pub fn unpin_state(&mut self, node: NodeId) {
        self.cache.unpin_state(node);
    }

    /// Empties the cache.
    ///
    /// # Errors
    ///
    /// [`CacheError::Locked`] if anything is locked; then nothing has changed.
    pub fn flush(&mut self) -> Result<(), CacheError> {
        let flushed = self.cache.flush()?;
        for page in flushed.pages {
            self.pages.take_from_cache(page);
            self.pages.release(page);
        }
        for slot in flushed.slots {
            self.slots.take_from_cache(slot);
            self.slots.release(slot);
        }
        Ok(())
    }

    /// Checks all accounts; `slots` and `pages` are all that anyone holds.
    ///
    /// # Errors
    ///
    /// What does not fit, in words.
    pub fn sanity_check(&self, slots: &[SlotId], pages: &[PageId]) -> Result<(), String> {
        self.cache.sanity_check()?;
        let (cached_pages, cached_slots) = self.cache.holdings();
        let CacheCounts {
            pages: in_cache,
            slots: slots_in_cache,
            ..
        } = self.cache.counts();
        if (cached_pages.len(), cached_slots.len()) != (in_cache, slots_in_cache) {
            return Err("the cache's counts are not what it holds".to_owned());
        }
        self.pages
            .sanity_check(&cached_pages, pages)
            .map_err(|what| format!("pages: {what}"))?;
        self.slots
            .sanity_check(&cached_slots, slots)
            .map_err(|what| format!("slots: {what}"))
    }
}
