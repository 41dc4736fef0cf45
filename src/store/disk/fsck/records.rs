//! What manifests and conversations say.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::{
    store::{
        catalog::digests, counters::Reason, error::StoreError, manifest::Manifest,
        refs::ConversationRef, sealed_json::Bad,
    },
    types::{Namespace, ObjectId, ObjectKind, SnapshotId, TokenRange},
};

use super::super::{
    data_dir::read_record,
    layout,
    ledger::on_disk,
    parallel,
    root::{Rel, Root},
};
use super::survey::{Claim, Content, Snapshot, Survey, Use};
use super::{Progress, Watch};

impl Survey {
    pub(super) fn read_manifests(
        &mut self,
        root: &Root,
        manifests: Vec<(usize, SnapshotId, Rel)>,
        places: &mut HashMap<(usize, ObjectId), usize>,
        threads: usize,
        watch: &Watch<'_>,
    ) -> Result<(), StoreError> {
        let total = manifests.len() as u64;
        let done = AtomicU64::new(0);
        let mut namespaces = HashMap::new();
        let shared = Mutex::new((self, places, &mut namespaces));
        parallel::for_each(threads, manifests.len(), |index| {
            let Some((model, id, rel)) = manifests.get(index) else {
                return Ok(());
            };
            let read = read_record::<Manifest>(root, rel)?;
            let mut shared = shared.lock();
            let (survey, places, namespaces) = &mut *shared;
            survey.take_manifest(*model, (*id, rel), read, places, namespaces);
            drop(shared);
            watch(Progress {
                phase: "manifests",
                done: done.fetch_add(1, Relaxed) + 1,
                total,
                bytes: 0,
            });
            Ok(())
        })
    }

    fn take_manifest(
        &mut self,
        number: usize,
        (id, rel): (SnapshotId, &Rel),
        read: Result<Manifest, Bad>,
        places: &mut HashMap<(usize, ObjectId), usize>,
        namespaces: &mut HashMap<Namespace, usize>,
    ) {
        let Some(model) = self.models.get_mut(number) else {
            return;
        };
        if let Err(bad) = &read {
            // As at the start of a daemon: what it names may still be wanted.
            model.understood &= !matches!(
                bad.reason,
                Reason::Version | Reason::UnknownField | Reason::Unreadable
            );
        }
        let content = read.and_then(|manifest| {
            let place = layout::manifest(&manifest.fingerprint, &manifest.snapshot);
            if manifest.snapshot != id || place != *rel {
                return Err(Bad::new(Reason::Mismatch, "it belongs to another place"));
            }
            if manifest.kv.is_empty() {
                return Err(Bad::new(Reason::Invalid, "it names no KV, so no tokens"));
            }
            self.content(number, &manifest, places, namespaces)
        });
        self.snapshots.push(Snapshot {
            model: number,
            id,
            rel: rel.clone(),
            content,
        });
    }

    fn content(
        &mut self,
        number: usize,
        manifest: &Manifest,
        places: &mut HashMap<(usize, ObjectId), usize>,
        namespaces: &mut HashMap<Namespace, usize>,
    ) -> Result<Content, Bad> {
        let known = self
            .models
            .get(number)
            .and_then(|model| model.known.as_ref());
        let known = known.ok_or_else(|| Bad::new(Reason::Incomplete, "its model is not known"))?;
        for meta in manifest.objects(&known.geometry) {
            meta.validate(Some(&known.geometry))
                .map_err(|error| Bad::new(Reason::Invalid, error.to_string()))?;
        }
        let namespace = match namespaces.get(&manifest.namespace) {
            Some(namespace) => *namespace,
            None => {
                let number = self.namespaces.len();
                self.namespaces
                    .push((manifest.namespace.id(), manifest.namespace.clone()));
                namespaces.insert(manifest.namespace.clone(), number);
                number
            }
        };
        let claim = |kind, range, generation| Claim {
            kind,
            range,
            shards: manifest.shards,
            namespace,
            generation,
        };
        let at = TokenRange::at(manifest.boundary);
        let state = claim(ObjectKind::State, at, manifest.state.generation);
        let state = self.claim(places, number, manifest.state.object, state, at.end);
        let kv = manifest.kv.iter().map(|part| {
            let kv = claim(ObjectKind::Kv, part.object_range, part.generation);
            self.claim(places, number, part.object, kv, part.range.end)
        });
        let kv = kv.collect();
        Ok(Content {
            namespace,
            boundary: manifest.boundary,
            state,
            kv,
            digest: digests(&manifest.kv).last().copied().unwrap_or_default(),
        })
    }

    fn claim(
        &mut self,
        places: &mut HashMap<(usize, ObjectId), usize>,
        model: usize,
        id: ObjectId,
        claim: Claim,
        end: u32,
    ) -> Use {
        let object = self.thing(places, model, id);
        let claims = self.objects.get_mut(object).map(|thing| &mut thing.claims);
        let number = claims.map_or(0, |claims| {
            let same = |other: &Claim| {
                Claim {
                    generation: claim.generation,
                    ..*other
                } == claim
            };
            match claims.iter().position(same) {
                Some(number) => {
                    if let Some(known) = claims.get_mut(number) {
                        known.generation = known.generation.max(claim.generation);
                    }
                    number
                }
                None => {
                    claims.push(claim);
                    claims.len() - 1
                }
            }
        });
        Use {
            object,
            claim: number,
            end,
        }
    }

    pub(super) fn list_refs(&mut self, root: &Root) -> Result<(), StoreError> {
        let mut found = Vec::new();
        let folder = Rel::root().join(layout::REFS);
        self.spread(root, &folder, 1, &mut |survey, rel, len| {
            let Some(key) = layout::parse_conversation(rel.name()) else {
                return false;
            };
            survey.space.records += on_disk(len);
            found.push((key, rel.clone()));
            true
        })?;
        for (key, rel) in found {
            let read = read_record::<ConversationRef>(root, &rel)?;
            let read = read.and_then(|conversation| {
                let right = conversation.key() == key && layout::conversation(&key) == rel;
                let elsewhere = || Bad::new(Reason::Mismatch, "it belongs to another place");
                right.then_some(()).ok_or_else(elsewhere)
            });
            match read {
                Ok(()) => self.conversations += 1,
                Err(bad) => self.bad.push((rel, bad)),
            }
        }
        Ok(())
    }
}
