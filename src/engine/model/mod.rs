//! A small true hybrid language model: Mamba2 recurrences and grouped-query attention.
//!
//! # What
//!
//! Six layers, two of them attention, fixed pseudo-random weights from a seed, greedy. It says
//! nothing sensible, but its answers depend on all that it read: through the recurrent state and
//! through the attention KV, each of which changes the answer when it is lost.
//!
//! # Bit for bit
//!
//! Every number that outlives a token passes through pool storage: the convolution's window and KV
//! as bfloat16, the recurrent state in its own type. All sums have a fixed order. So a token's
//! result is the same to the bit however the prompt is cut into chunks, which requests are computed
//! together, on which slots and pages, after a restore or not.

mod attention;
mod dims;
mod linear;
mod math;
mod recurrent;
#[cfg(test)]
mod tests;

pub use dims::{MAX_TOKENS, VOCAB};

use attention::Attention;
use dims::{
    ATTN_DIM, CONV_DIM, CONV_WINDOW, D_MODEL, HEAD_DIM, HEADS, KV_HEADS, LAYERS, LayerKind, STATE,
};
use linear::Linear;
use recurrent::Recurrent;

use crate::engine::ids::{PageId, SlotId};
use crate::engine::pools::{Dtype, KvPool, KvSpec, StatePool, StateSpec, TensorSpec};
use crate::engine::rng::SplitMix64;

/// Index of the convolution's window among the state tensors.
const CONV: usize = 0;
/// Index of the recurrent state among the state tensors.
const TEMPORAL: usize = 1;
/// How loud a token's own embedding is beside what the layers add: such that an answer follows
/// the history and not only the last token (with these scales answers hardly ever repeat).
const EMBEDDING_SCALE: f32 = 1.0;

/// Which model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// The name under which it is served.
    pub name: String,
    /// Seed of all weights.
    pub seed: u64,
    /// Change one weight, as a fine-tune at the same path would.
    pub perturb: bool,
    /// Type of the recurrent state.
    pub temporal: Dtype,
}

/// The model: weights and working memory.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    unembedding: Linear,
    digest: [u8; 32],
    ws: Workspace,
}

/// Some consecutive tokens of one sequence, to be computed.
#[derive(Clone, Copy, Debug)]
pub struct SeqChunk<'a> {
    /// The tokens (at least one), each below [`VOCAB`].
    pub tokens: &'a [u32],
    /// Position of the first of them.
    pub start: usize,
    /// Slot with the state at `start`; it is moved on to the state after the chunk.
    pub slot: SlotId,
    /// Pages of the sequence from token 0 to at least the chunk's end.
    pub pages: &'a [PageId],
    /// Whether the token after the chunk is wanted.
    pub predict: bool,
    /// With that token, whether its log probability is wanted, and those of how many likely others.
    pub logprobs: Option<usize>,
}

/// The token after a chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Predicted {
    /// The most likely one.
    pub token: u32,
    /// Its log probability, and the most likely tokens with theirs, if that was wanted.
    pub logprobs: Option<Logprobs>,
}

/// Log probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token itself.
    pub token: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(f32, u32)>,
}

#[derive(Debug)]
enum Layer {
    Recurrent(Box<Recurrent>),
    Attention(Box<Attention>),
}

/// Buffers reused from call to call; they hold nothing between calls.
#[derive(Debug, Default)]
struct Workspace {
    normed: Vec<f32>,
    proj: Vec<f32>,
    inner: Vec<f32>,
    window: Vec<f32>,
    conv: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    logits: Vec<f32>,
}

// === impl ModelConfig ===

impl ModelConfig {
    /// Geometry of the state pool.
    pub fn state_spec(&self) -> StateSpec {
        let conv = TensorSpec {
            name: "conv.0".to_owned(),
            shape: vec![CONV_DIM, CONV_WINDOW],
            dtype: Dtype::Bf16,
        };
        let temporal = TensorSpec {
            name: "temporal".to_owned(),
            shape: vec![HEADS, HEAD_DIM, STATE],
            dtype: self.temporal,
        };
        StateSpec {
            layers: dims::count(LayerKind::Recurrent),
            tensors: vec![conv, temporal],
        }
    }

    /// Geometry of the KV pool.
    pub fn kv_spec(&self) -> KvSpec {
        KvSpec {
            layers: dims::count(LayerKind::Attention),
            kv_heads: KV_HEADS,
            head_dim: ATTN_DIM,
            dtype: Dtype::Bf16,
        }
    }

    /// Bytes of the packed state of one sequence.
    pub fn state_bytes(&self) -> usize {
        let StateSpec { layers, tensors } = self.state_spec();
        let unit =
            |tensor: &TensorSpec| tensor.shape.iter().product::<usize>() * tensor.dtype.bytes();
        tensors.iter().map(unit).sum::<usize>() * layers
    }

    /// Bytes of the packed KV of one token.
    pub fn kv_bytes(&self) -> usize {
        let KvSpec {
            layers,
            kv_heads,
            head_dim,
            dtype,
        } = self.kv_spec();
        layers * 2 * kv_heads * head_dim * dtype.bytes()
    }

    /// Indices of the recurrent and of the attention layers among all layers.
    pub fn layer_ids(&self) -> (Vec<usize>, Vec<usize>) {
        let of = |kind| {
            (0..)
                .zip(LAYERS)
                .filter(|(_, k)| *k == kind)
                .map(|(i, _)| i)
                .collect()
        };
        (of(LayerKind::Recurrent), of(LayerKind::Attention))
    }
}

// === impl Model ===

impl Model {
    /// Makes the weights.
    pub fn new(config: ModelConfig) -> Self {
        let mut rng = SplitMix64::new(config.seed);
        let embedding: Vec<f32> = (0..VOCAB * D_MODEL)
            .map(|_| rng.normal() * EMBEDDING_SCALE)
            .collect();
        let mut layers: Vec<Layer> = LAYERS
            .iter()
            .map(|kind| match kind {
                LayerKind::Recurrent => Layer::Recurrent(Box::new(Recurrent::random(&mut rng))),
                LayerKind::Attention => Layer::Attention(Box::new(Attention::random(&mut rng))),
            })
            .collect();
        let final_norm = (0..D_MODEL).map(|_| 1.0 + 0.1 * rng.normal()).collect();
        let unembedding = Linear::random(D_MODEL, VOCAB, 1.0, &mut rng);
        if config.perturb {
            perturb(&mut layers);
        }
        let mut model = Self {
            config,
            embedding,
            layers,
            final_norm,
            unembedding,
            digest: [0; 32],
            ws: Workspace::default(),
        };
        model.digest = model.hash();
        model
    }

    /// What was asked for.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// BLAKE3 of all weights with their names and sizes.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Number of weights.
    pub fn parameters(&self) -> usize {
        let mut count = 0;
        self.for_each_tensor(|_, _, weights| count += weights.len());
        count
    }

    /// Computes the chunks, layer by layer, and returns for each the most likely next token if it
    /// was wanted. Chunks must be of different sequences.
    pub fn forward(
        &mut self,
        state: &mut StatePool,
        kv: &mut KvPool,
        chunks: &[SeqChunk<'_>],
    ) -> Vec<Option<Predicted>> {
        let tokens: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let mut x = Vec::with_capacity(tokens * D_MODEL);
        let rows = self.embedding.as_chunks::<D_MODEL>().0;
        for token in chunks.iter().flat_map(|chunk| chunk.tokens) {
            let row = rows
                .get(*token as usize)
                .expect("tokens are checked at intake");
            x.extend_from_slice(row);
        }
        let (mut recurrent, mut attention) = (0, 0);
        for layer in &self.layers {
            match layer {
                Layer::Recurrent(layer) => {
                    layer.forward(recurrent, &mut x, chunks, state, &mut self.ws);
                    recurrent += 1;
                }
                Layer::Attention(layer) => {
                    layer.forward(attention, &mut x, chunks, kv, &mut self.ws);
                    attention += 1;
                }
            }
        }
        self.predict(&x, chunks)
    }

    fn predict(&mut self, x: &[f32], chunks: &[SeqChunk<'_>]) -> Vec<Option<Predicted>> {
        let rows = x.as_chunks::<D_MODEL>().0;
        let mut end = 0;
        let mut last = [0.0; D_MODEL];
        chunks
            .iter()
            .map(|chunk| {
                end += chunk.tokens.len();
                let row = end
                    .checked_sub(1)
                    .and_then(|at| rows.get(at))
                    .filter(|_| chunk.predict)?;
                math::rms_norm(row, &self.final_norm, &mut last);
                let logits = grow(&mut self.ws.logits, VOCAB);
                self.unembedding.apply(&last, logits);
                let token = math::argmax(logits);
                let logprobs = chunk.logprobs.map(|top| logprobs(logits, token, top));
                Some(Predicted { token, logprobs })
            })
            .collect()
    }

    fn hash(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        let mut bytes = Vec::new();
        self.for_each_tensor(|layer, name, weights| {
            bytes.clear();
            bytes.extend((layer as u64).to_le_bytes());
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend((weights.len() as u64).to_le_bytes());
            bytes.extend(weights.iter().flat_map(|weight| weight.to_le_bytes()));
            hasher.update(&bytes);
        });
        *hasher.finalize().as_bytes()
    }

    fn for_each_tensor(&self, mut each: impl FnMut(usize, &str, &[f32])) {
        each(0, "embedding", &self.embedding);
        for (index, layer) in self.layers.iter().enumerate() {
            let mut visit = |tensors: &[(&'static str, &[f32])]| {
                for (name, weights) in tensors {
                    each(index, name, weights);
                }
            };
            match layer {
                Layer::Recurrent(layer) => visit(&layer.tensors()),
                Layer::Attention(layer) => visit(&layer.tensors()),
            }
        }
        each(0, "final_norm", &self.final_norm);
        each(0, "unembedding", self.unembedding.weights());
    }
}

/// Log probabilities of a token and of the `top` most likely ones.
fn logprobs(logits: &[f32], token: u32, top: usize) -> Logprobs {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|it| f64::from(it - best).exp()).sum();
    let of = |logit: f32| (f64::from(logit - best) - sum.ln()) as f32;
    let mut order: Vec<(f32, u32)> = logits.iter().copied().zip(0_u32..).collect();
    // The first of equals comes first, as for the answer.
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let own = logits.get(token as usize).copied().unwrap_or(best);
    order.truncate(top);
    Logprobs {
        token: of(own),
        top: order
            .into_iter()
            .map(|(logit, id)| (of(logit), id))
            .collect(),
    }
}

/// Changes one weight of the first layer.
fn perturb(layers: &mut [Layer]) {
    if let Some(Layer::Recurrent(layer)) = layers.first_mut() {
        layer.perturb();
    }
}

/// The first `len` elements of a buffer that grows as needed.
fn grow(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    buffer.split_at_mut(len).0
}
