//! The manifest: one JSON file for each snapshot, written last. Its rename is the commit point.
//!
//! On disk it is a sealed JSON file (see `sealed_json`) with the fields of [`Manifest`] and nothing
//! else, at `models/<model>/manifests/<last two digits>/<snapshot>.json`.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::{
    pool::Geometry,
    types::{
        Fingerprint, Generation, Millis, Namespace, ObjectId, ObjectKind, SnapshotId, TokenRange,
    },
};

use super::{
    object::{Encoding, MAX_SHARDS, ObjectMeta, pieces},
    sealed_json::Record,
};

const MAX_LABELS: usize = 64;
const MAX_LABEL_KEY: usize = 64;
const MAX_LABEL_VALUE: usize = 16 << 10;

/// The state of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectRef {
    /// The object.
    pub object: ObjectId,
    /// The save that it comes from.
    pub generation: Generation,
}

/// KV of a snapshot, or a part of a longer object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvRef {
    /// The object.
    pub object: ObjectId,
    /// The save that it comes from.
    pub generation: Generation,
    /// The part used.
    pub range: TokenRange,
    /// All that the object holds.
    pub object_range: TokenRange,
}

/// A snapshot: which objects, together, are the state at a boundary and the KV of all before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// 1.
    pub format_version: u32,
    /// Its id.
    pub snapshot: SnapshotId,
    /// The snapshot that it continues.
    pub parent: Option<SnapshotId>,
    /// The model.
    pub fingerprint: Fingerprint,
    /// Who may share it.
    pub namespace: Namespace,
    /// Tokens that are new against the parent.
    pub own: TokenRange,
    /// Token count at which the state stands.
    pub boundary: u32,
    /// The state.
    pub state: ObjectRef,
    /// KV of `[0, boundary)`, in order and without holes; empty for a model without attention.
    pub kv: Vec<KvRef>,
    /// Shards of each object.
    pub shards: u32,
    /// The save that made it.
    pub generation: Generation,
    /// When.
    pub created: Millis,
    /// Payload bytes of all its objects, all shards; shared ones count in full.
    pub bytes: u64,
    /// What people and tools call it: `conversation`, `rid`, ….
    pub labels: BTreeMap<String, String>,
}

// === impl Manifest ===

impl Manifest {
    /// The version written and read here.
    pub const FORMAT: u32 = 1;

    /// What its objects must be, the state first, by its model's geometry.
    pub fn objects<'a>(&'a self, geometry: &'a Geometry) -> impl Iterator<Item = ObjectMeta> + 'a {
        let namespace = self.namespace.id();
        let meta = move |id, kind, range, generation| ObjectMeta {
            id,
            kind,
            range,
            fingerprint: self.fingerprint,
            namespace,
            generation,
            shards: self.shards,
            pieces: pieces(geometry, kind, range),
            encoding: Encoding::Raw,
        };
        let state = meta(
            self.state.object,
            ObjectKind::State,
            TokenRange::at(self.boundary),
            self.state.generation,
        );
        let kv = self.kv.iter();
        let kv = kv.map(move |r| meta(r.object, ObjectKind::Kv, r.object_range, r.generation));
        std::iter::once(state).chain(kv)
    }
}

impl Record for Manifest {
    const FORMAT: u32 = Self::FORMAT;

    fn format_version(&self) -> u32 {
        self.format_version
    }

    fn check(&self) -> Result<(), String> {
        if self.boundary == 0 || self.own.end != self.boundary {
            return Err(format!(
                "own range {} at boundary {}",
                self.own, self.boundary
            ));
        }
        if self.parent == Some(self.snapshot) {
            return Err("its own parent".into());
        }
        if self.shards == 0 || self.shards > MAX_SHARDS {
            return Err(format!("{} shards", self.shards));
        }
        let mut seen = HashSet::from([self.state.object]);
        let mut end = 0;
        for kv in &self.kv {
            if kv.range.start != end || kv.range.is_empty() || !kv.object_range.covers(kv.range) {
                return Err(format!(
                    "KV {} of an object {} after {end}",
                    kv.range, kv.object_range
                ));
            }
            if !seen.insert(kv.object) {
                return Err(format!("object {} twice", kv.object));
            }
            end = kv.range.end;
        }
        if !self.kv.is_empty() && end != self.boundary {
            return Err(format!("KV up to {end} at boundary {}", self.boundary));
        }
        let long = |(key, value): (&String, &String)| {
            key.is_empty() || key.len() > MAX_LABEL_KEY || value.len() > MAX_LABEL_VALUE
        };
        if self.labels.len() > MAX_LABELS || self.labels.iter().any(long) {
            return Err("too many labels, or too long ones".into());
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::store::{counters::Reason, sealed_json};

    pub(crate) fn sample() -> Manifest {
        let kv = |n: u8, start, end, object_end| KvRef {
            object: ObjectId([n; 32]),
            generation: Generation(3),
            range: TokenRange { start, end },
            object_range: TokenRange {
                start,
                end: object_end,
            },
        };
        Manifest {
            format_version: 1,
            snapshot: SnapshotId::new(),
            parent: Some(SnapshotId::new()),
            fingerprint: Fingerprint([7; 32]),
            namespace: Namespace {
                tenant: Some("t\u{1F600}".into()),
                ..Namespace::default()
            },
            own: TokenRange {
                start: 1024,
                end: 1500,
            },
            boundary: 1500,
            state: ObjectRef {
                object: ObjectId([9; 32]),
                generation: Generation(4),
            },
            kv: vec![kv(1, 0, 1024, 1024), kv(2, 1024, 1500, 1600)],
            shards: 2,
            generation: Generation(4),
            created: Millis(1_700_000_000_000),
            bytes: 12345,
            labels: BTreeMap::from([("conversation".into(), "../x\0".into())]),
        }
    }

    fn refused(change: impl FnOnce(&mut Manifest)) {
        let mut manifest = sample();
        change(&mut manifest);
        let bad = sealed_json::encode(&manifest).unwrap_err();
        assert!(matches!(bad.reason, Reason::Invalid | Reason::Version));
    }

    #[test]
    fn round_trip() {
        let manifest = sample();
        let bytes = sealed_json::encode(&manifest).unwrap();
        assert_eq!(sealed_json::decode::<Manifest>(&bytes).unwrap(), manifest);
    }

    #[test]
    fn contradictions_are_refused() {
        refused(|m| m.format_version = 2);
        refused(|m| m.boundary = 1499);
        refused(|m| m.own.end = 1499);
        refused(|m| m.parent = Some(m.snapshot));
        refused(|m| m.shards = 0);
        refused(|m| m.shards = MAX_SHARDS + 1);
        refused(|m| m.kv.truncate(1));
        refused(|m| m.kv[1].range.start = 1025);
        refused(|m| m.kv[1].object_range.end = 1499);
        refused(|m| m.kv[1].object = m.kv[0].object);
        refused(|m| m.kv[1].object = m.state.object);
        refused(|m| m.kv[0].range.end = 0);
        refused(|m| {
            m.labels.insert("k".into(), "v".repeat(MAX_LABEL_VALUE + 1));
        });
        refused(|m| {
            m.labels.insert(String::new(), String::new());
        });
    }

    #[test]
    fn objects_follow_the_shape() {
        let geometry = crate::store::sample::geometry_of(8, 16);
        let manifest = sample();
        let objects: Vec<ObjectMeta> = manifest.objects(&geometry).collect();
        assert_eq!(objects.len(), 3);
        for object in &objects {
            object.validate(Some(&geometry)).unwrap();
        }
        assert_eq!(objects[2].bytes(), (1600 - 1024) * 16 * 2);
        assert_eq!(objects[0].generation, Generation(4));
    }
}
