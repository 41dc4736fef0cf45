//! The owner of all decisions.
//!
//! # What
//! [`Service`] stands between three worlds. *Workers* attach and speak over a shared-memory
//! channel, each served by a task of its own (`session`); the ranks of one server meet in `shards`.
//! *Storage* is blocking: one thread changes the disk (`mover`), some read from it (`promote`), one
//! reads what nobody asks for (`scrub`).
//! *People and programs* ask by name (`by_name`, `rows`).
//!
//! # State
//! What all share is `core`, under one lock that is held for lookups and bookkeeping only.
//! Everything of one worker belongs to its task. A save is a [`SaveState`], a restore a
//! [`RestoreState`]; each step takes the state by value.
//!
//! # Order of writes
//! Bytes of all shards, then the RAM tier, then the index, then the workers are told: what is found
//! is whole. On disk: objects, then the manifest, then the conversation; removals go the other way.
//!
//! # Cancellation
//! Before a snapshot is visible, whatever ends a save leaves nothing. A lease ends with its session
//! at the latest. How the service itself ends is told in `shutdown`.
//!
//! # Errors
//! A worker never gets an error that its server would have to handle: it gets a miss, a decline, or
//! the end of its session. Callers by name get a [`ServiceError`] with one kind for each thing that
//! they can do about it.

pub mod api;
mod attach;
mod budgets;
mod by_name;
mod commit;
pub mod config;
pub mod conversations;
mod core;
mod cost;
pub mod error;
pub mod events;
mod fd_socket;
pub mod hold;
mod keep;
mod latch;
mod lease;
pub mod limits;
pub mod metrics;
mod modes;
mod mover;
mod orders;
mod peer;
pub mod policy;
mod portable;
mod promises;
mod promote;
mod recall;
mod refusals;
pub mod restore_state;
mod room;
mod rows;
pub mod save_state;
pub mod saving;
mod scrub;
pub mod seen;
mod session;
mod shards;
mod shutdown;
mod startup;
#[cfg(test)]
mod tests;
mod trouble;
mod unsaved;
mod window;
mod worker_rows;
mod workers;
mod write_down;
mod write_names;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::sync::{Notify, Semaphore, broadcast};
use tokio_util::task::TaskTracker;

pub use self::api::{
    BudgetChange, ConversationRow, ConversationsRequest, DeleteReply, DeleteRequest, Event,
    HookRow, InfoRequest, ListReply, ListRequest, RestoreReply, RestoreRequest, SaveReply,
    SaveRequest, Selector, SnapshotRow, StatusReply, TierRow, WorkerLoad, WorkerRow,
};
pub use self::attach::{Attachment, ChannelFds};
pub use self::by_name::{ForkRequest, MarkRequest};
pub use self::config::Config;
pub use self::conversations::{
    BranchRow, Compared, Comparison, ConversationView, ForkRow, NO_TURN, OriginRow, Relation,
    SHOWN_TURNS, TOO_LONG, TokenStream, TreeNode, TreeTurn, TurnRow,
};
pub use self::error::{ErrorKind, ServiceError};
pub use self::events::{Batch, EventId, EventReader, EventRow, Numbered};
pub use self::fd_socket::FdSocket;
pub use self::hold::Hold;
pub use self::limits::NamespaceRow;
pub use self::peer::Peer;
pub use self::portable::{Export, ExportRequest, ImportReply, ImportRequest};
pub use self::refusals::RefusalRow;
pub use self::restore_state::RestoreState;
pub use self::save_state::SaveState;
pub use self::saving::{Policy, RulesRow, Saving, SavingRules};
pub use self::seen::{Expected, Tag};
pub use self::trouble::Complaint;
pub use self::workers::{Stop, Worker};

use self::core::Core;
use self::events::EventLog;
use self::latch::Latches;
use self::limits::Rules;
use self::metrics::Metrics;
use self::mover::Bell;
use self::peer::Gate;
use self::promote::Promoter;
use self::refusals::Refusals;
use self::shards::Shards;
use self::workers::Workers;
use crate::device::{Device, DeviceKind};
use crate::index::{Coverage, Index, TierSet, TreeKey};
use crate::store::catalog::TokenRun;
use crate::store::{Store, StoreError, TokenLog};
use crate::types::{BootId, SnapshotId, TierKind, TokenId};
use crate::util::clock::Clock;
use crate::util::secret::TokenError;

/// Not ready: the data directory is being read.
const LOADING: &str = "the index is being read";

/// Not ready: the data directory cannot be read.
const LOAD_FAILED: &str = "the data directory cannot be read";

/// Not ready: a failed fsync ended all writing.
const DISK_FAILED: &str = "the disk takes no more writes";

/// Events that a slow watcher may be behind before it loses some.
const EVENTS: usize = 1024;

/// The service.
pub struct Service {
    config: Config,
    clock: Arc<dyn Clock>,
    store: Store,
    devices: Vec<Arc<dyn Device>>,
    gate: Gate,
    boot: BootId,
    core: Mutex<Core>,
    workers: Workers,
    refusals: Refusals,
    /// Saves that wait for the shards of other ranks.
    shards: Shards,
    promoter: Arc<Promoter>,
    /// Wakes the disk thread.
    wake: Arc<Bell>,
    /// Something changed that a request by name may wait for.
    changed: Notify,
    /// Room in RAM may be promised to somebody who waits for it.
    room_freed: Notify,
    latches: Latches,
    metrics: Metrics,
    /// Room in the RAM tier that is spoken for.
    reserved: Arc<Mutex<u64>>,
    /// Keeps machines in a state, for tests.
    pub hold: Hold,
    events: broadcast::Sender<Event>,
    event_log: EventLog,
    tasks: TaskTracker,
    /// What namespaces may hold.
    rules: Rules,
    /// When retention looks again.
    retain_at: Mutex<Duration>,
    /// When full namespaces are counted again.
    counted_at: Mutex<Duration>,
    /// Places of exports and imports.
    portable: Arc<Semaphore>,
    /// The arena's pages are fetched ahead, once copies by this process are to be fast.
    touched: Once,
    lease: AtomicU64,
    stopping: AtomicBool,
    /// The floor of the disk's free space was changed, and not looked at since.
    floor_changed: AtomicBool,
    /// Runs of the token log that a start did not verify.
    unverified: Mutex<Vec<(SnapshotId, TokenRun)>>,
    /// When the service ends at the latest, once it is stopping.
    end_by: std::sync::OnceLock<tokio::time::Instant>,
}

/// Why the service cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The token file.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The token log.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The system gave no thread.
    #[error("starting a thread: {0}")]
    Thread(#[from] std::io::Error),
}

// === impl Service ===

impl Service {
    /// Starts the service; what is on disk is read in the background, see [`Service::ready`]. Must
    /// be called inside a runtime.
    ///
    /// # Errors
    /// The token file or the token log cannot be used, or the system gives no threads.
    pub fn start(
        config: Config,
        store: Store,
        devices: Vec<Arc<dyn Device>>,
        clock: Arc<dyn Clock>,
        registry: &mut Registry,
    ) -> Result<Arc<Self>, StartError> {
        let threads = config.read_threads;
        let service = Self::assemble(config, store, devices, clock, registry)?;
        service.promoter.start(&service, threads)?;
        mover::start(&service)?;
        scrub::start(&service)?;
        let loading = Arc::clone(&service);
        tokio::task::spawn_blocking(move || loading.load());
        Ok(service)
    }

    /// All of it but its threads, with nothing read yet.
    fn assemble(
        config: Config,
        store: Store,
        devices: Vec<Arc<dyn Device>>,
        clock: Arc<dyn Clock>,
        registry: &mut Registry,
    ) -> Result<Arc<Self>, StartError> {
        let gate = Gate::new(&config.allow_uids, config.token_file.as_deref())?;
        let disk = store.disk.is_some().then_some(TierKind::Disk);
        let tiers: TierSet = [TierKind::Ram].into_iter().chain(disk).collect();
        // What is on disk comes with a log of its own.
        let log = TokenLog::in_memory()?;
        let index = Index::new(log, tiers);
        // Above every number of an earlier start, as long as the clock does not go back.
        let generation = clock.now().0.saturating_mul(1 << 20);
        let service = Arc::new(Self {
            gate,
            boot: BootId::random(),
            core: Mutex::new(Core::new(index, generation)),
            workers: Workers::default(),
            refusals: Refusals::default(),
            shards: Shards::default(),
            promoter: Arc::default(),
            wake: Arc::default(),
            changed: Notify::new(),
            room_freed: Notify::new(),
            latches: Latches::default(),
            reserved: Arc::default(),
            metrics: Metrics::register(registry),
            hold: Hold::from_env(),
            events: broadcast::Sender::new(EVENTS),
            event_log: EventLog::default(),
            tasks: TaskTracker::new(),
            rules: Rules::new(&config.limits),
            retain_at: Mutex::default(),
            counted_at: Mutex::default(),
            portable: Arc::new(Semaphore::new(portable::AT_ONCE)),
            touched: Once::new(),
            lease: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            floor_changed: AtomicBool::new(false),
            unverified: Mutex::default(),
            end_by: std::sync::OnceLock::new(),
            config,
            clock,
            store,
            devices,
        });
        service.latches.hold(LOADING);
        Ok(service)
    }

    /// Waits until nothing holds the service back.
    pub async fn ready(&self) {
        loop {
            let changed = self.changed.notified();
            if self.latches.is_open() {
                return;
            }
            let look = std::time::Duration::from_millis(20);
            let _ = tokio::time::timeout(look, changed).await;
        }
    }

    /// What happens from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// This start of the daemon.
    pub fn boot(&self) -> BootId {
        self.boot
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the peer may use the control plane; `token` is what it showed.
    pub fn admits(&self, peer: &Peer, token: Option<&str>) -> bool {
        self.gate.admits(peer, token)
    }

    /// What is on disk is known. A disk that failed later does not keep workers away.
    fn is_loaded(&self) -> bool {
        !self.latches.holds(LOADING) && !self.latches.holds(LOAD_FAILED)
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn device(&self, kind: DeviceKind) -> Option<&Arc<dyn Device>> {
        self.devices.iter().find(|device| device.kind() == kind)
    }

    fn announce(&self, event: Event) {
        self.event_log.push(event.clone(), self.clock.now());
        // Nobody may be watching.
        let _ = self.events.send(event);
    }

    fn next_lease(&self) -> u64 {
        self.lease.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How much KV of the tokens is stored; `None` if a snapshot stands at their end. It then
    /// counts as seen by the request.
    fn coverage(
        &self,
        key: &TreeKey,
        tokens: &[TokenId],
        conversation: &conversations::ConversationKey,
        owner: conversations::Owner,
    ) -> Option<u32> {
        let now = self.clock.now();
        let boundary = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let mut core = self.core.lock();
        let Coverage { kv, deepest, .. } = core.index.coverage(key, tokens);
        match deepest {
            Some((id, at)) if at == boundary => {
                core.index.touch(&id, now);
                core.conversations.saw(conversation, owner, id, at, now);
                None
            }
            _ => Some(kv),
        }
    }

    /// What a lookup of these tokens finds, with its boundary; for benchmarks.
    #[cfg(feature = "testing")]
    pub fn find(&self, key: &TreeKey, tokens: &[TokenId]) -> Option<(SnapshotId, u32)> {
        let hit = self.core.lock().index.lookup(key, tokens, u32::MAX)?;
        Some((hit.snapshot, hit.boundary))
    }

    /// A snapshot was used.
    fn touch(&self, snapshot: SnapshotId) {
        let now = self.clock.now();
        self.core.lock().index.touch(&snapshot, now);
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service")
            .field("boot", &self.boot)
            .finish_non_exhaustive()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.promoter.stop();
        self.wake.notify_one();
    }
}
