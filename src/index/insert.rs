//! Inserting a snapshot: everything is checked first, then changed.

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::{
    Index, IndexError, Inserted, KvRef, MAX_TOKENS, NewSnapshot, ObjectEntry, TreeKey,
    node::{Facts, Node},
    slab::{Ix, NodeIx, ObjIx, SnapIx},
    snapshot::Snapshot,
    tree::{Descent, Edges},
};
use crate::types::{ObjectId, ObjectKind, TokenId, TokenRange, Tokens};

/// More bytes than any object has: sums of sizes stay far from the end of `u64`.
pub(super) const MAX_BYTES: u64 = 1 << 48;

/// The objects given with a snapshot, by id.
type Given<'a> = HashMap<ObjectId, &'a ObjectEntry>;

// === impl Index ===

impl<T: Tokens> Index<T> {
    /// Inserts a snapshot of all of `tokens`. Where one stands already, that one stays, and only
    /// learns of copies in more tiers. Its tokens go to the log as far as they are new.
    ///
    /// # Errors
    ///
    /// See [`IndexError`]; nothing has changed then.
    pub fn insert(
        &mut self,
        key: &TreeKey,
        tokens: &[TokenId],
        new: NewSnapshot,
    ) -> Result<Inserted, IndexError> {
        let boundary = boundary_of(tokens)?;
        let given = check_entries(&new, boundary)?;
        check_refs(&new.kv, boundary)?;

        let root = self.trees.get(key).copied();
        let at = root.map(|root| self.descend(root, tokens, Edges::Partial, |_, _| {}));
        let known = at.map_or_else(Vec::new, |at| self.nodes.path(at.last()));
        let matched = at.map_or(0, |at| at.matched);
        if at.is_some_and(|at| at.damaged) {
            return Err(unreadable());
        }

        let whole = at.filter(|at| at.partial.is_none() && at.matched == boundary);
        let standing = whole.and_then(|at| self.nodes[at.node].snapshot.some());
        if let Some(ix) = self.snapshots.find(new.id)
            && standing != Some(ix)
        {
            return Err(IndexError::DuplicateSnapshot(new.id));
        }
        self.check_known(&given, &new.state)?;
        if let Some(standing) = standing {
            return Ok(self.adopt(standing, &new));
        }
        let state = self.check_state(&new.state)?;
        for part in &new.kv {
            self.check_part(part, &given, &known, matched)?;
        }

        let node = self.make_node(key, tokens, at)?;
        let path = self.nodes.path(node);
        let mut changed: SmallVec<[ObjIx; 8]> = SmallVec::new();
        for part in &new.kv {
            let object = match self.objects.find(part.object) {
                Some(object) => object,
                None => {
                    let entry = given.get(&part.object);
                    let entry = entry.expect("a reference is to a known or a given object");
                    self.objects.insert(key.namespace, entry, new.created)
                }
            };
            if self.extend(object, &path, part.range.end) {
                changed.push(object);
            }
        }
        let state =
            state.unwrap_or_else(|| self.objects.insert(key.namespace, &new.state, new.created));
        changed.push(state);
        changed.extend(self.learn_tiers(&new));
        let snapshot = self.snapshots.insert(Snapshot {
            id: new.id,
            node,
            state,
            created: new.created,
            until: None,
            names: 0,
            durable: new.durable,
            retain: new.retain,
        });
        self.nodes[node].snapshot = snapshot;
        self.objects[state].snapshot = snapshot;
        let facts = self.snapshots[snapshot].facts();
        self.recount(node, Facts::default(), facts);
        for object in changed {
            self.objects.reclass(object, self.facts(object));
        }
        self.touch_at(snapshot, new.created);
        if let Some(below) = at.and_then(|at| at.partial) {
            // What a split left below may have no KV: it was part of a longer tombstone.
            self.prune(below);
        }
        Ok(self.inserted(snapshot, true, &new))
    }

    /// A snapshot stands there already: only copies are new.
    fn adopt(&mut self, standing: SnapIx, new: &NewSnapshot) -> Inserted {
        for object in self.learn_tiers(new) {
            self.objects.reclass(object, self.facts(object));
        }
        self.inserted(standing, false, new)
    }

    /// Adds the tiers of given objects to what is known; says which objects there were.
    fn learn_tiers(&mut self, new: &NewSnapshot) -> SmallVec<[ObjIx; 8]> {
        let mut learned = SmallVec::new();
        for entry in new.new_objects.iter().chain([&new.state]) {
            let Some(ix) = self.objects.find(entry.id) else {
                continue;
            };
            let tiers = self.objects[ix].tiers.union(entry.tiers);
            if tiers != self.objects[ix].tiers {
                self.objects.set_tiers(ix, tiers);
                learned.push(ix);
            }
        }
        learned
    }

    fn inserted(&self, snapshot: SnapIx, fresh: bool, new: &NewSnapshot) -> Inserted {
        let entries = new.new_objects.iter().chain([&new.state]);
        Inserted {
            snapshot: self.snapshots[snapshot].id,
            fresh,
            unused: entries
                .map(|entry| entry.id)
                .filter(|id| self.objects.find(*id).is_none())
                .collect(),
        }
    }

    /// Objects that are given and known must be the same.
    fn check_known(&self, given: &Given<'_>, state: &ObjectEntry) -> Result<(), IndexError> {
        for entry in given.values().copied().chain([state]) {
            if let Some(ix) = self.objects.find(entry.id) {
                let known = &self.objects[ix];
                let same = (known.kind, known.range, known.bytes)
                    == (entry.kind, entry.range, entry.bytes);
                if !same {
                    return Err(bad(entry.id, "is known with another kind, range or size"));
                }
            }
        }
        Ok(())
    }

    /// A state that is known already must have lost its snapshot.
    fn check_state(&self, state: &ObjectEntry) -> Result<Option<ObjIx>, IndexError> {
        let known = self.objects.find(state.id);
        match known {
            Some(ix) if !self.objects[ix].snapshot.is_none() => {
                Err(bad(state.id, "is the state of another snapshot"))
            }
            _ => Ok(known),
        }
    }

    /// A reference must be to an object that is known or given, and that belongs to these tokens.
    fn check_part(
        &self,
        part: &KvRef,
        given: &Given<'_>,
        path: &[NodeIx],
        matched: u32,
    ) -> Result<(), IndexError> {
        let Some(ix) = self.objects.find(part.object) else {
            let entry = given
                .get(&part.object)
                .ok_or(IndexError::UnknownObject(part.object))?;
            if entry.range != part.object_range {
                return Err(bad(part.object, "is referred to with another range"));
            }
            return Ok(());
        };
        self.check_place(ix, part, path, matched)
    }

    /// A known object must be what a reference says, and belong to these tokens: what is known of
    /// its tokens must lie on the path, of which `[0, matched)` exists.
    pub(super) fn check_place(
        &self,
        ix: ObjIx,
        part: &KvRef,
        path: &[NodeIx],
        matched: u32,
    ) -> Result<(), IndexError> {
        let object = &self.objects[ix];
        if object.kind != ObjectKind::Kv || object.range != part.object_range {
            return Err(bad(
                part.object,
                "is referred to with another kind or range",
            ));
        }
        let last = object.reach.min(part.range.end) - 1;
        let after = path.partition_point(|node| self.nodes[*node].start <= last);
        let node = after.checked_sub(1).and_then(|at| path.get(at));
        let there = node.is_some_and(|node| self.nodes[*node].kv.contains(&ix));
        if last < matched && there {
            Ok(())
        } else {
            Err(IndexError::Foreign(part.object))
        }
    }

    /// The node at the end of `tokens`, made as far as it does not exist.
    fn make_node(
        &mut self,
        key: &TreeKey,
        tokens: &[TokenId],
        at: Option<Descent>,
    ) -> Result<NodeIx, IndexError> {
        let matched = at.map_or(0, |at| at.matched);
        let tail = tokens.split_at(matched as usize).1;
        let len = boundary_of(tokens)? - matched;
        let offset = match tail {
            [] => None,
            tail => Some(self.log.append(tail)?),
        };
        let above = match at {
            None => self.root(key),
            Some(Descent { node, partial, .. }) => match partial {
                None => node,
                Some(child) => match self.split(child, matched) {
                    Some(upper) => upper,
                    None => {
                        if let Some(offset) = offset {
                            self.log.release(offset, len);
                        }
                        return Err(unreadable());
                    }
                },
            },
        };
        let (Some(offset), Some(first)) = (offset, tail.first()) else {
            return Ok(above);
        };
        let head = self.head(tail);
        let node = self.nodes.insert_child(Node {
            parent: above,
            start: matched,
            len,
            first: *first,
            head,
            offset,
            ..Node::root()
        });
        if self.can_merge(above) {
            self.merge(above);
        }
        Ok(node)
    }

    /// Makes an object known on `path` as far as `end`; whether anything was new.
    pub(super) fn extend(&mut self, ix: ObjIx, path: &[NodeIx], end: u32) -> bool {
        let object = &mut self.objects[ix];
        if object.reach >= end {
            return false;
        }
        let fresh = TokenRange {
            start: object.reach,
            end,
        };
        object.reach = end;
        let from = path.partition_point(|node| self.nodes[*node].end() <= fresh.start);
        for node in path.iter().skip(from) {
            let edge = &mut self.nodes[*node];
            if edge.range().overlap(fresh).is_none() {
                break;
            }
            if !edge.kv.contains(&ix) {
                edge.kv.push(ix);
            }
            self.objects[ix].node = *node;
        }
        true
    }
}

fn boundary_of(tokens: &[TokenId]) -> Result<u32, IndexError> {
    if tokens.is_empty() {
        return Err(IndexError::Empty);
    }
    u32::try_from(tokens.len())
        .ok()
        .filter(|boundary| *boundary <= MAX_TOKENS)
        .ok_or(IndexError::TooLong {
            tokens: tokens.len(),
            max: MAX_TOKENS,
        })
}

fn check_entries(new: &NewSnapshot, boundary: u32) -> Result<Given<'_>, IndexError> {
    if new.state.kind != ObjectKind::State || new.state.range != TokenRange::at(boundary) {
        return Err(bad(new.state.id, "is no state at the boundary"));
    }
    let mut given = Given::with_capacity(new.new_objects.len());
    for entry in &new.new_objects {
        let range = entry.range;
        if entry.kind != ObjectKind::Kv || range.is_empty() || range.end > MAX_TOKENS {
            return Err(bad(entry.id, "is no KV of a range of tokens"));
        }
        if entry.id == new.state.id || given.insert(entry.id, entry).is_some() {
            return Err(bad(entry.id, "is given twice"));
        }
    }
    for entry in new.new_objects.iter().chain([&new.state]) {
        if entry.tiers.is_empty() {
            return Err(bad(entry.id, "has no copy in any tier"));
        }
        if entry.bytes > MAX_BYTES {
            return Err(bad(entry.id, "is larger than any object can be"));
        }
    }
    Ok(given)
}

/// References must follow each other from token 0 to the boundary, each inside its object.
fn check_refs(kv: &[KvRef], boundary: u32) -> Result<(), IndexError> {
    let mut at = 0;
    for part in kv {
        if part.range.is_empty() || !part.object_range.covers(part.range) {
            return Err(bad(part.object, "is referred to outside its range"));
        }
        if part.range.start != at {
            return Err(IndexError::Gap { at });
        }
        at = part.range.end;
    }
    if at == boundary {
        Ok(())
    } else {
        Err(IndexError::Gap {
            at: at.min(boundary),
        })
    }
}

pub(super) fn bad(object: ObjectId, what: &'static str) -> IndexError {
    IndexError::BadObject { object, what }
}

pub(super) fn unreadable() -> IndexError {
    let what = "the log lacks tokens that it took";
    IndexError::Log(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, what))
}
