//! One snapshot goes to disk.
//!
//! # Order
//! Every object that the disk lacks, each durable before the next step; then the manifest, which is
//! the commit point; then the conversations that name it. A crash before the manifest leaves
//! objects that nobody names, and the next start removes them.
//!
//! # Cancellation
//! None: a snapshot that is deleted meanwhile is written to its end and then taken off the disk
//! again.

use std::collections::BTreeMap;

use super::Service;
use super::api::Event;
use super::core::{Core, Failure, Record, Removal};
use super::hold::Point;
use super::save_state::SaveState;
use crate::index::{Hit, LeaseToken, Retain, SnapshotInfo};
use crate::store::{KvRef, Manifest, ObjectRef, StoreError, Tier};
use crate::types::{Generation, ObjectId, SnapshotId, TierKind, TokenRange};

/// Everything that is needed of a snapshot to write it.
struct Plan {
    lease: LeaseToken,
    info: SnapshotInfo,
    hit: Hit,
    parent: Option<(SnapshotId, u32)>,
    lacking: Vec<ObjectId>,
}

// === impl Service ===

impl Service {
    /// Writes a snapshot down, unless it is on disk or gone.
    pub(super) fn write_down(&self, snapshot: SnapshotId) {
        let Some(plan) = self.plan_write(snapshot) else {
            return;
        };
        self.hold.block(Point::Save(&SaveState::Writing));
        let written = self.write_snapshot(snapshot, &plan);
        self.keep_disk_room();
        let Plan { lease, .. } = plan;
        match written {
            Ok(bytes) => self.written(snapshot, lease, bytes),
            Err(error) => self.not_written(snapshot, lease, &error),
        }
    }

    fn plan_write(&self, snapshot: SnapshotId) -> Option<Plan> {
        let disk = self.store.disk.as_ref()?;
        let mut core = self.core.lock();
        if core.records.get(&snapshot)?.state != SaveState::Visible {
            return None;
        }
        let info = core.index.snapshot(&snapshot)?;
        let hit = core.index.hit(&snapshot)?;
        let lease = core.index.lease(&snapshot)?;
        core.advance(&snapshot, SaveState::Writing);
        core.queue.writing = true;
        let parent = core.ancestor(&snapshot, Core::is_durable);
        let lacking = lease
            .objects()
            .filter(|object| !disk.contains(object))
            .collect();
        Some(Plan {
            lease,
            info,
            hit,
            parent,
            lacking,
        })
    }

    /// Objects, then the manifest. Returns the payload bytes written.
    fn write_snapshot(&self, snapshot: SnapshotId, plan: &Plan) -> Result<u64, StoreError> {
        let Some((disk, manifests)) = self.store.disk.as_ref().zip(self.store.manifests.as_ref())
        else {
            return Ok(0);
        };
        let (manifest, model) = {
            let core = self.core.lock();
            let Some(record) = core.records.get(&snapshot) else {
                return Ok(0);
            };
            (labels(record), std::sync::Arc::clone(&record.model))
        };
        let usage = disk.usage();
        let need = plan.info.state_bytes.saturating_add(plan.info.kv_bytes);
        if need > usage.budget {
            // Before others are evicted for nothing.
            return Err(StoreError::TooLarge {
                tier: TierKind::Disk,
                need,
                budget: usage.budget,
            });
        }
        disk.register_model(model.fingerprint, &model.geometry, model.description())?;
        let mut bytes = 0;
        for id in &plan.lacking {
            let object = self
                .store
                .ram
                .peek(id)
                .ok_or(StoreError::NotFound { object: *id })?;
            bytes += self.write_object(&object)?;
        }
        let Some(manifest) = self.manifest(snapshot, plan, manifest)? else {
            return Ok(bytes);
        };
        self.hold.block(Point::Save(&SaveState::Sealing));
        let mut tried = 0;
        loop {
            let own = manifest.own.start;
            let mut place = |after| self.place(&manifest.snapshot, if after { own } else { 0 });
            match manifests.put_placed(&manifest, &mut place) {
                Err(error) if tried < 3 && self.make_room_on_disk(&error) => tried += 1,
                put => return put.map(|()| bytes),
            }
        }
    }

    fn manifest(
        &self,
        snapshot: SnapshotId,
        plan: &Plan,
        labels: BTreeMap<String, String>,
    ) -> Result<Option<Manifest>, StoreError> {
        let Some(disk) = &self.store.disk else {
            return Ok(None);
        };
        let generation = |id: &ObjectId| -> Result<Generation, StoreError> {
            disk.generation(id)
                .ok_or(StoreError::NotFound { object: *id })
        };
        let mut kv = Vec::with_capacity(plan.hit.kv.len());
        for part in &plan.hit.kv {
            kv.push(KvRef {
                object: part.object,
                generation: generation(&part.object)?,
                range: part.range,
                object_range: part.object_range,
            });
        }
        let state = ObjectRef {
            object: plan.hit.state,
            generation: generation(&plan.hit.state)?,
        };
        let mut core = self.core.lock();
        core.advance(&snapshot, SaveState::Sealing);
        let Some(record) = core.records.get(&snapshot) else {
            return Ok(None);
        };
        let boundary = plan.hit.boundary;
        let (parent, start) = plan.parent.unzip();
        Ok(Some(Manifest {
            format_version: Manifest::FORMAT,
            snapshot,
            parent,
            fingerprint: plan.info.key.fingerprint,
            namespace: (*record.namespace).clone(),
            own: TokenRange {
                start: start.unwrap_or(0),
                end: boundary,
            },
            boundary,
            state,
            kv,
            shards: record.model.shards,
            generation: record.generation,
            created: plan.info.created,
            bytes: plan.info.state_bytes.saturating_add(plan.info.kv_bytes),
            labels,
        }))
    }

    fn written(&self, snapshot: SnapshotId, lease: LeaseToken, bytes: u64) {
        let mut core = self.core.lock();
        core.advance(&snapshot, SaveState::Durable);
        let known = core.records.get_mut(&snapshot).map(|record| {
            record.written = bytes;
            record.failure = None;
            record.conversation.clone()
        });
        match &known {
            Some(conversation) => {
                core.index.set_durable(&snapshot, true);
                for object in lease.objects() {
                    core.unnamed.remove(&object);
                }
                let named = core.conversations.named_by(snapshot).to_vec();
                let marked = core.conversations.marked_in(snapshot).cloned();
                for key in named.into_iter().chain(conversation.clone()).chain(marked) {
                    core.conversations.mark_dirty(key);
                }
            }
            // It was deleted while it was written: off the disk with it.
            None => {
                core.queue.remove(Removal {
                    snapshots: vec![snapshot],
                    objects: Vec::new(),
                });
            }
        }
        let removal = core.release(lease);
        core.queue.remove(removal);
        core.queue.writing = false;
        drop(core);
        self.write_succeeded();
        if known.is_some() {
            self.metrics.durable_snapshots.inc();
            self.announce(Event::Durable {
                snapshot_id: snapshot,
            });
            tracing::debug!(%snapshot, bytes, "Snapshot is durable");
            self.hold.block(Point::Save(&SaveState::Durable));
        }
        self.made_room();
        self.changed.notify_waiters();
    }

    fn not_written(&self, snapshot: SnapshotId, lease: LeaseToken, error: &StoreError) {
        let failure = self.write_failed(error);
        let (now, poisoned) = (self.clock.monotonic(), self.is_poisoned());
        let mut core = self.core.lock();
        core.advance(&snapshot, SaveState::Visible);
        let mark = core.queue.trouble.mark();
        let known = core.records.get_mut(&snapshot).map(|record| {
            record.failure = Some((failure, mark));
        });
        if failure == Failure::TooLarge {
            // RAM alone can keep it, for as long as nothing else needs the room.
            core.index.set_retain(&snapshot, Retain::Transient);
        } else if core.queue.is_hopeless(failure) {
            core.queue.give_up(snapshot);
        } else if known.is_some() && !poisoned {
            core.queue.push(snapshot, now);
        }
        let removal = core.release(lease);
        core.queue.remove(removal);
        core.queue.writing = false;
        drop(core);
        self.changed.notify_waiters();
    }
}

fn labels(record: &Record) -> BTreeMap<String, String> {
    let conversation = record.conversation.as_ref();
    let all = [
        ("model", Some(record.model.name.clone())),
        ("conversation", conversation.map(|key| key.name.to_string())),
        ("rid", record.rid.as_ref().map(|rid| rid.to_string())),
    ];
    all.into_iter()
        .filter_map(|(key, value)| Some((key.to_owned(), value?)))
        .collect()
}
