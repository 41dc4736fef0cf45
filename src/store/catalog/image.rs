//! What a catalog says: read whole, checked, and replayed.

use std::{
    collections::{HashMap, HashSet},
    io::Read,
};

use crate::{
    store::{
        disk::{
            data_dir::DataDir,
            layout,
            root::{Kind, Rel},
        },
        error::StoreError,
    },
    types::{Fingerprint, SnapshotId},
    util::id_map::IdMap,
};

use super::{
    CatalogFile, Known, Owner, Row, RowKv, TokenRun, boot,
    frame::{self, Framed, HEADER, unframe},
    record::{Record, Stamp, decode, decode_row, prefix},
    state_rel,
};

/// Records that are looked at together.
const AHEAD: usize = 64;

/// Why the manifests are read instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stale {
    /// There is none.
    Missing,
    /// It has another format version.
    Version,
    /// Its bytes are not those that were written.
    Damaged,
    /// It was being written in another boot of the host, or does not belong to this directory.
    Foreign,
    /// There are so few snapshots that all is checked.
    Small,
}

/// A catalog in memory, for the time of a start.
#[derive(Debug)]
pub struct Image {
    bytes: Vec<u8>,
    epoch: u64,
    end: u64,
    owners: Vec<Owner>,
    /// Of each owner, the number of its model.
    owner_models: Vec<u32>,
    models: Vec<Fingerprint>,
    rows: Vec<At>,
    live: Vec<bool>,
    /// KV references of each row, those of its base included.
    kv: Vec<u32>,
    known: IdMap<SnapshotId, Known>,
    dead: u64,
    /// The last times of folders of manifests.
    pub(crate) stamps: IdMap<(Fingerprint, u8), Stamp>,
    /// Objects whose files may be there without a name.
    pub(crate) maybe: HashMap<[u8; 8], Fingerprint>,
    pub(crate) doubts: HashSet<SnapshotId>,
    /// Rows whose manifests were not found: the log does not know it yet.
    pub(crate) vanished: Vec<(Fingerprint, SnapshotId)>,
}

/// The body of a row.
#[derive(Debug, Clone, Copy)]
struct At {
    offset: u64,
    len: u32,
}

// === impl Stale ===

impl Stale {
    /// The name in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "there is no catalog",
            Self::Version => "the catalog has another version",
            Self::Damaged => "the catalog is damaged",
            Self::Foreign => "the catalog was not closed before the host went down",
            Self::Small => "few snapshots",
        }
    }
}

// === impl Image ===

impl Image {
    /// Reads the catalog of a data directory, if it can be trusted.
    pub(crate) fn read(dir: &DataDir) -> Result<Result<Self, Stale>, StoreError> {
        let state = match dir.get_record::<CatalogFile>(&state_rel()) {
            Ok(Ok(state)) => state,
            Ok(Err(bad)) if bad.version.is_some() => return Ok(Err(Stale::Version)),
            Ok(Err(_)) => return Ok(Err(Stale::Damaged)),
            Err(error) if error.is_missing() => return Ok(Err(Stale::Missing)),
            Err(error) => return Err(error),
        };
        let tokens = dir
            .root
            .stat(&Rel::root().join(layout::token_log(state.epoch)));
        if !matches!(tokens, Ok(Some((Kind::File, _)))) {
            return Ok(Err(Stale::Foreign));
        }
        let rel = Rel::root().join(layout::CATALOG);
        let (mut file, len) = match dir.root.open_file(&rel) {
            Ok(open) => open,
            Err(error) if error.is_missing() => return Ok(Err(Stale::Missing)),
            Err(_) => return Ok(Err(Stale::Damaged)),
        };
        match state.closed {
            Some(closed) if closed != len => return Ok(Err(Stale::Damaged)),
            None if state.boot.is_empty() || state.boot != boot() => {
                return Ok(Err(Stale::Foreign));
            }
            _ => {}
        }
        let mut bytes = Vec::new();
        let room = usize::try_from(len).unwrap_or(usize::MAX);
        let read = bytes.try_reserve_exact(room).is_ok() && file.read_to_end(&mut bytes).is_ok();
        if !read {
            return Ok(Err(Stale::Damaged));
        }
        let image = Self::parse(bytes, state.epoch);
        Ok(image)
    }

    /// Replays the bytes of a log.
    pub(crate) fn parse(bytes: Vec<u8>, epoch: u64) -> Result<Self, Stale> {
        if bytes.get(..HEADER) != Some(&frame::header(epoch)[..]) {
            let other = bytes.get(8..12).is_some_and(|version| {
                version != frame::VERSION.to_le_bytes() && bytes.starts_with(&frame::MAGIC)
            });
            return Err(if other {
                Stale::Version
            } else {
                Stale::Damaged
            });
        }
        // A row and what goes with it take 150 bytes and more.
        let rows = bytes.len() / 150;
        let mut image = Self {
            bytes: Vec::new(),
            epoch,
            end: HEADER as u64,
            owners: Vec::new(),
            owner_models: Vec::new(),
            models: Vec::new(),
            rows: Vec::with_capacity(rows),
            live: Vec::with_capacity(rows),
            kv: Vec::with_capacity(rows),
            known: IdMap::with_capacity_and_hasher(rows, Default::default()),
            dead: 0,
            stamps: IdMap::default(),
            maybe: HashMap::new(),
            doubts: HashSet::new(),
            vanished: Vec::new(),
        };
        let mut at = HEADER;
        let mut row = Row::blank();
        let mut batch = Vec::with_capacity(AHEAD);
        loop {
            let mut ahead = at;
            while batch.len() < AHEAD
                && let Framed::Body(body, next) = unframe(epoch, &bytes, ahead)
            {
                batch.push((decode(body).ok_or(Stale::Damaged)?, next));
                ahead = next;
            }
            image.foresee(&batch);
            let whole = batch.len() == AHEAD;
            for (record, next) in batch.drain(..) {
                image.replay(&bytes, record, next, &mut row)?;
                at = next;
            }
            if !whole {
                break;
            }
        }
        if let Framed::Bad = unframe(epoch, &bytes, at) {
            return Err(Stale::Damaged);
        }
        image.end = at as u64;
        image.bytes = bytes;
        Ok(image)
    }

    /// Looks up what these records are about to look up. Changes nothing: many misses of the caches
    /// are under way at once, in place of one after the other.
    fn foresee(&self, records: &[(Record<'_>, usize)]) {
        let known = records.iter().filter(|(record, _)| match record {
            Record::Row(snapshot, _) => self.known.contains_key(snapshot),
            _ => false,
        });
        // Else it would all be left out.
        std::hint::black_box(known.count());
    }

    fn replay(
        &mut self,
        bytes: &[u8],
        record: Record<'_>,
        next: usize,
        row: &mut Row,
    ) -> Result<(), Stale> {
        match record {
            Record::Owner(owner) => {
                let found = self.models.iter().position(|it| *it == owner.fingerprint);
                let model = found.unwrap_or_else(|| {
                    self.models.push(owner.fingerprint);
                    self.models.len() - 1
                });
                self.owner_models.push(model as u32);
                self.owners.push(owner);
            }
            Record::Row(snapshot, body) => {
                let number = u32::try_from(self.rows.len()).map_err(|_| Stale::Damaged)?;
                decode_row(snapshot, body, number, row).ok_or(Stale::Damaged)?;
                let model = self.owner_models.get(row.owner as usize);
                let model = *model.ok_or(Stale::Damaged)?;
                let kv = self.kv_count(row).ok_or(Stale::Damaged)?;
                let fingerprint = self.models.get(model as usize).ok_or(Stale::Damaged)?;
                self.stamps
                    .insert((*fingerprint, folder(&snapshot)), row.stamp);
                if !self.maybe.is_empty() {
                    self.maybe.remove(&prefix(&row.state.object));
                    for part in &row.kv {
                        self.maybe.remove(&prefix(&part.object.object));
                    }
                }
                self.rows.push(At {
                    // The body ends four bytes before the next frame.
                    offset: (next - 4 - body.len()) as u64,
                    len: body.len() as u32,
                });
                self.live.push(true);
                self.kv.push(kv);
                self.doubts.remove(&snapshot);
                let known = Known {
                    model,
                    row: number,
                    kv,
                    digest: row.digest,
                };
                if let Some(old) = self.known.insert(snapshot, known) {
                    self.bury(bytes, old, None, row);
                }
            }
            Record::Drop { snapshot, stamp } => {
                self.dead += 2;
                if let Some(old) = self.known.swap_remove(&snapshot) {
                    self.bury(bytes, old, Some((snapshot, stamp)), row);
                }
                self.doubts.remove(&snapshot);
            }
            Record::Doubt { snapshot } => {
                self.dead += 1;
                if let Some(old) = self.known.swap_remove(&snapshot) {
                    self.bury(bytes, old, None, row);
                }
                self.doubts.insert(snapshot);
            }
            Record::Begin {
                fingerprint,
                object,
            } => {
                self.dead += 1;
                self.maybe.insert(object, fingerprint);
            }
            Record::Stamp {
                fingerprint,
                folder,
                stamp,
            } => {
                self.stamps.insert((fingerprint, folder), stamp);
            }
            Record::Gone { object } => {
                self.dead += 1;
                self.maybe.remove(&object);
            }
        }
        Ok(())
    }

    /// How many KV references a row has with those of its base.
    fn kv_count(&self, row: &Row) -> Option<u32> {
        let own = u32::try_from(row.kv.len()).ok()?;
        let Some(base) = row.base else {
            return (row.shared == 0 && row.from == 0).then_some(own);
        };
        let all = *self.kv.get(base as usize)?;
        (row.shared <= all).then_some(row.shared.checked_add(own)?)
    }

    /// A row is no more; its objects may be there until they are said to be gone.
    fn bury(
        &mut self,
        bytes: &[u8],
        old: Known,
        dropped: Option<(SnapshotId, Stamp)>,
        row: &mut Row,
    ) {
        if let Some(live) = self.live.get_mut(old.row as usize) {
            *live = false;
        }
        let Some(fingerprint) = self.models.get(old.model as usize).copied() else {
            return;
        };
        if let Some((snapshot, stamp)) = dropped {
            self.stamps.insert((fingerprint, folder(&snapshot)), stamp);
        }
        if self.decode(bytes, old.row, row).is_some() {
            self.maybe.insert(prefix(&row.state.object), fingerprint);
            for part in &row.kv {
                self.maybe.insert(prefix(&part.object.object), fingerprint);
            }
        }
    }

    fn decode(&self, bytes: &[u8], number: u32, row: &mut Row) -> Option<()> {
        let At { offset, len } = *self.rows.get(number as usize)?;
        let start = usize::try_from(offset).ok()?;
        // The id stands before the rest.
        let (id, body) = bytes
            .get(start - 16..start + len as usize)?
            .split_first_chunk()?;
        decode_row(SnapshotId::from_bytes(*id), body, number, row)
    }

    /// The log's epoch.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Where the next frame goes.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Frames that are of no use any more, about.
    pub(crate) fn dead(&self) -> u64 {
        self.dead
    }

    /// Rows, those that are no more included.
    pub(crate) fn len(&self) -> u32 {
        self.rows.len() as u32
    }

    /// Snapshots.
    #[must_use]
    pub fn snapshots(&self) -> usize {
        self.known.len()
    }

    /// Their owners, by number.
    #[must_use]
    pub fn owners(&self) -> &[Owner] {
        &self.owners
    }

    pub(crate) fn models(&self) -> &[Fingerprint] {
        &self.models
    }

    pub(crate) fn known(&self) -> &IdMap<SnapshotId, Known> {
        &self.known
    }

    pub(crate) fn take_known(&mut self) -> (Vec<Fingerprint>, IdMap<SnapshotId, Known>) {
        (self.models.clone(), std::mem::take(&mut self.known))
    }

    /// The manifest is not there any more.
    pub(crate) fn vanished(&mut self, snapshot: &SnapshotId) {
        if let Some(old) = self.known.swap_remove(snapshot) {
            if let Some(fingerprint) = self.models.get(old.model as usize) {
                self.vanished.push((*fingerprint, *snapshot));
            }
            let bytes = std::mem::take(&mut self.bytes);
            self.bury(&bytes, old, None, &mut Row::blank());
            self.bytes = bytes;
        }
    }

    /// Numbers of the rows of snapshots, in the order in which they came.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        let live = (0..).zip(&self.live);
        live.filter_map(|(number, live)| live.then_some(number))
    }

    /// Whether the row of this number is that of a snapshot.
    #[must_use]
    pub fn is_live(&self, number: u32) -> bool {
        self.live.get(number as usize).copied().unwrap_or(false)
    }

    /// How many KV references a row has, with those of its base.
    #[must_use]
    pub fn kv_len(&self, number: u32) -> Option<u32> {
        self.kv.get(number as usize).copied()
    }

    /// Decodes a row; whether it is one.
    pub fn row(&self, number: u32, row: &mut Row) -> bool {
        self.decode(&self.bytes, number, row).is_some()
    }

    /// All KV references of a row, those of its base first.
    #[must_use]
    pub fn kv_of(&self, number: u32) -> Option<Vec<RowKv>> {
        let mut parts: Vec<Vec<RowKv>> = Vec::new();
        let mut take = usize::MAX;
        let mut next = Some(number);
        let mut row = Row::blank();
        while let Some(number) = next {
            self.decode(&self.bytes, number, &mut row)?;
            let shared = row.shared as usize;
            // What a later row takes of this one.
            let own = take.saturating_sub(shared).min(row.kv.len());
            parts.push(row.kv.get(..own)?.to_vec());
            take = take.min(shared);
            next = row.base.filter(|_| take > 0);
        }
        parts.reverse();
        Some(parts.concat())
    }

    /// Where all tokens of a row stand; empty if that is not known.
    #[must_use]
    pub fn runs_of(&self, number: u32) -> Vec<TokenRun> {
        let mut parts: Vec<Vec<TokenRun>> = Vec::new();
        let mut next = Some(number);
        let mut end = None;
        let mut row = Row::blank();
        while let Some(number) = next {
            if self.decode(&self.bytes, number, &mut row).is_none()
                || row.runs.is_empty()
                || end.is_some_and(|end| end != row.boundary)
            {
                return Vec::new();
            }
            parts.push(row.runs.clone());
            end = Some(row.from);
            next = row.base.filter(|_| row.from > 0);
        }
        parts.reverse();
        parts.concat()
    }
}

/// The folder that a manifest is in, of those of its model.
pub(crate) fn folder(snapshot: &SnapshotId) -> u8 {
    let [.., last] = snapshot.to_bytes();
    last
}
