//! Whether a restore is worth it: facts in, decision out.

use super::config::Config;
use crate::proto::channel::layout::Miss;

/// What copying between RAM and a ring is taken to reach until it is measured: a PCIe 4 link.
pub const COPY_BYTES_PER_SECOND: f64 = 20e9;

/// What is known of a restore before it begins.
#[derive(Copy, Clone, Debug)]
pub struct Facts {
    /// Tokens that need no prefill thanks to it.
    pub gain: u32,
    /// Bytes that move into the ring.
    pub bytes: u64,
    /// Bytes of them that come from disk first.
    pub disk_bytes: u64,
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
    let prefill = f64::from(facts.gain) / config.prefill_tokens_per_second?;
    let seconds = |bytes: u64, speed: f64| bytes as f64 / speed.max(1.0);
    let restore = seconds(facts.bytes, facts.copy_bytes_per_second)
        + seconds(facts.disk_bytes, facts.disk_bytes_per_second);
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
        config.prefill_tokens_per_second = Some(10_000.0);
        assert_eq!(skip(&config, &facts(10_000, 100 << 20)), None);
        assert_eq!(
            skip(&config, &facts(10_000, 4 << 30)),
            Some(Miss::SlowerThanPrefill)
        );
    }
}
