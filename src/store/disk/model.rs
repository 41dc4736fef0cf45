//! What is known of a model: the geometry of its pools, and words for people. One file a model,
//! `model.json`, a sealed JSON file (see `sealed_json`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{pool::Geometry, store::sealed_json::Record, types::Fingerprint};

/// The content of `model.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelFile {
    pub(crate) format_version: u32,
    pub(crate) fingerprint: Fingerprint,
    /// For people: architecture, display name, ….
    pub(crate) description: BTreeMap<String, String>,
    pub(crate) geometry: Geometry,
}

impl Record for ModelFile {
    const FORMAT: u32 = 1;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn check(&self) -> Result<(), String> {
        // A geometry is checked while it is read.
        Ok(())
    }
}
