//! Attaching a worker: everything it says of itself is checked, then it gets a session.
//!
//! # What
//! Three steps, each refused with a typed reason: the description (here), the window (see
//! `channel.toml`, "Modes") and its self-test ([`Service::bind_ring`]), the stream that keeps both sides informed
//! ([`Service::hello`]). A worker that attaches again with the same instance and rank replaces its
//! earlier session.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::Service;
use super::api;
use super::core::Model;
use super::metrics;
use super::modes::{self, Plan};
use super::peer::Peer;
use super::refusals::{Asker, reason_name, refuse};
use super::session::Session;
use super::workers::{CudaExport, Profile, Worker};
use crate::device::shm::SharedMap;
use crate::device::{DeviceKind, Doorbell};
use crate::pool::{Geometry, IdentityError, PoolMap, Shard, fingerprint};
use crate::proto::channel::layout::{self, CloseReason};
use crate::proto::channel::{Capacities, DaemonEnd};
use crate::proto::v1::refusal::Reason;
use crate::proto::{PROTOCOL, v1};
use crate::types::{BLOCK_TOKENS, InstanceId, SessionId, TokenRange, TransferMode};

/// Longest name or version that is kept, in bytes.
const MAX_TEXT: usize = 256;

/// Most versions that are kept.
const MAX_VERSIONS: usize = 32;

/// Largest ring.
const MAX_RING: u64 = 1 << 40;

/// A worker that does not bind its ring for so long is forgotten.
const BIND_WITHIN: Duration = Duration::from_secs(30);

/// Descriptors for a worker whose ring is proven.
#[derive(Debug)]
pub struct ChannelFds {
    /// The channel's memory.
    pub channel: OwnedFd,
    /// Its size.
    pub channel_bytes: u64,
    /// What the worker rings.
    pub doorbell: OwnedFd,
    /// Who copies between ring and window.
    pub mode: TransferMode,
}

/// A worker on its stream.
#[derive(Debug)]
pub struct Attachment {
    worker: Arc<Worker>,
    service: Arc<Service>,
}

// === impl Service ===

impl Service {
    /// Checks what a worker says of itself and gives it a session.
    ///
    /// # Errors
    /// A refusal: the worker's server goes on without the daemon.
    pub fn attach(
        &self,
        request: v1::AttachRequest,
        peer: &Peer,
    ) -> Result<v1::Attached, v1::Refusal> {
        let asker = Asker::of(&request, peer.pid());
        let attached = self.admit(request, peer);
        if let Err(refusal) = &attached {
            if refusal.reason() != Reason::Unauthenticated {
                self.refusals.note(asker, refusal, self.clock.now());
            }
            let name = reason_name(refusal.reason());
            metrics::count(&self.metrics.refused, name);
            tracing::warn!(reason = name, "Attach refused: {}", refusal.message);
        }
        attached
    }

    fn admit(&self, request: v1::AttachRequest, peer: &Peer) -> Result<v1::Attached, v1::Refusal> {
        let token = Some(request.token.as_str()).filter(|token| !token.is_empty());
        if !self.gate.admits(peer, token) {
            return Err(refuse(Reason::Unauthenticated, "this peer may not attach"));
        }
        if request.protocol / 1000 != PROTOCOL / 1000 {
            let text = format!("protocol {} is not {PROTOCOL}", request.protocol);
            return Err(refuse(Reason::ProtocolVersion, text));
        }
        if request.channel_version != layout::VERSION {
            let (has, wants) = (layout::VERSION, request.channel_version);
            let text = format!(
                "the worker's channel has version {wants}, and this daemon's {has}: install the \
                 shim that came with this daemon"
            );
            return Err(refuse(Reason::ChannelVersion, text));
        }
        if !request.not_attaching.is_empty() {
            return Err(refuse(Reason::Unsupported, request.not_attaching));
        }
        if self.stopping() || !self.is_loaded() {
            return Err(v1::Refusal {
                retry_after_ms: 500,
                ..refuse(Reason::NotReady, self.latches.reasons().join(", "))
            });
        }
        let epoch = request.epoch;
        let wants = modes::wanted(&request);
        let profile = check(request, peer, &wants)?;
        let (fingerprint, heartbeat) = (profile.model.fingerprint, self.config.heartbeat);
        let has = |kind| self.device(kind).is_some();
        let plan = Plan::new(&wants, &self.config.modes, profile.device, has)?;
        if !self.workers.fits(&profile) {
            let text = "another rank of this server has another size, other shapes or another page";
            return Err(refuse(Reason::BadGeometry, text));
        }
        let bind_by = self.clock.monotonic().saturating_add(BIND_WITHIN);
        self.forget_unbound();
        let worker = Arc::new(Worker::new(profile, plan, self.clock.now(), bind_by));
        let Some(replaced) = self.workers.insert(&worker, self.config.max_workers) else {
            return Err(v1::Refusal {
                retry_after_ms: 5000,
                ..refuse(Reason::TooManyWorkers, "too many workers are attached")
            });
        };
        for other in replaced {
            self.send_away(&other, CloseReason::Replaced);
        }
        let model_name = worker.identity.display_name.clone();
        let Plan { mode, why, .. } = worker.plan();
        tracing::info!(
            session = %worker.session, %fingerprint, model_name, epoch, %mode, why, "Attached"
        );
        self.announce(api::Event::Attached {
            session: worker.session,
            model_name,
        });
        self.metrics.sessions.set(self.workers.len() as u64);
        Ok(v1::Attached {
            session: worker.session.to_bytes().to_vec().into(),
            secret: worker.secret.to_vec().into(),
            boot: self.boot.to_bytes().to_vec().into(),
            mode: v1::TransferMode::from(mode).into(),
            channel_version: layout::VERSION,
            fd_socket: self.config.fd_socket.to_string_lossy().into_owned(),
            heartbeat_ms: u32::try_from(heartbeat.as_millis()).unwrap_or(u32::MAX),
            block_tokens: BLOCK_TOKENS,
            fingerprint: fingerprint.0.to_vec().into(),
        })
    }

    /// Opens the window of an attached worker, which is its ring or `window`, proves it, and starts
    /// its session. Blocks for the self-test. Must be called inside a runtime with IO.
    ///
    /// # Errors
    /// A refusal; except after a failed self-test or a wrong window, the worker may try again.
    pub fn bind_ring(
        self: &Arc<Self>,
        session: SessionId,
        secret: &[u8],
        window: Option<OwnedFd>,
        peer: &Peer,
    ) -> Result<ChannelFds, v1::Refusal> {
        let worker = self
            .workers
            .get(session)
            .filter(|worker| worker.knows(secret));
        let Some(worker) = worker.filter(|_| self.gate.admits(peer, None)) else {
            return Err(refuse(
                Reason::Unauthenticated,
                "no such session for this peer",
            ));
        };
        if !worker.bind() {
            return Err(refuse(
                Reason::Unauthenticated,
                "the session has its channel already",
            ));
        }
        let bound = self.open(&worker, window);
        match bound {
            Ok((session, fds)) => {
                self.tasks.spawn(session.run());
                Ok(fds)
            }
            Err(refusal) => {
                worker.unbind();
                self.refusals
                    .note(worker.asker(), &refusal, self.clock.now());
                self.send_away(&worker, CloseReason::Failed);
                metrics::count(&self.metrics.refused, reason_name(refusal.reason()));
                tracing::warn!(session = %worker.session, "Ring refused: {}", refusal.message);
                Err(refusal)
            }
        }
    }

    fn open(
        self: &Arc<Self>,
        worker: &Arc<Worker>,
        window: Option<OwnedFd>,
    ) -> Result<(Session, ChannelFds), v1::Refusal> {
        let ring = self.open_window(worker, window)?;
        let Plan { mode, why, .. } = worker.plan();
        tracing::info!(session = %worker.session, %mode, why, "The window is open");
        if mode == TransferMode::Engine && worker.device == DeviceKind::Cuda {
            self.touch_arena();
        }
        let internal = |what: &dyn std::fmt::Display| {
            tracing::error!("A channel could not be made: {what}");
            refuse(Reason::NotReady, "the daemon could not make a channel")
        };
        let capacities = Capacities {
            up: self.config.up_capacity.as_u64(),
            down: self.config.down_capacity.as_u64(),
        };
        let (map, channel) = SharedMap::create("engram-channel", capacities.bytes())
            .map_err(|error| internal(&error))?;
        let map = Arc::new(map);
        let (boot, session) = (self.boot.to_bytes(), worker.session.to_bytes());
        let end =
            DaemonEnd::create(&map, capacities, boot, session).map_err(|error| internal(&error))?;
        let bell = Doorbell::new().map_err(|error| internal(&error))?;
        let listener = bell.listen().map_err(|error| internal(&error))?;
        let doorbell = bell
            .fd()
            .try_clone_to_owned()
            .map_err(|error| internal(&error))?;
        let fds = ChannelFds {
            channel,
            channel_bytes: map.len(),
            doorbell,
            mode,
        };
        let session = Session::new(Arc::clone(self), Arc::clone(worker), end, listener, ring);
        Ok((session, fds))
    }

    /// The worker of a stream that began with a right hello.
    pub fn hello(self: &Arc<Self>, session: &[u8], secret: &[u8]) -> Option<Attachment> {
        let session = SessionId::from_bytes(session.try_into().ok()?);
        let worker = self
            .workers
            .get(session)
            .filter(|worker| worker.knows(secret))?;
        Some(Attachment {
            worker,
            service: Arc::clone(self),
        })
    }

    /// Ends a session; `false`: there is none.
    pub fn detach(&self, session: SessionId, reason: &str) -> bool {
        let worker = self.workers.get(session);
        if let Some(worker) = &worker {
            tracing::info!(%session, reason, "Detaching");
            self.send_away(worker, CloseReason::Detached);
        }
        worker.is_some()
    }

    pub(super) fn send_away(&self, worker: &Arc<Worker>, reason: CloseReason) {
        // A worker that hears of our end hangs up; that is not why.
        let reason = match reason {
            CloseReason::SilentPeer | CloseReason::Detached if self.stopping() => {
                CloseReason::Shutdown
            }
            reason => reason,
        };
        worker.end(reason);
        if !worker.is_bound() {
            self.detached(worker, reason, reason.as_str());
        }
    }

    /// The session is over; said once.
    pub(super) fn detached(&self, worker: &Worker, reason: CloseReason, why: &str) {
        worker.end(reason);
        if !self.workers.remove(worker.session) {
            return;
        }
        self.metrics.sessions.set(self.workers.len() as u64);
        metrics::count(&self.metrics.ended, reason.as_str());
        let reason = why.to_owned();
        self.announce(api::Event::Detached {
            session: worker.session,
            reason,
        });
        self.changed.notify_waiters();
    }

    fn forget_unbound(&self) {
        let now = self.clock.monotonic();
        for worker in self.workers.all() {
            if !worker.is_bound() && worker.bind_by < now {
                self.send_away(&worker, CloseReason::SilentPeer);
            }
        }
    }
}

// === impl Attachment ===

impl Attachment {
    /// The worker.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// The worker, shared.
    pub fn worker_arc(&self) -> Arc<Worker> {
        Arc::clone(&self.worker)
    }

    /// The stream is over, and so is the session.
    pub fn end(&self) {
        self.service.send_away(&self.worker, CloseReason::Detached);
    }
}

/// Everything that a worker says of itself.
fn check(
    request: v1::AttachRequest,
    peer: &Peer,
    wants: &[TransferMode],
) -> Result<Profile, v1::Refusal> {
    let instance: Option<[u8; 16]> = request.instance.as_ref().try_into().ok();
    let Some(instance) = instance.map(InstanceId::from_bytes) else {
        return Err(refuse(Reason::BadIdentity, "an instance has 16 bytes"));
    };
    let geometry = Geometry::try_from(&request);
    let geometry = geometry.map_err(|error| refuse(error.reason(), error.to_string()))?;
    let shard = request.shard.map(Shard::try_from).transpose();
    let shard = shard.map_err(|error| refuse(error.reason(), error.to_string()))?;
    let Some(shard) = shard else {
        return Err(refuse(Reason::BadGeometry, "no shard is given"));
    };
    let layout = match request.layout() {
        v1::PoolLayout::PerLayer => crate::pool::Layout::PerLayer,
        v1::PoolLayout::PageMajor => crate::pool::Layout::PageMajor,
        v1::PoolLayout::Unspecified => {
            return Err(refuse(
                Reason::BadGeometry,
                "the layout of the pools is not known",
            ));
        }
    };
    let (slots, rows) = (request.slots, request.rows);
    PoolMap::new(geometry.clone(), layout, request.page_size, slots, rows)
        .map_err(|error| refuse(error.reason(), error.to_string()))?;
    let identity = request.model.clone().unwrap_or_default();
    if identity.display_name.len() > MAX_TEXT {
        return Err(refuse(Reason::BadIdentity, "the model's name is too long"));
    }
    let model = model_of(&identity, &geometry, shard)
        .map_err(|error| refuse(Reason::BadIdentity, error.to_string()))?;
    let Some(ring) = &request.ring else {
        return Err(refuse(Reason::RingTooSmall, "no ring is given"));
    };
    let block = geometry.kv_bytes(TokenRange {
        start: 0,
        end: BLOCK_TOKENS,
    });
    let least = geometry
        .state_bytes()
        .max(block)
        .max(layout::HANDSHAKE_SELF_TEST_BYTES);
    if ring.bytes < least || ring.bytes > MAX_RING {
        let text = format!(
            "a ring of {} bytes; {least} to {MAX_RING} are possible",
            ring.bytes
        );
        return Err(refuse(Reason::RingTooSmall, text));
    }
    let device = match ring.device() {
        v1::DeviceKind::Host => DeviceKind::Host,
        v1::DeviceKind::Cuda => DeviceKind::Cuda,
        v1::DeviceKind::Unspecified => {
            return Err(refuse(
                Reason::DeviceUnavailable,
                "the ring's device is not known",
            ));
        }
    };
    let cuda = match device {
        // A worker that allows engine only may be unable to export its ring.
        DeviceKind::Cuda if wants.contains(&TransferMode::Ipc) => Some(cuda_export(ring)?),
        DeviceKind::Cuda | DeviceKind::Host => None,
    };
    let short = |text: &String| text.chars().take(MAX_TEXT).collect::<String>();
    let versions: BTreeMap<String, String> = request
        .versions
        .iter()
        .take(MAX_VERSIONS)
        .map(|(name, version)| (short(name), short(version)))
        .collect();
    Ok(Profile {
        instance,
        shard,
        identity,
        geometry,
        model: Arc::new(model),
        device,
        cuda,
        ring_bytes: ring.bytes,
        page_size: request.page_size,
        versions,
        pid: peer.pid(),
        epoch: request.epoch,
    })
}

/// Where a ring on a GPU is.
fn cuda_export(ring: &v1::Ring) -> Result<CudaExport, v1::Refusal> {
    let wrong = |what: &str, has: usize, wants: usize| {
        let text = format!("{what} of {has} bytes; {wants} were expected");
        refuse(Reason::DeviceUnavailable, text)
    };
    let uuid = ring.device_uuid.as_ref().try_into();
    let handle = ring.ipc_handle.as_ref().try_into();
    Ok(CudaExport {
        uuid: uuid.map_err(|_| wrong("a GPU's UUID", ring.device_uuid.len(), 16))?,
        handle: handle.map_err(|_| wrong("an IPC handle", ring.ipc_handle.len(), 64))?,
        offset: ring.ipc_offset,
    })
}

/// The model that these weights in these shapes are.
pub(super) fn model_of(
    identity: &v1::ModelIdentity,
    geometry: &Geometry,
    shard: Shard,
) -> Result<Model, IdentityError> {
    Ok(Model {
        fingerprint: fingerprint(identity, geometry, shard.size)?,
        name: identity.display_name.clone(),
        geometry: geometry.clone(),
        shards: shard.size,
    })
}
