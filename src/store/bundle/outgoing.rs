//! The safetensors file on its way out.

use super::CHUNK;
use super::layout::Part;
use crate::store::disk::object_file::crc32c;

/// Cuts what is written into chunks and keeps the checksum of each.
#[derive(Debug)]
pub struct Outgoing<F> {
    chunk: Vec<u8>,
    checksums: Vec<String>,
    bytes: u64,
    send: F,
}

impl<E, F: FnMut(Vec<u8>) -> Result<(), E>> Outgoing<F> {
    /// Gives each whole chunk to `send`.
    pub fn new(send: F) -> Self {
        Self {
            chunk: Vec::with_capacity(CHUNK as usize),
            checksums: Vec::new(),
            bytes: 0,
            send,
        }
    }

    /// The next bytes.
    ///
    /// # Errors
    /// Those of `send`.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), E> {
        while !bytes.is_empty() {
            let room = CHUNK as usize - self.chunk.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.chunk.extend_from_slice(now);
            bytes = later;
            if self.chunk.len() as u64 == CHUNK {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// The bytes of a part, and the zeros behind them.
    ///
    /// # Errors
    /// Those of `send`.
    pub fn part(&mut self, part: &Part, bytes: &[u8]) -> Result<(), E> {
        self.write(bytes)?;
        let zeros = part.padded.saturating_sub(part.len) as usize;
        self.write(&vec![0; zeros])
    }

    /// After the last byte: the length of all, and the checksums.
    ///
    /// # Errors
    /// Those of `send`.
    pub fn finish(mut self) -> Result<(u64, Vec<String>), E> {
        if !self.chunk.is_empty() {
            self.flush()?;
        }
        Ok((self.bytes, self.checksums))
    }

    fn flush(&mut self) -> Result<(), E> {
        let chunk = std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK as usize));
        self.checksums.push(format!("{:08x}", crc32c(&chunk)));
        self.bytes += chunk.len() as u64;
        (self.send)(chunk)
    }
}
