//! The start: what is on disk becomes known again.
//!
//! # What
//! The catalog says what is there, see `recall`. Without a good one, and where there are few
//! snapshots, manifests are read, parents before children, and the catalog is written anew. The
//! tokens of a snapshot are then those beside its KV; they are hashed again, and a snapshot whose
//! tokens do not give its own objects' addresses is left out. Then conversations, then the most
//! recent snapshots come into RAM, as many as may.
//!
//! # Errors
//! A bad file is in quarantine by then, and costs what needed it. A directory that cannot be read
//! keeps the service from becoming ready: it would write over what it does not know.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;

use super::Service;
use super::core::{Model, Record, Removal};
use super::recall::{Progress, Reading};
use super::save_state::SaveState;
use crate::index::{Index, KvRef, NewSnapshot, ObjectEntry, Retain, TierSet, TreeKey};
use crate::pool::PrefixHasher;
use crate::store::fault::Op;
use crate::store::{DiskTier, ErrorKind, Manifest, ObjectMeta, StoreError, Tier, TokenLog};
use crate::types::{
    Fingerprint, Millis, Namespace, ObjectId, ObjectKind, SnapshotId, TierKind, TokenId,
};

/// Tokens of objects kept at hand while snapshots are read.
type TokenCache = HashMap<ObjectId, Arc<[TokenId]>>;

/// What snapshots share.
#[derive(Default)]
pub(super) struct Shared {
    models: HashMap<Fingerprint, Arc<Model>>,
    namespaces: HashMap<Namespace, Arc<Namespace>>,
    tokens: TokenCache,
}

/// Why a snapshot on disk is not taken in.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Index(#[from] crate::index::IndexError),
    #[error("its model is not known")]
    Model,
    #[error("object {0} belongs to other tokens")]
    Foreign(ObjectId),
    #[error("it has no KV")]
    NoKv,
}

// === impl Service ===

impl Service {
    /// Reads what is on disk. Blocks.
    pub(super) fn load(self: &Arc<Self>) {
        let start = self.clock.monotonic();
        let loaded = self.load_all();
        match loaded {
            Ok(found) => {
                if let Some(manifests) = &self.store.manifests {
                    manifests.taken_in();
                }
                let took = self.clock.monotonic().saturating_sub(start);
                self.check_budget();
                self.latches.lift(super::LOADING);
                self.changed.notify_waiters();
                self.wake.notify_one();
                tracing::info!(snapshots = found.len(), ?took, "Ready");
                self.preload(found);
            }
            Err(error) => {
                self.metrics.error("load");
                self.latches.hold(super::LOAD_FAILED);
                tracing::error!(%error, "The data directory cannot be read; staying unready");
            }
        }
    }

    fn load_all(&self) -> Result<Vec<(Millis, SnapshotId)>, StoreError> {
        let snapshots = AtomicUsize::new(0);
        thread::scope(|scope| {
            let mut names = Reading::begin(self, scope, &snapshots);
            if let Some(found) = self.recall(&mut names)? {
                return Ok(found);
            }
            let found = self.load_snapshots()?;
            self.name_read(names.take()?);
            Ok(found)
        })
    }

    /// Says that the disk will be full before its budget is used.
    fn check_budget(&self) {
        let budget = self.store.disk.as_ref().map(|disk| disk.usage().budget);
        let Some((budget, can_hold)) = budget.zip(self.store.disk_can_hold()) else {
            return;
        };
        if budget > can_hold {
            tracing::warn!(
                budget,
                can_hold,
                "store.disk.budget is above what the file system can hold beside \
                 store.disk.min_free: the disk will be full before the budget is used"
            );
        }
    }

    fn load_snapshots(&self) -> Result<Vec<(Millis, SnapshotId)>, StoreError> {
        let Some((disk, manifests)) = self.store.disk.as_ref().zip(self.store.manifests.as_ref())
        else {
            return Ok(Vec::new());
        };
        let mut found: Vec<Manifest> = Vec::new();
        let mut progress = Progress::new(self);
        manifests.scan(&mut |manifest| match manifest {
            Ok(manifest) => {
                found.push(manifest);
                progress.tell(|| format!("{} manifests read", found.len()));
            }
            Err(bad) => tracing::warn!(?bad, "A snapshot went to quarantine"),
        })?;
        let log = self.store.new_catalog().or_else(|error| {
            tracing::warn!(%error, "There is no catalog: the next start reads all manifests again");
            TokenLog::in_memory().map_err(|error| StoreError::io(Op::Open, "memfd".into(), error))
        })?;
        let tiers = self.core.lock().index.tiers();
        self.core.lock().index = Index::new(log, tiers);
        found.sort_by_key(|manifest| (manifest.boundary, manifest.created, manifest.snapshot));
        let mut shared = Shared::default();
        let mut taken = Vec::with_capacity(found.len());
        let mut bad = Removal::default();
        self.core.lock().index.reserve(found.len());
        let all = found.len();
        for (at, manifest) in found.into_iter().enumerate() {
            progress.tell(|| format!("{at} of {all} snapshots taken in, the catalog is written"));
            let created = manifest.created;
            if let Some(id) = self.take_in_or_tell(disk, &manifest, &mut shared, &mut bad) {
                taken.push((created, id));
            }
        }
        self.core.lock().queue.remove(bad);
        Ok(taken)
    }

    /// Takes a snapshot in and writes its row; one that cannot be used is told of.
    pub(super) fn take_in_or_tell(
        &self,
        disk: &DiskTier,
        manifest: &Manifest,
        shared: &mut Shared,
        bad: &mut Removal,
    ) -> Option<SnapshotId> {
        let id = manifest.snapshot;
        match self.take_in(disk, manifest, shared) {
            Ok(fresh) => {
                if let Some(manifests) = self.store.manifests.as_ref().filter(|_| fresh) {
                    let own = manifest.own.start;
                    let mut place = |after| self.place(&id, if after { own } else { 0 });
                    manifests.catalogue(manifest, &mut place);
                }
                Some(id)
            }
            Err(error) => {
                self.metrics.error("unusable_snapshot");
                tracing::warn!(snapshot = %id, %error, "A snapshot on disk is not used");
                if let Unusable::Store(error) = &error
                    && error.kind() == ErrorKind::Data
                {
                    bad.snapshots.push(id);
                }
                None
            }
        }
    }

    fn take_in(
        &self,
        disk: &DiskTier,
        manifest: &Manifest,
        shared: &mut Shared,
    ) -> Result<bool, Unusable> {
        let fingerprint = manifest.fingerprint;
        let geometry = disk.geometry(&fingerprint).ok_or(Unusable::Model)?;
        let model = shared.models.entry(fingerprint).or_insert_with(|| {
            let name = manifest.labels.get("model").cloned().unwrap_or_default();
            Arc::new(Model {
                fingerprint,
                name,
                geometry: (*geometry).clone(),
                shards: manifest.shards,
            })
        });
        let namespace = match shared.namespaces.get(&manifest.namespace) {
            Some(namespace) => Arc::clone(namespace),
            None => {
                let namespace = Arc::new(manifest.namespace.clone());
                shared
                    .namespaces
                    .insert(manifest.namespace.clone(), Arc::clone(&namespace));
                namespace
            }
        };
        let key = TreeKey {
            fingerprint,
            namespace: namespace.id(),
        };
        let tokens = tokens_of(disk, manifest, &key, &mut shared.tokens)?;
        let mut objects = manifest.objects(&geometry);
        let state = objects.next().ok_or(Unusable::NoKv)?;
        let entry = |meta: &ObjectMeta| ObjectEntry {
            id: meta.id,
            kind: meta.kind,
            range: meta.range,
            bytes: meta.bytes(),
            tiers: TierSet::of(&[TierKind::Disk]),
        };
        let new = NewSnapshot {
            id: manifest.snapshot,
            state: entry(&state),
            kv: manifest
                .kv
                .iter()
                .map(|part| KvRef {
                    object: part.object,
                    range: part.range,
                    object_range: part.object_range,
                })
                .collect(),
            new_objects: objects.map(|meta| entry(&meta)).collect(),
            created: manifest.created,
            durable: true,
            retain: Retain::Ordinary,
        };
        let mut core = self.core.lock();
        let inserted = core.index.insert(&key, &tokens, new)?;
        if !inserted.fresh {
            // Two manifests for one prefix: the first is as good, and this one only costs space.
            let snapshots = vec![manifest.snapshot];
            core.queue.remove(Removal {
                snapshots,
                objects: inserted.unused,
            });
            return Ok(false);
        }
        let parent = core
            .index
            .snapshot(&manifest.snapshot)
            .and_then(|info| info.parent);
        let record = Record {
            model: Arc::clone(model),
            namespace,
            state: SaveState::Durable,
            generation: manifest.generation,
            parent,
            created: manifest.created,
            conversation: None,
            rid: None,
            written: 0,
            failure: None,
            waiters: 0,
        };
        core.records.insert(manifest.snapshot, record);
        Ok(true)
    }

    /// Brings the most recent snapshots into RAM, as far as configured and below the mark at which
    /// room is made.
    fn preload(self: &Arc<Self>, mut found: Vec<(Millis, SnapshotId)>) {
        let mark = (self.store.ram.usage().budget as f64 * self.config.ram_low) as u64;
        let mut left = self.config.preload.as_u64().min(mark);
        found.sort_unstable_by(|a, b| b.cmp(a));
        let mut wanted = HashSet::new();
        for (_, id) in found {
            let lacking = self.lacking(&id, &wanted);
            let bytes = lacking
                .iter()
                .map(|(_, bytes)| *bytes)
                .fold(0, u64::saturating_add);
            let Some(rest) = left.checked_sub(bytes) else {
                break;
            };
            left = rest;
            for (object, _) in lacking {
                wanted.insert(object);
                self.promote_idly(object);
            }
        }
        tracing::debug!(objects = wanted.len(), "Preloading");
    }

    /// Objects of a snapshot that are not among `wanted`, with their sizes.
    fn lacking(&self, id: &SnapshotId, wanted: &HashSet<ObjectId>) -> Vec<(ObjectId, u64)> {
        let core = self.core.lock();
        let hit = core.index.hit(id);
        let objects = hit.into_iter().flat_map(|hit| {
            let kv = hit.kv.into_iter().map(|part| part.object);
            std::iter::once(hit.state).chain(kv)
        });
        let lacking = objects.filter(|object| !wanted.contains(object));
        lacking
            .filter_map(|object| Some((object, core.index.object(&object)?.bytes)))
            .collect()
    }
}

/// The tokens of a snapshot, from those beside its KV; every object's address is computed again.
fn tokens_of(
    disk: &DiskTier,
    manifest: &Manifest,
    key: &TreeKey,
    cache: &mut TokenCache,
) -> Result<Vec<TokenId>, Unusable> {
    if manifest.kv.is_empty() {
        return Err(Unusable::NoKv);
    }
    let mut tokens = Vec::with_capacity(manifest.boundary as usize);
    let mut hasher = PrefixHasher::new(key.fingerprint, key.namespace);
    for part in &manifest.kv {
        let own = match cache.get(&part.object) {
            Some(own) => Arc::clone(own),
            None => {
                let own = disk.tokens(&part.object)?;
                cache.insert(part.object, Arc::clone(&own));
                own
            }
        };
        let skip = (part.range.start - part.object_range.start) as usize;
        let used = own
            .get(skip..)
            .and_then(|own| own.get(..part.range.len() as usize));
        let used = used.ok_or(Unusable::Foreign(part.object))?;
        if skip == 0 {
            let mut whole = hasher.clone();
            whole.update(&own);
            if whole.object(part.object_range.start, ObjectKind::Kv) != part.object {
                return Err(Unusable::Foreign(part.object));
            }
        }
        hasher.update(used);
        tokens.extend_from_slice(used);
    }
    if hasher.object(manifest.boundary, ObjectKind::State) != manifest.state.object {
        return Err(Unusable::Foreign(manifest.state.object));
    }
    Ok(tokens)
}
