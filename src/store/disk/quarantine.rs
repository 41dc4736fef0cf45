//! Where bad files go, so that they are neither used nor lost: moved aside with a note.
//!
//! Bounded: the oldest go for good when there are too many bytes or files. A file that is larger
//! than the whole bound is removed at once; its note stays.

use std::{
    collections::VecDeque,
    fmt,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use parking_lot::Mutex;
use serde::Serialize;

use crate::{
    store::{counters::Reason, error::StoreError, object::ObjectMeta, sealed_json::Bad},
    types::Millis,
};

use super::{
    DiskTier, ReadError, layout,
    ledger::{Ledger, on_disk},
    root::{Entry, Kind, Rel, Root},
};

const MAX_FILES: usize = 10_000;
const NOTE_END: &str = ".reason.json";
const MAX_NAME: usize = 160;

/// A file that was moved to quarantine, or should have been.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// Where it was, below the data directory.
    pub path: String,
    /// What is wrong with it.
    pub reason: Reason,
    /// What exactly.
    pub detail: String,
}

#[derive(Debug)]
pub(crate) struct Quarantine {
    held: Mutex<Held>,
    count: AtomicU64,
}

#[derive(Debug)]
struct Held {
    /// Oldest first: path and bytes on disk.
    files: VecDeque<(Rel, u64)>,
    bytes: u64,
    limit: u64,
}

#[derive(Serialize)]
struct Note<'a> {
    format_version: u32,
    path: &'a str,
    reason: &'a str,
    detail: &'a str,
    at: Millis,
    bytes: u64,
}

// === impl Quarantined ===

impl fmt::Display for Quarantined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            reason,
            detail,
        } = self;
        write!(f, "{path}: {} ({detail})", reason.as_str())
    }
}

// === impl Quarantine ===

impl Quarantine {
    /// Takes over what an earlier process left there.
    pub(crate) fn open(root: &Root, ledger: &Ledger, limit: u64) -> Result<Self, StoreError> {
        let folder = Rel::root().join(layout::QUARANTINE);
        root.make_folders(&folder)?;
        let mut entries = root.list(&folder)?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let quarantine = Self {
            held: Mutex::new(Held {
                files: VecDeque::new(),
                bytes: 0,
                limit,
            }),
            count: AtomicU64::new(0),
        };
        for Entry { name, kind, len } in entries {
            let bytes = if kind == Kind::File { on_disk(len) } else { 0 };
            ledger.add(bytes);
            quarantine.hold(folder.join(name), bytes);
        }
        quarantine.trim(root, ledger);
        Ok(quarantine)
    }

    /// Moves a bad file aside. Its bytes stay counted in the ledger, if they were.
    pub(crate) fn take(
        &self,
        (root, ledger): (&Root, &Ledger),
        (rel, counted): (&Rel, u64),
        (reason, detail): (Reason, &str),
        now: Millis,
    ) -> Quarantined {
        let quarantined = Quarantined {
            path: rel.as_path().to_string_lossy().into_owned(),
            reason,
            detail: detail.to_owned(),
        };
        root.counters().quarantined(reason);
        tracing::warn!(
            path = %quarantined.path,
            reason = reason.as_str(),
            detail,
            "Bad file moved to quarantine"
        );
        if let Err(error) = self.moved(root, ledger, rel, counted, &quarantined, now) {
            root.counters().failed_to_quarantine();
            tracing::error!(path = %quarantined.path, %error, "Bad file could not be moved");
        }
        quarantined
    }

    fn moved(
        &self,
        root: &Root,
        ledger: &Ledger,
        rel: &Rel,
        counted: u64,
        what: &Quarantined,
        now: Millis,
    ) -> Result<(), StoreError> {
        let folder = Rel::root().join(layout::QUARANTINE);
        let number = self.count.fetch_add(1, Relaxed);
        let plain: String = what
            .path
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
            .take(MAX_NAME)
            .collect();
        let name = format!("{:014}-{number:06}-{plain}", now.0);
        let aside = folder.join(&name);
        root.rename(rel, &aside)?;
        self.hold(aside, counted);
        let note = Note {
            format_version: 1,
            path: &what.path,
            reason: what.reason.as_str(),
            detail: &what.detail,
            at: now,
            bytes: counted,
        };
        let bytes = serde_json::to_vec(&note).expect("plain strings and numbers");
        let note = folder.join(format!("{name}{NOTE_END}"));
        let written = root.replace(&note, &bytes);
        if written.is_ok() {
            ledger.add(on_disk(bytes.len() as u64));
            self.hold(note, on_disk(bytes.len() as u64));
        }
        self.trim(root, ledger);
        written
    }

    fn hold(&self, rel: Rel, bytes: u64) {
        let mut held = self.held.lock();
        held.bytes += bytes;
        held.files.push_back((rel, bytes));
    }

    fn trim(&self, root: &Root, ledger: &Ledger) {
        loop {
            let oldest = {
                let mut held = self.held.lock();
                if held.bytes <= held.limit && held.files.len() <= MAX_FILES {
                    return;
                }
                let oldest = held.files.pop_front();
                held.bytes -= oldest.as_ref().map_or(0, |(_, bytes)| *bytes);
                oldest
            };
            let Some((rel, bytes)) = oldest else {
                return;
            };
            match root.unlink(&rel) {
                Ok(_) => ledger.sub(bytes),
                Err(error) => tracing::warn!(%error, "Quarantine could not be trimmed"),
            }
        }
    }
}

impl DiskTier {
    /// The error for a file that could not be read. A bad or missing one takes all shards of its
    /// object with it.
    pub(super) fn failed_read(
        &self,
        meta: &ObjectMeta,
        serial: u32,
        shard: u32,
        error: ReadError,
    ) -> StoreError {
        let id = meta.id;
        let (reason, detail, result) = match error {
            ReadError::Other(error) => return error,
            ReadError::Missing => (
                Reason::Incomplete,
                format!("the file of shard {shard} is missing"),
                StoreError::Lost { object: id, shard },
            ),
            ReadError::Bad(Bad { reason, detail, .. }) => (
                reason,
                format!("shard {shard}: {detail}"),
                StoreError::Corrupt {
                    object: id,
                    shard,
                    reason,
                    detail,
                },
            ),
        };
        let _claim = self.claims.claim(id);
        if !self.objects.remove_same(&id, serial) {
            // Removed, or condemned by another reader, while this one read.
            return StoreError::NotFound { object: id };
        }
        match result {
            StoreError::Lost { .. } => self.dir.counters().lost_object(),
            _ => self.dir.counters().failed_verification(),
        }
        for other in 0..meta.shards {
            let rel = layout::object(&meta.fingerprint, &id, other);
            // Of a missing file nothing can be moved.
            if !matches!(self.dir.root.stat(&rel), Ok(None)) {
                self.dir.quarantine(&rel, reason, &detail);
            }
        }
        result
    }
}
