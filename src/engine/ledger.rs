//! Who has each id of a pool: nobody (free), the cache, or a holder (a request, a restore).

use std::collections::HashSet;

use crate::engine::ids::PoolId;
use crate::engine::pools::FreeList;

/// Where the ids of one pool are. `free + cached + held == total`, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Account {
    /// Ids of the pool.
    pub total: usize,
    /// Free ones.
    pub free: usize,
    /// Those of the cache.
    pub cached: usize,
    /// Those of requests and restores.
    pub held: usize,
}

/// The ids of one pool and their owners.
#[derive(Debug)]
pub struct Ledger<I> {
    free: FreeList<I>,
    owners: Vec<Owner>,
    account: Account,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Free,
    Cached,
    Held,
}

// === impl Ledger ===

impl<I: PoolId + std::hash::Hash> Ledger<I> {
    /// `capacity` ids, all free, handed out in an order that `seed` scrambles.
    pub fn new(capacity: u32, seed: u64) -> Self {
        let total = capacity as usize;
        Self {
            free: FreeList::new(capacity, seed),
            owners: vec![Owner::Free; total + 1],
            account: Account {
                total,
                free: total,
                cached: 0,
                held: 0,
            },
        }
    }

    /// Where the ids are.
    pub fn account(&self) -> Account {
        self.account
    }

    /// Takes a free id; it is held then.
    pub fn take(&mut self) -> Option<I> {
        let id = self.free.alloc()?;
        self.pass(id, Owner::Free, Owner::Held);
        Some(id)
    }

    /// A held id becomes free.
    pub fn release(&mut self, id: I) {
        self.pass(id, Owner::Held, Owner::Free);
        self.free.free(id);
    }

    /// A held id becomes the cache's.
    pub fn give_to_cache(&mut self, id: I) {
        self.pass(id, Owner::Held, Owner::Cached);
    }

    /// An id of the cache becomes held.
    pub fn take_from_cache(&mut self, id: I) {
        self.pass(id, Owner::Cached, Owner::Held);
    }

    /// Compares with what the cache and the holders say they have.
    ///
    /// # Errors
    ///
    /// What does not fit, in words.
    pub fn sanity_check(&self, cached: &[I], held: &[I]) -> Result<(), String> {
        let Account {
            total,
            free,
            cached: in_cache,
            held: in_hand,
        } = self.account;
        if free + in_cache + in_hand != total || self.free.len() != free {
            return Err(format!("the account does not add up: {:?}", self.account));
        }
        for (ids, owner, count) in [
            (cached, Owner::Cached, in_cache),
            (held, Owner::Held, in_hand),
        ] {
            let unique: HashSet<I> = ids.iter().copied().collect();
            if unique.len() != ids.len() || ids.len() != count {
                return Err(format!(
                    "{} ids are {owner:?}, the account says {count}",
                    ids.len()
                ));
            }
            if let Some(id) = ids.iter().find(|id| self.owner(**id) != Some(owner)) {
                return Err(format!("{id:?} is {:?}, not {owner:?}", self.owner(*id)));
            }
        }
        Ok(())
    }

    fn owner(&self, id: I) -> Option<Owner> {
        self.owners
            .get(id.index())
            .copied()
            .filter(|_| id.raw() != 0)
    }

    /// # Panics
    ///
    /// If the id is not where the caller says: the accounting would be lost.
    fn pass(&mut self, id: I, from: Owner, to: Owner) {
        let owner = self
            .owners
            .get_mut(id.index())
            .expect("an id is one of this pool");
        assert_eq!(*owner, from, "{id:?} changes hands from where it is");
        *owner = to;
        *self.count(from) -= 1;
        *self.count(to) += 1;
    }

    fn count(&mut self, owner: Owner) -> &mut usize {
        match owner {
            Owner::Free => &mut self.account.free,
            Owner::Cached => &mut self.account.cached,
            Owner::Held => &mut self.account.held,
        }
    }
}
