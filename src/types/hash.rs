//! 32-byte hashes that name things: a kind of bytes, a namespace, an object.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use utoipa::ToSchema;

use super::hex;

/// All that makes saved bytes interchangeable, and nothing else.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, ToSchema)]
#[schema(value_type = String, pattern = "^[0-9a-f]{64}$")]
pub struct Fingerprint(pub [u8; 32]);

/// Digest of a [`Namespace`](super::Namespace).
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, ToSchema)]
#[schema(value_type = String, pattern = "^[0-9a-f]{64}$")]
pub struct NamespaceId(pub [u8; 32]);

/// Address of a stored object, derived from the prefix that it belongs to.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd)]
pub struct ObjectId(pub [u8; 32]);

macro_rules! hash_type {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                hex::write(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = hex::BadHex;

            fn from_str(text: &str) -> Result<Self, hex::BadHex> {
                hex::decode(text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?
                    .parse()
                    .map_err(de::Error::custom)
            }
        }
    };
}

hash_type!(Fingerprint);
hash_type!(NamespaceId);
hash_type!(ObjectId);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip() {
        let id = ObjectId(std::array::from_fn(|i| i as u8 * 7));
        assert_eq!(id.to_string().parse::<ObjectId>(), Ok(id));
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(json, format!("\"{id}\""));
        assert_eq!(serde_json::from_str::<ObjectId>(&json).unwrap(), id);
        assert!(serde_json::from_str::<ObjectId>("\"00\"").is_err());
        assert!(format!("{id:?}").starts_with("ObjectId(00070e"));
    }
}
