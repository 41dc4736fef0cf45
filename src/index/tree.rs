//! Walking and changing the trees: what needs tokens, KV and nodes at once.

use super::{
    Index, KvRef, TreeKey,
    log::{self, HEAD_TOKENS},
    node::{Facts, Node},
    slab::{Ix, NodeIx, ObjIx, SnapIx},
};
use crate::types::{TokenId, TokenRange, Tokens};

/// How far a prompt leads into a tree.
#[derive(Copy, Clone)]
pub(super) struct Descent {
    /// The last node whose edge fits whole.
    pub(super) node: NodeIx,
    /// Tokens that fit.
    pub(super) matched: u32,
    /// The child whose edge fits in part, if one does.
    pub(super) partial: Option<NodeIx>,
    /// An edge should have fit by its first token, and the log did not have even that.
    pub(super) damaged: bool,
}

/// Which edges a descent looks at.
#[derive(Copy, Clone, Eq, PartialEq)]
pub(super) enum Edges {
    /// Only those that fit whole: the log is not read where the hash says that one does not.
    Whole,
    /// The last may fit in part.
    Partial,
}

// === impl Descent ===

impl Descent {
    fn at(root: NodeIx) -> Self {
        Self {
            node: root,
            matched: 0,
            partial: None,
            damaged: false,
        }
    }

    /// The node with the last token that fits.
    pub(super) fn last(&self) -> NodeIx {
        self.partial.unwrap_or(self.node)
    }
}

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// Goes down as far as `tokens` fit, and shows `visit` every node whose edge fits whole.
    pub(super) fn descend(
        &self,
        root: NodeIx,
        tokens: &[TokenId],
        edges: Edges,
        mut visit: impl FnMut(NodeIx, &Node),
    ) -> Descent {
        let mut at = Descent::at(root);
        let mut rest = tokens;
        while let Some(first) = rest.first() {
            let Some(child) = self.nodes.child(at.node, *first) else {
                break;
            };
            let edge = &self.nodes[child];
            let len = rest.len().min(edge.len as usize);
            let (here, after) = rest.split_at(len);
            if edges == Edges::Whole && (len < edge.len as usize || self.head(here) != edge.head) {
                break;
            }
            let same = log::common(&self.log, edge.offset, here);
            at.matched += same;
            if same < edge.len {
                at.partial = (same > 0).then_some(child);
                at.damaged = same == 0;
                break;
            }
            at.node = child;
            rest = after;
            visit(child, edge);
        }
        at
    }

    /// Hash of the start of an edge that holds `tokens`.
    pub(super) fn head(&self, tokens: &[TokenId]) -> u32 {
        let len = tokens.len().min(HEAD_TOKENS as usize);
        (self.nodes.hashing.head)(tokens.split_at(len).0)
    }

    /// The root of a tree, made if there is none.
    pub(super) fn root(&mut self, key: &TreeKey) -> NodeIx {
        if let Some(root) = self.trees.get(key) {
            return *root;
        }
        let root = self.nodes.insert_root();
        self.trees.insert(*key, root);
        self.roots.insert(root, *key);
        root
    }

    /// Cuts the edge of `ix` before position `at`, inside it; says the new upper node, or `None` if
    /// the log lacks the tokens.
    pub(super) fn split(&mut self, ix: NodeIx, at: u32) -> Option<NodeIx> {
        let node = &self.nodes[ix];
        let cut = at - node.start;
        let upper_head = log::read(&self.log, node.offset, cut.min(HEAD_TOKENS))?;
        let rest = node.len - cut;
        let offset = node.offset + u64::from(cut);
        let lower_head = log::read(&self.log, offset, rest.min(HEAD_TOKENS))?;
        let lower_first = *lower_head.first()?;
        let (upper_kv, lower_kv) = (
            node.kv
                .iter()
                .copied()
                .filter(|object| self.objects[*object].range.start < at)
                .collect(),
            node.kv
                .iter()
                .copied()
                .filter(|object| self.objects[*object].reach > at)
                .collect(),
        );
        let upper = Node {
            parent: node.parent,
            first_child: NodeIx::NONE,
            next: NodeIx::NONE,
            prev: NodeIx::NONE,
            snapshot: SnapIx::NONE,
            start: node.start,
            len: cut,
            first: node.first,
            head: self.head(&upper_head),
            offset: node.offset,
            facts: node.facts,
            kv: upper_kv,
        };
        let lower_head = self.head(&lower_head);
        let upper = self.nodes.insert_above(ix, upper, lower_first, lower_head);
        self.nodes[ix].kv = lower_kv;
        for object in &self.nodes[upper].kv {
            let object = &mut self.objects[*object];
            if object.node == ix && object.reach <= at {
                object.node = upper;
            }
        }
        Some(upper)
    }

    /// Removes `ix` and what is above it as far as nothing is left there; merges the last with its
    /// child if it has nothing of its own.
    pub(super) fn prune(&mut self, mut ix: NodeIx) {
        loop {
            let node = &self.nodes[ix];
            let first_child = node.first_child;
            if node.is_root() {
                if first_child.is_none() {
                    self.nodes.remove_root(ix);
                    let key = self.roots.remove(&ix);
                    self.trees.remove(&key.expect("every root has a key"));
                }
                return;
            }
            if !node.snapshot.is_none() {
                return;
            }
            if first_child.is_none() && node.kv.is_empty() {
                let gone = self.nodes.remove_leaf(ix);
                self.log.release(gone.offset, gone.len);
                ix = gone.parent;
                continue;
            }
            if self.can_merge(ix) {
                self.merge(ix);
            }
            return;
        }
    }

    /// Whether a node has no snapshot, one child, and its tokens stand before the child's in the
    /// log.
    pub(super) fn can_merge(&self, ix: NodeIx) -> bool {
        let node = &self.nodes[ix];
        let Some(child) = node.first_child.some() else {
            return false;
        };
        let child = &self.nodes[child];
        !node.is_root()
            && node.snapshot.is_none()
            && child.next.is_none()
            && node.offset + u64::from(node.len) == child.offset
    }

    /// Gives the edge of `upper` to its only child: see [`can_merge`](Self::can_merge).
    pub(super) fn merge(&mut self, upper: NodeIx) {
        let node = &self.nodes[upper];
        let child = &self.nodes[node.first_child];
        let len = (node.len + child.len).min(HEAD_TOKENS);
        let head = if node.len >= HEAD_TOKENS {
            node.head
        } else {
            let Some(tokens) = log::read(&self.log, node.offset, len) else {
                return;
            };
            self.head(&tokens)
        };
        let (child, gone) = self.nodes.merge_into_child(upper, head);
        let mut kv = gone.kv;
        for object in &kv {
            let object = &mut self.objects[*object];
            if object.node == upper {
                object.node = child;
            }
        }
        let lower = std::mem::take(&mut self.nodes[child].kv);
        kv.extend(lower.into_iter().filter(|object| {
            // Those that reach down from above are in the upper list already.
            self.objects[*object].range.start >= gone.start + gone.len
        }));
        self.nodes[child].kv = kv;
    }

    /// KV objects on the edge of `ix` whose first token is there.
    pub(super) fn starting_at(&self, ix: NodeIx) -> impl Iterator<Item = ObjIx> {
        let node = &self.nodes[ix];
        node.kv
            .iter()
            .copied()
            .filter(|object| self.objects[*object].range.start >= node.start)
    }

    /// Changes the counts at `from` and above, and the classes of the KV for which that matters.
    pub(super) fn recount(&mut self, from: NodeIx, minus: Facts, plus: Facts) {
        let mut at = from.some();
        while let Some(ix) = at {
            let node = &mut self.nodes[ix];
            let before = node.facts;
            node.facts = before.plus(plus).minus(minus);
            at = node.parent.some();
            let facts = node.facts;
            if before.signs() != facts.signs() {
                for object in self.starting_at(ix).collect::<Vec<_>>() {
                    self.objects.reclass(object, facts);
                }
            }
        }
    }

    /// Where KV that covers position `at` of a node's edge ends, and which it is: `last` if it can
    /// be, else the longest.
    pub(super) fn cover_step(&self, node: &Node, at: u32, last: ObjIx) -> Option<(ObjIx, u32)> {
        let mut best: Option<(ObjIx, u32)> = None;
        for ix in &node.kv {
            let object = &self.objects[*ix];
            let end = object.reach.min(node.end());
            if object.range.start > at || end <= at {
                continue;
            }
            if *ix == last {
                return Some((last, end));
            }
            if best.is_none_or(|(_, longest)| end > longest) {
                best = Some((*ix, end));
            }
        }
        best
    }

    /// Walks the KV that covers `[0, upto)` of a path that starts at the root; says where that
    /// ends.
    pub(super) fn cover(
        &self,
        path: &[NodeIx],
        upto: u32,
        mut part: impl FnMut(ObjIx, TokenRange),
    ) -> u32 {
        let (mut at, mut start, mut last) = (0, 0, ObjIx::NONE);
        'path: for ix in path {
            let node = &self.nodes[*ix];
            let end = node.end().min(upto);
            while at < end {
                let Some((object, covered)) = self.cover_step(node, at, last) else {
                    break 'path;
                };
                if object != last {
                    if at > start {
                        part(last, TokenRange { start, end: at });
                    }
                    (last, start) = (object, at);
                }
                at = covered.min(end);
            }
        }
        if at > start {
            part(last, TokenRange { start, end: at });
        }
        at
    }

    /// The KV that covers `[0, upto)` of a path, as far as it is covered.
    pub(super) fn kv_of(&self, path: &[NodeIx], upto: u32) -> Vec<KvRef> {
        let mut kv = Vec::with_capacity(path.len());
        self.cover(path, upto, |object, range| {
            let object = &self.objects[object];
            kv.push(KvRef {
                object: object.id,
                range,
                object_range: object.range,
            });
        });
        kv
    }
}
