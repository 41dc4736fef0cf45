//! Changes of what is still as somebody saw it.
//!
//! A client that looked at something and changes it later may say what it saw: a digest of the JSON
//! that it got. The change compares it under the lock under which it is made, so that of two clients
//! that saw the same only one goes through.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::error::ServiceError;
use crate::types::hex;

/// Digest of the JSON of something that was shown.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Tag([u8; 16]);

/// What a change asks of the thing that it is made to.
#[derive(Clone, Debug, Default)]
pub enum Expected {
    /// Nothing.
    #[default]
    Anything,
    /// It is still as one of these saw it.
    Seen(Vec<Tag>),
}

// === impl Tag ===

impl Tag {
    /// The tag of something, as it is shown in JSON.
    ///
    /// # Errors
    /// `Internal` if it cannot be shown.
    pub fn of(shown: &impl Serialize) -> Result<Self, ServiceError> {
        let json = serde_json::to_vec(shown);
        json.map(|json| Self::of_json(&json))
            .map_err(|error| ServiceError::Internal(error.to_string()))
    }

    /// The tag of something, from its JSON.
    pub fn of_json(json: &[u8]) -> Self {
        let mut tag = [0; 16];
        blake3::Hasher::new()
            .update(json)
            .finalize_xof()
            .fill(&mut tag);
        Self(tag)
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex::write(&self.0, f)
    }
}

impl FromStr for Tag {
    type Err = hex::BadHex;

    fn from_str(text: &str) -> Result<Self, hex::BadHex> {
        hex::decode(text).map(Self)
    }
}

// === impl Expected ===

impl Expected {
    /// Compares with what is there now, which is only looked at if something is asked of it.
    ///
    /// # Errors
    /// `Changed`; what `now` says.
    pub(super) fn check<T: Serialize>(
        &self,
        now: impl FnOnce() -> Result<T, ServiceError>,
    ) -> Result<(), ServiceError> {
        let Self::Seen(seen) = self else {
            return Ok(());
        };
        let now = Tag::of(&now()?)?;
        match seen.contains(&now) {
            true => Ok(()),
            false => Err(ServiceError::Changed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_seen_passes() {
        let tag = Tag::of(&[1, 2]).unwrap();
        assert_eq!(tag, Tag::of_json(b"[1,2]"));
        assert_eq!(tag.to_string().parse::<Tag>().unwrap(), tag);
        let seen = Expected::Seen(vec![Tag::of_json(b"x"), tag]);
        assert!(seen.check(|| Ok([1, 2])).is_ok());
        let changed = seen.check(|| Ok([1, 3]));
        assert!(matches!(changed, Err(ServiceError::Changed)));
        let none: Result<u8, _> = Err(ServiceError::Changed);
        assert!(Expected::Anything.check(|| none).is_ok());
        for bad in ["", "00", &"0".repeat(33)] {
            assert!(bad.parse::<Tag>().is_err(), "{bad}");
        }
    }
}
