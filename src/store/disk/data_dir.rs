//! A data directory that this process owns: checked, locked, counted.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::{io::Read, os::unix::fs::MetadataExt, sync::Arc, time::Duration};

use humantime_serde::re::humantime::format_duration;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::{
    store::{
        catalog::Catalog,
        config::DiskConfig,
        counters::{Counters, Reason},
        error::StoreError,
        fault::{Faults, Op},
        sealed_json::{self, Bad, Record},
    },
    types::{Millis, TierKind},
    util::clock::Clock,
};

use super::{
    layout,
    ledger::{Ledger, Reservation, on_disk},
    quarantine::{Quarantine, Quarantined},
    root::{Entry, Kind, Rel, Root, is_temporary},
};

/// The format of the whole directory: names, folders, protocol of writing.
const FORMAT_VERSION: u32 = 1;
const MAX_LOCK_NOTE: u64 = 4096;

/// It says the same in every data directory of one version.
const DAMAGED_FORMAT: &str = "; nothing was changed: copy format.json from a backup or from another \
     data directory of this version (a daemon makes one in an empty folder), or move this folder \
     away to start with an empty one";

/// The data directory with everything that its users share.
#[derive(Debug)]
pub(crate) struct DataDir {
    pub(crate) root: Root,
    pub(crate) ledger: Ledger,
    quarantine: Quarantine,
    pub(crate) catalog: Catalog,
    clock: Arc<dyn Clock>,
    /// Bytes of the file system that are to stay free.
    pub(crate) min_free: AtomicU64,
    // Held until the end.
    lock: Flock<std::fs::File>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FormatFile {
    format_version: u32,
    created: Millis,
}

/// What the holder of the lock writes into it, for people.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Owner {
    pid: u32,
    host: String,
    since: Millis,
}

// === impl DataDir ===

impl DataDir {
    /// Opens the directory, or makes a new one in an empty folder.
    pub(crate) fn open(
        config: &DiskConfig,
        clock: Arc<dyn Clock>,
        faults: Faults,
        counters: Arc<Counters>,
    ) -> Result<Self, StoreError> {
        let root = Root::open(&config.path, faults, counters)?;
        // Before the lock: not even that is written into a folder of somebody else.
        is_store(&root)?;
        let lock = lock(&root, clock.now())?;
        let there = is_store(&root)?;
        check_format(&root, there, clock.now())?;
        let ledger = Ledger::new(config.bytes.as_u64());
        sweep_top(&root, &ledger)?;
        let limit = config.quarantine.as_u64().min(config.bytes.as_u64() / 16);
        for name in [layout::MODELS, layout::REFS] {
            root.make_folders(&Rel::root().join(name))?;
        }
        let quarantine = Quarantine::open(&root, &ledger, limit)?;
        Ok(Self {
            root,
            ledger,
            quarantine,
            catalog: Catalog::default(),
            clock,
            min_free: AtomicU64::new(config.min_free.as_u64()),
            lock,
        })
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.root.counters()
    }

    /// Bytes of everything in the directory.
    pub(crate) fn used(&self) -> u64 {
        self.ledger.used().saturating_add(self.root.folder_bytes())
    }

    /// The directory is still where the next start will look for it. One that was removed, moved or
    /// emptied takes writes, too, and nobody would ever find them again.
    pub(crate) fn is_there(&self) -> Result<(), StoreError> {
        let path = self.root.path();
        let own = self.lock.metadata();
        let there = path.join(layout::LOCK).symlink_metadata();
        match (own, there) {
            (Ok(own), Ok(there)) if (own.dev(), own.ino()) == (there.dev(), there.ino()) => Ok(()),
            (Ok(_), Err(error)) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(StoreError::io(Op::Open, path.to_owned(), error))
            }
            _ => Err(StoreError::Removed {
                path: path.to_owned(),
            }),
        }
    }

    /// Tries to write, with a file that nobody will miss.
    pub(crate) fn try_to_write(&self) -> Result<(), StoreError> {
        self.is_there()?;
        self.root.is_writable()?;
        let temp = self.root.create_temp(&Rel::root().join("probe"))?;
        let written = self.root.write(&temp, 0, &[0; 4096]);
        let removed = self.root.unlink(&temp.rel);
        written.and(removed.map(drop))
    }

    /// Room for files of `bytes` in all, in the budget and above the floor of free space.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Reservation<'_>, StoreError> {
        self.is_there()?;
        let available = self.root.available()?;
        let taken = self
            .min_free
            .load(Relaxed)
            .saturating_add(self.ledger.pending());
        if available < taken.saturating_add(bytes) {
            return Err(StoreError::Floor {
                path: self.root.path().to_owned(),
                need: bytes,
                available,
                min_free: taken,
            });
        }
        let besides = self.root.folder_bytes();
        self.ledger
            .reserve(bytes, besides)
            .map_err(|full| StoreError::NoSpace {
                tier: TierKind::Disk,
                need: full.need,
                free: full.free,
            })
    }

    /// Writes a record so that after a crash the old one or the new one is there.
    pub(crate) fn put_record<T: Record>(&self, rel: &Rel, record: &T) -> Result<(), StoreError> {
        let bytes = sealed_json::encode(record)
            .map_err(|Bad { detail, .. }| StoreError::invalid(detail))?;
        let reservation = self.reserve(on_disk(bytes.len() as u64))?;
        let old = match self.root.stat(rel)? {
            Some((Kind::File, len)) => on_disk(len),
            _ => 0,
        };
        self.root.replace(rel, &bytes)?;
        reservation.keep();
        self.ledger.sub(old);
        Ok(())
    }

    /// Reads a record. The inner error is a bad file, which is still there.
    pub(crate) fn get_record<T: Record>(&self, rel: &Rel) -> Result<Result<T, Bad>, StoreError> {
        read_record(&self.root, rel)
    }

    /// Removes a file for good; says whether it was there.
    pub(crate) fn remove_durably(&self, rel: &Rel) -> Result<bool, StoreError> {
        let Some((_, len)) = self.root.stat(rel)? else {
            return Ok(false);
        };
        let folder = self.root.open_folder(&rel.parent())?;
        let there = self.root.unlink(rel)?;
        if there {
            self.ledger.sub(on_disk(len));
            self.root.sync_folder(&folder)?;
            self.prune(&rel.parent(), 1);
        }
        Ok(there)
    }

    /// Removes a folder in which files are spread if it is empty, and its parents of that kind: they
    /// take room, too.
    pub(crate) fn prune(&self, folder: &Rel, depth: u32) {
        let mut folder = folder.clone();
        for _ in 0..depth {
            if !layout::is_spread(folder.name()) || !self.root.remove_empty(&folder) {
                return;
            }
            folder = folder.parent();
        }
    }

    /// Moves a bad file aside.
    pub(crate) fn quarantine(&self, rel: &Rel, reason: Reason, detail: &str) -> Quarantined {
        let counted = match self.root.stat(rel) {
            Ok(Some((Kind::File, len))) => on_disk(len),
            _ => 0,
        };
        let place = (&self.root, &self.ledger);
        let now = self.clock.now();
        self.quarantine
            .take(place, (rel, counted), (reason, detail), now)
    }

    /// Calls `f` for each plain file in the folders `<aa>` of `folder`. Links and the like are moved
    /// to quarantine, temporary files and empty folders removed, other names counted and left. Says
    /// whether nothing is left in `folder`.
    pub(crate) fn sweep_spread(
        &self,
        folder: &Rel,
        depth: u32,
        f: &mut dyn FnMut(&Rel, u64) -> bool,
    ) -> Result<bool, StoreError> {
        let entries = match self.root.list(folder) {
            Err(StoreError::UnsafePath { .. }) => {
                self.quarantine(folder, Reason::NotAFile, "a folder was expected");
                return Ok(false);
            }
            entries => entries?,
        };
        let mut empty = true;
        for entry in entries {
            let rel = folder.join(&entry.name);
            match entry.kind {
                Kind::Other => {
                    self.quarantine(&rel, Reason::NotAFile, "neither file nor folder");
                }
                Kind::Folder if depth > 0 && layout::is_spread(&entry.name) => {
                    self.root.saw_folders(1);
                    if !(self.sweep_spread(&rel, depth - 1, f)? && self.root.remove_empty(&rel)) {
                        empty = false;
                    }
                }
                Kind::Folder => {
                    empty = false;
                    self.strange(&rel);
                }
                Kind::File if is_temporary(&entry.name) => {
                    self.root.counters().swept();
                    self.root.discard(&rel);
                }
                Kind::File => {
                    empty = false;
                    self.ledger.add(on_disk(entry.len));
                    if depth > 0 || !f(&rel, entry.len) {
                        self.strange(&rel);
                    }
                }
            }
        }
        Ok(empty)
    }

    /// Deals with something where only folders of files are expected.
    pub(crate) fn stray(&self, rel: &Rel, entry: &Entry) {
        match entry.kind {
            Kind::Other => {
                self.quarantine(rel, Reason::NotAFile, "neither file nor folder");
            }
            Kind::File if is_temporary(&entry.name) => {
                self.counters().swept();
                self.root.discard(rel);
            }
            Kind::File => {
                self.ledger.add(on_disk(entry.len));
                self.strange(rel);
            }
            Kind::Folder => self.strange(rel),
        }
    }

    pub(crate) fn strange(&self, rel: &Rel) {
        self.root.counters().strange();
        tracing::warn!(path = %rel.as_path().display(), "Unknown file in the data directory");
    }
}

/// Reads a record. The inner error is a bad file, which is still there.
pub(crate) fn read_record<T: Record>(root: &Root, rel: &Rel) -> Result<Result<T, Bad>, StoreError> {
    Ok(match root.read_small(rel, sealed_json::MAX_BYTES) {
        Ok(Some(bytes)) => sealed_json::decode(&bytes),
        Ok(None) => Err(Bad::new(Reason::Length, "too long")),
        Err(StoreError::UnsafePath { .. }) => Err(Bad::new(Reason::NotAFile, "not a plain file")),
        Err(error) if is_bad_medium(&error) => Err(Bad::new(Reason::Unreadable, error.to_string())),
        Err(error) => return Err(error),
    })
}

impl Record for FormatFile {
    const FORMAT: u32 = FORMAT_VERSION;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Whether the medium itself could not read.
pub(crate) fn is_bad_medium(error: &StoreError) -> bool {
    matches!(error, StoreError::Io { op: Op::Read, source, .. }
        if source.raw_os_error() == Some(nix::libc::EIO))
}

/// Whether a store is here; anything else than a store or nothing is refused.
fn is_store(root: &Root) -> Result<bool, StoreError> {
    let entries = root.list(&Rel::root())?;
    if entries.iter().any(|entry| entry.name == layout::FORMAT) {
        return Ok(true);
    }
    let alien = entries.iter().find(|entry| {
        let known = entry.name == layout::LOCK || entry.name == "lost+found";
        !known && !is_temporary(&entry.name)
    });
    match alien {
        None => Ok(false),
        Some(alien) => Err(StoreError::NotAStore {
            path: root.path().to_owned(),
            found: alien.name.to_string_lossy().into_owned(),
        }),
    }
}

fn check_format(root: &Root, there: bool, now: Millis) -> Result<(), StoreError> {
    if !there {
        return write_format(root, now);
    }
    let rel = Rel::root().join(layout::FORMAT);
    let path = || root.path().join(layout::FORMAT);
    let damaged = |reason, detail| StoreError::Damaged {
        path: path(),
        reason,
        detail,
        hint: DAMAGED_FORMAT,
    };
    let bytes = root.read_small(&rel, sealed_json::MAX_BYTES)?;
    let bytes = bytes.ok_or_else(|| damaged(Reason::Length, "too long".into()))?;
    sealed_json::decode::<FormatFile>(&bytes).map_err(|bad| match bad.version {
        Some(found) => StoreError::Version {
            path: path(),
            found,
            known: FORMAT_VERSION,
        },
        None => damaged(bad.reason, bad.detail),
    })?;
    Ok(())
}

/// What is wrong with the directory's format file; another version is an error.
pub(crate) fn bad_format(root: &Root) -> Result<Option<Bad>, StoreError> {
    let rel = Rel::root().join(layout::FORMAT);
    match read_record::<FormatFile>(root, &rel) {
        Ok(Ok(_)) => Ok(None),
        Ok(Err(bad)) => match bad.version {
            Some(found) => Err(StoreError::Version {
                path: root.path().join(layout::FORMAT),
                found,
                known: FORMAT_VERSION,
            }),
            None => Ok(Some(bad)),
        },
        Err(error) if error.is_missing() => Ok(Some(Bad::new(Reason::Incomplete, "missing"))),
        Err(error) => Err(error),
    }
}

/// Writes the directory's format file.
pub(crate) fn write_format(root: &Root, now: Millis) -> Result<(), StoreError> {
    let file = FormatFile {
        format_version: FORMAT_VERSION,
        created: now,
    };
    let bytes = sealed_json::encode(&file).expect("two numbers");
    root.replace(&Rel::root().join(layout::FORMAT), &bytes)
}

/// Counts what lies in the directory itself and removes what is only worth something to the process
/// that wrote it.
fn sweep_top(root: &Root, ledger: &Ledger) -> Result<(), StoreError> {
    for entry in root.list(&Rel::root())? {
        let rel = Rel::root().join(&entry.name);
        match entry.kind {
            Kind::Folder => root.saw_folders(1),
            // Whoever takes it over counts it.
            _ if layout::is_token_log(&entry.name) => {}
            _ if entry.name == layout::TOKENS => {
                root.unlink(&rel)?;
            }
            Kind::File if is_temporary(&entry.name) => {
                root.counters().swept();
                root.discard(&rel);
            }
            Kind::File | Kind::Other => ledger.add(on_disk(entry.len)),
        }
    }
    Ok(())
}

/// Keeps everybody else away, with a note for them that says who does.
pub(crate) fn lock(root: &Root, now: Millis) -> Result<Flock<std::fs::File>, StoreError> {
    let rel = Rel::root().join(layout::LOCK);
    let file = root.open_or_create(&rel)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => {
            let owner = Owner {
                pid: std::process::id(),
                host: host(),
                since: now,
            };
            let note = serde_json::to_vec(&owner).expect("plain strings and numbers");
            root.overwrite(&lock, &rel, &note)?;
            Ok(lock)
        }
        Err((file, errno)) => Err(not_locked(root, file, errno, now)),
    }
}

/// Keeps writers away and changes nothing; `None` in a directory without the file for it.
pub(crate) fn lock_to_read(
    root: &Root,
    now: Millis,
) -> Result<Option<Flock<std::fs::File>>, StoreError> {
    let file = match root.open_file(&Rel::root().join(layout::LOCK)) {
        Ok((file, _)) => file,
        Err(error) if error.is_missing() => return Ok(None),
        Err(error) => return Err(error),
    };
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((file, errno)) => Err(not_locked(root, file, errno, now)),
    }
}

fn not_locked(
    root: &Root,
    file: std::fs::File,
    errno: nix::errno::Errno,
    now: Millis,
) -> StoreError {
    let path = root.path().to_owned();
    if errno != nix::errno::Errno::EWOULDBLOCK {
        return StoreError::io(Op::Open, path, errno.into());
    }
    let mut note = Vec::new();
    let read = file.take(MAX_LOCK_NOTE).read_to_end(&mut note);
    let owner: Option<Owner> = read.ok().and_then(|_| serde_json::from_slice(&note).ok());
    // Who only reads leaves no note: it may be of somebody who is gone.
    let owner = owner.filter(Owner::may_live);
    StoreError::Locked {
        path,
        owner: match owner {
            Some(Owner { pid, host, since }) => {
                let age = Duration::from_secs(now.since(since).as_secs());
                format!(
                    "process {pid} on {host}, since {} ({} ago)",
                    since.rfc3339(),
                    format_duration(age)
                )
            }
            None => "another process, which may be a check by `engram fsck`".into(),
        },
    }
}

fn host() -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    host.to_string_lossy().into_owned()
}

// === impl Owner ===

impl Owner {
    /// Processes of other hosts, or of other containers, cannot be looked for.
    fn may_live(&self) -> bool {
        self.host != host()
            || std::path::Path::new("/proc")
                .join(self.pid.to_string())
                .exists()
    }
}
