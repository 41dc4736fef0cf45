//! Who may share: states of different namespaces never meet.

use serde::{Deserialize, Serialize};

use super::{NamespaceId, hex};

/// What separates the same tokens of the same model. An absent part differs from an empty one.
#[derive(Clone, Eq, PartialEq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Namespace {
    /// Tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The request's `extra_key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_key: Option<String>,
    /// The request's `cache_salt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Digest of the adapter's content; in JSON as hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "adapter_hex")]
    pub adapter: Option<[u8; 32]>,
}

impl Namespace {
    /// BLAKE3 over a domain tag and the parts, each with a presence byte and its length, so that
    /// no two namespaces have the same input.
    #[must_use]
    pub fn id(&self) -> NamespaceId {
        let Self {
            tenant,
            extra_key,
            cache_salt,
            adapter,
        } = self;
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"engram.namespace.1\0");
        let texts = [tenant, extra_key, cache_salt].map(|part| part.as_deref().map(str::as_bytes));
        let parts = texts
            .into_iter()
            .chain([adapter.as_ref().map(<[u8; 32]>::as_slice)]);
        for part in parts {
            match part {
                None => hasher.update(&[0]),
                Some(bytes) => {
                    let len = bytes.len() as u64;
                    hasher.update(&[1]).update(&len.to_le_bytes()).update(bytes)
                }
            };
        }
        NamespaceId(*hasher.finalize().as_bytes())
    }
}

mod adapter_hex {
    use serde::{Deserialize, Deserializer, Serializer, de};

    use super::hex;

    pub(super) fn serialize<S: Serializer>(
        adapter: &Option<[u8; 32]>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match adapter {
            Some(bytes) => serializer.serialize_some(&hex::encode(bytes)),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<[u8; 32]>, D::Error> {
        Option::<String>::deserialize(deserializer)?
            .map(|text| hex::decode(&text).map_err(de::Error::custom))
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_part_counts_and_none_runs_into_the_next() {
        let text = |t: &str| Some(t.to_owned());
        let all = [
            Namespace::default(),
            Namespace {
                tenant: text(""),
                ..Namespace::default()
            },
            Namespace {
                tenant: text("a"),
                ..Namespace::default()
            },
            Namespace {
                extra_key: text("a"),
                ..Namespace::default()
            },
            Namespace {
                cache_salt: text("a"),
                ..Namespace::default()
            },
            Namespace {
                adapter: Some([0; 32]),
                ..Namespace::default()
            },
            Namespace {
                adapter: Some([1; 32]),
                ..Namespace::default()
            },
            Namespace {
                cache_salt: text(&"\0".repeat(32)),
                ..Namespace::default()
            },
            Namespace {
                tenant: text("ab"),
                extra_key: text("c"),
                ..Namespace::default()
            },
            Namespace {
                tenant: text("a"),
                extra_key: text("bc"),
                ..Namespace::default()
            },
        ];
        let ids: HashSet<NamespaceId> = all.iter().map(Namespace::id).collect();
        assert_eq!(ids.len(), all.len());
        for namespace in &all {
            let json = serde_json::to_string(namespace).unwrap();
            assert_eq!(
                &serde_json::from_str::<Namespace>(&json).unwrap(),
                namespace
            );
        }
        assert!(serde_json::from_str::<Namespace>(r#"{"tenants":"a"}"#).is_err());
    }
}
