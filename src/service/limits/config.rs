//! Section `[service.limits]`.

use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::Limit;
use crate::types::{Namespace, NamespaceId};

/// Namespaces that may have limits of their own: each is a label of metrics.
const MAX_NAMESPACES: usize = 256;
const MAX_NAME: usize = 64;

/// What each namespace may hold, and how often that is looked after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes that a namespace may hold; more is refused. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<ByteSize>,
    /// Snapshots that a namespace keeps. Default: none, all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_snapshots: Option<u64>,
    /// Bytes that a namespace keeps. Default: none, all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_bytes: Option<ByteSize>,
    /// How long a snapshot is kept after its last use, or, over a restart, after it was made.
    /// Default: none, for ever.
    #[serde(skip_serializing_if = "Option::is_none", with = "humantime_serde")]
    pub keep_for: Option<Duration>,
    /// How often is looked for what is to go. Default: `1m`.
    #[serde(with = "humantime_serde")]
    pub check_every: Duration,
    /// Namespaces with limits of their own. Default: none.
    pub namespaces: Vec<NamespaceLimits>,
}

/// The limits of one namespace, in place of those of all. What is left out has no limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NamespaceLimits {
    /// What it is called in metrics.
    pub name: String,
    /// Its id, as `/v1/namespaces` tells it, instead of its parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<NamespaceId>,
    /// Its tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Its `extra_key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra_key: Option<String>,
    /// Its `cache_salt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// See [`Limits::quota`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<ByteSize>,
    /// See [`Limits::keep_snapshots`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_snapshots: Option<u64>,
    /// See [`Limits::keep_bytes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_bytes: Option<ByteSize>,
    /// See [`Limits::keep_for`].
    #[serde(skip_serializing_if = "Option::is_none", with = "humantime_serde")]
    pub keep_for: Option<Duration>,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            quota: None,
            keep_snapshots: None,
            keep_bytes: None,
            keep_for: None,
            check_every: Duration::from_secs(60),
            namespaces: Vec::new(),
        }
    }
}

impl Limits {
    pub(super) fn all(&self) -> Limit {
        Limit {
            quota: self.quota.map(|bytes| bytes.as_u64()),
            keep_snapshots: self.keep_snapshots,
            keep_bytes: self.keep_bytes.map(|bytes| bytes.as_u64()),
            keep_for: self.keep_for,
        }
    }

    /// Adds every problem of this section to `problems`.
    pub fn validate(&self, problems: &mut Vec<String>) {
        let mut problem = |text: String| problems.push(format!("service.limits.{text}"));
        if self.check_every < Duration::from_millis(10) {
            problem("check_every: less than 10ms".into());
        }
        if self.namespaces.len() > MAX_NAMESPACES {
            problem(format!("namespaces: more than {MAX_NAMESPACES}"));
        }
        for (at, one) in self.namespaces.iter().enumerate() {
            let before = self.namespaces.get(..at).unwrap_or_default();
            if one.name.is_empty() || one.name.len() > MAX_NAME {
                let text = format!("namespaces[{at}].name: not a name of 1 to {MAX_NAME} bytes");
                problem(text);
            }
            let parts = one.tenant.is_some() || one.extra_key.is_some() || one.cache_salt.is_some();
            if one.id.is_some() && parts {
                problem(format!("namespaces[{at}].id: given beside parts of it"));
            }
            let same = |other: &NamespaceLimits| other.id() == one.id() || other.name == one.name;
            if before.iter().any(same) {
                problem(format!("namespaces[{at}]: the same as one before it"));
            }
        }
    }
}

// === impl NamespaceLimits ===

impl NamespaceLimits {
    pub(super) fn id(&self) -> NamespaceId {
        let parts = || Namespace {
            tenant: self.tenant.clone(),
            extra_key: self.extra_key.clone(),
            cache_salt: self.cache_salt.clone(),
            adapter: None,
        };
        self.id.unwrap_or_else(|| parts().id())
    }

    pub(super) fn limit(&self) -> Limit {
        Limit {
            quota: self.quota.map(|bytes| bytes.as_u64()),
            keep_snapshots: self.keep_snapshots,
            keep_bytes: self.keep_bytes.map(|bytes| bytes.as_u64()),
            keep_for: self.keep_for,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Rules;
    use super::*;

    fn limits(text: &str) -> Limits {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn a_namespace_has_its_own_limits_or_those_of_all() {
        let limits = limits(
            r#"quota = "1 GiB"
               keep_for = "1day"
               namespaces = [
                 { name = "a", tenant = "acme", quota = "2 GiB" },
                 { name = "none", keep_snapshots = 3 },
               ]"#,
        );
        let mut problems = Vec::new();
        limits.validate(&mut problems);
        assert_eq!(problems, [""; 0]);
        let rules = Rules::new(&limits);
        let of = |tenant: Option<&str>, salt: Option<&str>| {
            let namespace = Namespace {
                tenant: tenant.map(str::to_owned),
                cache_salt: salt.map(str::to_owned),
                ..Namespace::default()
            };
            rules.of(&namespace.id())
        };
        assert_eq!(of(Some("acme"), None).quota, Some(2 << 30));
        assert_eq!(of(Some("acme"), None).keep_for, None);
        // Another namespace of that tenant.
        assert_eq!(of(Some("acme"), Some("x")).quota, Some(1 << 30));
        assert_eq!(of(None, None).keep_snapshots, Some(3));
        assert_eq!(of(None, None).quota, None);
    }

    #[test]
    fn every_problem_is_told() {
        let id = NamespaceId([7; 32]);
        let limits = limits(&format!(
            r#"check_every = "1ms"
               namespaces = [
                 {{ name = "", tenant = "a" }},
                 {{ name = "b", tenant = "a" }},
                 {{ name = "c", tenant = "d", id = "{id}" }},
               ]"#
        ));
        let mut problems = Vec::new();
        limits.validate(&mut problems);
        let keys: Vec<_> = problems
            .iter()
            .filter_map(|it| it.split(": ").next())
            .collect();
        let expected = [
            "service.limits.check_every",
            "service.limits.namespaces[0].name",
            "service.limits.namespaces[1]",
            "service.limits.namespaces[2].id",
        ];
        assert_eq!(keys, expected, "{problems:?}");
        assert!(toml::from_str::<Limits>("namespaces = [{ tenants = 'x' }]").is_err());
    }
}
