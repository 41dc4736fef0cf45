//! Reading and looking.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::unix::{ffi::OsStrExt, fs::FileExt},
};

use nix::{dir::Dir, fcntl::OFlag, sys::stat::Mode};

use crate::{
    device::shm::SharedMap,
    store::{error::StoreError, fault::Op},
};

use super::{Entry, Kind, Rel, Root, kind_of, len_of, stat_at};

impl Root {
    /// Opens a plain file for reading. `NotFound` is an `Io` error (see `StoreError::is_missing`).
    pub(crate) fn open_file(&self, rel: &Rel) -> Result<(File, u64), StoreError> {
        self.open_plain(rel, OFlag::O_RDONLY)
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

    /// When a folder was changed last; `None` if it is not there.
    pub(crate) fn stamp(&self, rel: &Rel) -> Result<Option<(i64, u32)>, StoreError> {
        self.op(Op::Open, rel, || {
            let stat = self
                .folder_of(rel)
                .and_then(|folder| stat_at(&folder, rel.name()));
            match stat {
                Ok(stat) => Ok(Some((
                    stat.st_mtime,
                    u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
                ))),
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
}
