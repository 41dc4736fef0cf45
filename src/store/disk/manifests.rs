//! The manifests of all snapshots on disk.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::{Mutex, RwLock};

use crate::{
    store::{
        catalog::{
            self, Image, Known, Owner, PlacedTokens, Row, RowKv, RowObject, image, record::Stamp,
        },
        counters::Reason,
        error::StoreError,
        manifest::Manifest,
        sealed_json::Bad,
        tier::Tier,
    },
    types::{Fingerprint, Generation, ObjectId, SnapshotId},
    util::id_map::IdMap,
};

use super::{
    DiskTier,
    data_dir::DataDir,
    layout,
    ledger::on_disk,
    quarantine::Quarantined,
    root::{Kind, Rel},
};

/// Frames of no use that a catalog may always have.
const TIDY_ABOVE: u64 = 50_000;

/// Manifest files. Putting one is the commit point of its snapshot.
#[derive(Debug)]
pub struct Manifests {
    pub(super) dir: Arc<DataDir>,
    pub(super) tier: Arc<DiskTier>,
    pub(super) known: RwLock<Snapshots>,
    pub(super) scanned: AtomicBool,
    /// While a start takes snapshots in: folders that the catalog does not fully know yet. A time is
    /// written for none of them before all is in.
    filling: Mutex<Option<HashSet<Folder>>>,
}

/// A folder of manifests.
pub(super) type Folder = (Fingerprint, u8);

/// The snapshots on disk.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    pub(super) models: Vec<Fingerprint>,
    pub(super) all: IdMap<SnapshotId, Known>,
}

/// Says where the tokens of a snapshot stand: those beyond its parent's boundary if `true`, else all.
pub type Place<'a> = &'a mut dyn FnMut(bool) -> PlacedTokens;

/// What a start with a catalog found.
#[derive(Debug)]
pub struct Recalled {
    /// The catalog.
    pub image: Image,
    /// Snapshots that it does not have.
    pub more: Vec<Manifest>,
    /// Manifests that went to quarantine.
    pub bad: Vec<Quarantined>,
}

// === impl Snapshots ===

impl Snapshots {
    fn model(&mut self, fingerprint: &Fingerprint) -> u32 {
        let found = self.models.iter().position(|model| model == fingerprint);
        let number = found.unwrap_or_else(|| {
            self.models.push(*fingerprint);
            self.models.len() - 1
        });
        number as u32
    }

    fn fingerprint(&self, snapshot: &SnapshotId) -> Option<Fingerprint> {
        let known = self.all.get(snapshot)?;
        self.models.get(known.model as usize).copied()
    }

    pub(super) fn add(&mut self, manifest: &Manifest) {
        let model = self.model(&manifest.fingerprint);
        self.all.insert(manifest.snapshot, Known::only(model));
    }
}

// === impl Manifests ===

impl Manifests {
    pub(crate) fn new(dir: Arc<DataDir>, tier: Arc<DiskTier>) -> Self {
        Self {
            dir,
            tier,
            known: RwLock::default(),
            scanned: AtomicBool::new(false),
            filling: Mutex::new(Some(HashSet::new())),
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
        self.tier.find_objects()?;
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
                    self.known.write().add(&manifest);
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
        self.put_placed(manifest, &mut |_| PlacedTokens::default())
    }

    /// As [`Self::put`]; `place` says where the tokens stand, for the catalog.
    ///
    /// # Errors
    /// As those of [`Self::put`].
    pub fn put_placed(&self, manifest: &Manifest, place: Place<'_>) -> Result<(), StoreError> {
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
        let put = self.dir.put_record(&rel, manifest);
        if put.is_err() && self.dir.root.poisoned().is_some() {
            self.dir.catalog.give_up(&self.dir, "an fsync failed");
        }
        put?;
        self.catalogue(manifest, place);
        Ok(())
    }

    /// Writes the catalog's row of a snapshot whose manifest is there, in place of one before it.
    pub fn catalogue(&self, manifest: &Manifest, place: Place<'_>) {
        let row = self
            .dir
            .catalog
            .is_on()
            .then(|| self.row_of(manifest, place));
        let mut known = self.known.write();
        let model = known.model(&manifest.fingerprint);
        let mut entry = Known::only(model);
        if let Some(mut row) = row {
            let owner = Owner {
                fingerprint: manifest.fingerprint,
                namespace: manifest.namespace.clone(),
                shards: manifest.shards,
                model: manifest.labels.get("model").cloned().unwrap_or_default(),
            };
            if let Some(number) = self.dir.catalog.put(&self.dir, &owner, &mut row) {
                entry = Known {
                    model,
                    row: number,
                    kv: row.shared + row.kv.len() as u32,
                    digest: row.digest,
                };
            }
        }
        known.all.insert(manifest.snapshot, entry);
    }

    fn row_of(&self, manifest: &Manifest, place: Place<'_>) -> Row {
        let digests = catalog::digests(&manifest.kv);
        let parent = manifest.parent.and_then(|parent| {
            let parent = *self.known.read().all.get(&parent)?;
            let same = digests.get(parent.kv as usize) == Some(&parent.digest);
            (parent.row != u32::MAX && same).then_some(parent)
        });
        let tokens = place(parent.is_some());
        let object = |object: ObjectId, generation: Generation| RowObject {
            object,
            generation,
            bytes: self.tier.bytes_of(&object),
        };
        let shared = parent.map_or(0, |parent| parent.kv);
        let kv = manifest.kv.iter().skip(shared as usize).map(|part| RowKv {
            object: object(part.object, part.generation),
            range: part.range,
            object_range: part.object_range,
        });
        let rel = layout::manifest(&manifest.fingerprint, &manifest.snapshot);
        let manifest_bytes = match self.dir.root.stat(&rel) {
            Ok(Some((Kind::File, len))) => on_disk(len),
            _ => 0,
        };
        Row {
            snapshot: manifest.snapshot,
            owner: 0,
            created: manifest.created,
            generation: manifest.generation,
            boundary: manifest.boundary,
            manifest_bytes,
            base: parent.map(|parent| parent.row),
            shared,
            state: object(manifest.state.object, manifest.state.generation),
            kv: kv.collect(),
            from: tokens.from,
            runs: tokens.runs,
            digest: digests.last().copied().unwrap_or_default(),
            stamp: self.stamp_of((manifest.fingerprint, image::folder(&manifest.snapshot))),
        }
    }

    /// The time to write beside a change in a folder. One without a time is listed at the next start.
    pub(super) fn stamp_of(&self, folder: Folder) -> Stamp {
        if let Some(folders) = &mut *self.filling.lock() {
            folders.insert(folder);
            return Stamp::default();
        }
        self.time_of(folder)
    }

    fn time_of(&self, (fingerprint, number): Folder) -> Stamp {
        let rel = layout::manifests(&fingerprint).join(format!("{number:02x}"));
        // Where it cannot be looked at, it has none.
        let stamp = self.dir.root.stamp(&rel);
        stamp.ok().flatten().unwrap_or_default()
    }

    /// The start is over: every manifest has its row, and what changes from here on is written at
    /// once.
    pub fn taken_in(&self) {
        let folders = self.filling.lock().take();
        for folder in folders.into_iter().flatten() {
            let (fingerprint, number) = folder;
            let time = self.time_of(folder);
            self.dir
                .catalog
                .stamp(&self.dir, &fingerprint, number, time);
        }
    }

    /// The manifest of a snapshot.
    ///
    /// # Errors
    /// `NoSnapshot`; `Damaged`: it was moved to quarantine.
    pub fn get(&self, snapshot: &SnapshotId) -> Result<Manifest, StoreError> {
        let none = StoreError::NoSnapshot {
            snapshot: *snapshot,
        };
        let Some(fingerprint) = self.known.read().fingerprint(snapshot) else {
            return Err(none);
        };
        let rel = layout::manifest(&fingerprint, snapshot);
        match self.read(&rel, *snapshot) {
            Ok(Ok(manifest)) => Ok(manifest),
            Ok(Err(Bad { reason, detail, .. })) => {
                self.dir.quarantine(&rel, reason, &detail);
                self.forget(snapshot, &fingerprint);
                Err(StoreError::Damaged {
                    path: self.dir.root.path().join(rel.as_path()),
                    reason,
                    detail,
                    hint: "",
                })
            }
            Err(error) if error.is_missing() => {
                self.forget(snapshot, &fingerprint);
                Err(none)
            }
            Err(error) => Err(error),
        }
    }

    /// Removes a manifest for good; says whether it was there. Only then may its objects go.
    pub fn remove(&self, snapshot: &SnapshotId) -> Result<bool, StoreError> {
        let Some(fingerprint) = self.known.read().fingerprint(snapshot) else {
            return Ok(false);
        };
        let rel = layout::manifest(&fingerprint, snapshot);
        match self.dir.remove_durably(&rel) {
            Ok(there) => {
                self.forget(snapshot, &fingerprint);
                Ok(there)
            }
            Err(error) => {
                // It may be there at the next start, and its tokens may not.
                self.dir.catalog.doubt(&self.dir, *snapshot);
                Err(error)
            }
        }
    }

    fn forget(&self, snapshot: &SnapshotId, fingerprint: &Fingerprint) {
        self.known.write().all.swap_remove(snapshot);
        let stamp = self.stamp_of((*fingerprint, image::folder(snapshot)));
        self.dir.catalog.dropped(&self.dir, *snapshot, stamp);
    }

    /// Writes the catalog anew if much of it is of no use any more.
    pub fn tidy(&self) {
        let known = self.known.read();
        let (frames, live) = (self.dir.catalog.frames(), known.all.len() as u64);
        if frames <= live.saturating_mul(2).max(live + TIDY_ABOVE) {
            return;
        }
        drop(known);
        if let Err(error) = self.compact() {
            tracing::warn!(%error, "The catalog could not be written anew; it goes on as it is");
        }
    }

    /// Writes the catalog anew, without what is of no use any more.
    ///
    /// # Errors
    /// Those of the system; it is as it was then.
    pub fn compact(&self) -> Result<(), StoreError> {
        let mut known = self.known.write();
        self.dir.catalog.compact(&self.dir, &mut known.all)
    }

    /// Number of manifests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.known.read().all.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads a manifest and checks that it is where it belongs.
    pub(super) fn read(
        &self,
        rel: &Rel,
        snapshot: SnapshotId,
    ) -> Result<Result<Manifest, Bad>, StoreError> {
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
