//! What the packed bytes of a model's objects are made of: names and types of the tensors in its
//! files, and the length of every piece. The same for all shards of a model.

use serde::{Deserialize, Serialize};

use crate::types::{BLOCK_TOKENS, ObjectKind, TokenRange};

use super::{error::StoreError, object::Piece};

/// Most tokens of one object.
pub const MAX_OBJECT_TOKENS: u32 = 1 << 22;
/// Most bytes of one piece.
pub const MAX_PIECE_BYTES: u64 = 1 << 36;

const MAX_TENSORS: usize = 64;
const MAX_DIMS: usize = 8;
const MAX_NAME: usize = 64;

/// Element type of a tensor, named as in safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(non_camel_case_types, reason = "the names of the file format")]
pub enum Dtype {
    /// Bytes.
    U8,
    /// Half precision.
    F16,
    /// Brain float.
    BF16,
    /// Single precision.
    F32,
    /// 8-bit float, 4 bits of exponent.
    F8_E4M3,
    /// 8-bit float, 5 bits of exponent.
    F8_E5M2,
}

/// One tensor of the packed state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorShape {
    /// For example `conv.0`, `temporal`.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// `[L, …]`: layers first, then the shape of one slot.
    pub shape: Vec<u32>,
}

/// KV whose layers all look alike, so that a piece is one tensor `[L, 2, T, heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UniformKv {
    /// Element type.
    pub dtype: Dtype,
    /// `L`: attention layers.
    pub layers: u32,
    /// Heads of K and of V on this shard.
    pub heads: u32,
    /// Elements of one head, the same for K and V.
    pub head_dim: u32,
}

/// The shape of a model's objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectShape {
    /// Tensors of the packed state, in packing order.
    pub state: Vec<TensorShape>,
    /// Bytes of K and V of one token, all layers. 0: the model has no attention.
    pub kv_row_bytes: u64,
    /// Set when all layers look alike; otherwise a piece is plain bytes.
    pub kv: Option<UniformKv>,
}

// === impl Dtype ===

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8 | Self::F8_E4M3 | Self::F8_E5M2 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name in safetensors.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::U8 => "U8",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F32 => "F32",
            Self::F8_E4M3 => "F8_E4M3",
            Self::F8_E5M2 => "F8_E5M2",
        }
    }
}

// === impl TensorShape ===

impl TensorShape {
    /// Bytes of all layers, if they can be counted.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let elements = self
            .shape
            .iter()
            .try_fold(1u64, |product, &dim| product.checked_mul(u64::from(dim)))?;
        elements.checked_mul(self.dtype.bytes())
    }
}

// === impl UniformKv ===

impl UniformKv {
    /// Bytes of K and V of one token, if they can be counted.
    #[must_use]
    pub fn row_bytes(&self) -> Option<u64> {
        let Self {
            dtype,
            layers,
            heads,
            head_dim,
        } = *self;
        [layers, heads, head_dim]
            .into_iter()
            .try_fold(2 * dtype.bytes(), |product, dim| {
                product.checked_mul(u64::from(dim))
            })
    }
}

// === impl ObjectShape ===

impl ObjectShape {
    /// Checks names, counts and sizes against the limits of the file format.
    pub fn validate(&self) -> Result<(), StoreError> {
        let bad = |what: String| Err(StoreError::Invalid { what });
        if self.state.len() > MAX_TENSORS {
            return bad(format!("shape: {} state tensors", self.state.len()));
        }
        let mut names: Vec<&str> = self.state.iter().map(|t| t.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        if names.len() != self.state.len() {
            return bad("shape: two state tensors of one name".into());
        }
        for tensor in &self.state {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            let reserved = tensor.name == "tokens"
                || tensor.name == "__metadata__"
                || tensor.name.starts_with("kv.")
                || tensor.name.starts_with("_pad.");
            if tensor.name.is_empty()
                || tensor.name.len() > MAX_NAME
                || !tensor.name.chars().all(plain)
                || reserved
            {
                return bad(format!("shape: tensor name {:?}", tensor.name));
            }
            if tensor.shape.is_empty() || tensor.shape.len() > MAX_DIMS {
                return bad(format!("shape: {} has no fitting dimensions", tensor.name));
            }
        }
        if self.checked_state_bytes().is_none() {
            return bad("shape: the state is too large".into());
        }
        let block = self.kv_row_bytes.checked_mul(u64::from(BLOCK_TOKENS));
        if block.is_none_or(|bytes| bytes > MAX_PIECE_BYTES) {
            return bad("shape: a block of KV is too large".into());
        }
        if let Some(kv) = &self.kv
            && kv.row_bytes() != Some(self.kv_row_bytes)
        {
            return bad("shape: row length and KV tensor disagree".into());
        }
        Ok(())
    }

    /// Bytes of the packed state of one shard.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        self.checked_state_bytes().unwrap_or(u64::MAX)
    }

    /// The pieces of one shard of an object: the whole state, or KV cut at multiples of
    /// [`BLOCK_TOKENS`].
    #[must_use]
    pub fn pieces(&self, kind: ObjectKind, range: TokenRange) -> Vec<Piece> {
        match kind {
            ObjectKind::State => vec![Piece {
                range: TokenRange::at(range.end),
                bytes: self.state_bytes(),
            }],
            ObjectKind::Kv => cut(range)
                .map(|range| Piece {
                    range,
                    bytes: u64::from(range.len()).saturating_mul(self.kv_row_bytes),
                })
                .collect(),
        }
    }

    fn checked_state_bytes(&self) -> Option<u64> {
        let mut sum = 0u64;
        for tensor in &self.state {
            sum = sum.checked_add(tensor.bytes()?)?;
        }
        (sum <= MAX_PIECE_BYTES).then_some(sum)
    }
}

/// Cuts a range at multiples of [`BLOCK_TOKENS`].
fn cut(range: TokenRange) -> impl Iterator<Item = TokenRange> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        if start >= range.end {
            return None;
        }
        let block_end = (start / BLOCK_TOKENS + 1).saturating_mul(BLOCK_TOKENS);
        let piece = TokenRange {
            start,
            end: block_end.min(range.end),
        };
        start = piece.end;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> ObjectShape {
        ObjectShape {
            state: vec![
                TensorShape {
                    name: "conv.0".into(),
                    dtype: Dtype::BF16,
                    shape: vec![3, 5, 7],
                },
                TensorShape {
                    name: "temporal".into(),
                    dtype: Dtype::F32,
                    shape: vec![3, 0, 4],
                },
            ],
            kv_row_bytes: 2 * 2 * 4 * 8 * 2,
            kv: Some(UniformKv {
                dtype: Dtype::F16,
                layers: 4,
                heads: 8,
                head_dim: 2,
            }),
        }
    }

    #[test]
    fn pieces_are_cut_at_blocks() {
        let shape = shape();
        shape.validate().unwrap();
        let range = |start, end| TokenRange { start, end };
        let pieces = shape.pieces(ObjectKind::Kv, range(1000, 3000));
        let ranges: Vec<TokenRange> = pieces.iter().map(|p| p.range).collect();
        let expected = [range(1000, 1024), range(1024, 2048), range(2048, 3000)];
        assert_eq!(ranges, expected);
        assert_eq!(pieces[0].bytes, 24 * 256);
        let top = range(u32::MAX - 5, u32::MAX);
        assert_eq!(shape.pieces(ObjectKind::Kv, top).len(), 1);
        let state = shape.pieces(ObjectKind::State, TokenRange::at(77));
        assert_eq!(state[0].bytes, 3 * 5 * 7 * 2);
        assert_eq!(state[0].range, TokenRange::at(77));
    }

    #[test]
    fn hostile_shapes_are_refused() {
        let refused = |change: &dyn Fn(&mut ObjectShape)| {
            let mut shape = shape();
            change(&mut shape);
            assert!(shape.validate().is_err(), "{shape:?}");
        };
        for name in [
            "",
            "tokens",
            "kv.0-1",
            "_pad.0",
            "a/b",
            "a\"b",
            "__metadata__",
        ] {
            refused(&|s| s.state[0].name = name.into());
        }
        refused(&|s| s.state[0].name = "x".repeat(65));
        refused(&|s| s.state[1].name = "conv.0".into());
        refused(&|s| s.state[0].shape = vec![u32::MAX; 3]);
        refused(&|s| s.state[0].shape = vec![u32::MAX; 2]);
        refused(&|s| s.state[0].shape = vec![]);
        refused(&|s| s.kv_row_bytes = u64::MAX);
        refused(&|s| s.kv_row_bytes += 1);
    }
}
