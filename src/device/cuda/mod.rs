//! Rings in the memory of NVIDIA GPUs, copied by the GPUs' own copy engines.
//!
//! # What
//! A worker exports its ring by CUDA IPC; the daemon opens it and moves bytes between it and the
//! pinned arena. No kernel runs here, and no pool is ever seen: the ring is all that is exported.
//! The driver is loaded at run time; without one the daemon runs as ever, and has no such device.
//!
//! # State
//! Each GPU is cold until a worker brings a ring (`gpu`). Each direction has a thread and a stream
//! of its own (`lane`), so that saves and restores overlap and neither waits for the other.
//!
//! # Cancellation
//! The close of a ring shuts its gate, waits until the GPU is past what was queued by then (a few
//! milliseconds at most), and closes the mapping: memory of a dead worker is free from then on.
//!
//! # Errors
//! A GPU whose context fails is broken: copies end with errors, its workers are sent away as their
//! copies fail, and once their rings are closed it starts anew. The daemon goes on.

mod driver;
mod error;
mod gpu;
mod lane;
mod memory;
mod ring;

use std::fmt;
use std::sync::Arc;

pub use error::CudaError;

use driver::Driver;
use gpu::Gpu;

use super::shm::{SharedMap, populate_in_background};
use super::{Device, DeviceError, DeviceKind, Ring, RingExport};

/// The GPUs that this process may use.
pub struct CudaDevice {
    gpus: Vec<Arc<Gpu>>,
}

// === impl CudaDevice ===

impl CudaDevice {
    /// Looks for GPUs. Takes none of their memory. `arena` is what copies go to and come from: its
    /// pages are fetched from the system in the background, and it is pinned while workers have
    /// rings open; other memory works too, but slowly.
    ///
    /// # Errors
    /// There is no driver, or no GPU.
    pub fn probe(arena: &Arc<SharedMap>) -> Result<Self, CudaError> {
        let driver = Driver::load()?;
        let found = driver.gpus()?;
        if found.is_empty() {
            return Err(CudaError::NoGpu);
        }
        for gpu in &found {
            let uuid = uuid::Uuid::from_bytes(gpu.uuid);
            tracing::info!(gpu = gpu.name, %uuid, driver = driver.version(), "Found a GPU");
        }
        // Now rather than when the first worker waits for it; without a thread, then.
        populate_in_background(Arc::clone(arena));
        let gpus = found.into_iter().map(|gpu| Gpu::new(&driver, gpu, arena));
        Ok(Self {
            gpus: gpus.collect(),
        })
    }
}

impl Device for CudaDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn open_ring(&self, export: RingExport) -> Result<Arc<dyn Ring>, DeviceError> {
        let RingExport::Cuda {
            uuid,
            handle,
            offset,
            bytes,
        } = export
        else {
            return Err(DeviceError::Unsupported);
        };
        let gpu = self.gpus.iter().find(|gpu| gpu.found.uuid == uuid);
        let gpu = gpu.ok_or(CudaError::UnknownGpu(uuid))?;
        Ok(Arc::new(gpu.open(handle, offset, bytes)?))
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice")
            .field("gpus", &self.gpus.len())
            .finish()
    }
}

#[cfg(test)]
mod tests;
