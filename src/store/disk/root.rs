//! The data directory: every operation on a file of the store goes through here.
//!
//! # What
//! Paths are relative to the directory's descriptor and resolved without following any link and
//! without leaving it (openat2, or component by component where that system call is denied). What
//! stands where a plain file or folder should be and is none is `UnsafePath`, and not touched.
//!
//! # State
//! The first failed fsync *poisons* the root: the kernel may have dropped the pages that it could not
//! write, so a later fsync that succeeds proves nothing. From then on every change is refused; reading
//! goes on.
//!
//! # Order of writes
//! Temporary file in the same folder, fsync of the file, rename, fsync of the folder. A folder is
//! fsynced in its parent when this process uses it first, as an earlier one may have died between
//! making and syncing it.
//!
//! # Errors
//! All carry the full path. Faults that tests inject come out as errors of the system do.

mod read;
mod write;

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Component, Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, FcntlArg, OFlag, OpenHow, ResolveFlag, fcntl, open, openat, openat2},
    sys::{
        stat::{FileStat, Mode, SFlag, fstat, fstatat},
        statvfs::{FsFlags, fstatvfs},
    },
};
use parking_lot::Mutex;

use crate::{
    device::uring::{Move, Uring, Way},
    store::{
        counters::Counters,
        error::StoreError,
        fault::{Faults, Op, Verdict},
    },
};

/// Start of the names of files that are not complete yet.
const TMP: &str = ".tmp-";
/// What a folder takes, as `du` counts it.
const FOLDER_BYTES: u64 = 4096;

const FILE_MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);
const FOLDER_MODE: Mode = Mode::S_IRWXU;

/// A path below the data directory, of plain components only.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rel(PathBuf);

/// The open data directory.
#[derive(Debug)]
pub(crate) struct Root {
    dir: OwnedFd,
    path: PathBuf,
    resolve: Resolve,
    poison: OnceLock<String>,
    /// Folders whose names are known to be on the medium.
    durable: Mutex<HashSet<Rel>>,
    folders: AtomicU64,
    faults: Faults,
    counters: Arc<Counters>,
}

/// What stands under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Folder,
    Other,
}

/// A name in a folder.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: OsString,
    pub(crate) kind: Kind,
    /// Bytes of a file.
    pub(crate) len: u64,
}

/// A file that has no final name yet.
#[derive(Debug)]
pub(crate) struct Temp {
    pub(crate) file: File,
    pub(crate) rel: Rel,
}

/// A folder whose names are about to change.
#[derive(Debug)]
pub(crate) struct Folder {
    file: File,
    rel: Rel,
}

/// A folder, and what must be fsynced with it so that it stays: from below, each folder that is new
/// with the one that it lies in.
pub(crate) struct Folders {
    own: Folder,
    above: Vec<(Rel, Folder)>,
}

/// Why moves through a ring ended early.
enum Stop {
    Failed(io::Error),
    Enough,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resolve {
    /// openat2 with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS`.
    Kernel,
    /// One openat with `O_NOFOLLOW` for each component.
    Walk,
}

// === impl Stop ===

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

// === impl Rel ===

impl Rel {
    /// The data directory itself.
    pub(crate) fn root() -> Self {
        Self(PathBuf::new())
    }

    /// A name in this folder.
    ///
    /// # Panics
    /// If the name is not one plain component; all names come from this crate or from a listing.
    pub(crate) fn join(&self, name: impl AsRef<OsStr>) -> Self {
        let name = name.as_ref();
        let mut components = Path::new(name).components();
        let plain = matches!(components.next(), Some(Component::Normal(n)) if n == name)
            && components.next().is_none();
        assert!(plain, "{name:?} is no plain name");
        Self(self.0.join(name))
    }

    pub(crate) fn as_path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn parent(&self) -> Self {
        Self(self.0.parent().unwrap_or(Path::new("")).to_owned())
    }

    /// The last component; empty for the root.
    pub(crate) fn name(&self) -> &OsStr {
        self.0.file_name().unwrap_or_default()
    }

    fn is_root(&self) -> bool {
        self.0.as_os_str().is_empty()
    }
}

// === impl Root ===

impl Root {
    /// Opens the directory, which may be named by a link; makes it (not its parents) if missing.
    pub(crate) fn open(
        path: &Path,
        faults: Faults,
        counters: Arc<Counters>,
    ) -> Result<Self, StoreError> {
        let made = pass(&faults, Op::Mkdir, Path::new("")).and_then(|()| {
            use std::os::unix::fs::DirBuilderExt;
            std::fs::DirBuilder::new().mode(0o700).create(path)
        });
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => {
                result.map_err(|error| StoreError::io(Op::Mkdir, path.to_owned(), error))?;
            }
        }
        // An earlier process may have died between making and syncing it.
        if let Err(error) = sync_parent(path) {
            tracing::warn!(%error, path = %path.display(), "The folder of the data directory cannot be synced");
        }
        Self::open_existing(path, faults, counters)
    }

    /// As [`Root::open`], but what is not there is not made.
    pub(crate) fn open_existing(
        path: &Path,
        faults: Faults,
        counters: Arc<Counters>,
    ) -> Result<Self, StoreError> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let dir = pass(&faults, Op::Open, Path::new(""))
            .and_then(|()| Ok(open(path, flags, Mode::empty())?))
            .map_err(|error| StoreError::io(Op::Open, path.to_owned(), error))?;
        let probe = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_BENEATH);
        let resolve = match openat2(&dir, ".", probe) {
            Ok(_) if !faults.denies_openat2() => Resolve::Kernel,
            _ => Resolve::Walk,
        };
        Ok(Self {
            dir,
            path: path.to_owned(),
            resolve,
            poison: OnceLock::new(),
            durable: Mutex::new(HashSet::from([Rel::root()])),
            folders: AtomicU64::new(1),
            faults,
            counters,
        })
    }

    /// From here on every change is refused.
    pub(crate) fn only_read(&self) {
        // If it is poisoned already, changes are refused as well.
        let _ = self.poison.set("it was opened to be read only".into());
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The failed fsync since which nothing is written, if there was one.
    pub(crate) fn poisoned(&self) -> Option<&str> {
        self.poison.get().map(String::as_str)
    }

    /// Bytes that the file system still gives to this user.
    pub(crate) fn available(&self) -> Result<u64, StoreError> {
        let stat = fstatvfs(&self.dir)
            .map_err(|errno| StoreError::io(Op::Open, self.path.clone(), errno.into()))?;
        Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
    }

    /// Whether the file system is mounted to be written to.
    pub(crate) fn is_writable(&self) -> Result<(), StoreError> {
        let stat = fstatvfs(&self.dir)
            .map_err(|errno| StoreError::io(Op::Open, self.path.clone(), errno.into()))?;
        if stat.flags().contains(FsFlags::ST_RDONLY) {
            let error = Errno::EROFS.into();
            return Err(StoreError::io(Op::Write, self.path.clone(), error));
        }
        Ok(())
    }

    fn open_plain(&self, rel: &Rel, flags: OFlag) -> Result<(File, u64), StoreError> {
        self.op(Op::Open, rel, || {
            // Not blocking: a planted pipe must not hang the reader.
            let fd = self.resolve(rel, flags | OFlag::O_NONBLOCK, FILE_MODE)?;
            let stat = fstat(&fd)?;
            if kind_of(&stat) != Kind::File {
                return Err(Errno::ELOOP.into());
            }
            Ok((File::from(fd), len_of(&stat)))
        })
    }

    /// Faults that tests inject.
    pub(crate) fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Switches between direct and buffered IO; a file system without direct IO stays buffered, and
    /// then this is false.
    pub(crate) fn set_direct(&self, file: &File, direct: bool) -> bool {
        if direct && self.faults.denies_direct() {
            return false;
        }
        let flags = if direct {
            OFlag::O_DIRECT
        } else {
            OFlag::empty()
        };
        fcntl(file, FcntlArg::F_SETFL(flags)).is_ok()
    }

    /// Counts folders that are there.
    pub(crate) fn saw_folders(&self, count: u64) {
        self.folders.fetch_add(count, Ordering::Relaxed);
    }

    /// A folder that was seen or made is gone.
    fn lost_folder(&self) {
        let less = |count: u64| count.checked_sub(1);
        let _ = self
            .folders
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Bytes of all folders seen or made.
    pub(crate) fn folder_bytes(&self) -> u64 {
        let folders = self.folders.load(Ordering::Relaxed);
        folders.saturating_mul(FOLDER_BYTES)
    }

    fn writable(&self) -> Result<(), StoreError> {
        match self.poison.get() {
            None => Ok(()),
            Some(reason) => Err(StoreError::Poisoned {
                reason: reason.clone(),
            }),
        }
    }

    fn op<T>(
        &self,
        op: Op,
        rel: &Rel,
        action: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, StoreError> {
        pass(&self.faults, op, rel.as_path())
            .and_then(|()| action())
            .map_err(|error| StoreError::io(op, self.path.join(rel.as_path()), error))
    }

    /// An operation on `len` bytes, of which an injected fault may let the first half happen.
    fn halves(
        &self,
        op: Op,
        rel: &Rel,
        len: u64,
        mut action: impl FnMut(u64) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let done = match self.faults.ask(op, rel.as_path()) {
            Verdict::Pass => action(len),
            Verdict::Fail(error) => Err(error),
            // Whole pages, which direct IO needs.
            Verdict::Half(error) => action(len / 2 / 4096 * 4096).and(Err(error)),
        };
        done.map_err(|error| StoreError::io(op, self.path.join(rel.as_path()), error))
    }

    /// Moves through a ring, each of which an injected fault may meet. `done` is told the number of each
    /// one that is over, and says whether to go on; where it says no, that is no error of this.
    pub(crate) fn run<'m>(
        &self,
        ring: &mut Uring,
        way: Way,
        (file, rel): (&File, &Rel),
        moves: impl Iterator<Item = Move<'m>>,
        mut done: impl FnMut(usize) -> bool,
    ) -> Result<(), StoreError> {
        let op = match way {
            Way::In => Op::Read,
            Way::Out => Op::Write,
        };
        let moves = moves.map(|one| match self.faults.ask(op, rel.as_path()) {
            Verdict::Pass => Ok(one),
            Verdict::Fail(error) => Err(Stop::Failed(error)),
            Verdict::Half(error) => {
                let (map, half) = (one.map, one.len / 2 / 4096 * 4096);
                match way {
                    Way::In => map.pread_exact(file, one.file_offset, one.offset, half)?,
                    Way::Out => map.pwrite_all(file, one.file_offset, one.offset, half)?,
                }
                Err(Stop::Failed(error))
            }
        });
        let run = ring.run(file, way, moves, |index| match done(index) {
            true => Ok(()),
            false => Err(Stop::Enough),
        });
        match run {
            Ok(()) | Err(Stop::Enough) => Ok(()),
            Err(Stop::Failed(error)) => {
                Err(StoreError::io(op, self.path.join(rel.as_path()), error))
            }
        }
    }

    fn folder_of(&self, rel: &Rel) -> io::Result<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        self.resolve(&rel.parent(), flags, Mode::empty())
    }

    /// Opens what stands at `rel`, following no link. A link anywhere is ELOOP or ENOTDIR.
    fn resolve(&self, rel: &Rel, flags: OFlag, mode: Mode) -> io::Result<OwnedFd> {
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        if rel.is_root() {
            return Ok(openat(&self.dir, ".", flags, mode)?);
        }
        if self.resolve == Resolve::Kernel {
            let mut how = OpenHow::new()
                .flags(flags)
                .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
            if flags.contains(OFlag::O_CREAT) {
                how = how.mode(mode);
            }
            return Ok(openat2(&self.dir, rel.as_path(), how)?);
        }
        let step = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut at: Option<OwnedFd> = None;
        for component in rel.parent().as_path().components() {
            let name = component.as_os_str();
            let next = match &at {
                None => openat(&self.dir, name, step, Mode::empty()),
                Some(folder) => openat(folder, name, step, Mode::empty()),
            };
            at = Some(next?);
        }
        Ok(match &at {
            None => openat(&self.dir, rel.name(), flags, mode),
            Some(folder) => openat(folder, rel.name(), flags, mode),
        }?)
    }
}

/// Makes the name of the data directory itself durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let path = path.canonicalize()?;
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Whether a file of this name was left by a writer that died before its commit point.
pub(crate) fn is_temporary(name: &OsStr) -> bool {
    name.as_bytes().starts_with(TMP.as_bytes())
}

fn pass(faults: &Faults, op: Op, path: &Path) -> io::Result<()> {
    match faults.ask(op, path) {
        Verdict::Pass => Ok(()),
        Verdict::Fail(error) | Verdict::Half(error) => Err(error),
    }
}

fn stat_at(folder: &OwnedFd, name: &OsStr) -> io::Result<FileStat> {
    Ok(fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW)?)
}

fn kind_of(stat: &FileStat) -> Kind {
    match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => Kind::File,
        SFlag::S_IFDIR => Kind::Folder,
        _ => Kind::Other,
    }
}

fn len_of(stat: &FileStat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}
