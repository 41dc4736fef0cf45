//! Whether a restore is worth it: facts in, decision out.

use std::time::Duration;

use super::config::Config;
use crate::proto::channel::layout::Miss;

/// What copying between RAM and a ring is taken to reach until it is measured: a PCIe 4 link.
pub const COPY_BYTES_PER_SECOND: f64 = 20e9;

/// What a restore takes beyond its copies: two rounds of the worker's scheduler.
pub const OVERHEAD: Duration = Duration::from_millis(2);

/// What is known of a restore before it begins.
#[derive(Copy, Clone, Debug)]
pub struct Facts {
    /// Tokens that need no prefill thanks to it.
    pub gain: u32,
    /// Bytes that move into the ring.
    pub bytes: u64,
    /// Bytes of them that come from disk first.
    pub disk_bytes: u64,
    /// Bytes that others of the same worker still wait for, in all and from disk.
    pub queued: (u64, u64),
    /// Tokens a second of this worker's prefill, where that is learned.
    pub prefill_tokens_per_second: Option<f64>,
    /// How fast the disk was lately.
    pub disk_bytes_per_second: f64,
    /// How fast copies are.
    pub copy_bytes_per_second: f64,
}

/// Why the restore is better not made, if so.
pub fn skip(config: &Config, facts: &Facts) -> Option<Miss> {
    if facts.gain < config.min_restore_tokens {
        return Some(Miss::BelowMinimum);
    }
    let learned = facts
        .prefill_tokens_per_second
        .filter(|_| config.learn_prefill);
    let prefill = f64::from(facts.gain) / config.prefill_tokens_per_second.or(learned)?;
    let seconds =
        |bytes: u64, queued: u64, speed: f64| bytes.saturating_add(queued) as f64 / speed.max(1.0);
    // What waits for the disk delays only what comes from there, too.
    let (queued, disk_queued) = match facts.disk_bytes {
        0 => (facts.queued.0, 0),
        _ => facts.queued,
    };
    let restore = OVERHEAD.as_secs_f64()
        + seconds(facts.bytes, queued, facts.copy_bytes_per_second)
        + seconds(facts.disk_bytes, disk_queued, facts.disk_bytes_per_second);
    (restore > prefill).then_some(Miss::SlowerThanPrefill)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(gain: u32, disk_bytes: u64) -> Facts {
        Facts {
            gain,
            bytes: 100 << 20,
            disk_bytes,
            queued: (0, 0),
            prefill_tokens_per_second: Some(10_000.0),
            disk_bytes_per_second: 1e9,
            copy_bytes_per_second: COPY_BYTES_PER_SECOND,
        }
    }

    #[test]
    fn small_gains_and_slow_disks_are_skipped_only_when_configured() {
        let mut config = Config {
            min_restore_tokens: 100,
            ..Config::default()
        };
        assert_eq!(skip(&config, &facts(99, 0)), Some(Miss::BelowMinimum));
        assert_eq!(skip(&config, &facts(100, 100 << 30)), None);
        for (fixed, learned) in [(Some(10_000.0), false), (None, true)] {
            config.prefill_tokens_per_second = fixed;
            config.learn_prefill = learned;
            assert_eq!(skip(&config, &facts(10_000, 100 << 20)), None);
            assert_eq!(
                skip(&config, &facts(10_000, 4 << 30)),
                Some(Miss::SlowerThanPrefill)
            );
        }
    }

    #[test]
    fn what_waits_before_it_counts() {
        let config = Config {
            prefill_tokens_per_second: Some(10_000.0),
            ..Config::default()
        };
        let after = |queued, disk_bytes| Facts {
            queued,
            ..facts(10_000, disk_bytes)
        };
        assert_eq!(
            skip(&config, &after((4 << 30, 4 << 30), 1)),
            Some(Miss::SlowerThanPrefill)
        );
        // From RAM it does not wait for the disk.
        assert_eq!(skip(&config, &after((4 << 30, 4 << 30), 0)), None);
        assert_eq!(
            skip(&config, &after((40 << 30, 0), 0)),
            Some(Miss::SlowerThanPrefill)
        );
    }
}
