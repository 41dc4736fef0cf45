//! The JSON of a pair: what the tensors are.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{BundleError, CHUNK};
use crate::{
    pool::Geometry,
    store::{
        Encoding,
        object::MAX_SHARDS,
        sealed_json::{self, Record},
    },
    types::{Fingerprint, Millis, Namespace, SnapshotId, hex},
};

const FORMAT: &str = "engram.snapshot";
const MAX_NAMES: usize = 4096;
const MAX_NAME: usize = 16 << 10;
/// 16 PiB: nothing that is added to a size of a file overflows.
const MAX_FILE: u64 = 1 << 54;

/// What a snapshot was called. It says nothing about its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Names {
    /// Tenant of the conversation.
    pub tenant: Option<String>,
    /// Conversation that named it.
    pub conversation: Option<String>,
    /// Its turn there, counted from 1.
    pub turn: Option<u32>,
    /// Tokens of that turn's prompt and answer: the boundary or more.
    pub total_tokens: Option<u32>,
    /// The request.
    pub rid: Option<String>,
    /// Branches of the conversation that named it.
    pub branches: Vec<String>,
}

/// All that is to be known of the tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bundle {
    /// 1.
    pub format_version: u32,
    /// `engram.snapshot`.
    pub format: String,
    /// `raw`.
    pub encoding: String,
    /// The snapshot's id where it was exported.
    pub snapshot: SnapshotId,
    /// The model.
    pub fingerprint: Fingerprint,
    /// The model for people: `name`, ….
    pub model: BTreeMap<String, String>,
    /// Names, types and sizes of what one shard holds.
    pub geometry: Geometry,
    /// Attention tensor-parallel ranks.
    pub shards: u32,
    /// Who may share it.
    pub namespace: Namespace,
    /// Token count at which the state stands.
    pub boundary: u32,
    /// When the snapshot was made.
    pub created: Millis,
    /// When it was exported.
    pub exported: Millis,
    /// What it was called.
    pub names: Names,
    /// Length of the safetensors file.
    pub file_bytes: u64,
    /// 1048576.
    pub chunk_bytes: u64,
    /// CRC-32C of each `chunk_bytes` of the safetensors file, the last one shorter: 8 hexadecimal
    /// digits each.
    pub checksums: Vec<String>,
}

// === impl Bundle ===

impl Bundle {
    /// The version written and read here.
    pub const FORMAT: u32 = 1;

    /// A description without checksums of tensors that are still to be written.
    #[must_use]
    pub fn of(
        (snapshot, fingerprint): (SnapshotId, Fingerprint),
        (geometry, shards): (Geometry, u32),
        (namespace, boundary): (Namespace, u32),
        [created, exported]: [Millis; 2],
    ) -> Self {
        Self {
            format_version: Self::FORMAT,
            format: FORMAT.into(),
            encoding: Encoding::Raw.as_str().into(),
            snapshot,
            fingerprint,
            model: BTreeMap::new(),
            geometry,
            shards,
            namespace,
            boundary,
            created,
            exported,
            names: Names::default(),
            file_bytes: 0,
            chunk_bytes: CHUNK,
            checksums: Vec::new(),
        }
    }

    /// The bytes of its file.
    ///
    /// # Errors
    /// `Description`: it contradicts itself.
    pub fn encode(&self) -> Result<Vec<u8>, BundleError> {
        sealed_json::encode(self).map_err(|bad| BundleError::Description { detail: bad.detail })
    }

    /// The description in a file's bytes.
    ///
    /// # Errors
    /// `Version`, `Encoding`, `Description`.
    pub fn decode(bytes: &[u8]) -> Result<Self, BundleError> {
        let bundle: Self = sealed_json::decode(bytes).map_err(|bad| match bad.version {
            Some(found) => BundleError::Version {
                found,
                known: Self::FORMAT,
            },
            None => BundleError::Description { detail: bad.detail },
        })?;
        if bundle.encoding != Encoding::Raw.as_str() {
            return Err(BundleError::Encoding {
                found: bundle.encoding,
            });
        }
        Ok(bundle)
    }

    /// The longest file that is read.
    #[must_use]
    pub fn max_bytes() -> u64 {
        sealed_json::MAX_BYTES
    }

    /// The checksum of a chunk; `None` beyond the last.
    pub(super) fn checksum(&self, chunk: u64) -> Option<u32> {
        let digits = self.checksums.get(usize::try_from(chunk).ok()?)?;
        hex::decode::<4>(digits).map(u32::from_be_bytes).ok()
    }
}

impl Record for Bundle {
    const FORMAT: u32 = Self::FORMAT;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("format {:?} is not {FORMAT:?}", self.format));
        }
        if self.boundary == 0 {
            return Err("no tokens".into());
        }
        if self.shards == 0 || self.shards > MAX_SHARDS {
            return Err(format!("{} shards", self.shards));
        }
        if self.chunk_bytes != CHUNK {
            return Err(format!("chunks of {} bytes", self.chunk_bytes));
        }
        if self.file_bytes > MAX_FILE {
            return Err(format!("{} bytes of tensors", self.file_bytes));
        }
        let chunks = self.file_bytes.div_ceil(CHUNK);
        if self.checksums.len() as u64 != chunks {
            let count = self.checksums.len();
            return Err(format!("{count} checksums of {chunks} chunks"));
        }
        if self
            .checksums
            .iter()
            .any(|sum| hex::decode::<4>(sum).is_err())
        {
            return Err("a checksum is not 8 hexadecimal digits".into());
        }
        self.names.check(self.boundary)?;
        let long = |(key, value): (&String, &String)| key.len().max(value.len()) > MAX_NAME;
        if self.model.len() > MAX_NAMES || self.model.iter().any(long) {
            return Err("too many words about the model, or too long ones".into());
        }
        Ok(())
    }
}

// === impl Names ===

impl Names {
    fn check(&self, boundary: u32) -> Result<(), String> {
        let Self {
            tenant,
            conversation,
            turn,
            total_tokens,
            rid,
            branches,
        } = self;
        let bad = |name: &String| name.is_empty() || name.len() > MAX_NAME;
        let names = [tenant, conversation, rid].into_iter().flatten();
        if names.chain(branches).any(bad) || branches.len() > MAX_NAMES {
            return Err("an empty or too long name, or too many of them".into());
        }
        if *turn == Some(0) {
            return Err("turns count from 1".into());
        }
        if total_tokens.is_some_and(|total| total < boundary) {
            return Err("a turn that ends before its snapshot".into());
        }
        Ok(())
    }
}
