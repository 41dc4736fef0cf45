//! The quota of a namespace: what comes makes room, or stays away.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use utoipa::ToSchema;

use super::super::Service;
use super::super::api::Event;
use super::super::core::{Core, Removal};
use super::super::error::ServiceError;
use super::super::metrics::Level;
use super::metrics::ByNamespace;
use super::{Limit, told};
use crate::index::{NamespaceUsage, TreeKey};
use crate::types::{Namespace, NamespaceId, SnapshotId, TokenId};

/// How often full namespaces are counted at most.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// Snapshots that are looked for at once.
const BATCH: usize = 64;

/// What does not fit.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(in crate::service) struct Over {
    /// Bytes that the namespace holds.
    pub used: u64,
    /// Bytes that it may hold.
    pub quota: u64,
    /// Bytes that would have come.
    pub need: u64,
}

/// A namespace, as people see it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct NamespaceRow {
    /// Its id; selects it in the configuration.
    pub namespace: NamespaceId,
    /// Its name in the configuration, if it has limits of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its tenant.
    pub tenant: Option<String>,
    /// Its `extra_key`.
    pub extra_key: Option<String>,
    /// Whether it has a `cache_salt`, which is not told.
    pub salted: bool,
    /// Snapshots.
    pub snapshots: u64,
    /// States and KV, each once.
    pub objects: u64,
    /// Their bytes, in whatever tiers: what counts for the quota.
    pub used_bytes: u64,
    /// Bytes that it may hold; `None`: no limit.
    pub quota_bytes: Option<u64>,
    /// Retention by count.
    pub keep_snapshots: Option<u64>,
    /// Retention by bytes.
    pub keep_bytes: Option<u64>,
    /// Retention by time since the last use, in seconds.
    pub keep_seconds: Option<u64>,
}

// === impl Over ===

impl Over {
    pub(in crate::service) fn error(self, namespace: &Namespace) -> ServiceError {
        let Self { used, quota, need } = self;
        ServiceError::Quota {
            namespace: told(namespace),
            used,
            quota,
            need,
        }
    }
}

// === impl Service ===

impl Service {
    /// Room for so many more bytes of a namespace, made at its own cost if need be.
    /// What the tokens begin with goes last.
    pub(in crate::service) fn quota_room(
        &self,
        key: &TreeKey,
        tokens: &[TokenId],
        need: u64,
    ) -> Result<(), Over> {
        let Some(quota) = self.rules.of(&key.namespace).quota else {
            return Ok(());
        };
        let namespace = &key.namespace;
        let mut core = self.core.lock();
        let usage = |core: &Core| core.index.usage_of(namespace).bytes;
        let fits = |core: &Core| usage(core).saturating_add(need) <= quota;
        // Nothing is given up for what does not fit into an empty namespace.
        if need <= quota && !fits(&core) {
            if let Some((parent, _)) = core.index.coverage(key, tokens).deepest {
                core.index.touch(&parent, self.clock.now());
            }
            let over = usage(&core).saturating_add(need).saturating_sub(quota);
            let gone = self.give_up(&mut core, namespace, over);
            drop(core);
            self.metrics.limits.evicted.inc_by(gone.len() as u64);
            self.announce_gone(&gone, "quota");
            core = self.core.lock();
        }
        match fits(&core) {
            true => Ok(()),
            false => Err(Over {
                used: usage(&core),
                quota,
                need,
            }),
        }
    }

    /// Whether so many more bytes may come now; nothing makes room for them.
    pub(in crate::service) fn check_quota(
        &self,
        core: &Core,
        key: &TreeKey,
        need: u64,
    ) -> Result<(), Over> {
        let used = core.index.usage_of(&key.namespace).bytes;
        match self.rules.of(&key.namespace).quota {
            Some(quota) if used.saturating_add(need) > quota => Err(Over { used, quota, need }),
            _ => Ok(()),
        }
    }

    /// A snapshot is to be kept by name: its namespace must be within its quota.
    pub(in crate::service) fn quota_for(&self, id: SnapshotId) -> Result<(), ServiceError> {
        if !self.rules.any_quota() {
            return Ok(());
        }
        let found = {
            let core = self.core.lock();
            let record = core.records.get(&id);
            record.map(|record| (Arc::clone(&record.model), Arc::clone(&record.namespace)))
        };
        let Some((model, namespace)) = found else {
            return Ok(());
        };
        let key = TreeKey {
            fingerprint: model.fingerprint,
            namespace: namespace.id(),
        };
        self.quota_room(&key, &[], 0).map_err(|over| {
            self.metrics.limits.refused.inc();
            over.error(&namespace)
        })
    }

    /// Gives up to `bytes` of a namespace, or all that may go. Returns the snapshots that went.
    fn give_up(&self, core: &mut Core, namespace: &NamespaceId, bytes: u64) -> Vec<SnapshotId> {
        let before = core.index.usage_of(namespace).bytes;
        let enough = |core: &Core| {
            let now = core.index.usage_of(namespace).bytes;
            before.saturating_sub(now) >= bytes
        };
        let mut removal = Removal::default();
        for object in core.index.spare_kv(namespace) {
            if enough(core) {
                break;
            }
            if core.index.forget_object(&object).is_ok() {
                removal.objects.push(object);
            }
        }
        while !enough(core) {
            let spare = self.spare_of(core, namespace, BATCH);
            if spare.is_empty() {
                break;
            }
            for id in spare {
                if enough(core) {
                    break;
                }
                removal.append(Self::take_away(core, &id));
            }
        }
        self.let_removed_go(core, removal)
    }

    /// The first snapshots of a namespace that may go: nothing that anybody was promised is lost
    /// with them.
    pub(super) fn spare_of(
        &self,
        core: &mut Core,
        namespace: &NamespaceId,
        at_most: usize,
    ) -> Vec<SnapshotId> {
        let now = self.clock.now();
        let durable = self.store.disk.is_some();
        core.index.spare_snapshots(namespace, now, durable, at_most)
    }

    /// A snapshot goes from the index with all that it alone needs.
    pub(super) fn take_away(core: &mut Core, id: &SnapshotId) -> Removal {
        let instead = core.ancestor(id, |_, _| true);
        core.keep_tokens(*id, instead.map_or(0, |(_, boundary)| boundary));
        let removed = core.index.remove_snapshot(id);
        core.gone(removed, instead)
    }

    /// What went from the index goes from RAM, and soon from disk.
    pub(super) fn let_removed_go(&self, core: &mut Core, removal: Removal) -> Vec<SnapshotId> {
        let snapshots = removal.snapshots.clone();
        self.drop_from_ram(core, &removal.objects);
        if self.store.disk.is_some() {
            core.queue.remove(removal);
            self.wake.notify_one();
        }
        snapshots
    }

    pub(super) fn announce_gone(&self, snapshots: &[SnapshotId], reason: &'static str) {
        for snapshot in snapshots {
            self.announce(Event::Removed {
                snapshot_id: *snapshot,
                reason,
            });
        }
        if !snapshots.is_empty() {
            self.changed.notify_waiters();
        }
    }

    /// A page of the namespaces that hold something, those that hold most first, and how many there
    /// are.
    pub fn namespaces(&self, limit: usize, offset: usize) -> (Vec<NamespaceRow>, usize) {
        let mut all: Vec<(NamespaceId, NamespaceUsage)> =
            self.core.lock().index.namespaces().collect();
        let total = all.len();
        all.sort_unstable_by_key(|(id, usage)| (std::cmp::Reverse(usage.bytes), *id));
        let page: Vec<_> = all.into_iter().skip(offset).take(limit).collect();
        let wanted: Vec<NamespaceId> = page.iter().map(|(id, _)| *id).collect();
        let core = self.core.lock();
        let some = core.index.some_of(&wanted).into_iter();
        let parts = some.filter_map(|(id, snapshot)| {
            let record = core.records.get(&snapshot)?;
            Some((id, Arc::clone(&record.namespace)))
        });
        let parts: HashMap<NamespaceId, Arc<Namespace>> = parts.collect();
        drop(core);
        let row = |(id, usage): (NamespaceId, NamespaceUsage)| {
            let NamespaceUsage {
                snapshots,
                objects,
                bytes,
            } = usage;
            let Limit {
                quota,
                keep_snapshots,
                keep_bytes,
                keep_for,
            } = self.rules.of(&id);
            let parts = parts.get(&id).map(|parts| (**parts).clone());
            let parts = parts.unwrap_or_default();
            NamespaceRow {
                namespace: id,
                name: self.rules.name(&id).map(str::to_owned),
                tenant: parts.tenant,
                extra_key: parts.extra_key,
                salted: parts.cache_salt.is_some(),
                snapshots,
                objects,
                used_bytes: bytes,
                quota_bytes: quota,
                keep_snapshots,
                keep_bytes,
                keep_seconds: keep_for.map(|time| time.as_secs()),
            }
        };
        (page.into_iter().map(row).collect(), total)
    }

    /// Tells the metrics what namespaces hold: those with limits of their own by name, and all
    /// others together, so that clients can make up no label.
    pub(in crate::service) fn refresh_namespaces(&self, core: &Core) {
        let set = |name: &str, bytes: u64, level: &dyn Fn(&ByNamespace) -> Level| {
            let label = ByNamespace {
                namespace: name.to_owned(),
            };
            level(&label).set(bytes);
        };
        let used = |label: &ByNamespace| self.metrics.limits.bytes.get_or_create(label).clone();
        let quota = |label: &ByNamespace| self.metrics.limits.quota.get_or_create(label).clone();
        let mut named = 0_u64;
        for (id, name) in self.rules.named() {
            let bytes = core.index.usage_of(id).bytes;
            named = named.saturating_add(bytes);
            set(name, bytes, &used);
            if let Some(bytes) = self.rules.of(id).quota {
                set(name, bytes, &quota);
            }
        }
        let (count, all) = core.index.held();
        set("other", all.saturating_sub(named), &used);
        self.metrics.limits.namespaces.set(count);
        let now = self.clock.monotonic();
        let mut counted = self.counted_at.lock();
        if !self.rules.any_quota() || now < *counted {
            return;
        }
        *counted = now.saturating_add(COUNT_EVERY);
        let full = core.index.namespaces().filter(|(id, usage)| {
            let limit = self.rules.of(id).quota;
            limit.is_some_and(|quota| usage.bytes >= quota - quota / 10)
        });
        self.metrics.limits.full.set(full.count() as u64);
    }
}

// === impl Removal ===

impl Removal {
    pub(super) fn append(&mut self, other: Self) {
        self.snapshots.extend(other.snapshots);
        self.objects.extend(other.objects);
    }
}
