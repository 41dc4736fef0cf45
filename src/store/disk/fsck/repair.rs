//! Dealing with what is wrong.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::{store::error::StoreError, types::Millis};

use super::super::{
    data_dir::write_format,
    layout,
    ledger::{Ledger, on_disk},
    quarantine::Quarantine,
    root::{Kind, Rel, Root},
};
use super::Options;
use super::judge::{Cure, Problem};
use super::survey::Survey;

/// Deals with every problem that has a cure, in the order of the cures.
pub(super) fn repair(
    root: &Root,
    problems: &mut [Problem],
    survey: &Survey,
    options: &Options,
    now: Millis,
) -> Result<(), StoreError> {
    if problems.iter().all(|problem| problem.cure == Cure::Nothing) {
        return Ok(());
    }
    if problems.iter().any(|problem| problem.cure <= Cure::Aside) {
        // They would contradict what is left; of what nobody names they say nothing.
        for rel in &survey.derived {
            root.unlink(rel)?;
        }
        sync(root, [PathBuf::new()])?;
    }
    let ledger = Ledger::new(u64::MAX);
    let quarantine = Quarantine::open(root, &ledger, options.quarantine)?;
    let mut order: Vec<&mut Problem> = problems.iter_mut().collect();
    order.sort_by_key(|problem| problem.cure);
    let mut touched = BTreeSet::new();
    let mut before = Cure::Derived;
    for problem in order {
        if problem.cure != before {
            // What is removed next must not come back with those that named it.
            sync(root, std::mem::take(&mut touched))?;
            before = problem.cure;
        }
        problem.repaired = cure(root, (&quarantine, &ledger), problem, now)?;
        touched.insert(problem.rel.parent().as_path().to_owned());
    }
    sync(root, touched)
}

/// Says whether the problem is gone.
fn cure(
    root: &Root,
    (quarantine, ledger): (&Quarantine, &Ledger),
    problem: &Problem,
    now: Millis,
) -> Result<bool, StoreError> {
    let rel = &problem.rel;
    match problem.cure {
        Cure::Nothing => Ok(false),
        // All of it went before anything else.
        Cure::Derived => Ok(root.stat(rel)?.is_none()),
        Cure::Format => {
            if root.stat(rel)?.is_some() && !aside(root, (quarantine, ledger), problem, now)? {
                return Ok(false);
            }
            write_format(root, now)?;
            Ok(true)
        }
        Cure::Manifest | Cure::Aside => aside(root, (quarantine, ledger), problem, now),
        Cure::Remove => {
            root.unlink(rel)?;
            prune(root, &rel.parent());
            Ok(true)
        }
        Cure::Fold => {
            prune(root, rel);
            Ok(true)
        }
    }
}

fn aside(
    root: &Root,
    (quarantine, ledger): (&Quarantine, &Ledger),
    problem: &Problem,
    now: Millis,
) -> Result<bool, StoreError> {
    let Some(reason) = problem.reason else {
        return Ok(false);
    };
    let counted = match root.stat(&problem.rel)? {
        Some((Kind::File, len)) => on_disk(len),
        Some(_) => 0,
        None => return Ok(true),
    };
    ledger.add(counted);
    let place = (root, ledger);
    quarantine.take(
        place,
        (&problem.rel, counted),
        (reason, &problem.detail),
        now,
    );
    if let Some(poison) = root.poisoned() {
        return Err(StoreError::Poisoned {
            reason: poison.to_owned(),
        });
    }
    let gone = root.stat(&problem.rel)?.is_none();
    if gone {
        prune(root, &problem.rel.parent());
    }
    Ok(gone)
}

/// Removes folders in which files are spread, if empty.
fn prune(root: &Root, folder: &Rel) {
    let mut folder = folder.clone();
    while layout::is_spread(folder.name()) && root.remove_empty(&folder) {
        folder = folder.parent();
    }
}

/// The names in these folders are on the medium after this.
fn sync(root: &Root, folders: impl IntoIterator<Item = PathBuf>) -> Result<(), StoreError> {
    let mut done = BTreeSet::new();
    for path in folders {
        // A folder that became empty is gone: its parent says so.
        for path in path.ancestors() {
            if !done.insert(path.to_owned()) {
                break;
            }
            let rel = path
                .components()
                .fold(Rel::root(), |rel, name| rel.join(name.as_os_str()));
            match root.open_folder(&rel) {
                Ok(folder) => {
                    root.sync_folder(&folder)?;
                    break;
                }
                Err(error) if error.is_missing() => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}
