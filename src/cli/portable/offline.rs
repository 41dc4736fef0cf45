//! The service in this process, on the data directory of a daemon that is stopped.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use prometheus_client::registry::Registry;

use super::Failure;
use crate::service::{self, Service};
use crate::store::{self, DiskConfig, StoreError};
use crate::util::clock::SystemClock;

/// Room for what is on its way, and for the arena's own pages.
const SPARE: u64 = 64 << 20;
/// How often is looked whether the directory has been read.
const LOOK: Duration = Duration::from_millis(50);

/// Opens a data directory; `payload` bytes have to fit into RAM.
pub async fn open(data: &Path, make: bool, payload: u64) -> Result<Arc<Service>, Failure> {
    if !make && !data.join("format.json").exists() {
        let path = data.display();
        return Err(Failure::Other(format!("{path}: not a data directory")));
    }
    // An eighth of the arena is not the tier's, and every block has a page of its own.
    let ram = payload.saturating_add(payload / 4).saturating_add(SPARE);
    let config = store::Config {
        ram: ByteSize(ram),
        ram_headroom: None,
        disk: Some(DiskConfig {
            // Nothing is evicted: the budget is the daemon's, which keeps it when it starts.
            bytes: ByteSize(1 << 60),
            min_free: ByteSize(0),
            ..DiskConfig::at(data.to_owned())
        }),
    };
    let clock = Arc::new(SystemClock::new());
    let store = config.build(clock.clone()).map_err(|error| match error {
        StoreError::Locked { .. } => Failure::Other(format!(
            "{error}; leave out --data to ask that daemon (--url), or stop it"
        )),
        error => Failure::Other(error.to_string()),
    })?;
    let config = service::Config {
        preload: ByteSize(0),
        scrub_rate: ByteSize(0),
        drain_timeout: Duration::from_secs(3600),
        ram_high: 1.0,
        ram_low: 1.0,
        ..service::Config::default()
    };
    let service = Service::start(config, store, Vec::new(), clock, &mut Registry::default())
        .map_err(|error| Failure::Other(error.to_string()))?;
    loop {
        let status = service.status();
        if status.ready {
            return Ok(service);
        }
        if let Some(why) = status
            .not_ready
            .iter()
            .find(|why| why.contains("cannot be"))
        {
            return Err(Failure::Other(format!("{}: {why}", data.display())));
        }
        tokio::time::sleep(LOOK).await;
    }
}
