//! Settings of the service.

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::limits::Limits;
use super::saving::Saving;
use crate::types::TransferMode;

/// Settings of the service. Every field has a safe default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Unix socket on which workers pass descriptors. Default: `/run/engram/fd.sock`.
    pub fd_socket: PathBuf,
    /// Users besides the daemon's own who may attach over a Unix socket. Default: none.
    pub allow_uids: Vec<u32>,
    /// File with the token that workers must show over TCP: one line of 16 to 4096 visible ASCII
    /// characters. Without one, nobody attaches over TCP. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// Transfer modes that workers may get: `ipc` (the daemon copies from and to their rings) and
    /// `engine` (they copy themselves, by way of host memory). Default: both.
    pub modes: Vec<TransferMode>,
    /// Threads that copy between host memory of workers (all of mode `engine`) and the RAM tier; half of
    /// the processors at most. Default: 8.
    pub copy_threads: usize,
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
    /// Bytes a second at most that are read from disk only to verify them; 0: nothing is. Default:
    /// `8 MiB`.
    pub scrub_rate: ByteSize,
    /// From the start of one pass over everything on disk to the start of the next. Default: `7days`.
    #[serde(with = "humantime_serde")]
    pub scrub_every: Duration,
    /// A restore that would save fewer tokens is skipped. Default: 1.
    pub min_restore_tokens: u32,
    /// Prefill speed in tokens a second: a restore predicted to be slower is skipped. Default:
    /// none, nothing is skipped.
    pub prefill_tokens_per_second: Option<f64>,
    /// Where that is not set: take the speed that each worker was seen to have. Default: `false`.
    pub learn_prefill: bool,
    /// Conversations kept in memory without any stored snapshot. Default: 10000.
    pub max_idle_conversations: usize,
    /// A start with fewer snapshots reads all manifests and looks at all files; one with as many or
    /// more trusts the catalog. Default: 1000.
    pub catalog_from: usize,
    /// Section `[service.saving]`: which states go to disk.
    pub saving: Saving,
    /// Section `[service.limits]`: what one namespace may hold.
    pub limits: Limits,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Self {
            fd_socket: PathBuf::from("/run/engram/fd.sock"),
            allow_uids: Vec::new(),
            token_file: None,
            modes: TransferMode::ALL.to_vec(),
            copy_threads: 8,
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
            scrub_rate: ByteSize::mib(8),
            scrub_every: Duration::from_secs(7 * 24 * 3600),
            min_restore_tokens: 1,
            prefill_tokens_per_second: None,
            learn_prefill: false,
            max_idle_conversations: 10_000,
            catalog_from: 1000,
            saving: Saving::default(),
            limits: Limits::default(),
        }
    }
}

impl Config {
    /// Adds every problem of this section to `problems`, each as `service.key: what is wrong`.
    pub fn validate(&self, problems: &mut Vec<String>) {
        let mut check = |ok: bool, field: &str, problem: &str| {
            if !ok {
                problems.push(format!("service.{field}: {problem}"));
            }
        };
        let path = self.fd_socket.as_os_str().len();
        let absolute = self.fd_socket.is_absolute();
        check(
            absolute && path < 100,
            "fd_socket",
            "not an absolute path below 100 bytes",
        );
        let beat = Duration::from_millis(10)..=Duration::from_secs(60);
        check(
            beat.contains(&self.heartbeat),
            "heartbeat",
            "not between 10ms and 60s",
        );
        check(!self.modes.is_empty(), "modes", "must not be empty");
        check(
            (1..=64).contains(&self.copy_threads),
            "copy_threads",
            "not between 1 and 64",
        );
        check(self.max_workers > 0, "max_workers", "must not be 0");
        check(
            self.max_prompt_tokens > 0,
            "max_prompt_tokens",
            "must not be 0",
        );
        check(
            self.max_session_tokens > 0,
            "max_session_tokens",
            "must not be 0",
        );
        check(self.max_requests > 0, "max_requests", "must not be 0");
        let capacity = |size: ByteSize| {
            (64 << 10..=1 << 30).contains(&size.as_u64()) && size.as_u64().is_multiple_of(4096)
        };
        let problem = "not a multiple of 4 KiB between 64 KiB and 1 GiB";
        check(capacity(self.up_capacity), "up_capacity", problem);
        check(capacity(self.down_capacity), "down_capacity", problem);
        check(
            !self.lease_timeout.is_zero(),
            "lease_timeout",
            "must not be 0",
        );
        check(
            !self.save_timeout.is_zero(),
            "save_timeout",
            "must not be 0",
        );
        let marks = 0.0 < self.ram_low && self.ram_low <= self.ram_high && self.ram_high <= 1.0;
        check(
            marks,
            "ram_high",
            "0 < ram_low <= ram_high <= 1 does not hold",
        );
        check(
            (1..=64).contains(&self.read_threads),
            "read_threads",
            "not between 1 and 64",
        );
        let speed = self
            .prefill_tokens_per_second
            .is_none_or(|speed| speed > 0.0);
        check(speed, "prefill_tokens_per_second", "not above 0");
        self.saving.validate(problems);
        self.limits.validate(problems);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(config: &Config) -> Vec<String> {
        let mut problems = Vec::new();
        config.validate(&mut problems);
        problems
    }

    #[test]
    fn default_is_valid() {
        assert!(problems(&Config::default()).is_empty());
    }

    #[test]
    fn every_problem_is_told_at_once() {
        let config = Config {
            max_workers: 0,
            ram_low: 0.95,
            fd_socket: "relative".into(),
            read_threads: 0,
            ..Config::default()
        };
        let found = problems(&config);
        let keys: Vec<_> = found
            .iter()
            .filter_map(|text| text.split(':').next())
            .collect();
        let expected = ["fd_socket", "max_workers", "ram_high", "read_threads"];
        assert_eq!(keys, expected.map(|key| format!("service.{key}")));
    }
}
