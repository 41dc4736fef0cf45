//! Trees of nodes: the shape, without tokens, KV or snapshots.
//!
//! An edge is held by the node at its lower end. An only child is found by its parent; others by
//! their first token, in one table for all nodes, so a node with 20,000 children costs no more than
//! 20,000 nodes.

use hashbrown::HashTable;
use smallvec::SmallVec;

use super::slab::{Ix, NodeIx, ObjIx, Slab, SnapIx};
use crate::types::{TokenId, TokenRange};

/// How many snapshots at a node or below it are …
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub(super) struct Facts {
    /// … live.
    pub(super) live: u32,
    /// … such that last copies stay: named, or promised and not durable yet.
    pub(super) kept: u32,
    /// … such that every copy stays: pinned for a time.
    pub(super) held: u32,
    /// … worth writing down.
    pub(super) ordinary: u32,
}

/// A node, and the edge that leads to it. 96 bytes, whatever the length of the edge.
pub(super) struct Node {
    pub(super) parent: NodeIx,
    pub(super) first_child: NodeIx,
    pub(super) next: NodeIx,
    pub(super) prev: NodeIx,
    pub(super) snapshot: SnapIx,
    /// Position of the edge's first token.
    pub(super) start: u32,
    /// Tokens of the edge; 0 for a root alone.
    pub(super) len: u32,
    /// First token of the edge.
    pub(super) first: TokenId,
    /// Hash of the edge's first tokens.
    pub(super) head: u32,
    /// Where the edge's tokens stand in the log.
    pub(super) offset: u64,
    pub(super) facts: Facts,
    /// KV objects that hold at least one token of the edge.
    pub(super) kv: SmallVec<[ObjIx; 2]>,
}

/// How tokens are hashed. Tests take worse functions, to show that only tokens decide.
#[derive(Copy, Clone)]
pub(super) struct Hashing {
    pub(super) head: fn(&[TokenId]) -> u32,
    pub(super) child: fn(NodeIx, TokenId) -> u64,
}

/// All nodes of all trees.
pub(super) struct Nodes {
    slab: Slab<NodeIx, Node>,
    /// Nodes that have siblings.
    children: HashTable<NodeIx>,
    pub(super) hashing: Hashing,
}

// === impl Facts ===

impl Facts {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            live: self.live + other.live,
            kept: self.kept + other.kept,
            held: self.held + other.held,
            ordinary: self.ordinary + other.ordinary,
        }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self {
            live: self.live - other.live,
            kept: self.kept - other.kept,
            held: self.held - other.held,
            ordinary: self.ordinary - other.ordinary,
        }
    }

    /// What decides over objects: which of the numbers are not zero.
    pub(super) fn signs(self) -> [bool; 4] {
        [self.live, self.kept, self.held, self.ordinary].map(|count| count > 0)
    }
}

// === impl Node ===

impl Node {
    pub(super) fn root() -> Self {
        Self {
            parent: NodeIx::NONE,
            first_child: NodeIx::NONE,
            next: NodeIx::NONE,
            prev: NodeIx::NONE,
            snapshot: SnapIx::NONE,
            start: 0,
            len: 0,
            first: 0,
            head: 0,
            offset: 0,
            facts: Facts::default(),
            kv: SmallVec::new(),
        }
    }

    pub(super) fn is_root(&self) -> bool {
        self.parent.is_none()
    }

    /// Position after the edge's last token: a snapshot here has this boundary.
    pub(super) fn end(&self) -> u32 {
        self.start + self.len
    }

    pub(super) fn range(&self) -> TokenRange {
        TokenRange {
            start: self.start,
            end: self.end(),
        }
    }
}

// === impl Hashing ===

impl Default for Hashing {
    fn default() -> Self {
        Self {
            head: |tokens| {
                let hash = tokens.iter().fold(tokens.len() as u64, |hash, token| {
                    (hash ^ u64::from(*token))
                        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                        .rotate_left(29)
                });
                mix(hash) as u32
            },
            child: |parent, first| mix(u64::from(parent.raw()) << 32 | u64::from(first)),
        }
    }
}

/// Spreads every bit of a number over all bits.
pub(super) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

// === impl Nodes ===

impl Nodes {
    pub(super) fn new(hashing: Hashing) -> Self {
        Self {
            slab: Slab::new(),
            children: HashTable::new(),
            hashing,
        }
    }

    pub(super) fn reserve(&mut self, more: usize) {
        self.slab.reserve(more);
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeIx, &Node)> {
        self.slab.iter()
    }

    pub(super) fn contains(&self, ix: NodeIx) -> bool {
        self.slab.peek(ix).is_some()
    }

    /// Entries of the table of children.
    pub(super) fn linked(&self) -> usize {
        self.children.len()
    }

    /// The child of `parent` whose edge starts with `first`.
    pub(super) fn child(&self, parent: NodeIx, first: TokenId) -> Option<NodeIx> {
        let one = self.slab[parent].first_child.some()?;
        let node = &self.slab[one];
        if node.first == first {
            return Some(one);
        }
        node.next.some()?;
        let hash = (self.hashing.child)(parent, first);
        self.children
            .find(hash, |ix| {
                let node = &self.slab[*ix];
                node.first == first && node.parent == parent
            })
            .copied()
    }

    pub(super) fn children(&self, parent: NodeIx) -> impl Iterator<Item = NodeIx> {
        std::iter::successors(self.slab[parent].first_child.some(), |ix| {
            self.slab[*ix].next.some()
        })
    }

    /// The node and all above it, up to the root.
    pub(super) fn upwards(&self, from: NodeIx) -> impl Iterator<Item = NodeIx> {
        std::iter::successors(from.some(), |ix| self.slab[*ix].parent.some())
    }

    /// The nodes from the root to `to`.
    pub(super) fn path(&self, to: NodeIx) -> Vec<NodeIx> {
        let mut path: Vec<NodeIx> = self.upwards(to).collect();
        path.reverse();
        path
    }

    pub(super) fn insert_root(&mut self) -> NodeIx {
        self.slab.insert(Node::root())
    }

    pub(super) fn remove_root(&mut self, root: NodeIx) {
        let node = self.slab.remove(root);
        debug_assert!(node.is_root() && node.first_child.is_none());
    }

    /// Adds `node` as a child of its `parent`.
    pub(super) fn insert_child(&mut self, node: Node) -> NodeIx {
        let ix = self.slab.insert(node);
        self.link(ix);
        ix
    }

    /// Takes out a node that has no children.
    pub(super) fn remove_leaf(&mut self, ix: NodeIx) -> Node {
        debug_assert!(self.slab[ix].first_child.is_none());
        self.unlink(ix);
        self.slab.remove(ix)
    }

    /// Puts `upper` above `ix`, which becomes its only child; `ix` must hold its new `first` in
    /// `lower_first` and is cut to what follows the edge of `upper`.
    pub(super) fn insert_above(
        &mut self,
        ix: NodeIx,
        upper: Node,
        lower_first: TokenId,
        lower_head: u32,
    ) -> NodeIx {
        self.unlink(ix);
        let cut = upper.len;
        let upper = self.insert_child(upper);
        let lower = &mut self.slab[ix];
        lower.parent = upper;
        lower.start += cut;
        lower.len -= cut;
        lower.offset += u64::from(cut);
        lower.first = lower_first;
        lower.head = lower_head;
        self.link(ix);
        upper
    }

    /// Takes out `upper`, whose only child takes over its edge; the child gets `head`.
    pub(super) fn merge_into_child(&mut self, upper: NodeIx, head: u32) -> (NodeIx, Node) {
        let child = self.slab[upper].first_child;
        self.unlink(child);
        let gone = self.remove_leaf(upper);
        let lower = &mut self.slab[child];
        debug_assert_eq!(gone.offset + u64::from(gone.len), lower.offset);
        lower.parent = gone.parent;
        lower.start = gone.start;
        lower.len += gone.len;
        lower.offset = gone.offset;
        lower.first = gone.first;
        lower.head = head;
        self.link(child);
        (child, gone)
    }

    fn link(&mut self, ix: NodeIx) {
        let (parent, first) = (self.slab[ix].parent, self.slab[ix].first);
        debug_assert!(self.child(parent, first).is_none());
        let Self {
            slab,
            children,
            hashing,
        } = self;
        let next = slab[parent].first_child;
        slab[parent].first_child = ix;
        slab[ix].next = next;
        slab[ix].prev = NodeIx::NONE;
        let Some(next) = next.some() else {
            return;
        };
        slab[next].prev = ix;
        let mut insert = |ix| {
            children.insert_unique(child_hash(slab, *hashing, ix), ix, |ix| {
                child_hash(slab, *hashing, *ix)
            });
        };
        if slab[next].next.is_none() {
            // It was the only one.
            insert(next);
        }
        insert(ix);
    }

    fn unlink(&mut self, ix: NodeIx) {
        let node = &self.slab[ix];
        let (parent, next, prev) = (node.parent, node.next, node.prev);
        if next.is_none() && prev.is_none() {
            self.slab[parent].first_child = NodeIx::NONE;
            return;
        }
        self.forget_child(ix);
        match prev.some() {
            Some(prev) => self.slab[prev].next = next,
            None => self.slab[parent].first_child = next,
        }
        if let Some(next) = next.some() {
            self.slab[next].prev = prev;
        }
        let left = self.slab[parent].first_child;
        if self.slab[left].next.is_none() {
            self.forget_child(left);
        }
    }

    fn forget_child(&mut self, ix: NodeIx) {
        let hash = child_hash(&self.slab, self.hashing, ix);
        self.children
            .find_entry(hash, |other| *other == ix)
            .expect("every child with a sibling is in the table")
            .remove();
    }
}

impl std::ops::Index<NodeIx> for Nodes {
    type Output = Node;

    fn index(&self, ix: NodeIx) -> &Node {
        &self.slab[ix]
    }
}

impl std::ops::IndexMut<NodeIx> for Nodes {
    fn index_mut(&mut self, ix: NodeIx) -> &mut Node {
        &mut self.slab[ix]
    }
}

fn child_hash(slab: &Slab<NodeIx, Node>, hashing: Hashing, ix: NodeIx) -> u64 {
    let node = &slab[ix];
    (hashing.child)(node.parent, node.first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_small_whatever_its_edge() {
        assert_eq!(size_of::<Option<Node>>(), 96);
    }
}
