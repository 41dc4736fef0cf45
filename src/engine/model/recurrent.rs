//! A Mamba2 layer: in-projection, causal convolution, selective recurrence, gate, out-projection.
//!
//! The convolution's window is bfloat16 and the recurrent state has the pool's type; both are
//! rounded at every token, not only where a chunk ends, so chunking never shows in the result.

use super::dims::{
    CONV_DIM, CONV_KERNEL, CONV_WINDOW, D_INNER, D_MODEL, HEAD_DIM, HEADS, IN_PROJ, STATE,
};
use super::linear::Linear;
use super::math::{bf16_bits, bf16_round, bf16_value, exp, inverse_rms, rms_norm, silu, softplus};
use super::{CONV, SeqChunk, TEMPORAL, Workspace, grow};
use crate::engine::ids::SlotId;
use crate::engine::pools::{Dtype, StatePool};
use crate::engine::rng::SplitMix64;

/// One head's state, `[N][P]`: columns of `P` are what is computed together.
type HeadState = [[f32; HEAD_DIM]; STATE];

/// The weights of one recurrent layer.
#[derive(Debug)]
pub struct Recurrent {
    norm: Vec<f32>,
    in_proj: Linear,
    /// `[K][CONV_DIM]`.
    conv_weight: Vec<f32>,
    conv_bias: Vec<f32>,
    dt_bias: [f32; HEADS],
    decay: [f32; HEADS],
    skip: [f32; HEADS],
    gate_norm: Vec<f32>,
    out_proj: Linear,
}

// === impl Recurrent ===

impl Recurrent {
    /// Random weights. Heads forget at very different rates, from a few tokens to thousands.
    pub fn random(rng: &mut SplitMix64) -> Self {
        let mut around_one = |n: usize| {
            (0..n)
                .map(|_| 1.0 + 0.1 * rng.normal())
                .collect::<Vec<f32>>()
        };
        let norm = around_one(D_MODEL);
        let gate_norm = around_one(D_INNER);
        let in_proj = Linear::random(D_MODEL, IN_PROJ, 1.5, rng);
        let conv_weight = (0..CONV_KERNEL * CONV_DIM)
            .map(|_| rng.normal() * 0.3)
            .collect();
        let conv_bias = (0..CONV_DIM).map(|_| rng.normal() * 0.1).collect();
        let out_proj = Linear::random(D_INNER, D_MODEL, 2.0, rng);
        Self {
            norm,
            in_proj,
            conv_weight,
            conv_bias,
            dt_bias: [-2.0, -3.0, -4.0, -5.0],
            decay: [1.0, 0.4, 0.1, 0.05],
            skip: [1.0, 0.7, 0.5, 0.3],
            gate_norm,
            out_proj,
        }
    }

    /// All weights, by name, in a fixed order.
    pub fn tensors(&self) -> [(&'static str, &[f32]); 9] {
        [
            ("norm", &self.norm),
            ("in_proj", self.in_proj.weights()),
            ("conv_weight", &self.conv_weight),
            ("conv_bias", &self.conv_bias),
            ("dt_bias", &self.dt_bias),
            ("decay", &self.decay),
            ("skip", &self.skip),
            ("gate_norm", &self.gate_norm),
            ("out_proj", self.out_proj.weights()),
        ]
    }

    /// Changes one weight.
    pub fn perturb(&mut self) {
        if let Some(weight) = self.in_proj.weights_mut().first_mut() {
            *weight += 0.25;
        }
    }

    /// Adds the layer's output to `x` (`[tokens of all chunks, D_MODEL]`) and moves each chunk's
    /// state in the pool on. `layer` counts recurrent layers from 0.
    pub fn forward(
        &self,
        layer: usize,
        x: &mut [f32],
        chunks: &[SeqChunk<'_>],
        pool: &mut StatePool,
        ws: &mut Workspace,
    ) {
        let tokens = x.len() / D_MODEL;
        let normed = grow(&mut ws.normed, tokens * D_MODEL);
        rms_norm(x, &self.norm, normed);
        let proj = grow(&mut ws.proj, tokens * IN_PROJ);
        self.in_proj.apply(normed, proj);
        let inner = grow(&mut ws.inner, tokens * D_INNER);
        let (mut proj_rest, mut inner_rest) = (&proj[..], &mut inner[..]);
        for chunk in chunks {
            let count = chunk.tokens.len();
            let (proj, tail) = proj_rest.split_at(count * IN_PROJ);
            proj_rest = tail;
            let (inner, tail) = std::mem::take(&mut inner_rest).split_at_mut(count * D_INNER);
            inner_rest = tail;
            let conv = grow(&mut ws.conv, count * CONV_DIM);
            let window = grow(&mut ws.window, (count + CONV_WINDOW) * CONV_DIM);
            self.convolve(layer, chunk.slot, proj, window, conv, pool);
            match pool.spec().tensors.get(TEMPORAL).map(|tensor| tensor.dtype) {
                Some(Dtype::Bf16) => {
                    self.scan::<true>(layer, chunk.slot, proj, conv, inner, pool);
                }
                _ => self.scan::<false>(layer, chunk.slot, proj, conv, inner, pool),
            }
            self.gate(proj, inner);
        }
        self.out_proj.apply_add(inner, x);
    }

    /// The causal convolution over the window in the pool and this chunk.
    fn convolve(
        &self,
        layer: usize,
        slot: SlotId,
        proj: &[f32],
        window: &mut [f32],
        out: &mut [f32],
        pool: &mut StatePool,
    ) {
        let stored = pool.unit_mut(CONV, layer, slot);
        let (old, new) = window.split_at_mut(CONV_WINDOW * CONV_DIM);
        // In the pool: [CONV_DIM][K-1], oldest first.
        for (channel, values) in stored
            .as_chunks::<{ CONV_WINDOW * 2 }>()
            .0
            .iter()
            .enumerate()
        {
            let rows = old.chunks_exact_mut(CONV_DIM);
            for (row, bytes) in rows.zip(values.as_chunks::<2>().0) {
                if let Some(to) = row.get_mut(channel) {
                    *to = bf16_value(u16::from_le_bytes(*bytes));
                }
            }
        }
        for (row, from) in new
            .chunks_exact_mut(CONV_DIM)
            .zip(proj.chunks_exact(IN_PROJ))
        {
            for (to, value) in row.iter_mut().zip(from.iter().skip(D_INNER)) {
                *to = bf16_round(*value);
            }
        }
        let window = &*window;
        for (at, out) in out.chunks_exact_mut(CONV_DIM).enumerate() {
            out.copy_from_slice(&self.conv_bias);
            let inputs = window.chunks_exact(CONV_DIM).skip(at);
            for (input, weight) in inputs.zip(self.conv_weight.chunks_exact(CONV_DIM)) {
                for ((to, value), weight) in out.iter_mut().zip(input).zip(weight) {
                    *to += value * weight;
                }
            }
            for value in out {
                *value = silu(*value);
            }
        }
        let tokens = window.len() / CONV_DIM - CONV_WINDOW;
        for (k, row) in window.chunks_exact(CONV_DIM).skip(tokens).enumerate() {
            let targets = stored.as_chunks_mut::<{ CONV_WINDOW * 2 }>().0;
            for (values, value) in targets.iter_mut().zip(row) {
                if let Some(bytes) = values.as_chunks_mut::<2>().0.get_mut(k) {
                    *bytes = bf16_bits(*value).to_le_bytes();
                }
            }
        }
    }

    /// The recurrence: `s = s exp(-dt A) + dt x B`, `y = s C + D x`.
    fn scan<const BF16: bool>(
        &self,
        layer: usize,
        slot: SlotId,
        proj: &[f32],
        conv: &[f32],
        out: &mut [f32],
        pool: &mut StatePool,
    ) {
        let element = if BF16 { 2 } else { 4 };
        let stored = pool.unit_mut(TEMPORAL, layer, slot);
        let heads = stored.chunks_exact_mut(HEAD_DIM * STATE * element);
        let weights = self.dt_bias.iter().zip(&self.decay).zip(&self.skip);
        for ((head, bytes), ((dt_bias, decay), skip)) in heads.enumerate().zip(weights) {
            let mut state = load_state::<BF16>(bytes);
            let rows = proj.chunks_exact(IN_PROJ).zip(conv.chunks_exact(CONV_DIM));
            for ((proj, conv), out) in rows.zip(out.chunks_exact_mut(D_INNER)) {
                let dt = proj.get(D_INNER + CONV_DIM + head).copied().unwrap_or(0.0);
                let dt = softplus(dt + dt_bias);
                let keep = exp(-dt * decay);
                let (x, bc) = conv.split_at(D_INNER);
                let (b, c) = bc.split_at(STATE);
                let x = x.as_chunks::<HEAD_DIM>().0.get(head);
                let y = out.as_chunks_mut::<HEAD_DIM>().0.get_mut(head);
                let (Some(x), Some(y)) = (x, y) else { continue };
                step::<BF16>(&mut state, x, b, c, dt, keep, *skip, y);
            }
            store_state::<BF16>(&state, bytes);
        }
    }

    /// `y = rmsnorm(y silu(z))`.
    fn gate(&self, proj: &[f32], inner: &mut [f32]) {
        for (y, z) in inner
            .chunks_exact_mut(D_INNER)
            .zip(proj.chunks_exact(IN_PROJ))
        {
            for (y, z) in y.iter_mut().zip(z) {
                *y *= silu(*z);
            }
            let scale = inverse_rms(y);
            for (y, weight) in y.iter_mut().zip(&self.gate_norm) {
                *y = *y * scale * weight;
            }
        }
    }
}

/// One token of one head.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the terms of one formula")]
fn step<const BF16: bool>(
    state: &mut HeadState,
    x: &[f32; HEAD_DIM],
    b: &[f32],
    c: &[f32],
    dt: f32,
    keep: f32,
    skip: f32,
    y: &mut [f32; HEAD_DIM],
) {
    let mut xdt = [0.0_f32; HEAD_DIM];
    let mut sum = [0.0_f32; HEAD_DIM];
    for ((xdt, sum), x) in xdt.iter_mut().zip(&mut sum).zip(x) {
        *xdt = x * dt;
        *sum = x * skip;
    }
    for ((row, b), c) in state.iter_mut().zip(b).zip(c) {
        for ((s, xdt), sum) in row.iter_mut().zip(&xdt).zip(&mut sum) {
            let next = *s * keep + xdt * b;
            let next = if BF16 { bf16_round(next) } else { next };
            *s = next;
            *sum += next * c;
        }
    }
    *y = sum;
}

/// `[P][N]` bytes to `[N][P]` numbers.
fn load_state<const BF16: bool>(bytes: &[u8]) -> HeadState {
    let mut state = [[0.0; HEAD_DIM]; STATE];
    let element = if BF16 { 2 } else { 4 };
    for (p, bytes) in bytes.chunks_exact(STATE * element).enumerate() {
        for (row, value) in state.iter_mut().zip(bytes.chunks_exact(element)) {
            let value = match value {
                [a, b] => bf16_value(u16::from_le_bytes([*a, *b])),
                [a, b, c, d] => f32::from_le_bytes([*a, *b, *c, *d]),
                _ => 0.0,
            };
            if let Some(to) = row.get_mut(p) {
                *to = value;
            }
        }
    }
    state
}

/// `[N][P]` numbers to `[P][N]` bytes.
fn store_state<const BF16: bool>(state: &HeadState, bytes: &mut [u8]) {
    let element = if BF16 { 2 } else { 4 };
    for (p, bytes) in bytes.chunks_exact_mut(STATE * element).enumerate() {
        for (row, to) in state.iter().zip(bytes.chunks_exact_mut(element)) {
            let value = row.get(p).copied().unwrap_or(0.0);
            if BF16 {
                to.copy_from_slice(&bf16_bits(value).to_le_bytes());
            } else {
                to.copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}
