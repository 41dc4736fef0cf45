//! The check of a data directory that no daemon uses.
//!
//! # What
//! Everything that a daemon would trust is read: the format file, the models' descriptions, every
//! manifest, every object that one names (header, length, tokens, each chunk's checksum), and every
//! conversation. The tokens of each snapshot are hashed again: they must give the addresses of all
//! its objects. References are followed both ways: what a manifest names must be there, and what is
//! there must be named. The catalog must say of each snapshot what its manifest says, and the token log
//! must have the tokens that it names; both are made again by a daemon, so damage of them costs time
//! and nothing else.
//!
//! # State
//! `Survey` is what the folders and manifests say, `verify` adds what the bytes say, `judge` makes
//! problems of both, and `repair` deals with those. Without repair the directory is opened so
//! that every change is refused, and the lock is a shared one that leaves no note.
//!
//! # Order of writes
//! Repair goes the way that deleting goes: manifests leave first, then the objects that they named,
//! then what nobody names any more. Damage is moved to quarantine with its reason; only temporary
//! files, objects that no manifest names, and what can be made again are removed. A file that is
//! sound and named by a sound manifest is not touched. Catalog and token log go first if
//! anything damaged is to leave, so the next start reads the manifests.
//!
//! # Cancellation
//! A check can be killed at any time. A repair that is killed leaves less damage than it found; what
//! lost its object by then is found by the next one.
//!
//! # Errors
//! Damage is a finding. An error means that the check could not be done: somebody uses the
//! directory, it is of another version, or the system refuses (as after a failed fsync).

mod derived;
mod judge;
mod records;
mod repair;
mod report;
mod survey;
mod verify;

use std::path::PathBuf;
use std::sync::Arc;

use crate::{
    store::{counters::Counters, error::StoreError, fault::Faults},
    util::clock::Clock,
};

use super::{
    data_dir::{lock, lock_to_read},
    layout,
    root::{Kind, Rel, Root},
};

pub use report::{Class, Finding, ModelReport, NamespaceReport, Report, Space};
use survey::Survey;

/// What is to be checked, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The data directory.
    pub path: PathBuf,
    /// Deal with what is found; without, nothing is changed.
    pub repair: bool,
    /// Leave out the checksums of chunks.
    pub fast: bool,
    /// Threads that read, at least one.
    pub threads: usize,
    /// Most bytes of bad files that stay in quarantine; the oldest go first.
    pub quarantine: u64,
}

/// How far a check is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done: `manifests`, `objects`, `tokens`, `token log`.
    pub phase: &'static str,
    /// Of these so many are done.
    pub done: u64,
    /// All of them.
    pub total: u64,
    /// Bytes read for checksums so far.
    pub bytes: u64,
}

/// Told how far a check is, from any of its threads.
pub type Watch<'a> = dyn Fn(Progress) + Sync + 'a;

/// Checks a data directory.
///
/// # Errors
/// `Locked`: somebody uses it. `NotAStore`, `Invalid`: it is none. `Version`. Those of the system.
pub fn check(
    options: &Options,
    clock: &dyn Clock,
    watch: &Watch<'_>,
) -> Result<Report, StoreError> {
    check_with(options, clock, watch, Faults::default())
}

/// As [`check`], with switches for faults.
pub(crate) fn check_with(
    options: &Options,
    clock: &dyn Clock,
    watch: &Watch<'_>,
    faults: Faults,
) -> Result<Report, StoreError> {
    let began = clock.monotonic();
    let root = Root::open_existing(&options.path, faults, Arc::new(Counters::default()))?;
    is_a_store(&root)?;
    // Held until the end.
    let _lock = if options.repair {
        Some(lock(&root, clock.now())?)
    } else {
        root.only_read();
        lock_to_read(&root, clock.now())?
    };
    let mut survey = Survey::take(&root, options.threads, watch)?;
    verify::objects(&root, &mut survey, options, watch)?;
    verify::tokens(&root, &mut survey, options.threads, watch)?;
    derived::check(&root, &mut survey, options, watch)?;
    let (mut report, mut problems) = judge::judge(&survey);
    if options.repair {
        repair::repair(&root, &mut problems, &survey, options, clock.now())?;
    }
    report.path.clone_from(&options.path);
    report.fast = options.fast;
    report.repair = options.repair;
    report.findings = problems.into_iter().map(judge::Problem::finding).collect();
    report.seconds = clock.monotonic().saturating_sub(began).as_secs_f64();
    Ok(report)
}

/// Refuses what is no data directory. One that lost its format file is one.
fn is_a_store(root: &Root) -> Result<(), StoreError> {
    let entries = root.list(&Rel::root())?;
    let has = |name: &str| entries.iter().any(|entry| entry.name == name);
    let folder = |name: &str| {
        let found = entries.iter().find(|entry| entry.name == name);
        found.is_some_and(|entry| entry.kind == Kind::Folder)
    };
    if has(layout::FORMAT) || (folder(layout::MODELS) && has(layout::LOCK)) {
        return Ok(());
    }
    match entries.first() {
        Some(entry) => Err(StoreError::NotAStore {
            path: root.path().to_owned(),
            found: entry.name.to_string_lossy().into_owned(),
        }),
        None => Err(StoreError::invalid(format!(
            "data directory {}: nothing is in it",
            root.path().display()
        ))),
    }
}
