//! Rows of the catalog as snapshots of the index.

use std::sync::{Arc, mpsc};

use smallvec::SmallVec;

use super::{Common, Unverified};
use crate::index::{Edge, Loader, ObjectEntry, Part, Placed, Placing, Spot, TierSet, TreeKey};
use crate::service::core::Model;
use crate::store::catalog::{Image, Owner, Row, RowKv, RowObject, TokenRun};
use crate::store::{DiskTier, TokenLog};
use crate::types::{Generation, Millis, ObjectId, ObjectKind, SnapshotId, TierKind, TokenRange};

/// Rows of one batch: what they look up is looked up together.
const BATCH: usize = 64;
/// Batches that wait.
const AHEAD: usize = 64;

/// A row as the index takes it.
pub(super) struct Decoded {
    pub(super) number: u32,
    pub(super) snapshot: SnapshotId,
    pub(super) owner: u32,
    pub(super) created: Millis,
    pub(super) generation: Generation,
    /// The row whose tokens come before these.
    base: Option<u32>,
    state: ObjectEntry,
    runs: SmallVec<[TokenRun; 1]>,
    parts: SmallVec<[Part; 1]>,
}

/// Rows as they come: decoded, or those that have no place as they stand.
pub(super) type Batch = Vec<Result<Decoded, (u32, SnapshotId)>>;

/// Rows on their way into an index.
pub(super) struct Filling<'a> {
    pub(super) image: &'a Image,
    pub(super) owners: &'a [Option<Common>],
    pub(super) loader: Loader<TokenLog>,
    /// Where the rows stand, by number.
    pub(super) spots: Vec<Option<Spot>>,
    pub(super) edges: Vec<Edge>,
    pub(super) verify_first: bool,
    pub(super) unverified: Vec<Unverified>,
}

/// Decodes all rows, in their order; `Err`: a row that has no place as it stands.
pub(super) fn decode_all(image: &Image, owners: &[Option<Common>], send: mpsc::SyncSender<Batch>) {
    let mut row = Row::blank();
    let mut batch = Vec::with_capacity(BATCH);
    for number in image.numbers() {
        if !image.row(number, &mut row) {
            continue;
        }
        let owner = owners.get(row.owner as usize).and_then(Option::as_ref);
        let decoded = owner.and_then(|common| Decoded::of(image, common, number, &row));
        batch.push(decoded.ok_or((number, row.snapshot)));
        if batch.len() == BATCH {
            let full = std::mem::replace(&mut batch, Vec::with_capacity(BATCH));
            if send.send(full).is_err() {
                return;
            }
        }
    }
    // Nobody takes it any more: that is no matter of this thread.
    send.send(batch).unwrap_or_default();
}

/// A channel for batches of rows.
pub(super) fn batches<T>() -> (mpsc::SyncSender<T>, mpsc::Receiver<T>) {
    mpsc::sync_channel(AHEAD)
}

// === impl Decoded ===

impl Decoded {
    /// `None` if its manifest has to be read.
    fn of(image: &Image, common: &Common, number: u32, row: &Row) -> Option<Self> {
        let base = row.base.filter(|base| {
            let whole = image.kv_len(*base) == Some(row.shared);
            let starts = row.kv.first().map(|part| part.range.start);
            whole && row.from > 0 && starts == Some(row.from) && image.is_live(*base)
        });
        let mut decoded = Self {
            number,
            snapshot: row.snapshot,
            owner: row.owner,
            created: row.created,
            generation: row.generation,
            base,
            state: common.state(&row.state, row.boundary),
            runs: SmallVec::from_slice(&row.runs),
            parts: row.kv.iter().map(|part| common.part(part)).collect(),
        };
        if base.is_none() {
            decoded.whole(image, common)?;
        }
        let empty = decoded.runs.is_empty() || decoded.parts.is_empty();
        (!empty).then_some(decoded)
    }

    /// All of its tokens and its KV, those of rows before it included.
    fn whole(&mut self, image: &Image, common: &Common) -> Option<()> {
        let kv = image.kv_of(self.number)?;
        self.parts = kv.iter().map(|part| common.part(part)).collect();
        self.runs = SmallVec::from_vec(image.runs_of(self.number));
        self.base = None;
        Some(())
    }
}

// === impl Filling ===

impl Filling<'_> {
    /// Looks up what rows are about to look up.
    pub(super) fn foresee<'d>(&self, rows: impl Iterator<Item = &'d Decoded>) {
        let spots = &self.spots;
        self.loader.foresee(rows.map(|row| {
            let after = row.base.and_then(|base| spots.get(base as usize).copied());
            let kv = row.parts.last().map(|part| part.object.id);
            (row.snapshot, [Some(row.state.id), kv], after.flatten())
        }));
    }

    /// Places a row; `None` if its manifest has to be read.
    pub(super) fn place(&mut self, row: &mut Decoded) -> Option<Placing> {
        let common = self.owners.get(row.owner as usize)?.as_ref()?;
        let at = row.number as usize;
        if self.spots.len() <= at {
            self.spots.resize(at + 1, None);
        }
        let mut after = None;
        if let Some(base) = row.base {
            after = self.spots.get(base as usize).copied().flatten();
            if after.is_none() {
                row.whole(self.image, common)?;
            }
        }
        if row.runs.is_empty() || row.parts.is_empty() {
            return None;
        }
        if self.verify_first && !row.runs.iter().all(|run| self.verified(run)) {
            return None;
        }
        self.edges.clear();
        self.edges.extend(row.runs.iter().map(|run| Edge {
            offset: run.offset,
            len: run.len,
            first: run.first,
            head: run.head,
        }));
        let placed = Placed {
            id: row.snapshot,
            state: row.state,
            after,
            edges: &self.edges,
            kv: &row.parts,
            created: row.created,
        };
        let placing = match self.loader.place(&common.key, &placed) {
            Ok(placing) => placing,
            Err(error) => {
                tracing::debug!(snapshot = %row.snapshot, %error, "A row does not fit");
                return None;
            }
        };
        if let Some(slot) = self.spots.get_mut(at) {
            *slot = Some(placing.spot());
        }
        if !self.verify_first {
            let snapshot = row.snapshot;
            let runs = row.runs.iter().map(|run| Unverified {
                snapshot,
                run: *run,
            });
            self.unverified.extend(runs);
        }
        Some(placing)
    }

    fn verified(&self, run: &TokenRun) -> bool {
        self.loader.log().crc(run.offset, run.len) == Some(run.crc)
    }
}

// === impl Common ===

impl Common {
    pub(super) fn of(owner: &Owner, disk: &DiskTier) -> Option<Self> {
        let geometry = disk.geometry(&owner.fingerprint)?;
        let namespace = Arc::new(owner.namespace.clone());
        Some(Self {
            model: Arc::new(Model {
                fingerprint: owner.fingerprint,
                name: owner.model.clone(),
                geometry: (*geometry).clone(),
                shards: owner.shards,
            }),
            key: TreeKey {
                fingerprint: owner.fingerprint,
                namespace: namespace.id(),
            },
            namespace,
            geometry,
        })
    }

    fn state(&self, state: &RowObject, boundary: u32) -> ObjectEntry {
        let range = TokenRange::at(boundary);
        self.entry(
            state.object,
            ObjectKind::State,
            range,
            self.geometry.state_bytes(),
        )
    }

    fn part(&self, part: &RowKv) -> Part {
        let range = part.object_range;
        let bytes = self.geometry.kv_bytes(range);
        Part {
            object: self.entry(part.object.object, ObjectKind::Kv, range, bytes),
            range: part.range,
        }
    }

    fn entry(&self, id: ObjectId, kind: ObjectKind, range: TokenRange, bytes: u64) -> ObjectEntry {
        ObjectEntry {
            id,
            kind,
            range,
            bytes: bytes.saturating_mul(u64::from(self.model.shards)),
            tiers: TierSet::of(&[TierKind::Disk]),
        }
    }
}
