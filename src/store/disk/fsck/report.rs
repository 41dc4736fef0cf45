//! What a check found, for people and programs.

use std::{collections::BTreeMap, path::PathBuf};

use serde::Serialize;

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Something was lost or changed.
    Damage,
    /// What a killed writer leaves, or nobody names any more: harmless, and gone after the next
    /// start of the daemon.
    Leftover,
    /// Worth knowing; never touched.
    Note,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How grave it is.
    pub class: Class,
    /// The file, below the data directory.
    pub path: String,
    /// What kind of damage, as in the notes of the quarantine and in metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// What exactly.
    pub detail: String,
    /// The snapshot that is lost by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Whether it was dealt with.
    pub repaired: bool,
}

/// What is there of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelReport {
    /// Its folder, below the data directory.
    pub folder: String,
    /// Its fingerprint, if its description is good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Its description, for people.
    pub description: BTreeMap<String, String>,
    /// Sound snapshots.
    pub snapshots: u64,
    /// Sound objects that they name.
    pub objects: u64,
    /// Bytes of all its files on disk.
    pub bytes: u64,
    /// What separates its snapshots.
    pub namespaces: Vec<NamespaceReport>,
}

/// What is there of a namespace of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NamespaceReport {
    /// Its id.
    pub namespace: String,
    /// Its tenant. Keys and salts are not told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Sound snapshots.
    pub snapshots: u64,
}

/// Bytes on disk before any repair, in whole blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Space {
    /// Object files that a sound manifest names.
    pub objects: u64,
    /// Manifests, conversations, descriptions.
    pub records: u64,
    /// Token log and catalog.
    pub derived: u64,
    /// What was put aside.
    pub quarantine: u64,
    /// Everything else: damage, leftovers, unknown files.
    pub other: u64,
    /// All folders.
    pub folders: u64,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// The data directory.
    pub path: PathBuf,
    /// Whether the checksums of chunks were left out.
    pub fast: bool,
    /// Whether what was found was to be repaired.
    pub repair: bool,
    /// Each model.
    pub models: Vec<ModelReport>,
    /// Sound snapshots.
    pub snapshots: u64,
    /// Sound objects that they name.
    pub objects: u64,
    /// Tokens hashed again; those that snapshots share count once.
    pub tokens: u64,
    /// Bytes read for checksums of chunks.
    pub verified_bytes: u64,
    /// Snapshots that the catalog has, and says right.
    pub catalogued: u64,
    /// Sound conversations.
    pub conversations: u64,
    /// Files that an earlier repair or the daemon has put aside.
    pub quarantined_files: u64,
    /// Where the room went.
    pub space: Space,
    /// What is not as it should be, gravest first.
    pub findings: Vec<Finding>,
    /// How long it took.
    pub seconds: f64,
}

// === impl Report ===

impl Report {
    /// Findings of a class.
    pub fn of(&self, class: Class) -> impl Iterator<Item = &Finding> {
        self.findings
            .iter()
            .filter(move |finding| finding.class == class)
    }

    /// Damage that is still there.
    #[must_use]
    pub fn left(&self) -> usize {
        self.of(Class::Damage)
            .filter(|finding| !finding.repaired)
            .count()
    }

    /// Damage and leftovers that were dealt with.
    #[must_use]
    pub fn repaired(&self) -> usize {
        self.findings
            .iter()
            .filter(|finding| finding.repaired)
            .count()
    }
}

// === impl Space ===

impl Space {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> u64 {
        let Self {
            objects,
            records,
            derived,
            quarantine,
            other,
            folders,
        } = self;
        let parts = [objects, records, derived, quarantine, other, folders];
        parts
            .into_iter()
            .fold(0, |sum, part| sum.saturating_add(*part))
    }
}
