//! The token log: every known prefix's token ids, one after the other, in a mapped file that only
//! grows. It is rebuilt at each start from the tokens beside the KV, so it need not be durable.
//!
//! Where others have filled the file system it goes on in memory: what is stored must be found all
//! the same. The daemon's own budget is another matter: its owner makes room.

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

/// An append-only list of token ids.
#[derive(Debug)]
pub struct TokenLog {
    words: MapFile,
    /// The directory that its bytes are counted in; none if it lies in memory.
    dir: Option<Arc<DataDir>>,
}

// === impl TokenLog ===

impl TokenLog {
    /// An empty log in the data directory.
    pub(crate) fn on_disk(dir: Arc<DataDir>) -> Result<Self, StoreError> {
        let rel = Rel::root().join(layout::TOKENS);
        dir.root.unlink(&rel)?;
        let file = dir.root.open_or_create(&rel)?;
        let words = MapFile::open(file).map_err(|error| {
            let path = dir.root.path().join(rel.as_path());
            StoreError::io(super::fault::Op::Open, path, error)
        })?;
        Ok(Self {
            words,
            dir: Some(dir),
        })
    }

    /// An empty log in memory, where there is no disk tier.
    pub fn in_memory() -> io::Result<Self> {
        let file = File::from(memfd_create(NAME, MFdFlags::MFD_CLOEXEC)?);
        Ok(Self {
            words: MapFile::open(file)?,
            dir: None,
        })
    }

    /// Tokens in the log.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.words.len()
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
        let reservation = (grown > 0).then(|| dir.reserve(grown)).transpose()?;
        let offset = self.words.append(tokens)?;
        if let Some(reservation) = reservation {
            reservation.keep();
        }
        Ok(offset)
    }

    /// Goes on in memory, with all that is there.
    fn leave(&mut self, dir: &DataDir) -> io::Result<()> {
        let mut words = Self::in_memory()?.words;
        let all = self.words.len();
        self.get_runs(0, all, &mut |run| words.append(run).map(drop))?;
        self.words = words;
        self.dir = None;
        match dir.root.unlink(&Rel::root().join(layout::TOKENS)) {
            Ok(_) => dir.ledger.sub(on_disk(all.saturating_mul(4))),
            Err(error) => tracing::warn!(%error, "The token log's file could not be removed"),
        }
        Ok(())
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

// === impl AppendError ===

impl AppendError {
    /// Others have filled the file system, or it does not work.
    fn is_of_others(&self) -> bool {
        match self {
            Self::Room(error) => !matches!(error, StoreError::NoSpace { .. }),
            Self::File(_) => true,
        }
    }
}

impl From<AppendError> for io::Error {
    fn from(error: AppendError) -> Self {
        match error {
            AppendError::Room(error) => Self::new(io::ErrorKind::StorageFull, error),
            AppendError::File(error) => error,
        }
    }
}

impl Tokens for TokenLog {
    fn append(&mut self, tokens: &[TokenId]) -> io::Result<u64> {
        let Some(dir) = self.dir.clone() else {
            return self.words.append(tokens);
        };
        match self.append_on_disk(&dir, tokens) {
            Err(error) if error.is_of_others() => {
                tracing::warn!(%error, "The token log goes on in memory");
                self.leave(&dir)?;
                self.words.append(tokens)
            }
            appended => Ok(appended?),
        }
    }

    fn get(&self, offset: u64, len: u32, f: &mut dyn FnMut(&[TokenId])) {
        let end = offset.saturating_add(u64::from(len)).min(self.words.len());
        let _ = self.get_runs(offset, end, &mut |run| {
            f(run);
            Ok(())
        });
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
}
