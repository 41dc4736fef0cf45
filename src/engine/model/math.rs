//! Elementwise arithmetic whose result for one element never depends on its neighbours.
//!
//! Every sum has a fixed order, every function is one polynomial for all lanes, and nothing is
//! fused: so a token's numbers are the same however many tokens are computed with it.

/// Lanes of one step of arithmetic. Two SSE registers, one AVX register.
pub const LANES: usize = 8;
/// One step of arithmetic.
pub type Lanes = [f32; LANES];

/// The nearest bfloat16 (ties to even), as bits.
#[inline]
pub fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff_u32.wrapping_add((bits >> 16) & 1)) >> 16) as u16
}

/// The value of a bfloat16.
#[inline]
pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `value` rounded to bfloat16.
#[inline]
pub fn bf16_round(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits(bits.wrapping_add(0x7fff_u32.wrapping_add((bits >> 16) & 1)) & 0xffff_0000)
}

/// Adding it rounds a small number to an integer, kept in the low bits.
const ROUND: f32 = 12_582_912.0;

/// `2^n` for the integer in the low bits of `shifted`.
#[inline]
fn power(shifted: f32) -> f32 {
    f32::from_bits(
        shifted
            .to_bits()
            .wrapping_sub(ROUND.to_bits())
            .wrapping_add(127)
            << 23,
    )
}

/// `e^x` to about 2 ulp, `x` clamped to `[-87, 87]`. `exp(0)` is exactly 1.
#[inline]
pub fn exp(x: f32) -> f32 {
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 87.0 { 87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4;
    let r = r - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    (p * (r * r) + r + 1.0) * power(shifted)
}

/// `2^x` to about 4e-6, for `x` known to be in `[-120, 120]`: the weight of a score.
#[inline]
pub fn exp2_bounded(x: f32) -> f32 {
    let shifted = x + ROUND;
    let r = x - (shifted - ROUND);
    let p = 9.618_129e-3;
    let p = p * r + 5.550_411e-2;
    let p = p * r + 2.402_265e-1;
    let p = p * r + std::f32::consts::LN_2;
    (p * r + 1.0) * power(shifted)
}

/// `x * sigmoid(x)`.
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `ln(1 + e^x)`.
#[inline]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { exp(x).ln_1p() }
}

/// The sum of all lanes, in one fixed order.
#[inline]
pub fn sum(lanes: Lanes) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// `1 / sqrt(mean(x^2) + eps)` of a row whose width is a multiple of [`LANES`].
#[inline]
pub fn inverse_rms(row: &[f32]) -> f32 {
    let mut squares = [0.0; LANES];
    for part in row.as_chunks::<LANES>().0 {
        for (total, value) in squares.iter_mut().zip(part) {
            *total += value * value;
        }
    }
    1.0 / (sum(squares) / row.len() as f32 + 1e-6).sqrt()
}

/// RMSNorm of each row of `x` (rows of `weight.len()`) into `out`.
pub fn rms_norm(x: &[f32], weight: &[f32], out: &mut [f32]) {
    let width = weight.len();
    for (row, to) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let scale = inverse_rms(row);
        for ((to, value), weight) in to.iter_mut().zip(row).zip(weight) {
            *to = value * scale * weight;
        }
    }
}

/// The index of the largest value, the first one of equals.
pub fn argmax(values: &[f32]) -> u32 {
    let mut best = (0_u32, f32::NEG_INFINITY);
    for (index, value) in (0_u32..).zip(values) {
        if *value > best.1 {
            best = (index, *value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_exact_at_zero() {
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
        for step in -800..800 {
            let x = step as f32 * 0.1;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs() / want;
            assert!(error < 5e-7, "exp({x}) is off by {error}");
        }
        assert!(exp(1e9).is_finite());
        assert!(exp(-1e9) > 0.0);
    }

    #[test]
    fn exp2_is_close() {
        for step in -400..400 {
            let x = step as f32 * 0.05;
            let want = f64::from(x).exp2();
            let error = (f64::from(exp2_bounded(x)) - want).abs() / want;
            assert!(error < 1e-4, "exp2({x}) is off by {error}");
        }
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        assert_eq!(bf16_bits(1.0), 0x3f80);
        assert_eq!(bf16_bits(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(bf16_bits(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(bf16_bits(f32::from_bits(0x3f80_8001)), 0x3f81);
        for value in [0.1_f32, -3.7, 1e-9, 65_000.0] {
            assert_eq!(
                bf16_value(bf16_bits(value)).to_bits(),
                bf16_round(value).to_bits()
            );
        }
    }

    #[test]
    fn argmax_takes_the_first_of_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
    }
}
