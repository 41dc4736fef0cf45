//! Objects and manifests for tests and benchmarks. Everything about them follows from a seed.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    pool::{DType, Geometry, GeometrySpec, KvLayer, StateSpec},
    types::{
        Fingerprint, Generation, Millis, Namespace, ObjectId, ObjectKind, SnapshotId, TokenId,
        TokenRange,
    },
};

use super::{
    arena::{Arena, Segment, SegmentHeader},
    manifest::{KvRef, Manifest, ObjectRef},
    object::{Encoding, Object, ObjectMeta, pieces},
};

/// The model of all samples.
pub const MODEL: Fingerprint = Fingerprint([0x5a; 32]);

/// A small model with attention, all layers alike. One token's KV: 64 bytes.
#[must_use]
pub fn geometry() -> Geometry {
    let state = |name: &str, dtype, shape: &[u32]| StateSpec {
        name: name.into(),
        dtype,
        layers: vec![0, 2],
        shape: shape.to_vec(),
    };
    let kv = |layer| KvLayer {
        layer,
        dtype: DType::F16,
        heads: 2,
        k_head_dim: 4,
        v_head_dim: 4,
    };
    checked(GeometrySpec {
        state: vec![
            state("conv.0", DType::BF16, &[3, 7]),
            state("temporal", DType::F32, &[4, 5, 6]),
        ],
        kv: vec![kv(1), kv(3)],
    })
}

/// A model whose state has `bytes` (a multiple of 4) and whose KV has `row` bytes a token, in layers
/// that are not alike.
#[must_use]
pub fn geometry_of(bytes: u32, row: u32) -> Geometry {
    checked(GeometrySpec {
        state: vec![StateSpec {
            name: "temporal".into(),
            dtype: DType::F32,
            layers: vec![0],
            shape: vec![bytes / 4],
        }],
        kv: vec![KvLayer {
            layer: 1,
            dtype: DType::U8,
            heads: 1,
            k_head_dim: row,
            v_head_dim: 0,
        }],
    })
}

fn checked(spec: GeometrySpec) -> Geometry {
    Geometry::new(spec).expect("sizes within the limits")
}

/// The id that a seed stands for; spread over all folders.
#[must_use]
pub fn id(seed: u64) -> ObjectId {
    ObjectId(*blake3::hash(&seed.to_le_bytes()).as_bytes())
}

/// Token `position` of the prefix that a seed stands for.
#[must_use]
pub fn token(seed: u64, position: u32) -> TokenId {
    (seed as u32).wrapping_mul(7919).wrapping_add(position)
}

/// The description of an object.
#[must_use]
pub fn meta(geometry: &Geometry, kind: ObjectKind, range: TokenRange, seed: u64) -> ObjectMeta {
    ObjectMeta {
        id: id(seed),
        kind,
        range,
        fingerprint: MODEL,
        namespace: Namespace::default().id(),
        generation: Generation(seed),
        shards: 2,
        pieces: pieces(geometry, kind, range),
        encoding: Encoding::Raw,
    }
}

/// The bytes of one piece.
#[must_use]
pub fn payload(seed: u64, shard: u32, piece: usize, len: u64) -> Vec<u8> {
    let key = [seed, u64::from(shard), piece as u64];
    let mut hasher = blake3::Hasher::new();
    for part in key {
        hasher.update(&part.to_le_bytes());
    }
    let mut bytes = vec![0; len as usize];
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// The object that a description and a seed stand for.
///
/// # Panics
/// If the arena is full.
#[must_use]
pub fn object(arena: &Arena, meta: ObjectMeta, seed: u64) -> Object {
    let shards = (0..meta.shards).map(|shard| {
        let pieces = meta.pieces.iter().enumerate().map(|(index, piece)| {
            let segment = arena.alloc(piece.bytes).expect("room in the arena");
            let bytes = payload(seed, shard, index, piece.bytes);
            segment.write(0, &bytes).expect("the segment's length");
            let header = SegmentHeader::of(&meta, shard, index).expect("a piece of it");
            arena.seal(&segment, &header);
            Arc::new(segment)
        });
        pieces.collect()
    });
    let shards: Vec<Vec<Arc<Segment>>> = shards.collect();
    let tokens = match meta.kind {
        ObjectKind::State => Vec::new(),
        ObjectKind::Kv => (meta.range.start..meta.range.end)
            .map(|position| token(seed, position))
            .collect(),
    };
    Object {
        meta: Arc::new(meta),
        tokens: tokens.into(),
        shards,
    }
}

/// A state at a boundary, of two shards.
#[must_use]
pub fn state(arena: &Arena, geometry: &Geometry, boundary: u32, seed: u64) -> Object {
    let meta = meta(geometry, ObjectKind::State, TokenRange::at(boundary), seed);
    object(arena, meta, seed)
}

/// KV of a range, of two shards.
#[must_use]
pub fn kv(arena: &Arena, geometry: &Geometry, start: u32, end: u32, seed: u64) -> Object {
    let meta = meta(geometry, ObjectKind::Kv, TokenRange { start, end }, seed);
    object(arena, meta, seed)
}

/// Whether an object has exactly the bytes and tokens that its seed stands for.
#[must_use]
pub fn is_right(object: &Object, seed: u64) -> bool {
    let meta = &object.meta;
    let tokens = (meta.range.start..meta.range.end).map(|position| token(seed, position));
    let right_tokens = match meta.kind {
        ObjectKind::State => object.tokens.is_empty(),
        ObjectKind::Kv => object.tokens.iter().copied().eq(tokens),
    };
    right_tokens
        && object.shards.len() == meta.shards as usize
        && (0u32..).zip(&object.shards).all(|(shard, segments)| {
            let pieces = segments.iter().zip(&meta.pieces).enumerate();
            segments.len() == meta.pieces.len()
                && pieces.into_iter().all(|(index, (segment, piece))| {
                    segment.to_vec() == payload(seed, shard, index, piece.bytes)
                })
        })
}

/// A manifest of a state and the KV before it.
#[must_use]
pub fn manifest(state: &Object, kv: &[&Object]) -> Manifest {
    let boundary = state.meta.range.end;
    let bytes = kv.iter().map(|object| object.bytes()).sum::<u64>();
    Manifest {
        format_version: Manifest::FORMAT,
        snapshot: SnapshotId::new(),
        parent: None,
        fingerprint: state.meta.fingerprint,
        namespace: Namespace::default(),
        own: TokenRange {
            start: 0,
            end: boundary,
        },
        boundary,
        state: ObjectRef {
            object: state.meta.id,
            generation: state.meta.generation,
        },
        kv: kv
            .iter()
            .map(|object| KvRef {
                object: object.meta.id,
                generation: object.meta.generation,
                range: object.meta.range,
                object_range: object.meta.range,
            })
            .collect(),
        shards: state.meta.shards,
        generation: state.meta.generation,
        created: Millis(1),
        bytes: bytes + state.bytes(),
        labels: BTreeMap::new(),
    }
}
