//! The engine's own radix cache of what is on its device.
//!
//! # What
//!
//! One token-prefix tree a [`Namespace`]. An edge holds whole pages of tokens and the KV pages they
//! are in; a node may hold a slot with the recurrent state at its end. Pure bookkeeping: it knows
//! ids, never bytes, and gives every id back that it was given.
//!
//! # State
//!
//! A node without a state is a *tombstone*: its KV is there, but nothing can start from it alone.
//! Two LRU orders exist. States are evicted one by one, oldest use first, and leave a tombstone. KV
//! is evicted by leaves, leaves that no state can reach first, then by oldest use; a leaf's state
//! goes with it.
//!
//! # Locks
//!
//! [`Cache::lock`] keeps the KV from the root to a node; [`Cache::pin_state`] keeps one state. Both
//! count. A split leaves both on the lower node and copies the KV locks to the upper one.
//!
//! # Errors
//!
//! A bad insert changes nothing and says why ([`CacheError`]).

mod check;
mod evict;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::{BTreeSet, HashMap};

use slotmap::SlotMap;

use crate::engine::ids::{PageId, SlotId};

slotmap::new_key_type! {
    /// A node of the cache.
    pub struct NodeId;
}

/// Requests of different namespaces never share anything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// The request's `extra_key`.
    pub extra_key: Option<String>,
    /// The request's `cache_salt`.
    pub cache_salt: Option<String>,
}

/// The cache.
#[derive(Debug)]
pub struct Cache {
    page_size: usize,
    nodes: SlotMap<NodeId, Node>,
    roots: HashMap<Namespace, NodeId>,
    clock: u64,
    /// Unpinned states, oldest use first.
    states: BTreeSet<(u64, NodeId)>,
    /// Unlocked leaves, those without a state first, then oldest use first.
    leaves: BTreeSet<(bool, u64, NodeId)>,
    counts: CacheCounts,
}

/// What the cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Pages held.
    pub pages: usize,
    /// Pages that eviction can give back now.
    pub evictable_pages: usize,
    /// Slots held.
    pub slots: usize,
    /// Slots that eviction can give back now.
    pub evictable_slots: usize,
}

/// What is cached of a token sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// The deepest usable state's boundary in tokens; 0 if there is none.
    pub boundary: usize,
    /// The node with that state.
    pub node: Option<NodeId>,
    /// Its slot.
    pub slot: Option<SlotId>,
    /// Tokens whose KV is present, a multiple of the page size, at least `boundary`.
    pub kv_tokens: usize,
    /// The node on whose path (perhaps inside its edge) that KV ends.
    pub kv_node: Option<NodeId>,
}

/// What an insert did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// The node that ends where the inserted tokens end.
    pub node: NodeId,
    /// How many of the given pages, from the front, were cached already: the caller keeps them.
    pub duplicates: usize,
}

/// What the eviction of a leaf gives back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictedLeaf {
    /// The leaf's pages.
    pub pages: Vec<PageId>,
    /// The leaf's state.
    pub slot: Option<SlotId>,
}

/// Everything that a flush gives back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// All cached pages.
    pub pages: Vec<PageId>,
    /// All cached slots.
    pub slots: Vec<SlotId>,
}

/// What the cache refuses.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CacheError {
    /// Tokens or the start of the pages are not a multiple of the page size, or there are none.
    #[error("{tokens} tokens from {start} on are not whole pages")]
    NotWholePages {
        /// Tokens inserted.
        tokens: usize,
        /// Position of the first page given.
        start: usize,
    },
    /// The number of pages does not fit the tokens.
    #[error("{got} pages given, {expected} expected")]
    PageCount {
        /// Pages needed.
        expected: usize,
        /// Pages given.
        got: usize,
    },
    /// The tokens before the first page given are not cached.
    #[error("the cache holds {cached} tokens, the pages start at {start}")]
    Gap {
        /// Tokens cached.
        cached: usize,
        /// Position of the first page given.
        start: usize,
    },
    /// A flush while something is locked.
    #[error("part of the cache is locked")]
    Locked,
}

#[derive(Debug, Default)]
struct Node {
    parent: Option<NodeId>,
    /// By the first page of the child's tokens.
    children: HashMap<Box<[u32]>, NodeId>,
    /// The edge from the parent: whole pages of tokens, and the pages.
    tokens: Vec<u32>,
    pages: Vec<PageId>,
    /// Tokens from the root to here.
    end: usize,
    state: Option<SlotId>,
    /// Locks of this node and of all below it.
    locks: u32,
    /// Pins of the state.
    pins: u32,
    /// Last use of the KV.
    used: u64,
    /// Last use of the state.
    state_used: u64,
}

// === impl Cache ===

impl Cache {
    /// An empty cache of pages of `page_size` (at least 1) tokens.
    pub fn new(page_size: usize) -> Self {
        Self {
            page_size,
            nodes: SlotMap::with_key(),
            roots: HashMap::new(),
            clock: 0,
            states: BTreeSet::new(),
            leaves: BTreeSet::new(),
            counts: CacheCounts::default(),
        }
    }

    /// What it holds.
    pub fn counts(&self) -> CacheCounts {
        self.counts
    }

    /// Number of nodes, roots not counted.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.roots.len()
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The state at a node, if the node exists and has one.
    pub fn state_of(&self, node: NodeId) -> Option<SlotId> {
        self.nodes.get(node)?.state
    }

    /// Tokens from the root to a node; `None` if it is gone.
    pub fn end_of(&self, node: NodeId) -> Option<usize> {
        self.nodes.get(node).map(|node| node.end)
    }

    /// All pages from the root to a node, in token order; `None` if it is gone.
    pub fn pages_to(&self, node: NodeId) -> Option<Vec<PageId>> {
        let end = self.nodes.get(node)?.end;
        let mut pages = Vec::with_capacity(end / self.page_size);
        let mut at = Some(node);
        while let Some(node) = at.and_then(|id| self.nodes.get(id)) {
            pages.extend(node.pages.iter().rev());
            at = node.parent;
        }
        pages.reverse();
        Some(pages)
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes
            .get(id)
            .expect("ids inside the cache are of live nodes")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes
            .get_mut(id)
            .expect("ids inside the cache are of live nodes")
    }
}
