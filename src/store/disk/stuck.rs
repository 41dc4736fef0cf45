//! Files of removed objects that the system does not let go: an immutable file, a folder that became
//! read-only. Their bytes stay counted, and they are tried again.

use crate::store::error::StoreError;

use super::{DiskTier, layout, ledger::on_disk, root::Kind};

impl DiskTier {
    /// Tries once more to remove what could not be removed.
    ///
    /// # Errors
    /// Of the last file that still cannot.
    pub fn remove_stuck(&self) -> Result<(), StoreError> {
        let mut last = Ok(());
        let stuck = std::mem::take(&mut *self.stuck.lock());
        for (fingerprint, id, shard) in stuck {
            let _claim = self.claims.claim(id);
            if self.objects.contains(&id) {
                // It was written again.
                continue;
            }
            let rel = layout::object(&fingerprint, &id, shard);
            let len = match self.dir.root.stat(&rel) {
                Ok(Some((Kind::File, len))) => on_disk(len),
                _ => 0,
            };
            match self.dir.root.unlink(&rel) {
                Ok(_) => {
                    self.dir.ledger.sub(len);
                    self.dir.prune(&layout::object_folder(&fingerprint, &id), 2);
                }
                Err(error) => {
                    self.stuck.lock().push((fingerprint, id, shard));
                    last = Err(error);
                }
            }
        }
        last
    }
}
