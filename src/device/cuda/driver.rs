//! The few functions of NVIDIA's driver that are needed, found at run time.
//!
//! The driver is a library of the machine: it may be absent, or older than a function. Both are
//! errors here and nothing more. Results are plain numbers, as a driver may know codes that we do
//! not. Handles of the driver are opaque: they are kept as numbers and never followed.

#![expect(unsafe_code, reason = "calls into the driver")]

use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;

use cudarc::driver::sys;

use super::error::CudaError;
use super::memory::Mapping;
use crate::device::shm::SharedMap;

/// An opaque handle: of a context, a stream or an event.
type Handle = usize;

/// What `cuIpcGetMemHandle` gives.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct IpcHandle(pub [u8; 64]);

/// `CU_CTX_SCHED_BLOCKING_SYNC`: a thread that waits sleeps.
const SLEEP_IN_WAITS: u32 = 4;
/// `CU_STREAM_NON_BLOCKING`: no order with the default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`.
const SLEEPING_EVENT: u32 = 3;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Functions {
            fn load() -> Result<Self, CudaError> {
                Ok(Self { $($field: symbol(concat!($symbol, "\0"))?,)* })
            }
        }
    };
}

functions! {
    init = "cuInit" (u32);
    version = "cuDriverGetVersion" (*mut c_int);
    error_name = "cuGetErrorName" (u32, *mut *const c_char);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_uuid = "cuDeviceGetUuid" (*mut [u8; 16], c_int);
    context_flags = "cuDevicePrimaryCtxSetFlags_v2" (c_int, u32);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    context_set = "cuCtxSetCurrent" (Handle);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    address_range = "cuMemGetAddressRange_v2" (*mut u64, *mut usize, u64);
    ipc_open = "cuIpcOpenMemHandle_v2" (*mut u64, IpcHandle, u32);
    ipc_close = "cuIpcCloseMemHandle" (u64);
    host_register = "cuMemHostRegister_v2" (*mut u8, usize, u32);
    host_unregister = "cuMemHostUnregister" (*mut u8);
    stream_create = "cuStreamCreate" (*mut Handle, u32);
    stream_destroy = "cuStreamDestroy_v2" (Handle);
    stream_wait = "cuStreamSynchronize" (Handle);
    copy_in = "cuMemcpyHtoDAsync_v2" (u64, *const u8, usize, Handle);
    copy_out = "cuMemcpyDtoHAsync_v2" (*mut u8, u64, usize, Handle);
    event_create = "cuEventCreate" (*mut Handle, u32);
    event_destroy = "cuEventDestroy_v2" (Handle);
    event_record = "cuEventRecord" (Handle, Handle);
    event_query = "cuEventQuery" (Handle);
    event_wait = "cuEventSynchronize" (Handle);
}

/// The driver, initialised.
pub(super) struct Driver {
    pub functions: Functions,
    uuid_v2: Option<unsafe extern "C" fn(*mut [u8; 16], c_int) -> u32>,
}

/// A GPU that the driver shows.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// The driver's handle of it.
    pub device: c_int,
    /// What it is called.
    pub name: String,
    /// What it is, on every process's list.
    pub uuid: [u8; 16],
}

/// A GPU's primary context, retained. It takes memory of the GPU.
pub(super) struct Context {
    pub driver: Arc<Driver>,
    device: c_int,
    raw: Handle,
}

/// A queue of copies on a GPU.
pub(super) struct Stream {
    context: Arc<Context>,
    raw: Handle,
}

/// A point in a stream.
pub(super) struct Event {
    context: Arc<Context>,
    raw: Handle,
}

fn symbol<F: Copy>(name: &'static str) -> Result<F, CudaError> {
    // SAFETY: called only after `is_culib_present`, so that `culib` finds the library; each `F` is
    // the function's type as the driver's header has it.
    let found = unsafe { sys::culib().get::<F>(name.as_bytes()) };
    found
        .map(|function| *function)
        .map_err(|_| CudaError::MissingFunction(name.trim_end_matches('\0')))
}

// === impl Driver ===

impl Driver {
    /// Loads and initialises the driver. Takes no memory of a GPU.
    pub(super) fn load() -> Result<Arc<Self>, CudaError> {
        // SAFETY: opens a system library, whose initialisers are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let driver = Self {
            functions: Functions::load()?,
            uuid_v2: symbol("cuDeviceGetUuid_v2\0").ok(),
        };
        // SAFETY: as the header says; a number goes in, a number comes out.
        driver.check("cuInit", unsafe { (driver.functions.init)(0) })?;
        Ok(Arc::new(driver))
    }

    /// For people: 13000 is 13.0.
    pub(super) fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: the pointer is to a live number.
        let _ = unsafe { (self.functions.version)(&raw mut version) };
        version
    }

    /// The GPUs that this process may use.
    pub(super) fn gpus(&self) -> Result<Vec<Found>, CudaError> {
        let functions = &self.functions;
        let mut count = 0;
        // SAFETY: the pointer is to a live number.
        self.check("cuDeviceGetCount", unsafe {
            (functions.device_count)(&raw mut count)
        })?;
        let mut found = Vec::new();
        for ordinal in 0..count {
            let (mut device, mut uuid, mut name) = (0, [0; 16], [0_u8; 128]);
            // SAFETY: the pointer is to a live number.
            self.check("cuDeviceGet", unsafe {
                (functions.device)(&raw mut device, ordinal)
            })?;
            // Of the part, where a GPU is split.
            let uuid_of = self.uuid_v2.unwrap_or(functions.device_uuid);
            // SAFETY: the pointer is to 16 live bytes, the length of a UUID.
            self.check("cuDeviceGetUuid", unsafe { uuid_of(&raw mut uuid, device) })?;
            // SAFETY: the pointer is to as many bytes as said, of which the last stays zero.
            let named = unsafe { (functions.device_name)(name.as_mut_ptr().cast(), 127, device) };
            self.check("cuDeviceGetName", named)?;
            let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
            found.push(Found {
                device,
                name: name.to_string_lossy().into_owned(),
                uuid,
            });
        }
        Ok(found)
    }

    pub(super) fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the pointer is to a live pointer.
        let known = unsafe { (self.functions.error_name)(code, &raw mut name) } == 0;
        let name = if known && !name.is_null() {
            // SAFETY: the driver gave a string that lives as long as it.
            unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        } else {
            "an error unknown to the driver".to_owned()
        };
        Err(CudaError::Call { call, code, name })
    }

    /// For what is given back: nothing can be done but say it.
    pub(super) fn note(&self, call: &'static str, code: u32) {
        if let Err(error) = self.check(call, code) {
            tracing::debug!(%error, "Giving back to the GPU's driver");
        }
    }
}

// === impl Context ===

impl Context {
    /// Retains the GPU's primary context, which takes some hundred MiB of its memory.
    pub(super) fn retain(driver: &Arc<Driver>, device: c_int) -> Result<Arc<Self>, CudaError> {
        let functions = &driver.functions;
        // SAFETY: numbers only. Flags of a context that is there already do not change, which is
        // no harm.
        driver.note("cuDevicePrimaryCtxSetFlags", unsafe {
            (functions.context_flags)(device, SLEEP_IN_WAITS)
        });
        let mut raw = 0;
        // SAFETY: the pointer is to a live handle; released once, by the drop.
        driver.check("cuDevicePrimaryCtxRetain", unsafe {
            (functions.context_retain)(&raw mut raw, device)
        })?;
        Ok(Arc::new(Self {
            driver: Arc::clone(driver),
            device,
            raw,
        }))
    }

    /// Makes it this thread's.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained for as long as `self` lives.
        let code = unsafe { (self.driver.functions.context_set)(self.raw) };
        self.driver.check("cuCtxSetCurrent", code)
    }

    /// Free and all bytes of the GPU's memory.
    pub(super) fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to live numbers.
        let code = unsafe { (self.driver.functions.memory_info)(&raw mut free, &raw mut total) };
        self.driver.check("cuMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let functions = &self.driver.functions;
        // SAFETY: numbers only. No thread keeps a context as its own that is being destroyed: all
        // others enter one before each of their calls.
        self.driver
            .note("cuCtxSetCurrent", unsafe { (functions.context_set)(0) });
        // SAFETY: retained once, released once; all that lives in it holds an `Arc` of it.
        self.driver.note("cuDevicePrimaryCtxRelease", unsafe {
            (functions.context_release)(self.device)
        });
    }
}

// === impl Stream ===

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut raw = 0;
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (context.driver.functions.stream_create)(&raw mut raw, NON_BLOCKING) };
        context.driver.check("cuStreamCreate", code)?;
        let context = Arc::clone(context);
        Ok(Self { context, raw })
    }

    /// Queues a copy from `map` to the GPU. Both ends are checked.
    ///
    /// The caller keeps `map` and `to` alive until the stream came past the copy.
    pub(super) fn copy_in(
        &self,
        (map, offset): (&SharedMap, u64),
        (to, to_offset): (&Mapping, u64),
        len: u64,
    ) -> Result<(), crate::device::DeviceError> {
        let host = map.at(offset, len, 1)?;
        let gpu = to.at(to_offset, len)?;
        self.context.enter()?;
        // SAFETY: both ranges were checked and stay until the copy is over, as the caller sees to;
        // no reference to either exists, and what a peer does to them changes bytes only.
        let code = unsafe {
            (self.context.driver.functions.copy_in)(gpu, host.cast_const(), len as usize, self.raw)
        };
        Ok(self.context.driver.check("cuMemcpyHtoDAsync", code)?)
    }

    /// Queues a copy from the GPU to `map`, likewise.
    pub(super) fn copy_out(
        &self,
        (from, from_offset): (&Mapping, u64),
        (map, offset): (&SharedMap, u64),
        len: u64,
    ) -> Result<(), crate::device::DeviceError> {
        let host = map.at(offset, len, 1)?;
        let gpu = from.at(from_offset, len)?;
        self.context.enter()?;
        // SAFETY: as in `copy_in`.
        let code =
            unsafe { (self.context.driver.functions.copy_out)(host, gpu, len as usize, self.raw) };
        Ok(self.context.driver.check("cuMemcpyDtoHAsync", code)?)
    }

    /// Waits until all that was queued is over.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the stream lives.
        let code = unsafe { (self.context.driver.functions.stream_wait)(self.raw) };
        self.context.driver.check("cuStreamSynchronize", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: made once, destroyed once; the driver lets what is queued end first.
        let code = unsafe { (self.context.driver.functions.stream_destroy)(self.raw) };
        self.context.driver.note("cuStreamDestroy", code);
    }
}

// === impl Event ===

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut raw = 0;
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (context.driver.functions.event_create)(&raw mut raw, SLEEPING_EVENT) };
        context.driver.check("cuEventCreate", code)?;
        let context = Arc::clone(context);
        Ok(Self { context, raw })
    }

    /// Puts it behind all that the stream has.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both live, in one context.
        let code = unsafe { (self.context.driver.functions.event_record)(self.raw, stream.raw) };
        self.context.driver.check("cuEventRecord", code)
    }

    /// Whether the stream came past it; or an error, of the GPU or of what came before.
    pub(super) fn is_over(&self) -> Result<bool, CudaError> {
        self.context.enter()?;
        // SAFETY: the event lives.
        let code = unsafe { (self.context.driver.functions.event_query)(self.raw) };
        if code == NOT_READY {
            return Ok(false);
        }
        self.context
            .driver
            .check("cuEventQuery", code)
            .map(|()| true)
    }

    /// Sleeps until the stream came past it.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the event lives.
        let code = unsafe { (self.context.driver.functions.event_wait)(self.raw) };
        self.context.driver.check("cuEventSynchronize", code)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: made once, destroyed once.
        let code = unsafe { (self.context.driver.functions.event_destroy)(self.raw) };
        self.context.driver.note("cuEventDestroy", code);
    }
}
