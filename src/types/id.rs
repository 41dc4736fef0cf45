//! Ids of things that come and go: snapshots, sessions, leases.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

macro_rules! uuid_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Serialize, Deserialize, ToSchema,
        )]
        #[serde(transparent)]
        #[schema(value_type = String, format = Uuid)]
        pub struct $name(pub Uuid);

        impl $name {
            /// The id in its 16-byte wire form.
            #[must_use]
            pub fn to_bytes(self) -> [u8; 16] {
                self.0.into_bytes()
            }

            /// The id from its 16-byte wire form; any bytes are an id.
            #[must_use]
            pub fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(Uuid::from_bytes(bytes))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }
    };
}

uuid_type! {
    /// An immutable manifest. A version 7 UUID: ids sort by the time they were made.
    SnapshotId
}
uuid_type! {
    /// One attachment of one worker.
    SessionId
}
uuid_type! {
    /// One start of the daemon: another value means another daemon.
    BootId
}
uuid_type! {
    /// The workers of one server; made by rank 0.
    InstanceId
}

impl SnapshotId {
    /// A fresh id.
    #[must_use]
    pub fn new() -> Self {
        #[cfg(test)]
        if let Some(id) = scripted::next() {
            return id;
        }
        Self(Uuid::now_v7())
    }
}

/// Ids that follow from a seed, for runs that can be repeated.
#[cfg(test)]
pub(crate) mod scripted {
    use std::cell::Cell;

    use uuid::Uuid;

    use super::SnapshotId;

    thread_local! {
        /// The seed, and how many there were.
        static SCRIPT: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
    }

    /// From now on the ids made in this thread follow from `seed`; `None`: from time and chance.
    pub fn begin(seed: Option<u64>) {
        SCRIPT.set(seed.map(|seed| (seed, 0)));
    }

    pub(super) fn next() -> Option<SnapshotId> {
        let (seed, count) = SCRIPT.get()?;
        SCRIPT.set(Some((seed, count + 1)));
        let low = (seed ^ count).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 2;
        // Ids sort by the time they were made; version and variant are those of real ones.
        let id = Uuid::from_u64_pair((count + 1) << 16 | 0x7000, low | 1 << 63);
        Some(SnapshotId(id))
    }
}

impl Default for SnapshotId {
    fn default() -> Self {
        Self::new()
    }
}

impl SessionId {
    /// A fresh random id.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl BootId {
    /// A fresh random id.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl InstanceId {
    /// A fresh random id.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

/// A hold on the objects of one snapshot while they are read. 0 means none on the wire.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

/// Which save the shards of one object come from: all shards of an object carry the same one.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_ids_sort_by_time_and_round_trip() {
        let ids: Vec<SnapshotId> = (0..1000).map(|_| SnapshotId::new()).collect();
        assert!(ids.is_sorted());
        let id = ids[0];
        assert_eq!(id.to_string().parse::<SnapshotId>().unwrap(), id);
        assert_eq!(SnapshotId::from_bytes(id.to_bytes()), id);
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(serde_json::from_str::<SnapshotId>(&json).unwrap(), id);
        assert!("../x".parse::<SnapshotId>().is_err());
    }
}
