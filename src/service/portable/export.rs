//! A snapshot leaves.

use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::super::Service;
use super::super::api::Selector;
use super::super::core::{Core, Model};
use super::super::error::ServiceError;
use super::super::rows::{Called, existing, unknown_snapshot};
use super::{AHEAD, pipe, too_many};
use crate::index::{Hit, KvRef, LeaseToken};
use crate::pool::cut;
use crate::store::bundle::{Bundle, Layout, Names, Outgoing, What, copy_rows};
use crate::store::{ErrorKind, Object, ShardStream, StoreError};
use crate::types::{Millis, Namespace, ObjectId, SnapshotId, TokenId, TokenRange};

/// Asks for a snapshot as a pair of files.
#[derive(Clone, Debug, Default)]
pub struct ExportRequest {
    /// Which.
    pub select: Selector,
}

/// A snapshot on its way out.
#[derive(Debug)]
pub struct Export {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Length of the safetensors file. What comes after it is the JSON file.
    pub tensor_bytes: u64,
    /// All bytes in order; an error is the last thing that comes. It is whole if its JSON is.
    pub chunks: mpsc::Receiver<Result<Bytes, ServiceError>>,
}

/// Everything that is needed to write it.
struct Plan {
    bundle: Bundle,
    layout: Layout,
    tokens: Vec<TokenId>,
    hit: Hit,
    held: Held,
}

/// A lease that ends with its scope.
struct Held {
    service: Arc<Service>,
    lease: Option<LeaseToken>,
}

/// Why it ends early.
enum Ended {
    /// Nobody reads any more.
    Closed,
    /// It could not be read.
    Failed(ServiceError),
}

/// KV of one shard, read in order.
struct Kv<'a> {
    service: &'a Service,
    shard: u32,
    parts: std::slice::Iter<'a, KvRef>,
    open: Option<OpenKv<'a>>,
    /// A piece that the next block needs, too.
    piece: Option<Piece>,
}

/// A piece of an object.
struct Piece {
    bytes: Vec<u8>,
    /// Tokens whose KV it has.
    range: TokenRange,
    /// Those of them that the snapshot takes from here: beyond may stand another's.
    used: TokenRange,
}

/// An object of which pieces are taken.
struct OpenKv<'a> {
    part: &'a KvRef,
    pieces: std::vec::IntoIter<TokenRange>,
    from: From<'a>,
}

/// Where the bytes of an object are.
enum From<'a> {
    Ram(Object, usize),
    Disk(ShardStream<'a>),
}

// === impl Service ===

impl Service {
    /// Gives a snapshot as a stream of bytes. What is in RAM alone is exported as well.
    ///
    /// # Errors
    /// `NotFound`, `NoState`, `Invalid`; `Busy` if too many are going on. What is found while it is
    /// read comes in the stream.
    pub async fn export(self: &Arc<Self>, request: ExportRequest) -> Result<Export, ServiceError> {
        let place = Arc::clone(&self.portable).try_acquire_owned();
        let place = place.map_err(|_| too_many())?;
        let plan = self.plan_export(&request.select)?;
        let (to, chunks) = mpsc::channel(AHEAD);
        let snapshot = plan.bundle.snapshot;
        let tensor_bytes = plan.layout.file_bytes(&plan.bundle);
        let runtime = Handle::current();
        let writer = runtime.clone();
        runtime.spawn_blocking(move || write(plan, &writer, &to, place));
        Ok(Export {
            snapshot,
            tensor_bytes,
            chunks,
        })
    }

    fn plan_export(self: &Arc<Self>, select: &Selector) -> Result<Plan, ServiceError> {
        let now = self.clock.now();
        let mut core = self.core.lock();
        let (id, called) = existing(&core, select)?;
        let mut tokens = Vec::new();
        let record = core.records.get(&id).ok_or_else(|| unknown_snapshot(&id))?;
        let (model, namespace) = (Arc::clone(&record.model), Arc::clone(&record.namespace));
        let created = record.created;
        let names = names(&core, id, &called);
        if !core.index.read_tokens(&id, &mut tokens) {
            return Err(ServiceError::Data(format!("the tokens of snapshot {id}")));
        }
        let hit = core.index.hit(&id).ok_or_else(|| unknown_snapshot(&id))?;
        let lease = core.index.lease(&id).ok_or_else(|| unknown_snapshot(&id))?;
        drop(core);
        let held = Held {
            service: Arc::clone(self),
            lease: Some(lease),
        };
        let times = [created, now];
        let bundle = describe((id, hit.boundary), &model, &namespace, names, times);
        let layout =
            Layout::of(&bundle).map_err(|error| ServiceError::TooLarge(error.to_string()))?;
        Ok(Plan {
            bundle,
            layout,
            tokens,
            hit,
            held,
        })
    }

    fn open_object<'a>(&'a self, id: &ObjectId, shard: u32) -> Result<From<'a>, ServiceError> {
        if let Some(object) = self.store.ram.peek(id) {
            return Ok(From::Ram(object, 0));
        }
        let disk = self.store.disk.as_ref();
        let disk = disk.ok_or_else(|| ServiceError::Data(format!("object {id}")))?;
        let stream = disk.stream(id, shard);
        stream
            .map(From::Disk)
            .map_err(|error| self.unreadable(id, &error))
    }

    /// What a failed read means; an object that is bad or gone is told to the index.
    fn unreadable(&self, id: &ObjectId, error: &StoreError) -> ServiceError {
        match error.kind() {
            ErrorKind::Data | ErrorKind::NotFound => {
                self.lost_on_disk(id);
                ServiceError::Data(error.to_string())
            }
            _ => ServiceError::Busy(format!("the disk could not be read: {error}")),
        }
    }

    fn state_of(&self, id: &ObjectId, shard: u32) -> Result<Vec<u8>, ServiceError> {
        let mut from = self.open_object(id, shard)?;
        self.next_piece(&mut from, id, shard)
    }

    fn next_piece(
        &self,
        from: &mut From<'_>,
        id: &ObjectId,
        shard: u32,
    ) -> Result<Vec<u8>, ServiceError> {
        let gone = || ServiceError::Data(format!("object {id}: a piece is missing"));
        match from {
            From::Disk(stream) => {
                let piece = stream.next_piece();
                let piece = piece.map_err(|error| self.unreadable(id, &error))?;
                piece.ok_or_else(gone)
            }
            From::Ram(object, next) => {
                let segments = object.shards.get(shard as usize).ok_or_else(gone)?;
                let segment = segments.get(*next).ok_or_else(gone)?;
                *next += 1;
                let mut piece = vec![0; segment.len() as usize];
                let read = segment.map().read(segment.offset(), &mut piece);
                read.map_err(|error| ServiceError::Internal(error.to_string()))?;
                Ok(piece)
            }
        }
    }
}

fn describe(
    (id, boundary): (SnapshotId, u32),
    model: &Model,
    namespace: &Namespace,
    names: Names,
    times: [Millis; 2],
) -> Bundle {
    Bundle {
        model: model.description(),
        names,
        ..Bundle::of(
            (id, model.fingerprint),
            (model.geometry.clone(), model.shards),
            (namespace.clone(), boundary),
            times,
        )
    }
}

/// What it is called in the conversation by which it was found, or in any.
fn names(core: &Core, id: SnapshotId, called: &Called) -> Names {
    let record = core.records.get(&id);
    let rid = record.and_then(|record| record.rid.as_deref().map(str::to_owned));
    let named = called
        .key
        .as_ref()
        .filter(|_| core.conversations.is_named(id));
    let Some((key, conversation)) = named.and_then(|key| Some((key, core.conversations.get(key)?)))
    else {
        return Names {
            rid,
            ..Names::default()
        };
    };
    let turns = || conversation.turns.iter().rev();
    let asked = turns().find(|turn| Some(turn.number) == called.turn);
    let turn = asked.or_else(|| turns().find(|turn| turn.snapshot == Some(id)));
    let turn = turn.filter(|turn| turn.snapshot == Some(id));
    let branches = conversation.branches.iter();
    Names {
        tenant: key.tenant.as_deref().map(str::to_owned),
        conversation: Some(key.name.to_string()),
        turn: turn.map(|turn| turn.number),
        total_tokens: turn.map(|turn| turn.total_tokens),
        rid: turn.map(|turn| turn.rid.to_string()).or(rid),
        branches: branches
            .filter(|(_, other)| **other == id)
            .map(|(name, _)| name.clone())
            .collect(),
    }
}

/// Writes all of it. Blocks.
fn write(
    plan: Plan,
    runtime: &Handle,
    to: &mpsc::Sender<Result<Bytes, ServiceError>>,
    place: OwnedSemaphorePermit,
) {
    let snapshot = plan.bundle.snapshot;
    match write_all(plan, runtime, to) {
        Ok(bytes) => tracing::debug!(%snapshot, bytes, "Snapshot exported"),
        Err(Ended::Closed) => tracing::info!(%snapshot, "Nobody takes the rest of an export"),
        Err(Ended::Failed(error)) => {
            tracing::warn!(%snapshot, %error, "An export breaks off");
            // Nobody may be there to hear it.
            let _ = pipe::send(runtime, to, Err(error));
        }
    }
    drop(place);
}

fn write_all(
    plan: Plan,
    runtime: &Handle,
    to: &mpsc::Sender<Result<Bytes, ServiceError>>,
) -> Result<u64, Ended> {
    let Plan {
        mut bundle,
        layout,
        tokens,
        hit,
        held,
    } = plan;
    let service = &*held.service;
    let send = |bytes: Vec<u8>| {
        if service.stopping() {
            let text = "the daemon stops before it is done".to_owned();
            return Err(Ended::Failed(ServiceError::Unavailable(text)));
        }
        pipe::send(runtime, to, Ok(Bytes::from(bytes))).map_err(|pipe::Closed| Ended::Closed)
    };
    let mut out = Outgoing::new(send);
    out.write(&layout.header(&bundle))?;
    let mut kv: Option<Kv<'_>> = None;
    for part in &layout.parts {
        match part.what {
            What::Tokens => {
                let bytes: Vec<u8> = tokens
                    .iter()
                    .flat_map(|token| token.to_le_bytes())
                    .collect();
                out.part(part, &bytes)?;
            }
            What::State { shard } => {
                // The KV of the shard before it is done.
                kv = None;
                out.part(part, &service.state_of(&hit.state, shard)?)?;
            }
            What::Kv { shard, block } => {
                let kv = kv.get_or_insert_with(|| Kv::new(service, shard, &hit.kv));
                let bytes = kv.block(block, &bundle)?;
                out.part(part, &bytes)?;
            }
        }
    }
    (bundle.file_bytes, bundle.checksums) = out.finish()?;
    let json = bundle.encode();
    let json = json.map_err(|error| Ended::Failed(ServiceError::Internal(error.to_string())))?;
    pipe::send(runtime, to, Ok(Bytes::from(json))).map_err(|pipe::Closed| Ended::Closed)?;
    Ok(bundle.file_bytes)
}

// === impl Kv ===

impl<'a> Kv<'a> {
    fn new(service: &'a Service, shard: u32, parts: &'a [KvRef]) -> Self {
        Self {
            service,
            shard,
            parts: parts.iter(),
            open: None,
            piece: None,
        }
    }

    /// The KV of one block, whatever objects have it.
    fn block(&mut self, block: TokenRange, bundle: &Bundle) -> Result<Vec<u8>, ServiceError> {
        let geometry = &bundle.geometry;
        let mut bytes = Vec::new();
        let mut done = block.start;
        while done < block.end {
            let piece = match self.piece.take() {
                Some(piece) => piece,
                None => self.next()?,
            };
            let Piece { range, used, .. } = piece;
            if used.start > done {
                let what = format!("no KV of token {done} in snapshot {}", bundle.snapshot);
                return Err(ServiceError::Data(what));
            }
            if range == block && used == block {
                return Ok(piece.bytes);
            }
            bytes.resize(geometry.kv_bytes(block) as usize, 0);
            let rows = TokenRange {
                start: done,
                end: used.end,
            };
            copy_rows(geometry, rows, (&piece.bytes, range), (&mut bytes, block));
            done = done.max(used.end);
            if used.end > block.end {
                self.piece = Some(piece);
            }
        }
        Ok(bytes)
    }

    /// The next piece of the next object of which the snapshot uses something.
    fn next(&mut self) -> Result<Piece, ServiceError> {
        loop {
            if let Some(open) = &mut self.open
                && let Some(range) = open.pieces.next()
            {
                let id = &open.part.object;
                let bytes = self.service.next_piece(&mut open.from, id, self.shard)?;
                if let Some(used) = range.overlap(open.part.range) {
                    return Ok(Piece { bytes, range, used });
                }
                continue;
            }
            let part = self.parts.next();
            let part = part.ok_or_else(|| ServiceError::Data("KV is missing".to_owned()))?;
            let pieces: Vec<TokenRange> = cut(part.object_range).collect();
            self.open = Some(OpenKv {
                part,
                pieces: pieces.into_iter(),
                from: self.service.open_object(&part.object, self.shard)?,
            });
        }
    }
}

// === impl Held ===

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            let mut core = self.service.core.lock();
            let removal = core.release(lease);
            self.service.drop_from_ram(&core, &removal.objects);
            if self.service.store.disk.is_some() {
                core.queue.remove(removal);
            }
            drop(core);
            self.service.wake.notify_one();
        }
    }
}

// === impl Ended ===

impl std::convert::From<ServiceError> for Ended {
    fn from(error: ServiceError) -> Self {
        Self::Failed(error)
    }
}
