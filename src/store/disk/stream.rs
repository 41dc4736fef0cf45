//! One shard of an object, piece after piece, for who wants its bytes and no object in the arena.
//! Memory: one piece and one chunk.

use std::fs::File;
use std::sync::Arc;

use crate::{
    store::{counters::Reason, error::StoreError, object::ObjectMeta, sealed_json::Bad},
    types::ObjectId,
};

use super::{
    DiskTier, layout,
    object_file::{CHUNK, Facts, Plan, What, crc32c},
    root::Rel,
    transfer::{ReadError, open},
};

/// A shard that is being read. Every byte that it gives has been verified.
#[derive(Debug)]
pub struct ShardStream<'a> {
    tier: &'a DiskTier,
    meta: Arc<ObjectMeta>,
    plan: Plan,
    serial: u32,
    shard: u32,
    rel: Rel,
    file: File,
    /// Where its data starts.
    data: u64,
    facts: Facts,
    /// Chunks that were read.
    chunks: usize,
    /// Bytes that were read and not given.
    ready: Vec<u8>,
    /// Parts that were given.
    parts: usize,
}

// === impl DiskTier ===

impl DiskTier {
    /// Opens one shard of an object here.
    ///
    /// # Errors
    /// As those of [`Tier::get`](crate::store::Tier::get).
    pub fn stream(&self, id: &ObjectId, shard: u32) -> Result<ShardStream<'_>, StoreError> {
        let (meta, plan, serial) = self.plan(id)?;
        let rel = layout::object(&meta.fingerprint, id, shard);
        let opened = open(&self.dir.root, &rel, &meta, &plan, shard);
        let (file, data, facts) =
            opened.map_err(|error| self.failed_read(&meta, serial, shard, error))?;
        Ok(ShardStream {
            tier: self,
            meta,
            plan,
            serial,
            shard,
            rel,
            file,
            data,
            facts,
            chunks: 0,
            ready: Vec::new(),
            parts: 0,
        })
    }
}

// === impl ShardStream ===

impl ShardStream<'_> {
    /// The bytes of the next piece; `None` after the last.
    ///
    /// # Errors
    /// As those of [`Tier::get`](crate::store::Tier::get).
    pub fn next_piece(&mut self) -> Result<Option<Vec<u8>>, StoreError> {
        loop {
            let Some(part) = self.plan.parts.get(self.parts).copied() else {
                return Ok(None);
            };
            // The length of a piece is within the model's limits.
            let (len, padded) = (part.len as usize, part.padded as usize);
            while self.ready.len() < padded {
                self.read_chunk().map_err(|error| {
                    self.tier
                        .failed_read(&self.meta, self.serial, self.shard, error)
                })?;
            }
            let rest = self.ready.split_off(padded);
            let mut piece = std::mem::replace(&mut self.ready, rest);
            self.parts += 1;
            if let What::Piece(_) = part.what {
                piece.truncate(len);
                return Ok(Some(piece));
            }
        }
    }

    fn read_chunk(&mut self) -> Result<(), ReadError> {
        let number = self.chunks;
        let bad = || {
            let detail = format!("chunk {number} of {}", self.plan.chunks());
            ReadError::Bad(Bad::new(Reason::Checksum, detail))
        };
        let expected = *self.facts.checksums.get(number).ok_or_else(bad)?;
        let at = number as u64 * CHUNK;
        let len = CHUNK.min(self.plan.data_len.saturating_sub(at));
        let from = self.ready.len();
        self.ready.resize(from + len as usize, 0);
        let room = self.ready.get_mut(from..).unwrap_or_default();
        let root = &self.tier.dir.root;
        root.read(&self.file, &self.rel, self.data + at, room)?;
        if crc32c(room) != expected {
            return Err(bad());
        }
        self.chunks += 1;
        Ok(())
    }
}
