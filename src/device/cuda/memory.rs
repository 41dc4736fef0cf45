//! Memory that a GPU reaches beside its own: another process's, and that of this host.

#![expect(unsafe_code, reason = "calls into the driver")]

use std::sync::Arc;

use super::driver::{Context, IpcHandle};
use super::error::CudaError;
use crate::device::shm::{OutOfBounds, SharedMap};

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
const PORTABLE: u32 = 1;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: u32 = 1;
/// Memory of another process on the GPU.
pub(super) struct Mapping {
    context: Arc<Context>,
    base: u64,
    /// Bytes of the whole allocation.
    pub size: u64,
}

/// Memory of this host that the GPU copies from and to by itself.
pub(super) struct Pinned {
    context: Arc<Context>,
    map: Arc<SharedMap>,
}

// === impl Mapping ===

impl Mapping {
    /// Opens what another process exported.
    pub(super) fn open(context: &Arc<Context>, handle: [u8; 64]) -> Result<Self, CudaError> {
        context.enter()?;
        let driver = &context.driver;
        let mut base = 0;
        // SAFETY: the pointer is to a live number; the driver checks the handle.
        driver.check("cuIpcOpenMemHandle", unsafe {
            (driver.functions.ipc_open)(&raw mut base, IpcHandle(handle), LAZY_PEER_ACCESS)
        })?;
        let mut mapping = Self {
            context: Arc::clone(context),
            base,
            size: 0,
        };
        let (mut start, mut size) = (0, 0);
        // SAFETY: the pointers are to live numbers.
        driver.check("cuMemGetAddressRange", unsafe {
            (driver.functions.address_range)(&raw mut start, &raw mut size, base)
        })?;
        let before = base.saturating_sub(start);
        mapping.size = (size as u64).saturating_sub(before);
        Ok(mapping)
    }

    /// The address of `len` bytes at `offset`, if they are all there.
    pub(super) fn at(&self, offset: u64, len: u64) -> Result<u64, OutOfBounds> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size);
        end.and_then(|_| self.base.checked_add(offset))
            .ok_or(OutOfBounds {
                offset,
                len,
                align: 1,
                size: self.size,
            })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: opened once, closed once; the ring sees to it that no copy uses it any more.
        let code = unsafe { (self.context.driver.functions.ipc_close)(self.base) };
        self.context.driver.note("cuIpcCloseMemHandle", code);
    }
}

// === impl Pinned ===

impl Pinned {
    /// Pins all of `map`.
    pub(super) fn new(context: &Arc<Context>, map: &Arc<SharedMap>) -> Result<Self, CudaError> {
        context.enter()?;
        let (len, driver) = (map.len(), &context.driver);
        let start = map.at(0, len, 1).expect("a map has all of itself");
        // SAFETY: the range is a live mapping that `map` keeps until it is unregistered.
        driver.check("cuMemHostRegister", unsafe {
            (driver.functions.host_register)(start, len as usize, PORTABLE)
        })?;
        Ok(Self {
            context: Arc::clone(context),
            map: Arc::clone(map),
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.enter();
        let start = self.map.at(0, self.map.len(), 1);
        let start = start.expect("a map has all of itself");
        // SAFETY: registered once, unregistered once, and the mapping still lives.
        let code = unsafe { (self.context.driver.functions.host_unregister)(start) };
        self.context.driver.note("cuMemHostUnregister", code);
    }
}
