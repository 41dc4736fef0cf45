//! One writer at a time for each object, without a lock over all.

use std::collections::HashSet;

use parking_lot::{Condvar, Mutex};

use crate::types::ObjectId;

/// Objects that somebody is writing or removing.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    held: Mutex<HashSet<ObjectId>>,
    freed: Condvar,
}

/// The sole right to change the files of an object.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    claims: &'a Claims,
    id: ObjectId,
}

impl Claims {
    /// Waits until nobody else has the object.
    pub(crate) fn claim(&self, id: ObjectId) -> Claim<'_> {
        let mut held = self.held.lock();
        while !held.insert(id) {
            self.freed.wait(&mut held);
        }
        Claim { claims: self, id }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.claims.held.lock().remove(&self.id);
        self.claims.freed.notify_all();
    }
}
