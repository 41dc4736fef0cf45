//! Kinds of tiers and of objects.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where bytes are kept, fastest first.
#[derive(
    Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum TierKind {
    /// Memory of the accelerator.
    Vram,
    /// The daemon's arena in host memory.
    Ram,
    /// Files of this host.
    Disk,
    /// An object store.
    Remote,
}

/// What an object holds.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectKind {
    /// The recurrent state of all layers at one boundary.
    State,
    /// Attention KV of a token range, all layers.
    Kv,
}

// === impl TierKind ===

impl TierKind {
    /// All tiers, fastest first.
    pub const ALL: [Self; 4] = [Self::Vram, Self::Ram, Self::Disk, Self::Remote];

    /// The name in the API, in metrics and in files.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::Ram => "ram",
            Self::Disk => "disk",
            Self::Remote => "remote",
        }
    }
}

impl fmt::Display for TierKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

// === impl ObjectKind ===

impl ObjectKind {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::State, Self::Kv];

    /// The name in the API, in metrics and in files.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Kv => "kv",
        }
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_agree_with_serde() {
        for tier in TierKind::ALL {
            assert_eq!(serde_json::to_value(tier).unwrap(), tier.as_str());
        }
        for kind in ObjectKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
        }
    }
}
