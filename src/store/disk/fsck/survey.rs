//! What the folders and the manifests say. No object is opened.

use std::collections::{BTreeMap, HashMap};

use crate::{
    pool::Geometry,
    store::{
        counters::Reason,
        error::StoreError,
        object::{Encoding, ObjectMeta, pieces},
        sealed_json::Bad,
    },
    types::{
        Fingerprint, Generation, Namespace, NamespaceId, ObjectId, ObjectKind, SnapshotId,
        TokenRange,
    },
};

use super::super::{
    data_dir::{bad_format, read_record},
    layout,
    ledger::on_disk,
    model::ModelFile,
    root::{Entry, Kind, Rel, Root, is_temporary},
    scrub::ScrubMark,
};
use super::{Space, Watch};

/// Everything found.
#[derive(Default)]
pub(super) struct Survey {
    pub(super) models: Vec<Model>,
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) objects: Vec<Thing>,
    pub(super) namespaces: Vec<(NamespaceId, Namespace)>,
    pub(super) conversations: u64,
    /// Damaged files that are neither manifest nor object.
    pub(super) bad: Vec<(Rel, Bad)>,
    pub(super) temporary: Vec<Rel>,
    pub(super) derived: Vec<Rel>,
    /// Those of them that are damaged.
    pub(super) derived_bad: Vec<(Rel, Bad)>,
    /// Token logs that belong to no catalog.
    pub(super) unused: Vec<Rel>,
    /// Rows of the catalog whose manifests are there.
    pub(super) rows: u64,
    pub(super) strange: Vec<Rel>,
    /// Empty folders in which files are spread, deepest first.
    pub(super) empty: Vec<Rel>,
    pub(super) quarantined: u64,
    pub(super) space: Space,
    pub(super) verified_bytes: u64,
    pub(super) tokens: u64,
}

/// A model's folder.
pub(super) struct Model {
    pub(super) folder: Rel,
    /// None without a good description: then nothing of it can be checked.
    pub(super) known: Option<Known>,
    /// Files left alone for want of a description.
    pub(super) unchecked: u64,
    /// Bytes of all its files.
    pub(super) bytes: u64,
    /// Every manifest was understood, so what none names is nobody's.
    pub(super) understood: bool,
}

pub(super) struct Known {
    pub(super) fingerprint: Fingerprint,
    pub(super) description: BTreeMap<String, String>,
    pub(super) geometry: Geometry,
}

/// A manifest.
pub(super) struct Snapshot {
    pub(super) model: usize,
    pub(super) id: SnapshotId,
    pub(super) rel: Rel,
    pub(super) content: Result<Content, Bad>,
}

/// What matters of a manifest.
pub(super) struct Content {
    pub(super) namespace: usize,
    pub(super) boundary: u32,
    pub(super) state: Use,
    /// In order, without holes from token 0.
    pub(super) kv: Vec<Use>,
    /// Tells its KV references from others, as in the catalog.
    pub(super) digest: [u8; 16],
}

/// An object, as a manifest uses it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Use {
    pub(super) object: usize,
    pub(super) claim: usize,
    /// End of the tokens used.
    pub(super) end: u32,
}

/// An object: its files, and what manifests say that it is.
pub(super) struct Thing {
    pub(super) model: usize,
    pub(super) id: ObjectId,
    /// Shard and length.
    pub(super) files: Vec<(u32, u64)>,
    /// Usually one. Manifests that contradict each other are told apart by the object's header.
    pub(super) claims: Vec<Claim>,
    pub(super) verdict: Verdict,
}

/// What an object is, by a manifest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) kind: ObjectKind,
    pub(super) range: TokenRange,
    pub(super) shards: u32,
    pub(super) namespace: usize,
    /// The newest of those named.
    pub(super) generation: Generation,
}

/// What came out about an object.
#[derive(Clone)]
pub(super) enum Verdict {
    /// No manifest names it, or nobody has looked yet.
    Open,
    /// It is what this claim says.
    Sound(usize),
    /// A file of it is not there.
    Missing(u32),
    /// A file of it is bad.
    Bad(u32, Bad),
}

// === impl Survey ===

impl Survey {
    pub(super) fn take(root: &Root, threads: usize, watch: &Watch<'_>) -> Result<Self, StoreError> {
        let mut survey = Self::default();
        if let Some(bad) = bad_format(root)? {
            let rel = Rel::root().join(layout::FORMAT);
            survey.bad.push((rel, bad));
        }
        survey.space.folders += on_disk(1);
        for entry in root.list(&Rel::root())? {
            survey.top(root, &entry)?;
        }
        let (mut manifests, mut places) = (Vec::new(), HashMap::new());
        for model in 0..survey.models.len() {
            survey.list_model(root, model, &mut manifests, &mut places)?;
        }
        survey.read_manifests(root, manifests, &mut places, threads, watch)?;
        survey.list_refs(root)?;
        Ok(survey)
    }

    /// What an object is if a claim is right.
    pub(super) fn meta(&self, thing: &Thing, claim: &Claim) -> Option<(ObjectMeta, &Geometry)> {
        let known = self.models.get(thing.model)?.known.as_ref()?;
        let (namespace, _) = self.namespaces.get(claim.namespace)?;
        let meta = ObjectMeta {
            id: thing.id,
            kind: claim.kind,
            range: claim.range,
            fingerprint: known.fingerprint,
            namespace: *namespace,
            generation: claim.generation,
            shards: claim.shards,
            pieces: pieces(&known.geometry, claim.kind, claim.range),
            encoding: Encoding::Raw,
        };
        Some((meta, &known.geometry))
    }

    /// The folder of an object's files.
    pub(super) fn file(&self, thing: &Thing, shard: u32) -> Option<Rel> {
        let known = self.models.get(thing.model)?.known.as_ref()?;
        Some(layout::object(&known.fingerprint, &thing.id, shard))
    }

    fn top(&mut self, root: &Root, entry: &Entry) -> Result<(), StoreError> {
        let rel = Rel::root().join(&entry.name);
        let name = entry.name.to_str().unwrap_or_default();
        let len = on_disk(entry.len);
        match (entry.kind, name) {
            (Kind::Folder, _) => self.space.folders += on_disk(1),
            (Kind::File, layout::LOCK | layout::FORMAT | layout::SCRUB) => {
                self.space.records += len
            }
            (Kind::File, _) if is_derived(name) => {
                self.space.derived += len;
                self.derived.push(rel);
                return Ok(());
            }
            _ => {}
        }
        match (entry.kind, name) {
            (Kind::Folder, layout::MODELS) => {
                for entry in root.list(&rel)? {
                    self.in_models(&rel, &entry);
                }
            }
            (Kind::Folder, layout::QUARANTINE) => {
                for entry in root.list(&rel)? {
                    self.quarantined += 1;
                    self.space.quarantine += on_disk(entry.len);
                }
            }
            // What is wrong with it is known.
            (Kind::Other, layout::FORMAT) => self.space.other += len,
            (Kind::File, layout::SCRUB) => {
                if let Err(bad) = read_record::<ScrubMark>(root, &rel)? {
                    self.bad.push((rel, bad));
                }
            }
            (Kind::Folder, layout::REFS | "lost+found")
            | (Kind::File, layout::LOCK | layout::FORMAT) => {}
            (Kind::File, layout::MODELS | layout::REFS | layout::QUARANTINE) => {
                self.space.other += len;
                self.bad.push((rel, not_a_folder()));
            }
            _ => self.stray(rel, entry),
        }
        Ok(())
    }

    fn in_models(&mut self, models: &Rel, entry: &Entry) {
        let rel = models.join(&entry.name);
        if entry.kind == Kind::Folder && layout::is_model(&entry.name) {
            self.space.folders += on_disk(1);
            self.models.push(Model {
                folder: rel,
                known: None,
                unchecked: 0,
                bytes: 0,
                understood: true,
            });
        } else {
            self.stray(rel, entry);
        }
    }

    /// What has no place where it is.
    fn stray(&mut self, rel: Rel, entry: &Entry) {
        match entry.kind {
            Kind::Other => {
                self.space.other += on_disk(entry.len);
                let bad = Bad::new(Reason::NotAFile, "neither file nor folder");
                self.bad.push((rel, bad));
            }
            Kind::File if is_temporary(&entry.name) => {
                self.space.other += on_disk(entry.len);
                self.temporary.push(rel);
            }
            Kind::File => {
                self.space.other += on_disk(entry.len);
                self.strange.push(rel);
            }
            Kind::Folder => self.strange.push(rel),
        }
    }

    fn list_model(
        &mut self,
        root: &Root,
        number: usize,
        manifests: &mut Vec<(usize, SnapshotId, Rel)>,
        places: &mut HashMap<(usize, ObjectId), usize>,
    ) -> Result<(), StoreError> {
        let Some(folder) = self.models.get(number).map(|model| model.folder.clone()) else {
            return Ok(());
        };
        let mut bytes = 0;
        for entry in root.list(&folder)? {
            let rel = folder.join(&entry.name);
            let name = entry.name.to_str().unwrap_or_default();
            match (entry.kind, name) {
                (Kind::Folder, layout::OBJECTS | layout::MANIFESTS) => {
                    self.space.folders += on_disk(1);
                }
                (_, layout::OBJECTS | layout::MANIFESTS) => {
                    self.space.other += on_disk(entry.len);
                    self.bad.push((rel, not_a_folder()));
                }
                (Kind::File, layout::MODEL) => {
                    self.space.records += on_disk(entry.len);
                    bytes += on_disk(entry.len);
                }
                _ => self.stray(rel, &entry),
            }
        }
        let known = self.read_model(root, &folder)?;
        let mut unchecked = 0;
        let there = known.is_some();
        self.spread(
            root,
            &folder.join(layout::MANIFESTS),
            1,
            &mut |survey, rel, len| {
                let Some(snapshot) = layout::parse_manifest(rel.name()) else {
                    return false;
                };
                bytes += on_disk(len);
                survey.space.records += on_disk(len);
                if there {
                    manifests.push((number, snapshot, rel.clone()));
                } else {
                    unchecked += 1;
                }
                true
            },
        )?;
        self.spread(
            root,
            &folder.join(layout::OBJECTS),
            2,
            &mut |survey, rel, len| {
                let Some((id, shard)) = layout::parse_object(rel.name()) else {
                    return false;
                };
                bytes += on_disk(len);
                let right = known
                    .as_ref()
                    .map(|known: &Known| layout::object(&known.fingerprint, &id, shard) == *rel);
                match right {
                    Some(true) => {
                        let place = survey.thing(places, number, id);
                        if let Some(thing) = survey.objects.get_mut(place) {
                            thing.files.push((shard, len));
                        }
                    }
                    // Nobody would ever look for it here.
                    Some(false) => return false,
                    None => {
                        survey.space.objects += on_disk(len);
                        unchecked += 1;
                    }
                }
                true
            },
        )?;
        if let Some(model) = self.models.get_mut(number) {
            model.known = known;
            model.bytes = bytes;
            model.unchecked = unchecked;
        }
        Ok(())
    }

    fn read_model(&mut self, root: &Root, folder: &Rel) -> Result<Option<Known>, StoreError> {
        let rel = folder.join(layout::MODEL);
        let bad = match read_record::<ModelFile>(root, &rel) {
            Ok(Ok(model)) if layout::model_folder(&model.fingerprint) == *folder => {
                return Ok(Some(Known {
                    fingerprint: model.fingerprint,
                    description: model.description,
                    geometry: model.geometry,
                }));
            }
            Ok(Ok(_)) => Bad::new(Reason::Mismatch, "another model's description"),
            Ok(Err(bad)) => bad,
            Err(error) if error.is_missing() => return Ok(None),
            Err(error) => return Err(error),
        };
        // What is no file is among the bad already.
        if bad.reason != Reason::NotAFile {
            self.bad.push((rel, bad));
        }
        Ok(None)
    }

    /// Calls `f` for the plain files in the folders `<aa>` of `folder`.
    pub(super) fn spread(
        &mut self,
        root: &Root,
        folder: &Rel,
        depth: u32,
        f: &mut dyn FnMut(&mut Self, &Rel, u64) -> bool,
    ) -> Result<bool, StoreError> {
        let entries = match root.list(folder) {
            // It is among the bad already.
            Err(StoreError::UnsafePath { .. }) => return Ok(false),
            entries => entries?,
        };
        let mut empty = true;
        for entry in entries {
            let rel = folder.join(&entry.name);
            match entry.kind {
                Kind::Folder if depth > 0 && layout::is_spread(&entry.name) => {
                    self.space.folders += on_disk(1);
                    if self.spread(root, &rel, depth - 1, f)? {
                        self.empty.push(rel);
                    } else {
                        empty = false;
                    }
                }
                Kind::File
                    if depth == 0 && !is_temporary(&entry.name) && f(self, &rel, entry.len) =>
                {
                    empty = false;
                }
                _ => {
                    empty = false;
                    self.stray(rel, &entry);
                }
            }
        }
        Ok(empty)
    }

    pub(super) fn thing(
        &mut self,
        places: &mut HashMap<(usize, ObjectId), usize>,
        model: usize,
        id: ObjectId,
    ) -> usize {
        let next = self.objects.len();
        let place = *places.entry((model, id)).or_insert(next);
        if place == next {
            self.objects.push(Thing {
                model,
                id,
                files: Vec::new(),
                claims: Vec::new(),
                verdict: Verdict::Open,
            });
        }
        place
    }
}

/// Files in the directory itself that a daemon makes again when they are missing.
fn is_derived(name: &str) -> bool {
    let log = name.ends_with(".log") && name.starts_with("tokens.");
    log || name.starts_with("catalog.")
}

fn not_a_folder() -> Bad {
    Bad::new(Reason::NotAFile, "a folder was expected")
}
