//! The manifests of all snapshots on disk.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::RwLock;

use crate::{
    store::{
        counters::Reason, error::StoreError, manifest::Manifest, sealed_json::Bad, tier::Tier,
    },
    types::{Fingerprint, SnapshotId},
};

use super::{
    DiskTier,
    data_dir::DataDir,
    layout,
    quarantine::Quarantined,
    root::{Kind, Rel},
};

/// Manifest files. Putting one is the commit point of its snapshot.
#[derive(Debug)]
pub struct Manifests {
    dir: Arc<DataDir>,
    tier: Arc<DiskTier>,
    models: RwLock<HashMap<SnapshotId, Fingerprint>>,
    scanned: AtomicBool,
}

// === impl Manifests ===

impl Manifests {
    pub(crate) fn new(dir: Arc<DataDir>, tier: Arc<DiskTier>) -> Self {
        Self {
            dir,
            tier,
            models: RwLock::default(),
            scanned: AtomicBool::new(false),
        }
    }

    /// Reads all manifests, once, at the start; from then on the store takes writes. Each whole one
    /// whose objects are there comes as `Ok`; any other is moved to quarantine and comes as `Err`.
    /// Object files that no manifest names are removed.
    ///
    /// # Errors
    /// `Invalid` the second time. Those of the system (a folder that cannot be listed): nothing was
    /// removed, and nothing may be written.
    pub fn scan(&self, f: &mut dyn FnMut(Result<Manifest, Quarantined>)) -> Result<(), StoreError> {
        if self.scanned.swap(true, Ordering::AcqRel) {
            return Err(StoreError::invalid("second scan of the manifests"));
        }
        let models: HashMap<Rel, Fingerprint> = self
            .tier
            .models()
            .into_iter()
            .map(|fingerprint| (layout::model_folder(&fingerprint), fingerprint))
            .collect();
        let mut sweep = Vec::new();
        for entry in self.dir.root.list(&layout::models())? {
            if entry.kind != Kind::Folder || !layout::is_model(&entry.name) {
                continue;
            }
            let folder = layout::models().join(&entry.name);
            match models.get(&folder) {
                Some(fingerprint) => {
                    if self.scan_model(&folder, f)? {
                        sweep.push(*fingerprint);
                    }
                }
                // Without its description nothing of it is touched, only counted.
                None => {
                    let manifests = folder.join(layout::MANIFESTS);
                    self.dir.sweep_spread(&manifests, 1, &mut |_, _| true)?;
                }
            }
        }
        for fingerprint in sweep {
            self.tier.sweep_orphans(&fingerprint);
        }
        self.tier.finish_scan();
        Ok(())
    }

    /// Says whether every manifest of the model was understood, so that what none of them names is
    /// nobody's.
    fn scan_model(
        &self,
        folder: &Rel,
        f: &mut dyn FnMut(Result<Manifest, Quarantined>),
    ) -> Result<bool, StoreError> {
        let mut understood = true;
        let mut failed = None;
        let manifests = folder.join(layout::MANIFESTS);
        self.dir.sweep_spread(&manifests, 1, &mut |rel, _| {
            let Some(snapshot) = layout::parse_manifest(rel.name()) else {
                return false;
            };
            if failed.is_some() {
                return true;
            }
            let read = self.read(rel, snapshot).map(|read| {
                read.and_then(|manifest| self.tier.adopt(&manifest).map(|()| manifest))
            });
            match read {
                Err(error) => failed = Some(error),
                Ok(Ok(manifest)) => {
                    let mut models = self.models.write();
                    models.insert(snapshot, manifest.fingerprint);
                    drop(models);
                    f(Ok(manifest));
                }
                Ok(Err(Bad { reason, detail, .. })) => {
                    // Not damaged, but of another program, or hidden by the medium: what it names
                    // may still be wanted.
                    understood &= !matches!(
                        reason,
                        Reason::Version | Reason::UnknownField | Reason::Unreadable
                    );
                    f(Err(self.dir.quarantine(rel, reason, &detail)));
                }
            }
            true
        })?;
        match failed {
            Some(error) => Err(error),
            None => Ok(understood),
        }
    }

    /// Makes a snapshot durable. All its objects must be on disk.
    ///
    /// # Errors
    /// `NotFound` if an object is not there; `Invalid`; those of writing. After an error the snapshot
    /// may still be found at the next start (whole), if only the last fsync failed.
    pub fn put(&self, manifest: &Manifest) -> Result<(), StoreError> {
        if !self.scanned.load(Ordering::Acquire) {
            return Err(StoreError::NotScanned);
        }
        let objects = manifest.kv.iter().map(|kv| kv.object);
        for object in objects.chain([manifest.state.object]) {
            if !self.tier.contains(&object) {
                return Err(StoreError::NotFound { object });
            }
        }
        let rel = layout::manifest(&manifest.fingerprint, &manifest.snapshot);
        self.dir.put_record(&rel, manifest)?;
        let mut models = self.models.write();
        models.insert(manifest.snapshot, manifest.fingerprint);
        Ok(())
    }

    /// The manifest of a snapshot.
    ///
    /// # Errors
    /// `NoSnapshot`; `Damaged`: it was moved to quarantine.
    pub fn get(&self, snapshot: &SnapshotId) -> Result<Manifest, StoreError> {
        let none = StoreError::NoSnapshot {
            snapshot: *snapshot,
        };
        let Some(fingerprint) = self.models.read().get(snapshot).copied() else {
            return Err(none);
        };
        let rel = layout::manifest(&fingerprint, snapshot);
        match self.read(&rel, *snapshot) {
            Ok(Ok(manifest)) => Ok(manifest),
            Ok(Err(Bad { reason, detail, .. })) => {
                self.dir.quarantine(&rel, reason, &detail);
                self.models.write().remove(snapshot);
                Err(StoreError::Damaged {
                    path: self.dir.root.path().join(rel.as_path()),
                    reason,
                    detail,
                    hint: "",
                })
            }
            Err(error) if error.is_missing() => {
                self.models.write().remove(snapshot);
                Err(none)
            }
            Err(error) => Err(error),
        }
    }

    /// Removes a manifest for good; says whether it was there. Only then may its objects go.
    pub fn remove(&self, snapshot: &SnapshotId) -> Result<bool, StoreError> {
        let Some(fingerprint) = self.models.read().get(snapshot).copied() else {
            return Ok(false);
        };
        let there = self
            .dir
            .remove_durably(&layout::manifest(&fingerprint, snapshot))?;
        self.models.write().remove(snapshot);
        Ok(there)
    }

    /// Number of manifests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.models.read().len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads a manifest and checks that it is where it belongs.
    fn read(&self, rel: &Rel, snapshot: SnapshotId) -> Result<Result<Manifest, Bad>, StoreError> {
        let read = self.dir.get_record::<Manifest>(rel)?;
        Ok(read.and_then(|manifest| {
            let place = layout::manifest(&manifest.fingerprint, &manifest.snapshot);
            if manifest.snapshot == snapshot && place == *rel {
                Ok(manifest)
            } else {
                Err(Bad::new(Reason::Mismatch, "it belongs to another place"))
            }
        }))
    }
}
