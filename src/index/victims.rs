//! What leaves a tier first.

use std::cmp::Reverse;

use hashbrown::HashMap;

use super::{
    Action, Index, Retain, Victim,
    shelf::{Place, Shelf},
    slab::{Ix, NodeIx, ObjIx},
};
use crate::types::{Millis, TierKind, Tokens};

/// Victims so far, and what the tier would look like without them.
struct Selection {
    tier: TierKind,
    wanted: u64,
    freed: u64,
    victims: Vec<Victim>,
    /// Snapshots at a node or below whose state is to be forgotten.
    forgotten: HashMap<NodeIx, u32>,
}

// === impl Selection ===

impl Selection {
    fn is_enough(&self) -> bool {
        self.freed >= self.wanted
    }
}

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// Objects that can leave `tier`, in the order in which they should, until they free `bytes`
    /// (or all that can). Timed pins that are over at `now` count no more. The caller acts on them
    /// one by one, in this order; until it does, nothing changes here.
    ///
    /// The order: what no live snapshot needs; copies of what a lower tier has too; last copies.
    /// Each least recently used first, and the deepest first among equals. KV that is needed no
    /// more once a state is forgotten follows that state. Never: what is leased or pinned for a
    /// time; the last copy of what a named or promised snapshot needs; the last copy of KV that a
    /// live snapshot needs, where no lower tier exists.
    #[must_use]
    pub fn victims(&mut self, tier: TierKind, bytes: u64, now: Millis) -> Vec<Victim> {
        self.expire_pins(now);
        self.select(tier, bytes)
    }

    fn select(&self, tier: TierKind, bytes: u64) -> Vec<Victim> {
        let mut selection = Selection {
            tier,
            wanted: bytes,
            freed: 0,
            victims: Vec::new(),
            forgotten: HashMap::new(),
        };
        let shelf = &self.objects.shelves[tier];
        for place in shelf.orphans.iter().chain(&shelf.spare) {
            if selection.is_enough() {
                break;
            }
            self.choose(&mut selection, place.object());
        }
        for place in last_copies(shelf) {
            if selection.is_enough() {
                break;
            }
            self.choose(&mut selection, place.object());
        }
        selection.victims
    }

    fn choose(&self, selection: &mut Selection, ix: ObjIx) {
        let object = &self.objects[ix];
        let snapshot = object.snapshot.some().map(|ix| &self.snapshots[ix]);
        let action = if !object.tiers.below(selection.tier).is_empty() {
            Action::Drop
        } else if self.facts(ix).live == 0
            || self.objects.configured().below(selection.tier).is_empty()
            || snapshot.is_some_and(|snapshot| snapshot.retain == Retain::Transient)
        {
            Action::Forget
        } else {
            Action::Demote
        };
        selection.freed = selection.freed.saturating_add(object.bytes);
        selection.victims.push(Victim {
            object: object.id,
            kind: object.kind,
            bytes: object.bytes,
            action,
            snapshot: snapshot.map(|snapshot| snapshot.id),
        });
        if let (Action::Forget, Some(snapshot)) = (action, snapshot) {
            self.choose_orphans_of(selection, snapshot.node);
        }
    }

    /// KV that no snapshot needs once the one at `node` is forgotten, too.
    fn choose_orphans_of(&self, selection: &mut Selection, node: NodeIx) {
        for ix in self.nodes.upwards(node) {
            let forgotten = selection.forgotten.entry(ix).or_default();
            *forgotten += 1;
            if *forgotten < self.nodes[ix].facts.live {
                continue;
            }
            // Of those that start on one edge the deepest first, too.
            let mut starting: Vec<ObjIx> = self.starting_at(ix).collect();
            starting.sort_by_key(|object| Reverse(self.objects[*object].range.end));
            for object in starting {
                let object = &self.objects[object];
                // Spare copies were chosen before all last ones.
                let spare = !object.tiers.below(selection.tier).is_empty();
                if spare || object.leases > 0 || !object.tiers.contains(selection.tier) {
                    continue;
                }
                selection.freed = selection.freed.saturating_add(object.bytes);
                selection.victims.push(Victim {
                    object: object.id,
                    kind: object.kind,
                    bytes: object.bytes,
                    action: Action::Forget,
                    snapshot: None,
                });
            }
        }
    }
}

/// States and KV in one order.
fn last_copies(shelf: &Shelf) -> impl Iterator<Item = Place> {
    let mut states = shelf.states.iter().copied().peekable();
    let mut kv = shelf.kv.iter().copied().peekable();
    std::iter::from_fn(move || match (states.peek(), kv.peek()) {
        (Some(state), Some(other)) if other < state => kv.next(),
        (Some(_), _) => states.next(),
        (None, _) => kv.next(),
    })
}
