//! What handlers share. The surface answers before the service exists, so that probes see a start.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::registry::Registry;

use super::error::{ApiError, ErrorType};
use crate::gateway::{Gateway, GatewayError};
use crate::service::Service;
use crate::telemetry::Readiness;

/// State of all handlers; clones share it.
#[derive(Clone)]
pub struct Shared {
    inner: Arc<Inner>,
}

struct Inner {
    readiness: Readiness,
    timeout: Duration,
    live: OnceLock<Live>,
}

/// What exists once the daemon is built.
struct Live {
    service: Arc<Service>,
    registry: Registry,
    gateway: Option<Arc<Gateway>>,
}

// === impl Shared ===

impl Shared {
    /// State before the service exists. `timeout` is that of a whole answer.
    pub fn new(readiness: Readiness, timeout: Duration) -> Shared {
        Shared {
            inner: Arc::new(Inner {
                readiness,
                timeout,
                live: OnceLock::new(),
            }),
        }
    }

    /// From now on requests reach the service, and the server behind it if there is one. A second
    /// call changes nothing.
    pub fn go_live(
        &self,
        service: Arc<Service>,
        registry: Registry,
        gateway: Option<Arc<Gateway>>,
    ) {
        let live = Live {
            service,
            registry,
            gateway,
        };
        if self.inner.live.set(live).is_err() {
            tracing::debug!("The service was set before");
        }
    }

    /// The service.
    ///
    /// # Errors
    /// 503 while the daemon starts.
    pub fn service(&self) -> Result<&Arc<Service>, ApiError> {
        self.live().map(|live| &live.service)
    }

    /// What generates.
    ///
    /// # Errors
    /// While the daemon starts, and where no server is behind it.
    pub fn gateway(&self) -> Result<&Arc<Gateway>, GatewayError> {
        let live = self.inner.live.get().ok_or(GatewayError::Starting)?;
        live.gateway.as_ref().ok_or(GatewayError::NotConfigured)
    }

    /// Something of a conversation was deleted: nobody waits there for what was answered last.
    pub fn deleted(&self, conversation: Option<&str>) {
        if let (Ok(gateway), Some(conversation)) = (self.gateway(), conversation) {
            gateway.forget(conversation);
        }
    }

    /// The metrics.
    ///
    /// # Errors
    /// 503 while the daemon starts.
    pub fn registry(&self) -> Result<&Registry, ApiError> {
        self.live().map(|live| &live.registry)
    }

    fn live(&self) -> Result<&Live, ApiError> {
        self.inner
            .live
            .get()
            .ok_or_else(|| ApiError::new(ErrorType::Unavailable, "The daemon is starting"))
    }

    /// Why the daemon is not ready.
    pub fn not_ready(&self) -> Vec<String> {
        let mut reasons = self.inner.readiness.reasons();
        match self.inner.live.get() {
            Some(live) => reasons.extend(live.service.status().not_ready),
            None if reasons.is_empty() => reasons.push("starting".into()),
            None => {}
        }
        reasons
    }

    /// What is wrong although the daemon does its work.
    pub fn warnings(&self) -> Vec<String> {
        let live = self.inner.live.get();
        live.map_or_else(Vec::new, |live| live.service.status().warnings)
    }

    /// How long a handler may wait for work, so that its own answer still arrives in time.
    pub fn patience(&self) -> Duration {
        self.inner.timeout.mul_f64(0.9)
    }
}
