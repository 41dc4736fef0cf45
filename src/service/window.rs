//! Opening what a worker lends: its ring, or the window beside it.
//!
//! Which it is, is planned by `modes`; here is what is tried, and proven by the self-test, before a
//! session begins.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Service;
use super::refusals::{refuse, refuse_ring};
use super::workers::{CudaExport, Worker};
use crate::device::shm::populate_in_background;
use crate::device::{DeviceError, DeviceKind, Ring, RingExport};
use crate::proto::v1;
use crate::proto::v1::refusal::Reason;
use crate::types::TransferMode;

impl Service {
    /// What the daemon copies from and to, proven. Where the ring on a GPU cannot be opened it is memory
    /// beside it, if that may be.
    pub(super) fn open_window(
        &self,
        worker: &Worker,
        window: Option<OwnedFd>,
    ) -> Result<Arc<dyn Ring>, v1::Refusal> {
        let plan = worker.plan();
        let (Some(cuda), TransferMode::Ipc) = (worker.cuda, plan.mode) else {
            return self.open_memory(worker, window);
        };
        let CudaExport {
            uuid,
            handle,
            offset,
        } = cuda;
        let export = RingExport::Cuda {
            uuid,
            handle,
            offset,
            bytes: worker.ring_bytes,
        };
        let error = match self.open_proven(DeviceKind::Cuda, export) {
            Ok(ring) => return Ok(ring),
            Err(error) => error,
        };
        match (plan.or_engine(&error), window) {
            (Some(other), Some(window)) => {
                tracing::warn!(session = %worker.session, %error, "Mode engine instead of ipc");
                worker.set_plan(other);
                self.open_memory(worker, Some(window))
            }
            _ => Err(refuse_ring(&error)),
        }
    }

    /// A window in host memory.
    fn open_memory(
        &self,
        worker: &Worker,
        window: Option<OwnedFd>,
    ) -> Result<Arc<dyn Ring>, v1::Refusal> {
        let missing = || {
            refuse(
                Reason::DeviceUnavailable,
                "the window's descriptor is missing",
            )
        };
        let (fd, bytes) = (window.ok_or_else(missing)?, worker.ring_bytes);
        self.open_proven(DeviceKind::Host, RingExport::Host { fd, bytes })
            .map_err(|error| refuse_ring(&error))
    }

    fn open_proven(
        &self,
        kind: DeviceKind,
        export: RingExport,
    ) -> Result<Arc<dyn Ring>, DeviceError> {
        let ring = self
            .device(kind)
            .ok_or(DeviceError::Unsupported)?
            .open_ring(export)?;
        ring.self_test()?;
        Ok(ring)
    }

    /// Fetches the arena's pages ahead, once: copies into pages that are not there are slow. Where
    /// there is a GPU that was done at the start.
    pub(super) fn touch_arena(&self) {
        if self.device(DeviceKind::Cuda).is_none() {
            let pages = Arc::clone(self.store.arena.map());
            self.touched.call_once(|| populate_in_background(pages));
        }
    }
}
