//! What the store did, as plain counters that metrics read.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Why a file was moved to quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// It is shorter or longer than it must be.
    Length,
    /// Its header is damaged.
    Header,
    /// Its bytes do not have the checksum written with them.
    Checksum,
    /// It is whole, but says that it is something else than its place says.
    Mismatch,
    /// A format version that this program does not know.
    Version,
    /// A field that this program does not know.
    UnknownField,
    /// It is no JSON, or not of the right form.
    Malformed,
    /// It contradicts itself or a limit.
    Invalid,
    /// It is a link, a folder or a device where a plain file should be.
    NotAFile,
    /// Something that it needs is not there.
    Incomplete,
    /// The medium could not read it.
    Unreadable,
}

/// Counters since the start; every field counts up.
#[derive(Debug, Default)]
pub struct Counters {
    written_payload: AtomicU64,
    written_bytes: AtomicU64,
    written_files: AtomicU64,
    already_there: AtomicU64,
    read_payload: AtomicU64,
    verify_failures: AtomicU64,
    lost: AtomicU64,
    quarantined: [AtomicU64; Reason::ALL.len()],
    quarantine_failed: AtomicU64,
    swept: AtomicU64,
    orphans: AtomicU64,
    orphan_bytes: AtomicU64,
    strange: AtomicU64,
    unreadable_models: AtomicU64,
    fsync_failures: AtomicU64,
    catalog_lost: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Bytes of states and KV written to disk.
    pub written_payload: u64,
    /// All bytes written to disk: payload, headers, padding, manifests.
    pub written_bytes: u64,
    /// Files that appeared under their final name.
    pub written_files: u64,
    /// Puts of an object that was there: nothing was written.
    pub already_there: u64,
    /// Bytes of states and KV read from disk and found right.
    pub read_payload: u64,
    /// Files that did not pass verification when read.
    pub verify_failures: u64,
    /// Objects of which a file was missing.
    pub lost: u64,
    /// Files moved to quarantine, by reason.
    pub quarantined: Vec<(Reason, u64)>,
    /// Bad files that could not be moved; they are found again at the next start.
    pub quarantine_failed: u64,
    /// Temporary files that a dead writer left, removed at the start.
    pub swept: u64,
    /// Object files that no manifest names, removed at the start.
    pub orphans: u64,
    /// Their bytes.
    pub orphan_bytes: u64,
    /// Files of unknown names in the data directory, left as they are.
    pub strange: u64,
    /// Models left as they are because their description cannot be read.
    pub unreadable_models: u64,
    /// Failed fsyncs.
    pub fsync_failures: u64,
    /// Catalogs that could not be written any more.
    pub catalog_lost: u64,
}

// === impl Reason ===

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 11] = [
        Self::Length,
        Self::Header,
        Self::Checksum,
        Self::Mismatch,
        Self::Version,
        Self::UnknownField,
        Self::Malformed,
        Self::Invalid,
        Self::NotAFile,
        Self::Incomplete,
        Self::Unreadable,
    ];

    /// The name in metrics, logs and the quarantine's notes.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Header => "header",
            Self::Checksum => "checksum",
            Self::Mismatch => "mismatch",
            Self::Version => "version",
            Self::UnknownField => "unknown_field",
            Self::Malformed => "malformed",
            Self::Invalid => "invalid",
            Self::NotAFile => "not_a_file",
            Self::Incomplete => "incomplete",
            Self::Unreadable => "unreadable",
        }
    }
}

// === impl Counters ===

impl Counters {
    /// The counters now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let Self {
            written_payload,
            written_bytes,
            written_files,
            already_there,
            read_payload,
            verify_failures,
            lost,
            quarantined,
            quarantine_failed,
            swept,
            orphans,
            orphan_bytes,
            strange,
            unreadable_models,
            fsync_failures,
            catalog_lost,
        } = self;
        Counts {
            written_payload: written_payload.load(Relaxed),
            written_bytes: written_bytes.load(Relaxed),
            written_files: written_files.load(Relaxed),
            already_there: already_there.load(Relaxed),
            read_payload: read_payload.load(Relaxed),
            verify_failures: verify_failures.load(Relaxed),
            lost: lost.load(Relaxed),
            quarantined: Reason::ALL
                .into_iter()
                .zip(quarantined)
                .map(|(reason, count)| (reason, count.load(Relaxed)))
                .collect(),
            quarantine_failed: quarantine_failed.load(Relaxed),
            swept: swept.load(Relaxed),
            orphans: orphans.load(Relaxed),
            orphan_bytes: orphan_bytes.load(Relaxed),
            strange: strange.load(Relaxed),
            unreadable_models: unreadable_models.load(Relaxed),
            fsync_failures: fsync_failures.load(Relaxed),
            catalog_lost: catalog_lost.load(Relaxed),
        }
    }

    pub(crate) fn wrote_object(&self, files: u64, payload: u64) {
        self.written_files.fetch_add(files, Relaxed);
        self.written_payload.fetch_add(payload, Relaxed);
    }

    pub(crate) fn wrote_file(&self) {
        self.written_files.fetch_add(1, Relaxed);
    }

    pub(crate) fn wrote_bytes(&self, bytes: u64) {
        self.written_bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn was_there(&self) {
        self.already_there.fetch_add(1, Relaxed);
    }

    pub(crate) fn read_object(&self, payload: u64) {
        self.read_payload.fetch_add(payload, Relaxed);
    }

    pub(crate) fn failed_verification(&self) {
        self.verify_failures.fetch_add(1, Relaxed);
    }

    pub(crate) fn lost_object(&self) {
        self.lost.fetch_add(1, Relaxed);
    }

    pub(crate) fn quarantined(&self, reason: Reason) {
        for (_, count) in self.by_reason().filter(|(of, _)| *of == reason) {
            count.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn failed_to_quarantine(&self) {
        self.quarantine_failed.fetch_add(1, Relaxed);
    }

    pub(crate) fn swept(&self) {
        self.swept.fetch_add(1, Relaxed);
    }

    pub(crate) fn orphan(&self, bytes: u64) {
        self.orphans.fetch_add(1, Relaxed);
        self.orphan_bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn strange(&self) {
        self.strange.fetch_add(1, Relaxed);
    }

    pub(crate) fn unreadable_model(&self) {
        self.unreadable_models.fetch_add(1, Relaxed);
    }

    pub(crate) fn failed_fsync(&self) {
        self.fsync_failures.fetch_add(1, Relaxed);
    }

    pub(crate) fn lost_catalog(&self) {
        self.catalog_lost.fetch_add(1, Relaxed);
    }

    fn by_reason(&self) -> impl Iterator<Item = (Reason, &AtomicU64)> {
        Reason::ALL.into_iter().zip(&self.quarantined)
    }
}

// === impl Counts ===

impl Counts {
    /// Files moved to quarantine for this reason.
    #[must_use]
    pub fn quarantined_for(&self, reason: Reason) -> u64 {
        let found = self.quarantined.iter().find(|(of, _)| *of == reason);
        found.map_or(0, |(_, count)| *count)
    }

    /// Files moved to quarantine, all reasons.
    #[must_use]
    pub fn quarantined_total(&self) -> u64 {
        self.quarantined.iter().map(|(_, count)| count).sum()
    }
}
