//! Section `[store]`: budgets of the tiers. `"auto"` budgets are worked out at start from what the
//! machine has, and are always bounded.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use bytesize::ByteSize;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::memory;
use crate::store;

/// Tiers and their budgets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Store {
    /// RAM tier, in bytes; taken whole at start. `"auto"`: a quarter of the available memory, at
    /// most 8 GiB. Default: `"auto"`.
    pub ram: Budget,
    /// Part of it that is left to what is on its way between a worker and the disk. `"auto"`: an
    /// eighth. Default: `"auto"`.
    pub ram_headroom: Budget,
    /// Section `[store.disk]`.
    pub disk: Disk,
}

/// The disk tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Disk {
    /// Folder of the disk tier, absolute; made when missing, its parents are not: a disk that is
    /// not mounted is no place. `""`: no disk tier, nothing survives a restart. Default: `"/var/lib/engram"`.
    pub path: PathBuf,
    /// Bytes that the tier may use. `"auto"`: half of what is free at start, at most 100 GiB.
    /// Default: `"auto"`.
    pub budget: Budget,
    /// Bytes of the file system that stay free whatever the budget says. `"auto"`: a twentieth of
    /// the file system, at most 5 GiB. Default: `"auto"`.
    pub min_free: Budget,
    /// Most bytes of bad files that are kept aside, within the budget. Default: `"1 GiB"`.
    pub quarantine: ByteSize,
    /// Threads that read or write one large object together. Default: `8`.
    pub io_threads: u32,
    /// Who reads and writes large objects: `"threads"`, or `"uring"` (one thread and io_uring; threads,
    /// and a warning, where the kernel or a filter of system calls has none). Default: `"threads"`.
    pub io_engine: store::IoEngine,
    /// Bypass the page cache, where the file system can. Default: `true`.
    pub direct_io: bool,
}

/// A size, or `"auto"`.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Budget {
    /// Worked out at start.
    Auto,
    /// Exactly this.
    Bytes(ByteSize),
}

/// The smallest RAM tier that is worked out.
const RAM_MIN: u64 = 16 << 20;
/// The smallest RAM tier that can be asked for: a few states of a small model.
const RAM_LEAST: u64 = 1 << 20;
/// The smallest disk tier that makes sense.
const DISK_MIN: u64 = 16 << 20;

// === impl Store ===

impl Default for Store {
    fn default() -> Self {
        Store {
            ram: Budget::Auto,
            ram_headroom: Budget::Auto,
            disk: Disk::default(),
        }
    }
}

impl Store {
    /// Adds every problem of this section to `problems`.
    pub fn validate(&self, problems: &mut Vec<String>) {
        let Store {
            ram,
            ram_headroom,
            disk,
        } = self;
        if let Budget::Bytes(size) = ram
            && !(RAM_LEAST..=1 << 50).contains(&size.as_u64())
        {
            problems.push(format!("store.ram: {size} is not between 1 MiB and 1 PiB"));
        } else if let (Budget::Bytes(size), Some(total)) = (ram, memory::total())
            && size.as_u64() > total
        {
            let total = ByteSize::b(total);
            problems.push(format!(
                "store.ram: {size} is more than the memory of this machine or control group, \
                 {total}"
            ));
        }
        if let (Budget::Bytes(size), Budget::Bytes(headroom)) = (ram, ram_headroom)
            && headroom >= size
        {
            problems.push(format!("store.ram_headroom: nothing of {size} is left"));
        }
        disk.validate(problems);
    }

    /// Works out the `"auto"` budgets from this machine's memory and file system.
    pub fn resolve(&self) -> store::Config {
        let Store {
            ram,
            ram_headroom,
            disk,
        } = self;
        let ram = ram.or(|| (memory::available() / 4).clamp(RAM_MIN, 8 << 30));
        let headroom = ram_headroom.or(|| ram / 8).min(ram / 2);
        store::Config {
            ram: ByteSize::b(ram),
            ram_headroom: Some(ByteSize::b(headroom)),
            disk: disk.resolve(),
        }
    }
}

struct FileSystem {
    size: u64,
    free: u64,
}

impl FileSystem {
    /// The file system that holds `path`, or will once it is made; zeros where nobody knows.
    fn of(path: &Path) -> FileSystem {
        let stat = path
            .ancestors()
            .find_map(|folder| nix::sys::statvfs::statvfs(folder).ok());
        match stat {
            Some(stat) => {
                let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
                FileSystem {
                    size: bytes(stat.blocks()),
                    free: bytes(stat.blocks_available()),
                }
            }
            None => FileSystem { size: 0, free: 0 },
        }
    }
}

// === impl Disk ===

impl Default for Disk {
    fn default() -> Self {
        Disk {
            path: PathBuf::from("/var/lib/engram"),
            budget: Budget::Auto,
            min_free: Budget::Auto,
            quarantine: ByteSize::gib(1),
            io_threads: 8,
            io_engine: store::IoEngine::Threads,
            direct_io: true,
        }
    }
}

impl Disk {
    fn validate(&self, problems: &mut Vec<String>) {
        let Disk {
            path,
            budget,
            min_free: _,
            quarantine: _,
            io_threads,
            io_engine: _,
            direct_io: _,
        } = self;
        if !path.as_os_str().is_empty() && !path.is_absolute() {
            problems.push(format!(
                "store.disk.path: {} is not absolute",
                path.display()
            ));
        }
        if path.as_os_str().as_encoded_bytes().contains(&0) {
            problems.push("store.disk.path: contains a NUL byte".into());
        }
        if let Budget::Bytes(size) = budget
            && !(DISK_MIN..=1 << 60).contains(&size.as_u64())
        {
            problems.push(format!(
                "store.disk.budget: {size} is not between 16 MiB and 1 EiB"
            ));
        }
        if !(1..=64).contains(io_threads) {
            problems.push(format!(
                "store.disk.io_threads: {io_threads} is not between 1 and 64"
            ));
        }
    }

    /// `None` without a path: no disk tier.
    fn resolve(&self) -> Option<store::DiskConfig> {
        let Disk {
            path,
            budget,
            min_free,
            quarantine,
            io_threads,
            io_engine,
            direct_io,
        } = self;
        if path.as_os_str().is_empty() {
            return None;
        }
        let FileSystem { size, free } = FileSystem::of(path);
        Some(store::DiskConfig {
            path: path.clone(),
            bytes: ByteSize::b(budget.or(|| (free / 2).clamp(DISK_MIN, 100 << 30))),
            min_free: ByteSize::b(min_free.or(|| (size / 20).min(5 << 30))),
            quarantine: *quarantine,
            io_threads: *io_threads,
            io_engine: *io_engine,
            direct_io: *direct_io,
        })
    }
}

// === impl Budget ===

impl Budget {
    fn or(self, auto: impl FnOnce() -> u64) -> u64 {
        match self {
            Budget::Auto => auto(),
            Budget::Bytes(size) => size.as_u64(),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Auto => f.write_str("auto"),
            Budget::Bytes(size) => write!(f, "{size}"),
        }
    }
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Budget::Auto);
        }
        text.parse()
            .map(Budget::Bytes)
            .map_err(|_| format!("`{text}` is neither \"auto\" nor a size such as \"8 GiB\""))
    }
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_budgets_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not/made/yet");
        let disk = Disk {
            path: path.clone(),
            ..Disk::default()
        };
        let resolved = Store {
            disk,
            ..Store::default()
        }
        .resolve();
        assert!((RAM_MIN..=8 << 30).contains(&resolved.ram.as_u64()));
        assert!(resolved.ram_headroom.unwrap() < resolved.ram);
        let disk = resolved.disk.as_ref().unwrap();
        assert_eq!(disk.path, path);
        assert!((DISK_MIN..=100 << 30).contains(&disk.bytes.as_u64()));
        assert!((1..=5 << 30).contains(&disk.min_free.as_u64()));
        assert_eq!(resolved.validate(), Vec::<String>::new());
    }

    #[test]
    fn given_budgets_are_taken_as_they_are() {
        let size = |n| Budget::Bytes(ByteSize::mib(n));
        let disk = Disk {
            path: "/x".into(),
            budget: size(70),
            min_free: size(0),
            ..Disk::default()
        };
        let store = Store {
            ram: size(64),
            ram_headroom: size(16),
            disk,
        };
        let resolved = store.resolve();
        assert_eq!(resolved.ram, ByteSize::mib(64));
        assert_eq!(resolved.ram_headroom, Some(ByteSize::mib(16)));
        let disk = resolved.disk.unwrap();
        assert_eq!(
            (disk.bytes, disk.min_free),
            (ByteSize::mib(70), ByteSize::b(0))
        );
        let none = Store {
            disk: Disk {
                path: "".into(),
                ..Disk::default()
            },
            ..store
        };
        assert!(none.resolve().disk.is_none());
    }

    #[test]
    fn more_ram_than_there_is_is_refused() {
        let problems = |size| {
            let mut problems = Vec::new();
            let store = Store {
                ram: Budget::Bytes(size),
                ..Store::default()
            };
            store.validate(&mut problems);
            problems
        };
        let found = problems(ByteSize::tib(512));
        assert!(
            found.len() == 1 && found[0].starts_with("store.ram: 512"),
            "{found:?}"
        );
        assert_eq!(problems(ByteSize::mib(64)), Vec::<String>::new());
    }

    #[test]
    fn budgets_read_as_they_are_written() {
        for text in ["auto", "512.0 MiB", "0 B"] {
            assert_eq!(text.parse::<Budget>().unwrap().to_string(), text);
        }
        assert!("much".parse::<Budget>().is_err());
        assert!("-1".parse::<Budget>().is_err());
    }
}
