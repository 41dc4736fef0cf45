//! The token log without what nobody knows any more.
//!
//! # What
//! Pages of the token log that nobody needs are holes; a page of which one token is needed is not.
//! Where much is lost to such pages, an orderly end writes the log anew, close together, and the
//! catalog beside it with the new places.
//!
//! # Order of writes
//! The new token log, under the name of a new epoch, synced; the new catalog of that epoch, synced,
//! in place of the old one; `catalog.json`, which names the epoch: the commit point; then the old
//! token log goes. A start after a death before the commit point finds a catalog that is not of its
//! epoch and reads the manifests; what lies beside the catalog without belonging to it is removed.

use crate::{
    store::{
        disk::{
            data_dir::DataDir,
            layout,
            ledger::on_disk,
            root::{Rel, Temp},
        },
        error::StoreError,
        token_log::TokenLog,
    },
    types::Tokens,
};

use super::{Image, Row, TokenRun, compact};

/// Bytes of one write.
const CHUNK: u64 = 1 << 20;

/// Runs of tokens that somebody knows, in order, none touching another, and where each goes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    /// Start, end, new start.
    runs: Vec<(u64, u64, u64)>,
}

// === impl Places ===

impl Places {
    /// All tokens of the rows that are live.
    pub(super) fn of(image: &Image) -> Self {
        let mut all: Vec<(u64, u64)> = Vec::new();
        let mut row = Row::blank();
        let mut add = |runs: &[TokenRun]| {
            let ends = runs
                .iter()
                .map(|run| (run.offset, run.offset.saturating_add(run.len.into())));
            all.extend(ends);
        };
        for number in image.numbers() {
            if !image.row(number, &mut row) {
                continue;
            }
            match row.base {
                Some(base) if !image.is_live(base) => add(&image.runs_of(number)),
                _ => add(&row.runs),
            }
        }
        all.sort_unstable();
        let mut runs: Vec<(u64, u64, u64)> = Vec::new();
        let mut next = 0;
        for (start, end) in all {
            match runs.last_mut() {
                Some(last) if start <= last.1 => {
                    let more = end.saturating_sub(last.1);
                    last.1 += more;
                    next += more;
                }
                _ => {
                    runs.push((start, end, next));
                    next += end.saturating_sub(start);
                }
            }
        }
        Self { runs }
    }

    /// Where tokens that stood at `offset` go.
    pub(super) fn new_place(&self, offset: u64) -> Option<u64> {
        let after = self.runs.partition_point(|(start, ..)| *start <= offset);
        let (start, end, new) = self.runs.get(after.checked_sub(1)?)?;
        (offset < *end).then(|| new + (offset - start))
    }

    /// Tokens in all.
    pub(super) fn len(&self) -> u64 {
        let last = self.runs.last();
        last.map_or(0, |(start, end, new)| new + (end - start))
    }
}

/// Writes both files anew. Returns the length of the catalog.
pub(super) fn write(
    dir: &DataDir,
    image: &Image,
    tokens: &TokenLog,
    epoch: u64,
) -> Result<u64, StoreError> {
    let places = Places::of(image);
    let bytes = on_disk(places.len().saturating_mul(4));
    // Both are there for a moment.
    let reservation = dir.reserve(bytes.saturating_add(on_disk(image.end())))?;
    let log = Rel::root().join(layout::token_log(epoch));
    let rel = Rel::root().join(layout::CATALOG);
    let (log_temp, temp) = (dir.root.create_temp(&log)?, dir.root.create_temp(&rel)?);
    let written = copy(dir, &log_temp, &places, tokens).and_then(|()| {
        let (at, _) = compact::write(dir, &temp, image, epoch, &mut |runs| {
            for run in runs.iter_mut() {
                match places.new_place(run.offset) {
                    Some(place) => run.offset = place,
                    // Its manifest is read.
                    None => return runs.clear(),
                }
            }
        })?;
        dir.root.sync_file(&temp)?;
        let folder = dir.root.open_folder(&Rel::root())?;
        dir.root.rename(&log_temp.rel, &log)?;
        dir.root.rename(&temp.rel, &rel)?;
        dir.root.sync_folder(&folder)?;
        Ok(at)
    });
    match written {
        Ok(at) => {
            reservation.keep();
            Ok(at)
        }
        Err(error) => {
            dir.root.discard(&log_temp.rel);
            dir.root.discard(&temp.rel);
            Err(error)
        }
    }
}

fn copy(dir: &DataDir, temp: &Temp, places: &Places, tokens: &TokenLog) -> Result<(), StoreError> {
    let mut at = 0;
    let mut buffer: Vec<u8> = Vec::new();
    let flush = |buffer: &mut Vec<u8>, at: &mut u64| {
        dir.root.write(temp, *at, buffer)?;
        *at += buffer.len() as u64;
        buffer.clear();
        Ok::<(), StoreError>(())
    };
    for (start, end, _) in &places.runs {
        let mut from = *start;
        while from < *end {
            let len = (end - from).min(CHUNK / 4);
            let before = buffer.len();
            tokens.get(from, len as u32, &mut |run| {
                buffer.extend(run.iter().flat_map(|token| token.to_le_bytes()));
            });
            if buffer.len() - before != len as usize * 4 {
                return Err(StoreError::invalid("a row names tokens that are not there"));
            }
            from += len;
            if buffer.len() as u64 >= CHUNK {
                flush(&mut buffer, &mut at)?;
            }
        }
    }
    flush(&mut buffer, &mut at)?;
    dir.root.sync_file(temp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_keep_what_overlaps_together() {
        let places = Places {
            runs: vec![(10, 20, 0), (50, 55, 10)],
        };
        let all = [0, 10, 19, 20, 50, 54, 55].map(|at| places.new_place(at));
        let expected = [None, Some(0), Some(9), None, Some(10), Some(14), None];
        assert_eq!(all, expected);
        assert_eq!(places.len(), 15);
        assert_eq!(Places::default().new_place(3), None);
        assert_eq!(Places::default().len(), 0);
    }
}
