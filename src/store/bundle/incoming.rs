//! The safetensors file on its way in: read once, in order, every chunk compared with its checksum
//! before a byte of it is used.

use std::io::{self, Read};

use super::layout::{Layout, Part};
use super::{Bundle, BundleError, CHUNK};
use crate::store::disk::object_file::crc32c;
use crate::types::TokenId;

/// A file of tensors of which the header was found to be right.
#[derive(Debug)]
pub struct Incoming<'a, R> {
    bundle: &'a Bundle,
    source: R,
    chunk: Vec<u8>,
    /// How much of the chunk is used.
    used: usize,
    /// Bytes read.
    at: u64,
}

impl<'a, R: Read> Incoming<'a, R> {
    /// Reads and compares the header.
    ///
    /// # Errors
    /// See [`BundleError`].
    pub fn open(bundle: &'a Bundle, layout: &Layout, source: R) -> Result<Self, BundleError> {
        let mut incoming = Self {
            bundle,
            source,
            chunk: Vec::new(),
            used: 0,
            at: 0,
        };
        let mut field = [0; 8];
        incoming.fill(&mut field)?;
        let len = layout.header_len(bundle, field)?;
        let mut json = Vec::new();
        incoming.each(len as u64, &mut |_, bytes| json.extend_from_slice(bytes))?;
        layout.agrees(bundle, &json)?;
        Ok(incoming)
    }

    /// The next part, piece by piece: where in the part, and bytes.
    ///
    /// # Errors
    /// See [`BundleError`].
    pub fn part(
        &mut self,
        part: &Part,
        sink: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<(), BundleError> {
        self.each(part.len, sink)?;
        let mut zero = true;
        self.each(part.padded.saturating_sub(part.len), &mut |_, bytes| {
            zero &= bytes.iter().all(|byte| *byte == 0);
        })?;
        if !zero {
            return Err(BundleError::Padding { at: self.here() });
        }
        Ok(())
    }

    /// The next part, which is that of the tokens.
    ///
    /// # Errors
    /// See [`BundleError`].
    pub fn tokens(&mut self, part: &Part) -> Result<Vec<TokenId>, BundleError> {
        let mut bytes = Vec::new();
        self.part(part, &mut |_, more| bytes.extend_from_slice(more))?;
        let (words, _) = bytes.as_chunks::<4>();
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    /// Bytes that were used.
    #[must_use]
    pub fn here(&self) -> u64 {
        self.at - (self.chunk.len() - self.used) as u64
    }

    /// After the last part.
    ///
    /// # Errors
    /// `Long`, if it is not the end; `Io`.
    pub fn finish(mut self) -> Result<(), BundleError> {
        let bytes = self.bundle.file_bytes;
        if self.here() != bytes || read_some(&mut self.source, &mut [0])? != 0 {
            return Err(BundleError::Long { bytes });
        }
        Ok(())
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), BundleError> {
        let len = out.len() as u64;
        self.each(len, &mut |at, bytes| {
            let at = at as usize;
            if let Some(out) = out.get_mut(at..at + bytes.len()) {
                out.copy_from_slice(bytes);
            }
        })
    }

    fn each(&mut self, len: u64, sink: &mut dyn FnMut(u64, &[u8])) -> Result<(), BundleError> {
        let mut done = 0;
        while done < len {
            let mut rest = self.chunk.get(self.used..).unwrap_or_default();
            if rest.is_empty() {
                self.next_chunk()?;
                rest = &self.chunk;
            }
            let now = rest
                .len()
                .min(usize::try_from(len - done).unwrap_or(usize::MAX));
            sink(done, rest.get(..now).unwrap_or_default());
            self.used += now;
            done += now as u64;
        }
        Ok(())
    }

    fn next_chunk(&mut self) -> Result<(), BundleError> {
        let bytes = self.bundle.file_bytes;
        let len = CHUNK.min(bytes.saturating_sub(self.at));
        let number = self.at / CHUNK;
        let Some(expected) = self.bundle.checksum(number).filter(|_| len > 0) else {
            return Err(BundleError::Short { at: self.at, bytes });
        };
        self.chunk.resize(len as usize, 0);
        let mut filled = 0;
        while let Some(room) = self.chunk.get_mut(filled..).filter(|room| !room.is_empty()) {
            let read = read_some(&mut self.source, room)?;
            if read == 0 {
                let at = self.at + filled as u64;
                return Err(BundleError::Short { at, bytes });
            }
            filled += read;
        }
        self.used = 0;
        self.at += len;
        if crc32c(&self.chunk) != expected {
            return Err(BundleError::Checksum {
                chunk: number,
                chunks: bytes.div_ceil(CHUNK),
            });
        }
        Ok(())
    }
}

/// Reads all of a file of tensors only to verify it; `told` hears how many bytes are done.
///
/// # Errors
/// See [`BundleError`].
pub fn verify(
    bundle: &Bundle,
    source: impl Read,
    told: &mut dyn FnMut(u64),
) -> Result<(), BundleError> {
    let layout = Layout::of(bundle)?;
    let mut incoming = Incoming::open(bundle, &layout, source)?;
    for part in &layout.parts {
        incoming.part(part, &mut |_, _| {})?;
        told(incoming.here());
    }
    incoming.finish()
}

fn read_some(source: &mut impl Read, room: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(room) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}
