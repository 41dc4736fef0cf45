//! A daemon for tests, with a data directory of its own.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use prometheus_client::registry::Registry;
use tempfile::TempDir;

use crate::device::Device;
use crate::device::host::HostDevice;
use crate::proto::channel::layout;
use crate::service::{Config, Service};
use crate::store::fault::Faults;
use crate::store::{self, DiskConfig, StoreError};
use crate::util::clock::{Clock, SystemClock};

/// The longest that anything may take on a slow machine.
pub const LONG: Duration = Duration::from_secs(60);

/// A daemon with a data directory.
pub struct World {
    pub folder: TempDir,
    pub service: Arc<Service>,
    pub registry: Registry,
    pub faults: Faults,
    settings: Settings,
}

/// What a test sets.
#[derive(Clone)]
pub struct Settings {
    pub ram: ByteSize,
    pub disk: Option<ByteSize>,
    /// Everything that is done to the data directory is noted.
    pub tape: bool,
    pub config: Config,
    /// Devices besides the memory of this host.
    pub devices: Vec<Arc<dyn Device>>,
    pub clock: Arc<dyn Clock>,
}

impl Default for Settings {
    fn default() -> Self {
        let config = Config {
            write_after: Duration::from_millis(20),
            drain_timeout: Duration::from_secs(20),
            ..Config::default()
        };
        Self {
            ram: ByteSize::mib(64),
            disk: Some(ByteSize::gib(1)),
            tape: false,
            config,
            devices: Vec::new(),
            clock: Arc::new(SystemClock::new()),
        }
    }
}

impl World {
    pub async fn new() -> Self {
        Self::with(Settings::default()).await
    }

    pub async fn with(settings: Settings) -> Self {
        Self::at(TempDir::new().unwrap(), settings).await
    }

    /// A daemon that writes nothing to disk by itself during the test.
    pub async fn lazy() -> Self {
        let mut settings = Settings::default();
        settings.config.write_after = Duration::from_secs(3600);
        Self::with(settings).await
    }

    pub async fn at(folder: TempDir, settings: Settings) -> Self {
        let (service, registry, faults) = start(folder.path(), &settings);
        tokio::time::timeout(LONG, service.ready()).await.unwrap();
        Self {
            folder,
            service,
            registry,
            faults,
            settings,
        }
    }

    /// Another daemon on the same directory. The first one just ends, as killed.
    pub async fn killed(self) -> Self {
        let Self {
            folder,
            service,
            settings,
            ..
        } = self;
        let last = Arc::downgrade(&service);
        service.tasks.close();
        for worker in service.workers.all() {
            service.send_away(&worker, layout::CloseReason::Failed);
        }
        tokio::time::timeout(LONG, service.tasks.wait())
            .await
            .unwrap();
        drop(service);
        eventually("the first daemon is gone", || last.upgrade().is_none()).await;
        Self::at(folder, settings).await
    }

    pub fn metric(&self, name: &str) -> f64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        let line = text
            .lines()
            .find(|line| line.split(' ').next() == Some(name));
        line.map_or(0.0, |line| {
            line.rsplit(' ').next().unwrap().parse().unwrap()
        })
    }

    /// It started from the catalog.
    pub fn was_recalled(&self) -> bool {
        self.metric("engram_catalog_used") == 1.0
    }

    pub async fn all_durable(&self) {
        eventually("all is durable", || {
            let core = self.service.core.lock();
            core.queue.is_idle() && !core.conversations.any_dirty()
        })
        .await;
    }

    /// Every conversation that changed is on disk, with what was said in it.
    pub async fn all_durable_names(&self) {
        eventually("the names are written", || {
            let core = self.service.core.lock();
            core.queue.writing_refs == 0 && !core.conversations.any_dirty()
        })
        .await;
    }

    pub fn check(&self) {
        let core = self.service.core.lock();
        core.index.check().unwrap();
        let mut records: Vec<_> = core.records.keys().copied().collect();
        let mut indexed: Vec<_> = core.index.iter().collect();
        records.sort_unstable();
        indexed.sort_unstable();
        assert_eq!(records, indexed);
    }

    /// Files below the data directory whose names contain `part`.
    pub fn files(&self, part: &str) -> Vec<std::path::PathBuf> {
        let mut found = Vec::new();
        walk(&self.folder.path().join("data"), part, &mut found);
        found
    }
}

fn walk(folder: &Path, part: &str, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(&path, part, found);
        } else if path.to_str().unwrap().contains(part) {
            found.push(path);
        }
    }
}

fn start(folder: &Path, settings: &Settings) -> (Arc<Service>, Registry, Faults) {
    let Settings {
        ram,
        disk,
        tape,
        config,
        devices: others,
        clock,
    } = settings.clone();
    let disk = disk.map(|bytes| DiskConfig {
        bytes,
        min_free: ByteSize::b(0),
        ..DiskConfig::at(folder.join("data"))
    });
    let faults = Faults::default();
    if tape {
        faults.start_tape();
    }
    let store = store::Config {
        ram,
        ram_headroom: None,
        disk,
    };
    // The lock of a daemon that is gone goes with its last thread.
    let start = Instant::now();
    let store = loop {
        match store
            .clone()
            .build_faulty(Arc::clone(&clock), faults.clone())
        {
            Err(StoreError::Locked { .. }) if start.elapsed() < LONG => {
                std::thread::sleep(Duration::from_millis(1));
            }
            built => break built.unwrap(),
        }
    };
    let mut devices: Vec<Arc<dyn Device>> = vec![Arc::new(HostDevice::new(64).unwrap())];
    devices.extend(others);
    let config = Config {
        fd_socket: folder.join("fd.sock"),
        ..config
    };
    let mut registry = Registry::with_prefix("engram");
    let service = Service::start(config, store, devices, clock, &mut registry).unwrap();
    (service, registry, faults)
}

/// Waits until `done`, and fails the test if it never is.
pub async fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "never: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
