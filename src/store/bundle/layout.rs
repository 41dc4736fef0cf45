//! Where every tensor of a snapshot lies in the safetensors file. It follows from the description, so
//! it is never taken from a file, only compared with one.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use safetensors::tensor::Metadata;

use super::{Bundle, BundleError};
use crate::{
    pool::{Geometry, cut},
    store::tensor_header::{LENGTH_BYTES, add_tensor, head},
    types::TokenRange,
};

// Parts and header end at multiples of it.
pub(super) use crate::store::tensor_header::ALIGN;

/// Bytes that another program's way of writing the same header may take beside ours, four times.
const MAX_SPARE: u64 = 64 << 10;
/// Tensors of one file.
const MAX_TENSORS: u64 = 400_000;

/// What a run of bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The token ids.
    Tokens,
    /// The state of one shard.
    State {
        /// `0..shards`.
        shard: u32,
    },
    /// KV of one shard.
    Kv {
        /// `0..shards`.
        shard: u32,
        /// Its tokens: a block, or the part of one that there is.
        block: TokenRange,
    },
}

/// A run of bytes that starts at a multiple of 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it is.
    pub what: What,
    /// Bytes.
    pub len: u64,
    /// Bytes with the zeros behind them.
    pub padded: u64,
}

/// The whole file.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Everything after the header, in order.
    pub parts: Vec<Part>,
    data_bytes: u64,
    tensors: Vec<Tensor>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    start: u64,
    end: u64,
}

// === impl Layout ===

impl Layout {
    /// The layout of a snapshot.
    ///
    /// # Errors
    /// `Header`: more tensors than a file may have.
    pub fn of(bundle: &Bundle) -> Result<Self, BundleError> {
        let geometry = &bundle.geometry;
        let all = TokenRange {
            start: 0,
            end: bundle.boundary,
        };
        let kv = match (geometry.kv_row_bytes(), geometry.kv_uniform()) {
            (0, _) => 0,
            (_, Some(_)) => 1,
            (_, None) => 2 * geometry.kv_layers().len() as u64,
        };
        let blocks = u64::from(bundle.boundary).div_ceil(1024);
        let shard = geometry.state_tensors().len() as u64 + 1 + blocks * (kv + 1);
        let tensors = shard.saturating_mul(u64::from(bundle.shards));
        if tensors > MAX_TENSORS {
            return Err(header(format!("{tensors} tensors are too many")));
        }
        let mut layout = Self {
            parts: Vec::new(),
            data_bytes: 0,
            tensors: Vec::new(),
        };
        let mut pads = 0;
        let boundary = u64::from(bundle.boundary);
        layout.tensor("tokens".into(), "U32", vec![boundary], boundary * 4);
        layout.end_part(What::Tokens, &mut pads);
        for shard in 0..bundle.shards {
            let of = |name: &str| format!("rank.{shard}.{name}");
            for tensor in geometry.state_tensors() {
                let name = of(&format!("state.{}", tensor.spec.name));
                layout.tensor(
                    name,
                    tensor.spec.dtype.as_str(),
                    tensor.dims(),
                    tensor.bytes,
                );
            }
            layout.end_part(What::State { shard }, &mut pads);
            for block in cut(all).filter(|_| kv > 0) {
                layout.kv(
                    &of(&format!("kv.{}-{}", block.start, block.end)),
                    geometry,
                    block,
                );
                layout.end_part(What::Kv { shard, block }, &mut pads);
            }
        }
        Ok(layout)
    }

    fn kv(&mut self, name: &str, geometry: &Geometry, block: TokenRange) {
        let rows = u64::from(block.len());
        if let Some(kv) = geometry.kv_uniform() {
            let [layers, heads, head_dim] = [kv.layers, kv.heads, kv.head_dim].map(u64::from);
            let shape = vec![layers, 2, rows, heads, head_dim];
            return self.tensor(
                name.into(),
                kv.dtype.as_str(),
                shape,
                geometry.kv_bytes(block),
            );
        }
        for layer in geometry.kv_layers() {
            let halves = [
                ("k", layer.k_head_dim, layer.k_row()),
                ("v", layer.v_head_dim, layer.v_row()),
            ];
            for (half, head_dim, row) in halves.into_iter().filter(|(_, _, row)| *row > 0) {
                let name = format!("{name}.{}.{half}", layer.layer);
                let shape = vec![rows, u64::from(layer.heads), u64::from(head_dim)];
                self.tensor(name, layer.dtype.as_str(), shape, row.saturating_mul(rows));
            }
        }
    }

    /// Bytes of the whole file.
    #[must_use]
    pub fn file_bytes(&self, bundle: &Bundle) -> u64 {
        self.header(bundle).len() as u64 + self.data_bytes
    }

    /// The header, its length included.
    #[must_use]
    pub fn header(&self, bundle: &Bundle) -> Vec<u8> {
        let text = |value: &str| serde_json::to_string(value).unwrap_or_default();
        let mut json = String::from("{\"__metadata__\":{");
        for (index, (key, value)) in metadata(bundle).iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            add(
                &mut json,
                format_args!("{comma}{}:{}", text(key), text(value)),
            );
        }
        json.push('}');
        for tensor in &self.tensors {
            let Tensor {
                name,
                dtype,
                shape,
                start,
                end,
            } = tensor;
            add_tensor(&mut json, name, dtype, shape, (*start, *end));
        }
        json.push('}');
        head(&json)
    }

    /// The length of the JSON whose length field this is.
    pub(super) fn header_len(&self, bundle: &Bundle, field: [u8; 8]) -> Result<usize, BundleError> {
        let len = u64::from_le_bytes(field);
        let total = len.saturating_add(LENGTH_BYTES);
        let ours = self.header(bundle).len() as u64;
        if total > ours.saturating_mul(4).saturating_add(MAX_SPARE) {
            return Err(header(format!("it claims {len} bytes")));
        }
        if total.checked_add(self.data_bytes) != Some(bundle.file_bytes) {
            let data = self.data_bytes;
            return Err(header(format!(
                "{len} bytes of it and {data} of tensors are not the {} of the file",
                bundle.file_bytes
            )));
        }
        usize::try_from(len).map_err(|_| header("it is too long".into()))
    }

    /// Compares a header's JSON with what it must be.
    pub(super) fn agrees(&self, bundle: &Bundle, json: &[u8]) -> Result<(), BundleError> {
        let found: Metadata =
            serde_json::from_slice(json).map_err(|error| header(error.to_string()))?;
        let said: HashMap<String, String> = found.metadata().clone().unwrap_or_default();
        for (key, value) in metadata(bundle) {
            if said.get(key) != Some(&value) {
                return Err(header(format!(
                    "it has {key} {:?}, the description {value:?}",
                    said.get(key).map_or("", String::as_str)
                )));
            }
        }
        let names = found.offset_keys();
        if names.len() != self.tensors.len() {
            let (there, expected) = (names.len(), self.tensors.len());
            return Err(header(format!("{there} tensors, expected {expected}")));
        }
        for tensor in &self.tensors {
            let name = &tensor.name;
            let there = found
                .info(name)
                .ok_or_else(|| header(format!("tensor {name:?} is missing")))?;
            let shape = there.shape.iter().map(|len| *len as u64);
            let (start, end) = there.data_offsets;
            let what = if there.dtype.to_string() != tensor.dtype {
                format!("dtype {}, expected {}", there.dtype, tensor.dtype)
            } else if !shape.eq(tensor.shape.iter().copied()) {
                format!("shape {:?}, expected {:?}", there.shape, tensor.shape)
            } else if (start as u64, end as u64) != (tensor.start, tensor.end) {
                let expected = (tensor.start, tensor.end);
                format!(
                    "bytes {start}..{end}, expected {}..{}",
                    expected.0, expected.1
                )
            } else {
                continue;
            };
            return Err(header(format!("tensor {name:?} has {what}")));
        }
        Ok(())
    }

    fn tensor(&mut self, name: String, dtype: &'static str, shape: Vec<u64>, len: u64) {
        let start = self.tensors.last().map_or(0, |tensor| tensor.end);
        self.tensors.push(Tensor {
            name,
            dtype,
            shape,
            start,
            end: start.saturating_add(len),
        });
    }

    fn end_part(&mut self, what: What, pads: &mut u64) {
        let end = self.tensors.last().map_or(0, |tensor| tensor.end);
        let len = end.saturating_sub(self.data_bytes);
        let padded = len.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX);
        self.parts.push(Part { what, len, padded });
        if padded > len {
            let zeros = padded - len;
            self.tensor(format!("_pad.{pads}"), "U8", vec![zeros], zeros);
            *pads += 1;
        }
        self.data_bytes = self.data_bytes.saturating_add(padded);
    }
}

fn metadata(bundle: &Bundle) -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        ("format", bundle.format.clone()),
        ("format_version", bundle.format_version.to_string()),
        ("encoding", bundle.encoding.clone()),
        ("snapshot", bundle.snapshot.to_string()),
        ("fingerprint", bundle.fingerprint.to_string()),
        ("boundary", bundle.boundary.to_string()),
        ("shards", bundle.shards.to_string()),
    ])
}

fn header(detail: String) -> BundleError {
    BundleError::Header { detail }
}

fn add(text: &mut String, args: std::fmt::Arguments<'_>) {
    text.write_fmt(args).expect("a String takes any text");
}
