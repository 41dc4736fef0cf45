//! The bytes of an object file: a safetensors file, one shard of one object.
//!
//! ```text
//! 8 bytes   n, little-endian; 8 + n is a multiple of 4096
//! n bytes   JSON, padded with spaces
//! data      tensors, each piece at a multiple of 4096 of the file; ends at one too
//! ```
//!
//! Tensors in order. KV: `tokens` (U32), then a piece for each block, `kv.<start>-<end>`, of shape
//! `[L, 2, T, heads, head_dim]` where all layers look alike and plain bytes otherwise. State: each
//! tensor of the model under its own name, `[L, …]`, without gaps, as they are packed. `_pad.<n>` are
//! the zeros between pieces: safetensors allows no holes.
//!
//! `__metadata__`, all strings, first in the JSON:
//!
//! | name | what |
//! |---|---|
//! | `header_crc32c` | CRC-32C of the 8 + n bytes with these 8 digits as `0`; always at byte 42 |
//! | `format_version` | `1` |
//! | `object`, `fingerprint`, `namespace` | 64 hexadecimal digits each |
//! | `kind` | `state` or `kv` |
//! | `range` | `<start>-<end>`, tokens; both the boundary for a state |
//! | `generation` | 16 hexadecimal digits |
//! | `shard`, `shards` | numbers |
//! | `encoding` | `raw` |
//! | `tokens_crc32c` | CRC-32C of the token tensor alone, 8 hexadecimal digits |
//! | `checksums` | JSON list: CRC-32C of each 1 MiB of the data, padding included |

use std::{collections::BTreeMap, fmt::Write};

use crc_fast::{CrcAlgorithm, checksum};
use serde::Deserialize;

use crate::{
    pool::Geometry,
    store::{
        counters::Reason,
        object::ObjectMeta,
        sealed_json::Bad,
        tensor_header::{self, add_tensor, head},
    },
    types::{Generation, ObjectKind, TokenId, TokenRange, hex},
};

// Pieces, header and file end at multiples of it.
pub(crate) use crate::store::tensor_header::ALIGN;

/// Bytes that share a checksum.
pub(crate) const CHUNK: u64 = 1 << 20;
/// Bytes of header with which a file is still taken seriously.
pub(crate) const MAX_HEADER: u64 = 16 << 20;

const FORMAT: &str = "1";
const START: &str = r#"{"__metadata__":{"header_crc32c":""#;
const LENGTH_BYTES: usize = tensor_header::LENGTH_BYTES as usize;
const CRC_AT: usize = LENGTH_BYTES + START.len();
const CRC_DIGITS: usize = 8;

/// A run of data: the token tensor, or a piece, with the zeros behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) what: What,
    /// Start in the data.
    pub(crate) offset: u64,
    /// Bytes without padding.
    pub(crate) len: u64,
    /// Bytes with padding.
    pub(crate) padded: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Tokens,
    /// `0..pieces`.
    Piece(usize),
}

/// Where everything of an object lies in the data of its files; the same for all shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) parts: Vec<Part>,
    pub(crate) data_len: u64,
    tensors: Vec<Tensor>,
}

/// What a header says besides the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) generation: Generation,
    pub(crate) tokens_crc: u32,
    pub(crate) checksums: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    start: u64,
    end: u64,
}

#[derive(Deserialize)]
struct RawHeader {
    #[serde(rename = "__metadata__")]
    metadata: RawMetadata,
    #[serde(flatten)]
    tensors: BTreeMap<String, RawTensor>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMetadata {
    #[serde(rename = "header_crc32c")]
    _header_crc32c: String,
    format_version: String,
    object: String,
    kind: String,
    range: String,
    fingerprint: String,
    namespace: String,
    generation: String,
    shard: String,
    shards: String,
    encoding: String,
    tokens_crc32c: String,
    checksums: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

// === impl Plan ===

impl Plan {
    /// The plan of a valid object (see `ObjectMeta::validate`).
    pub(crate) fn of(meta: &ObjectMeta, geometry: &Geometry) -> Self {
        let mut plan = Self {
            parts: Vec::new(),
            data_len: 0,
            tensors: Vec::new(),
        };
        match meta.kind {
            ObjectKind::State => {
                let len: u64 = meta.pieces.iter().map(|piece| piece.bytes).sum();
                for tensor in geometry.state_tensors() {
                    plan.tensors.push(Tensor {
                        name: tensor.spec.name.clone(),
                        dtype: tensor.spec.dtype.as_str(),
                        shape: tensor.dims(),
                        start: tensor.offset,
                        end: tensor.offset + tensor.bytes,
                    });
                }
                plan.part(What::Piece(0), len);
            }
            ObjectKind::Kv => {
                let tokens = u64::from(meta.range.len());
                plan.tensor("tokens".into(), "U32", vec![tokens], tokens * 4);
                plan.part(What::Tokens, tokens * 4);
                for (index, piece) in meta.pieces.iter().enumerate() {
                    let TokenRange { start, end } = piece.range;
                    let name = format!("kv.{start}-{end}");
                    match geometry.kv_uniform() {
                        Some(kv) => {
                            let rows = u64::from(piece.range.len());
                            let [layers, heads, head_dim] =
                                [kv.layers, kv.heads, kv.head_dim].map(u64::from);
                            let dims = vec![layers, 2, rows, heads, head_dim];
                            plan.tensor(name, kv.dtype.as_str(), dims, piece.bytes);
                        }
                        None => plan.tensor(name, "U8", vec![piece.bytes], piece.bytes),
                    }
                    plan.part(What::Piece(index), piece.bytes);
                }
            }
        }
        plan
    }

    /// Number of checksums.
    pub(crate) fn chunks(&self) -> u64 {
        self.data_len.div_ceil(CHUNK)
    }

    /// Number of tokens in the token tensor.
    pub(crate) fn token_bytes(&self) -> u64 {
        let tokens = self.parts.iter().find(|part| part.what == What::Tokens);
        tokens.map_or(0, |part| part.len)
    }

    fn tensor(&mut self, name: String, dtype: &'static str, shape: Vec<u64>, len: u64) {
        self.tensors.push(Tensor {
            name,
            dtype,
            shape,
            start: self.data_len,
            end: self.data_len + len,
        });
    }

    /// Ends a run of data that started at `data_len`, tensors of it included.
    fn part(&mut self, what: What, len: u64) {
        let padded = len.next_multiple_of(ALIGN);
        self.parts.push(Part {
            what,
            offset: self.data_len,
            len,
            padded,
        });
        if padded > len {
            let pads = self.tensors.iter().filter(|t| t.name.starts_with("_pad."));
            self.tensors.push(Tensor {
                name: format!("_pad.{}", pads.count()),
                dtype: "U8",
                shape: vec![padded - len],
                start: self.data_len + len,
                end: self.data_len + padded,
            });
        }
        self.data_len += padded;
    }
}

/// Bytes of data of one shard, without building the plan.
pub(crate) fn data_len(meta: &ObjectMeta) -> u64 {
    let tokens = u64::from(meta.token_count()) * 4;
    let pieces = meta.pieces.iter().map(|piece| piece.bytes);
    let parts = std::iter::once(tokens).chain(pieces);
    parts.fold(0, |sum: u64, len| {
        sum.saturating_add(len.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX))
    })
}

/// The header of one shard, its length included. Its length depends on the plan and the shard
/// alone, not on the facts.
pub(crate) fn encode_header(meta: &ObjectMeta, plan: &Plan, shard: u32, facts: &Facts) -> Vec<u8> {
    let mut json = String::from(START);
    json.push_str(&"0".repeat(CRC_DIGITS));
    let mut checksums = String::from("[");
    for (index, crc) in facts.checksums.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write_to(&mut checksums, format_args!(r#"{comma}\"{crc:08x}\""#));
    }
    checksums.push(']');
    let range = meta.range;
    let strings = [
        ("format_version", FORMAT.into()),
        ("object", meta.id.to_string()),
        ("kind", meta.kind.as_str().into()),
        ("range", format!("{}-{}", range.start, range.end)),
        ("fingerprint", meta.fingerprint.to_string()),
        ("namespace", meta.namespace.to_string()),
        ("generation", format!("{:016x}", facts.generation.0)),
        ("shard", shard.to_string()),
        ("shards", meta.shards.to_string()),
        ("encoding", meta.encoding.as_str().into()),
        ("tokens_crc32c", format!("{:08x}", facts.tokens_crc)),
        ("checksums", checksums),
    ];
    for (name, value) in strings {
        write_to(&mut json, format_args!(r#"","{name}":"{value}"#));
    }
    json.push_str("\"}");
    for tensor in &plan.tensors {
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
    let mut bytes = head(&json);
    let crc = format!("{:08x}", crc32c(&bytes));
    let digits = bytes.iter_mut().skip(CRC_AT);
    for (to, from) in digits.zip(crc.bytes()) {
        *to = from;
    }
    bytes
}

/// Length of the header whose first 8 bytes these are.
pub(crate) fn header_len(first: [u8; 8]) -> Result<u64, Bad> {
    let json = u64::from_le_bytes(first);
    let total = json.saturating_add(LENGTH_BYTES as u64);
    if total > MAX_HEADER || !total.is_multiple_of(ALIGN) {
        return Err(Bad::new(Reason::Header, format!("length {json}")));
    }
    Ok(total)
}

/// Checks a header against what the file must be, and gives what it adds to that.
pub(crate) fn decode_header(
    bytes: &[u8],
    meta: &ObjectMeta,
    plan: &Plan,
    shard: u32,
) -> Result<Facts, Bad> {
    let json = checked_json(bytes)?;
    if let Ok(version) = serde_json::from_slice::<VersionProbe>(json)
        && version.metadata.format_version != FORMAT
    {
        return Err(Bad::new(
            Reason::Version,
            format!("format version {:?}", version.metadata.format_version),
        ));
    }
    let raw: RawHeader = serde_json::from_slice(json).map_err(|error| {
        let detail = error.to_string();
        match detail.starts_with("unknown field") {
            true => Bad::new(Reason::UnknownField, detail),
            false => Bad::new(Reason::Malformed, detail),
        }
    })?;
    let RawMetadata {
        _header_crc32c,
        format_version,
        object,
        kind,
        range,
        fingerprint,
        namespace,
        generation,
        shard: said_shard,
        shards,
        encoding,
        tokens_crc32c,
        checksums,
    } = raw.metadata;
    let expected_range = format!("{}-{}", meta.range.start, meta.range.end);
    let agree = [
        ("format version", format_version == FORMAT),
        ("object", object == meta.id.to_string()),
        ("kind", kind == meta.kind.as_str()),
        ("range", range == expected_range),
        ("fingerprint", fingerprint == meta.fingerprint.to_string()),
        ("namespace", namespace == meta.namespace.to_string()),
        ("shard", said_shard == shard.to_string()),
        ("shards", shards == meta.shards.to_string()),
        ("encoding", encoding == meta.encoding.as_str()),
    ];
    if let Some((name, _)) = agree.into_iter().find(|(_, agrees)| !agrees) {
        return Err(Bad::new(Reason::Mismatch, format!("another {name}")));
    }
    let malformed = |what: &str| Bad::new(Reason::Malformed, what.to_owned());
    let number = |digits: &str| hex::decode::<4>(digits).map(u32::from_be_bytes).ok();
    let generation = hex::decode::<8>(&generation).map_err(|_| malformed("generation"))?;
    let generation = Generation(u64::from_be_bytes(generation));
    if generation != meta.generation {
        return Err(Bad::new(
            Reason::Mismatch,
            format!("generation {generation}, expected {}", meta.generation),
        ));
    }
    let checksums: Vec<String> =
        serde_json::from_str(&checksums).map_err(|_| malformed("checksums"))?;
    let checksums: Option<Vec<u32>> = checksums.iter().map(|digits| number(digits)).collect();
    let checksums = checksums
        .filter(|list| list.len() as u64 == plan.chunks())
        .ok_or_else(|| malformed("checksums"))?;
    plan.agrees(&raw.tensors)?;
    Ok(Facts {
        generation,
        tokens_crc: number(&tokens_crc32c).ok_or_else(|| malformed("tokens_crc32c"))?,
        checksums,
    })
}

impl Plan {
    fn agrees(&self, found: &BTreeMap<String, RawTensor>) -> Result<(), Bad> {
        let bad = |name: &str| Bad::new(Reason::Mismatch, format!("tensor {name:?}"));
        if found.len() != self.tensors.len() {
            return Err(bad("list"));
        }
        for tensor in &self.tensors {
            let there = found.get(&tensor.name).ok_or_else(|| bad(&tensor.name))?;
            if there.dtype != tensor.dtype
                || there.shape != tensor.shape
                || there.data_offsets != (tensor.start, tensor.end)
            {
                return Err(bad(&tensor.name));
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct VersionProbe {
    #[serde(rename = "__metadata__")]
    metadata: VersionMetadata,
}

#[derive(Deserialize)]
struct VersionMetadata {
    format_version: String,
}

/// The JSON of a header whose bytes have their checksum.
fn checked_json(bytes: &[u8]) -> Result<&[u8], Bad> {
    let damaged = || Bad::new(Reason::Header, "the header does not have its checksum");
    let (before, rest) = bytes.split_at_checked(CRC_AT).ok_or_else(damaged)?;
    let (digits, after) = rest.split_at_checked(CRC_DIGITS).ok_or_else(damaged)?;
    let (_, json) = bytes.split_at_checked(LENGTH_BYTES).ok_or_else(damaged)?;
    let mut crc = crc_fast::Digest::new(CrcAlgorithm::Crc32Iscsi);
    crc.update(before);
    crc.update(&[b'0'; CRC_DIGITS]);
    crc.update(after);
    let crc = format!("{:08x}", crc.finalize() as u32);
    if !before.ends_with(START.as_bytes()) || digits != crc.as_bytes() {
        return Err(damaged());
    }
    Ok(json)
}

/// The token tensor's bytes with its padding.
pub(crate) fn token_bytes(tokens: &[TokenId]) -> Vec<u8> {
    let mut bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    bytes.resize(bytes.len().next_multiple_of(ALIGN as usize), 0);
    bytes
}

pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    // The algorithm has 32 bits; the upper half is zero.
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC of two byte strings one after the other, from the CRC of each.
pub(crate) fn crc32c_joined(first: u32, second: u32, second_len: u64) -> u32 {
    crc_fast::checksum_combine(
        CrcAlgorithm::Crc32Iscsi,
        u64::from(first),
        u64::from(second),
        second_len,
    ) as u32
}

fn write_to(text: &mut String, args: std::fmt::Arguments<'_>) {
    text.write_fmt(args).expect("a String takes any text");
}

#[cfg(test)]
mod tests;
