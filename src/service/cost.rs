//! What a worker's prefill and its copies take, learned from what it does.
//!
//! # What
//! *Prefill*: from the answer that a prompt is not stored, or from a state of it, to the next state
//! of the same prompt so many tokens later. Whatever else the worker does meanwhile makes it look
//! slower, so what counts is a fast quarter of what was seen lately. States beyond the prompt come
//! with generation and do not count. *Copies*: bytes into and out of the ring while any copy was
//! under way; the usual speed counts.
//!
//! # Errors
//! What was not seen often enough is not known, and nothing is predicted from it.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;

use super::policy;

/// Samples that are remembered.
const KEPT: usize = 64;
/// Samples without which nothing is known.
const ENOUGH: usize = 4;
/// Fewer tokens say little about a speed.
const MIN_TOKENS: u32 = 256;
/// Fewer bytes do neither.
const MIN_BYTES: u64 = 1 << 20;
/// Messages that were read together say nothing about the time between them.
const MIN_TIME: Duration = Duration::from_millis(1);

/// Speeds seen lately.
#[derive(Debug, Default)]
struct Window(VecDeque<f64>);

/// What one worker takes for prefill and copies.
#[derive(Debug, Default)]
pub struct Costs {
    prefill: Mutex<Window>,
    copies: Mutex<Window>,
}

/// A state of a prompt that the worker had, or had not to compute.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    /// Its tokens.
    pub boundary: u32,
    /// When it was there.
    pub at: Duration,
    /// Tokens of the prompt.
    pub prompt: u32,
}

/// Bytes of a model that a restore moves.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Sizes {
    /// Of a state.
    pub state: u64,
    /// Of a token's KV.
    pub row: u64,
}

// === impl Window ===

impl Window {
    fn add(&mut self, speed: f64) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(speed);
    }

    /// The speed that this part of the samples does not exceed.
    fn quantile(&self, part: f64) -> Option<f64> {
        if self.0.len() < ENOUGH {
            return None;
        }
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let at = (sorted.len() - 1) as f64 * part;
        sorted.get(at as usize).copied()
    }
}

// === impl Costs ===

impl Costs {
    /// A prompt has a state at `boundary` now. `after`: what it had before. Returns what the next one
    /// is compared with.
    pub fn state(&self, after: Mark, boundary: u32, now: Duration) -> Mark {
        let tokens = boundary.saturating_sub(after.boundary);
        let took = now.saturating_sub(after.at);
        if tokens >= MIN_TOKENS && took >= MIN_TIME && boundary <= after.prompt {
            let speed = f64::from(tokens) / took.as_secs_f64();
            self.prefill.lock().add(speed);
        }
        Mark {
            boundary: boundary.max(after.boundary),
            at: now,
            ..after
        }
    }

    /// So many bytes were copied while copies were under way for so long.
    pub fn copied(&self, bytes: u64, took: Duration) {
        if bytes >= MIN_BYTES && !took.is_zero() {
            self.copies.lock().add(bytes as f64 / took.as_secs_f64());
        }
    }

    /// Tokens a second of prefill, if that is known.
    pub fn prefill(&self) -> Option<f64> {
        self.prefill.lock().quantile(0.75)
    }

    /// Bytes a second of copies; a guess before it is known.
    pub fn copies(&self) -> f64 {
        let known = self.copies.lock().quantile(0.5);
        known.unwrap_or(policy::COPY_BYTES_PER_SECOND)
    }
}

/// Fewest tokens of which a restore, at so many seconds a byte, is faster than their prefill; `None`
/// if it never is.
pub fn break_even(sizes: Sizes, prefill: f64, seconds_a_byte: f64) -> Option<u64> {
    let fixed = policy::OVERHEAD.as_secs_f64() + sizes.state as f64 * seconds_a_byte;
    let gain = 1.0 / prefill - sizes.row as f64 * seconds_a_byte;
    (gain > 0.0).then(|| (fixed / gain).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(boundary: u32, millis: u64) -> Mark {
        Mark {
            boundary,
            at: Duration::from_millis(millis),
            prompt: 100_000,
        }
    }

    #[test]
    fn prefill_is_learned_from_states_of_a_prompt_and_of_nothing_else() {
        let costs = Costs::default();
        let mut last = mark(0, 0);
        for chunk in 1..=4_u32 {
            assert_eq!(costs.prefill(), None);
            let at = Duration::from_millis(u64::from(chunk) * 100);
            last = costs.state(last, chunk * 1000, at);
        }
        assert_eq!(costs.prefill(), Some(10_000.0));
        // Read together, too short, beyond the prompt: no samples.
        last = costs.state(last, 9000, last.at);
        last = costs.state(last, 9100, last.at + Duration::from_secs(1));
        let late = last.at + Duration::from_secs(1);
        let last = costs.state(
            Mark {
                prompt: 9100,
                ..last
            },
            10_000,
            late,
        );
        assert_eq!((last.boundary, last.at), (10_000, late));
        assert_eq!(costs.prefill(), Some(10_000.0));
        // Slow ones, while others run, do not hide what it can do.
        for _ in 0..8 {
            costs.state(mark(0, 0), 1000, Duration::from_secs(1));
        }
        for _ in 0..4 {
            costs.state(mark(0, 0), 1000, Duration::from_millis(50));
        }
        assert_eq!(costs.prefill(), Some(10_000.0));
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let costs = Costs::default();
        assert_eq!(costs.copies(), policy::COPY_BYTES_PER_SECOND);
        for _ in 0..100 {
            costs.copied(1 << 30, Duration::from_secs(1));
        }
        assert_eq!(costs.copies(), f64::from(1 << 30));
        costs.copied(1, Duration::from_secs(1));
        for _ in 0..KEPT {
            costs.copied(1 << 31, Duration::from_secs(1));
        }
        assert_eq!(costs.copies(), f64::from(1 << 30) * 2.0);
    }

    #[test]
    fn a_restore_of_more_than_the_break_even_is_faster() {
        let sizes = Sizes {
            state: 57 << 20,
            row: 16 << 10,
        };
        let second = |tokens: u64, a_byte: f64| {
            let bytes = (sizes.state + tokens * sizes.row) as f64;
            policy::OVERHEAD.as_secs_f64() + bytes * a_byte
        };
        for (prefill, a_byte) in [(50_000.0, 1.0 / 50e9), (50_000.0, 1.0 / 1e9)] {
            let even = break_even(sizes, prefill, a_byte).unwrap();
            assert!(second(even, a_byte) <= even as f64 / prefill);
            assert!(second(even - 1, a_byte) > (even - 1) as f64 / prefill);
        }
        assert_eq!(break_even(sizes, 100_000.0, 1.0 / 1e9), None);
    }
}
