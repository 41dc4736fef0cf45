//! Attached workers: who they are, and how to end them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use uuid::Uuid;

use super::api::{BreakEven, CostRow, WorkerLoad, WorkerRow};
use super::attach::model_of;
use super::core::Model;
use super::cost::{Costs, Sizes, break_even};
use super::modes::Plan;
use super::orders::Orders;
use super::refusals::Asker;
use crate::device::DeviceKind;
use crate::pool::{Geometry, Shard};
use crate::proto::channel::layout::CloseReason;
use crate::proto::v1;
use crate::types::{InstanceId, Millis, SessionId};

/// One attached worker.
#[derive(Debug)]
pub struct Worker {
    /// Its session.
    pub session: SessionId,
    /// The server that it belongs to.
    pub instance: InstanceId,
    pub(super) shard: Shard,
    pub(super) secret: [u8; 32],
    pub(super) identity: v1::ModelIdentity,
    pub(super) geometry: Geometry,
    pub(super) device: DeviceKind,
    pub(super) cuda: Option<CudaExport>,
    /// Of the ring, and of the window.
    pub(super) ring_bytes: u64,
    pub(super) page_size: u32,
    pub(super) versions: BTreeMap<String, String>,
    pub(super) pid: Option<i32>,
    pub(super) attached_at: Millis,
    /// For how long it may stay without a channel.
    pub(super) bind_by: Duration,
    /// What the daemon wants of it.
    pub(super) orders: Orders,
    /// What its prefill and its copies take.
    pub(super) costs: Costs,
    live: Mutex<Live>,
    stop: watch::Sender<Option<CloseReason>>,
    ring_closed: watch::Sender<bool>,
}

#[derive(Debug)]
struct Live {
    /// `None` while its weights are unknown.
    model: Option<Arc<Model>>,
    epoch: u64,
    load: Option<WorkerLoad>,
    plan: Plan,
    bound: bool,
    counts: (usize, usize, usize),
}

/// What a worker is at its attach.
#[derive(Debug)]
pub(super) struct Profile {
    pub instance: InstanceId,
    pub shard: Shard,
    pub identity: v1::ModelIdentity,
    pub geometry: Geometry,
    pub model: Arc<Model>,
    pub device: DeviceKind,
    pub cuda: Option<CudaExport>,
    pub ring_bytes: u64,
    pub page_size: u32,
    pub versions: BTreeMap<String, String>,
    pub pid: Option<i32>,
    pub epoch: u64,
}

/// Where a worker's ring on a GPU is.
#[derive(Copy, Clone, Debug)]
pub(super) struct CudaExport {
    pub uuid: [u8; 16],
    pub handle: [u8; 64],
    pub offset: u64,
}

/// Tells when a session is to end, or has.
#[derive(Debug)]
pub struct Stop(watch::Receiver<Option<CloseReason>>);

/// All attached workers.
#[derive(Debug, Default)]
pub(super) struct Workers {
    all: Mutex<HashMap<SessionId, Arc<Worker>>>,
}

// === impl Stop ===

impl Stop {
    /// Waits for it. Cancel safe.
    pub async fn wait(&mut self) -> CloseReason {
        match self.0.wait_for(Option::is_some).await {
            Ok(reason) => reason.unwrap_or(CloseReason::Detached),
            Err(_) => CloseReason::Detached,
        }
    }
}

// === impl Worker ===

impl Worker {
    pub(super) fn new(
        profile: Profile,
        plan: Plan,
        attached_at: Millis,
        bind_by: Duration,
    ) -> Self {
        let Profile {
            instance,
            shard,
            identity,
            geometry,
            model,
            device,
            cuda,
            ring_bytes,
            page_size,
            versions,
            pid,
            epoch,
        } = profile;
        let live = Live {
            model: Some(model),
            epoch,
            load: None,
            plan,
            bound: false,
            counts: (0, 0, 0),
        };
        let mut secret = [0; 32];
        let (first, second) = secret.split_at_mut(16);
        first.copy_from_slice(Uuid::new_v4().as_bytes());
        second.copy_from_slice(Uuid::new_v4().as_bytes());
        Self {
            session: SessionId::random(),
            instance,
            shard,
            secret,
            identity,
            geometry,
            device,
            cuda,
            ring_bytes,
            page_size,
            versions,
            pid,
            attached_at,
            bind_by,
            orders: Orders::default(),
            costs: Costs::default(),
            live: Mutex::new(live),
            stop: watch::Sender::new(None),
            ring_closed: watch::Sender::new(false),
        }
    }

    /// The secret, compared in constant time.
    pub(super) fn knows(&self, secret: &[u8]) -> bool {
        blake3::hash(&self.secret) == blake3::hash(secret)
    }

    /// The first to bind its channel; `false` for every other.
    pub(super) fn bind(&self) -> bool {
        !std::mem::replace(&mut self.live.lock().bound, true)
    }

    pub(super) fn is_bound(&self) -> bool {
        self.live.lock().bound
    }

    /// How its bytes move, and why so.
    pub(super) fn plan(&self) -> Plan {
        self.live.lock().plan.clone()
    }

    /// They move otherwise.
    pub(super) fn set_plan(&self, plan: Plan) {
        self.live.lock().plan = plan;
    }

    /// The bind came to nothing: it may be tried again.
    pub(super) fn unbind(&self) {
        self.live.lock().bound = false;
    }

    /// What it runs, and since which epoch.
    pub(super) fn model(&self) -> (Option<Arc<Model>>, u64) {
        let live = self.live.lock();
        (live.model.clone(), live.epoch)
    }

    /// Other weights: the same model with another digest, or unknown.
    pub(super) fn set_epoch(&self, epoch: u64, digest: Option<[u8; 32]>) -> Option<Arc<Model>> {
        let model = digest.and_then(|digest| {
            let identity = v1::ModelIdentity {
                weights_digest: digest.to_vec().into(),
                ..self.identity.clone()
            };
            model_of(&identity, &self.geometry, self.shard).ok()
        });
        let mut live = self.live.lock();
        live.epoch = epoch;
        live.model = model.map(Arc::new);
        live.model.clone()
    }

    pub(super) fn set_counts(&self, counts: (usize, usize, usize)) {
        self.live.lock().counts = counts;
    }

    /// What the worker says of itself.
    pub fn set_load(&self, load: WorkerLoad) {
        self.live.lock().load = Some(load);
    }

    /// Ends the session, or says that it ended. The first reason counts.
    pub(super) fn end(&self, reason: CloseReason) {
        self.stop.send_if_modified(|stop| {
            let first = stop.is_none();
            stop.get_or_insert(reason);
            first
        });
    }

    /// Tells when the session is to end, or has.
    pub fn stop(&self) -> Stop {
        Stop(self.stop.subscribe())
    }

    /// The session is over and nothing of the daemon reaches the ring any more.
    pub(super) fn say_ring_closed(&self) {
        self.ring_closed.send_replace(true);
    }

    /// Waits until nothing of a session that had a ring reaches it any more. Cancel safe.
    pub(super) async fn ring_closed(&self) {
        let mut closed = self.ring_closed.subscribe();
        // The sender lives as long as the worker.
        let _ = closed.wait_for(|closed| *closed).await;
    }

    /// As whom it is kept among the refused.
    pub(super) fn asker(&self) -> Asker {
        Asker::new(&self.identity.display_name, self.shard, self.pid)
    }

    /// What the daemon wants of it next. Cancel safe.
    pub async fn order(&self) -> v1::Work {
        self.orders.next().await
    }

    /// For people.
    pub(super) fn row(&self, disk_speed: Option<f64>) -> WorkerRow {
        let live = self.live.lock();
        let (requests, saves, leases) = live.counts;
        WorkerRow {
            session: self.session,
            instance: self.instance,
            attn_tp_size: self.shard.size,
            attn_tp_rank: self.shard.rank,
            model_name: self.identity.display_name.clone(),
            fingerprint: live.model.as_ref().map(|model| model.fingerprint),
            mode: live.plan.mode,
            mode_why: live.plan.why.clone(),
            device: self.device.as_str(),
            ring_bytes: self.ring_bytes,
            page_size: self.page_size,
            epoch: live.epoch,
            pid: self.pid,
            bound: live.bound,
            requests,
            saves,
            leases,
            versions: self.versions.clone(),
            attached_at: seconds(self.attached_at),
            load: live.load.clone(),
            cost: self.cost(disk_speed),
        }
    }

    /// What was learned of it. `disk_speed`: bytes a second, if there is a disk.
    fn cost(&self, disk_speed: Option<f64>) -> CostRow {
        let sizes = Sizes {
            state: self.geometry.state_bytes(),
            row: self.geometry.kv_row_bytes(),
        };
        let (prefill, copies) = (self.costs.prefill(), self.costs.copies());
        let even = |seconds| break_even(sizes, prefill?, seconds);
        CostRow {
            prefill_tokens_per_second: prefill,
            copy_bytes_per_second: copies,
            disk_bytes_per_second: disk_speed,
            break_even_tokens: BreakEven {
                ram: even(1.0 / copies),
                disk: disk_speed.and_then(|disk| even(1.0 / copies + 1.0 / disk)),
            },
        }
    }
}

// === impl Workers ===

impl Workers {
    pub(super) fn get(&self, session: SessionId) -> Option<Arc<Worker>> {
        self.all.lock().get(&session).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<Worker>> {
        let mut all: Vec<_> = self.all.lock().values().cloned().collect();
        all.sort_by_key(|worker| (worker.attached_at, worker.shard.rank, worker.session));
        all
    }

    /// Adds a worker unless there are `most`. Returns the one of the same rank that it replaces.
    pub(super) fn insert(&self, worker: &Arc<Worker>, most: usize) -> Option<Vec<Arc<Worker>>> {
        let mut all = self.all.lock();
        let same = |other: &Worker| {
            (other.instance, other.shard.rank) == (worker.instance, worker.shard.rank)
        };
        let replaced: Vec<_> = all.values().filter(|other| same(other)).cloned().collect();
        if all.len() - replaced.len() >= most {
            return None;
        }
        all.insert(worker.session, Arc::clone(worker));
        Some(replaced)
    }

    /// Whether the other ranks of its server are of the same sort.
    pub(super) fn fits(&self, profile: &Profile) -> bool {
        let all = self.all.lock();
        let mut others = all
            .values()
            .filter(|other| other.instance == profile.instance);
        others.all(|other| {
            other.shard.rank == profile.shard.rank
                || (other.shard.size == profile.shard.size
                    && other.geometry == profile.geometry
                    && other.page_size == profile.page_size)
        })
    }

    /// All ranks of a server, if all are attached.
    pub(super) fn ranks(&self, instance: InstanceId) -> Option<Vec<Arc<Worker>>> {
        let all = self.all.lock();
        let ranks = all.values().filter(|worker| worker.instance == instance);
        let ranks: Vec<_> = ranks.filter(|worker| worker.is_bound()).cloned().collect();
        let size = ranks.first()?.shard.size;
        (ranks.len() == size as usize).then_some(ranks)
    }

    /// `true` for the one who takes it out.
    pub(super) fn remove(&self, session: SessionId) -> bool {
        self.all.lock().remove(&session).is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.all.lock().len()
    }
}

/// Unix time in seconds.
pub(super) fn seconds(at: Millis) -> f64 {
    at.0 as f64 / 1000.0
}
