//! Which objects are here: small entries, as there may be millions. What an object is in full is made
//! from them when somebody asks.

use std::{collections::HashMap, sync::Arc};

use parking_lot::RwLock;

use crate::{
    pool::Geometry,
    store::object::{Encoding, ObjectMeta, pieces},
    types::{Fingerprint, Generation, NamespaceId, ObjectId, ObjectKind, TokenRange},
    util::id_map::IdMap,
};

/// Whose an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Whose {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) namespace: NamespaceId,
    pub(crate) shards: u32,
}

/// An object whose files are all there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Here {
    pub(crate) generation: Generation,
    /// Bytes of all its files on disk.
    pub(crate) bytes: u64,
    pub(crate) range: TokenRange,
    /// Tells it from another of the same id before or after it.
    pub(crate) serial: u32,
    whose: u32,
    pub(crate) kind: ObjectKind,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    table: RwLock<Table>,
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    here: IdMap<ObjectId, Here>,
    whose: Vec<Whose>,
    numbers: HashMap<Whose, u32>,
    serial: u32,
}

// === impl Whose ===

impl Whose {
    fn of(meta: &ObjectMeta) -> Self {
        Self {
            fingerprint: meta.fingerprint,
            namespace: meta.namespace,
            shards: meta.shards,
        }
    }
}

// === impl Table ===

impl Table {
    /// Makes room for so many more.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.here.reserve(more);
    }

    /// The number of an owner.
    pub(crate) fn number(&mut self, whose: Whose) -> u32 {
        let next = self.whose.len() as u32;
        let number = *self.numbers.entry(whose).or_insert(next);
        if number == next {
            self.whose.push(whose);
        }
        number
    }

    /// Adds an object, unless one of its id is there that is as new.
    pub(crate) fn add(
        &mut self,
        id: ObjectId,
        whose: u32,
        (kind, range): (ObjectKind, TokenRange),
        generation: Generation,
        bytes: u64,
    ) -> bool {
        self.serial = self.serial.wrapping_add(1);
        let here = Here {
            generation,
            bytes,
            range,
            serial: self.serial,
            whose,
            kind,
        };
        match self.here.entry(id) {
            indexmap::map::Entry::Vacant(entry) => {
                entry.insert(here);
                true
            }
            indexmap::map::Entry::Occupied(mut entry) => {
                if entry.get().generation < generation {
                    entry.insert(here);
                }
                false
            }
        }
    }

    fn whose(&self, here: &Here) -> Option<Whose> {
        self.whose.get(here.whose as usize).copied()
    }
}

// === impl Objects ===

impl Objects {
    /// The whole table, to change.
    pub(crate) fn table(&self) -> parking_lot::RwLockWriteGuard<'_, Table> {
        self.table.write()
    }

    pub(crate) fn len(&self) -> usize {
        self.table.read().here.len()
    }

    pub(crate) fn contains(&self, id: &ObjectId) -> bool {
        self.table.read().here.contains_key(id)
    }

    /// Looks at all ids, in any order.
    pub(crate) fn each(&self, mut look: impl FnMut(&ObjectId)) {
        self.table.read().here.keys().for_each(&mut look);
    }

    pub(crate) fn get(&self, id: &ObjectId) -> Option<(Here, Whose)> {
        let table = self.table.read();
        let here = *table.here.get(id)?;
        Some((here, table.whose(&here)?))
    }

    pub(crate) fn insert(&self, meta: &ObjectMeta, bytes: u64) {
        let mut table = self.table.write();
        let whose = table.number(Whose::of(meta));
        table.here.swap_remove(&meta.id);
        let what = (meta.kind, meta.range);
        table.add(meta.id, whose, what, meta.generation, bytes);
    }

    pub(crate) fn remove(&self, id: &ObjectId) -> Option<(Here, Whose)> {
        let mut table = self.table.write();
        let here = table.here.swap_remove(id)?;
        let whose = table.whose(&here)?;
        Some((here, whose))
    }

    /// Removes an object if it is still the one of this serial.
    pub(crate) fn remove_same(&self, id: &ObjectId, serial: u32) -> bool {
        let mut table = self.table.write();
        let same = table.here.get(id).is_some_and(|here| here.serial == serial);
        same && table.here.swap_remove(id).is_some()
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<(ObjectId, Here, Whose)> {
        let table = self.table.read();
        let all = table.here.iter();
        all.filter_map(|(id, here)| Some((*id, *here, table.whose(here)?)))
            .collect()
    }
}

/// What an object is, in full.
pub(crate) fn meta(
    id: &ObjectId,
    here: &Here,
    whose: &Whose,
    geometry: &Geometry,
) -> Arc<ObjectMeta> {
    Arc::new(ObjectMeta {
        id: *id,
        kind: here.kind,
        range: here.range,
        fingerprint: whose.fingerprint,
        namespace: whose.namespace,
        generation: here.generation,
        shards: whose.shards,
        pieces: pieces(geometry, here.kind, here.range),
        encoding: Encoding::Raw,
    })
}
