//! The token log: every known prefix's token ids, one after the other, in a mapped file. It grows at
//! its end only; pages whose tokens nobody knows any more become holes and take no room. It belongs to
//! a catalog, whose rows say where the tokens of a snapshot stand, and is found again with that;
//! without one it is rebuilt from the tokens beside the KV, so it need not be durable.
//!
//! Beside a catalog holes are made only when the rows that name their tokens are gone
//! ([`TokenLog::give_back`]): a row never points at a hole.
//!
//! Where others have filled the file system, or the budget is full of what is to stay, it goes on in
//! memory: what is stored must be found all the same. Otherwise the owner of the budget makes room.

use std::{ffi::CStr, fs::File, io, sync::Arc};

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::{
    device::mapfile::MapFile,
    types::{TokenId, Tokens},
};

use super::{
    disk::{data_dir::DataDir, layout, ledger::on_disk, root::Rel},
    error::StoreError,
};

const NAME: &CStr = c"engram-tokens";
/// Most tokens handed out as one run.
const RUN: u64 = 1 << 20;
/// Tokens without use that are not worth a word.
const WASTE: u64 = if cfg!(test) { 512 } else { 4 << 20 };
/// Tokens in a page of the file.
const PAGE_WORDS: u64 = 1024;

/// An append-only list of token ids.
#[derive(Debug)]
pub struct TokenLog {
    words: MapFile,
    /// The directory that its bytes are counted in, and its name there; none if it lies in memory.
    dir: Option<(Arc<DataDir>, Rel)>,
    /// Beside a catalog: what was released since the last time that holes were made.
    released: Option<Vec<(u64, u32)>>,
    /// For each page, tokens in it that somebody knows.
    live: Vec<u32>,
    /// Bytes of holes.
    holes: u64,
}

// === impl TokenLog ===

impl TokenLog {
    /// An empty log in the data directory.
    pub(crate) fn on_disk(dir: Arc<DataDir>) -> Result<Self, StoreError> {
        let rel = Rel::root().join(layout::TOKENS);
        dir.root.unlink(&rel)?;
        Self::open(dir, rel)
    }

    /// The log of the catalog of this epoch, with what is in it. It counts as used when
    /// [`Self::settle`] was called.
    pub(crate) fn of_catalog(dir: Arc<DataDir>, epoch: u64) -> Result<Self, StoreError> {
        let rel = Rel::root().join(layout::token_log(epoch));
        let mut log = Self::open(dir, rel)?;
        let pages = usize::try_from(log.words.len().div_ceil(PAGE_WORDS)).unwrap_or(usize::MAX);
        log.live = vec![0; pages];
        log.released = Some(Vec::new());
        Ok(log)
    }

    fn open(dir: Arc<DataDir>, rel: Rel) -> Result<Self, StoreError> {
        let file = dir.root.open_or_create(&rel)?;
        let words = MapFile::open(file).map_err(|error| {
            let path = dir.root.path().join(rel.as_path());
            StoreError::io(super::fault::Op::Open, path, error)
        })?;
        Ok(Self {
            words,
            dir: Some((dir, rel)),
            released: None,
            live: Vec::new(),
            holes: 0,
        })
    }

    /// Everything that points into a log found again is known: the rest becomes holes, and what is
    /// left is counted.
    pub fn settle(&mut self) {
        let Some((dir, _)) = self.dir.clone() else {
            return;
        };
        let whole = usize::try_from(self.words.len() / PAGE_WORDS).unwrap_or(usize::MAX);
        self.holes = self.punch(0, whole);
        let bytes = on_disk(self.words.len().saturating_mul(4));
        dir.ledger.add(bytes.saturating_sub(self.holes));
    }

    /// Makes holes of what was released: no row of the catalog names it any more.
    pub fn give_back(&mut self) {
        let Some(released) = self.released.as_mut().filter(|runs| !runs.is_empty()) else {
            return;
        };
        let mut runs = std::mem::take(released);
        runs.sort_unstable();
        // Of several that lie in a page it becomes a hole once.
        let mut done = 0;
        for (offset, len) in runs {
            done = self.punch_released(offset, len, done);
        }
    }

    /// Makes all tokens durable.
    ///
    /// # Errors
    /// Those of the system.
    pub fn sync(&self) -> io::Result<()> {
        self.words.sync()?;
        #[cfg(any(test, feature = "testing"))]
        if let Some((dir, rel)) = &self.dir {
            let mut bytes = Vec::new();
            self.get_runs(0, self.words.len(), &mut |run| {
                bytes.extend(run.iter().flat_map(|token| token.to_le_bytes()));
                Ok(())
            })?;
            dir.root.synced_apart(rel, &bytes);
        }
        Ok(())
    }

    /// Whether so much room is lost to pages of which only a few tokens are known that the log should
    /// be written anew.
    #[must_use]
    pub fn is_wasteful(&self) -> bool {
        let known: u64 = self.live.iter().map(|live| u64::from(*live)).sum();
        let pages = self.live.iter().filter(|live| **live > 0).count() as u64;
        let lost = pages.saturating_mul(PAGE_WORDS).saturating_sub(known);
        lost >= WASTE && lost > known
    }

    /// CRC-32C of a run of tokens; `None` if they are not all there.
    #[must_use]
    pub fn crc(&self, offset: u64, len: u32) -> Option<u32> {
        let mut crc = Crc::default();
        self.get(offset, len, &mut |run| crc.add(run));
        (crc.words == u64::from(len)).then(|| crc.finish())
    }

    /// It belongs to a catalog.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.dir.is_some() && self.released.is_some()
    }

    /// An empty log in memory, where there is no disk tier.
    pub fn in_memory() -> io::Result<Self> {
        let file = File::from(memfd_create(NAME, MFdFlags::MFD_CLOEXEC)?);
        Ok(Self {
            words: MapFile::open(file)?,
            dir: None,
            released: None,
            live: Vec::new(),
            holes: 0,
        })
    }

    /// Tokens in the log.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.words.len()
    }

    /// From here on nothing of it is on disk, and the budget has what it took.
    ///
    /// # Errors
    /// The system gives no memory; then nothing changed.
    pub fn go_on_in_memory(&mut self) -> io::Result<()> {
        match self.dir.clone() {
            Some((dir, rel)) => self.leave(&dir, &rel),
            None => Ok(()),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl TokenLog {
    fn append_on_disk(&mut self, dir: &DataDir, tokens: &[TokenId]) -> Result<u64, AppendError> {
        let bytes = |words: u64| on_disk(words.saturating_mul(4));
        let words = self.words.len();
        let grown = bytes(words.saturating_add(tokens.len() as u64)) - bytes(words);
        if grown == 0 {
            return Ok(self.words.append(tokens)?);
        }
        match dir.reserve(grown) {
            Ok(reservation) => {
                let offset = self.words.append(tokens)?;
                reservation.keep();
                Ok(offset)
            }
            // A snapshot in RAM must not be lost for a few of its tokens: the owner of the budget makes
            // room right after.
            Err(StoreError::NoSpace { .. }) => {
                let offset = self.words.append(tokens)?;
                dir.ledger.add(grown);
                Ok(offset)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Goes on in memory, with all that is there.
    fn leave(&mut self, dir: &DataDir, rel: &Rel) -> io::Result<()> {
        if self.released.take().is_some() {
            dir.catalog.give_up(dir, "the token log goes on in memory");
        }
        let mut words = Self::in_memory()?.words;
        let all = self.words.len();
        self.get_runs(0, all, &mut |run| words.append(run).map(drop))?;
        self.words = words;
        self.dir = None;
        self.punch(0, (all / PAGE_WORDS) as usize);
        match dir.root.unlink(rel) {
            Ok(_) => dir
                .ledger
                .sub(on_disk(all.saturating_mul(4)).saturating_sub(self.holes)),
            Err(error) => tracing::warn!(%error, "The token log's file could not be removed"),
        }
        Ok(())
    }

    /// Notes which pages the tokens at `[offset, offset + len)` lie in.
    fn count(&mut self, offset: u64, len: u64, more: bool) {
        let end = offset.saturating_add(len);
        let pages = usize::try_from(end.div_ceil(PAGE_WORDS)).unwrap_or(usize::MAX);
        if more && self.live.len() < pages {
            self.live.resize(pages, 0);
        }
        let first = usize::try_from(offset / PAGE_WORDS).unwrap_or(usize::MAX);
        for (page, live) in self.live.iter_mut().enumerate().take(pages).skip(first) {
            let start = (page as u64 * PAGE_WORDS).max(offset);
            let inside = ((page as u64 + 1) * PAGE_WORDS).min(end) - start;
            let inside = u32::try_from(inside).unwrap_or(u32::MAX);
            *live = if more {
                live.saturating_add(inside)
            } else {
                live.saturating_sub(inside)
            };
        }
    }

    /// Makes holes of the pages `[first, end)` of which nobody knows a token. Returns their bytes.
    fn punch(&mut self, first: usize, end: usize) -> u64 {
        let mut bytes = 0;
        let mut page = first;
        while page < end {
            let pages = self.live.get(page..end).unwrap_or_default();
            let run = pages.iter().take_while(|live| **live == 0).count();
            if run > 0 {
                let (at, len) = (page as u64 * PAGE_WORDS, run as u64 * PAGE_WORDS);
                match self.words.punch(at, len) {
                    Ok(()) => bytes += len * 4,
                    Err(error) => {
                        tracing::debug!(%error, "Tokens that nobody needs keep their room");
                        return bytes;
                    }
                }
            }
            page += run + 1;
        }
        bytes
    }

    fn get_runs(
        &self,
        mut at: u64,
        end: u64,
        f: &mut dyn FnMut(&[TokenId]) -> io::Result<()>,
    ) -> io::Result<()> {
        while at < end {
            let run = (end - at).min(RUN);
            let Some(words) = self.words.words(at, run) else {
                return Ok(());
            };
            f(words)?;
            at += run;
        }
        Ok(())
    }
}

/// Why a file did not grow.
#[derive(Debug, thiserror::Error)]
enum AppendError {
    #[error(transparent)]
    Room(#[from] StoreError),
    #[error(transparent)]
    File(#[from] io::Error),
}

impl Tokens for TokenLog {
    fn append(&mut self, tokens: &[TokenId]) -> io::Result<u64> {
        let appended = match self.dir.clone() {
            None => self.words.append(tokens)?,
            Some((dir, rel)) => match self.append_on_disk(&dir, tokens) {
                Ok(offset) => offset,
                // Others have filled the file system, or it does not work.
                Err(error) => {
                    tracing::warn!(%error, "The token log goes on in memory");
                    self.leave(&dir, &rel)?;
                    self.words.append(tokens)?
                }
            },
        };
        self.count(appended, tokens.len() as u64, true);
        Ok(appended)
    }

    fn release(&mut self, offset: u64, len: u32) {
        self.count(offset, len.into(), false);
        match &mut self.released {
            Some(released) => released.push((offset, len)),
            None => {
                self.punch_released(offset, len, 0);
            }
        }
    }

    fn hold(&mut self, offset: u64, len: u32) -> bool {
        let end = offset.checked_add(u64::from(len));
        let there = end.is_some_and(|end| end <= self.words.len());
        if there {
            self.count(offset, len.into(), true);
        }
        there
    }

    fn get(&self, offset: u64, len: u32, f: &mut dyn FnMut(&[TokenId])) {
        let end = offset.saturating_add(u64::from(len)).min(self.words.len());
        let _ = self.get_runs(offset, end, &mut |run| {
            f(run);
            Ok(())
        });
    }
}

impl TokenLog {
    /// Makes holes of what was released, from page `done` on. Returns the page after it.
    fn punch_released(&mut self, offset: u64, len: u32, done: usize) -> usize {
        // The last page is written to again.
        let whole = self.words.len() / PAGE_WORDS;
        let page = |page: u64| usize::try_from(page).unwrap_or(usize::MAX);
        let end = offset.saturating_add(len.into()).div_ceil(PAGE_WORDS);
        let end = page(end.min(whole));
        let bytes = self.punch(page(offset / PAGE_WORDS).max(done), end);
        if let Some((dir, _)) = &self.dir {
            self.holes += bytes;
            dir.ledger.sub(bytes);
        }
        done.max(end)
    }
}

/// CRC-32C of tokens as little endian words.
struct Crc {
    digest: crc_fast::Digest,
    words: u64,
    bytes: Vec<u8>,
}

// === impl Crc ===

impl Default for Crc {
    fn default() -> Self {
        Self {
            digest: crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi),
            words: 0,
            bytes: Vec::new(),
        }
    }
}

impl Crc {
    fn add(&mut self, run: &[TokenId]) {
        self.words += run.len() as u64;
        for part in run.chunks(PAGE_WORDS as usize) {
            self.bytes.clear();
            self.bytes
                .extend(part.iter().flat_map(|token| token.to_le_bytes()));
            self.digest.update(&self.bytes);
        }
    }

    fn finish(&self) -> u32 {
        self.digest.finalize() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_and_reads_back() {
        let mut log = TokenLog::in_memory().unwrap();
        assert!(log.is_empty());
        assert_eq!(log.append(&[1, 2, 3]).unwrap(), 0);
        assert_eq!(log.append(&[]).unwrap(), 3);
        assert_eq!(log.append(&[4]).unwrap(), 3);
        let read = |offset, len| {
            let mut out = Vec::new();
            log.get(offset, len, &mut |run| out.extend_from_slice(run));
            out
        };
        assert_eq!(read(1, 3), [2, 3, 4]);
        assert_eq!(read(1, 30), [2, 3, 4]);
        assert_eq!(read(4, 1), [0u32; 0]);
        assert_eq!(read(u64::MAX, u32::MAX), [0u32; 0]);
    }

    #[test]
    fn pages_that_nobody_knows_take_no_room() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let blocks = || {
            use std::os::unix::fs::MetadataExt;
            file.as_file().metadata().unwrap().blocks() * 512
        };
        let mut log = TokenLog {
            words: MapFile::open(file.reopen().unwrap()).unwrap(),
            dir: None,
            released: None,
            live: Vec::new(),
            holes: 0,
        };
        for seed in 0..100 {
            log.append(&[seed; 1000]).unwrap();
        }
        let full = blocks();
        assert!(full >= 400_000, "{full}");
        for seed in (0..100).filter(|seed| seed % 10 != 3) {
            log.release(seed * 1000, 1000);
        }
        assert!(blocks() < full / 4, "{} of {full}", blocks());
        for seed in (3..100).step_by(10) {
            let mut seen = Vec::new();
            log.get(seed * 1000, 1000, &mut |run| seen.extend_from_slice(run));
            assert_eq!(seen, [seed as u32; 1000]);
        }
        // What comes next is whole.
        let at = log.append(&[7; 3000]).unwrap();
        assert_eq!(at, 100_000);
        let mut seen = Vec::new();
        log.get(at, 3000, &mut |run| seen.extend_from_slice(run));
        assert_eq!(seen, [7; 3000]);
    }
}
