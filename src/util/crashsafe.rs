//! Files that are whole or absent, whatever happens.
//!
//! # What
//! A file appears under its name only with all its bytes on the medium, and a change of a folder
//! (a new name, a removed name) is on the medium when the call returns.
//!
//! # Order of writes
//! Temporary file in the target's own folder, write, fsync of the file, rename onto the name, fsync
//! of the folder. The rename is the commit point: before it a crash leaves a temporary file, which
//! [`is_temporary`] knows for the sweep at the next start.
//!
//! # Errors
//! Each names the [`Step`] that failed. After [`Step::SyncFile`] or [`Step::SyncFolder`] the kernel
//! may have dropped dirty pages, so a retry that succeeds proves nothing:
//! [`CrashsafeError::poisons`] says so, and the caller must stop trusting that medium.
//!
//! A [`Gate`] sees every step before it is taken and may refuse it; tests inject faults there.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use uuid::Uuid;

const PREFIX: &str = ".tmp-";

/// One action on the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Create the temporary file.
    Create,
    /// Write its bytes.
    Write,
    /// fsync of the file.
    SyncFile,
    /// Rename onto the final name: the commit point.
    Rename,
    /// fsync of the folder.
    SyncFolder,
    /// Remove a name.
    Remove,
    /// Make a folder.
    MakeFolder,
}

/// A step on a path that failed.
#[derive(Debug, thiserror::Error)]
#[error("{} {}: {source}", .step.as_str(), .path.display())]
pub struct CrashsafeError {
    /// What was tried.
    pub step: Step,
    /// On what.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Sees each step before it is taken; an error from it is that step's error.
pub trait Gate: Send + Sync {
    /// Lets the step pass, or fails it.
    fn pass(&self, step: Step, path: &Path) -> io::Result<()>;
}

/// The gate of production: everything passes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Open;

/// A file that is not there yet: removed on drop unless committed.
#[derive(Debug)]
pub struct TempFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
    named: bool,
}

// === impl Step ===

impl Step {
    /// All steps.
    pub const ALL: [Self; 7] = [
        Self::Create,
        Self::Write,
        Self::SyncFile,
        Self::Rename,
        Self::SyncFolder,
        Self::Remove,
        Self::MakeFolder,
    ];

    /// A name for messages and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Write => "write",
            Self::SyncFile => "fsync",
            Self::Rename => "rename",
            Self::SyncFolder => "fsync_folder",
            Self::Remove => "remove",
            Self::MakeFolder => "make_folder",
        }
    }
}

// === impl CrashsafeError ===

impl CrashsafeError {
    /// Whether the medium can no longer be trusted with writes.
    #[must_use]
    pub fn poisons(&self) -> bool {
        matches!(self.step, Step::SyncFile | Step::SyncFolder)
    }

    /// Whether the medium, or this user's share of it, is full.
    #[must_use]
    pub fn no_space(&self) -> bool {
        matches!(
            self.source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
    }
}

// === impl Gate ===

impl Gate for Open {
    fn pass(&self, _: Step, _: &Path) -> io::Result<()> {
        Ok(())
    }
}

/// Takes one step behind the gate.
pub fn step<T>(
    gate: &dyn Gate,
    step: Step,
    path: &Path,
    action: impl FnOnce() -> io::Result<T>,
) -> Result<T, CrashsafeError> {
    gate.pass(step, path)
        .and_then(|()| action())
        .map_err(|source| CrashsafeError {
            step,
            path: path.to_owned(),
            source,
        })
}

// === impl TempFile ===

impl TempFile {
    /// Creates a fresh file (mode 0600, read and write) beside `target`, never through a link.
    /// `flags` are added to those of open(2), for example `O_DIRECT`.
    pub fn create(target: &Path, flags: i32, gate: &dyn Gate) -> Result<Self, CrashsafeError> {
        let path = folder_of(target).join(format!("{PREFIX}{}", Uuid::new_v4().simple()));
        let file = step(gate, Step::Create, &path, || {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(flags);
            options.open(&path)
        })?;
        Ok(Self {
            file,
            path,
            target: target.to_owned(),
            named: true,
        })
    }

    /// The open file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its temporary path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the file durable under its final name, replacing what had that name.
    pub fn commit(mut self, gate: &dyn Gate) -> Result<(), CrashsafeError> {
        step(gate, Step::SyncFile, &self.path, || self.file.sync_all())?;
        step(gate, Step::Rename, &self.target, || {
            fs::rename(&self.path, &self.target)
        })?;
        self.named = false;
        sync_folder(folder_of(&self.target), gate)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if self.named {
            // The sweep at the next start takes what cannot be removed now.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Writes a small file so that after a crash it has its old content or all of the new.
pub fn write_file(path: &Path, bytes: &[u8], gate: &dyn Gate) -> Result<(), CrashsafeError> {
    let temp = TempFile::create(path, 0, gate)?;
    step(gate, Step::Write, temp.path(), || {
        (&temp.file).write_all(bytes)
    })?;
    temp.commit(gate)
}

/// Removes a name for good; says whether it was there.
pub fn remove_file(path: &Path, gate: &dyn Gate) -> Result<bool, CrashsafeError> {
    let there = step(gate, Step::Remove, path, || match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        result => result.map(|()| true),
    })?;
    if there {
        sync_folder(folder_of(path), gate)?;
    }
    Ok(there)
}

/// Makes a folder (mode 0700) and its missing parents, each durable in its own parent.
pub fn make_folder(path: &Path, gate: &dyn Gate) -> Result<(), CrashsafeError> {
    use std::os::unix::fs::DirBuilderExt;

    if path.is_dir() {
        return Ok(());
    }
    let parent = folder_of(path);
    if parent != path {
        make_folder(parent, gate)?;
    }
    step(
        gate,
        Step::MakeFolder,
        path,
        || match fs::DirBuilder::new().mode(0o700).create(path) {
            // Another thread was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            result => result,
        },
    )?;
    sync_folder(parent, gate)
}

/// fsync of a folder: its names are on the medium after this.
pub fn sync_folder(folder: &Path, gate: &dyn Gate) -> Result<(), CrashsafeError> {
    step(gate, Step::SyncFolder, folder, || {
        File::open(folder)?.sync_all()
    })
}

/// Whether a file of this name was left by a writer that died before its commit point.
#[must_use]
pub fn is_temporary(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) => Path::new("."),
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct FailAt(Step);

    impl Gate for FailAt {
        fn pass(&self, step: Step, _: &Path) -> io::Result<()> {
            if step == self.0 {
                return Err(io::Error::from_raw_os_error(nix::libc::ENOSPC));
            }
            Ok(())
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_step_leaves_the_old_file_or_the_new_and_no_litter() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for failing in [
            Step::Create,
            Step::Write,
            Step::SyncFile,
            Step::Rename,
            Step::SyncFolder,
        ] {
            write_file(&path, b"old", &Open).unwrap();
            let error = write_file(&path, b"new", &FailAt(failing)).unwrap_err();
            assert_eq!(error.step, failing);
            assert!(error.no_space());
            assert_eq!(
                error.poisons(),
                matches!(failing, Step::SyncFile | Step::SyncFolder)
            );
            let committed = failing == Step::SyncFolder;
            assert_eq!(
                fs::read(&path).unwrap(),
                if committed { b"new" } else { b"old" }
            );
            assert_eq!(names(folder.path()), ["file"]);
        }
    }

    #[test]
    fn a_planted_link_is_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        let path = folder.path().join("file");
        fs::write(&victim, b"precious").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        write_file(&path, b"new", &Open).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn remove_says_whether_it_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_file(&path, b"x", &Open).unwrap();
        assert!(remove_file(&path, &Open).unwrap());
        assert!(!remove_file(&path, &Open).unwrap());
        write_file(&path, b"x", &Open).unwrap();
        assert_eq!(
            remove_file(&path, &FailAt(Step::Remove)).unwrap_err().step,
            Step::Remove
        );
        assert!(path.exists());
    }

    #[test]
    fn folders_are_made_with_their_parents() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        make_folder(&deep, &Open).unwrap();
        make_folder(&deep, &Open).unwrap();
        assert!(deep.is_dir());
        fs::write(folder.path().join("plain"), b"").unwrap();
        let error = make_folder(&folder.path().join("plain/x"), &Open).unwrap_err();
        assert_eq!(error.step, Step::MakeFolder);
    }

    #[test]
    fn what_a_dead_writer_left_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let temp = TempFile::create(&folder.path().join("file"), 0, &Open).unwrap();
        assert!(is_temporary(temp.path().file_name().unwrap()));
        assert!(!is_temporary(OsStr::new("file")));
        drop(temp);
        assert!(names(folder.path()).is_empty());
    }
}
