//! How large the tiers are and where the disk tier is.

use std::{path::PathBuf, sync::Arc};

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use crate::util::clock::Clock;

use super::{error::StoreError, facade::Store, fault::Faults};

const MAX_IO_THREADS: u32 = 64;
const LEAST_RAM: u64 = 1 << 20;

/// The store's part of the configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The arena: all payload in RAM, and all that is on its way. Bytes. Default: `4 GiB`.
    pub ram: ByteSize,
    /// Part of the arena that the RAM tier leaves to what is on its way between a worker and the
    /// disk. Bytes. Default: an eighth of `ram`.
    pub ram_headroom: Option<ByteSize>,
    /// The disk tier. Default: none.
    pub disk: Option<DiskConfig>,
}

/// The disk tier.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// The data directory. Made if missing; its parent must be there.
    pub path: PathBuf,
    /// All that the directory may hold, in bytes as `du` counts them. Default: `64 GiB`.
    #[serde(default = "DiskConfig::default_bytes")]
    pub bytes: ByteSize,
    /// Free space that the file system keeps for others: nothing is written that would go below.
    /// Bytes. Default: `4 GiB`.
    #[serde(default = "DiskConfig::default_min_free")]
    pub min_free: ByteSize,
    /// Most bytes of bad files that are kept aside, at most a sixteenth of `bytes`. They count in
    /// `bytes`. Default: `1 GiB`.
    #[serde(default = "DiskConfig::default_quarantine")]
    pub quarantine: ByteSize,
    /// Threads that read or write one large object together, as many reads or writes
    /// under way. Default: `8`.
    #[serde(default = "DiskConfig::default_io_threads")]
    pub io_threads: u32,
    /// Who reads and writes large objects. Default: `"threads"`.
    #[serde(default)]
    pub io_engine: IoEngine,
    /// Bypass the page cache, where the file system can. Default: `true`.
    #[serde(default = "DiskConfig::default_direct_io")]
    pub direct_io: bool,
}

/// Who reads and writes large objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoEngine {
    /// `io_threads` threads, each in a system call of its own.
    #[default]
    Threads,
    /// One thread and io_uring; threads where there is none.
    Uring,
}

// === impl IoEngine ===

impl IoEngine {
    /// Its name in configuration and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Uring => "uring",
        }
    }
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Self {
            ram: ByteSize::gib(4),
            ram_headroom: None,
            disk: None,
        }
    }
}

impl Config {
    /// All that is wrong, one line each; empty if nothing is.
    #[must_use]
    pub fn validate(&self) -> Vec<String> {
        let Self {
            ram,
            ram_headroom,
            disk,
        } = self;
        let mut wrong = Vec::new();
        if ram.as_u64() < LEAST_RAM {
            wrong.push(format!("store.ram: {ram} is less than 1 MiB"));
        }
        if ram_headroom.is_some_and(|headroom| headroom >= *ram) {
            wrong.push("store.ram_headroom: nothing of store.ram is left".into());
        }
        if let Some(disk) = disk {
            disk.validate(&mut wrong);
        }
        wrong
    }

    /// Opens or makes the store.
    ///
    /// # Errors
    /// `Invalid` with all that [`Config::validate`] says; `Locked`, `Version`, `NotAStore` and those of
    /// the system.
    pub fn build(self, clock: Arc<dyn Clock>) -> Result<Store, StoreError> {
        self.build_with(clock, Faults::default())
    }

    /// As [`Config::build`], with switches for faults.
    pub(crate) fn build_with(
        self,
        clock: Arc<dyn Clock>,
        faults: Faults,
    ) -> Result<Store, StoreError> {
        let wrong = self.validate();
        if !wrong.is_empty() {
            return Err(StoreError::invalid(wrong.join("; ")));
        }
        Store::open(self, clock, faults)
    }

    /// As [`Config::build`], with switches for faults.
    #[cfg(any(test, feature = "testing"))]
    pub fn build_faulty(self, clock: Arc<dyn Clock>, faults: Faults) -> Result<Store, StoreError> {
        self.build_with(clock, faults)
    }

    /// Bytes that the RAM tier may hold.
    pub(crate) fn ram_budget(&self) -> u64 {
        let ram = self.ram.as_u64();
        let headroom = self.ram_headroom.map_or(ram / 8, |bytes| bytes.as_u64());
        ram.saturating_sub(headroom)
    }
}

// === impl DiskConfig ===

impl DiskConfig {
    /// A disk tier at this place with all defaults.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        Self {
            path,
            bytes: Self::default_bytes(),
            min_free: Self::default_min_free(),
            quarantine: Self::default_quarantine(),
            io_threads: Self::default_io_threads(),
            io_engine: IoEngine::default(),
            direct_io: Self::default_direct_io(),
        }
    }

    fn validate(&self, wrong: &mut Vec<String>) {
        let Self {
            path,
            bytes,
            min_free: _,
            quarantine: _,
            io_threads,
            io_engine: _,
            direct_io: _,
        } = self;
        if path.as_os_str().is_empty() {
            wrong.push("store.disk.path: empty".into());
        }
        if bytes.as_u64() < LEAST_RAM {
            wrong.push(format!("store.disk.bytes: {bytes} is less than 1 MiB"));
        }
        if *io_threads == 0 || *io_threads > MAX_IO_THREADS {
            wrong.push(format!(
                "store.disk.io_threads: {io_threads} is not 1 to 64"
            ));
        }
    }

    fn default_bytes() -> ByteSize {
        ByteSize::gib(64)
    }

    fn default_min_free() -> ByteSize {
        ByteSize::gib(4)
    }

    fn default_quarantine() -> ByteSize {
        ByteSize::gib(1)
    }

    fn default_io_threads() -> u32 {
        8
    }

    fn default_direct_io() -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_is_said_at_once() {
        let text = r#"
            ram = "1 KiB"
            ram_headroom = "2 KiB"
            disk = { path = "", bytes = "10 B", io_threads = 65 }
        "#;
        let config: Config = toml::from_str(text).unwrap();
        let wrong = config.validate();
        assert_eq!(wrong.len(), 5, "{wrong:?}");
        assert!(toml::from_str::<Config>("rom = 1").is_err());
        assert!(toml::from_str::<Config>("disk = { path = 'x', size = 1 }").is_err());
        let config: Config = toml::from_str("disk = { path = 'x' }").unwrap();
        assert!(config.validate().is_empty());
        assert_eq!(config.ram_budget(), ByteSize::mib(3584).as_u64());
    }
}
