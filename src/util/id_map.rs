//! Maps by ids that are spread already: digests and UUIDs. What they hold lies close together, so that
//! millions take no more memory than they need, and the table that finds it is small.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::OnceLock,
};

use indexmap::IndexMap;

/// A map by an id whose bytes are as good as random, or by such an id and a little more.
pub type IdMap<K, V> = IndexMap<K, V, IdHash>;

/// Takes the first and the last eight bytes of an id, and a number of this process.
#[derive(Clone, Copy, Debug)]
pub struct IdHash(u64);

/// The hash so far.
#[derive(Clone, Copy, Debug)]
pub struct IdHasher(u64);

// === impl IdHash ===

impl Default for IdHash {
    fn default() -> Self {
        static SEED: OnceLock<u64> = OnceLock::new();
        Self(*SEED.get_or_init(|| RandomState::new().hash_one(0)))
    }
}

impl BuildHasher for IdHash {
    type Hasher = IdHasher;

    fn build_hasher(&self) -> IdHasher {
        IdHasher(self.0)
    }
}

// === impl IdHasher ===

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        let first = bytes.first_chunk::<8>();
        let last = bytes.last_chunk::<8>();
        if let (Some(first), Some(last)) = (first, last) {
            let word = u64::from_le_bytes(*first) ^ u64::from_le_bytes(*last).rotate_left(32);
            self.write_u64(word);
        } else {
            bytes
                .iter()
                .for_each(|byte| self.write_u64(u64::from(*byte)));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0 ^ word)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29);
    }

    fn write_usize(&mut self, _: usize) {
        // The length of an id says nothing.
    }

    fn finish(&self) -> u64 {
        let number = self.0;
        (number ^ (number >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ObjectId, SnapshotId};

    #[test]
    fn every_id_is_found() {
        let mut map: IdMap<ObjectId, u32> = IdMap::default();
        for n in 0..10_000_u32 {
            map.insert(ObjectId(*blake3::hash(&n.to_le_bytes()).as_bytes()), n);
        }
        assert_eq!(map.len(), 10_000);
        let id = ObjectId(*blake3::hash(&77_u32.to_le_bytes()).as_bytes());
        assert_eq!(map.get(&id), Some(&77));
        let ids: Vec<SnapshotId> = (0..1000).map(|_| SnapshotId::new()).collect();
        let hash = IdHash::default();
        let mut hashes: Vec<u64> = ids.iter().map(|id| hash.hash_one(id)).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 1000);
    }
}
