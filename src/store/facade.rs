//! All tiers of one daemon, as the configuration says.

use std::sync::Arc;

use crate::{device::shm::ShmError, util::clock::Clock};

use super::{
    arena::{Arena, ArenaError},
    config::Config,
    counters::{Counters, Counts},
    disk::{DiskTier, conversations::Refs, data_dir::DataDir, manifests::Manifests},
    error::StoreError,
    fault::{Faults, Op},
    ram::RamTier,
    token_log::TokenLog,
};

/// The store.
#[derive(Debug)]
pub struct Store {
    /// Where all payload in RAM lies.
    pub arena: Arena,
    /// The RAM tier.
    pub ram: RamTier,
    /// The disk tier, if configured.
    pub disk: Option<Arc<DiskTier>>,
    /// The snapshots on disk, if configured.
    pub manifests: Option<Manifests>,
    /// The conversations on disk, if configured.
    pub refs: Option<Refs>,
    dir: Option<Arc<DataDir>>,
    counters: Arc<Counters>,
}

// === impl Store ===

impl Store {
    pub(crate) fn open(
        config: Config,
        clock: Arc<dyn Clock>,
        faults: Faults,
    ) -> Result<Self, StoreError> {
        let ram = RamTier::new(config.ram_budget());
        let Config {
            ram: ram_bytes,
            ram_headroom: _,
            disk: disk_config,
        } = config;
        let counters = Arc::new(Counters::default());
        let mut store = Self {
            arena: Arena::new("engram-arena", ram_bytes.as_u64())
                .map_err(|error| no_arena(error, ram_bytes.as_u64()))?,
            ram,
            disk: None,
            manifests: None,
            refs: None,
            dir: None,
            counters: Arc::clone(&counters),
        };
        if let Some(config) = disk_config {
            let dir = Arc::new(DataDir::open(&config, clock, faults, counters)?);
            let disk = Arc::new(DiskTier::open(Arc::clone(&dir), &config)?);
            store.manifests = Some(Manifests::new(Arc::clone(&dir), Arc::clone(&disk)));
            store.refs = Some(Refs::new(Arc::clone(&dir)));
            store.disk = Some(disk);
            store.dir = Some(dir);
        }
        Ok(store)
    }

    /// An empty token log: in the data directory if there is one, else in memory. The one before it
    /// must not be used any more.
    pub fn token_log(&self) -> Result<TokenLog, StoreError> {
        match &self.dir {
            Some(dir) => TokenLog::on_disk(Arc::clone(dir)),
            None => TokenLog::in_memory()
                .map_err(|error| StoreError::io(Op::Open, "memfd".into(), error)),
        }
    }

    /// Whether the disk tier has room for so many bytes now: in its budget, and on the file system.
    #[must_use]
    pub fn disk_has_room(&self, bytes: u64) -> bool {
        self.dir
            .as_ref()
            .is_some_and(|dir| dir.reserve(bytes).is_ok())
    }

    /// Bytes that the disk tier could hold on its file system if it had no budget: its own, and
    /// what is free beyond what is to stay free.
    #[must_use]
    pub fn disk_can_hold(&self) -> Option<u64> {
        let dir = self.dir.as_ref()?;
        Some(
            dir.used()
                .saturating_add(dir.root.available().ok()?.saturating_sub(dir.min_free())),
        )
    }

    /// What was done since the start.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counters.counts()
    }
}

fn no_arena(error: ArenaError, bytes: u64) -> StoreError {
    match error {
        ArenaError::Io(source) | ArenaError::Shm(ShmError::System { source, .. }) => {
            StoreError::NoMemory { bytes, source }
        }
        error => StoreError::invalid(error.to_string()),
    }
}
