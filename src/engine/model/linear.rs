//! A matrix that multiplies rows, written so that LLVM vectorises it.
//!
//! One output is `((x0 w0 + x1 w1) + x2 w2) + ..`, always in this order: how many rows are computed
//! together changes nothing.

use super::math::LANES;
use crate::engine::rng::SplitMix64;

/// Rows computed together.
const ROWS: usize = 4;

/// A `[inputs, outputs]` matrix, stored as panels of [`LANES`] columns.
#[derive(Debug)]
pub struct Linear {
    inputs: usize,
    outputs: usize,
    /// `[outputs / LANES][inputs][LANES]`.
    panels: Vec<f32>,
}

// === impl Linear ===

impl Linear {
    /// Random weights of standard deviation `scale / sqrt(inputs)`. `outputs` is a multiple of
    /// [`LANES`].
    pub fn random(inputs: usize, outputs: usize, scale: f32, rng: &mut SplitMix64) -> Self {
        debug_assert_eq!(outputs % LANES, 0);
        let scale = scale / (inputs as f32).sqrt();
        let panels = (0..inputs * outputs)
            .map(|_| rng.normal() * scale)
            .collect();
        Self {
            inputs,
            outputs,
            panels,
        }
    }

    /// All weights, in storage order.
    pub fn weights(&self) -> &[f32] {
        &self.panels
    }

    /// All weights, to be changed.
    pub fn weights_mut(&mut self) -> &mut [f32] {
        &mut self.panels
    }

    /// `y = x W`, for each row of `x` (`[rows, inputs]`) one row of `y` (`[rows, outputs]`).
    pub fn apply(&self, x: &[f32], y: &mut [f32]) {
        self.each(x, y, |to, value| *to = value);
    }

    /// `y += x W`.
    pub fn apply_add(&self, x: &[f32], y: &mut [f32]) {
        self.each(x, y, |to, value| *to += value);
    }

    #[inline(always)]
    fn each(&self, x: &[f32], y: &mut [f32], write: impl Fn(&mut f32, f32) + Copy) {
        debug_assert_eq!(x.len() / self.inputs, y.len() / self.outputs);
        for (index, panel) in self.panels.chunks_exact(self.inputs * LANES).enumerate() {
            let panel = panel.as_chunks::<LANES>().0;
            let column = index * LANES;
            let mut rows_in = x.chunks_exact(self.inputs * ROWS);
            let mut rows_out = y.chunks_exact_mut(self.outputs * ROWS);
            for (x, y) in (&mut rows_in).zip(&mut rows_out) {
                store(&block::<ROWS>(x, panel), y, self.outputs, column, write);
            }
            let rest_in = rows_in.remainder().chunks_exact(self.inputs);
            let rest_out = rows_out.into_remainder().chunks_exact_mut(self.outputs);
            for (x, y) in rest_in.zip(rest_out) {
                store(&block::<1>(x, panel), y, self.outputs, column, write);
            }
        }
    }
}

/// `R` rows times one panel.
#[inline(always)]
fn block<const R: usize>(x: &[f32], panel: &[[f32; LANES]]) -> [[f32; LANES]; R] {
    let inputs = panel.len();
    let mut rows: [&[f32]; R] = [&[]; R];
    for (row, from) in rows.iter_mut().zip(x.chunks_exact(inputs)) {
        *row = from;
    }
    let mut sums = [[0.0_f32; LANES]; R];
    for (k, weights) in panel.iter().enumerate() {
        for (sum, row) in sums.iter_mut().zip(&rows) {
            // The row is as long as the panel, so this is always there.
            let x = row.get(k).copied().unwrap_or(0.0);
            for (sum, weight) in sum.iter_mut().zip(weights) {
                *sum += x * weight;
            }
        }
    }
    sums
}

#[inline(always)]
fn store<const R: usize>(
    sums: &[[f32; LANES]; R],
    y: &mut [f32],
    outputs: usize,
    column: usize,
    write: impl Fn(&mut f32, f32) + Copy,
) {
    for (row, sum) in y.chunks_exact_mut(outputs).zip(sums) {
        let row = row.get_mut(column..column + LANES).unwrap_or_default();
        for (to, value) in row.iter_mut().zip(sum) {
            write(to, *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_computed_together_equal_rows_computed_alone() {
        let mut rng = SplitMix64::new(5);
        let linear = Linear::random(64, 40, 1.0, &mut rng);
        let x: Vec<f32> = (0..64 * 11).map(|_| rng.normal()).collect();
        let mut all = vec![0.0; 40 * 11];
        linear.apply(&x, &mut all);
        for (row, want) in x.chunks(64).zip(all.chunks(40)) {
            let mut alone = vec![0.0; 40];
            linear.apply(row, &mut alone);
            assert_eq!(alone, want);
        }
        // And the value itself, by the plain formula.
        let w = |k: usize, n: usize| linear.weights()[(n / LANES * 64 + k) * LANES + n % LANES];
        let want: f32 = (0..64).map(|k| f64::from(x[k] * w(k, 13))).sum::<f64>() as f32;
        assert!((all[13] - want).abs() < 1e-4);
    }
}
