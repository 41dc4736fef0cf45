//! Questions about a prompt.

use super::{
    Coverage, Hit, Index, KvRef, MAX_TOKENS, TreeKey,
    slab::{Ix, SnapIx},
    tree::Edges,
};
use crate::types::{SnapshotId, TokenId, Tokens};

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// The longest restorable prefix of `tokens` that ends at `max_boundary` or before.
    #[must_use]
    pub fn lookup(&self, key: &TreeKey, tokens: &[TokenId], max_boundary: u32) -> Option<Hit> {
        let (snapshot, _) = self.deepest(key, tokens, max_boundary)?;
        Some(self.hit_at(snapshot))
    }

    /// The snapshot that stands at exactly `boundary` of `tokens`.
    #[must_use]
    pub fn has_snapshot(
        &self,
        key: &TreeKey,
        tokens: &[TokenId],
        boundary: u32,
    ) -> Option<SnapshotId> {
        let (snapshot, at) = self.deepest(key, tokens, boundary)?;
        (at == boundary).then(|| self.snapshots[snapshot].id)
    }

    /// What is known of `tokens`.
    #[must_use]
    pub fn coverage(&self, key: &TreeKey, tokens: &[TokenId]) -> Coverage {
        let tokens = limit(tokens, MAX_TOKENS);
        let Some(root) = self.trees.get(key) else {
            return Coverage::default();
        };
        let mut deepest = None;
        let at = self.descend(*root, tokens, Edges::Partial, |_, node| {
            if let Some(snapshot) = node.snapshot.some() {
                deepest = Some((self.snapshots[snapshot].id, node.end()));
            }
        });
        let path = self.nodes.path(at.last());
        Coverage {
            matched: at.matched,
            kv: self.cover(&path, at.matched, |_, _| {}),
            deepest,
        }
    }

    /// The stored KV of `[0, upto)` of `tokens`: consecutive ranges from token 0, as far as they
    /// go.
    #[must_use]
    pub fn kv_refs(&self, key: &TreeKey, tokens: &[TokenId], upto: u32) -> Vec<KvRef> {
        let tokens = limit(tokens, upto.min(MAX_TOKENS));
        let Some(root) = self.trees.get(key) else {
            return Vec::new();
        };
        let at = self.descend(*root, tokens, Edges::Partial, |_, _| {});
        self.kv_of(&self.nodes.path(at.last()), at.matched)
    }

    fn deepest(&self, key: &TreeKey, tokens: &[TokenId], max: u32) -> Option<(SnapIx, u32)> {
        let root = self.trees.get(key)?;
        let mut deepest = None;
        let tokens = limit(tokens, max.min(MAX_TOKENS));
        self.descend(*root, tokens, Edges::Whole, |_, node| {
            if let Some(snapshot) = node.snapshot.some() {
                deepest = Some((snapshot, node.end()));
            }
        });
        deepest
    }

    pub(super) fn hit_at(&self, ix: SnapIx) -> Hit {
        let snapshot = &self.snapshots[ix];
        let boundary = self.nodes[snapshot.node].end();
        Hit {
            snapshot: snapshot.id,
            boundary,
            state: self.objects[snapshot.state].id,
            kv: self.kv_of(&self.nodes.path(snapshot.node), boundary),
        }
    }
}

/// At most the first `max` tokens.
fn limit(tokens: &[TokenId], max: u32) -> &[TokenId] {
    tokens.split_at(tokens.len().min(max as usize)).0
}
