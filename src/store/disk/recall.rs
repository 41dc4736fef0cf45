//! A start with a catalog: what it says is compared with the folders of manifests, and only what
//! differs is read.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;

use crate::{
    store::{
        catalog::{
            Image, Row, RowKv, RowObject,
            image::{Stale, folder},
            record::Stamp,
        },
        counters::Reason,
        error::StoreError,
        manifest::Manifest,
        sealed_json::Bad,
    },
    types::{Fingerprint, ObjectKind, SnapshotId, TokenRange},
};

use super::{
    DiskTier, layout,
    ledger::on_disk,
    manifests::{Folder, Manifests, Recalled},
    objects::Whose,
    quarantine::Quarantined,
    root::{Kind, Rel},
};

/// Seconds before the last change of a folder in which another may have left the same time.
const UNSURE: i64 = 2;

/// What was found in the folders that were listed.
#[derive(Default)]
struct Listed {
    /// Snapshots without a row, and their models.
    more: Vec<(SnapshotId, Fingerprint)>,
}

/// Folders in which objects are spread.
#[derive(Default)]
pub(super) struct Spread {
    upper: HashSet<(Fingerprint, u8)>,
    lower: HashSet<(Fingerprint, u8, u8)>,
}

// === impl Manifests ===

impl Manifests {
    /// Reads the catalog instead of the manifests, once, at the start. `Err`: it is not to be used,
    /// and [`Manifests::scan`] may be. Fewer than `at_least` snapshots are not worth it. Object files
    /// are not looked at; [`Manifests::take_objects`] must follow before anything is read or written.
    ///
    /// # Errors
    /// As those of [`Manifests::scan`].
    pub fn recall(&self, at_least: usize) -> Result<Result<Recalled, Stale>, StoreError> {
        let mut image = match Image::read(&self.dir)? {
            Ok(image) => image,
            Err(stale) => return Ok(Err(stale)),
        };
        if image.snapshots() < at_least {
            return Ok(Err(Stale::Small));
        }
        let known: HashSet<Fingerprint> = self.tier.models().into_iter().collect();
        if image.models().iter().any(|model| !known.contains(model)) {
            // A folder is missing, or its description: this needs a closer look.
            return Ok(Err(Stale::Foreign));
        }
        if self.scanned.swap(true, Ordering::AcqRel) {
            return Err(StoreError::invalid("second scan of the manifests"));
        }
        let mut listed = Listed::default();
        self.compare(&mut image, &mut listed)?;
        let (mut more, mut bad) = (Vec::new(), Vec::new());
        for (snapshot, fingerprint) in listed.more {
            let rel = layout::manifest(&fingerprint, &snapshot);
            match self.read(&rel, snapshot)? {
                Ok(manifest) => more.push(manifest),
                Err(Bad { reason, detail, .. }) => {
                    bad.push(self.dir.quarantine(&rel, reason, &detail));
                }
            }
        }
        Ok(Ok(Recalled { image, more, bad }))
    }

    /// Fills the table of objects from what [`Manifests::recall`] gave, counts what is on disk and
    /// removes what no snapshot names. Of `more`, those stay whose objects are there.
    ///
    /// # Errors
    /// Those of the system.
    pub fn take_objects(
        &self,
        image: &Image,
        more: &mut Vec<Manifest>,
        bad: &mut Vec<Quarantined>,
    ) -> Result<(), StoreError> {
        let mut spread = self.tier.take_rows(image);
        let mut good = Vec::new();
        for manifest in std::mem::take(more) {
            self.tier.look_for(&manifest, &mut spread)?;
            match self.tier.adopt(&manifest) {
                Ok(()) => good.push(manifest),
                Err(Bad { reason, detail, .. }) => {
                    let rel = layout::manifest(&manifest.fingerprint, &manifest.snapshot);
                    bad.push(self.dir.quarantine(&rel, reason, &detail));
                }
            }
        }
        *more = good;
        self.tier.sweep_unnamed(image, &mut spread)
    }

    /// From here on snapshots are read and written, and the catalog is gone on with. Gives the
    /// snapshots that it does not have.
    pub fn finish(&self, mut recalled: Recalled) -> Vec<Manifest> {
        let mut known = self.known.write();
        (known.models, known.all) = recalled.image.take_known();
        for manifest in &recalled.more {
            known.add(manifest);
        }
        drop(known);
        if let Err(error) = self.dir.catalog.resume(&self.dir, &recalled.image) {
            tracing::warn!(%error, "The catalog cannot be gone on with");
            self.dir.catalog.spoil(&self.dir);
        }
        for (fingerprint, snapshot) in &recalled.image.vanished {
            let stamp = self.stamp_of((*fingerprint, folder(snapshot)));
            self.dir.catalog.dropped(&self.dir, *snapshot, stamp);
        }
        self.tier.finish_scan();
        recalled.more
    }

    /// Lists the folders whose time is not the one in the catalog, or says too little.
    fn compare(&self, image: &mut Image, listed: &mut Listed) -> Result<(), StoreError> {
        let last = image.stamps.values().map(|(seconds, _)| *seconds).max();
        let sure = last.unwrap_or(i64::MIN).saturating_sub(UNSURE);
        let mut same: HashSet<Folder> = HashSet::new();
        let mut look: HashSet<Folder> = HashSet::new();
        for (model, fingerprint) in self.tier.model_folders() {
            let manifests = model.join(layout::MANIFESTS);
            let Some(fingerprint) = fingerprint else {
                // Without its description nothing of it is touched, only counted.
                self.tier.find_files(&model, None)?;
                self.dir.sweep_spread(&manifests, 1, &mut |_, _| true)?;
                continue;
            };
            let entries = match self.dir.root.list(&manifests) {
                Err(StoreError::UnsafePath { .. }) => {
                    let why = "a folder was expected";
                    self.dir.quarantine(&manifests, Reason::NotAFile, why);
                    Vec::new()
                }
                entries => entries?,
            };
            for entry in entries {
                let number = layout::parse_spread(&entry.name);
                let (Some(number), Kind::Folder) = (number, entry.kind) else {
                    self.dir.stray(&manifests.join(&entry.name), &entry);
                    continue;
                };
                self.dir.root.saw_folders(1);
                let rel = manifests.join(&entry.name);
                let now: Option<Stamp> = self.dir.root.stamp(&rel)?;
                let place = (fingerprint, number);
                let then = image.stamps.get(&place).copied();
                if now.is_some() && now == then && now.is_some_and(|(at, _)| at < sure) {
                    same.insert(place);
                } else {
                    look.insert(place);
                }
            }
        }
        let gone = image.stamps.keys().filter(|place| !same.contains(*place));
        look.extend(gone.copied().collect::<Vec<_>>());
        let mut rows: HashMap<Folder, HashSet<SnapshotId>> = HashMap::new();
        if !look.is_empty() {
            let models = image.models().to_vec();
            for (snapshot, known) in image.known() {
                let Some(fingerprint) = models.get(known.model as usize) else {
                    continue;
                };
                let place = (*fingerprint, folder(snapshot));
                if look.contains(&place) {
                    rows.entry(place).or_default().insert(*snapshot);
                }
            }
        }
        for place in look {
            let rows = rows.remove(&place).unwrap_or_default();
            self.look_into(place, rows, image, listed)?;
        }
        let doubts: Vec<SnapshotId> = image.doubts.iter().copied().collect();
        for snapshot in doubts {
            for fingerprint in image.models().to_vec() {
                let rel = layout::manifest(&fingerprint, &snapshot);
                let new = !listed.more.iter().any(|(id, _)| *id == snapshot);
                if new && let Some((Kind::File, len)) = self.dir.root.stat(&rel)? {
                    self.dir.ledger.add(on_disk(len));
                    listed.more.push((snapshot, fingerprint));
                }
            }
        }
        Ok(())
    }

    fn look_into(
        &self,
        (fingerprint, number): Folder,
        mut rows: HashSet<SnapshotId>,
        image: &mut Image,
        listed: &mut Listed,
    ) -> Result<(), StoreError> {
        let rel = layout::manifests(&fingerprint).join(format!("{number:02x}"));
        let empty = self.dir.sweep_spread(&rel, 0, &mut |rel, len| {
            let Some(snapshot) = layout::parse_manifest(rel.name()) else {
                return false;
            };
            if rows.remove(&snapshot) {
                // Its row counts it.
                self.dir.ledger.sub(on_disk(len));
            } else {
                listed.more.push((snapshot, fingerprint));
            }
            true
        })?;
        if empty {
            self.dir.root.remove_empty(&rel);
        }
        for snapshot in rows {
            image.vanished(&snapshot);
        }
        Ok(())
    }
}

// === impl Spread ===

impl Spread {
    /// Notes the folders of an object; says how many were not known.
    fn add(&mut self, fingerprint: Fingerprint, prefix: [u8; 8]) -> u64 {
        let [a, b, ..] = prefix;
        u64::from(self.upper.insert((fingerprint, a)))
            + u64::from(self.lower.insert((fingerprint, a, b)))
    }
}

// === impl DiskTier ===

impl DiskTier {
    /// What the files of an object take on disk.
    pub(super) fn bytes_of(&self, object: &crate::types::ObjectId) -> u64 {
        self.objects.get(object).map_or(0, |(here, _)| here.bytes)
    }

    /// Takes over the objects of all rows; says the folders that they are in.
    fn take_rows(&self, image: &Image) -> Spread {
        let mut table = self.objects.table();
        table.reserve(image.snapshots().saturating_mul(2));
        let owners: Vec<(Fingerprint, u32)> = image
            .owners()
            .iter()
            .map(|owner| {
                let whose = Whose {
                    fingerprint: owner.fingerprint,
                    namespace: owner.namespace.id(),
                    shards: owner.shards,
                };
                (owner.fingerprint, table.number(whose))
            })
            .collect();
        let mut bytes = 0_u64;
        // A bit for each lower folder, in place of a set that is asked millions of times.
        let mut bits: HashMap<Fingerprint, Vec<u64>> = HashMap::new();
        let mut row = Row::blank();
        let mut last: Option<Fingerprint> = None;
        let mut seen: Vec<u64> = Vec::new();
        for number in image.numbers() {
            if !image.row(number, &mut row) {
                continue;
            }
            let Some((fingerprint, whose)) = owners.get(row.owner as usize).copied() else {
                continue;
            };
            if last != Some(fingerprint) {
                if let Some(last) = last.replace(fingerprint) {
                    bits.insert(last, std::mem::take(&mut seen));
                }
                let known = bits.remove(&fingerprint);
                seen = known.unwrap_or_else(|| vec![0; (1 << 16) / 64]);
            }
            bytes = bytes.saturating_add(row.manifest_bytes);
            let mut add = |object: &RowObject, kind, range: TokenRange| {
                let [a, b, ..] = object.object.0;
                let folder = usize::from(u16::from_be_bytes([a, b]));
                if let Some(word) = seen.get_mut(folder / 64) {
                    *word |= 1 << (folder % 64);
                }
                let what = (kind, range);
                if table.add(object.object, whose, what, object.generation, object.bytes) {
                    bytes = bytes.saturating_add(object.bytes);
                }
            };
            add(&row.state, ObjectKind::State, TokenRange::at(row.boundary));
            let whole: Vec<RowKv>;
            let kv = match row.base {
                // The objects of a row that is no more are named by this one, too.
                Some(base) if !image.is_live(base) => {
                    whole = image.kv_of(number).unwrap_or_default();
                    &whole
                }
                _ => &row.kv,
            };
            for part in kv {
                add(&part.object, ObjectKind::Kv, part.object_range);
            }
        }
        drop(table);
        if let Some(last) = last {
            bits.insert(last, seen);
        }
        let mut spread = Spread::default();
        let mut folders = 0;
        for (fingerprint, words) in bits {
            for (at, word) in (0_u32..).zip(words) {
                for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                    let [_, _, a, b] = (at * 64 + bit).to_be_bytes();
                    folders += spread.add(fingerprint, [a, b, 0, 0, 0, 0, 0, 0]);
                }
            }
        }
        self.dir.root.saw_folders(folders);
        self.dir.ledger.add(bytes);
        spread
    }

    /// Looks for the files of a manifest that the catalog does not have.
    fn look_for(&self, manifest: &Manifest, spread: &mut Spread) -> Result<(), StoreError> {
        let fingerprint = manifest.fingerprint;
        let objects = manifest.kv.iter().map(|part| part.object);
        for object in objects.chain([manifest.state.object]) {
            if self.objects.contains(&object) {
                continue;
            }
            let mut files = Vec::new();
            for shard in 0..manifest.shards {
                let rel = layout::object(&fingerprint, &object, shard);
                if let Some((Kind::File, len)) = self.dir.root.stat(&rel)? {
                    files.push((shard, len));
                }
            }
            if files.is_empty() {
                continue;
            }
            let mut found = self.found.lock();
            let known = found.entry(fingerprint).or_default();
            if known.insert(object, files.clone()).is_none() {
                let bytes = files.iter().map(|(_, len)| on_disk(*len)).sum();
                self.dir.ledger.add(bytes);
                let prefix = crate::store::catalog::record::prefix(&object);
                self.dir.root.saw_folders(spread.add(fingerprint, prefix));
            }
        }
        Ok(())
    }

    /// Removes the files of objects that were begun, or belonged to a snapshot that is gone, and that
    /// no snapshot names.
    fn sweep_unnamed(&self, image: &Image, spread: &mut Spread) -> Result<(), StoreError> {
        let mut folders: HashSet<(Fingerprint, u8, u8)> = HashSet::new();
        for (prefix, fingerprint) in &image.maybe {
            let [a, b, ..] = *prefix;
            folders.insert((*fingerprint, a, b));
        }
        // What a bad manifest named.
        for (fingerprint, files) in self.found.lock().drain() {
            let ids = files.into_iter().filter(|(_, files)| !files.is_empty());
            for (id, files) in ids {
                let [a, b, ..] = id.0;
                folders.insert((fingerprint, a, b));
                let counted = files.iter().map(|(_, len)| on_disk(*len)).sum();
                self.dir.ledger.sub(counted);
            }
        }
        for (fingerprint, a, b) in folders {
            let upper = layout::model_folder(&fingerprint)
                .join(layout::OBJECTS)
                .join(format!("{a:02x}"));
            let rel = upper.join(format!("{b:02x}"));
            let root = &self.dir.root;
            if root.stat(&rel)?.is_some() {
                self.sweep_folder(fingerprint, &rel)?;
                root.saw_folders(spread.add(fingerprint, [a, b, 0, 0, 0, 0, 0, 0]));
                self.dir.prune(&rel, 2);
            } else if root.stat(&upper)?.is_some() {
                root.saw_folders(u64::from(spread.upper.insert((fingerprint, a))));
                self.dir.prune(&upper, 1);
            }
        }
        Ok(())
    }

    fn sweep_folder(&self, fingerprint: Fingerprint, rel: &Rel) -> Result<(), StoreError> {
        self.dir.sweep_spread(rel, 0, &mut |rel, len| {
            let Some((id, shard)) = layout::parse_object(rel.name()) else {
                return false;
            };
            let named = self
                .objects
                .get(&id)
                .is_some_and(|(_, whose)| whose.fingerprint == fingerprint && shard < whose.shards);
            if named {
                // It is counted already.
                self.dir.ledger.sub(on_disk(len));
                return true;
            }
            match self.dir.root.unlink(rel) {
                Ok(_) => {
                    self.dir.counters().orphan(len);
                    self.dir.ledger.sub(on_disk(len));
                }
                Err(error) => tracing::warn!(%error, "Orphan could not be removed"),
            }
            true
        })?;
        Ok(())
    }
}
