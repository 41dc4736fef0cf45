//! How the head of a safetensors file is written: a length, a JSON object, and blanks until the data
//! begins where direct I/O may read it.

use std::fmt::Write as _;

/// Where the data of a file begins: at a multiple of this.
pub(crate) const ALIGN: u64 = 4096;

/// Bytes of the length.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// Adds the entry of a tensor to an object that has an entry already.
pub(crate) fn add_tensor(
    json: &mut String,
    name: &str,
    dtype: &str,
    shape: &[u64],
    (start, end): (u64, u64),
) {
    let name = serde_json::Value::from(name);
    write!(
        json,
        r#",{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
    )
    .expect("a String takes any text");
}

/// The head of a file: all that comes before its data.
pub(crate) fn head(json: &str) -> Vec<u8> {
    let total = (LENGTH_BYTES + json.len() as u64).next_multiple_of(ALIGN);
    let mut bytes = Vec::with_capacity(total as usize);
    bytes.extend_from_slice(&(total - LENGTH_BYTES).to_le_bytes());
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(total as usize, b' ');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_readers_take_it() {
        let mut json = String::from(r#"{"__metadata__":{"a":"b"}"#);
        add_tensor(&mut json, "x\"y", "U8", &[2, 3], (0, 6));
        json.push('}');
        let mut file = head(&json);
        assert_eq!(file.len() as u64 % ALIGN, 0);
        file.extend_from_slice(b"abcdef");
        let read = safetensors::SafeTensors::deserialize(&file).unwrap();
        let tensor = read.tensor("x\"y").unwrap();
        assert_eq!(
            (tensor.shape(), tensor.data()),
            (&[2, 3][..], &b"abcdef"[..])
        );
    }
}
