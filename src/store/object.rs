//! Objects: what is stored, addressed by the prefix that it belongs to.

use std::sync::Arc;

use crate::types::{
    Fingerprint, Generation, NamespaceId, ObjectId, ObjectKind, TokenId, TokenRange,
};

use super::{
    arena::Segment,
    error::StoreError,
    shape::{MAX_OBJECT_TOKENS, ObjectShape},
};

/// Most payload bytes of one shard of an object.
pub const MAX_SHARD_BYTES: u64 = 1 << 40;
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

    /// Checks it against the limits and, if given, against the model's shape.
    pub fn validate(&self, shape: Option<&ObjectShape>) -> Result<(), StoreError> {
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
        if let Some(shape) = shape
            && self.pieces != shape.pieces(self.kind, self.range)
        {
            return bad("pieces differ from the model's shape");
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
    pub fn validate(&self, shape: Option<&ObjectShape>) -> Result<(), StoreError> {
        let meta = &*self.meta;
        meta.validate(shape)?;
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
