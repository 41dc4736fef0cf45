//! What was promised, in lists.

use std::collections::{BTreeMap, BTreeSet};

use crate::service::Event;
use crate::types::{Millis, SnapshotId, TokenId};

/// The lists.
#[derive(Default)]
pub struct Model {
    /// Every snapshot that there ever was.
    pub known: BTreeMap<SnapshotId, Vec<TokenId>>,
    /// Those that can be found.
    pub live: BTreeSet<SnapshotId>,
    /// Those that were said to be durable.
    pub durable: BTreeSet<SnapshotId>,
    /// Names that somebody was told are on disk: conversation and branch.
    pub branches: BTreeMap<(String, String), SnapshotId>,
    /// Those that somebody was told are gone from the disk.
    pub deleted: BTreeSet<SnapshotId>,
    /// Those that stay in RAM, until when.
    pub pinned: BTreeMap<SnapshotId, Millis>,
    /// First tokens of prompts of which some bytes on disk were damaged.
    pub tainted: BTreeSet<TokenId>,
}

// === impl Model ===

impl Model {
    pub fn committed(&mut self, id: SnapshotId, tokens: &[TokenId]) {
        let before = self.known.insert(id, tokens.to_vec());
        assert!(
            before.is_none_or(|before| before == tokens),
            "{id} stands for other tokens"
        );
        self.live.insert(id);
    }

    /// Whether its bytes on disk may be bad.
    pub fn is_tainted(&self, id: &SnapshotId) -> bool {
        self.known[id]
            .first()
            .is_some_and(|first| self.tainted.contains(first))
    }

    /// The deepest snapshot that these tokens begin with.
    pub fn deepest(&self, tokens: &[TokenId]) -> Option<SnapshotId> {
        let fits = self
            .live
            .iter()
            .filter(|id| tokens.starts_with(&self.known[id]));
        fits.max_by_key(|id| self.known[id].len()).copied()
    }

    /// What the service said.
    pub fn heard(&mut self, event: &Event, now: Millis) {
        match event {
            Event::Durable { snapshot_id: id } => {
                assert!(self.live.contains(id), "{id} is durable and not there");
                self.durable.insert(*id);
            }
            Event::Removed {
                snapshot_id: id,
                reason,
            } => {
                match *reason {
                    "deleted" => {}
                    "evicted" => {
                        let named = self.branches.iter().find(|(_, named)| *named == id);
                        assert_eq!(named, None, "{id} was evicted, and has a name");
                        let until = self.pinned.get(id);
                        assert!(
                            until.is_none_or(|until| *until <= now),
                            "{id} was evicted, and is pinned"
                        );
                    }
                    "lost" => assert!(self.is_tainted(id), "{id} was lost, and its files are good"),
                    other => panic!("{id} was removed: {other}"),
                }
                self.gone(id);
            }
            _ => {}
        }
    }

    fn gone(&mut self, id: &SnapshotId) {
        assert!(self.live.remove(id), "{id} is gone twice");
        self.durable.remove(id);
        self.pinned.remove(id);
        self.branches.retain(|_, named| named != id);
    }

    /// Another daemon found these.
    pub fn restarted(&mut self, found: &BTreeSet<SnapshotId>) {
        for id in found {
            assert!(self.known.contains_key(id), "{id} was never saved");
            assert!(!self.deleted.contains(id), "{id} was deleted, and is back");
        }
        for id in self.durable.difference(found) {
            assert!(
                self.is_tainted(id),
                "{id} was durable, and did not come back"
            );
        }
        self.live.clone_from(found);
        self.durable.clone_from(found);
        self.pinned.clear();
        self.branches.retain(|_, id| found.contains(id));
    }
}
