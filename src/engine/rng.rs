//! A tiny random generator, so that weights and free lists depend on a seed and on nothing else.

/// SplitMix64: one 64-bit word of state, full period, good enough for weights and shuffles.
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    state: u64,
}

// === impl SplitMix64 ===

impl SplitMix64 {
    /// A generator that yields the same sequence for the same seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`. `bound` must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The bias of a plain remainder is below 2^-32 for every bound used here.
        self.next_u64() % bound
    }

    /// A number in `[0, 1)` with 24 random bits.
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 * (1.0 / 16_777_216.0)
    }

    /// A number of mean 0 and variance 1, near a normal one (a sum of four uniform ones), made of
    /// exact operations only so that weights are the same on every machine.
    pub fn normal(&mut self) -> f32 {
        let sum = self.unit() + self.unit() + self.unit() + self.unit();
        (sum - 2.0) * 1.732_050_8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_sequence() {
        let mut a = SplitMix64::new(7);
        let mut b = SplitMix64::new(7);
        let mut c = SplitMix64::new(8);
        let of_a: Vec<u64> = (0..8).map(|_| a.next_u64()).collect();
        let of_b: Vec<u64> = (0..8).map(|_| b.next_u64()).collect();
        let of_c: Vec<u64> = (0..8).map(|_| c.next_u64()).collect();
        assert_eq!(of_a, of_b);
        assert_ne!(of_a, of_c);
    }

    #[test]
    fn normal_has_mean_zero_and_variance_one() {
        let mut rng = SplitMix64::new(1);
        let values: Vec<f32> = (0..20_000).map(|_| rng.normal()).collect();
        let mean = values.iter().sum::<f32>() / 20_000.0;
        let variance = values.iter().map(|v| v * v).sum::<f32>() / 20_000.0;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((variance - 1.0).abs() < 0.05, "{variance}");
    }
}
