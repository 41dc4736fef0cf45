//! The seam between the scheduler and an external memory.
//!
//! The scheduler calls a [`Memory`] at fixed points and on its own thread; nothing here may block.
//! An external memory reads and writes the pools only through [`DeviceMemory`], inside these calls.

use std::time::Duration;

use super::cache::{Match, NodeId};
use super::device_memory::DeviceMemory;
use super::ids::{PageId, SlotId};
use super::request::{FinishReason, RequestInfo};

/// Whether a request may be considered for admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// It may.
    Open,
    /// Not yet: this request alone waits.
    Hold,
}

/// A boundary that was inserted into the cache.
#[derive(Clone, Copy, Debug)]
pub struct Boundary<'a> {
    /// The node that ends at the boundary. It may have lost its state when there was no slot.
    pub node: NodeId,
    /// The tokens up to the boundary.
    pub tokens: &'a [u32],
}

/// What an external memory holds of the pools, for the accounts.
#[derive(Clone, Debug, Default)]
pub struct Holdings {
    /// Slots held.
    pub slots: Vec<SlotId>,
    /// Pages held.
    pub pages: Vec<PageId>,
}

/// What an external memory brought for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Tokens whose state or KV it brought, beyond what the device had a state for.
    pub restored_tokens: usize,
    /// Those of them that the request went on from.
    pub reused_tokens: usize,
    /// The lowest tier that bytes came from.
    pub tier: &'static str,
    /// How long the request waited for it.
    pub took: Duration,
}

/// An external memory, as the scheduler sees it.
pub trait Memory: Send {
    /// A request has arrived.
    fn enqueued(&mut self, request: &RequestInfo, device: &mut DeviceMemory);

    /// Whether a waiting request may be considered for admission; asked each tick until it is.
    fn gate(&mut self, request: &RequestInfo, device: &mut DeviceMemory) -> Gate;

    /// A request was admitted: it starts from `found` and holds its own lock on that.
    fn admitted(&mut self, request: &RequestInfo, found: &Match, device: &mut DeviceMemory);

    /// A boundary of a request was inserted (or was cached already).
    fn inserted(&mut self, request: &RequestInfo, at: Boundary<'_>, device: &mut DeviceMemory);

    /// A request has finished, or was given up while it ran; `tokens` are its prompt and its answer so
    /// far. Its boundaries, if any, are inserted; its locks are still held. Returns what was restored for
    /// it.
    fn finished(
        &mut self,
        request: &RequestInfo,
        tokens: &[u32],
        reason: FinishReason,
        device: &mut DeviceMemory,
    ) -> Option<Restored>;

    /// A request was given up before it ran. Returns what was restored for it.
    fn aborted(&mut self, request: &RequestInfo, device: &mut DeviceMemory) -> Option<Restored>;

    /// The cache is about to be emptied: give all locks, slots and pages back, now.
    fn flush(&mut self, device: &mut DeviceMemory);

    /// The engine ends: all requests are over.
    fn stopping(&mut self, device: &mut DeviceMemory);

    /// Called once each tick, and at least each [`Self::poll_interval`].
    fn tick(&mut self, device: &mut DeviceMemory);

    /// How often [`Self::tick`] must be called while the engine has nothing to do.
    fn poll_interval(&self) -> Duration;

    /// What it holds of the pools.
    fn holdings(&self) -> Holdings;

    /// What it says about itself on `/server_info`.
    fn report(&self) -> serde_json::Value;
}

/// No external memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMemory;

// === impl NoMemory ===

impl Memory for NoMemory {
    fn enqueued(&mut self, _: &RequestInfo, _: &mut DeviceMemory) {}

    fn gate(&mut self, _: &RequestInfo, _: &mut DeviceMemory) -> Gate {
        Gate::Open
    }

    fn admitted(&mut self, _: &RequestInfo, _: &Match, _: &mut DeviceMemory) {}

    fn inserted(&mut self, _: &RequestInfo, _: Boundary<'_>, _: &mut DeviceMemory) {}

    fn finished(
        &mut self,
        _: &RequestInfo,
        _: &[u32],
        _: FinishReason,
        _: &mut DeviceMemory,
    ) -> Option<Restored> {
        None
    }

    fn aborted(&mut self, _: &RequestInfo, _: &mut DeviceMemory) -> Option<Restored> {
        None
    }

    fn flush(&mut self, _: &mut DeviceMemory) {}

    fn stopping(&mut self, _: &mut DeviceMemory) {}

    fn tick(&mut self, _: &mut DeviceMemory) {}

    fn poll_interval(&self) -> Duration {
        Duration::from_secs(3600)
    }

    fn holdings(&self) -> Holdings {
        Holdings::default()
    }

    fn report(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}
