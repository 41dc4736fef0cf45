//! How single fields of a message are written and read. Which fields follow each other is generated
//! from the description of the channel.

use std::fmt;

/// A message of one direction of the channel.
pub trait Message: Sized {
    /// Its kind in the record's head; never 0.
    fn kind(&self) -> u16;

    /// Appends the body's bytes. A text or list of 2^32 or more elements gives a body that no reader
    /// takes, and that is always too large for an area.
    fn encode(&self, out: &mut Vec<u8>);

    /// Reads a whole body.
    ///
    /// # Errors
    ///
    /// If the kind is not of this direction or the bytes are not exactly one body of it.
    fn decode(kind: u16, body: &[u8]) -> Result<Self, DecodeError>;
}

/// Why bytes are not a message.
#[derive(Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// No message of this direction has the kind.
    #[error("no message of this direction has kind {0}")]
    Kind(u16),
    /// The body ends before the field does.
    #[error("{at}: the body ends after {left} of {needed} bytes")]
    Short {
        /// The field.
        at: At,
        /// Bytes that the field needs.
        needed: u64,
        /// Bytes that are there.
        left: usize,
    },
    /// The number is not a value of the field's enum, flags or bool.
    #[error("{at}: {value} is not a value of it")]
    Value {
        /// The field.
        at: At,
        /// What was found.
        value: u32,
    },
    /// A text is not UTF-8.
    #[error("{at}: not UTF-8")]
    Utf8 {
        /// The field.
        at: At,
    },
    /// Bytes follow the last field.
    #[error("{message}: {left} bytes follow the last field")]
    Trailing {
        /// The message.
        message: &'static str,
        /// How many bytes.
        left: usize,
    },
}

/// A field of a message, for errors.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct At {
    /// The message.
    pub message: &'static str,
    /// The field.
    pub field: &'static str,
}

/// A position in a body.
pub(crate) struct Cursor<'a> {
    message: &'static str,
    rest: &'a [u8],
}

// === impl At ===

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.message, self.field)
    }
}

// === impl Cursor ===

impl<'a> Cursor<'a> {
    pub(crate) fn new(message: &'static str, rest: &'a [u8]) -> Self {
        Self { message, rest }
    }

    /// The next `needed` bytes. The length is checked before anything is allocated for it.
    fn take(&mut self, field: &'static str, needed: u64) -> Result<&'a [u8], DecodeError> {
        let split = usize::try_from(needed)
            .ok()
            .and_then(|needed| self.rest.split_at_checked(needed));
        let Some((taken, rest)) = split else {
            let at = At {
                message: self.message,
                field,
            };
            return Err(DecodeError::Short {
                at,
                needed,
                left: self.rest.len(),
            });
        };
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn raw<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], DecodeError> {
        let bytes = self.take(field, N as u64)?;
        Ok(bytes
            .try_into()
            .expect("take gives as many bytes as asked for"))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        self.raw(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        self.raw(field).map(u64::from_le_bytes)
    }

    pub(crate) fn choice<T>(
        &mut self,
        field: &'static str,
        from: impl FnOnce(u32) -> Option<T>,
    ) -> Result<T, DecodeError> {
        let value = self.u32(field)?;
        from(value).ok_or(DecodeError::Value {
            at: At {
                message: self.message,
                field,
            },
            value,
        })
    }

    pub(crate) fn optional<T>(
        &mut self,
        field: &'static str,
        from: impl FnOnce(u32) -> Option<T>,
    ) -> Result<Option<T>, DecodeError> {
        self.choice(field, |value| {
            if value == 0 {
                Some(None)
            } else {
                from(value).map(Some)
            }
        })
    }

    pub(crate) fn bool(&mut self, field: &'static str) -> Result<bool, DecodeError> {
        self.choice(field, |value| match value {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        })
    }

    pub(crate) fn str(&mut self, field: &'static str) -> Result<String, DecodeError> {
        let count = self.u32(field)?;
        let text = str::from_utf8(self.take(field, count.into())?);
        let at = At {
            message: self.message,
            field,
        };
        text.map(str::to_owned)
            .map_err(|_| DecodeError::Utf8 { at })
    }

    pub(crate) fn u32s(&mut self, field: &'static str) -> Result<Vec<u32>, DecodeError> {
        let count = self.u32(field)?;
        let (words, _) = self.take(field, u64::from(count) * 4)?.as_chunks();
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    pub(crate) fn u64s(&mut self, field: &'static str) -> Result<Vec<u64>, DecodeError> {
        let count = self.u32(field)?;
        let (words, _) = self.take(field, u64::from(count) * 8)?.as_chunks();
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// The body must be used up.
    pub(crate) fn end(self) -> Result<(), DecodeError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(DecodeError::Trailing {
                message: self.message,
                left,
            }),
        }
    }
}

/// Appends single fields.
pub(crate) mod put {
    pub(crate) fn u32(out: &mut Vec<u8>, value: u32) {
        out.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(out: &mut Vec<u8>, value: u64) {
        out.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn bool(out: &mut Vec<u8>, value: bool) {
        u32(out, value.into());
    }

    fn count(out: &mut Vec<u8>, len: usize) {
        u32(out, u32::try_from(len).unwrap_or(u32::MAX));
    }

    pub(crate) fn str(out: &mut Vec<u8>, value: &str) {
        count(out, value.len());
        out.extend_from_slice(value.as_bytes());
    }

    pub(crate) fn u32s(out: &mut Vec<u8>, values: &[u32]) {
        count(out, values.len());
        out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    pub(crate) fn u64s(out: &mut Vec<u8>, values: &[u64]) {
        count(out, values.len());
        out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
}
