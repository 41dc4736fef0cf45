//! `catalog.json`: which catalog it is, and how far it can be trusted.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::store::{
    disk::{layout, root::Rel},
    sealed_json::Record as Sealed,
};

use super::frame;

/// Where this host says which boot it is in.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// `catalog.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogFile {
    pub(crate) format_version: u32,
    pub(crate) epoch: u64,
    /// The boot of the host in which it is written.
    pub(crate) boot: String,
    /// The length of the log after an orderly end.
    pub(crate) closed: Option<u64>,
}

// === impl CatalogFile ===

impl Sealed for CatalogFile {
    const FORMAT: u32 = frame::VERSION;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

impl CatalogFile {
    pub(super) fn new(epoch: u64, closed: Option<u64>) -> Self {
        Self {
            format_version: Self::FORMAT,
            epoch,
            boot: boot(),
            closed,
        }
    }
}

/// The boot that this host is in; empty if it does not say.
pub(crate) fn boot() -> String {
    let boot = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
    boot.trim().to_owned()
}

/// An epoch that no other catalog has.
pub(super) fn new_epoch() -> u64 {
    let (_, low) = Uuid::new_v4().as_u64_pair();
    low | 1
}

/// Where `catalog.json` is.
pub(crate) fn state_rel() -> Rel {
    Rel::root().join(layout::CATALOG_STATE)
}
