//! What an earlier process left: models, object files by name and length, and which of them
//! manifests name. No payload is read.

use std::{collections::HashMap, sync::Arc, sync::atomic::Ordering};

use crate::{
    store::{
        counters::Reason, error::StoreError, manifest::Manifest, object::ObjectMeta,
        sealed_json::Bad,
    },
    types::{Fingerprint, ObjectId},
};

use super::{
    DiskTier, layout,
    ledger::on_disk,
    model::ModelFile,
    object_file::{ALIGN, Facts, MAX_HEADER, Plan, data_len, encode_header},
    root::{Kind, Rel, is_temporary},
};

/// Object files: shard and length of each.
pub(crate) type FoundFiles = HashMap<ObjectId, Vec<(u32, u64)>>;

/// What all files of an object take.
pub(crate) fn bytes_on_disk(meta: &ObjectMeta, plan: &Plan) -> u64 {
    let facts = Facts {
        generation: meta.generation,
        tokens_crc: 0,
        checksums: vec![0; plan.chunks() as usize],
    };
    let shards = 0..meta.shards;
    let headers = shards.map(|shard| encode_header(meta, plan, shard, &facts).len() as u64);
    headers.fold(0, |sum: u64, header| {
        sum.saturating_add(on_disk(header.saturating_add(plan.data_len)))
    })
}

impl DiskTier {
    /// Reads the models' descriptions and lists their files.
    pub(super) fn find_models(&self) -> Result<(), StoreError> {
        let models = layout::models();
        for entry in self.dir.root.list(&models)? {
            let folder = models.join(&entry.name);
            match entry.kind {
                Kind::Folder if layout::is_model(&entry.name) => {
                    self.dir.root.saw_folders(1);
                    self.find_model(&folder)?;
                }
                Kind::Other => {
                    self.dir
                        .quarantine(&folder, Reason::NotAFile, "neither file nor folder");
                }
                Kind::File if is_temporary(&entry.name) => {
                    self.dir.counters().swept();
                    self.dir.root.discard(&folder);
                }
                Kind::Folder => self.dir.strange(&folder),
                Kind::File => {
                    self.dir.ledger.add(on_disk(entry.len));
                    self.dir.strange(&folder);
                }
            }
        }
        Ok(())
    }

    fn find_model(&self, folder: &Rel) -> Result<(), StoreError> {
        for entry in self.dir.root.list(folder)? {
            let rel = folder.join(&entry.name);
            match entry.kind {
                Kind::Folder if entry.name == layout::OBJECTS => self.dir.root.saw_folders(1),
                Kind::Folder if entry.name == layout::MANIFESTS => self.dir.root.saw_folders(1),
                Kind::File if is_temporary(&entry.name) => {
                    self.dir.counters().swept();
                    self.dir.root.discard(&rel);
                }
                Kind::File => {
                    self.dir.ledger.add(on_disk(entry.len));
                    if entry.name != layout::MODEL {
                        self.dir.strange(&rel);
                    }
                }
                Kind::Other => {
                    self.dir
                        .quarantine(&rel, Reason::NotAFile, "neither file nor folder");
                }
                Kind::Folder => self.dir.strange(&rel),
            }
        }
        let model = self.read_model(folder)?;
        let known = model.as_ref().map(|model| model.fingerprint);
        self.folders.lock().push((folder.clone(), known));
        if let Some(ModelFile {
            fingerprint,
            geometry,
            ..
        }) = model
        {
            self.models.write().insert(fingerprint, Arc::new(geometry));
        }
        Ok(())
    }

    /// Lists the object files of all models.
    pub(crate) fn find_objects(&self) -> Result<(), StoreError> {
        for (folder, model) in self.model_folders() {
            self.find_files(&folder, model)?;
        }
        Ok(())
    }

    /// The folders of models, and those of them whose description is good.
    pub(crate) fn model_folders(&self) -> Vec<(Rel, Option<Fingerprint>)> {
        self.folders.lock().clone()
    }

    /// Lists the object files of a model.
    pub(crate) fn find_files(
        &self,
        folder: &Rel,
        model: Option<Fingerprint>,
    ) -> Result<(), StoreError> {
        let mut files = FoundFiles::new();
        let objects = folder.join(layout::OBJECTS);
        self.dir.sweep_spread(&objects, 2, &mut |rel, len| {
            let Some((id, shard)) = layout::parse_object(rel.name()) else {
                return false;
            };
            files.entry(id).or_default().push((shard, len));
            true
        })?;
        if let Some(fingerprint) = model {
            self.found.lock().insert(fingerprint, files);
        }
        Ok(())
    }

    /// The model's description; without a good one its files are left as they are.
    fn read_model(&self, folder: &Rel) -> Result<Option<ModelFile>, StoreError> {
        let rel = folder.join(layout::MODEL);
        let bad = match self.dir.get_record::<ModelFile>(&rel) {
            Ok(Ok(model)) if layout::model_folder(&model.fingerprint) == *folder => {
                return Ok(Some(model));
            }
            Ok(Ok(_)) => Some(Bad::new(Reason::Mismatch, "another model's description")),
            Ok(Err(bad)) => Some(bad),
            Err(error) if error.is_missing() => None,
            Err(error) => return Err(error),
        };
        if let Some(Bad { reason, detail, .. }) = bad {
            self.dir.quarantine(&rel, reason, &detail);
        }
        self.dir.counters().unreadable_model();
        tracing::warn!(
            folder = %folder.as_path().display(),
            "A model without a description: its files are left alone until it attaches again"
        );
        Ok(None)
    }

    /// Takes over the objects of a manifest, if all their files are there.
    pub(crate) fn adopt(&self, manifest: &Manifest) -> Result<(), Bad> {
        let incomplete = |detail: String| Bad::new(Reason::Incomplete, detail);
        let fingerprint = manifest.fingerprint;
        let geometry = self
            .geometry(&fingerprint)
            .ok_or_else(|| incomplete("its model is not known".into()))?;
        let mut found = self.found.lock();
        let files = found.entry(fingerprint).or_default();
        let mut ready = Vec::new();
        for meta in manifest.objects(&geometry) {
            let id = meta.id;
            meta.validate(Some(&geometry))
                .map_err(|error| Bad::new(Reason::Invalid, error.to_string()))?;
            if let Some((here, whose)) = self.objects.get(&id) {
                let known = super::objects::meta(&id, &here, &whose, &geometry);
                if !known.same_but_generation(&meta) {
                    let detail = format!("object {id} is another one than it says");
                    return Err(Bad::new(Reason::Mismatch, detail));
                }
                ready.push((meta, here.bytes));
                continue;
            }
            let there = files.get(&id).map(Vec::as_slice).unwrap_or_default();
            let missing = (0..meta.shards).find(|shard| !there.iter().any(|(s, _)| s == shard));
            if let Some(shard) = missing {
                return Err(incomplete(format!("object {id} lacks shard {shard}")));
            }
            let bad_length = there
                .iter()
                .find(|(shard, len)| *shard < meta.shards && !plausible(&meta, *len));
            if let Some(&(shard, len)) = bad_length {
                let detail = format!("shard {shard}: {len} bytes");
                for (shard, _) in files.remove(&id).unwrap_or_default() {
                    let rel = layout::object(&fingerprint, &id, shard);
                    self.dir.quarantine(&rel, Reason::Length, &detail);
                }
                return Err(incomplete(format!("object {id}, {detail}")));
            }
            let own = there.iter().filter(|(shard, _)| *shard < meta.shards);
            let bytes = own.map(|(_, len)| on_disk(*len)).sum();
            ready.push((meta, bytes));
        }
        for (meta, bytes) in ready {
            if let Some(there) = files.get_mut(&meta.id) {
                // A shard too many is nobody's: it stays for the sweep.
                there.retain(|(shard, _)| *shard >= meta.shards);
            }
            let known = self.objects.get(&meta.id);
            if known.is_none_or(|(here, _)| here.generation < meta.generation) {
                self.objects.insert(&meta, bytes);
            }
        }
        Ok(())
    }

    /// Removes the object files of a model that no manifest named.
    pub(crate) fn sweep_orphans(&self, fingerprint: &Fingerprint) {
        let orphans = self.found.lock().remove(fingerprint).unwrap_or_default();
        for (id, files) in orphans {
            for (shard, len) in files {
                let rel = layout::object(fingerprint, &id, shard);
                match self.dir.root.unlink(&rel) {
                    Ok(_) => {
                        self.dir.counters().orphan(len);
                        self.dir.ledger.sub(on_disk(len));
                        self.dir.prune(&layout::object_folder(fingerprint, &id), 2);
                    }
                    Err(error) => tracing::warn!(%error, "Orphan could not be removed"),
                }
            }
        }
    }

    /// From here on objects may be written.
    pub(crate) fn finish_scan(&self) {
        self.found.lock().clear();
        self.scanned.store(true, Ordering::Release);
    }
}

/// Whether a file may be this long; the exact length of its header is seen when it is read.
pub(crate) fn plausible(meta: &ObjectMeta, len: u64) -> bool {
    let header = len.saturating_sub(data_len(meta));
    (ALIGN..=MAX_HEADER).contains(&header) && header.is_multiple_of(ALIGN)
}
