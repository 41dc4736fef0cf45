//! The writing end of an area.

use std::marker::PhantomData;

use zerocopy::IntoBytes;

use super::area::{Area, Broken, Head, PAD, record_bytes};
use super::codec::{Message, put};
use super::layout;
use super::msg::{Tokens, Up};

const _: () = assert!(
    cfg!(target_endian = "little"),
    "lists of ids are copied as they lie in memory"
);

/// A prompt is cut into records of at most this many tokens.
const TOKENS_PER_RECORD: u64 = 32768;

/// Body of a `Tokens` record before its ids: request, offset, count.
const TOKENS_HEAD_BYTES: u64 = 16;

/// The writing end of an area. Never waits: what finds no room is dropped and counted, or said again
/// later by the caller.
#[derive(Debug)]
pub struct Writer<M> {
    area: Area,
    /// Bytes written in all, pads included. Private: the peer cannot change it.
    written: u64,
    /// The peer's tail as last looked at: a lower bound, refreshed when it does not leave room.
    tail: u64,
    /// Number of the last record.
    number: u64,
    /// Number of the last record when [`Self::take_written`] was called.
    rung: u64,
    dropped: u64,
    /// Body of the message that is being written.
    body: Vec<u8>,
    messages: PhantomData<fn(M)>,
}

/// Why a message was not written. Nothing of it is visible to the peer.
#[derive(Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum PushError {
    /// There is no room now.
    #[error("the channel is full")]
    Full,
    /// There will never be room: a record takes at most a quarter of its area.
    #[error("a message of {0} bytes is too large for the channel")]
    TooLarge(u64),
    /// The peer breaks the protocol.
    #[error(transparent)]
    Broken(#[from] Broken),
}

// === impl Writer ===

impl<M: Message> Writer<M> {
    pub(super) fn new(area: Area) -> Self {
        Self {
            area,
            written: 0,
            tail: 0,
            number: 0,
            rung: 0,
            dropped: 0,
            body: Vec::new(),
            messages: PhantomData,
        }
    }

    /// Writes one message. Allocates nothing once its buffer has grown to the largest message.
    ///
    /// # Errors
    ///
    /// [`PushError`]; the first two are counted by [`Self::dropped`].
    pub fn push(&mut self, message: &M) -> Result<(), PushError> {
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        message.encode(&mut body);
        let pushed = self.reserve(body.len() as u64).map(|position| {
            self.area.write(position + layout::RECORD_HEAD_BYTES, &body);
            // A record is at most a quarter of an area, and an area at most 1 GiB.
            self.publish(position, message.kind(), body.len() as u32);
        });
        self.body = body;
        if matches!(pushed, Err(PushError::Full | PushError::TooLarge(_))) {
            self.dropped += 1;
        }
        pushed
    }

    /// Messages that were not written because there was no room, or never would be.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether anything was written since the last call: then the peer is to be woken.
    pub fn take_written(&mut self) -> bool {
        std::mem::replace(&mut self.rung, self.number) != self.number
    }

    /// Finds room for a record with `len` bytes of body, after a pad if need be, and says where.
    fn reserve(&mut self, len: u64) -> Result<u64, PushError> {
        let size = record_bytes(len);
        if size > self.area.largest() {
            return Err(PushError::TooLarge(len));
        }
        let position = self.written % self.area.capacity();
        let left = self.area.capacity() - position;
        let pad = if size > left { left } else { 0 };
        // Room for the seq word that follows the record, too: it is cleared.
        let need = pad + size + layout::RECORD_HEAD_BYTES;
        if self.free() < need {
            self.refresh_tail()?;
            if self.free() < need {
                return Err(PushError::Full);
            }
        }
        if pad == 0 {
            return Ok(position);
        }
        self.publish(position, PAD, (pad - layout::RECORD_HEAD_BYTES) as u32);
        Ok(0)
    }

    fn free(&self) -> u64 {
        self.area.capacity() - (self.written - self.tail)
    }

    /// Looks at the peer's tail, which is the only thing of it that a writer believes, and only if
    /// it can be.
    fn refresh_tail(&mut self) -> Result<(), Broken> {
        let (tail, before, written) = (self.area.tail(), self.tail, self.written);
        if tail < before || tail > written || !tail.is_multiple_of(layout::RECORD_ALIGN) {
            return Err(Broken::Tail {
                tail,
                before,
                written,
            });
        }
        self.tail = tail;
        Ok(())
    }

    /// Makes the record at `position`, whose body is written, visible.
    fn publish(&mut self, position: u64, kind: u16, len: u32) {
        self.area.set_head(
            position,
            Head {
                len,
                kind,
                flags: 0,
            },
        );
        self.written += record_bytes(len.into());
        self.area.clear_seq(self.written % self.area.capacity());
        self.number += 1;
        self.area.publish(position, self.number);
    }
}

impl Writer<Up> {
    /// Writes token ids of request `req`, the first of which is its token number `offset`, straight
    /// from where they lie. Says how many were written, from the first on: the rest did not fit now,
    /// and is not counted as dropped.
    ///
    /// # Errors
    ///
    /// If the peer breaks the protocol.
    pub fn push_tokens(&mut self, req: u64, offset: u32, ids: &[u32]) -> Result<usize, Broken> {
        let fits = self.area.largest() - layout::RECORD_HEAD_BYTES - TOKENS_HEAD_BYTES;
        let mut done = 0;
        for ids in ids.chunks(TOKENS_PER_RECORD.min(fits / 4) as usize) {
            let bytes = ids.as_bytes();
            let len = TOKENS_HEAD_BYTES + bytes.len() as u64;
            let position = match self.reserve(len) {
                Ok(position) => position,
                Err(PushError::Full | PushError::TooLarge(_)) => break,
                Err(PushError::Broken(broken)) => return Err(broken),
            };
            self.body.clear();
            put::u64(&mut self.body, req);
            put::u32(&mut self.body, offset.saturating_add(done as u32));
            put::u32(&mut self.body, ids.len() as u32);
            let at = position + layout::RECORD_HEAD_BYTES;
            self.area.write(at, &self.body);
            self.area.write(at + TOKENS_HEAD_BYTES, bytes);
            self.publish(position, Tokens::KIND, len as u32);
            done += ids.len();
        }
        Ok(done)
    }
}
