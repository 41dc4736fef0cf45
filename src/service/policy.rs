//! Whether a restore is worth it: facts in, decision out.

use std::time::Duration;

use super::config::Config;
use crate::proto::channel::layout::Miss;

/// What copying between RAM and a ring is taken to reach until it is measured: a PCIe 4 link.
pub const COPY_BYTES_PER_SECOND: f64 = 20e9;

/// What a restore takes beyond its copies: two rounds of the worker's scheduler.
pub const OVERHEAD: Duration = Duration::from_millis(2);

/// What a restore costs, as far as that is known before it begins.
#[derive(Copy, Clone, Debug)]
pub struct Facts {
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

/// Why the restore is better not made, if so: `gain` tokens need no prefill thanks to it. The `facts` are
/// gathered only where they can decide anything.
pub fn skip(config: &Config, gain: u32, facts: impl FnOnce() -> Facts) -> Option<Miss> {
    if gain < config.min_restore_tokens {
        return Some(Miss::BelowMinimum);
    }
    if config.prefill_tokens_per_second.is_none() && !config.learn_prefill {
        return None;
    }
    let facts = facts();
    let learned = facts
        .prefill_tokens_per_second
        .filter(|_| config.learn_prefill);
    let prefill = f64::from(gain) / config.prefill_tokens_per_second.or(learned)?;
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

    fn facts(disk_bytes: u64) -> Facts {
        Facts {
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
        assert_eq!(skip(&config, 99, || facts(0)), Some(Miss::BelowMinimum));
        let asked = || panic!("it cannot decide anything");
        assert_eq!(skip(&config, 100, asked), None);
        for (fixed, learned) in [(Some(10_000.0), false), (None, true)] {
            config.prefill_tokens_per_second = fixed;
            config.learn_prefill = learned;
            assert_eq!(skip(&config, 10_000, || facts(100 << 20)), None);
            assert_eq!(
                skip(&config, 10_000, || facts(4 << 30)),
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
            ..facts(disk_bytes)
        };
        assert_eq!(
            skip(&config, 10_000, || after((4 << 30, 4 << 30), 1)),
            Some(Miss::SlowerThanPrefill)
        );
        // From RAM it does not wait for the disk.
        assert_eq!(skip(&config, 10_000, || after((4 << 30, 4 << 30), 0)), None);
        assert_eq!(
            skip(&config, 10_000, || after((40 << 30, 0), 0)),
            Some(Miss::SlowerThanPrefill)
        );
    }
}
