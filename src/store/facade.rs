//! All tiers of one daemon, as the configuration says.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::{device::shm::ShmError, util::clock::Clock};

use super::{
    arena::{Arena, ArenaError},
    catalog::Image,
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
    ram_most: u64,
    pub(super) dir: Option<Arc<DataDir>>,
    counters: Arc<Counters>,
}

// === impl Store ===

impl Store {
    pub(crate) fn open(
        config: Config,
        clock: Arc<dyn Clock>,
        faults: Faults,
    ) -> Result<Self, StoreError> {
        let ram_most = config.ram_budget();
        let ram = RamTier::new(ram_most);
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
            ram_most,
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

    /// Starts an empty catalog, with an empty token log that belongs to it. Whatever catalog there
    /// was is gone.
    ///
    /// # Errors
    /// Those of the system: then there is none, and everything works without.
    pub fn new_catalog(&self) -> Result<TokenLog, StoreError> {
        let dir = self.dir.as_ref().ok_or(StoreError::NotScanned)?;
        let made = dir.catalog.create(dir).and_then(|epoch| {
            let mut log = TokenLog::of_catalog(Arc::clone(dir), epoch)?;
            log.settle();
            Ok(log)
        });
        if made.is_err() {
            dir.catalog.give_up(dir, "it could not be made");
        }
        made
    }

    /// The token log that belongs to a catalog.
    ///
    /// # Errors
    /// Those of the system.
    pub fn token_log_of(&self, image: &Image) -> Result<TokenLog, StoreError> {
        let dir = self.dir.as_ref().ok_or(StoreError::NotScanned)?;
        TokenLog::of_catalog(Arc::clone(dir), image.epoch())
    }

    /// The orderly end of the catalog: all that is written is durable, and nothing more may be
    /// written.
    pub fn close_catalog(&self, tokens: &TokenLog) {
        let Some(dir) = &self.dir else { return };
        if !dir.catalog.is_on() {
            return;
        }
        if tokens.is_kept() && tokens.is_wasteful() {
            match dir.catalog.close_compact(dir, tokens) {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, "The token log was not written anew"),
            }
        }
        let closed = match tokens.sync() {
            Ok(()) => dir.catalog.close(dir),
            Err(error) => {
                dir.catalog.give_up(dir, &error.to_string());
                return;
            }
        };
        if let Err(error) = closed {
            tracing::warn!(%error, "The catalog was not closed; after a start of the host it is rebuilt");
        }
    }

    /// Gives the catalog up: the next start reads the manifests.
    pub fn give_up_catalog(&self, why: &str) {
        if let Some(dir) = &self.dir {
            dir.catalog.give_up(dir, why);
        }
    }

    /// Whether the disk tier has room for so many bytes now: in its budget, and on the file system.
    #[must_use]
    pub fn disk_has_room(&self, bytes: u64) -> bool {
        self.dir
            .as_ref()
            .is_some_and(|dir| dir.reserve(bytes).is_ok())
    }

    /// Whether the data directory is where it was and mounted to be written to; `thoroughly`:
    /// whether a file can be written there, too.
    ///
    /// # Errors
    /// What a write would meet.
    pub fn look_at_disk(&self, thoroughly: bool) -> Result<(), StoreError> {
        match &self.dir {
            Some(dir) if thoroughly => dir.try_to_write(),
            Some(dir) => dir.is_there().and_then(|()| dir.root.is_writable()),
            None => Ok(()),
        }
    }

    /// Bytes that the disk tier could hold on its file system if it had no budget: its own, and
    /// what is free beyond what is to stay free.
    #[must_use]
    pub fn disk_can_hold(&self) -> Option<u64> {
        let dir = self.dir.as_ref()?;
        Some(
            dir.used().saturating_add(
                dir.root
                    .available()
                    .ok()?
                    .saturating_sub(dir.min_free.load(Relaxed)),
            ),
        )
    }

    /// The largest budget of the RAM tier: the arena without what is left to copies on their way.
    #[must_use]
    pub fn ram_most(&self) -> u64 {
        self.ram_most
    }

    /// Bytes of the disk's file system that are to stay free; `None`: there is no disk tier.
    #[must_use]
    pub fn disk_min_free(&self) -> Option<u64> {
        self.dir.as_ref().map(|dir| dir.min_free.load(Relaxed))
    }

    /// From now on so many bytes of the disk's file system are to stay free. What is there stays.
    pub fn set_disk_min_free(&self, bytes: u64) {
        if let Some(dir) = &self.dir {
            dir.min_free.store(bytes, Relaxed);
        }
    }

    /// Bytes that the file system has less free than it is to have.
    #[must_use]
    pub fn disk_below_floor(&self) -> u64 {
        let short = self.dir.as_ref().and_then(|dir| {
            let available = dir.root.available().ok()?;
            Some(dir.min_free.load(Relaxed).saturating_sub(available))
        });
        short.unwrap_or(0)
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
