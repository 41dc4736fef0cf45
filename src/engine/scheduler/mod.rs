//! The engine's one thread: takes requests, admits, prefills in chunks, decodes in one batch.
//!
//! # What
//!
//! A tick is: commands, the external memory's own work, admission, one prefill batch of at most
//! `chunk` tokens, one decode batch of all that run. Greedy.
//!
//! # State
//!
//! A request waits, then runs. Admission takes all that it will ever need: its slot and the pages of
//! its whole prompt and answer, so that what runs always finishes. If memory is short even after
//! eviction the request waits, and those after it with it; one held by the [`Memory`]'s gate waits
//! alone.
//!
//! # Boundaries
//!
//! States are taken at chunk ends on the [`Grid`] and where a prompt leaves what is cached; each is
//! inserted with its KV at once. In decoding the newest boundary is kept aside and inserted at the
//! end. What lies beyond the last boundary is dropped at the end.
//!
//! # Cancellation
//!
//! A client that goes away drops the other end of its request's `reply`; the next tick gives
//! everything back that the request held. What it had inserted stays cached.
//!
//! # Errors
//!
//! A [`Refusal`] goes to the client. Accounts that do not fit are reported by `/server_info`.

mod step;
#[cfg(test)]
mod tests;

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};
use tokio::sync::oneshot;

use super::batch::Grid;
use super::device_memory::DeviceMemory;
use super::memory::{Holdings, Memory, Restored};
use super::model::{MAX_TOKENS, Model, VOCAB};
use super::request::{Answer, FinishReason, Refusal, Request, Running};

/// How the scheduler works.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerConfig {
    /// Most tokens of a prefill batch.
    pub chunk: usize,
    /// Where states are taken.
    pub grid: Grid,
    /// Reuse nothing and keep nothing.
    pub no_cache: bool,
    /// Most requests that run at once.
    pub max_running: usize,
}

/// What the outside asks of the scheduler.
#[derive(Debug)]
pub enum Command {
    /// A request.
    Submit(Box<Request>),
    /// Give up the request with this `rid`; answers whether there was one.
    Abort(String, oneshot::Sender<bool>),
    /// Empty the cache; refused while requests run or wait.
    Flush(oneshot::Sender<Result<(), String>>),
    /// Everything about the engine, as JSON.
    Report(oneshot::Sender<serde_json::Value>),
    /// End.
    Stop,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Requests that arrived.
    pub requests: u64,
    /// Answers given in full.
    pub finished: u64,
    /// Requests given up.
    pub aborted: u64,
    /// Requests refused.
    pub refused: u64,
    /// Tokens of admitted prompts.
    pub prompt_tokens: u64,
    /// Those of them that were not computed.
    pub cached_tokens: u64,
    /// Those of them that were computed.
    pub prefilled_tokens: u64,
    /// Tokens of answers.
    pub generated_tokens: u64,
    /// Boundaries inserted.
    pub boundaries: u64,
    /// Boundaries whose state found no slot.
    pub states_dropped: u64,
}

/// The scheduler.
pub struct Scheduler {
    config: SchedulerConfig,
    model: Model,
    device: DeviceMemory,
    memory: Box<dyn Memory>,
    commands: Receiver<Command>,
    waiting: VecDeque<Request>,
    running: Vec<Running>,
    rids: HashSet<String>,
    counts: Counts,
}

// === impl Scheduler ===

impl Scheduler {
    /// A scheduler that will take its commands from `commands`.
    pub fn new(
        config: SchedulerConfig,
        model: Model,
        device: DeviceMemory,
        memory: Box<dyn Memory>,
        commands: Receiver<Command>,
    ) -> Self {
        Self {
            config,
            model,
            device,
            memory,
            commands,
            waiting: VecDeque::new(),
            running: Vec::new(),
            rids: HashSet::new(),
            counts: Counts::default(),
        }
    }

    /// Works until [`Command::Stop`] comes or all senders are gone.
    pub fn run(mut self) {
        while self.take_commands() {
            self.tick();
        }
        self.stop();
    }

    /// One round of work. Returns whether any token was computed.
    pub fn tick(&mut self) -> bool {
        self.drop_abandoned();
        self.memory.tick(&mut self.device);
        self.admit();
        let prefilled = self.prefill();
        let decoded = self.decode();
        prefilled || decoded
    }

    /// Checks all accounts.
    ///
    /// # Errors
    ///
    /// What does not fit, in words.
    pub fn sanity_check(&self) -> Result<(), String> {
        let Holdings {
            mut slots,
            mut pages,
        } = self.memory.holdings();
        for running in &self.running {
            slots.push(running.slot);
            slots.extend(running.tracked.map(|(_, slot)| slot));
            pages.extend(running.own_pages(self.device.kv.page_size()));
        }
        self.device.sanity_check(&slots, &pages)
    }

    /// Waits for work or for the memory's next tick, and takes all commands that have come.
    /// Returns false when the scheduler is to end.
    fn take_commands(&mut self) -> bool {
        if self.running.is_empty() {
            let mut wait = self.memory.poll_interval();
            if !self.waiting.is_empty() {
                wait = wait.min(Duration::from_millis(1));
            }
            match self.commands.recv_timeout(wait) {
                Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
                Ok(command) => self.handle(command),
                Err(RecvTimeoutError::Timeout) => return true,
            }
        }
        self.take_waiting()
    }

    /// Takes all commands that have come, without waiting. Returns false when the scheduler is to
    /// end.
    pub(in crate::engine) fn take_waiting(&mut self) -> bool {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return false,
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Submit(request) => self.enqueue(*request),
            Command::Abort(rid, reply) => {
                let found = self.abort(|request| request.info.rid == rid);
                // Whoever asked may have gone.
                let _gone = reply.send(found);
            }
            Command::Flush(reply) => {
                let _gone = reply.send(self.flush());
            }
            Command::Report(reply) => {
                let _gone = reply.send(self.report());
            }
            Command::Stop => {}
        }
    }

    fn enqueue(&mut self, request: Request) {
        self.counts.requests += 1;
        if let Err(refusal) = self.check(&request) {
            self.counts.refused += 1;
            let _gone = request.reply.send(Err(refusal));
            return;
        }
        self.rids.insert(request.info.rid.clone());
        self.memory.enqueued(&request.info, &mut self.device);
        self.waiting.push_back(request);
    }

    fn check(&self, request: &Request) -> Result<(), Refusal> {
        request.info.check(&request.sampling)?;
        let needed = request.most_tokens().div_ceil(self.device.kv.page_size());
        let total = self.device.page_account().total;
        if needed > total {
            return Err(Refusal::TooLarge { needed, total });
        }
        if self.rids.contains(&request.info.rid) {
            return Err(Refusal::DuplicateRid(request.info.rid.clone()));
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), String> {
        if !self.running.is_empty() || !self.waiting.is_empty() {
            return Err("requests are running or waiting".to_owned());
        }
        self.memory.flush(&mut self.device);
        self.device.flush().map_err(|error| error.to_string())
    }

    fn drop_abandoned(&mut self) {
        if self.abort(|request| request.reply.is_closed()) {
            tracing::debug!("Clients went away");
        }
    }

    /// Gives up all requests that match; returns whether there was any.
    fn abort(&mut self, matches: impl Fn(&Request) -> bool) -> bool {
        let mut found = false;
        while let Some(index) = self.waiting.iter().position(&matches) {
            let Some(request) = self.waiting.remove(index) else {
                break;
            };
            let restored = self.memory.aborted(&request.info, &mut self.device);
            self.answer(request, Vec::new(), FinishReason::Abort, 0, restored);
            found = true;
        }
        while let Some(index) = self
            .running
            .iter()
            .position(|running| matches(&running.request))
        {
            self.finish(index, FinishReason::Abort);
            found = true;
        }
        found
    }

    /// Sends an answer and forgets the request.
    fn answer(
        &mut self,
        request: Request,
        output_ids: Vec<u32>,
        finish_reason: FinishReason,
        cached_tokens: usize,
        restored: Option<Restored>,
    ) {
        match finish_reason {
            FinishReason::Abort => self.counts.aborted += 1,
            FinishReason::Length | FinishReason::Stop(_) | FinishReason::Text(_) => {
                self.counts.finished += 1;
            }
        }
        self.counts.generated_tokens += output_ids.len() as u64;
        self.rids.remove(&request.info.rid);
        let prompt_tokens = request.info.prompt.len();
        let answer = Answer {
            output_ids,
            finish_reason,
            prompt_tokens,
            cached_tokens,
            restored,
        };
        let _gone = request.reply.send(Ok(answer));
    }

    fn stop(mut self) {
        self.abort(|_| true);
        self.memory.stopping(&mut self.device);
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(request) = command {
                let _gone = request.reply.send(Err(Refusal::Stopping));
            }
        }
    }

    fn report(&self) -> serde_json::Value {
        let Self {
            config,
            model,
            device,
            ..
        } = self;
        let SchedulerConfig {
            chunk,
            grid,
            no_cache,
            max_running,
        } = *config;
        let Grid { step, exact_end } = grid;
        let digest: String = model
            .digest()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let sanity = self.sanity_check();
        serde_json::json!({
            "model": {
                "name": model.config().name,
                "weights_digest": digest,
                "parameters": model.parameters(),
                "vocab_size": VOCAB,
                "max_tokens": MAX_TOKENS,
                "temporal_dtype": model.config().temporal.name(),
                "state_bytes": device.state.packed_len(),
                "kv_bytes_per_token": device.kv.token_bytes(),
            },
            "page_size": device.kv.page_size(),
            "layout": device.kv.layout().name(),
            "chunk": chunk,
            "state_grid": step,
            "exact_end": exact_end,
            "no_cache": no_cache,
            "max_running": max_running,
            "running": self.running.len(),
            "waiting": self.waiting.len(),
            "slots": device.slot_account(),
            "pages": device.page_account(),
            "cache_nodes": device.cache().len(),
            "evicted": device.evicted(),
            "counts": self.counts,
            "sanity_check": sanity.as_ref().err().map_or("ok", String::as_str),
            "memory": self.memory.report(),
        })
    }
}
