//! The disk tier: object files in a data directory.
//!
//! # What
//! One safetensors file for each shard of an object (`object_file`), small sealed JSON files for all
//! else, names by `layout`, all operations through `root`.
//!
//! # State
//! An object is *here* once all its shards have their final names; only then is it in the table that
//! `contains` and `get` ask. A start with a catalog fills the table from that. One without lists all
//! files: they are *found* until a manifest names them; those that none names are orphans and go.
//!
//! # Order of writes
//! Room is reserved; every shard is written to a temporary file and fsynced; all are renamed; the
//! folder is fsynced; the table gets the object. Removing goes the other way: first the table.
//! Manifests are removed before their objects, by the caller.
//!
//! # Cancellation
//! None: calls block until done. A process killed anywhere leaves temporary files and orphans, which
//! the next start removes.
//!
//! # Errors
//! A failed write leaves nothing behind that counts. A file that is not what was written is moved to
//! quarantine with all shards of its object, and the object is not here any more.

pub(crate) mod claims;
pub(crate) mod conversations;
pub(crate) mod data_dir;
mod engine;
pub mod fsck;
pub(crate) mod layout;
pub(crate) mod ledger;
pub(crate) mod manifests;
pub(crate) mod model;
pub(crate) mod object_file;
pub(crate) mod objects;
pub(crate) mod parallel;
pub(crate) mod quarantine;
pub(crate) mod recall;
pub(crate) mod root;
pub(crate) mod scan;
pub mod scrub;
pub(crate) mod stream;
mod stuck;
pub(crate) mod transfer;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::{Mutex, RwLock};

use crate::{
    pool::Geometry,
    types::{Fingerprint, Generation, ObjectId, TierKind, TokenId},
};

use super::{
    arena::{Arena, Segment, SegmentHeader},
    config::DiskConfig,
    counters::Reason,
    error::StoreError,
    object::{Object, ObjectMeta},
    sealed_json::Bad,
    tier::{Stored, Tier, Usage},
};

use claims::Claims;
use data_dir::DataDir;
use engine::Engine;
use ledger::on_disk;
use model::ModelFile;
use object_file::{Plan, token_bytes};
use objects::Objects;
use root::{Kind, Rel, Temp};
use scan::FoundFiles;
use transfer::{ReadError, Shard, tokens_of};

/// Objects in files.
#[derive(Debug)]
pub struct DiskTier {
    dir: Arc<DataDir>,
    models: RwLock<HashMap<Fingerprint, Arc<Geometry>>>,
    objects: Objects,
    /// Object files that no manifest has named yet, by model.
    found: Mutex<HashMap<Fingerprint, FoundFiles>>,
    /// Folders of models, with those whose description is good.
    folders: Mutex<Vec<(Rel, Option<Fingerprint>)>>,
    scanned: AtomicBool,
    claims: Claims,
    /// Files of removed objects that the system does not let go.
    stuck: Mutex<Vec<(Fingerprint, ObjectId, u32)>>,
    engine: Box<dyn Engine>,
    direct: bool,
}

/// What became of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registered {
    /// It was known.
    Known,
    /// It was written down.
    New,
}

// === impl DiskTier ===

impl DiskTier {
    pub(crate) fn open(dir: Arc<DataDir>, config: &DiskConfig) -> Result<Self, StoreError> {
        let direct = engine::is_direct(config, &dir);
        let engine = engine::open(config, dir.root.faults());
        let tier = Self {
            dir,
            models: RwLock::default(),
            objects: Objects::default(),
            found: Mutex::default(),
            folders: Mutex::default(),
            scanned: AtomicBool::new(false),
            claims: Claims::default(),
            stuck: Mutex::default(),
            engine,
            direct,
        };
        tier.find_models()?;
        Ok(tier)
    }

    /// Makes a model's objects writable; its geometry is kept in its folder. `description` is for people.
    ///
    /// # Errors
    /// `Conflict` if the model is known with another geometry.
    pub fn register_model(
        &self,
        fingerprint: Fingerprint,
        geometry: &Geometry,
        description: BTreeMap<String, String>,
    ) -> Result<Registered, StoreError> {
        if let Some(known) = self.geometry(&fingerprint) {
            return if *known == *geometry {
                Ok(Registered::Known)
            } else {
                Err(StoreError::Conflict {
                    what: format!("the geometry of model {fingerprint}"),
                })
            };
        }
        let file = ModelFile {
            format_version: 1,
            fingerprint,
            description,
            geometry: geometry.clone(),
        };
        let rel = layout::model_folder(&fingerprint).join(layout::MODEL);
        self.dir.put_record(&rel, &file)?;
        let mut models = self.models.write();
        models
            .entry(fingerprint)
            .or_insert_with(|| Arc::new(geometry.clone()));
        Ok(Registered::New)
    }

    /// The models whose objects can be read and written.
    #[must_use]
    pub fn models(&self) -> Vec<Fingerprint> {
        self.models.read().keys().copied().collect()
    }

    /// What the folder of a model says of it for people; empty if that cannot be read.
    #[must_use]
    pub fn description(&self, fingerprint: &Fingerprint) -> BTreeMap<String, String> {
        let rel = layout::model_folder(fingerprint).join(layout::MODEL);
        match self.dir.get_record::<ModelFile>(&rel) {
            Ok(Ok(model)) => model.description,
            Ok(Err(_)) | Err(_) => BTreeMap::new(),
        }
    }

    /// The geometry of a model.
    #[must_use]
    pub fn geometry(&self, fingerprint: &Fingerprint) -> Option<Arc<Geometry>> {
        self.models.read().get(fingerprint).cloned()
    }

    /// What an object here is.
    #[must_use]
    pub fn meta(&self, id: &ObjectId) -> Option<Arc<ObjectMeta>> {
        let (here, whose) = self.objects.get(id)?;
        let geometry = self.geometry(&whose.fingerprint)?;
        Some(objects::meta(id, &here, &whose, &geometry))
    }

    /// The save that an object here comes from.
    #[must_use]
    pub fn generation(&self, id: &ObjectId) -> Option<Generation> {
        self.objects.get(id).map(|(here, _)| here.generation)
    }

    /// The tokens of a KV object here, read and verified without its payload.
    ///
    /// # Errors
    /// As those of [`Tier::get`].
    pub fn tokens(&self, id: &ObjectId) -> Result<Arc<[TokenId]>, StoreError> {
        let (meta, plan, serial) = self.plan(id)?;
        let rel = layout::object(&meta.fingerprint, id, 0);
        match tokens_of(&self.dir.root, &rel, &meta, &plan, 0) {
            Ok(bytes) => Ok(to_tokens(&bytes, &meta)),
            Err(error) => Err(self.failed_read(&meta, serial, 0, error)),
        }
    }

    /// Takes an object to be here.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn plant(&self, meta: &ObjectMeta, bytes: u64) {
        if !self.objects.contains(&meta.id) {
            self.objects.insert(meta, bytes);
        }
    }

    /// The failed fsync since which nothing is written, if there was one.
    #[must_use]
    pub fn poisoned(&self) -> Option<&str> {
        self.dir.root.poisoned()
    }

    fn plan(&self, id: &ObjectId) -> Result<(Arc<ObjectMeta>, Plan, u32), StoreError> {
        let found = self.objects.get(id);
        let (here, whose) = found.ok_or(StoreError::NotFound { object: *id })?;
        let geometry = self.known_geometry(&whose.fingerprint)?;
        let meta = objects::meta(id, &here, &whose, &geometry);
        let plan = Plan::checked(&meta, &geometry)?;
        Ok((meta, plan, here.serial))
    }

    fn known_geometry(&self, fingerprint: &Fingerprint) -> Result<Arc<Geometry>, StoreError> {
        self.geometry(fingerprint).ok_or(StoreError::UnknownModel {
            fingerprint: *fingerprint,
        })
    }

    /// Whether an equal object is here; another one under the same id is an error.
    fn is_here(&self, meta: &ObjectMeta) -> Result<bool, StoreError> {
        match self.meta(&meta.id) {
            None => Ok(false),
            Some(here) if here.same_but_generation(meta) => Ok(true),
            Some(_) => Err(StoreError::Conflict {
                what: format!("object {}", meta.id),
            }),
        }
    }

    /// Writes all shards; nothing of them stays if one fails. Says what they take on disk.
    fn write(&self, object: &Object, plan: &Plan) -> Result<u64, StoreError> {
        let meta = &*object.meta;
        let tokens = token_bytes(&object.tokens);
        let mut temps = Vec::new();
        let mut named = Vec::new();
        let done = self.write_shards(object, plan, &tokens, &mut temps, &mut named);
        if done.is_err() {
            temps.iter().for_each(|rel| self.dir.root.discard(rel));
            named.iter().for_each(|rel| self.dir.root.discard(rel));
        } else {
            self.dir
                .counters()
                .wrote_object(u64::from(meta.shards), meta.bytes());
        }
        done
    }

    fn write_shards(
        &self,
        object: &Object,
        plan: &Plan,
        tokens: &[u8],
        temps: &mut Vec<Rel>,
        named: &mut Vec<Rel>,
    ) -> Result<u64, StoreError> {
        let meta = &*object.meta;
        let root = &self.dir.root;
        let mut bytes = 0;
        let mut complete: Vec<(Rel, Rel)> = Vec::new();
        for (shard, segments) in (0u32..).zip(&object.shards) {
            let target = layout::object(&meta.fingerprint, &meta.id, shard);
            let temp: Temp = root.create_temp(&target)?;
            temps.push(temp.rel.clone());
            let shard = Shard {
                meta,
                plan,
                shard,
                segments: segments.iter().map(|segment| &**segment).collect(),
            };
            bytes += on_disk(shard.write(root, &temp, tokens, self.mode())?);
            root.sync_file(&temp)?;
            complete.push((temp.rel, target));
        }
        let folders = root.open_folders(&layout::object_folder(&meta.fingerprint, &meta.id))?;
        for (temp, target) in complete {
            // Left by an earlier process, or by a write that failed.
            let old = match root.stat(&target)? {
                Some((Kind::File, len)) => on_disk(len),
                _ => 0,
            };
            root.rename(&temp, &target)?;
            self.dir.ledger.sub(old);
            named.push(target);
        }
        root.sync_folders(folders)?;
        Ok(bytes)
    }

    fn read(
        &self,
        meta: &Arc<ObjectMeta>,
        (plan, serial): (&Plan, u32),
        arena: &Arena,
    ) -> Result<Object, StoreError> {
        let mut shards: Vec<Vec<Arc<Segment>>> = Vec::new();
        for _ in 0..meta.shards {
            let segments = meta.pieces.iter().map(|piece| {
                let segment = arena.alloc(piece.bytes).map(Arc::new);
                segment.ok_or(StoreError::ArenaFull { need: piece.bytes })
            });
            shards.push(segments.collect::<Result<_, _>>()?);
        }
        let mut tokens: Option<Vec<u8>> = None;
        for (shard, segments) in (0u32..).zip(&shards) {
            let rel = layout::object(&meta.fingerprint, &meta.id, shard);
            let whole = Shard {
                meta,
                plan,
                shard,
                segments: segments.iter().map(|segment| &**segment).collect(),
            };
            let read = whole.read(&self.dir.root, &rel, self.mode());
            let read = read.and_then(|bytes| match &tokens {
                Some(first) if *first != bytes => Err(ReadError::Bad(Bad::new(
                    Reason::Mismatch,
                    "its tokens are not those of the first shard",
                ))),
                _ => Ok(bytes),
            });
            let bytes = read.map_err(|error| self.failed_read(meta, serial, shard, error))?;
            tokens.get_or_insert(bytes);
        }
        for (shard, segments) in (0u32..).zip(&shards) {
            for (piece, segment) in segments.iter().enumerate() {
                if let Some(header) = SegmentHeader::of(meta, shard, piece) {
                    arena.seal(segment, &header);
                }
            }
        }
        self.dir.counters().read_object(meta.bytes());
        Ok(Object {
            meta: Arc::clone(meta),
            tokens: to_tokens(&tokens.unwrap_or_default(), meta),
            shards,
        })
    }
}

impl Tier for DiskTier {
    fn kind(&self) -> TierKind {
        TierKind::Disk
    }

    fn usage(&self) -> Usage {
        Usage {
            bytes: self.dir.used(),
            objects: self.objects.len() as u64,
            budget: self.dir.ledger.budget(),
        }
    }

    fn set_budget(&self, bytes: u64) {
        self.dir.ledger.set_budget(bytes);
    }

    fn contains(&self, id: &ObjectId) -> bool {
        self.objects.contains(id)
    }

    fn put(&self, object: &Object) -> Result<Stored, StoreError> {
        if !self.scanned.load(Ordering::Acquire) {
            return Err(StoreError::NotScanned);
        }
        let meta = &object.meta;
        let geometry = self.known_geometry(&meta.fingerprint)?;
        object.validate(Some(&geometry))?;
        let _claim = self.claims.claim(meta.id);
        if self.is_here(meta)? {
            self.dir.counters().was_there();
            return Ok(Stored::AlreadyThere);
        }
        let plan = Plan::of(meta, &geometry);
        let reservation = self.dir.reserve(scan::bytes_on_disk(meta, &plan))?;
        self.dir
            .catalog
            .begin(&self.dir, &meta.fingerprint, &meta.id);
        let bytes = self.write(object, &plan)?;
        reservation.keep();
        self.objects.insert(meta, bytes);
        Ok(Stored::Written { bytes })
    }

    fn get(&self, id: &ObjectId, arena: &Arena) -> Result<Object, StoreError> {
        let (meta, plan, serial) = self.plan(id)?;
        self.read(&meta, (&plan, serial), arena)
    }

    fn remove(&self, id: &ObjectId) -> Result<bool, StoreError> {
        let _claim = self.claims.claim(*id);
        let Some((here, whose)) = self.objects.remove(id) else {
            return Ok(false);
        };
        let mut removed = Ok(true);
        let mut stay = 0;
        for shard in 0..whose.shards {
            let rel = layout::object(&whose.fingerprint, id, shard);
            if let Err(error) = self.dir.root.unlink(&rel) {
                if let Ok(Some((Kind::File, len))) = self.dir.root.stat(&rel) {
                    stay += on_disk(len);
                }
                self.stuck.lock().push((whose.fingerprint, *id, shard));
                removed = Err(error);
            }
        }
        self.dir.ledger.sub(here.bytes.saturating_sub(stay));
        if removed.is_ok() {
            self.dir
                .prune(&layout::object_folder(&whose.fingerprint, id), 2);
            self.dir.catalog.gone(&self.dir, id);
        }
        removed
    }

    fn list(&self) -> Vec<Arc<ObjectMeta>> {
        let all = self.objects.all();
        all.iter()
            .filter_map(|(id, here, whose)| {
                let geometry = self.geometry(&whose.fingerprint)?;
                Some(objects::meta(id, here, whose, &geometry))
            })
            .collect()
    }
}

pub(crate) fn to_tokens(bytes: &[u8], meta: &ObjectMeta) -> Arc<[TokenId]> {
    let (words, _) = bytes.as_chunks::<4>();
    let count = meta.token_count() as usize;
    words
        .iter()
        .take(count)
        .map(|word| u32::from_le_bytes(*word))
        .collect()
}

#[cfg(test)]
mod tests;
