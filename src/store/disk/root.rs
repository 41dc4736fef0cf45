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

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, fs::FileExt},
    },
    path::{Component, Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{
        AtFlags, FallocateFlags, FcntlArg, OFlag, OpenHow, ResolveFlag, fallocate, fcntl, open,
        openat, openat2, renameat,
    },
    sys::{
        stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat},
        statvfs::fstatvfs,
    },
    unistd::{UnlinkatFlags, unlinkat},
};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::{
    device::shm::SharedMap,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resolve {
    /// openat2 with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS`.
    Kernel,
    /// One openat with `O_NOFOLLOW` for each component.
    Walk,
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
        let fail = |op, error: io::Error| StoreError::io(op, path.to_owned(), error);
        let made = pass(&faults, Op::Mkdir, Path::new("")).and_then(|()| {
            use std::os::unix::fs::DirBuilderExt;
            std::fs::DirBuilder::new().mode(0o700).create(path)
        });
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => result.map_err(|error| fail(Op::Mkdir, error))?,
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let dir = pass(&faults, Op::Open, Path::new(""))
            .and_then(|()| Ok(open(path, flags, Mode::empty())?))
            .map_err(|error| fail(Op::Open, error))?;
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

    /// Opens a plain file for reading. `NotFound` is an `Io` error (see `StoreError::is_missing`).
    pub(crate) fn open_file(&self, rel: &Rel) -> Result<(File, u64), StoreError> {
        self.open_plain(rel, OFlag::O_RDONLY)
    }

    /// Opens a plain file for reading and writing, made if missing.
    pub(crate) fn open_or_create(&self, rel: &Rel) -> Result<File, StoreError> {
        let (file, _) = self.open_plain(rel, OFlag::O_RDWR | OFlag::O_CREAT)?;
        Ok(file)
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

    /// A fresh file beside `target`, in a folder that is made if missing.
    pub(crate) fn create_temp(&self, target: &Rel) -> Result<Temp, StoreError> {
        match self.try_create_temp(target) {
            Err(error) if error.is_missing() => {
                // Somebody removed a folder that was there.
                let mut durable = self.durable.lock();
                durable.retain(|rel| rel.is_root());
                drop(durable);
                self.try_create_temp(target)
            }
            result => result,
        }
    }

    fn try_create_temp(&self, target: &Rel) -> Result<Temp, StoreError> {
        self.writable()?;
        let folder = target.parent();
        self.make_folders(&folder)?;
        let rel = folder.join(format!("{TMP}{}", Uuid::new_v4().simple()));
        let file = self.op(Op::Open, &rel, || {
            let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
            Ok(File::from(self.resolve(&rel, flags, FILE_MODE)?))
        })?;
        Ok(Temp { file, rel })
    }

    /// Reserves the file's blocks, so that a full disk shows before the bytes are written.
    pub(crate) fn allocate(&self, temp: &Temp, len: u64) -> Result<(), StoreError> {
        self.writable()?;
        self.op(Op::Write, &temp.rel, || {
            let len = i64::try_from(len).map_err(|_| Errno::EFBIG)?;
            match fallocate(&temp.file, FallocateFlags::empty(), 0, len) {
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(()),
                result => Ok(result?),
            }
        })
    }

    /// Writes bytes of this process.
    pub(crate) fn write(&self, temp: &Temp, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.writable()?;
        let len = bytes.len() as u64;
        self.halves(Op::Write, &temp.rel, len, |part| {
            let part = usize::try_from(part).unwrap_or(usize::MAX);
            temp.file
                .write_all_at(bytes.get(..part).unwrap_or(bytes), at)
        })?;
        self.counters.wrote_bytes(len);
        Ok(())
    }

    /// Writes straight from shared memory.
    pub(crate) fn write_map(
        &self,
        temp: &Temp,
        at: u64,
        map: &SharedMap,
        offset: u64,
        len: u64,
    ) -> Result<(), StoreError> {
        self.writable()?;
        self.halves(Op::Write, &temp.rel, len, |part| {
            map.pwrite_all(&temp.file, at, offset, part)
        })?;
        self.counters.wrote_bytes(len);
        Ok(())
    }

    /// Reads exactly these bytes; a file that ends before is an `UnexpectedEof`.
    pub(crate) fn read(
        &self,
        file: &File,
        rel: &Rel,
        at: u64,
        bytes: &mut [u8],
    ) -> Result<(), StoreError> {
        self.halves(Op::Read, rel, bytes.len() as u64, |part| {
            let part = usize::try_from(part).unwrap_or(usize::MAX);
            match bytes.get_mut(..part) {
                Some(half) => file.read_exact_at(half, at),
                None => Ok(()),
            }
        })
    }

    /// Reads straight into shared memory.
    pub(crate) fn read_map(
        &self,
        (file, rel): (&File, &Rel),
        at: u64,
        map: &SharedMap,
        offset: u64,
        len: u64,
    ) -> Result<(), StoreError> {
        self.halves(Op::Read, rel, len, |part| {
            map.pread_exact(file, at, offset, part)
        })
    }

    /// Reads a whole small file, of at most `limit` bytes; `None` if it is longer.
    pub(crate) fn read_small(&self, rel: &Rel, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let (file, len) = self.open_file(rel)?;
        if len > limit {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        self.op(Op::Read, rel, || {
            (&file).take(limit).read_to_end(&mut bytes)
        })?;
        Ok(Some(bytes))
    }

    /// Switches between direct and buffered IO; a file system without direct IO stays buffered.
    pub(crate) fn set_direct(&self, file: &File, direct: bool) {
        let flags = if direct {
            OFlag::O_DIRECT
        } else {
            OFlag::empty()
        };
        let _ = fcntl(file, FcntlArg::F_SETFL(flags));
    }

    /// The file's bytes are on the medium after this.
    pub(crate) fn sync_file(&self, temp: &Temp) -> Result<(), StoreError> {
        self.writable()?;
        let done = self.op(Op::Fsync, &temp.rel, || temp.file.sync_all());
        self.poison_if_failed(done)
    }

    /// The folder's names are on the medium after this.
    pub(crate) fn sync_folder(&self, rel: &Rel) -> Result<(), StoreError> {
        self.writable()?;
        let folder = self.op(Op::Open, rel, || {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
            Ok(File::from(self.resolve(rel, flags, Mode::empty())?))
        })?;
        let done = self.op(Op::Fsync, rel, || folder.sync_all());
        self.poison_if_failed(done)
    }

    /// Gives a file another name, replacing what had it. Not durable before `sync_folder`.
    pub(crate) fn rename(&self, from: &Rel, to: &Rel) -> Result<(), StoreError> {
        self.writable()?;
        self.op(Op::Rename, to, || {
            let (from_dir, to_dir) = (self.folder_of(from)?, self.folder_of(to)?);
            Ok(renameat(&from_dir, from.name(), &to_dir, to.name())?)
        })
    }

    /// Removes a name that is no folder; says whether it was there. Links are removed, not followed.
    pub(crate) fn unlink(&self, rel: &Rel) -> Result<bool, StoreError> {
        self.writable()?;
        self.op(Op::Unlink, rel, || {
            let folder = self.folder_of(rel)?;
            match unlinkat(&folder, rel.name(), UnlinkatFlags::NoRemoveDir) {
                Err(Errno::ENOENT) => Ok(false),
                result => Ok(result.map(|()| true)?),
            }
        })
    }

    /// What stands under a name and its length, links not followed; `None` if nothing.
    pub(crate) fn stat(&self, rel: &Rel) -> Result<Option<(Kind, u64)>, StoreError> {
        self.op(Op::Open, rel, || {
            let stat = self
                .folder_of(rel)
                .and_then(|folder| stat_at(&folder, rel.name()));
            match stat {
                Ok(stat) => Ok(Some((kind_of(&stat), len_of(&stat)))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    /// The names in a folder; empty if there is no such folder.
    pub(crate) fn list(&self, rel: &Rel) -> Result<Vec<Entry>, StoreError> {
        self.op(Op::Open, rel, || {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
            let fd = match self.resolve(rel, flags, Mode::empty()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                fd => fd?,
            };
            let at = fd.try_clone()?;
            let mut dir = Dir::from_fd(fd)?;
            let mut entries = Vec::new();
            for entry in dir.iter() {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let name = OsStr::from_bytes(name).to_owned();
                let stat = match stat_at(&at, &name) {
                    // Removed since it was listed.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    stat => stat?,
                };
                entries.push(Entry {
                    name,
                    kind: kind_of(&stat),
                    len: len_of(&stat),
                });
            }
            Ok(entries)
        })
    }

    /// Makes a folder and its parents, all durable.
    pub(crate) fn make_folders(&self, rel: &Rel) -> Result<(), StoreError> {
        if self.durable.lock().contains(rel) {
            return Ok(());
        }
        self.writable()?;
        let parent = rel.parent();
        self.make_folders(&parent)?;
        let made = self.op(Op::Mkdir, rel, || {
            let folder = self.folder_of(rel)?;
            match mkdirat(&folder, rel.name(), FOLDER_MODE) {
                Err(Errno::EEXIST) => Ok(0),
                result => Ok(result.map(|()| 1)?),
            }
        })?;
        self.saw_folders(made);
        self.sync_folder(&parent)?;
        self.durable.lock().insert(rel.clone());
        Ok(())
    }

    /// Counts folders that are there.
    pub(crate) fn saw_folders(&self, count: u64) {
        self.folders.fetch_add(count, Ordering::Relaxed);
    }

    /// Bytes of all folders seen or made.
    pub(crate) fn folder_bytes(&self) -> u64 {
        let folders = self.folders.load(Ordering::Relaxed);
        folders.saturating_mul(FOLDER_BYTES)
    }

    /// Writes a small file so that after a crash it has its old bytes or all of the new.
    pub(crate) fn replace(&self, target: &Rel, bytes: &[u8]) -> Result<(), StoreError> {
        let temp = self.create_temp(target)?;
        let done = self
            .write(&temp, 0, bytes)
            .and_then(|()| self.sync_file(&temp))
            .and_then(|()| self.rename(&temp.rel, target));
        if let Err(error) = done {
            self.discard(&temp.rel);
            return Err(error);
        }
        self.counters.wrote_file();
        self.sync_folder(&target.parent())
    }

    /// Overwrites an open file in place; for what need not survive a crash.
    pub(crate) fn overwrite(&self, file: &File, rel: &Rel, bytes: &[u8]) -> Result<(), StoreError> {
        self.op(Op::Write, rel, || {
            file.set_len(0)?;
            (&*file).write_all(bytes)
        })
    }

    /// Removes a file that never got its name. The sweep at the next start takes what stays.
    pub(crate) fn discard(&self, rel: &Rel) {
        if let Err(error) = self.unlink(rel) {
            tracing::debug!(%error, "Temporary file stays for the sweep at the next start");
        }
    }

    fn writable(&self) -> Result<(), StoreError> {
        match self.poison.get() {
            None => Ok(()),
            Some(reason) => Err(StoreError::Poisoned {
                reason: reason.clone(),
            }),
        }
    }

    fn poison_if_failed(&self, done: Result<(), StoreError>) -> Result<(), StoreError> {
        if let Err(error) = &done {
            self.counters.failed_fsync();
            if self.poison.set(error.to_string()).is_ok() {
                tracing::error!(%error, "An fsync failed: no more writes to this disk");
            }
        }
        done
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
