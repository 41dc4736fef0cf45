//! A place where objects are kept. No policy: who has to go is said from above.

use std::sync::Arc;

use crate::types::{ObjectId, TierKind};

use super::{
    arena::Arena,
    error::StoreError,
    object::{Object, ObjectMeta},
};

/// How full a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes held, everything counted: payload, headers, rounding, small files.
    pub bytes: u64,
    /// Objects held.
    pub objects: u64,
    /// Bytes that may be held.
    pub budget: u64,
}

/// What a put did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The object is new here.
    Written {
        /// Bytes that it takes.
        bytes: u64,
    },
    /// The object was here; nothing was written.
    AlreadyThere,
}

/// A tier. All calls block; none is made on a thread that must not wait.
pub trait Tier: Send + Sync {
    /// Which tier this is.
    fn kind(&self) -> TierKind;

    /// How full it is.
    fn usage(&self) -> Usage;

    /// Changes the budget. What is there stays, even if it is more.
    fn set_budget(&self, bytes: u64);

    /// Whether the object is here.
    fn contains(&self, id: &ObjectId) -> bool;

    /// Keeps an object. Idempotent: an object that is here is not written again.
    ///
    /// # Errors
    /// `NoSpace`, `Floor`, `DiskFull`: nothing was kept. `Conflict`: another object has this id.
    fn put(&self, object: &Object) -> Result<Stored, StoreError>;

    /// The object, with its bytes in `arena` and verified.
    ///
    /// # Errors
    /// `NotFound`; `ArenaFull`; `Corrupt` and `Lost`: the object is gone from this tier.
    fn get(&self, id: &ObjectId, arena: &Arena) -> Result<Object, StoreError>;

    /// Forgets an object; says whether it was here.
    ///
    /// # Errors
    /// Those of the system. The object is not here any more in any case.
    fn remove(&self, id: &ObjectId) -> Result<bool, StoreError>;

    /// All objects here, in no order.
    fn list(&self) -> Vec<Arc<ObjectMeta>>;
}
