//! Small JSON files that know when they are damaged.
//!
//! A file is one JSON object and a newline. Its last member is `"checksum"`: the BLAKE3 of all
//! bytes before the comma in front of it. So every byte counts, and any JSON reader can read it.
//! The first thing that is looked at is the member `format_version`.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::counters::Reason;

/// Most bytes of a file. A manifest of a 4 M token prefix stays below it.
pub(crate) const MAX_BYTES: u64 = 16 << 20;

const CHECKSUM: &[u8] = b",\"checksum\":\"";
const END: &[u8] = b"\"}\n";
const DIGITS: usize = 64;

/// What is kept in such a file. Unknown fields must be refused.
pub(crate) trait Record: Serialize + DeserializeOwned {
    /// The version that this program writes and reads, in the member `format_version`.
    const FORMAT: u32;

    /// The oldest version that it still reads.
    const OLDEST: u32 = Self::FORMAT;

    /// What the value says that it is.
    fn format_version(&self) -> u32;

    /// Limits and agreement of the fields, checked before writing and after reading.
    fn check(&self) -> Result<(), String>;

    /// Makes what was read, of any version known, one of the version written here.
    fn upgrade(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// Why a file is no such record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bad {
    pub(crate) reason: Reason,
    pub(crate) detail: String,
    /// The version found, if that is what is wrong.
    pub(crate) version: Option<u64>,
}

#[derive(Deserialize)]
struct Probe {
    format_version: u64,
}

// === impl Bad ===

impl Bad {
    pub(crate) fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
            version: None,
        }
    }
}

/// The file's bytes.
pub(crate) fn encode<T: Record>(record: &T) -> Result<Vec<u8>, Bad> {
    if record.format_version() != T::FORMAT {
        return Err(Bad::new(Reason::Version, "not the version written here"));
    }
    let invalid = |detail: String| Bad::new(Reason::Invalid, detail);
    record.check().map_err(invalid)?;
    let mut bytes = serde_json::to_vec(record).map_err(|error| invalid(error.to_string()))?;
    if bytes.pop() != Some(b'}') {
        return Err(invalid("not an object".into()));
    }
    let checksum = blake3::hash(&bytes).to_hex();
    bytes.extend_from_slice(CHECKSUM);
    bytes.extend_from_slice(checksum.as_bytes());
    bytes.extend_from_slice(END);
    if bytes.len() as u64 > MAX_BYTES {
        return Err(invalid(format!("{} bytes of JSON", bytes.len())));
    }
    Ok(bytes)
}

/// The record in a file's bytes.
pub(crate) fn decode<T: Record>(bytes: &[u8]) -> Result<T, Bad> {
    // What has another version need not have this one's checksum or fields.
    decode_known(bytes).map_err(|bad| other_version::<T>(bytes).unwrap_or(bad))
}

fn other_version<T: Record>(bytes: &[u8]) -> Option<Bad> {
    let Probe { format_version } = serde_json::from_slice(bytes).ok()?;
    let known = (u64::from(T::OLDEST)..=u64::from(T::FORMAT)).contains(&format_version);
    (!known).then(|| Bad {
        reason: Reason::Version,
        detail: format!("format version {format_version}, known is {}", T::FORMAT),
        version: Some(format_version),
    })
}

fn decode_known<T: Record>(bytes: &[u8]) -> Result<T, Bad> {
    let damaged = || Bad::new(Reason::Checksum, "the bytes do not have their checksum");
    let start = bytes
        .len()
        .checked_sub(CHECKSUM.len() + DIGITS + END.len())
        .ok_or_else(|| Bad::new(Reason::Length, format!("{} bytes", bytes.len())))?;
    let (body, tail) = bytes.split_at(start);
    let expected = blake3::hash(body).to_hex();
    let whole = tail
        .strip_prefix(CHECKSUM)
        .and_then(|rest| rest.strip_suffix(END))
        .is_some_and(|digits| digits == expected.as_bytes());
    if !whole {
        return Err(damaged());
    }
    let mut json = Vec::with_capacity(body.len() + 1);
    json.extend_from_slice(body);
    json.push(b'}');
    let mut record: T = serde_json::from_slice(&json).map_err(|error| {
        let detail = error.to_string();
        let reason = if detail.starts_with("unknown field") {
            Reason::UnknownField
        } else {
            Reason::Malformed
        };
        Bad::new(reason, detail)
    })?;
    let invalid = |detail: String| Bad::new(Reason::Invalid, detail);
    if !(T::OLDEST..=T::FORMAT).contains(&record.format_version()) {
        return Err(invalid("another version".into()));
    }
    record
        .upgrade()
        .and_then(|()| record.check())
        .map_err(invalid)?;
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        format_version: u32,
        text: String,
    }

    impl Record for Sample {
        const FORMAT: u32 = 1;

        fn format_version(&self) -> u32 {
            self.format_version
        }

        fn check(&self) -> Result<(), String> {
            (self.text != "bad").then_some(()).ok_or("bad text".into())
        }
    }

    fn sample() -> Sample {
        Sample {
            format_version: 1,
            text: "a \"b\" ,\"checksum\":\"".into(),
        }
    }

    fn sealed(body: &str) -> Vec<u8> {
        let sum = blake3::hash(body.as_bytes()).to_hex();
        format!("{body},\"checksum\":\"{sum}\"}}\n").into_bytes()
    }

    #[test]
    fn round_trip_and_plain_json() {
        let bytes = encode(&sample()).unwrap();
        assert_eq!(decode::<Sample>(&bytes).unwrap(), sample());
        let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(json["checksum"].as_str().unwrap().len(), 64);
    }

    #[test]
    fn every_damage_is_found() {
        let bytes = encode(&sample()).unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                assert!(decode::<Sample>(&bad).is_err(), "byte {at} bit {bit}");
            }
            assert!(decode::<Sample>(&bytes[..at]).is_err(), "cut at {at}");
        }
        let mut longer = bytes;
        longer.push(b'\n');
        assert!(decode::<Sample>(&longer).is_err());
        assert_eq!(decode::<Sample>(b"").unwrap_err().reason, Reason::Length);
    }

    #[test]
    fn reasons() {
        let reason = |body: &str| decode::<Sample>(&sealed(body)).unwrap_err().reason;
        let cases = [
            (r#"{"format_version":2,"text":"x""#, Reason::Version),
            (
                r#"{"format_version":1,"text":"x","y":1"#,
                Reason::UnknownField,
            ),
            (r#"{"format_version":1"#, Reason::Malformed),
            (r#"{"format_version":1,"text":7"#, Reason::Malformed),
            (r#"{"format_version":1,"text":"bad""#, Reason::Invalid),
            (
                r#"{"format_version":1,"text":"a","text":"b""#,
                Reason::Malformed,
            ),
            (r#"]"#, Reason::Malformed),
        ];
        for (body, expected) in cases {
            assert_eq!(reason(body), expected, "{body}");
        }
        let bad = Sample {
            text: "bad".into(),
            ..sample()
        };
        assert_eq!(encode(&bad).unwrap_err().reason, Reason::Invalid);
    }
}
