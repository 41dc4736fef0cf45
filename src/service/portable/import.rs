//! A snapshot comes in.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::runtime::Handle;
use utoipa::ToSchema;

use super::super::Service;
use super::super::api::SnapshotRow;
use super::super::commit::{Block, Commit, CommitError, ShardBlocks};
use super::super::conversations::ConversationKey;
use super::super::core::Model;
use super::super::error::ServiceError;
use super::super::room::Reservation;
use super::pipe::{Body, Reader};
use super::{refused, too_many};
use crate::index::TreeKey;
use crate::store::bundle::{Bundle, BundleError, Incoming, Layout, Names, Part, What};
use crate::store::{Segment, StoreError};
use crate::types::{BLOCK_TOKENS, Fingerprint, SessionId, SnapshotId, TokenId};

/// How often a look is taken for room.
const LOOK: Duration = Duration::from_millis(50);

/// Takes a snapshot in from a pair of files.
#[derive(Clone, Debug)]
pub struct ImportRequest {
    /// Take a model that nothing here is of.
    pub new_model: bool,
    /// Give it the names that it had, where they are free.
    pub names: bool,
    /// Name it in this conversation instead of the one that it was in.
    pub conversation_id: Option<String>,
    /// Wait until it is durable.
    pub durable: bool,
    /// How long to wait for the disk.
    pub timeout: Duration,
}

/// A snapshot that was taken in.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ImportReply {
    /// The snapshot here; its id is one of this store's own.
    #[serde(flatten)]
    pub row: SnapshotRow,
    /// The snapshot where it was exported.
    pub exported_as: SnapshotId,
    /// All of it was here; nothing was written.
    pub already_here: bool,
    /// Names that it had and that others have here.
    pub names_taken: Vec<String>,
}

/// What is planned before a byte of the tensors is read.
struct Plan {
    bundle: Bundle,
    layout: Layout,
    model: Arc<Model>,
    key: TreeKey,
}

/// Where the bytes of one shard go.
#[derive(Default)]
struct Places {
    state: Option<Arc<Segment>>,
    kv: Vec<Block>,
}

// === impl Service ===

impl Service {
    /// Whether a pair with this description would be taken.
    ///
    /// # Errors
    /// As those of [`Service::import`] that need no tensors.
    pub fn check_import(
        &self,
        request: &ImportRequest,
        description: &[u8],
    ) -> Result<(), ServiceError> {
        self.plan_import(request, description).map(drop)
    }

    /// Takes a snapshot in. `body` is 8 bytes, little-endian, of the length of the JSON file; the JSON
    /// file; the safetensors file; and nothing more.
    ///
    /// # Errors
    /// See the module. Nothing of a refused one stays.
    pub async fn import(
        self: &Arc<Self>,
        request: ImportRequest,
        body: Body,
    ) -> Result<ImportReply, ServiceError> {
        let place = Arc::clone(&self.portable).try_acquire_owned();
        let _place = place.map_err(|_| too_many())?;
        if !self.is_loaded() {
            return Err(ServiceError::Unavailable(super::super::LOADING.to_owned()));
        }
        if request.durable && self.store.disk.is_none() {
            return Err(ServiceError::Unavailable(
                "there is no disk tier".to_owned(),
            ));
        }
        let (service, asked) = (Arc::clone(self), request.clone());
        let runtime = Handle::current();
        let reader = Reader::new(body, runtime.clone());
        let taken = runtime.spawn_blocking(move || service.take_pair(&asked, reader));
        let failed = |error: tokio::task::JoinError| ServiceError::Internal(error.to_string());
        let (id, already_here, names, exported_as) = taken.await.map_err(failed)??;
        let (row, names_taken) = self.adopt(&request, id, names).await?;
        Ok(ImportReply {
            row,
            exported_as,
            already_here,
            names_taken,
        })
    }

    /// Reads both files; the snapshot is visible then. Blocks.
    fn take_pair(
        &self,
        request: &ImportRequest,
        mut reader: Reader,
    ) -> Result<(SnapshotId, bool, Names, SnapshotId), ServiceError> {
        let description = read_description(&mut reader)?;
        let plan = self.plan_import(request, &description)?;
        let (id, here) = self.take_tensors(&plan, reader)?;
        let Bundle {
            names, snapshot, ..
        } = plan.bundle;
        tracing::info!(snapshot = %id, exported_as = %snapshot, here, "Snapshot imported");
        Ok((id, here, names, snapshot))
    }

    fn plan_import(
        &self,
        request: &ImportRequest,
        description: &[u8],
    ) -> Result<Plan, ServiceError> {
        let bundle = Bundle::decode(description).map_err(refused)?;
        if bundle.boundary > self.config.max_prompt_tokens {
            return Err(ServiceError::TooLarge(format!(
                "its {} tokens are more than service.max_prompt_tokens",
                bundle.boundary
            )));
        }
        if bundle.geometry.kv_row_bytes() == 0 {
            let text = "a model without attention is not stored";
            return Err(ServiceError::Invalid(text.to_owned()));
        }
        let model = self.model_of(&bundle, request.new_model)?;
        let layout = Layout::of(&bundle).map_err(refused)?;
        let file = layout
            .parts
            .iter()
            .fold(0_u64, |sum, part| sum.saturating_add(part.padded));
        if file > bundle.file_bytes {
            let text = "the tensors of such a model are longer than its file";
            return Err(ServiceError::Invalid(text.to_owned()));
        }
        let key = TreeKey {
            fingerprint: bundle.fingerprint,
            namespace: bundle.namespace.id(),
        };
        Ok(Plan {
            bundle,
            layout,
            model,
            key,
        })
    }

    /// The model that it is of, if it may come in.
    fn model_of(&self, bundle: &Bundle, new_model: bool) -> Result<Arc<Model>, ServiceError> {
        let fingerprint = bundle.fingerprint;
        let differs = |what: &str| {
            let text = format!("{what} of model {fingerprint} differ from those known here");
            Err(ServiceError::Invalid(text))
        };
        let live = self.workers.all();
        let live = live.iter().filter_map(|worker| worker.model().0);
        let mut known: BTreeMap<Fingerprint, String> = live
            .map(|model| (model.fingerprint, model.name.clone()))
            .collect();
        if let Some(disk) = &self.store.disk {
            for fingerprint in disk.models() {
                let mut description = disk.description(&fingerprint);
                let name = description.remove("name").unwrap_or_default();
                known.entry(fingerprint).or_insert(name);
            }
            let geometry = disk.geometry(&fingerprint);
            if geometry.is_some_and(|geometry| *geometry != bundle.geometry) {
                return differs("the names, types and sizes");
            }
        }
        let kept = self.core.lock().model(&fingerprint);
        let running = self.workers.all().into_iter();
        let mut running = running.filter_map(|worker| worker.model().0);
        let here = kept.or_else(|| running.find(|model| model.fingerprint == fingerprint));
        if let Some(model) = here {
            if model.geometry != bundle.geometry {
                return differs("the names, types and sizes");
            }
            if model.shards != bundle.shards {
                return differs("the shards");
            }
            return Ok(model);
        }
        if !known.contains_key(&fingerprint) && !known.is_empty() && !new_model {
            let ours: Vec<String> = known.iter().map(told).collect();
            let name = bundle.model.get("name").cloned().unwrap_or_default();
            return Err(ServiceError::OtherModel {
                theirs: told((&fingerprint, &name)),
                ours: ours.join(", "),
            });
        }
        Ok(Arc::new(Model {
            fingerprint,
            name: bundle.model.get("name").cloned().unwrap_or_default(),
            geometry: bundle.geometry.clone(),
            shards: bundle.shards,
        }))
    }

    fn take_tensors(
        &self,
        plan: &Plan,
        source: impl Read,
    ) -> Result<(SnapshotId, bool), ServiceError> {
        let Plan {
            bundle,
            layout,
            model,
            key,
        } = plan;
        let mut incoming = Incoming::open(bundle, layout, source).map_err(refused)?;
        let (first, rest) = layout
            .parts
            .split_first()
            .ok_or_else(|| ServiceError::Internal("no part".to_owned()))?;
        let tokens = incoming.tokens(first).map_err(refused)?;
        let (there, base) = self.stored(key, &tokens);
        let mut rooms = Vec::new();
        let mut places: Vec<Places> = (0..bundle.shards).map(|_| Places::default()).collect();
        if there.is_none() {
            let need = self.check_size(rest, base)?;
            self.quota_room(key, &tokens, need).map_err(|over| {
                self.metrics.limits.refused.inc();
                over.error(&bundle.namespace)
            })?;
        }
        for part in rest {
            let segment = match there.is_none() && wanted(part.what, base) {
                true => Some(self.room_for(part.len, &mut rooms)?),
                false => None,
            };
            let mut fits = true;
            incoming
                .part(part, &mut |at, bytes| {
                    if let Some(segment) = &segment {
                        fits &= segment.map().write(segment.offset() + at, bytes).is_ok();
                    }
                })
                .map_err(refused)?;
            if !fits {
                return Err(ServiceError::Internal("beyond its segment".to_owned()));
            }
            if let Some(segment) = segment {
                place(&mut places, part.what, segment);
            }
        }
        incoming.finish().map_err(refused)?;
        if let Some(id) = there {
            return Ok((id, true));
        }
        let shards: Option<Vec<ShardBlocks>> = places
            .into_iter()
            .map(|Places { state, kv }| Some(ShardBlocks { state: state?, kv }))
            .collect();
        let shards = shards.ok_or_else(|| ServiceError::Internal("no state".to_owned()))?;
        let Names {
            tenant,
            conversation,
            rid,
            ..
        } = &bundle.names;
        let exported = bundle.snapshot.to_string();
        let rid: Arc<str> = Arc::from(rid.as_deref().unwrap_or(&exported));
        let name = conversation.as_deref().unwrap_or(&rid);
        let conversation = ConversationKey::new(tenant.as_deref(), name);
        let commit = Commit {
            model,
            namespace: &Arc::new(bundle.namespace.clone()),
            key: *key,
            tokens: &tokens,
            base,
            shards,
            rooms,
            conversation: &conversation,
            owner: (SessionId::random(), 0),
            rid: &rid,
        };
        let committed = self.commit(commit).map(|id| (id, false));
        committed.map_err(|error| match error {
            CommitError::BaseLost { .. } => {
                ServiceError::Busy("KV that was counted on went meanwhile".to_owned())
            }
            CommitError::Quota(over) => over.error(&bundle.namespace),
            CommitError::Store(error @ StoreError::NoSpace { .. }) => {
                ServiceError::NoSpace(error.to_string())
            }
            error => ServiceError::Internal(error.to_string()),
        })
    }

    /// The snapshot of these tokens, if it is here, and how many tokens have their KV here, in whole
    /// blocks.
    fn stored(&self, key: &TreeKey, tokens: &[TokenId]) -> (Option<SnapshotId>, u32) {
        let boundary = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let core = self.core.lock();
        let there = core.index.has_snapshot(key, tokens, boundary);
        let kv = core.index.coverage(key, tokens).kv;
        (there, kv - kv % BLOCK_TOKENS)
    }

    /// Bytes that have to come, if RAM can hold them at all.
    fn check_size(&self, parts: &[Part], base: u32) -> Result<u64, ServiceError> {
        let wanted = parts.iter().filter(|part| wanted(part.what, base));
        let lengths: Vec<u64> = wanted.map(|part| part.len).collect();
        match self.can_ever_hold(&lengths) {
            true => Ok(lengths.iter().fold(0, |sum, len| sum.saturating_add(*len))),
            false => Err(ServiceError::TooLarge(
                "it is larger than RAM can ever hold (store.ram)".to_owned(),
            )),
        }
    }

    /// Room for one part, waiting for it as an offer does.
    fn room_for(
        &self,
        len: u64,
        rooms: &mut Vec<Reservation>,
    ) -> Result<Arc<Segment>, ServiceError> {
        let began = self.clock.monotonic();
        loop {
            if let Some((segments, room)) = self.allocate(&[len]) {
                rooms.push(room);
                let segment = segments.into_iter().next();
                return segment
                    .map(Arc::new)
                    .ok_or_else(|| ServiceError::Internal("no segment".to_owned()));
            }
            if self.stopping() {
                return Err(ServiceError::Unavailable("the daemon stops".to_owned()));
            }
            let waited = self.clock.monotonic().saturating_sub(began);
            if waited >= self.config.room_wait {
                let text = "RAM (store.ram) has no room for it now".to_owned();
                return Err(ServiceError::NoSpace(text));
            }
            std::thread::park_timeout(LOOK);
        }
    }
}

/// The JSON file, with its length before it.
fn read_description(reader: &mut Reader) -> Result<Vec<u8>, ServiceError> {
    let bad = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            ServiceError::Invalid("the description ends early".to_owned())
        }
        _ => refused(BundleError::Io(error)),
    };
    let mut len = [0; 8];
    reader.read_exact(&mut len).map_err(bad)?;
    let len = u64::from_le_bytes(len);
    if len > Bundle::max_bytes() {
        let text = format!("a description of {len} bytes");
        return Err(ServiceError::TooLarge(text));
    }
    let mut description = vec![0; len as usize];
    reader.read_exact(&mut description).map_err(bad)?;
    Ok(description)
}

fn wanted(what: What, base: u32) -> bool {
    match what {
        What::Tokens => false,
        What::State { .. } => true,
        What::Kv { block, .. } => block.end > base,
    }
}

fn place(places: &mut [Places], what: What, segment: Arc<Segment>) {
    let (What::State { shard } | What::Kv { shard, .. }) = what else {
        return;
    };
    let Some(places) = places.get_mut(shard as usize) else {
        return;
    };
    match what {
        What::Kv { block: range, .. } => places.kv.push(Block { range, segment }),
        _ => places.state = Some(segment),
    }
}

/// A model for people.
fn told((fingerprint, name): (&Fingerprint, &String)) -> String {
    let digits = fingerprint.to_string();
    let short = digits.get(..16).unwrap_or(&digits);
    match name.is_empty() {
        true => format!("{short}…"),
        false => format!("{name} ({short}…)"),
    }
}
