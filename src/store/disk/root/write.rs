//! Writing and naming. All of it is refused once an fsync has failed.

use std::{cell::RefCell, fs::File, io::Write, os::unix::fs::FileExt};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, OFlag, fallocate, renameat},
    sys::stat::{Mode, mkdirat},
    unistd::{UnlinkatFlags, unlinkat},
};
use uuid::Uuid;

use crate::{
    device::{
        shm::SharedMap,
        uring::{Move, Uring, Way},
    },
    store::{
        error::StoreError,
        fault::{Bytes, Done, Op},
    },
};

use super::{FILE_MODE, FOLDER_MODE, Folder, Folders, Rel, Root, TMP, Temp};

impl Root {
    /// Opens a plain file for reading and writing, made if missing.
    pub(crate) fn open_or_create(&self, rel: &Rel) -> Result<File, StoreError> {
        let (file, _) = self.open_plain(rel, OFlag::O_RDWR | OFlag::O_CREAT)?;
        self.faults.did(&Done::Create(rel.as_path()));
        Ok(file)
    }

    /// A fresh file beside `target`, in a folder that is made if missing. Once it has its name, its
    /// folder is fsynced, and what is above that ([`Self::sync_folders`]).
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
        self.place_folders(&folder)?;
        let rel = folder.join(format!("{TMP}{}", Uuid::new_v4().simple()));
        let file = self.op(Op::Open, &rel, || {
            let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
            Ok(File::from(self.resolve(&rel, flags, FILE_MODE)?))
        })?;
        self.faults.did(&Done::Create(rel.as_path()));
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
        })?;
        self.faults.did(&Done::Len(temp.rel.as_path(), len));
        Ok(())
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
        let bytes = Bytes::Own(bytes);
        self.faults.did(&Done::Write(temp.rel.as_path(), at, bytes));
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
        let bytes = Bytes::Map(map, offset, len);
        self.faults.did(&Done::Write(temp.rel.as_path(), at, bytes));
        self.counters.wrote_bytes(len);
        Ok(())
    }

    /// The same through a ring, with all of `moves`.
    pub(crate) fn run_writes<'m>(
        &self,
        ring: &mut Uring,
        temp: &Temp,
        moves: impl Iterator<Item = Move<'m>>,
    ) -> Result<(), StoreError> {
        self.writable()?;
        let begun = RefCell::new(Vec::new());
        let moves = moves.inspect(|one| begun.borrow_mut().push(*one));
        self.run(ring, Way::Out, (&temp.file, &temp.rel), moves, |index| {
            if let Some(one) = begun.borrow().get(index) {
                let bytes = Bytes::Map(one.map, one.offset, one.len);
                self.faults
                    .did(&Done::Write(temp.rel.as_path(), one.file_offset, bytes));
                self.counters.wrote_bytes(one.len);
            }
            true
        })
    }

    /// The file's bytes are on the medium after this.
    pub(crate) fn sync_file(&self, temp: &Temp) -> Result<(), StoreError> {
        self.writable()?;
        let done = self.op(Op::Fsync, &temp.rel, || temp.file.sync_all());
        self.synced(Done::SyncFile(temp.rel.as_path()), done)
    }

    /// A folder about to be changed. Opened before the change, so that after it nothing can fail but
    /// the fsync itself, which poisons.
    pub(crate) fn open_folder(&self, rel: &Rel) -> Result<Folder, StoreError> {
        let file = self.op(Op::Open, rel, || {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
            Ok(File::from(self.resolve(rel, flags, Mode::empty())?))
        })?;
        Ok(Folder {
            file,
            rel: rel.clone(),
        })
    }

    /// The folder's names are on the medium after this.
    pub(crate) fn sync_folder(&self, folder: &Folder) -> Result<(), StoreError> {
        self.writable()?;
        let done = self.op(Op::Fsync, &folder.rel, || folder.file.sync_all());
        self.synced(Done::SyncFolder(folder.rel.as_path()), done)
    }

    /// Gives a file another name, replacing what had it. Not durable before `sync_folder`.
    pub(crate) fn rename(&self, from: &Rel, to: &Rel) -> Result<(), StoreError> {
        self.writable()?;
        self.op(Op::Rename, to, || {
            let (from_dir, to_dir) = (self.folder_of(from)?, self.folder_of(to)?);
            Ok(renameat(&from_dir, from.name(), &to_dir, to.name())?)
        })?;
        let (from, to) = (from.as_path(), to.as_path());
        self.faults.did(&Done::Rename(from, to));
        Ok(())
    }

    /// Removes a name that is no folder; says whether it was there. Links are removed, not followed.
    pub(crate) fn unlink(&self, rel: &Rel) -> Result<bool, StoreError> {
        self.writable()?;
        let there = self.op(Op::Unlink, rel, || {
            let folder = match self.folder_of(rel) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
                folder => folder?,
            };
            match unlinkat(&folder, rel.name(), UnlinkatFlags::NoRemoveDir) {
                Err(Errno::ENOENT) => Ok(false),
                result => Ok(result.map(|()| true)?),
            }
        })?;
        if there {
            self.faults.did(&Done::Unlink(rel.as_path()));
        }
        Ok(there)
    }

    /// Removes a folder if nothing is in it; says whether it went. One that comes back after a crash is
    /// empty as well.
    pub(crate) fn remove_empty(&self, rel: &Rel) -> bool {
        if self.writable().is_err() || rel.is_root() {
            return false;
        }
        // Whoever writes to it next makes it again.
        self.durable.lock().remove(rel);
        let removed = self.op(Op::Unlink, rel, || {
            let parent = self.folder_of(rel)?;
            match unlinkat(&parent, rel.name(), UnlinkatFlags::RemoveDir) {
                Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOENT) => Ok(false),
                result => Ok(result.map(|()| true)?),
            }
        });
        match removed {
            Ok(true) => {
                self.faults.did(&Done::Unlink(rel.as_path()));
                self.lost_folder();
                true
            }
            Ok(false) => false,
            Err(error) => {
                tracing::debug!(%error, "An empty folder stays");
                false
            }
        }
    }

    /// Makes a folder and its parents, all durable.
    pub(crate) fn make_folders(&self, rel: &Rel) -> Result<(), StoreError> {
        self.place_folders(rel)?;
        self.sync_above(self.open_above(rel)?)
    }

    /// A folder, and those above it in which the one below is not known to be durable. They are opened
    /// before a file in it gets its name: what can fail after that is only an fsync.
    pub(crate) fn open_folders(&self, rel: &Rel) -> Result<Folders, StoreError> {
        Ok(Folders {
            own: self.open_folder(rel)?,
            above: self.open_above(rel)?,
        })
    }

    /// What is in a folder is durable after this, and the folder is. Once the first is on the medium,
    /// most file systems have nothing left to do for the others.
    pub(crate) fn sync_folders(&self, folders: Folders) -> Result<(), StoreError> {
        self.sync_folder(&folders.own)?;
        self.sync_above(folders.above)
    }

    /// Folders that are not known to be durable, and what each lies in.
    fn open_above(&self, rel: &Rel) -> Result<Vec<(Rel, Folder)>, StoreError> {
        let mut above = Vec::new();
        let mut rel = rel.clone();
        while !self.durable.lock().contains(&rel) {
            let parent = rel.parent();
            above.push((rel, self.open_folder(&parent)?));
            rel = parent;
        }
        Ok(above)
    }

    fn sync_above(&self, above: Vec<(Rel, Folder)>) -> Result<(), StoreError> {
        for (rel, parent) in above {
            self.sync_folder(&parent)?;
            self.durable.lock().insert(rel);
        }
        Ok(())
    }

    /// Makes a folder and its parents. Those that are new are durable after [`Self::sync_folders`].
    fn place_folders(&self, rel: &Rel) -> Result<(), StoreError> {
        if self.durable.lock().contains(rel) {
            return Ok(());
        }
        self.writable()?;
        let parent = rel.parent();
        self.place_folders(&parent)?;
        let folder = self.open_folder(&parent)?;
        let made = self.op(Op::Mkdir, rel, || {
            match mkdirat(&folder.file, rel.name(), FOLDER_MODE) {
                Err(Errno::EEXIST) => Ok(0),
                result => Ok(result.map(|()| 1)?),
            }
        })?;
        self.saw_folders(made);
        if made > 0 {
            self.faults.did(&Done::Mkdir(rel.as_path()));
        }
        Ok(())
    }

    /// Writes a small file so that after a crash it has its old bytes or all of the new.
    pub(crate) fn replace(&self, target: &Rel, bytes: &[u8]) -> Result<(), StoreError> {
        let temp = self.create_temp(target)?;
        let done = self
            .write(&temp, 0, bytes)
            .and_then(|()| self.sync_file(&temp))
            .and_then(|()| self.open_folders(&target.parent()))
            .and_then(|folders| self.rename(&temp.rel, target).map(|()| folders));
        match done {
            Ok(folders) => {
                self.counters.wrote_file();
                self.sync_folders(folders)
            }
            Err(error) => {
                self.discard(&temp.rel);
                Err(error)
            }
        }
    }

    /// Overwrites an open file in place; for what need not survive a crash.
    pub(crate) fn overwrite(&self, file: &File, rel: &Rel, bytes: &[u8]) -> Result<(), StoreError> {
        self.op(Op::Write, rel, || {
            file.set_len(0)?;
            (&*file).write_all(bytes)
        })?;
        self.faults.did(&Done::Len(rel.as_path(), 0));
        let bytes = Bytes::Own(bytes);
        self.faults.did(&Done::Write(rel.as_path(), 0, bytes));
        Ok(())
    }

    /// Adds bytes to an open file, which need not survive a crash of the host.
    pub(crate) fn append(
        &self,
        file: &File,
        rel: &Rel,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        self.writable()?;
        let len = bytes.len() as u64;
        self.halves(Op::Write, rel, len, |part| {
            let part = usize::try_from(part).unwrap_or(usize::MAX);
            file.write_all_at(bytes.get(..part).unwrap_or(bytes), at)
        })?;
        self.faults
            .did(&Done::Write(rel.as_path(), at, Bytes::Own(bytes)));
        self.counters.wrote_bytes(len);
        Ok(())
    }

    /// Cuts an open file.
    pub(crate) fn cut(&self, file: &File, rel: &Rel, len: u64) -> Result<(), StoreError> {
        self.op(Op::Write, rel, || file.set_len(len))?;
        self.faults.did(&Done::Len(rel.as_path(), len));
        Ok(())
    }

    /// As [`Self::sync_file`], for a file that has its name.
    pub(crate) fn sync_plain(&self, file: &File, rel: &Rel) -> Result<(), StoreError> {
        self.writable()?;
        let done = self.op(Op::Fsync, rel, || file.sync_all());
        self.synced(Done::SyncFile(rel.as_path()), done)
    }

    /// Removes a file that never got its name. The sweep at the next start takes what stays.
    pub(crate) fn discard(&self, rel: &Rel) {
        if let Err(error) = self.unlink(rel) {
            tracing::debug!(%error, "Temporary file stays for the sweep at the next start");
        }
    }

    /// A file that is not written through here has these bytes, and was synced.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn synced_apart(&self, rel: &Rel, bytes: &[u8]) {
        self.faults
            .did(&Done::Write(rel.as_path(), 0, Bytes::Own(bytes)));
        self.faults.did(&Done::SyncFile(rel.as_path()));
    }

    /// A failed fsync poisons.
    fn synced(&self, what: Done<'_>, done: Result<(), StoreError>) -> Result<(), StoreError> {
        if done.is_ok() {
            self.faults.did(&what);
        }
        if let Err(error) = &done {
            self.counters.failed_fsync();
            if self.poison.set(error.to_string()).is_ok() {
                tracing::error!(%error, "An fsync failed: no more writes to this disk");
            }
        }
        done
    }
}
