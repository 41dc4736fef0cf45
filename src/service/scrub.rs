//! Scrubbing: what is on disk is read now and then although nobody asks for it.
//!
//! # What
//! One thread reads a chunk at a time, not faster than `scrub_rate`, and not while objects are being
//! read that somebody waits for. A pass over everything begins `scrub_every` after the last one
//! began; one that a restart interrupted goes on a few minutes after the start. Which object is next,
//! and how that survives a restart, is told in `store::scrub`.
//!
//! # Errors
//! A bad object is gone from the disk by the time that it is told here. Where RAM has it, it is
//! written anew; else the snapshots that need it are forgotten, and a save of the same tokens brings
//! them back.
//!
//! # Cancellation
//! The thread holds the service only while it reads one chunk, and ends with it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Service;
use crate::store::scrub::{Scrub, ScrubMark, Scrubbed};
use crate::store::{DiskTier, ErrorKind, StoreError, Tier};
use crate::types::{Millis, ObjectId};

/// The longest sleep: so soon the end of the service is seen.
const NAP: Duration = Duration::from_millis(100);

/// How long a start does without.
const CALM: Duration = Duration::from_secs(600);

/// How often the mark is written at most.
const MARK_EVERY: Duration = Duration::from_secs(60);

/// What the thread knows.
pub(super) struct Scrubber {
    scrub: Scrub,
    mark: ScrubMark,
    /// When the next chunk may be read.
    next: Duration,
    /// When the mark was written.
    marked: Duration,
}

/// Starts the thread, if there is a disk and scrubbing is on.
pub(super) fn start(service: &Arc<Service>) -> std::io::Result<()> {
    if service.store.disk.is_none() || service.config.scrub_rate.as_u64() == 0 {
        return Ok(());
    }
    let service = Arc::downgrade(service);
    let thread = std::thread::Builder::new().name("engram-scrub".to_owned());
    thread.spawn(move || run(&service))?;
    Ok(())
}

fn run(service: &Weak<Service>) {
    let mut scrubber = None;
    loop {
        let Some(service) = service.upgrade().filter(|service| !service.stopping()) else {
            return;
        };
        let nap = match &mut scrubber {
            _ if !service.is_loaded() => NAP,
            Some(scrubber) => service.scrub_some(scrubber),
            None => match service.scrubber() {
                Ok(new) => {
                    scrubber = Some(new);
                    Duration::ZERO
                }
                Err(error) => {
                    tracing::warn!(%error, "What is on disk is not scrubbed");
                    return;
                }
            },
        };
        drop(service);
        if !nap.is_zero() {
            std::thread::sleep(nap.min(NAP));
        }
    }
}

// === impl Service ===

impl Service {
    pub(super) fn scrubber(&self) -> std::io::Result<Scrubber> {
        let now = self.clock.now();
        let known = self.store.disk.as_ref().and_then(|disk| disk.scrub_mark());
        let mark = known.unwrap_or(ScrubMark {
            format_version: 1,
            began: Millis(0),
            last: None,
            ended: None,
        });
        if let Some(ended) = mark.ended {
            self.metrics.scrub_last_pass.set(ended.0 / 1000);
        }
        let monotonic = self.clock.monotonic();
        let calm = CALM.min(self.config.scrub_every);
        let wait = match mark.last {
            Some(_) => calm,
            None => self.until_next_pass(&mark, now).max(calm),
        };
        Ok(Scrubber {
            scrub: Scrub::after(mark.last)?,
            mark,
            next: monotonic.saturating_add(wait),
            marked: monotonic,
        })
    }

    /// How long until the next pass may begin.
    fn until_next_pass(&self, mark: &ScrubMark, now: Millis) -> Duration {
        self.config
            .scrub_every
            .saturating_sub(now.since(mark.began))
    }

    /// Reads a chunk if it is time to. Returns how long there is nothing to do.
    pub(super) fn scrub_some(&self, it: &mut Scrubber) -> Duration {
        let Some(disk) = &self.store.disk else {
            return NAP;
        };
        let now = self.clock.monotonic();
        if now < it.next {
            return it.next.saturating_sub(now);
        }
        if self.promoter.is_busy() {
            return NAP;
        }
        if it.mark.last.is_none() && it.scrub.last().is_none() {
            it.mark.began = self.clock.now();
        }
        match disk.scrub(&mut it.scrub) {
            Scrubbed::Bytes(bytes) => {
                self.metrics.scrubbed_bytes.inc_by(bytes);
                let rate = self.config.scrub_rate.as_u64().max(1);
                let pause = Duration::from_secs_f64(bytes as f64 / rate as f64);
                // Time that others took is not caught up with.
                it.next = now.saturating_add(pause);
                it.mark.last = it.scrub.last();
            }
            Scrubbed::Bad(id, error) => self.scrub_failed(&id, &error),
            Scrubbed::End => {
                let now = self.clock.now();
                it.mark.last = None;
                it.mark.ended = Some(now);
                self.metrics.scrub_last_pass.set(now.0 / 1000);
                self.metrics.scrub_passes.inc();
                let wait = self.until_next_pass(&it.mark, now).max(NAP);
                it.next = self.clock.monotonic().saturating_add(wait);
                self.write_mark(disk, it);
                return Duration::ZERO;
            }
        }
        if it.mark.last.is_some() && now.saturating_sub(it.marked) >= MARK_EVERY {
            self.write_mark(disk, it);
        }
        Duration::ZERO
    }

    fn write_mark(&self, disk: &DiskTier, it: &mut Scrubber) {
        it.marked = self.clock.monotonic();
        if let Err(error) = disk.put_scrub_mark(&it.mark) {
            tracing::debug!(%error, "How far scrubbing is was not written down");
        }
    }

    fn scrub_failed(&self, id: &ObjectId, error: &StoreError) {
        self.metrics.scrub_errors.inc();
        tracing::warn!(%error, object = %id, "Scrubbing found an object that cannot be read");
        if error.kind() != ErrorKind::Data {
            // It may still be there.
            self.metrics.error("io");
            return;
        }
        self.metrics.error("data");
        self.lost_on_disk(id);
        let mut core = self.core.lock();
        if core.index.object(id).is_some() && self.store.ram.contains(id) {
            core.queue.demotions.push_back(*id);
        }
        drop(core);
        self.wake.notify_one();
    }
}
