//! The catalog and its token log: what a daemon makes again by itself, and yet must not be wrong.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;

use crate::{
    store::{
        catalog::{CatalogFile, Image, Row, TokenRun, boot, image::Stale, is_of},
        counters::Reason,
        error::StoreError,
        sealed_json::Bad,
    },
    types::SnapshotId,
};

use super::super::{
    data_dir::read_record,
    layout,
    root::{Kind, Rel, Root},
};
use super::survey::Survey;
use super::{Options, Progress, Watch};

/// Tokens that are read at once.
const RUN: usize = 1 << 18;

/// Adds what is wrong with the catalog and its token log, and counts the rows and tokens that are
/// right.
pub(super) fn check(
    root: &Root,
    survey: &mut Survey,
    options: &Options,
    watch: &Watch<'_>,
) -> Result<(), StoreError> {
    let state_rel = Rel::root().join(layout::CATALOG_STATE);
    let state = match read_record::<CatalogFile>(root, &state_rel) {
        Ok(Ok(state)) => state,
        // Of another version: it is not used.
        Ok(Err(bad)) if bad.version.is_some() => return Ok(()),
        Ok(Err(bad)) => {
            survey.derived_bad.push((state_rel, bad));
            return Ok(());
        }
        Err(error) if error.is_missing() => return Ok(()),
        Err(error) => return Err(error),
    };
    let own = Rel::root().join(layout::token_log(state.epoch));
    let others = survey
        .derived
        .iter()
        .filter(|rel| layout::is_token_log(rel.name()) && **rel != own);
    survey.unused = others.cloned().collect();
    // Nobody knows what of it reached the medium: it is not used.
    if state.closed.is_none() && (state.boot.is_empty() || state.boot != boot()) {
        return Ok(());
    }
    let rel = Rel::root().join(layout::CATALOG);
    let Some(bytes) = read_all(root, &rel)? else {
        return Ok(());
    };
    if !is_of(&bytes, state.epoch) {
        // A compaction was killed before it had named its epoch, or the header is damaged: it is
        // not used in any case.
        if !is_of_any(&bytes) {
            let bad = Bad::new(Reason::Checksum, "its header");
            survey.derived_bad.push((rel, bad));
        }
        return Ok(());
    }
    if state.closed.is_some_and(|len| len != bytes.len() as u64) {
        let bad = Bad::new(Reason::Length, format!("{} bytes", bytes.len()));
        survey.derived_bad.push((rel, bad));
        return Ok(());
    }
    let image = match Image::parse(bytes, state.epoch) {
        Ok(image) => image,
        Err(Stale::Version) => return Ok(()),
        Err(_) => {
            let bad = Bad::new(Reason::Checksum, "a record");
            survey.derived_bad.push((rel, bad));
            return Ok(());
        }
    };
    let known: HashMap<SnapshotId, usize> = survey
        .snapshots
        .iter()
        .enumerate()
        .map(|(index, snapshot)| (snapshot.id, index))
        .collect();
    let mut row = Row::blank();
    let mut wrong = None;
    let mut runs: Vec<TokenRun> = Vec::new();
    for number in image.numbers() {
        if !image.row(number, &mut row) {
            continue;
        }
        runs.extend(&row.runs);
        // One without a manifest is dropped by the next start.
        let content = known
            .get(&row.snapshot)
            .and_then(|index| survey.snapshots.get(*index))
            .and_then(|snapshot| snapshot.content.as_ref().ok());
        let Some(content) = content else { continue };
        if content.boundary != row.boundary || content.digest != row.digest {
            wrong.get_or_insert(row.snapshot);
        }
        survey.rows += 1;
    }
    if let Some(snapshot) = wrong {
        let what = format!("it says something else of {snapshot} than its manifest");
        survey
            .derived_bad
            .push((rel, Bad::new(Reason::Mismatch, what)));
    }
    if options.fast {
        return Ok(());
    }
    if let Some(bad) = tokens(root, &own, &mut runs, watch)? {
        survey.derived_bad.push((own, bad));
    }
    Ok(())
}

/// Compares every run of tokens with its checksum.
fn tokens(
    root: &Root,
    rel: &Rel,
    runs: &mut [TokenRun],
    watch: &Watch<'_>,
) -> Result<Option<Bad>, StoreError> {
    let file = match root.open_file(rel) {
        Ok((file, _)) => file,
        Err(error) if error.is_missing() => return Ok(None),
        Err(StoreError::UnsafePath { .. }) => {
            return Ok(Some(Bad::new(Reason::NotAFile, "not a plain file")));
        }
        Err(error) => return Err(error),
    };
    runs.sort_unstable_by_key(|run| run.offset);
    let mut bytes = Vec::new();
    let total = runs.len() as u64;
    for (run, done) in runs.iter().zip(0..) {
        let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        let (mut at, mut left) = (run.offset, run.len as usize);
        while left > 0 {
            let some = left.min(RUN);
            bytes.resize(some * 4, 0);
            if file
                .read_exact_at(&mut bytes, at.saturating_mul(4))
                .is_err()
            {
                let what = format!("tokens {at} to {} are not there", at + some as u64);
                return Ok(Some(Bad::new(Reason::Length, what)));
            }
            crc.update(&bytes);
            (at, left) = (at + some as u64, left - some);
        }
        if crc.finalize() as u32 != run.crc {
            let what = format!("{} tokens at {}", run.len, run.offset);
            return Ok(Some(Bad::new(Reason::Checksum, what)));
        }
        if done % 1024 == 0 {
            watch(Progress {
                phase: "token log",
                done,
                total,
                bytes: 0,
            });
        }
    }
    Ok(None)
}

/// Whether it has a good header, of whatever epoch.
fn is_of_any(bytes: &[u8]) -> bool {
    let epoch = bytes.get(12..20).and_then(|epoch| epoch.first_chunk::<8>());
    epoch.is_some_and(|epoch| is_of(bytes, u64::from_le_bytes(*epoch)))
}

/// The whole file; `None` if it is not there.
fn read_all(root: &Root, rel: &Rel) -> Result<Option<Vec<u8>>, StoreError> {
    match root.stat(rel)? {
        Some((Kind::File, _)) => {}
        _ => return Ok(None),
    }
    let (file, len) = root.open_file(rel)?;
    let room = usize::try_from(len).map_err(|_| StoreError::invalid("catalog: too long"))?;
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(room)
        .map_err(|_| StoreError::invalid("catalog: more than the memory"))?;
    bytes.resize(room, 0);
    root.read(&file, rel, 0, &mut bytes)?;
    Ok(Some(bytes))
}
