//! Names in the data directory. They are made of hashes, UUIDs and numbers only.
//!
//! ```text
//! LOCK  format.json  tokens.log  scrub.json
//! catalog.json  catalog.log  tokens.<epoch, 16 digits>.log
//! models/<first 32 digits of the fingerprint>/model.json
//!     objects/<aa>/<bb>/<object>.<shard>.safetensors
//!     manifests/<last two digits>/<snapshot>.json
//! refs/<aa>/<hash of tenant and conversation>.json
//! quarantine/<time>-<n>-<name>  and  <the same>.reason.json
//! ```

use std::ffi::OsStr;

use uuid::Uuid;

use crate::{
    store::refs::ConversationKey,
    types::{Fingerprint, ObjectId, SnapshotId, hex},
};

use super::root::Rel;

pub(crate) const LOCK: &str = "LOCK";
pub(crate) const FORMAT: &str = "format.json";
/// How far the scrub is.
pub(crate) const SCRUB: &str = "scrub.json";
pub(crate) const TOKENS: &str = "tokens.log";
pub(crate) const CATALOG: &str = "catalog.log";
pub(crate) const CATALOG_STATE: &str = "catalog.json";
pub(crate) const MODELS: &str = "models";
pub(crate) const REFS: &str = "refs";
pub(crate) const QUARANTINE: &str = "quarantine";
pub(crate) const MODEL: &str = "model.json";
pub(crate) const OBJECTS: &str = "objects";
pub(crate) const MANIFESTS: &str = "manifests";

const MODEL_DIGITS: usize = 32;
const OBJECT_END: &str = ".safetensors";
const JSON_END: &str = ".json";

pub(crate) fn models() -> Rel {
    Rel::root().join(MODELS)
}

pub(crate) fn model_folder(fingerprint: &Fingerprint) -> Rel {
    let digits: String = fingerprint.to_string().chars().take(MODEL_DIGITS).collect();
    models().join(digits)
}

pub(crate) fn object(fingerprint: &Fingerprint, id: &ObjectId, shard: u32) -> Rel {
    object_folder(fingerprint, id).join(format!("{id}.{shard}{OBJECT_END}"))
}

pub(crate) fn object_folder(fingerprint: &Fingerprint, id: &ObjectId) -> Rel {
    let [a, b, ..] = id.0;
    let objects = model_folder(fingerprint).join(OBJECTS);
    objects.join(format!("{a:02x}")).join(format!("{b:02x}"))
}

pub(crate) fn manifest(fingerprint: &Fingerprint, snapshot: &SnapshotId) -> Rel {
    // The first digits are a time: neighbours would all share a folder.
    let [.., last] = snapshot.to_bytes();
    let manifests = model_folder(fingerprint).join(MANIFESTS);
    let folder = manifests.join(format!("{last:02x}"));
    folder.join(format!("{}{JSON_END}", snapshot.0.hyphenated()))
}

pub(crate) fn conversation(key: &ConversationKey) -> Rel {
    let [first, ..] = key.0;
    let folder = Rel::root().join(REFS).join(format!("{first:02x}"));
    folder.join(format!("{}{JSON_END}", key.to_hex()))
}

/// The token log of a catalog.
pub(crate) fn token_log(epoch: u64) -> String {
    format!("tokens.{epoch:016x}.log")
}

/// Whether this is the name of a catalog's token log.
pub(crate) fn is_token_log(name: &OsStr) -> bool {
    name.to_str().is_some_and(|text| {
        let digits = text
            .strip_prefix("tokens.")
            .and_then(|t| t.strip_suffix(".log"));
        digits.is_some_and(|digits| hex::decode::<8>(digits).is_ok())
    })
}

/// Where the manifests of a model are.
pub(crate) fn manifests(fingerprint: &Fingerprint) -> Rel {
    model_folder(fingerprint).join(MANIFESTS)
}

/// The object and shard of a file name.
pub(crate) fn parse_object(name: &OsStr) -> Option<(ObjectId, u32)> {
    let (id, shard) = name.to_str()?.strip_suffix(OBJECT_END)?.split_once('.')?;
    let number: u32 = shard.parse().ok()?;
    // One shard, one name: no signs, no leading zeros.
    (number.to_string() == shard).then_some((id.parse().ok()?, number))
}

/// The snapshot of a file name.
pub(crate) fn parse_manifest(name: &OsStr) -> Option<SnapshotId> {
    let text = name.to_str()?.strip_suffix(JSON_END)?;
    let id: Uuid = text.parse().ok()?;
    (id.hyphenated().to_string() == text).then_some(SnapshotId(id))
}

/// The conversation of a file name.
pub(crate) fn parse_conversation(name: &OsStr) -> Option<ConversationKey> {
    let text = name.to_str()?.strip_suffix(JSON_END)?;
    hex::decode(text).ok().map(ConversationKey)
}

/// Whether this is the name of a model's folder.
pub(crate) fn is_model(name: &OsStr) -> bool {
    name.to_str()
        .is_some_and(|text| hex::decode::<16>(text).is_ok())
}

/// The number of a folder in which files are spread.
pub(crate) fn parse_spread(name: &OsStr) -> Option<u8> {
    let [number] = hex::decode::<1>(name.to_str()?).ok()?;
    Some(number)
}

/// Whether this is a name of the folders in which files are spread.
pub(crate) fn is_spread(name: &OsStr) -> bool {
    name.to_str()
        .is_some_and(|text| hex::decode::<1>(text).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        let fingerprint = Fingerprint([0xab; 32]);
        let id = ObjectId(std::array::from_fn(|i| i as u8));
        let path = object(&fingerprint, &id, 12);
        assert_eq!(parse_object(path.name()), Some((id, 12)));
        let expected = format!(
            "models/{}/objects/00/01/{id}.12.safetensors",
            "ab".repeat(16)
        );
        assert_eq!(path.as_path().to_str().unwrap(), expected);
        let snapshot = SnapshotId::new();
        let path = manifest(&fingerprint, &snapshot);
        assert_eq!(parse_manifest(path.name()), Some(snapshot));
        let key = ConversationKey::of(Some("t"), "c");
        assert_eq!(parse_conversation(conversation(&key).name()), Some(key));
        assert!(is_model(model_folder(&fingerprint).name()));
    }
}
