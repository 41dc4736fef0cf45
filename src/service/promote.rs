//! From disk into RAM: threads that read objects which somebody waits for.
//!
//! # What
//! Each object is read once, however many wait. Its bytes are verified by the store before anybody
//! sees them. It joins the RAM tier if there is room in it; whoever waited gets it in any case.
//!
//! # Errors
//! A missing or bad file is a loss: the index forgets what needed it, the store has it in
//! quarantine. No room in time, or a disk that does not answer, only fails those who wait.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc::UnboundedSender;

use super::Service;
use super::room::{Reservation, footprint};
use super::session::Event;
use crate::store::{ErrorKind, Object, StoreError, Stored, Tier};
use crate::types::{ObjectId, TierKind};

/// How long a reader waits between two looks for room.
const LOOK: Duration = Duration::from_millis(5);

/// Objects that may wait to be read.
const LIMIT: usize = 1 << 18;

/// Why an object did not come into RAM.
#[derive(Copy, Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PromoteError {
    /// It is gone, or its bytes are bad.
    #[error("the object is missing or bad")]
    Lost,
    /// RAM had no room in time.
    #[error("no room in RAM")]
    NoRoom,
    /// The disk did not give it; it may still be there.
    #[error("the disk did not give it")]
    Failed,
}

type Waiter = Box<dyn FnOnce(Result<Object, PromoteError>) + Send>;

/// What the threads have to do.
#[derive(Default)]
pub struct Promoter {
    queue: Mutex<Queue>,
    ready: Condvar,
    /// Bytes a second, lately.
    speed: Mutex<f64>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<ObjectId>,
    /// Nobody waits for these: only when there is nothing else.
    idle: VecDeque<ObjectId>,
    waiting: HashMap<ObjectId, Vec<Waiter>>,
    stop: bool,
}

// === impl Queue ===

impl Queue {
    /// What is to be read next.
    fn take(&mut self) -> Option<ObjectId> {
        self.jobs.pop_front().or_else(|| {
            let object = self.idle.pop_front()?;
            self.waiting.entry(object).or_default();
            Some(object)
        })
    }
}

// === impl Promoter ===

impl std::fmt::Debug for Promoter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Promoter").finish_non_exhaustive()
    }
}

impl Promoter {
    /// Bytes a second that reading took lately; a guess before the first.
    pub fn speed(&self) -> f64 {
        let speed = *self.speed.lock();
        if speed > 0.0 { speed } else { 1e9 }
    }

    /// Whether anything is being read, or waits to be.
    pub fn is_busy(&self) -> bool {
        let queue = self.queue.lock();
        !queue.waiting.is_empty() || !queue.idle.is_empty()
    }

    /// Calls `waiter` once the object is in RAM, or why it is not.
    fn ask(&self, object: ObjectId, waiter: Waiter) {
        let mut queue = self.queue.lock();
        if queue.stop || queue.jobs.len() >= LIMIT {
            drop(queue);
            return waiter(Err(PromoteError::Failed));
        }
        match queue.waiting.get_mut(&object) {
            Some(waiting) => waiting.push(waiter),
            None => {
                queue.waiting.insert(object, vec![waiter]);
                queue.jobs.push_back(object);
                self.ready.notify_one();
            }
        }
    }

    fn ask_idly(&self, object: ObjectId) {
        let mut queue = self.queue.lock();
        if !queue.stop && queue.idle.len() < LIMIT {
            queue.idle.push_back(object);
            self.ready.notify_one();
        }
    }

    /// The threads end, and nobody waits any more.
    pub fn stop(&self) {
        let mut queue = self.queue.lock();
        queue.stop = true;
        queue.jobs.clear();
        queue.idle.clear();
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        self.ready.notify_all();
        for waiter in waiting.into_values().flatten() {
            waiter(Err(PromoteError::Failed));
        }
    }

    fn next(&self) -> Option<ObjectId> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(object) = queue.take() {
                return Some(object);
            }
            self.ready.wait(&mut queue);
        }
    }

    /// Does what one of the threads would do next; whether there was something.
    #[cfg(test)]
    pub(super) fn step(&self, service: &Service) -> bool {
        let next = self.queue.lock().take();
        if let Some(object) = &next {
            self.done(object, &service.promote_now(object));
        }
        next.is_some()
    }

    fn done(&self, object: &ObjectId, result: &Result<Object, PromoteError>) {
        let waiting = self.queue.lock().waiting.remove(object);
        for waiter in waiting.into_iter().flatten() {
            waiter(result.clone());
        }
    }

    /// Starts the threads. They end with the service.
    pub fn start(self: &Arc<Self>, service: &Arc<Service>, threads: usize) -> std::io::Result<()> {
        for _ in 0..threads {
            let (promoter, service) = (Arc::clone(self), Arc::downgrade(service));
            let thread = std::thread::Builder::new().name("engram-read".to_owned());
            thread.spawn(move || promoter.run(&service))?;
        }
        Ok(())
    }

    fn run(&self, service: &Weak<Service>) {
        while let Some(object) = self.next() {
            let Some(service) = service.upgrade() else {
                return;
            };
            let result = service.promote_now(&object);
            drop(service);
            self.done(&object, &result);
        }
    }
}

// === impl Service ===

impl Service {
    /// Lets an object come into RAM for a lease of a session.
    pub(super) fn promote_for(&self, object: ObjectId, lease: u64, to: &UnboundedSender<Event>) {
        let to = to.clone();
        let waiter = Box::new(move |result| {
            // The session may be gone; then nobody waits for the object.
            let _ = to.send(Event::Promoted {
                lease,
                object,
                result,
            });
        });
        self.promoter.ask(object, waiter);
    }

    /// Lets an object come into RAM for nobody yet, behind all that somebody waits for.
    pub(super) fn promote_idly(&self, object: ObjectId) {
        self.promoter.ask_idly(object);
    }

    /// The object, once it is in RAM.
    pub(super) async fn promote(&self, object: ObjectId) -> Result<Object, PromoteError> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let waiter = Box::new(move |result| {
            // Whoever asked may have stopped waiting.
            let _ = sender.send(result);
        });
        self.promoter.ask(object, waiter);
        receiver.await.unwrap_or(Err(PromoteError::Failed))
    }

    /// Brings an object into RAM. Blocks.
    pub(super) fn promote_now(&self, id: &ObjectId) -> Result<Object, PromoteError> {
        let Some(disk) = &self.store.disk else {
            return self.store.ram.peek(id).ok_or(PromoteError::Lost);
        };
        let start = self.clock.monotonic();
        loop {
            if let Some(object) = self.store.ram.peek(id) {
                return Ok(object);
            }
            let Some(meta) = disk.meta(id) else {
                return Err(self.not_on_disk(id));
            };
            // Room for the shards of all ranks.
            let shard = footprint(meta.pieces.iter().map(|piece| piece.bytes));
            let need = shard.saturating_mul(u64::from(meta.shards));
            let reservation = self.reserve(need).or_else(|| {
                self.make_room(need);
                self.reserve(need)
            });
            let began = self.clock.monotonic();
            let read = match &reservation {
                Some(_) => disk.get(id, &self.store.arena),
                None => Err(StoreError::ArenaFull { need }),
            };
            match read {
                Ok(object) => {
                    let took = self.clock.monotonic().saturating_sub(began);
                    self.note_speed(object.bytes(), took);
                    self.keep_in_ram(&object, reservation);
                    return Ok(object);
                }
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    let waited = self.clock.monotonic().saturating_sub(start);
                    if waited >= self.config.room_wait || self.stopping() {
                        return Err(PromoteError::NoRoom);
                    }
                    if reservation.is_some() {
                        // Free, but in pieces that are too small.
                        drop(reservation);
                        self.let_go(need);
                    }
                    std::thread::sleep(LOOK);
                }
                Err(error) => return Err(self.not_read(id, &error)),
            }
        }
    }

    /// The object joins the RAM tier, if that has room and anybody may still find it.
    fn keep_in_ram(&self, object: &Object, room: Option<Reservation>) {
        let id = &object.meta.id;
        let mut core = self.core.lock();
        if core.index.object(id).is_none() {
            return;
        }
        let room = room.into_iter().collect();
        match Reservation::spend(room, || self.store.ram.put(object)) {
            Ok(Stored::Written { .. } | Stored::AlreadyThere) => {
                let _ = core.index.set_tier(id, TierKind::Ram, true);
                self.metrics.promoted.inc();
                self.metrics.promoted_bytes.inc_by(object.bytes());
            }
            Err(error) => tracing::debug!(%error, "A promoted object does not stay in RAM"),
        }
    }

    fn not_on_disk(&self, id: &ObjectId) -> PromoteError {
        self.lost_on_disk(id);
        PromoteError::Lost
    }

    fn not_read(&self, id: &ObjectId, error: &StoreError) -> PromoteError {
        tracing::warn!(%error, object = %id, "An object could not be read");
        match error.kind() {
            ErrorKind::Data | ErrorKind::NotFound => {
                self.metrics.error("data");
                self.lost_on_disk(id);
                PromoteError::Lost
            }
            _ => {
                self.metrics.error("io");
                PromoteError::Failed
            }
        }
    }

    fn note_speed(&self, bytes: u64, took: Duration) {
        let seconds = took.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        let mut speed = self.promoter.speed.lock();
        let now = bytes as f64 / seconds;
        *speed = if *speed > 0.0 {
            0.8 * *speed + 0.2 * now
        } else {
            now
        };
    }
}
