//! The RAM tier: objects whose bytes lie in the arena anyway, kept by holding on to them.

use std::{collections::HashMap, sync::Arc};

use parking_lot::RwLock;

use crate::types::{ObjectId, TierKind};

use super::{
    arena::Arena,
    error::StoreError,
    object::{Object, ObjectMeta},
    tier::{Stored, Tier, Usage},
};

/// Objects in memory.
#[derive(Debug)]
pub struct RamTier {
    held: RwLock<Held>,
}

#[derive(Debug)]
struct Held {
    objects: HashMap<ObjectId, Object>,
    bytes: u64,
    budget: u64,
}

// === impl RamTier ===

impl RamTier {
    /// An empty tier that may hold `budget` bytes of the arena.
    #[must_use]
    pub fn new(budget: u64) -> Self {
        Self {
            held: RwLock::new(Held {
                objects: HashMap::new(),
                bytes: 0,
                budget,
            }),
        }
    }

    /// The object, if it is here; its bytes are shared, not copied.
    #[must_use]
    pub fn peek(&self, id: &ObjectId) -> Option<Object> {
        self.held.read().objects.get(id).cloned()
    }
}

impl Tier for RamTier {
    fn kind(&self) -> TierKind {
        TierKind::Ram
    }

    fn usage(&self) -> Usage {
        let held = self.held.read();
        Usage {
            bytes: held.bytes,
            objects: held.objects.len() as u64,
            budget: held.budget,
        }
    }

    fn set_budget(&self, bytes: u64) {
        self.held.write().budget = bytes;
    }

    fn contains(&self, id: &ObjectId) -> bool {
        self.held.read().objects.contains_key(id)
    }

    fn put(&self, object: &Object) -> Result<Stored, StoreError> {
        object.validate(None)?;
        let need = object.footprint();
        let mut held = self.held.write();
        if let Some(there) = held.objects.get(&object.meta.id) {
            return if there.meta.same_but_generation(&object.meta) {
                Ok(Stored::AlreadyThere)
            } else {
                Err(StoreError::Conflict {
                    what: format!("object {}", object.meta.id),
                })
            };
        }
        let free = held.budget.saturating_sub(held.bytes);
        if need > free {
            return Err(StoreError::NoSpace {
                tier: TierKind::Ram,
                need,
                free,
            });
        }
        held.bytes += need;
        held.objects.insert(object.meta.id, object.clone());
        Ok(Stored::Written { bytes: need })
    }

    fn get(&self, id: &ObjectId, _: &Arena) -> Result<Object, StoreError> {
        self.peek(id).ok_or(StoreError::NotFound { object: *id })
    }

    fn remove(&self, id: &ObjectId) -> Result<bool, StoreError> {
        let removed = {
            let mut held = self.held.write();
            let removed = held.objects.remove(id);
            if let Some(object) = &removed {
                held.bytes = held.bytes.saturating_sub(object.footprint());
            }
            removed
        };
        // The bytes go back to the arena here, after the lock.
        Ok(removed.is_some())
    }

    fn list(&self) -> Vec<Arc<ObjectMeta>> {
        let held = self.held.read();
        held.objects.values().map(|o| Arc::clone(&o.meta)).collect()
    }
}
