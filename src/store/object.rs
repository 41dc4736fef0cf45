//! Objects: what is stored, addressed by the prefix that it belongs to.

use std::sync::Arc;

use crate::{
    pool::{Geometry, cut},
    types::{Fingerprint, Generation, NamespaceId, ObjectId, ObjectKind, TokenId, TokenRange},
};

use super::{arena::Segment, error::StoreError};

/// Most payload bytes of one shard of an object.
pub const MAX_SHARD_BYTES: u64 = 1 << 40;
/// Most tokens of one object.
pub const MAX_OBJECT_TOKENS: u32 = 1 << 22;
/// Most shards of one object.
pub const MAX_SHARDS: u32 = 1024;

/// How the payload is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Encoding {
    /// The packed bytes as they are.
    #[default]
    Raw,
}

/// A part of an object that is read and copied as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Tokens whose KV it holds; `(boundary, boundary)` for a state.
    pub range: TokenRange,
    /// Payload bytes of one shard.
    pub bytes: u64,
}

/// What an object is, without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Its address.
    pub id: ObjectId,
    /// State or KV.
    pub kind: ObjectKind,
    /// Tokens whose KV it holds; `(boundary, boundary)` for a state.
    pub range: TokenRange,
    /// The model.
    pub fingerprint: Fingerprint,
    /// Who may share it.
    pub namespace: NamespaceId,
    /// The save that all its shards come from.
    pub generation: Generation,
    /// Shards, each with the same pieces.
    pub shards: u32,
    /// Pieces of one shard, in order.
    pub pieces: Vec<Piece>,
    /// How the payload is encoded.
    pub encoding: Encoding,
}

/// An immutable object with its bytes in the arena. Clones share the bytes.
#[derive(Clone, Debug)]
pub struct Object {
    /// What it is.
    pub meta: Arc<ObjectMeta>,
    /// Tokens of its range; empty for a state.
    pub tokens: Arc<[TokenId]>,
    /// Bytes: `[shard][piece]`.
    pub shards: Vec<Vec<Arc<Segment>>>,
}

/// The pieces of one shard of an object: the whole state, or KV cut at the ends of blocks.
#[must_use]
pub fn pieces(geometry: &Geometry, kind: ObjectKind, range: TokenRange) -> Vec<Piece> {
    match kind {
        ObjectKind::State => vec![Piece {
            range: TokenRange::at(range.end),
            bytes: geometry.state_bytes(),
        }],
        ObjectKind::Kv => cut(range)
            .map(|range| Piece {
                range,
                bytes: geometry.kv_bytes(range),
            })
            .collect(),
    }
}

// === impl Encoding ===

impl Encoding {
    /// The name in files.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
        }
    }
}

// === impl ObjectMeta ===

impl ObjectMeta {
    /// Payload bytes of all shards.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shard_bytes().saturating_mul(u64::from(self.shards))
    }

    /// Payload bytes of one shard.
    #[must_use]
    pub fn shard_bytes(&self) -> u64 {
        self.pieces
            .iter()
            .fold(0, |sum, piece| sum.saturating_add(piece.bytes))
    }

    /// Tokens stored with it: those of its range, none for a state.
    #[must_use]
    pub fn token_count(&self) -> u32 {
        match self.kind {
            ObjectKind::State => 0,
            ObjectKind::Kv => self.range.len(),
        }
    }

    /// Whether both are the same object, be it from another save.
    #[must_use]
    pub fn same_but_generation(&self, other: &Self) -> bool {
        let Self {
            id,
            kind,
            range,
            fingerprint,
            namespace,
            generation: _,
            shards,
            pieces,
            encoding,
        } = self;
        *id == other.id
            && *kind == other.kind
            && *range == other.range
            && *fingerprint == other.fingerprint
            && *namespace == other.namespace
            && *shards == other.shards
            && *pieces == other.pieces
            && *encoding == other.encoding
    }

    /// Checks it against the limits and, if given, against the model's geometry.
    pub fn validate(&self, geometry: Option<&Geometry>) -> Result<(), StoreError> {
        let bad = |what: &str| Err(StoreError::invalid(format!("object {}: {what}", self.id)));
        if self.shards == 0 || self.shards > MAX_SHARDS {
            return bad("number of shards");
        }
        if self.range.start > self.range.end {
            return bad("range");
        }
        match self.kind {
            ObjectKind::State if !self.range.is_empty() => return bad("range of a state"),
            ObjectKind::Kv if self.range.is_empty() || self.range.len() > MAX_OBJECT_TOKENS => {
                return bad("range of KV");
            }
            ObjectKind::State | ObjectKind::Kv => {}
        }
        if self.shard_bytes() > MAX_SHARD_BYTES {
            return bad("bytes of a shard");
        }
        if let Some(geometry) = geometry
            && self.pieces != pieces(geometry, self.kind, self.range)
        {
            return bad("pieces differ from the model's geometry");
        }
        Ok(())
    }
}

// === impl Object ===

impl Object {
    /// Payload bytes of all shards.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.meta.bytes()
    }

    /// Bytes of the arena that it holds: payload, headers and rounding.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        let segments = self.shards.iter().flatten();
        segments.fold(0, |sum, segment| sum.saturating_add(segment.footprint()))
    }

    /// Checks that its tokens and segments are what its description says.
    pub fn validate(&self, geometry: Option<&Geometry>) -> Result<(), StoreError> {
        let meta = &*self.meta;
        meta.validate(geometry)?;
        let bad = |what: &str| Err(StoreError::invalid(format!("object {}: {what}", meta.id)));
        if self.tokens.len() != meta.token_count() as usize {
            return bad("number of tokens");
        }
        if self.shards.len() != meta.shards as usize {
            return bad("number of shards");
        }
        for segments in &self.shards {
            let lengths = segments.iter().map(|segment| segment.len());
            if !lengths.eq(meta.pieces.iter().map(|piece| piece.bytes)) {
                return bad("length of a segment");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::sample;

    #[test]
    fn pieces_are_cut_at_blocks() {
        let geometry = sample::geometry();
        let range = |start, end| TokenRange { start, end };
        let all = pieces(&geometry, ObjectKind::Kv, range(1000, 3000));
        let ranges: Vec<TokenRange> = all.iter().map(|piece| piece.range).collect();
        let expected = [range(1000, 1024), range(1024, 2048), range(2048, 3000)];
        assert_eq!(ranges, expected);
        assert_eq!(all[0].bytes, 24 * geometry.kv_row_bytes());
        let top = range(u32::MAX - 5, u32::MAX);
        assert_eq!(pieces(&geometry, ObjectKind::Kv, top).len(), 1);
        let state = pieces(&geometry, ObjectKind::State, TokenRange::at(77));
        assert_eq!(state[0].bytes, geometry.state_bytes());
        assert_eq!(state[0].range, TokenRange::at(77));
    }
}
