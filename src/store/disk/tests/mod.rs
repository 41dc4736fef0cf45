//! The disk tier against damage, planted links, faults and restarts.

mod conversations;
mod damage;
mod faults;
mod flips;
mod fsck;
mod fsck_repair;
mod links;
mod scrub;
mod start;
mod true_store;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytesize::ByteSize;
use tempfile::TempDir;

use super::{layout, quarantine::Quarantined};
use crate::{
    store::{
        Config, DiskConfig, DiskTier, IoEngine, Manifest, Manifests, Object, Refs, Store,
        StoreError, Tier, fault::Faults, sample,
    },
    types::{Millis, ObjectId},
    util::clock::ManualClock,
};

/// A data directory, opened again and again.
struct Bed {
    folder: TempDir,
    bytes: ByteSize,
    min_free: ByteSize,
    engine: IoEngine,
}

/// What a start found.
struct Start {
    store: Store,
    snapshots: Vec<Manifest>,
    bad: Vec<Quarantined>,
}

impl Bed {
    fn new() -> Self {
        // Where fsync costs nothing, if there is such a place.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self {
            folder: folder.unwrap(),
            bytes: ByteSize::mib(64),
            min_free: ByteSize::b(0),
            engine: IoEngine::Threads,
        }
    }

    fn dir(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    fn open_with(&self, faults: Faults) -> Result<Store, StoreError> {
        let config = Config {
            ram: ByteSize::mib(16),
            ram_headroom: None,
            disk: Some(DiskConfig {
                bytes: self.bytes,
                min_free: self.min_free,
                io_threads: 1,
                io_engine: self.engine,
                ..DiskConfig::at(self.dir())
            }),
        };
        config.build_faulty(Arc::new(ManualClock::new(Millis(1_000))), faults)
    }

    fn open(&self) -> Result<Store, StoreError> {
        self.open_with(Faults::default())
    }

    /// Opens, scans and registers the sample model.
    fn start(&self) -> Start {
        let start = scan(self.open().unwrap()).unwrap();
        register(&start.store).unwrap();
        start
    }

    /// Path of one shard of an object.
    fn object(&self, id: &ObjectId, shard: u32) -> PathBuf {
        self.dir()
            .join(layout::object(&sample::MODEL, id, shard).as_path())
    }

    fn manifest(&self, manifest: &Manifest) -> PathBuf {
        let rel = layout::manifest(&manifest.fingerprint, &manifest.snapshot);
        self.dir().join(rel.as_path())
    }

    /// Names in quarantine that end so.
    fn quarantined(&self, end: &str) -> Vec<String> {
        let entries = fs::read_dir(self.dir().join(layout::QUARANTINE)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(end)).collect()
    }
}

impl Start {
    fn disk(&self) -> &DiskTier {
        disk(&self.store)
    }

    fn manifests(&self) -> &Manifests {
        self.store.manifests.as_ref().unwrap()
    }

    fn refs(&self) -> &Refs {
        self.store.refs.as_ref().unwrap()
    }

    fn put(&self, object: &Object) {
        self.disk().put(object).unwrap();
    }

    /// Whether the object is read back with the bytes of its seed.
    fn is_right(&self, seed: u64) -> bool {
        let got = self.disk().get(&sample::id(seed), &self.store.arena);
        got.is_ok_and(|object| sample::is_right(&object, seed))
    }

    /// A snapshot at token 1500 with the objects `seed` (state), `seed + 1` and `seed + 2` (KV).
    fn snapshot(&self, seed: u64) -> Manifest {
        let [state, a, b] = snapshot_objects(&self.store, seed);
        for object in [&a, &b, &state] {
            self.put(object);
        }
        let manifest = sample::manifest(&state, &[&a, &b]);
        self.manifests().put(&manifest).unwrap();
        manifest
    }
}

fn disk(store: &Store) -> &DiskTier {
    store.disk.as_ref().unwrap()
}

fn scan(store: Store) -> Result<Start, StoreError> {
    let (mut snapshots, mut bad) = (Vec::new(), Vec::new());
    let manifests = store.manifests.as_ref().unwrap();
    manifests.scan(&mut |found| match found {
        Ok(manifest) => snapshots.push(manifest),
        Err(quarantined) => bad.push(quarantined),
    })?;
    Ok(Start {
        store,
        snapshots,
        bad,
    })
}

fn register(store: &Store) -> Result<(), StoreError> {
    let description = BTreeMap::from([("name".into(), "sample".into())]);
    disk(store).register_model(sample::MODEL, &sample::geometry(), description)?;
    Ok(())
}

fn snapshot_objects(store: &Store, seed: u64) -> [Object; 3] {
    let geometry = sample::geometry();
    [
        sample::state(&store.arena, &geometry, 1500, seed),
        sample::kv(&store.arena, &geometry, 0, 1024, seed + 1),
        sample::kv(&store.arena, &geometry, 1024, 1500, seed + 2),
    ]
}

/// Bytes of all files and folders, as `du --apparent-size` rounds them up to blocks.
fn du(path: &Path) -> u64 {
    let metadata = fs::symlink_metadata(path).unwrap();
    if !metadata.is_dir() {
        return metadata.len().next_multiple_of(4096);
    }
    let entries = fs::read_dir(path).unwrap();
    4096 + entries.map(|entry| du(&entry.unwrap().path())).sum::<u64>()
}
