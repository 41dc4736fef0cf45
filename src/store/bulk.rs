//! Large stores for benchmarks: the same files as a daemon writes, without an fsync for each.

use std::{fs, sync::Arc};

use crate::pool::Geometry;
use crate::types::TokenId;

use super::{
    Manifest, ObjectMeta, Place, Store, StoreError,
    disk::{
        layout,
        object_file::{CHUNK, Facts, Plan, crc32c, encode_header, token_bytes},
        root::Rel,
        scan::bytes_on_disk,
    },
    fault::Op,
    refs::ConversationRef,
    sealed_json::{self, Record},
};

// === impl Store ===

impl Store {
    /// Puts a row there, as if its objects had been written, and its manifest if that is to be a file.
    /// No object file is made. A start without a look at the folder does not miss the others.
    ///
    /// # Errors
    /// Those of the system; `Invalid`.
    pub fn plant(
        &self,
        manifest: &Manifest,
        file: bool,
        place: Place<'_>,
    ) -> Result<(), StoreError> {
        let missing = || StoreError::invalid("no disk tier, or its model is not known".to_owned());
        let disk = self.disk.as_ref().ok_or_else(missing)?;
        let manifests = self.manifests.as_ref().ok_or_else(missing)?;
        let geometry: Arc<Geometry> = disk.geometry(&manifest.fingerprint).ok_or_else(missing)?;
        for meta in manifest.objects(&geometry) {
            let plan = Plan::of(&meta, &geometry);
            disk.plant(&meta, bytes_on_disk(&meta, &plan));
        }
        let rel = layout::manifest(&manifest.fingerprint, &manifest.snapshot);
        if file {
            self.plant_record(&rel, manifest)?;
        }
        manifests.catalogue(manifest, place);
        Ok(())
    }

    /// Puts the file of an object of one shard there, with these tokens if it has some; all of its
    /// other bytes are zero.
    ///
    /// # Errors
    /// As those of [`Store::plant`].
    pub fn plant_object(&self, meta: &ObjectMeta, tokens: &[TokenId]) -> Result<(), StoreError> {
        let missing = || StoreError::invalid("no disk tier, or its model is not known".to_owned());
        let disk = self.disk.as_ref().ok_or_else(missing)?;
        let geometry = disk.geometry(&meta.fingerprint).ok_or_else(missing)?;
        let plan = Plan::of(meta, &geometry);
        let mut data = token_bytes(tokens);
        data.resize(plan.data_len as usize, 0);
        let tokens = data.get(..plan.token_bytes() as usize);
        let facts = Facts {
            generation: meta.generation,
            tokens_crc: crc32c(tokens.unwrap_or_default()),
            checksums: data.chunks(CHUNK as usize).map(crc32c).collect(),
        };
        let mut bytes = encode_header(meta, &plan, 0, &facts);
        bytes.extend_from_slice(&data);
        self.plant_file(&layout::object(&meta.fingerprint, &meta.id, 0), &bytes)
    }

    /// Puts the file of a conversation there.
    ///
    /// # Errors
    /// As those of [`Store::plant`].
    pub fn plant_conversation(&self, conversation: &ConversationRef) -> Result<(), StoreError> {
        self.plant_record(&layout::conversation(&conversation.key()), conversation)
    }

    fn plant_record<T: Record>(&self, rel: &Rel, record: &T) -> Result<(), StoreError> {
        let bytes = sealed_json::encode(record).map_err(|bad| StoreError::invalid(bad.detail))?;
        self.plant_file(rel, &bytes)
    }

    fn plant_file(&self, rel: &Rel, bytes: &[u8]) -> Result<(), StoreError> {
        let dir = self.dir.as_ref().ok_or(StoreError::NotScanned)?;
        dir.root.make_folders(&rel.parent())?;
        let path = dir.root.path().join(rel.as_path());
        fs::write(&path, bytes).map_err(|error| StoreError::io(Op::Write, path, error))
    }
}
