//! Rows of the catalog as snapshots of the index.

use std::sync::Arc;

use super::{Common, Unverified};
use crate::index::{Edge, Loader, ObjectEntry, Part, Placed, Placing, Spot, TierSet, TreeKey};
use crate::service::core::Model;
use crate::store::catalog::{Image, Owner, Row, RowKv, RowObject, TokenRun};
use crate::store::{DiskTier, TokenLog};
use crate::types::{ObjectId, ObjectKind, TierKind, TokenRange};

/// Rows on their way into an index.
pub(super) struct Filling<'a> {
    pub(super) image: &'a Image,
    pub(super) owners: &'a [Option<Common>],
    pub(super) loader: Loader<TokenLog>,
    /// Where the rows stand, by number.
    pub(super) spots: Vec<Option<Spot>>,
    pub(super) edges: Vec<Edge>,
    pub(super) parts: Vec<Part>,
    pub(super) verify_first: bool,
    pub(super) unverified: Vec<Unverified>,
}

// === impl Filling ===

impl Filling<'_> {
    /// Places a row; `None` if its manifest has to be read.
    pub(super) fn place(&mut self, number: u32, row: &Row) -> Option<Placing> {
        let common = self.owners.get(row.owner as usize)?.as_ref()?;
        let at = number as usize;
        if self.spots.len() <= at {
            self.spots.resize(at + 1, None);
        }
        let base = row.base.filter(|base| {
            let whole = self.image.kv_len(*base) == Some(row.shared);
            let starts = row.kv.first().map(|part| part.range.start);
            whole && row.from > 0 && starts == Some(row.from)
        });
        let after = base.and_then(|base| self.spots.get(base as usize).copied().flatten());
        let (whole_kv, whole_runs);
        let (kv, runs) = match after {
            Some(_) => (&row.kv, &row.runs),
            None => {
                whole_kv = self.image.kv_of(number)?;
                whole_runs = self.image.runs_of(number);
                (&whole_kv, &whole_runs)
            }
        };
        if runs.is_empty() || kv.is_empty() {
            return None;
        }
        if self.verify_first && !runs.iter().all(|run| self.verified(run)) {
            return None;
        }
        self.edges.clear();
        self.edges.extend(runs.iter().map(|run| Edge {
            offset: run.offset,
            len: run.len,
            first: run.first,
            head: run.head,
        }));
        self.parts.clear();
        self.parts.extend(kv.iter().map(|part| common.part(part)));
        let placed = Placed {
            id: row.snapshot,
            state: common.state(&row.state, row.boundary),
            after,
            edges: &self.edges,
            kv: &self.parts,
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
            let runs = runs.iter().map(|run| Unverified {
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
