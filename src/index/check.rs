//! Whether all that must hold does.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Index,
    log::{self, HEAD_TOKENS},
    node::{Facts, Node},
    slab::{Ix, NodeIx, ObjIx},
};
use crate::types::{ObjectKind, TokenRange, Tokens};

macro_rules! ensure {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(format!($($what)+));
        }
    };
}

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// Walks everything and compares; for tests, as it takes time and memory in proportion to the
    /// index.
    ///
    /// # Errors
    ///
    /// The first thing found wrong.
    pub fn check(&self) -> Result<(), String> {
        ensure!(
            self.trees.len() == self.roots.len(),
            "trees and roots differ in number"
        );
        let mut seen = BTreeSet::new();
        for (root, key) in &self.roots {
            ensure!(
                self.trees.get(key) == Some(root),
                "the tree of {key:?} has another root"
            );
            let node = &self.nodes[*root];
            ensure!(
                node.is_root() && node.len == 0 && node.kv.is_empty() && node.snapshot.is_none(),
                "the root of {key:?} is none"
            );
            ensure!(!node.first_child.is_none(), "the tree of {key:?} is empty");
            self.check_below(*root, &mut seen)?;
        }
        ensure!(
            seen.len() == self.nodes.len(),
            "{} nodes are reached, of {}",
            seen.len(),
            self.nodes.len()
        );
        let siblings = seen.iter().filter(|ix| {
            let node = &self.nodes[**ix];
            !(node.next.is_none() && node.prev.is_none())
        });
        ensure!(
            self.nodes.linked() == siblings.count(),
            "the table of children has another size than the trees"
        );
        self.check_snapshots()?;
        self.check_objects()?;
        self.objects.check_sums()
    }

    fn check_below(&self, top: NodeIx, seen: &mut BTreeSet<NodeIx>) -> Result<(), String> {
        // Children are done before their parents, by going through a preorder from its end.
        let mut order = vec![top];
        let mut at = 0;
        while let Some(ix) = order.get(at).copied() {
            ensure!(seen.insert(ix), "node {ix:?} is reached twice");
            order.extend(self.nodes.children(ix));
            at += 1;
        }
        let mut sums: BTreeMap<NodeIx, Facts> = BTreeMap::new();
        for ix in order.into_iter().rev() {
            let node = &self.nodes[ix];
            let own = node.snapshot.some();
            let mut facts = own.map_or_else(Facts::default, |own| self.snapshots[own].facts());
            for child in self.nodes.children(ix) {
                facts = facts.plus(sums.remove(&child).unwrap_or_default());
            }
            ensure!(
                facts == node.facts,
                "node {ix:?} counts {:?}, not {facts:?}",
                node.facts
            );
            sums.insert(ix, facts);
            if !node.is_root() {
                self.check_node(ix, node)?;
            }
        }
        Ok(())
    }

    fn check_node(&self, ix: NodeIx, node: &Node) -> Result<(), String> {
        let parent = &self.nodes[node.parent];
        ensure!(node.len > 0, "the edge of {ix:?} is empty");
        ensure!(
            node.start == parent.end(),
            "the edge of {ix:?} starts elsewhere than its parent ends"
        );
        ensure!(
            self.nodes.child(node.parent, node.first) == Some(ix),
            "node {ix:?} is not found by its first token"
        );
        let head = log::read(&self.log, node.offset, node.len.min(HEAD_TOKENS));
        let head = head.ok_or_else(|| format!("the log lacks the tokens of {ix:?}"))?;
        ensure!(
            head.first() == Some(&node.first) && self.head(&head) == node.head,
            "the edge of {ix:?} has other tokens in the log"
        );
        let bare = node.snapshot.is_none() && node.first_child.is_none() && node.kv.is_empty();
        ensure!(!bare, "node {ix:?} holds nothing");
        ensure!(!self.can_merge(ix), "node {ix:?} could be merged");
        let unique: BTreeSet<ObjIx> = node.kv.iter().copied().collect();
        ensure!(
            unique.len() == node.kv.len(),
            "node {ix:?} lists an object twice"
        );
        ensure!(
            node.facts.live == 0 || self.is_covered(ix),
            "node {ix:?} leads to live snapshots and lacks KV"
        );
        Ok(())
    }

    fn check_snapshots(&self) -> Result<(), String> {
        let mut timed = 0;
        for (ix, snapshot) in self.snapshots.iter() {
            let id = snapshot.id;
            ensure!(
                self.snapshots.find(id) == Some(ix),
                "snapshot {id} is not found by its id"
            );
            let node = &self.nodes[snapshot.node];
            ensure!(
                node.snapshot == ix,
                "snapshot {id} does not stand at its node"
            );
            let state = &self.objects[snapshot.state];
            ensure!(
                state.kind == ObjectKind::State
                    && state.snapshot == ix
                    && state.range == TokenRange::at(node.end()),
                "the state of {id} is another's"
            );
            if let Some(until) = snapshot.until {
                timed += 1;
                ensure!(
                    self.timed.contains(&(until, ix)),
                    "the pin of {id} never ends"
                );
            }
        }
        ensure!(timed == self.timed.len(), "a pin of nothing is left");
        let standing = self
            .nodes
            .iter()
            .filter(|(_, node)| !node.snapshot.is_none());
        ensure!(
            standing.count() == self.snapshots.len(),
            "a node names a snapshot that is not there"
        );
        Ok(())
    }

    fn check_objects(&self) -> Result<(), String> {
        let mut listed: BTreeMap<ObjIx, Vec<NodeIx>> = BTreeMap::new();
        for (ix, node) in self.nodes.iter() {
            for object in &node.kv {
                listed.entry(*object).or_default().push(ix);
            }
        }
        for (ix, object) in self.objects.iter() {
            let id = object.id;
            ensure!(!object.tiers.is_empty(), "object {id} has no copy");
            self.objects.check(ix, self.facts(ix))?;
            let nodes = listed.remove(&ix).unwrap_or_default();
            if object.kind == ObjectKind::State {
                ensure!(nodes.is_empty(), "state {id} is listed as KV");
                continue;
            }
            let known = TokenRange {
                start: object.range.start,
                end: object.reach,
            };
            ensure!(
                !known.is_empty() && object.range.covers(known),
                "object {id} reaches too far"
            );
            let path = self.nodes.path(object.node);
            let mut chain: Vec<NodeIx> = path
                .into_iter()
                .filter(|node| self.nodes[*node].range().overlap(known).is_some())
                .collect();
            ensure!(
                chain.last() == Some(&object.node) && self.nodes[object.node].end() >= object.reach,
                "object {id} ends at another node"
            );
            chain.sort_unstable();
            ensure!(chain == nodes, "object {id} is listed at other nodes");
        }
        ensure!(listed.is_empty(), "a node lists an object that is gone");
        Ok(())
    }
}
