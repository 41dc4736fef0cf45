//! Copies between the worker's ring and the arena, a bounded number of them at a time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;

use super::Event;
use crate::device::{DeviceError, Ring};
use crate::service::workers::Worker;
use crate::store::Segment;
use crate::util::clock::Clock;

/// Copies of one session that its device may have queued.
const IN_FLIGHT: usize = 64;

/// Copies that may wait here. More would be a worker that asks for the same again and again.
const WAITING: usize = 1 << 16;

/// One copy.
#[derive(Clone, Debug)]
pub struct Copy {
    /// For whom.
    pub what: What,
    /// Where in the ring.
    pub ring_offset: u64,
    /// Where in the arena; held until the copy is over.
    pub segment: Arc<Segment>,
}

/// For whom a copy is. `serial` tells apart saves and leases that reuse a number.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum What {
    /// Ring to arena.
    Drain {
        /// Of the save.
        serial: u64,
        /// The worker's number of the save.
        save: u64,
        /// Index into its parts.
        part: usize,
    },
    /// Arena to ring.
    Fill {
        /// The lease.
        lease: u64,
        /// Index into its parts.
        part: usize,
    },
}

/// The copies of one session.
#[derive(Debug)]
pub struct Copies {
    ring: Arc<dyn Ring>,
    events: UnboundedSender<Event>,
    waiting: VecDeque<Copy>,
    in_flight: usize,
    worker: Arc<Worker>,
    clock: Arc<dyn Clock>,
    /// Since when copies are under way, and what was copied since.
    busy: Option<(Duration, u64)>,
}

// === impl Copies ===

impl Copies {
    /// None yet. Each copy ends with one [`Event::Copied`].
    pub fn new(
        ring: Arc<dyn Ring>,
        events: UnboundedSender<Event>,
        worker: Arc<Worker>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            ring,
            events,
            worker,
            clock,
            busy: None,
            waiting: VecDeque::new(),
            in_flight: 0,
        }
    }

    /// Size of the ring.
    pub fn ring_len(&self) -> u64 {
        self.ring.len()
    }

    /// Starts a copy, now or when others are over; `false`: too many wait.
    pub fn start(&mut self, copy: Copy) -> bool {
        if self.waiting.len() >= WAITING {
            return false;
        }
        self.waiting.push_back(copy);
        self.pump();
        true
    }

    /// To be called for each [`Event::Copied`]. `true`: it is over; `false`: the device was busy
    /// and it is tried again.
    pub fn ended(&mut self, copy: &Copy, result: &Result<(), DeviceError>) -> bool {
        self.in_flight -= 1;
        if matches!(result, Err(DeviceError::Busy)) {
            self.waiting.push_front(copy.clone());
            return false;
        }
        if let (Some((_, bytes)), Ok(())) = (&mut self.busy, result) {
            *bytes = bytes.saturating_add(copy.segment.len());
        }
        self.pump();
        if self.is_idle()
            && let Some((since, bytes)) = self.busy.take()
        {
            let took = self.clock.monotonic().saturating_sub(since);
            self.worker.costs.copied(bytes, took);
        }
        true
    }

    /// Starts what waits, as far as the bound allows.
    pub fn pump(&mut self) {
        while self.in_flight < IN_FLIGHT {
            let Some(copy) = self.waiting.pop_front() else {
                return;
            };
            self.in_flight += 1;
            self.busy.get_or_insert_with(|| (self.clock.monotonic(), 0));
            let events = self.events.clone();
            let Copy {
                what,
                ring_offset,
                segment,
            } = copy.clone();
            let done = Box::new(move |result| {
                // The session may be gone; then nobody waits for the copy.
                let _ = events.send(Event::Copied(copy, result));
            });
            let (map, offset, len) = (segment.map(), segment.offset(), segment.len());
            match what {
                What::Drain { .. } => self.ring.copy_out(ring_offset, map, offset, len, done),
                What::Fill { .. } => self.ring.copy_in(map, offset, ring_offset, len, done),
            }
        }
    }

    /// Nothing moves or waits to move.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.waiting.is_empty()
    }
}
