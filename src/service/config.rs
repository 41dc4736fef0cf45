//! Settings of the service.

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

/// Settings of the service. Every field has a safe default.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Unix socket on which workers pass descriptors. Default: `/run/engram/fd.sock`.
    pub fd_socket: PathBuf,
    /// Users besides the daemon's own who may attach over a Unix socket. Default: none.
    pub allow_uids: Vec<u32>,
    /// Token that workers must show over TCP; without one, nobody attaches over TCP. Default: none.
    pub token: Option<String>,
    /// How often both ends of a session's stream say something. Default: `1s`.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// Workers attached at once. Default: 64.
    pub max_workers: usize,
    /// Tokens of one request; a longer one is not saved. Default: 2097152.
    pub max_prompt_tokens: u32,
    /// Tokens of all open requests of one worker. Default: 67108864.
    pub max_session_tokens: u64,
    /// Open requests of one worker. Default: 16384.
    pub max_requests: usize,
    /// Capacity of the channel's area worker -> daemon. Default: `16 MiB`.
    pub up_capacity: ByteSize,
    /// Capacity of the channel's area daemon -> worker. Default: `1 MiB`.
    pub down_capacity: ByteSize,
    /// A lease without any fill or release for so long is taken back. Default: `30s`.
    #[serde(with = "humantime_serde")]
    pub lease_timeout: Duration,
    /// A save without any drain for so long is dropped. Default: `60s`.
    #[serde(with = "humantime_serde")]
    pub save_timeout: Duration,
    /// How long an offer waits for room in RAM while snapshots are written down. Default: `2s`.
    #[serde(with = "humantime_serde")]
    pub room_wait: Duration,
    /// A snapshot goes to disk so long after it became visible. Default: `10s`.
    #[serde(with = "humantime_serde")]
    pub write_after: Duration,
    /// How long a restore by name keeps its snapshot in RAM. Default: `5m`.
    #[serde(with = "humantime_serde")]
    pub pin_for: Duration,
    /// What `shutdown` may take to write down what is pending. Default: `20s`.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
    /// Part of the RAM tier in use above which room is made in the background. Default: 0.9.
    pub ram_high: f64,
    /// Down to which room is made. Default: 0.8.
    pub ram_low: f64,
    /// Bytes of the most recent snapshots that a start brings into RAM. Default: `4 GiB`.
    pub preload: ByteSize,
    /// Threads that read from disk. Default: 4.
    pub read_threads: usize,
    /// A restore that would save fewer tokens is skipped. Default: 1.
    pub min_restore_tokens: u32,
    /// Prefill speed in tokens a second: a restore predicted to be slower is skipped. Default: none,
    /// nothing is skipped.
    pub prefill_tokens_per_second: Option<f64>,
    /// Conversations kept in memory without any stored snapshot. Default: 10000.
    pub max_idle_conversations: usize,
}

/// What is wrong with a [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("service.{field}: {problem}")]
pub struct ConfigError {
    /// The field.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: String,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Self {
            fd_socket: PathBuf::from("/run/engram/fd.sock"),
            allow_uids: Vec::new(),
            token: None,
            heartbeat: Duration::from_secs(1),
            max_workers: 64,
            max_prompt_tokens: 2 << 20,
            max_session_tokens: 64 << 20,
            max_requests: 16 << 10,
            up_capacity: ByteSize::mib(16),
            down_capacity: ByteSize::mib(1),
            lease_timeout: Duration::from_secs(30),
            save_timeout: Duration::from_secs(60),
            room_wait: Duration::from_secs(2),
            write_after: Duration::from_secs(10),
            pin_for: Duration::from_secs(300),
            drain_timeout: Duration::from_secs(20),
            ram_high: 0.9,
            ram_low: 0.8,
            preload: ByteSize::gib(4),
            read_threads: 4,
            min_restore_tokens: 1,
            prefill_tokens_per_second: None,
            max_idle_conversations: 10_000,
        }
    }
}

impl Config {
    /// Every problem at once; empty when all is well.
    pub fn validate(&self) -> Vec<ConfigError> {
        let mut out = Vec::new();
        let mut check = |ok: bool, field, problem: &str| {
            if !ok {
                out.push(ConfigError { field, problem: problem.to_owned() });
            }
        };
        let path = self.fd_socket.as_os_str().len();
        check(path > 0 && path < 100, "fd_socket", "must be a path shorter than 100 bytes");
        let token = self.token.as_ref().is_none_or(|token| token.len() >= 16);
        check(token, "token", "must have at least 16 characters");
        let beat = self.heartbeat >= Duration::from_millis(10);
        check(beat && self.heartbeat <= Duration::from_secs(60), "heartbeat", "10ms to 60s");
        check(self.max_workers > 0, "max_workers", "must not be 0");
        check(self.max_prompt_tokens > 0, "max_prompt_tokens", "must not be 0");
        check(self.max_session_tokens > 0, "max_session_tokens", "must not be 0");
        check(self.max_requests > 0, "max_requests", "must not be 0");
        let capacity = |size: ByteSize| {
            (64 << 10..=1 << 30).contains(&size.as_u64()) && size.as_u64().is_multiple_of(4096)
        };
        let problem = "64 KiB to 1 GiB, a multiple of 4 KiB";
        check(capacity(self.up_capacity), "up_capacity", problem);
        check(capacity(self.down_capacity), "down_capacity", problem);
        check(!self.lease_timeout.is_zero(), "lease_timeout", "must not be 0");
        check(!self.save_timeout.is_zero(), "save_timeout", "must not be 0");
        let marks = 0.0 < self.ram_low && self.ram_low <= self.ram_high && self.ram_high <= 1.0;
        check(marks, "ram_high", "0 < ram_low <= ram_high <= 1 must hold");
        check((1..=64).contains(&self.read_threads), "read_threads", "1 to 64");
        let speed = self.prefill_tokens_per_second.is_none_or(|speed| speed > 0.0);
        check(speed, "prefill_tokens_per_second", "must be above 0");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_is_valid() {
        assert_eq!(Config::default().validate(), []);
    }

    #[test]
    fn every_problem_is_told_at_once() {
        let config = Config {
            max_workers: 0,
            ram_low: 0.95,
            token: Some("short".into()),
            read_threads: 0,
            ..Config::default()
        };
        let fields: Vec<_> = config.validate().into_iter().map(|problem| problem.field).collect();
        assert_eq!(fields, ["token", "max_workers", "ram_high", "read_threads"]);
    }
}
