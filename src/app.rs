//! Putting the parts together, and taking them apart in order.
//!
//! # Start
//! REST is bound first and answers its probes, then the store is opened, then the service starts
//! and requests reach it; last come the sockets for workers. Each step holds a readiness latch.
//! `READY=1` goes to the service manager when the last one is dropped.
//!
//! # Stop
//! SIGTERM or SIGINT: requests that generate go on for `upstream.drain_timeout`, and new ones are
//! refused; workers are told; no new requests or workers; what is pending is written down
//! within `service.drain_timeout`, or at once found unwritable; requests in flight are answered;
//! sockets and the store close. A second signal ends
//! the process at once: nothing that was called durable depends on the way out.
//!
//! # Errors
//! A socket that cannot be bound or a store that cannot be opened ends the start, and what was
//! started until then is taken apart again.

#[cfg(test)]
mod parsers;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use prometheus_client::registry::Registry;
use sd_notify::NotifyState;
use serde::Serialize;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::device::Device;
use crate::device::cuda::{CudaDevice, CudaError};
use crate::device::host::HostDevice;
use crate::device::shm::SharedMap;
use crate::gateway::Gateway;
use crate::grpc::Grpc;
use crate::rest;
use crate::service::{FdSocket, Service};
use crate::telemetry::Readiness;
use crate::types::Millis;
use crate::util::clock::{Clock, SystemClock};
use crate::webhooks::Webhooks;

/// Where the daemon listens.
#[derive(Clone, Debug, Serialize)]
pub struct Bound {
    /// Process id.
    pub pid: u32,
    /// URL of the REST surface over TCP.
    pub rest: Option<String>,
    /// Unix socket of the REST surface.
    pub rest_socket: Option<PathBuf>,
    /// Unix socket on which workers attach.
    pub grpc_socket: PathBuf,
    /// Address on which workers attach over TCP.
    pub grpc: Option<String>,
}

/// The signals that end the daemon.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

/// Copies between workers' rings and the arena that may wait in line.
const COPY_QUEUE: usize = 4096;
/// How long a stop waits for REST requests in flight.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
/// How long a stop waits for sockets to close once the service is down.
const LAST_CLOSES: Duration = Duration::from_secs(2);
/// Exit code of a process that a second signal ended.
const EXIT_IMPATIENT: i32 = 130;

/// Runs the daemon until a signal ends it. `announce` is called once everything listens.
///
/// # Errors
/// A socket cannot be bound, or the store cannot be opened, or the clock is before 1970.
pub fn run(
    config: Config,
    announce: impl FnOnce(&Bound) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    check_clock(SystemClock::new().now())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("engram-io")
        .build()
        .context("starting the runtime")?;
    let outcome = runtime.block_on(serve(config, announce));
    // A read from a disk that hangs must not keep the process.
    runtime.shutdown_timeout(LAST_CLOSES);
    outcome
}

async fn serve(
    config: Config,
    announce: impl FnOnce(&Bound) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let Config {
        log: _,
        rest: rest_config,
        grpc: grpc_config,
        store,
        service: service_config,
        upstream,
        webhooks,
    } = config;
    let mut signals = Signals::new()?;
    let readiness = Readiness::default();
    let starting = readiness.latch("starting");
    let stop = CancellationToken::new();
    // However the start ends, what runs by then is told.
    let _stop_on_error = stop.clone().drop_guard();

    let mut registry = Registry::with_prefix("engram");
    let rest_metrics = rest::Metrics::default();
    rest_metrics.register(&mut registry);
    let shared = rest::Shared::new(readiness.clone(), rest_config.timeout);
    let router = rest::router(&rest_config, shared.clone(), rest_metrics)?;
    let rest_server = rest::Server::bind(&rest_config).await?;
    let rest_address = rest_server.address();
    let rest_task = tokio::spawn(rest_server.run(router, stop.clone()));

    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let store = store.resolve();
    tracing::info!(?store, "Opening the store");
    check_parent(store.disk.as_ref().map(|disk| disk.path.as_path()))?;
    let store_clock = Arc::clone(&clock);
    let store = tokio::task::spawn_blocking(move || store.build(store_clock))
        .await?
        .context("opening the store")?;
    let arena = Arc::clone(store.arena.map());
    let copy_threads = service_config.copy_threads;
    let devices = tokio::task::spawn_blocking(move || devices(&arena, copy_threads)).await??;
    let service = Service::start(service_config, store, devices, clock, &mut registry)
        .context("starting the service")?;
    let gateway =
        Gateway::new(&upstream, Arc::clone(&service), &mut registry).map_err(anyhow::Error::msg)?;
    let webhooks = Webhooks::start(webhooks, &service, &mut registry, &stop)?;
    shared.go_live(Arc::clone(&service), registry, gateway.clone());

    let fd_socket = FdSocket::bind(&service)
        .with_context(|| format!("listening on {}", service.config().fd_socket.display()))?;
    let grpc = Grpc::bind(&grpc_config.socket, grpc_config.listen)
        .await
        .with_context(|| format!("listening on {}", grpc_config.socket.display()))?;
    let bound = Bound {
        pid: std::process::id(),
        rest: rest_address.map(|address| format!("http://{address}")),
        rest_socket: rest_config.socket,
        grpc: grpc.address().map(|address| address.to_string()),
        grpc_socket: grpc_config.socket,
    };
    let fd_task = tokio::spawn(fd_socket.run(Arc::clone(&service), stop.clone().cancelled_owned()));
    let grpc_task = tokio::spawn(grpc.run(Arc::clone(&service), stop.clone()));
    tracing::info!(?bound, "Listening");
    announce(&bound)?;

    let ready = async {
        service.ready().await;
        drop(starting);
        tracing::info!("Ready");
        notify(NotifyState::Ready);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = ready => {}
        () = signals.one() => {}
    }
    tracing::info!("Stopping");
    notify(NotifyState::Stopping);
    let _stopping = readiness.latch("stopping");
    tokio::spawn(async move {
        signals.one().await;
        std::process::exit(EXIT_IMPATIENT);
    });
    // While workers still save what they are promised.
    if let Some(gateway) = &gateway {
        gateway.drain().await;
    }
    // Before their streams end: the first reason is the one that counts.
    service.begin_shutdown();
    stop.cancel();
    webhooks.ended().await;
    // Requests that wait for the disk have their answers when this returns.
    service.drain().await;
    end(rest_task, LAST_ANSWERS, "REST").await;
    // The last requests may have left something.
    service.shutdown().await;
    end(fd_task, LAST_CLOSES, "the socket for descriptors").await;
    if let Some(Err(error)) = end(grpc_task, LAST_CLOSES, "gRPC").await {
        tracing::warn!(%error, "gRPC ended badly");
    }
    tracing::info!("Stopped");
    Ok(())
}

/// The memory of this host, and GPUs where there are any.
fn devices(arena: &Arc<SharedMap>, copy_threads: usize) -> anyhow::Result<Vec<Arc<dyn Device>>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = copy_threads.min(cores / 2).max(1);
    let host = HostDevice::with_threads(COPY_QUEUE, threads)?;
    let mut devices: Vec<Arc<dyn Device>> = vec![Arc::new(host)];
    match CudaDevice::probe(arena) {
        Ok(gpus) => devices.push(Arc::new(gpus)),
        Err(CudaError::NoDriver) => tracing::info!("No GPU: {}", CudaError::NoDriver),
        Err(error) => tracing::warn!(%error, "No GPU"),
    }
    Ok(devices)
}

/// The folder of the disk tier is there, or can be made.
///
/// # Errors
/// Its parent is missing: it may be on a disk that is not mounted, so it is not made.
fn check_parent(path: Option<&Path>) -> anyhow::Result<()> {
    let Some(parent) = path.and_then(Path::parent) else {
        return Ok(());
    };
    match parent.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => anyhow::bail!(
            "store.disk.path: its parent {} does not exist, and only the last folder is made: \
             make it, or mount the disk",
            parent.display()
        ),
        // Whatever else is wrong, opening says it.
        _ => Ok(()),
    }
}

/// A clock that can be told in a header of HTTP and in a file.
///
/// # Errors
/// It says a time before 1970, which [`Clock::now`] takes for the beginning of 1970.
fn check_clock(now: Millis) -> anyhow::Result<()> {
    anyhow::ensure!(
        now > Millis::default(),
        "the system's clock is before 1970: set it, then start again"
    );
    Ok(())
}

/// Waits for a task, at most so long; then it is cut off.
async fn end<T>(mut task: JoinHandle<T>, patience: Duration, name: &str) -> Option<T> {
    match tokio::time::timeout(patience, &mut task).await {
        Ok(ended) => ended.ok(),
        Err(_) => {
            tracing::warn!("{name} did not end in time and is cut off");
            task.abort();
            None
        }
    }
}

/// Tells the service manager, if there is one.
fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::debug!(%error, "The service manager was not told");
    }
}

// === impl Signals ===

impl Signals {
    fn new() -> anyhow::Result<Signals> {
        let handle = |kind| signal(kind).context("handling signals");
        Ok(Signals {
            terminate: handle(SignalKind::terminate())?,
            interrupt: handle(SignalKind::interrupt())?,
        })
    }

    /// Waits for one of them.
    async fn one(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_before_1970_is_said() {
        let error = check_clock(Millis::default()).unwrap_err();
        assert!(error.to_string().contains("before 1970"), "{error}");
        check_clock(Millis(1)).unwrap();
    }

    #[test]
    fn a_missing_parent_of_the_disk_tier_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let parent = folder.path().join("not-mounted");
        let path = parent.join("engram");
        let error = check_parent(Some(&path)).unwrap_err().to_string();
        let named = error.contains(&parent.display().to_string());
        assert!(named && error.contains("store.disk.path"), "{error}");
        check_parent(Some(&parent)).unwrap();
        check_parent(Some(Path::new("/"))).unwrap();
        check_parent(None).unwrap();
    }
}
