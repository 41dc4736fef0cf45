//! A daemon with an honest worker, beside which others may misbehave.

use serde_json::json;

use super::daemon::{Daemon, Knobs};
use super::wait_for;
use super::worker::{Worker, prompt};

/// Tokens of the honest worker's conversation.
pub const TOKENS: usize = 1500;

/// A daemon, an honest worker, and what it saved.
pub struct Scene {
    /// The daemon.
    pub daemon: Daemon,
    /// The honest worker.
    pub honest: Worker,
    /// Its conversation.
    pub tokens: Vec<u32>,
    arena: f64,
}

impl Scene {
    /// Starts all of it. Nothing goes to disk by itself.
    pub fn new(knobs: Knobs) -> Scene {
        let knobs = [&[("service.write_after", "1h".into())], knobs].concat();
        let daemon = Daemon::start(&knobs);
        let mut honest = Worker::attach(&daemon);
        let tokens = prompt(1, TOKENS);
        honest.turn("honest", &tokens, TOKENS as u32);
        let least = TOKENS as f64 * honest.model.row_bytes() as f64;
        let arena = wait_for("the honest worker's bytes", || {
            Some(daemon.metric("engram_arena_used_bytes")).filter(|used| *used >= least)
        });
        Scene {
            daemon,
            honest,
            tokens,
            arena,
        }
    }

    /// Another worker of the same model.
    pub fn liar(&self) -> Worker {
        Worker::attach(&self.daemon)
    }

    /// The honest worker still gets its own bytes.
    pub fn honest_is_served(&mut self) {
        let got = self.honest.restore(&self.tokens).unwrap();
        assert_eq!(got.boundary, TOKENS as u32);
    }

    /// Only the honest worker and what it saved are left; and that can go, so nobody holds it.
    pub fn all_came_back(mut self) {
        self.honest_is_served();
        self.wait_for_level("engram_sessions", 1.0);
        self.wait_for_level("engram_arena_used_bytes", self.arena);
        let whole = serde_json::json!({ "conversation_id": "honest", "whole": true });
        let answer = self.daemon.post("/delete_snapshot", &whole);
        assert_eq!(answer.status, 200, "{}", answer.text());
        self.wait_for_level("engram_arena_used_bytes", 0.0);
        assert_eq!(self.honest.restore(&self.tokens), None);
        assert_eq!(self.daemon.get("/readyz").status, 200);
        assert!(self.daemon.process().alive());
    }

    /// Waits until a metric has this value.
    pub fn wait_for_level(&self, metric: &str, level: f64) {
        wait_for(&format!("{metric} to be {level}"), || {
            (self.daemon.metric(metric) == level).then_some(())
        });
    }
}

/// Only what is asked for comes into RAM, so that everything is read from disk.
const KNOBS: &[(&str, &str)] = &[("service.preload", "0 B"), ("service.write_after", "1h")];

/// A daemon that brings only what is asked for into RAM, and writes only when told to.
pub fn start() -> Daemon {
    let knobs: Vec<_> = KNOBS
        .iter()
        .map(|(key, value)| (*key, (*value).into()))
        .collect();
    Daemon::start(&knobs)
}

/// Saves a conversation durably.
pub fn keep(daemon: &Daemon, worker: &mut Worker, name: &str, tokens: &[u32], boundary: u32) {
    worker.turn(name, tokens, boundary);
    let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": name }));
    assert_eq!(answer.status, 200, "{name}: {}", answer.text());
}
