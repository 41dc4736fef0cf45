//! From the ring into the pools, and into the device's cache.
//!
//! # What
//!
//! Pages and a slot are taken last and at once: only what neither runs nor is locked, and only if
//! the request itself can then still have what its prompt needs and a slot of its own. Then the
//! bytes are scattered, KV and state are inserted, and both are locked until the request holds its
//! own lock. The next forward pass runs on the same thread, after it.

use std::time::Duration;

use super::control::Tamper;
use super::plan::Take;
use super::restore::At;
use super::restore_state::RestoreState;
use super::ring::{Ring, Room};
use super::session::{Cx, Session};
use crate::engine::device_memory::DeviceMemory;
use crate::engine::ids::{PageId, SlotId};
use crate::engine::memory::Restored;
use crate::engine::pools::PoolError;
use crate::engine::request::RequestInfo;
use crate::proto::channel::layout::{Outcome, Piece};

/// Pages and a slot that were taken for a restore and are in nobody's cache.
#[derive(Debug)]
pub(super) struct Raw {
    /// The slot of the state.
    pub slot: SlotId,
    /// Pages of tokens `[from, boundary)`.
    pub pages: Vec<PageId>,
    /// The device has the KV of tokens `[0, from)`.
    from: usize,
    /// Pages of tokens `[0, boundary)`.
    path: Vec<PageId>,
}

/// Why bytes could not be scattered.
#[derive(Debug, thiserror::Error)]
enum ScatterError {
    /// The ring has not so many bytes there.
    #[error(transparent)]
    Ring(#[from] crate::device::shm::OutOfBounds),
    /// The pool has no such place.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

// === impl Raw ===

impl Raw {
    /// Gives everything back.
    pub fn let_go(self, device: &mut DeviceMemory) {
        device.release_pages(self.pages);
        device.release_slot(self.slot);
    }

    /// Copies one piece from the ring into pages or slot.
    fn scatter(
        &self,
        take: &Take,
        ring: &Ring,
        room: &Room,
        device: &mut DeviceMemory,
        scratch: &mut Vec<u8>,
    ) -> Result<(), ScatterError> {
        if take.piece == Piece::State {
            scratch.resize(device.state.packed_len(), 0);
            ring.read(room, 0, scratch)?;
            return Ok(device.state.scatter(self.slot, scratch)?);
        }
        // Rows that the device has by now are left alone.
        let start = (take.rows.start as usize).max(self.from);
        let end = take.rows.end as usize;
        if start >= end {
            return Ok(());
        }
        // Of a piece [layer][K|V][token] the rows that are taken, packed alike.
        let row = device.kv.row_bytes();
        let whole = (take.range.end - take.range.start) as usize * row;
        let skip = (start - take.range.start as usize) * row;
        scratch.resize((end - start) * device.kv.token_bytes(), 0);
        for (index, rows) in scratch.chunks_exact_mut((end - start) * row).enumerate() {
            ring.read(room, (index * whole + skip) as u64, rows)?;
        }
        Ok(device.kv.scatter(&self.path, start, end, scratch)?)
    }
}

impl Session {
    /// Takes pages and a slot for a restore, if there are enough. `false`: not now, or it is over.
    pub fn take_raw(&mut self, request: &RequestInfo, cx: &mut Cx<'_>) -> bool {
        let req = request.id.0;
        let page = cx.device.kv.page_size();
        let limit = request.prompt.len().saturating_sub(1);
        let found = cx.device.peek(&request.namespace, &request.prompt, limit);
        let Some(restore) = self.restores.get_mut(&req) else {
            return false;
        };
        let boundary = restore.boundary as usize;
        if found.boundary >= boundary {
            self.end_restore(req, Outcome::DeviceAsDeep, 0, cx);
            return false;
        }
        if found.kv_tokens < restore.kv_from as usize {
            self.end_restore(req, Outcome::NoDeviceRoom, 0, cx);
            return false;
        }
        // Before anything is evicted: what the device has of the prefix must stay.
        restore.relock(found.kv_node.filter(|_| found.kv_tokens > 0), cx.device);
        let from = found.kv_tokens.min(boundary);
        let needed = (boundary - from) / page;
        let rest = request.prompt.len().div_ceil(page) - boundary / page;
        let enough =
            cx.device.available_pages() >= needed + rest && cx.device.available_slots() >= 2;
        if !enough {
            return false;
        }
        let Some(slot) = cx.device.take_slot() else {
            return false;
        };
        let Some(pages) = cx.device.take_pages(needed) else {
            cx.device.release_slot(slot);
            return false;
        };
        let cached = found
            .kv_node
            .and_then(|node| cx.device.cache().pages_to(node));
        let mut path = cached.unwrap_or_default();
        path.truncate(from / page);
        path.extend(&pages);
        restore.raw = Some(Raw {
            slot,
            pages,
            from,
            path,
        });
        true
    }

    /// Moves every piece that is in the ring into the pools.
    pub fn scatter(&mut self, req: u64, cx: &mut Cx<'_>) {
        let Some(restore) = self.restores.get_mut(&req) else {
            return;
        };
        let Some(raw) = &restore.raw else {
            return;
        };
        let mut failed = None;
        for (take, at) in &mut restore.pieces {
            if !matches!(at, At::Ring(_)) {
                continue;
            }
            if let At::Ring(room) = std::mem::replace(at, At::Pool) {
                let done = raw.scatter(take, &self.ring, &room, cx.device, cx.scratch);
                self.ring.free(room);
                failed = failed.or(done.err());
            }
        }
        if let Some(error) = failed {
            tracing::error!(%error, req, "A restored piece does not fit the pools");
            self.end_restore(req, Outcome::FillFailed, 0, cx);
        }
    }

    /// Brings a restore whose bytes are all here into the device's cache, if there is room now.
    pub fn place(&mut self, request: &RequestInfo, cx: &mut Cx<'_>) {
        let req = request.id.0;
        let has_raw = |session: &Self| {
            let restore = session.restores.get(&req);
            restore.is_some_and(|restore| restore.raw.is_some())
        };
        if !has_raw(self) && !self.take_raw(request, cx) {
            return;
        }
        self.scatter(req, cx);
        let Some(restore) = self.restores.get_mut(&req) else {
            return;
        };
        let Some(raw) = restore.raw.take() else {
            return;
        };
        match cx.control.tamper() {
            Some(Tamper::State) => cx.device.state.clear(raw.slot),
            Some(Tamper::Kv) => cx.device.kv.clear(&raw.pages),
            None => {}
        }
        let tokens = request.prompt.get(..restore.boundary as usize);
        let tokens = tokens.unwrap_or_default();
        let Raw {
            slot,
            pages,
            from,
            path: _,
        } = raw;
        let stored = match cx.device.insert(&request.namespace, tokens, from, &pages) {
            Ok(stored) => stored,
            Err(error) => {
                tracing::error!(%error, req, "A restored prefix could not be inserted");
                cx.device.release_pages(pages);
                cx.device.release_slot(slot);
                return self.end_restore(req, Outcome::NoDeviceRoom, 0, cx);
            }
        };
        cx.device.set_state(stored.node, slot);
        cx.device.lock(stored.node);
        cx.device.pin_state(stored.node);
        restore.placed = Some(stored.node);
        restore.relock(None, cx.device);
        restore.step(cx.now, RestoreState::placed);
        let tokens = restore.boundary - restore.device_boundary;
        cx.counts.restored += 1;
        cx.counts.restored_tokens += u64::from(tokens);
        let took: Duration = cx.now.saturating_sub(restore.started);
        let tier = restore.tier.map_or("none", |tier| tier.as_str());
        if let Some(tracked) = cx.tracked.get_mut(&req) {
            tracked.restored = Some(Restored {
                restored_tokens: tokens as usize,
                reused_tokens: 0,
                tier,
                took,
            });
        }
    }
}
