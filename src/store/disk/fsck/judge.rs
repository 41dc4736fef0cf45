//! From what was found to what is wrong, and what is to be done about it.

use std::collections::{BTreeMap, HashSet};

use crate::{
    store::{counters::Reason, sealed_json::Bad},
    types::SnapshotId,
};

use super::super::{layout, ledger::on_disk, root::Rel};
use super::survey::{Survey, Thing, Use, Verdict};
use super::verify::sound;
use super::{Class, Finding, ModelReport, NamespaceReport, Report};

/// What is wrong with one file.
pub(super) struct Problem {
    pub(super) class: Class,
    pub(super) rel: Rel,
    pub(super) cure: Cure,
    pub(super) reason: Option<Reason>,
    pub(super) detail: String,
    pub(super) snapshot: Option<SnapshotId>,
    pub(super) repaired: bool,
}

/// What is to be done, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cure {
    /// Remove all that a daemon makes again.
    Derived,
    /// Write it anew.
    Format,
    /// Put a manifest aside.
    Manifest,
    /// Put anything else aside.
    Aside,
    /// Remove a file.
    Remove,
    /// Remove an empty folder.
    Fold,
    /// Nothing of it is there any more, or it is to stay.
    Nothing,
}

// === impl Problem ===

impl Problem {
    pub(super) fn finding(self) -> Finding {
        Finding {
            class: self.class,
            path: self.rel.as_path().to_string_lossy().into_owned(),
            reason: self.reason.map(Reason::as_str),
            detail: self.detail,
            snapshot: self.snapshot.map(|id| id.0.hyphenated().to_string()),
            repaired: self.repaired,
        }
    }

    fn new(class: Class, rel: Rel, cure: Cure, detail: impl Into<String>) -> Self {
        Self {
            class,
            rel,
            cure,
            reason: None,
            detail: detail.into(),
            snapshot: None,
            repaired: false,
        }
    }

    fn damage(rel: Rel, cure: Cure, Bad { reason, detail, .. }: &Bad) -> Self {
        Self {
            reason: Some(*reason),
            ..Self::new(Class::Damage, rel, cure, detail.clone())
        }
    }
}

/// Counts what is sound, and lists what is not: gravest first, then by path.
pub(super) fn judge(survey: &Survey) -> (Report, Vec<Problem>) {
    let mut problems = Vec::new();
    // Objects that a sound snapshot needs.
    let mut needed = HashSet::new();
    let mut snapshots: BTreeMap<(usize, usize), u64> = BTreeMap::new();
    for (index, snapshot) in survey.snapshots.iter().enumerate() {
        if let Some(content) = sound(survey, index) {
            let parts = content.kv.iter().chain([&content.state]);
            needed.extend(parts.map(|part| part.object));
            let key = (snapshot.model, content.namespace);
            *snapshots.entry(key).or_default() += 1;
            continue;
        }
        let bad = match &snapshot.content {
            Err(bad) => bad.clone(),
            Ok(content) => {
                let mut parts = [&content.state].into_iter().chain(&content.kv);
                let what = parts.find_map(|part| lacking(survey, part));
                Bad::new(Reason::Incomplete, what.unwrap_or_default())
            }
        };
        let mut problem = Problem::damage(snapshot.rel.clone(), Cure::Manifest, &bad);
        problem.snapshot = Some(snapshot.id);
        problems.push(problem);
    }
    let mut report = Report {
        snapshots: snapshots.values().sum(),
        objects: needed.len() as u64,
        tokens: survey.tokens,
        verified_bytes: survey.verified_bytes,
        catalogued: survey.rows,
        conversations: survey.conversations,
        quarantined_files: survey.quarantined,
        space: survey.space,
        ..Report::default()
    };
    for (index, thing) in survey.objects.iter().enumerate() {
        let sound = needed.contains(&index);
        let bytes = judge_object(survey, thing, sound, &mut problems);
        report.space.objects += bytes.0;
        report.space.other += bytes.1;
    }
    judge_others(survey, &mut problems);
    report.models = models(survey, &snapshots, &needed);
    problems.sort_by(|a, b| (a.class, a.rel.as_path()).cmp(&(b.class, b.rel.as_path())));
    (report, problems)
}

/// What a manifest lacks in this object, if anything.
fn lacking(survey: &Survey, part: &Use) -> Option<String> {
    let thing = survey.objects.get(part.object)?;
    let id = thing.id;
    match &thing.verdict {
        Verdict::Sound(claim) if *claim == part.claim => None,
        Verdict::Sound(_) => Some(format!("object {id} is another one than it says")),
        Verdict::Missing(shard) => Some(format!("object {id} lacks shard {shard}")),
        Verdict::Bad(shard, Bad { reason, detail, .. }) => {
            let reason = reason.as_str();
            Some(format!("object {id}, shard {shard}: {reason} ({detail})"))
        }
        Verdict::Open => Some(format!("object {id} was not checked")),
    }
}

/// Adds what is wrong with an object; gives the bytes of its good files and of the others.
fn judge_object(
    survey: &Survey,
    thing: &Thing,
    sound: bool,
    problems: &mut Vec<Problem>,
) -> (u64, u64) {
    let understood = survey
        .models
        .get(thing.model)
        .is_some_and(|model| model.understood);
    let (mut good, mut other) = (0, 0);
    let shards = match &thing.verdict {
        Verdict::Sound(claim) if sound => thing.claims.get(*claim).map_or(0, |claim| claim.shards),
        _ => 0,
    };
    for (shard, len) in &thing.files {
        if *shard < shards {
            good += on_disk(*len);
            continue;
        }
        other += on_disk(*len);
        let Some(rel) = survey.file(thing, *shard) else {
            continue;
        };
        problems.push(match &thing.verdict {
            Verdict::Bad(bad_shard, bad) => {
                let detail = match shard == bad_shard {
                    true => bad.detail.clone(),
                    false => format!("shard {bad_shard} is bad: {}", bad.detail),
                };
                Problem::damage(rel, Cure::Aside, &Bad::new(bad.reason, detail))
            }
            Verdict::Missing(missing) => {
                let bad = Bad::new(Reason::Incomplete, format!("shard {missing} is missing"));
                Problem::damage(rel, Cure::Aside, &bad)
            }
            _ if !understood => {
                let why = "no manifest names it, but one of this model was not understood";
                Problem::new(Class::Note, rel, Cure::Nothing, why)
            }
            _ => {
                let what = "no good manifest names it";
                Problem::new(Class::Leftover, rel, Cure::Remove, what)
            }
        });
    }
    (good, other)
}

fn judge_others(survey: &Survey, problems: &mut Vec<Problem>) {
    for (rel, bad) in &survey.bad {
        let cure = match rel.as_path().as_os_str() == layout::FORMAT {
            // Only if nothing here may be of another version.
            true if survey.models.iter().all(|model| model.understood) => Cure::Format,
            true => Cure::Nothing,
            false => Cure::Aside,
        };
        problems.push(Problem::damage(rel.clone(), cure, bad));
    }
    for (rel, bad) in &survey.derived_bad {
        let mut problem = Problem::damage(rel.clone(), Cure::Derived, bad);
        problem.detail.push_str("; the next start makes it again");
        problems.push(problem);
    }
    for rel in &survey.unused {
        let what = "it belongs to no catalog";
        problems.push(Problem::new(
            Class::Leftover,
            rel.clone(),
            Cure::Remove,
            what,
        ));
    }
    for rel in &survey.temporary {
        let what = "left by a writer that was killed";
        problems.push(Problem::new(
            Class::Leftover,
            rel.clone(),
            Cure::Remove,
            what,
        ));
    }
    for rel in &survey.empty {
        problems.push(Problem::new(
            Class::Leftover,
            rel.clone(),
            Cure::Fold,
            "an empty folder",
        ));
    }
    for rel in &survey.strange {
        problems.push(Problem::new(
            Class::Note,
            rel.clone(),
            Cure::Nothing,
            "an unknown name",
        ));
    }
    for model in survey.models.iter().filter(|model| model.known.is_none()) {
        let what = format!(
            "a model without a good description: {} files are not checked, and left alone until a \
             worker of this model attaches",
            model.unchecked
        );
        problems.push(Problem::new(
            Class::Note,
            model.folder.clone(),
            Cure::Nothing,
            what,
        ));
    }
}

fn models(
    survey: &Survey,
    snapshots: &BTreeMap<(usize, usize), u64>,
    needed: &HashSet<usize>,
) -> Vec<ModelReport> {
    let mut objects = vec![0; survey.models.len()];
    for thing in needed.iter().filter_map(|index| survey.objects.get(*index)) {
        if let Some(count) = objects.get_mut(thing.model) {
            *count += 1;
        }
    }
    let models = survey.models.iter().enumerate().zip(objects);
    let models = models.map(|((number, model), objects)| {
        let own = snapshots.range((number, 0)..=(number, usize::MAX));
        let namespaces: Vec<NamespaceReport> = own
            .filter_map(|((_, namespace), snapshots)| {
                let (id, namespace) = survey.namespaces.get(*namespace)?;
                Some(NamespaceReport {
                    namespace: id.to_string(),
                    tenant: namespace.tenant.clone(),
                    snapshots: *snapshots,
                })
            })
            .collect();
        let known = model.known.as_ref();
        ModelReport {
            folder: model.folder.as_path().to_string_lossy().into_owned(),
            fingerprint: known.map(|known| known.fingerprint.to_string()),
            description: known
                .map(|known| known.description.clone())
                .unwrap_or_default(),
            snapshots: namespaces.iter().map(|row| row.snapshots).sum(),
            objects,
            bytes: model.bytes,
            namespaces,
        }
    });
    models.collect()
}
