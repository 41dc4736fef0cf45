//! The steps of a tick: admission, prefill, decode, boundaries, the end of a request.

use super::Scheduler;
use crate::engine::cache::{Match, NodeId};
use crate::engine::ids::{PageId, SlotId};
use crate::engine::memory::{Boundary, Gate};
use crate::engine::model::{Predicted, SeqChunk};
use crate::engine::request::{FinishReason, Request, RequestInfo, Running};

/// What a request starts with.
struct Start {
    found: Match,
    slot: SlotId,
    pages: Vec<PageId>,
}

// === impl Scheduler ===

impl Scheduler {
    /// Starts waiting requests, in order, while there is memory for them.
    pub(super) fn admit(&mut self) {
        let mut index = 0;
        while self.running.len() < self.config.max_running {
            let Some(request) = self.waiting.get(index) else {
                break;
            };
            if self.memory.gate(&request.info, &mut self.device) == Gate::Hold {
                index += 1;
                continue;
            }
            let Some(request) = self.waiting.remove(index) else {
                break;
            };
            let Some(start) = self.start(&request.info, request.most_tokens()) else {
                self.waiting.insert(index, request);
                break;
            };
            self.memory
                .admitted(&request.info, &start.found, &mut self.device);
            self.launch(request, start);
        }
    }

    /// Takes the memory that a request needs, or nothing.
    fn start(&mut self, info: &RequestInfo, most_tokens: usize) -> Option<Start> {
        let found = if self.config.no_cache {
            Match::default()
        } else {
            // The last token is computed in any case: it predicts the first of the answer.
            let limit = info.prompt.len().saturating_sub(1);
            self.device
                .match_prefix(&info.namespace, &info.prompt, limit)
        };
        let size = self.device.kv.page_size();
        let own = most_tokens.div_ceil(size) - found.boundary / size;
        if let Some(node) = found.node {
            self.device.lock(node);
        }
        if let Some(slot) = self.first_slot(&found, own) {
            if let Some(own) = self.device.take_pages(own) {
                let cached = found
                    .node
                    .and_then(|node| self.device.cache().pages_to(node));
                let mut pages = cached.unwrap_or_default();
                pages.extend(own);
                return Some(Start { found, slot, pages });
            }
            self.device.release_slot(slot);
        }
        if let Some(node) = found.node {
            self.device.unlock(node);
        }
        None
    }

    /// A slot with the state that a request starts from, if it can have `own` pages too.
    fn first_slot(&mut self, found: &Match, own: usize) -> Option<SlotId> {
        if own > self.device.available_pages() {
            return None;
        }
        let Some((node, from)) = found.node.zip(found.slot) else {
            let slot = self.device.take_slot()?;
            self.device.state.clear(slot);
            return Some(slot);
        };
        self.device.pin_state(node);
        let slot = self.device.take_slot();
        self.device.unpin_state(node);
        match slot {
            Some(slot) => {
                self.device.state.copy(from, slot);
                Some(slot)
            }
            // Every other slot is in use: this request goes on in the cached state itself.
            None => self.device.take_state(node),
        }
    }

    fn launch(&mut self, request: Request, start: Start) {
        let Start { found, slot, pages } = start;
        let prompt = request.info.prompt.len();
        let branch = self.config.grid.floor(found.kv_tokens);
        self.counts.prompt_tokens += prompt as u64;
        self.counts.cached_tokens += found.boundary as u64;
        self.running.push(Running {
            tokens: request.info.prompt.clone(),
            request,
            done: found.boundary,
            slot,
            pages,
            protected: found.boundary,
            node: found.node,
            cached: found.boundary,
            branch: (branch > found.boundary && branch <= prompt).then_some(branch),
            tracked: None,
            ended: None,
        });
    }

    /// Computes the next chunks of prompts, `config.chunk` tokens in all. Returns whether any.
    pub(super) fn prefill(&mut self) -> bool {
        let grid = self.config.grid;
        let mut budget = self.config.chunk;
        let mut ends = Vec::new();
        for (index, running) in self
            .running
            .iter()
            .enumerate()
            .filter(|(_, r)| r.prefilling())
        {
            if budget == 0 {
                break;
            }
            let (done, prompt) = (running.done, running.prompt_len());
            let end = if self.config.no_cache {
                prompt.min(done + budget)
            } else {
                grid.chunk_end(done, prompt, running.branch, budget)
            };
            budget -= end - done;
            ends.push((index, end));
        }
        if ends.is_empty() {
            return false;
        }
        let next = self.forward(&ends);
        for ((index, end), next) in ends.iter().zip(next) {
            let Some(running) = self.running.get_mut(*index) else {
                continue;
            };
            self.counts.prefilled_tokens += (end - running.done) as u64;
            running.done = *end;
            let prompt = running.prompt_len();
            if *end == prompt
                && running.request.sampling.max_new_tokens > 0
                && let Some(next) = next
            {
                running.push(next);
            }
            if !self.config.no_cache && grid.is_boundary(*end, prompt, running.branch) {
                self.checkpoint(*index);
            }
        }
        self.finish_complete();
        true
    }

    /// Computes one token of each request that answers. Returns whether there was any.
    pub(super) fn decode(&mut self) -> bool {
        let deciding = self
            .running
            .iter()
            .enumerate()
            .filter(|(_, r)| !r.prefilling());
        let ends: Vec<(usize, usize)> = deciding.map(|(index, r)| (index, r.done + 1)).collect();
        if ends.is_empty() {
            return false;
        }
        let next = self.forward(&ends);
        let grid = self.config.grid;
        for ((index, end), next) in ends.iter().zip(next) {
            let Some(running) = self.running.get_mut(*index) else {
                continue;
            };
            running.done = *end;
            if let Some(next) = next {
                running.push(next);
            }
            let tracks = !self.config.no_cache && !grid.exact_end;
            if tracks && end.is_multiple_of(grid.step) {
                self.track(*index);
            }
        }
        self.finish_complete();
        true
    }

    /// Computes tokens `[done, end)` of some requests.
    fn forward(&mut self, ends: &[(usize, usize)]) -> Vec<Option<Predicted>> {
        let chunk = |(index, end): &(usize, usize)| {
            let running = self.running.get(*index)?;
            Some(SeqChunk {
                tokens: running.tokens.get(running.done..*end)?,
                start: running.done,
                slot: running.slot,
                pages: &running.pages,
                predict: *end == running.tokens.len(),
                logprobs: running.request.sampling.logprobs,
            })
        };
        let chunks: Vec<SeqChunk<'_>> = ends.iter().filter_map(chunk).collect();
        debug_assert_eq!(chunks.len(), ends.len());
        self.model
            .forward(&mut self.device.state, &mut self.device.kv, &chunks)
    }

    /// Keeps a copy of a request's state aside, at a boundary reached in decoding.
    fn track(&mut self, index: usize) {
        let Some(running) = self.running.get_mut(index) else {
            return;
        };
        let kept = running.tracked.take().map(|(_, slot)| slot);
        match kept.or_else(|| self.device.take_slot()) {
            Some(slot) => {
                self.device.state.copy(running.slot, slot);
                running.tracked = Some((running.done, slot));
            }
            None => self.counts.states_dropped += 1,
        }
    }

    /// Inserts a running request's KV up to `done` with a copy of its state there.
    fn checkpoint(&mut self, index: usize) {
        let Some(running) = self.running.get(index) else {
            return;
        };
        let (boundary, from) = (running.done, running.slot);
        let Some(node) = self.insert(index, boundary) else {
            return;
        };
        if self.device.cache().state_of(node).is_none() {
            match self.device.take_slot() {
                Some(slot) => {
                    self.device.state.copy(from, slot);
                    self.device.set_state(node, slot);
                }
                None => self.counts.states_dropped += 1,
            }
        }
        self.announce(index, node, boundary);
    }

    /// Inserts a request's KV up to a boundary and moves its lock there.
    fn insert(&mut self, index: usize, boundary: usize) -> Option<NodeId> {
        let size = self.device.kv.page_size();
        let running = self.running.get_mut(index)?;
        let namespace = &running.request.info.namespace;
        let tokens = running.tokens.get(..boundary)?;
        let own = running
            .pages
            .get(running.protected / size..boundary / size)?;
        let stored = match self
            .device
            .insert(namespace, tokens, running.protected, own)
        {
            Ok(stored) => stored,
            Err(error) => {
                tracing::error!(%error, boundary, "A boundary could not be inserted");
                return None;
            }
        };
        self.device.lock(stored.node);
        if let Some(old) = running.node.replace(stored.node) {
            self.device.unlock(old);
        }
        running.pages.splice(..boundary / size, stored.pages);
        running.protected = boundary;
        Some(stored.node)
    }

    fn announce(&mut self, index: usize, node: NodeId, boundary: usize) {
        self.counts.boundaries += 1;
        let Some(running) = self.running.get(index) else {
            return;
        };
        let Some(tokens) = running.tokens.get(..boundary) else {
            return;
        };
        let at = Boundary { node, tokens };
        self.memory
            .inserted(&running.request.info, at, &mut self.device);
    }

    /// Ends every request whose answer is complete.
    fn finish_complete(&mut self) {
        let mut index = 0;
        while let Some(running) = self.running.get(index) {
            match running.finish_reason() {
                Some(reason) => self.finish(index, reason),
                None => index += 1,
            }
        }
    }

    /// Ends a request: inserts its last boundary, unless it is given up, and frees what it holds.
    pub(super) fn finish(&mut self, index: usize, reason: FinishReason) {
        let mut donated = None;
        if reason != FinishReason::Abort && !self.config.no_cache {
            donated = self.insert_last(index);
        }
        let running = self.running.remove(index);
        // What was given up is told, too, to its last token, as SGLang's cache is.
        let restored = self.memory.finished(
            &running.request.info,
            &running.tokens,
            reason,
            &mut self.device,
        );
        let own = running.own_pages(self.device.kv.page_size()).to_vec();
        self.device.release_pages(own);
        let tracked = running.tracked.map(|(_, slot)| slot);
        for slot in [Some(running.slot), tracked].into_iter().flatten() {
            if donated != Some(slot) {
                self.device.release_slot(slot);
            }
        }
        if let Some(node) = running.node {
            self.device.unlock(node);
        }
        let output = running.output().to_vec();
        self.answer(running.request, output, reason, running.cached, restored);
    }

    /// Inserts the boundary that a complete request ends with, and gives its slot to the cache.
    /// Returns the slot given.
    fn insert_last(&mut self, index: usize) -> Option<SlotId> {
        let running = self.running.get(index)?;
        let (boundary, slot) = if self.config.grid.exact_end {
            (running.done, running.slot)
        } else {
            running.tracked?
        };
        let node = self.insert(index, boundary)?;
        let missing = self.device.cache().state_of(node).is_none();
        let donated = (missing && self.device.set_state(node, slot)).then_some(slot);
        self.announce(index, node, boundary);
        donated
    }
}
