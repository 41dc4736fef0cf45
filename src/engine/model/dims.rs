//! The shape of the model. All of it is fixed: the seed alone makes another model.

/// Width of the residual stream.
pub const D_MODEL: usize = 64;
/// Token ids are `0..VOCAB`.
pub const VOCAB: usize = 2048;
/// Longest sequence, prompt and answer together.
pub const MAX_TOKENS: usize = 131_072;

/// Recurrent heads, `H`.
pub const HEADS: usize = 4;
/// Width of a recurrent head, `P`.
pub const HEAD_DIM: usize = 32;
/// State size of a recurrent head, `N`.
pub const STATE: usize = 16;
/// Inner width of a recurrent layer.
pub const D_INNER: usize = HEADS * HEAD_DIM;
/// Channels of the causal convolution: `x`, `B` and `C` (one group).
pub const CONV_DIM: usize = D_INNER + 2 * STATE;
/// Width of the causal convolution, `K`.
pub const CONV_KERNEL: usize = 4;
/// Inputs of the convolution kept in the state, `K-1`.
pub const CONV_WINDOW: usize = CONV_KERNEL - 1;
/// Output of a recurrent layer's in-projection: `z`, `xBC`, `dt` (padded to 8 columns).
pub const IN_PROJ: usize = D_INNER + CONV_DIM + 8;

/// Query heads of an attention layer.
pub const Q_HEADS: usize = 4;
/// KV heads of an attention layer.
pub const KV_HEADS: usize = 2;
/// Width of an attention head.
pub const ATTN_DIM: usize = 8;
/// Query heads that share one KV head.
pub const GROUP: usize = Q_HEADS / KV_HEADS;
/// Width of all queries.
pub const Q_DIM: usize = Q_HEADS * ATTN_DIM;
/// Width of all keys, and of all values: one KV row.
pub const KV_DIM: usize = KV_HEADS * ATTN_DIM;

/// What a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Mamba2: a recurrence.
    Recurrent,
    /// Grouped-query attention.
    Attention,
}

/// The layers, first to last.
pub const LAYERS: [LayerKind; 6] = [
    LayerKind::Recurrent,
    LayerKind::Recurrent,
    LayerKind::Attention,
    LayerKind::Recurrent,
    LayerKind::Recurrent,
    LayerKind::Attention,
];

/// Number of layers of a kind.
pub const fn count(kind: LayerKind) -> usize {
    let mut rest: &[LayerKind] = &LAYERS;
    let mut found = 0;
    while let [first, tail @ ..] = rest {
        if *first as u8 == kind as u8 {
            found += 1;
        }
        rest = tail;
    }
    found
}
