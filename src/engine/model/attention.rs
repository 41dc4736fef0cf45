//! Grouped-query attention over paged KV, without positions (the recurrence knows the order).
//!
//! Queries and keys are RMS-normed, so scores are bounded and the softmax needs no maximum. Each
//! query's sums run over keys in token order, so neither the chunk nor the page size shows.

use super::dims::{ATTN_DIM, D_MODEL, GROUP, KV_DIM, KV_HEADS, Q_DIM};
use super::linear::Linear;
use super::math::{bf16_bits, bf16_value, exp2_bounded, inverse_rms, rms_norm};
use super::{SeqChunk, Workspace, grow};
use crate::engine::ids::PageId;
use crate::engine::pools::{Half, KvPool};
use crate::engine::rng::SplitMix64;

/// Lanes of a tile of many queries: one lane is one query of one head of the group.
const WIDE: usize = 16;
/// Lanes of a tile of few queries.
const NARROW: usize = 4;
/// Keys whose scores are held at a time.
const KEYS: usize = 32;
/// Sharpness of the softmax: the largest score is about `2.8 * GAIN`.
const GAIN: f32 = 3.0;
/// Columns of the in-projection: q, k, v.
const QKV: usize = Q_DIM + 2 * KV_DIM;

/// The weights of one attention layer.
#[derive(Debug)]
pub struct Attention {
    norm: Vec<f32>,
    qkv: Linear,
    out_proj: Linear,
}

/// One tile of queries of one KV head, transposed.
type Tile<const W: usize> = [[f32; W]; ATTN_DIM];

/// The running softmax of one tile.
struct Sums<const W: usize> {
    values: Tile<W>,
    weights: [f32; W],
}

// === impl Attention ===

impl Attention {
    /// Random weights.
    pub fn random(rng: &mut SplitMix64) -> Self {
        let norm = (0..D_MODEL).map(|_| 1.0 + 0.1 * rng.normal()).collect();
        let qkv = Linear::random(D_MODEL, QKV, 1.5, rng);
        let out_proj = Linear::random(Q_DIM, D_MODEL, 1.5, rng);
        Self {
            norm,
            qkv,
            out_proj,
        }
    }

    /// All weights, by name, in a fixed order.
    pub fn tensors(&self) -> [(&'static str, &[f32]); 3] {
        [
            ("norm", &self.norm),
            ("qkv", self.qkv.weights()),
            ("out_proj", self.out_proj.weights()),
        ]
    }

    /// Writes the chunks' keys and values to their pages and adds the layer's output to `x`
    /// (`[tokens of all chunks, D_MODEL]`). `layer` counts attention layers from 0.
    pub fn forward(
        &self,
        layer: usize,
        x: &mut [f32],
        chunks: &[SeqChunk<'_>],
        pool: &mut KvPool,
        ws: &mut Workspace,
    ) {
        let tokens = x.len() / D_MODEL;
        let normed = grow(&mut ws.normed, tokens * D_MODEL);
        rms_norm(x, &self.norm, normed);
        let proj = grow(&mut ws.proj, tokens * QKV);
        self.qkv.apply(normed, proj);
        let inner = grow(&mut ws.inner, tokens * Q_DIM);
        let (mut proj_rest, mut inner_rest) = (&mut proj[..], &mut inner[..]);
        for chunk in chunks {
            let count = chunk.tokens.len();
            let (proj, tail) = std::mem::take(&mut proj_rest).split_at_mut(count * QKV);
            proj_rest = tail;
            let (out, tail) = std::mem::take(&mut inner_rest).split_at_mut(count * Q_DIM);
            inner_rest = tail;
            for row in proj.chunks_exact_mut(QKV) {
                norm_heads(row);
            }
            write_rows(layer, chunk, proj, pool);
            let end = chunk.start + count;
            for head in 0..KV_HEADS {
                let keys = grow(&mut ws.keys, end * ATTN_DIM);
                read_head(layer, Half::K, head, chunk.pages, pool, keys);
                let values = grow(&mut ws.values, end * ATTN_DIM);
                read_head(layer, Half::V, head, chunk.pages, pool, values);
                let keys = keys.as_chunks::<ATTN_DIM>().0;
                let values = values.as_chunks::<ATTN_DIM>().0;
                if count > NARROW / GROUP {
                    attend::<WIDE>(head, chunk.start, proj, keys, values, out);
                } else {
                    attend::<NARROW>(head, chunk.start, proj, keys, values, out);
                }
            }
        }
        self.out_proj.apply_add(inner, x);
    }
}

/// RMS-norms each query head (with the softmax's scale, to base 2) and each key head of one row.
fn norm_heads(row: &mut [f32]) {
    let scale = GAIN * std::f32::consts::LOG2_E / (ATTN_DIM as f32).sqrt();
    for (index, head) in row.as_chunks_mut::<ATTN_DIM>().0.iter_mut().enumerate() {
        let factor = match index * ATTN_DIM {
            at if at < Q_DIM => inverse_rms(head) * scale,
            at if at < Q_DIM + KV_DIM => inverse_rms(head),
            _ => break,
        };
        for value in head {
            *value *= factor;
        }
    }
}

/// Writes a chunk's keys and values, as bfloat16, to its rows.
fn write_rows(layer: usize, chunk: &SeqChunk<'_>, proj: &[f32], pool: &mut KvPool) {
    let (size, row_bytes) = (pool.page_size(), pool.row_bytes());
    for (position, row) in (chunk.start..).zip(proj.chunks_exact(QKV)) {
        let page = chunk.pages.get(position / size).copied();
        let page = page.expect("the chunk's tokens have pages");
        let at = position % size * row_bytes;
        let (keys, values) = row.split_at(Q_DIM).1.split_at(KV_DIM);
        for (half, from) in [(Half::K, keys), (Half::V, values)] {
            let bytes = pool.page_mut(layer, half, page).get_mut(at..at + row_bytes);
            let bytes = bytes.expect("a row lies inside its page");
            for (to, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                *to = bf16_bits(*value).to_le_bytes();
            }
        }
    }
}

/// Reads one head of tokens `0..out.len() / ATTN_DIM` from their pages.
fn read_head(
    layer: usize,
    half: Half,
    head: usize,
    pages: &[PageId],
    pool: &KvPool,
    out: &mut [f32],
) {
    for (page, out) in pages
        .iter()
        .zip(out.chunks_mut(pool.page_size() * ATTN_DIM))
    {
        let rows = pool
            .page(layer, half, *page)
            .as_chunks::<{ KV_DIM * 2 }>()
            .0;
        for (row, out) in rows.iter().zip(out.as_chunks_mut::<ATTN_DIM>().0) {
            let from = row.as_chunks::<{ ATTN_DIM * 2 }>().0.get(head);
            let from = from.expect("the row has all heads").as_chunks::<2>().0;
            for (to, bytes) in out.iter_mut().zip(from) {
                *to = bf16_value(u16::from_le_bytes(*bytes));
            }
        }
    }
}

/// Causal attention of one KV head: queries at positions `start..`, keys at `0..`. `W` lanes are
/// computed together, `W / GROUP` queries: no lane depends on another, so `W` changes nothing.
fn attend<const W: usize>(
    head: usize,
    start: usize,
    proj: &[f32],
    keys: &[[f32; ATTN_DIM]],
    values: &[[f32; ATTN_DIM]],
    out: &mut [f32],
) {
    let queries = W / GROUP;
    let first = head * GROUP * ATTN_DIM;
    let tiles = proj
        .chunks(queries * QKV)
        .zip(out.chunks_mut(queries * Q_DIM));
    for (index, (rows, out)) in tiles.enumerate() {
        let mut tile: Tile<W> = [[0.0; W]; ATTN_DIM];
        for (query, row) in rows.chunks_exact(QKV).enumerate() {
            for (at, q) in row.iter().skip(first).take(GROUP * ATTN_DIM).enumerate() {
                let lanes = tile.get_mut(at % ATTN_DIM);
                let lane = lanes.and_then(|lanes| lanes.get_mut(query * GROUP + at / ATTN_DIM));
                *lane.expect("a tile holds its queries") = *q;
            }
        }
        // All lanes see the keys up to the first query; the later ones a few more.
        let (shared_keys, own_keys) = keys.split_at(start + index * queries + 1);
        let (shared_values, own_values) = values.split_at(shared_keys.len());
        let mut sums = Sums {
            values: [[0.0; W]; ATTN_DIM],
            weights: [0.0; W],
        };
        for (keys, values) in shared_keys.chunks(KEYS).zip(shared_values.chunks(KEYS)) {
            sums.add(&tile, keys, values, 0);
        }
        let own = own_keys
            .chunks(1)
            .zip(own_values.chunks(1))
            .take(queries - 1);
        for (offset, (key, value)) in own.enumerate() {
            sums.add(&tile, key, value, (offset + 1) * GROUP);
        }
        for (query, row) in out.chunks_exact_mut(Q_DIM).enumerate() {
            for (at, to) in row
                .iter_mut()
                .skip(first)
                .take(GROUP * ATTN_DIM)
                .enumerate()
            {
                let lane = query * GROUP + at / ATTN_DIM;
                let sum = sums
                    .values
                    .get(at % ATTN_DIM)
                    .and_then(|lanes| lanes.get(lane));
                let (sum, weight) = sum.zip(sums.weights.get(lane)).expect("as above");
                *to = sum / weight;
            }
        }
    }
}

// === impl Sums ===

impl<const W: usize> Sums<W> {
    /// Adds up to [`KEYS`] keys, which lanes below `blind` do not see.
    #[inline(always)]
    fn add(
        &mut self,
        tile: &Tile<W>,
        keys: &[[f32; ATTN_DIM]],
        values: &[[f32; ATTN_DIM]],
        blind: usize,
    ) {
        let mut scores = [[0.0_f32; W]; KEYS];
        for (score, key) in scores.iter_mut().zip(keys) {
            let mut sum = [0.0; W];
            for (k, q) in key.iter().zip(tile) {
                for (sum, q) in sum.iter_mut().zip(q) {
                    *sum += k * q;
                }
            }
            *score = sum;
        }
        for score in scores.iter_mut().take(keys.len()) {
            for score in score.iter_mut() {
                *score = exp2_bounded(*score);
            }
            // A weight of 0 leaves a sum as it is, to the bit.
            score.iter_mut().take(blind).for_each(|score| *score = 0.0);
        }
        for (d, sum) in self.values.iter_mut().enumerate() {
            let mut total = *sum;
            for (weights, value) in scores.iter().zip(values) {
                let v = value.get(d).copied().unwrap_or(0.0);
                for (total, weight) in total.iter_mut().zip(weights) {
                    *total += weight * v;
                }
            }
            *sum = total;
        }
        let mut total = self.weights;
        for weights in scores.iter().take(keys.len()) {
            for (total, weight) in total.iter_mut().zip(weights) {
                *total += weight;
            }
        }
        self.weights = total;
    }
}
