//! Sizes of one state and of one token's KV on one shard, and their packed form.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{DType, GeometryError};
use crate::{proto::v1, types::TokenRange};

/// Most state tensors.
pub const MAX_STATE_TENSORS: usize = 64;
/// Most layers of a state tensor, and most KV layers.
pub const MAX_LAYERS: usize = 1024;
/// Most dimensions of one slot of one layer.
pub const MAX_RANK: usize = 8;
/// Largest packed state, in bytes.
pub const MAX_STATE_BYTES: u64 = 4 << 30;
/// Largest KV of one token, all layers, in bytes.
pub const MAX_ROW_BYTES: u64 = 1 << 20;
/// Longest name of a state tensor, in bytes.
const MAX_NAME: usize = 64;
/// Most workers that share the attention of one server.
const MAX_SHARDS: u32 = 1024;

/// What a state tensor is: `[L, S, ...shape]` in the pool, `L` layers, `S` slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateSpec {
    /// `conv.0`, `conv.1`, …, `temporal`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// The model's numbers of the layers that hold it, ascending.
    pub layers: Vec<u32>,
    /// Shape of one slot of one layer; may hold a zero.
    pub shape: Vec<u32>,
}

/// A state tensor with its place in the packed state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// What it is.
    pub spec: StateSpec,
    /// Bytes of one slot of one layer; zero if the shape holds a zero.
    pub slot_bytes: u64,
    /// Where it starts in the packed state.
    pub offset: u64,
    /// Bytes in the packed state: all layers of one slot.
    pub bytes: u64,
}

/// Attention KV of one layer: a K row and a V row a token, each `[heads, head_dim]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvLayer {
    /// The model's number of the layer.
    pub layer: u32,
    /// Element type of both.
    pub dtype: DType,
    /// Heads on this shard.
    pub heads: u32,
    /// Elements of a head's K.
    pub k_head_dim: u32,
    /// Elements of a head's V; zero where K holds all (latent attention).
    pub v_head_dim: u32,
}

/// All KV layers alike, so that a piece is one tensor `[layers, 2, T, heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvUniform {
    /// Element type.
    pub dtype: DType,
    /// Number of KV layers.
    pub layers: u32,
    /// Heads on this shard.
    pub heads: u32,
    /// Elements of a head, of K and V alike.
    pub head_dim: u32,
}

/// A geometry before it was checked; its form in files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeometrySpec {
    /// State tensors in packing order.
    pub state: Vec<StateSpec>,
    /// KV layers in packing order.
    pub kv: Vec<KvLayer>,
}

/// A checked geometry: all its sizes are known and within limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "GeometrySpec", into = "GeometrySpec")]
pub struct Geometry {
    state: Vec<StateTensor>,
    kv: Vec<KvLayer>,
    state_bytes: u64,
    kv_row_bytes: u64,
}

/// Which part of each layer a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shard {
    /// Workers that share the attention layers; part of the fingerprint.
    pub size: u32,
    /// Which of them, 0..size; no part of the fingerprint.
    pub rank: u32,
}

// === impl StateSpec ===

impl StateSpec {
    /// Bytes of one slot of one layer.
    fn slot_bytes(&self) -> Result<u64, GeometryError> {
        too_many("dimensions of a state tensor", self.shape.len(), MAX_RANK)?;
        if self.shape.contains(&0) {
            return Ok(0);
        }
        self.shape
            .iter()
            .try_fold(self.dtype.bytes(), |bytes, &dim| {
                bytes.checked_mul(u64::from(dim))
            })
            .ok_or_else(|| GeometryError::Overflow(self.name.clone()))
    }

    /// Names go into files and messages: a small alphabet, and none of the names that a file uses
    /// for itself (they start with an underscore).
    fn check_name(&self) -> Result<(), GeometryError> {
        let name = self.name.as_bytes();
        let letters = name
            .iter()
            .all(|c| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.'));
        let starts = name.first().is_some_and(u8::is_ascii_lowercase);
        if letters && starts && name.len() <= MAX_NAME {
            Ok(())
        } else {
            Err(GeometryError::Name(
                self.name.chars().take(MAX_NAME).collect(),
            ))
        }
    }
}

// === impl StateTensor ===

impl StateTensor {
    /// Its shape in the packed state: `[L, ...shape]`.
    #[must_use]
    pub fn dims(&self) -> Vec<u64> {
        let layers = self.spec.layers.len() as u64;
        std::iter::once(layers)
            .chain(self.spec.shape.iter().map(|&dim| u64::from(dim)))
            .collect()
    }
}

// === impl KvLayer ===

impl KvLayer {
    /// Bytes of one token's K. Cannot overflow in a checked [`Geometry`].
    #[must_use]
    pub fn k_row(&self) -> u64 {
        row(self.heads, self.k_head_dim, self.dtype).unwrap_or(u64::MAX)
    }

    /// Bytes of one token's V. Cannot overflow in a checked [`Geometry`].
    #[must_use]
    pub fn v_row(&self) -> u64 {
        row(self.heads, self.v_head_dim, self.dtype).unwrap_or(u64::MAX)
    }

    fn checked_row(&self) -> Option<u64> {
        row(self.heads, self.k_head_dim, self.dtype)?.checked_add(row(
            self.heads,
            self.v_head_dim,
            self.dtype,
        )?)
    }
}

// === impl Geometry ===

impl Geometry {
    /// Checks a description against all limits and computes its sizes.
    pub fn new(spec: GeometrySpec) -> Result<Self, GeometryError> {
        let GeometrySpec { state, kv } = spec;
        too_many("state tensors", state.len(), MAX_STATE_TENSORS)?;
        too_many("KV layers", kv.len(), MAX_LAYERS)?;

        let mut names = HashSet::new();
        let mut offset = 0_u64;
        let mut tensors = Vec::with_capacity(state.len());
        for spec in state {
            spec.check_name()?;
            if !names.insert(spec.name.clone()) {
                return Err(GeometryError::Duplicate(spec.name));
            }
            too_many("layers of a state tensor", spec.layers.len(), MAX_LAYERS)?;
            if spec.layers.is_empty() {
                return Err(GeometryError::NoLayers(spec.name));
            }
            if !spec.layers.is_sorted_by(|a, b| a < b) {
                return Err(GeometryError::LayerOrder(spec.name));
            }
            let slot_bytes = spec.slot_bytes()?;
            let overflow = || GeometryError::Overflow(spec.name.clone());
            let bytes = slot_bytes
                .checked_mul(spec.layers.len() as u64)
                .ok_or_else(overflow)?;
            let end = offset.checked_add(bytes).ok_or_else(overflow)?;
            at_most("bytes of state", end, MAX_STATE_BYTES)?;
            tensors.push(StateTensor {
                spec,
                slot_bytes,
                offset,
                bytes,
            });
            offset = end;
        }
        if offset == 0 {
            return Err(GeometryError::NoState);
        }

        if !kv.is_sorted_by(|a, b| a.layer < b.layer) {
            return Err(GeometryError::LayerOrder("the KV".to_owned()));
        }
        let kv_row_bytes = kv
            .iter()
            .try_fold(0_u64, |sum, layer| sum.checked_add(layer.checked_row()?))
            .ok_or_else(|| GeometryError::Overflow("a KV row".to_owned()))?;
        at_most("bytes of KV a token", kv_row_bytes, MAX_ROW_BYTES)?;
        if kv_row_bytes == 0 {
            return Err(GeometryError::NoKv);
        }
        Ok(Self {
            state: tensors,
            kv,
            state_bytes: offset,
            kv_row_bytes,
        })
    }

    /// Bytes of one packed state; not zero.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        self.state_bytes
    }

    /// Bytes of one token's KV, all layers, K and V; not zero.
    #[must_use]
    pub fn kv_row_bytes(&self) -> u64 {
        self.kv_row_bytes
    }

    /// Bytes of the packed KV of a range.
    #[must_use]
    pub fn kv_bytes(&self, range: TokenRange) -> u64 {
        // At most 2^20 times 2^32.
        self.kv_row_bytes * u64::from(range.len())
    }

    /// State tensors in packing order.
    #[must_use]
    pub fn state_tensors(&self) -> &[StateTensor] {
        &self.state
    }

    /// KV layers in packing order.
    #[must_use]
    pub fn kv_layers(&self) -> &[KvLayer] {
        &self.kv
    }

    /// What all KV layers have in common, if they are alike and K is as wide as V.
    #[must_use]
    pub fn kv_uniform(&self) -> Option<KvUniform> {
        let first = self.kv.first()?;
        let alike = |layer: &KvLayer| {
            (layer.dtype, layer.heads, layer.k_head_dim, layer.v_head_dim)
                == (first.dtype, first.heads, first.k_head_dim, first.k_head_dim)
        };
        self.kv.iter().all(alike).then_some(KvUniform {
            dtype: first.dtype,
            layers: self.kv.len() as u32,
            heads: first.heads,
            head_dim: first.k_head_dim,
        })
    }
}

impl TryFrom<GeometrySpec> for Geometry {
    type Error = GeometryError;

    fn try_from(spec: GeometrySpec) -> Result<Self, GeometryError> {
        Self::new(spec)
    }
}

impl From<Geometry> for GeometrySpec {
    fn from(geometry: Geometry) -> Self {
        let state = geometry
            .state
            .into_iter()
            .map(|tensor| tensor.spec)
            .collect();
        Self {
            state,
            kv: geometry.kv,
        }
    }
}

impl TryFrom<&v1::AttachRequest> for Geometry {
    type Error = GeometryError;

    fn try_from(request: &v1::AttachRequest) -> Result<Self, GeometryError> {
        if !request.unknown.is_empty() {
            let shorten = |name: &String| name.chars().take(MAX_NAME).collect();
            return Err(GeometryError::UnknownPool(
                request.unknown.iter().take(8).map(shorten).collect(),
            ));
        }
        // Before anything is copied.
        too_many("state tensors", request.state.len(), MAX_STATE_TENSORS)?;
        too_many("KV layers", request.kv.len(), MAX_LAYERS)?;
        let state = request.state.iter().map(|tensor| {
            too_many("layers of a state tensor", tensor.layers.len(), MAX_LAYERS)?;
            too_many("dimensions of a state tensor", tensor.shape.len(), MAX_RANK)?;
            Ok(StateSpec {
                name: tensor.name.clone(),
                dtype: DType::from_wire(tensor.dtype)?,
                layers: tensor.layers.clone(),
                shape: tensor.shape.clone(),
            })
        });
        let kv = request.kv.iter().map(|layer| {
            Ok(KvLayer {
                layer: layer.layer,
                dtype: DType::from_wire(layer.dtype)?,
                heads: layer.heads,
                k_head_dim: layer.k_head_dim,
                v_head_dim: layer.v_head_dim,
            })
        });
        Self::new(GeometrySpec {
            state: state.collect::<Result<_, GeometryError>>()?,
            kv: kv.collect::<Result<_, GeometryError>>()?,
        })
    }
}

// === impl Shard ===

impl TryFrom<v1::Shard> for Shard {
    type Error = GeometryError;

    fn try_from(shard: v1::Shard) -> Result<Self, GeometryError> {
        let v1::Shard {
            attn_tp_size: size,
            attn_tp_rank: rank,
        } = shard;
        at_most("shards", u64::from(size), u64::from(MAX_SHARDS))?;
        if rank < size {
            Ok(Self { size, rank })
        } else {
            Err(GeometryError::Shard { rank, size })
        }
    }
}

/// Bytes of one row; `heads * dim` fits a u64 for any two u32.
fn row(heads: u32, dim: u32, dtype: DType) -> Option<u64> {
    (u64::from(heads) * u64::from(dim)).checked_mul(dtype.bytes())
}

fn too_many(what: &'static str, have: usize, most: usize) -> Result<(), GeometryError> {
    at_most(what, have as u64, most as u64)
}

fn at_most(what: &'static str, have: u64, most: u64) -> Result<(), GeometryError> {
    if have <= most {
        Ok(())
    } else {
        Err(GeometryError::TooMany { what, have, most })
    }
}

#[cfg(test)]
pub(super) mod tests;
