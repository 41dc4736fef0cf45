//! What makes saved bytes interchangeable.

use super::Geometry;
use crate::{proto::v1, types::Fingerprint};

/// The packed form that this version knows.
pub const PACKING: u32 = 1;

const MAX_ARCHITECTURE: usize = 1024;

/// Why an identity says too little to compare by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// No architecture, or a text that is none.
    #[error("an architecture of {0} bytes")]
    Architecture(usize),
    /// A digest that is not 32 bytes long.
    #[error("the {what} digest is {len} bytes long, not 32")]
    Digest {
        /// Which digest.
        what: &'static str,
        /// Its length.
        len: usize,
    },
    /// All zeros: the worker does not know its weights yet.
    #[error("the weights are not known yet")]
    UnknownWeights,
    /// A packed form that this version does not know.
    #[error("packing version {0} is not known")]
    Packing(u32),
}

/// Digest of the model's identity, the geometry of a shard and the number of shards.
///
/// Not in it: capacity, addresses, layout, page size, rank, the display name, the epoch. Names of
/// state tensors are, as they say which role the bytes at a place of the packed state have.
pub fn fingerprint(
    model: &v1::ModelIdentity,
    geometry: &Geometry,
    attn_tp_size: u32,
) -> Result<Fingerprint, IdentityError> {
    let v1::ModelIdentity {
        architecture,
        config_digest,
        weights_digest,
        display_name: _,
        packing,
    } = model;
    if architecture.is_empty() || architecture.len() > MAX_ARCHITECTURE {
        return Err(IdentityError::Architecture(architecture.len()));
    }
    let config = digest("configuration", config_digest)?;
    let weights = digest("weights", weights_digest)?;
    if *weights == [0; 32] {
        return Err(IdentityError::UnknownWeights);
    }
    if *packing != PACKING {
        return Err(IdentityError::Packing(*packing));
    }

    let mut fields = Fields(blake3::Hasher::new());
    fields.bytes(b"engram.fingerprint.1");
    fields.bytes(architecture.as_bytes());
    fields.bytes(config);
    fields.bytes(weights);
    fields.number(*packing);
    fields.number(attn_tp_size);
    fields.number(geometry.state_tensors().len() as u32);
    for tensor in geometry.state_tensors() {
        let spec = &tensor.spec;
        fields.bytes(spec.name.as_bytes());
        fields.bytes(spec.dtype.as_str().as_bytes());
        fields.numbers(&spec.layers);
        fields.numbers(&spec.shape);
    }
    fields.number(geometry.kv_layers().len() as u32);
    for layer in geometry.kv_layers() {
        fields.bytes(layer.dtype.as_str().as_bytes());
        fields.numbers(&[layer.layer, layer.heads, layer.k_head_dim, layer.v_head_dim]);
    }
    Ok(Fingerprint(*fields.0.finalize().as_bytes()))
}

fn digest<'a>(what: &'static str, bytes: &'a [u8]) -> Result<&'a [u8; 32], IdentityError> {
    bytes.try_into().map_err(|_| IdentityError::Digest {
        what,
        len: bytes.len(),
    })
}

/// Fields one after another, each with its length before it.
struct Fields(blake3::Hasher);

// === impl Fields ===

impl Fields {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0
            .update(&(bytes.len() as u64).to_le_bytes())
            .update(bytes);
    }

    fn number(&mut self, number: u32) {
        self.0.update(&number.to_le_bytes());
    }

    fn numbers(&mut self, numbers: &[u32]) {
        self.number(numbers.len() as u32);
        for &number in numbers {
            self.number(number);
        }
    }
}

#[cfg(test)]
mod tests;
