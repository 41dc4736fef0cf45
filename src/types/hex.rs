//! Lowercase hexadecimal, the text form of hashes in names, JSON and logs.

use std::fmt;

/// Text that is not the lowercase hexadecimal form of the bytes it should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not {expected} lowercase hexadecimal digits")]
pub struct BadHex {
    /// Digits that a right text has.
    pub expected: usize,
}

/// Writes `bytes` as lowercase digits, two each.
pub fn write(bytes: &[u8], out: &mut impl fmt::Write) -> fmt::Result {
    for &byte in bytes {
        write!(out, "{byte:02x}")?;
    }
    Ok(())
}

/// `bytes` as lowercase digits, two each.
#[must_use]
pub fn encode(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 2);
    write(bytes, &mut out).expect("a String takes any text");
    out
}

/// Reads exactly `N` bytes. Capitals are refused: one value has one text.
pub fn decode<const N: usize>(text: &str) -> Result<[u8; N], BadHex> {
    let bad = BadHex { expected: N * 2 };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return Err(bad);
    }
    let mut out = [0; N];
    for (byte, [high, low]) in out.iter_mut().zip(pairs) {
        *byte = digit(*high).ok_or(bad)? << 4 | digit(*low).ok_or(bad)?;
    }
    Ok(out)
}

fn digit(c: u8) -> Option<u8> {
    match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_refusals() {
        let bytes: Vec<u8> = (0..=255).collect();
        let text = encode(&bytes);
        assert_eq!(decode::<256>(&text).unwrap().as_slice(), bytes);
        assert_eq!(decode::<2>("0aff"), Ok([10, 255]));
        for bad in ["", "0af", "0aff0", "0AFF", "0agf", "0aff00", "é0a"] {
            assert_eq!(decode::<2>(bad), Err(BadHex { expected: 4 }), "{bad}");
        }
    }
}
