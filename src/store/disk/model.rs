//! What is known of a model: the shape of its objects, and words for people. One file a model,
//! `model.json`, a sealed JSON file (see `sealed_json`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    store::{sealed_json::Record, shape::ObjectShape},
    types::Fingerprint,
};

/// The content of `model.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelFile {
    pub(crate) format_version: u32,
    pub(crate) fingerprint: Fingerprint,
    /// For people: architecture, display name, ….
    pub(crate) description: BTreeMap<String, String>,
    pub(crate) shape: ObjectShape,
}

impl Record for ModelFile {
    const FORMAT: u32 = 1;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn check(&self) -> Result<(), String> {
        self.shape.validate().map_err(|error| error.to_string())
    }
}
