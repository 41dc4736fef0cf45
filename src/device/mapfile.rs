//! An append-only file of little endian u32 words, read through a mapping.
//!
//! # What
//! Words are written by `pwrite` at the end (a full disk is an error, not a signal) and read as
//! slices of the mapping, so that the page cache holds them and not this process.
//!
//! # State
//! `len` words are there; whatever lies behind them in the file is left from a failed append and is
//! overwritten by the next. The mapping may reach beyond the file's end; nothing beyond `len` is ever
//! touched through it.
//!
//! # Errors
//! A file that someone else truncates while it is mapped raises SIGBUS on the next read: the file must
//! lie where only this process writes. An exclusive lock on the file keeps a second one of us away.

#![expect(unsafe_code, reason = "slices of a mapped file")]

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, MetadataExt},
};

use memmap2::{Mmap, MmapOptions};
use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, fallocate},
    libc,
};

#[cfg(not(target_endian = "little"))]
compile_error!("mapped words are little endian");

/// The mapping grows by at least this many bytes, so that appends seldom map anew.
const STEP: u64 = 64 << 20;

const WORD: u64 = size_of::<u32>() as u64;
const PAGE: u64 = 4096;

/// An append-only file of words.
#[derive(Debug)]
pub struct MapFile {
    // None while nothing was ever mapped. Before `file`, so that it is unmapped first.
    map: Option<Mmap>,
    file: File,
    len: u64,
}

// === impl MapFile ===

impl MapFile {
    /// Takes a file opened for reading and writing, with the whole words that it holds: a torn last
    /// word does not count. Fails with [`io::ErrorKind::WouldBlock`] if another process has it.
    pub fn open(file: File) -> io::Result<Self> {
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
        }
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = metadata.size() / WORD;
        let mut this = Self {
            map: None,
            file,
            len: 0,
        };
        this.cover(len)?;
        this.len = len;
        Ok(this)
    }

    /// Words in the file.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// No word at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Words `[offset, offset + len)`, if they are all there.
    #[must_use]
    pub fn words(&self, offset: u64, len: u64) -> Option<&[u32]> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len)?;
        if len == 0 {
            return Some(&[]);
        }
        let bytes = self
            .map
            .as_ref()?
            .get((offset * WORD) as usize..(end * WORD) as usize)?;
        // SAFETY: any four bytes are a u32; `bytes` starts at a multiple of four of a page, so the
        // middle part is all of it.
        let (before, words, after) = unsafe { bytes.align_to::<u32>() };
        debug_assert!(
            before.is_empty() && after.is_empty(),
            "words are aligned in the mapping"
        );
        Some(words)
    }

    /// Adds words at the end and says the offset of the first. After an error nothing was added.
    /// Durable only after [`Self::sync`].
    pub fn append(&mut self, words: &[u32]) -> io::Result<u64> {
        let offset = self.len;
        let end = offset
            .checked_add(words.len() as u64)
            .ok_or(io::ErrorKind::FileTooLarge)?;
        // SAFETY: a slice of u32 is readable as four times as many bytes.
        let (_, bytes, _) = unsafe { words.align_to::<u8>() };
        let at = offset
            .checked_mul(WORD)
            .ok_or(io::ErrorKind::FileTooLarge)?;
        self.cover(end)?;
        self.file.write_all_at(bytes, at)?;
        self.len = end;
        Ok(offset)
    }

    /// Gives the room of words `[offset, offset + len)` back to the file system; they read as zeros
    /// from here on. Only whole pages of 4 KiB, and only where the file system can.
    pub fn punch(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        let (start, end) = (
            (offset * WORD).next_multiple_of(PAGE),
            end * WORD / PAGE * PAGE,
        );
        if start >= end {
            return Ok(());
        }
        let signed = |bytes: u64| i64::try_from(bytes).map_err(|_| Errno::EFBIG);
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        Ok(fallocate(
            &self.file,
            mode,
            signed(start)?,
            signed(end - start)?,
        )?)
    }

    /// Cuts the file to its first `len` words; more than there are is no change.
    pub fn truncate(&mut self, len: u64) -> io::Result<()> {
        if len < self.len {
            // First, so that nothing is read there even if the call half fails.
            self.len = len;
            self.file.set_len(len * WORD)?;
        }
        Ok(())
    }

    /// Makes all words durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Maps the file so far that `words` words are inside.
    fn cover(&mut self, words: u64) -> io::Result<()> {
        let need = words.checked_mul(WORD).ok_or(io::ErrorKind::FileTooLarge)?;
        let have = self.map.as_ref().map_or(0, |map| map.len() as u64);
        if need <= have {
            return Ok(());
        }
        let bytes = need
            .max(have.saturating_mul(2))
            .checked_next_multiple_of(STEP)
            .and_then(|bytes| usize::try_from(bytes).ok())
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| io::Error::from(Errno::from_raw(libc::ENOMEM)))?;
        // SAFETY: the file is append-only and locked to this process (see the module's essay), and
        // no slice is made of bytes beyond `len` or of bytes that are written again, as `truncate`,
        // `punch` and `append` need `&mut self`.
        let map = unsafe { MmapOptions::new().len(bytes).map(&self.file)? };
        self.map = Some(map);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_growth_and_reopening() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let reopen = || {
            File::options()
                .read(true)
                .write(true)
                .open(file.path())
                .unwrap()
        };
        let mut map = MapFile::open(reopen()).unwrap();
        assert!(map.is_empty());
        assert_eq!(map.words(0, 0), Some(&[][..]));
        assert_eq!(map.words(0, 1), None);
        // Beyond the first step, so the file is mapped a second time.
        let all: Vec<u32> = (0..20_000_000).collect();
        for part in all.chunks(3_000_001) {
            let offset = map.append(part).unwrap();
            assert_eq!(map.words(offset, part.len() as u64).unwrap(), part);
        }
        assert_eq!(map.words(0, map.len()).unwrap(), all);
        map.sync().unwrap();
        let error = MapFile::open(reopen()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(map);

        // A torn word at the end is not there, and the next append takes its place.
        let raw = reopen();
        raw.write_all_at(&[1, 2, 3], 80_000_000).unwrap();
        drop(raw);
        let mut map = MapFile::open(reopen()).unwrap();
        assert_eq!(map.len(), 20_000_000);
        assert_eq!(map.append(&[7, 8]).unwrap(), 20_000_000);
        assert_eq!(map.words(19_999_999, 3).unwrap(), [19_999_999, 7, 8]);
        for (offset, len) in [
            (0, 20_000_003),
            (20_000_002, 1),
            (u64::MAX, 2),
            (1, u64::MAX),
        ] {
            assert_eq!(map.words(offset, len), None);
        }

        map.truncate(3).unwrap();
        assert_eq!(map.words(0, 4), None);
        assert_eq!(map.append(&[9]).unwrap(), 3);
        assert_eq!(map.words(0, 4).unwrap(), [0, 1, 2, 9]);
        assert_eq!(reopen().metadata().unwrap().len(), 16);
    }

    #[test]
    fn a_failed_append_adds_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1, 0, 0, 0]).unwrap();
        let mut map = MapFile::open(File::open(file.path()).unwrap()).unwrap();
        assert!(map.append(&[2]).is_err(), "opened for reading only");
        assert_eq!(map.len(), 1);
        assert_eq!(map.words(0, 1).unwrap(), [1]);
    }

    #[test]
    fn only_files_are_taken() {
        assert!(MapFile::open(File::open("/").unwrap()).is_err());
        assert!(MapFile::open(File::open("/dev/null").unwrap()).is_err());
    }
}
