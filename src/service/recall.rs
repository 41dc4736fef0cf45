//! A start with the catalog: what was on disk when the daemon ended is known without reading it.
//!
//! # What
//! The rows of the catalog go straight into the index, the table of objects and the records. Threads
//! share the work: one decodes rows and one puts them into the index, one fills the table of objects,
//! some read conversations and one takes them. A snapshot whose row is no longer right is read from
//! its manifest, as all are without a catalog.
//!
//! # Tokens
//! Prompts are compared with the token log, so what it says must be what was written. A small log is
//! verified here, a large one once the daemon is ready. Where it differs, the snapshot is left out
//! and the catalog is given up, so that the next start reads the tokens beside the KV.
//!
//! # Errors
//! As those of a start without one.

mod filling;
mod names;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use self::filling::{Batch, Filling};
pub(super) use self::names::Reading;
use super::Service;
use super::core::{Model, Record, Removal};
use super::save_state::SaveState;
use super::startup::Shared;
use crate::index::{Index, Loader, Placing, TreeKey};
use crate::pool::Geometry;
use crate::store::catalog::{Image, PlacedTokens, Stale, TokenRun};
use crate::store::{Recalled, StoreError, TokenLog};
use crate::types::{Generation, Millis, Namespace, SnapshotId, Tokens};
use crate::util::id_map::IdMap;

/// How often is said how far a start is.
const TELL: Duration = Duration::from_secs(5);
/// Snapshots between two looks at the clock.
const LOOK: u32 = 256;
/// A token log up to so many tokens is verified before the daemon is ready.
const VERIFY_FIRST: u64 = 16 << 20;
/// Runs of tokens that are verified without a pause.
const VERIFY_AT_ONCE: usize = 256;

/// Says how far a start is, in the log and to those who ask whether the daemon is ready.
pub(super) struct Progress<'a> {
    service: &'a Service,
    last: Duration,
    count: u32,
}

/// What the snapshots of one owner have in common.
struct Common {
    model: Arc<Model>,
    namespace: Arc<Namespace>,
    key: TreeKey,
    geometry: Arc<Geometry>,
}

/// A run of tokens that is still to be verified.
struct Unverified {
    snapshot: SnapshotId,
    run: TokenRun,
}

/// What a record says of a snapshot that has its place.
struct Recorded {
    snapshot: SnapshotId,
    parent: Option<SnapshotId>,
    owner: u32,
    created: Millis,
    generation: Generation,
}

/// Records of snapshots, and when each was made.
type Records = (IdMap<SnapshotId, Record>, Vec<(Millis, SnapshotId)>);

/// Rows that have their places.
struct Entered {
    loader: Loader<TokenLog>,
    rest: Rest,
}

/// What is left to do.
struct Rest {
    /// To be read from their manifests.
    again: Vec<SnapshotId>,
    /// Second snapshots of a prefix.
    twice: Vec<SnapshotId>,
    unverified: Vec<Unverified>,
    /// Tokens of rows that are in the catalog and not in the index.
    unused: Vec<TokenRun>,
}

/// What a thread gave.
fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    match thread.join() {
        Ok(it) => it,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Makes the records of snapshots as they find their places.
fn make_records(
    owners: &[Option<Common>],
    count: usize,
    placed: mpsc::Receiver<Vec<Recorded>>,
) -> Records {
    let mut found = Vec::with_capacity(count);
    let mut records = IdMap::with_capacity_and_hasher(count, Default::default());
    for it in placed.into_iter().flatten() {
        let Some(Some(common)) = owners.get(it.owner as usize) else {
            continue;
        };
        found.push((it.created, it.snapshot));
        let record = Record {
            model: Arc::clone(&common.model),
            namespace: Arc::clone(&common.namespace),
            state: SaveState::Durable,
            generation: it.generation,
            parent: it.parent,
            created: it.created,
            conversation: None,
            rid: None,
            written: 0,
            failure: None,
            waiters: 0,
        };
        records.insert(it.snapshot, record);
    }
    (records, found)
}

// === impl Progress ===

impl<'a> Progress<'a> {
    pub(super) fn new(service: &'a Service) -> Self {
        Self {
            service,
            last: service.clock.monotonic(),
            count: 0,
        }
    }

    /// One more is done.
    pub(super) fn tell(&mut self, how_far: impl FnOnce() -> String) {
        self.count += 1;
        if !self.count.is_multiple_of(LOOK) {
            return;
        }
        let text = how_far();
        let now = self.service.clock.monotonic();
        if now.saturating_sub(self.last) >= TELL {
            self.last = now;
            tracing::info!("{}: {text}", super::LOADING);
        }
        self.service.latches.tell(super::LOADING, text);
    }
}

// === impl Service ===

impl Service {
    /// Starts from the catalog, which does not know `names`; `None`: there is none to start from.
    pub(super) fn recall(
        &self,
        names: &mut Reading<'_>,
    ) -> Result<Option<Vec<(Millis, SnapshotId)>>, StoreError> {
        let disk = self.store.disk.as_deref();
        let Some((disk, manifests)) = disk.zip(self.store.manifests.as_ref()) else {
            return Ok(None);
        };
        let mut recalled = match manifests.recall(self.config.catalog_from)? {
            Ok(recalled) => recalled,
            Err(stale) => {
                if stale != Stale::Small {
                    let why = stale.as_str();
                    tracing::info!(
                        why,
                        "All manifests are read, and the catalog is written anew"
                    );
                }
                return Ok(None);
            }
        };
        let log = self.store.token_log_of(&recalled.image)?;
        let Recalled { image, more, bad } = &mut recalled;
        let image = &*image;
        names.expect(image.snapshots());
        let owners: Vec<Option<Common>> = image
            .owners()
            .iter()
            .map(|owner| Common::of(owner, disk))
            .collect();
        let (entered, (mut records, found), objects) = thread::scope(|scope| {
            let (decoded, rows) = filling::batches();
            let (place, placed) = filling::batches();
            scope.spawn(|| filling::decode_all(image, &owners, decoded));
            let records = scope.spawn(|| make_records(&owners, image.snapshots(), placed));
            let objects = scope.spawn(|| manifests.take_objects(image, more, bad));
            let entered = self.place_all(image, &owners, log, (rows, place));
            (entered, joined(records), joined(objects))
        });
        objects?;
        let Entered { loader, rest } = entered;
        let (index, named) = thread::scope(|scope| {
            let index = scope.spawn(|| loader.finish());
            let named = names.take().map(|names| {
                let missing = names.conversations.name_records(&mut records);
                (names, missing)
            });
            (joined(index), named)
        });
        let (names, missing) = named?;
        for bad in &recalled.bad {
            tracing::warn!(?bad, "A snapshot went to quarantine");
        }
        let more = manifests.finish(recalled);
        self.metrics.catalog_used.set(1);
        let found = self.take_over(index, (records, found), rest, more);
        self.name_all(names, missing);
        Ok(Some(found))
    }

    /// Puts all rows into an index.
    fn place_all(
        &self,
        image: &Image,
        owners: &[Option<Common>],
        log: TokenLog,
        (batches, place): (mpsc::Receiver<Batch>, mpsc::SyncSender<Vec<Recorded>>),
    ) -> Entered {
        let tiers = self.core.lock().index.tiers();
        let count = image.snapshots();
        let verify_first = log.len() <= VERIFY_FIRST;
        let mut filling = Filling {
            image,
            owners,
            loader: Index::loader(log, tiers, count),
            spots: Vec::with_capacity(count),
            edges: Vec::new(),
            verify_first,
            unverified: Vec::new(),
        };
        let (mut again, mut twice) = (Vec::new(), Vec::new());
        let mut unused = Vec::new();
        let mut progress = Progress::new(self);
        for mut batch in batches {
            filling.foresee(batch.iter().filter_map(|row| row.as_ref().ok()));
            let mut placed = Vec::with_capacity(batch.len());
            for row in &mut batch {
                let (number, snapshot, placing) = match row {
                    Ok(row) => (row.number, row.snapshot, filling.place(row)),
                    Err((number, snapshot)) => (*number, *snapshot, None),
                };
                match (placing, row) {
                    (Some(Placing::Fresh(spot)), Ok(row)) => placed.push(Recorded {
                        snapshot,
                        parent: filling.loader.parent(spot),
                        owner: row.owner,
                        created: row.created,
                        generation: row.generation,
                    }),
                    (Some(_), _) => {
                        twice.push(snapshot);
                        unused.extend(image.runs_of(number));
                    }
                    (None, _) => {
                        again.push(snapshot);
                        unused.extend(image.runs_of(number));
                    }
                }
                progress.tell(|| format!("{number} of {count} snapshots"));
            }
            place.send(placed).expect("its thread ends with this one");
        }
        let Filling {
            loader, unverified, ..
        } = filling;
        let rest = Rest {
            again,
            twice,
            unverified,
            unused,
        };
        Entered { loader, rest }
    }

    /// Lets everybody see what was read, and reads what is not in order.
    fn take_over(
        &self,
        mut index: Index<TokenLog>,
        (records, mut found): Records,
        rest: Rest,
        more: Vec<crate::store::Manifest>,
    ) -> Vec<(Millis, SnapshotId)> {
        let Rest {
            again,
            twice,
            unverified,
            mut unused,
        } = rest;
        // Rows name them until they are written anew or dropped: no holes before that.
        let log = index.log_mut();
        unused.retain(|run| log.hold(run.offset, run.len));
        log.settle();
        for run in unused {
            log.release(run.offset, run.len);
        }
        let (disk, manifests) = (self.store.disk.as_deref(), self.store.manifests.as_ref());
        let Some((disk, manifests)) = disk.zip(manifests) else {
            return found;
        };
        let mut core = self.core.lock();
        core.index = index;
        core.records = records;
        // Another snapshot of the same prefix is as good, and these only cost space.
        core.queue.remove(Removal {
            snapshots: twice,
            objects: Vec::new(),
        });
        drop(core);
        let mut bad = Removal::default();
        let mut shared = Shared::default();
        let read = again.into_iter().filter_map(|id| match manifests.get(&id) {
            Ok(manifest) => Some(manifest),
            Err(error) => {
                tracing::warn!(snapshot = %id, %error, "A snapshot on disk is not used");
                None
            }
        });
        let mut rest: Vec<_> = read.chain(more).collect();
        rest.sort_by_key(|manifest| (manifest.boundary, manifest.created, manifest.snapshot));
        if !rest.is_empty() {
            tracing::info!(
                count = rest.len(),
                "Snapshots that the catalog does not have"
            );
        }
        let mut progress = Progress::new(self);
        let all = rest.len();
        for (at, manifest) in rest.into_iter().enumerate() {
            progress.tell(|| format!("{at} of {all} snapshots that the catalog does not have"));
            let created = manifest.created;
            if let Some(id) = self.take_in_or_tell(disk, &manifest, &mut shared, &mut bad) {
                found.push((created, id));
            }
        }
        let mut core = self.core.lock();
        core.queue.remove(bad);
        drop(core);
        self.verify_later(unverified);
        found
    }

    /// Where the tokens of a snapshot stand from `from` on.
    pub(super) fn place(&self, snapshot: &SnapshotId, from: u32) -> PlacedTokens {
        let core = self.core.lock();
        let log = core.index.log();
        if !log.is_kept() {
            return PlacedTokens::default();
        }
        let Some((from, edges)) = core.index.edges(snapshot, from) else {
            return PlacedTokens::default();
        };
        let runs: Option<Vec<TokenRun>> = edges
            .into_iter()
            .map(|edge| {
                Some(TokenRun {
                    offset: edge.offset,
                    len: edge.len,
                    first: edge.first,
                    head: edge.head,
                    crc: log.crc(edge.offset, edge.len)?,
                })
            })
            .collect();
        PlacedTokens {
            from,
            runs: runs.unwrap_or_default(),
        }
    }

    /// Verifies the tokens of a large log, a little at a time.
    fn verify_later(&self, unverified: Vec<Unverified>) {
        *self.unverified.lock() = unverified
            .into_iter()
            .map(|Unverified { snapshot, run }| (snapshot, run))
            .collect();
    }

    /// Verifies a few more runs of the token log; whether some are left.
    pub(super) fn verify_some(&self) -> bool {
        let mut left = self.unverified.lock();
        let from = left.len().saturating_sub(VERIFY_AT_ONCE);
        let some = left.split_off(from);
        let more = !left.is_empty();
        if !more {
            left.shrink_to_fit();
        }
        drop(left);
        for (snapshot, run) in some {
            let mut core = self.core.lock();
            if !core.records.contains_key(&snapshot)
                || core.index.log().crc(run.offset, run.len) == Some(run.crc)
                || !core.index.log().is_kept()
            {
                continue;
            }
            // It stays on disk, and is found again by the tokens beside its KV.
            let removed = core.index.remove_snapshot(&snapshot);
            let gone = core.gone(removed, None);
            drop(core);
            self.metrics.error("token_log");
            tracing::error!(
                %snapshot,
                objects = gone.objects.len(),
                "The token log is damaged: a snapshot is not used until the next start"
            );
            self.store.give_up_catalog("the token log is damaged");
        }
        more
    }
}
