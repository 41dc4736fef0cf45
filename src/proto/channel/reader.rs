//! The reading end of an area.

use std::marker::PhantomData;

use super::area::{Area, Broken, Head, PAD, record_bytes};
use super::codec::Message;
use super::layout;

/// The reading end of an area. Never waits.
#[derive(Debug)]
pub struct Reader<M> {
    area: Area,
    /// Bytes consumed in all, pads included. Private: the peer cannot change it.
    consumed: u64,
    /// Number of the record that comes next.
    number: u64,
    /// The record that is being read; at most a quarter of the area.
    body: Vec<u8>,
    messages: PhantomData<fn() -> M>,
}

// === impl Reader ===

impl<M: Message> Reader<M> {
    pub(super) fn new(area: Area) -> Self {
        Self {
            area,
            consumed: 0,
            number: 1,
            body: Vec::new(),
            messages: PhantomData,
        }
    }

    /// The next message, or `None` if there is none yet. Allocates only what the message owns.
    ///
    /// # Errors
    ///
    /// If the peer breaks the protocol. Whatever else comes from it is not to be believed either.
    pub fn pop(&mut self) -> Result<Option<M>, Broken> {
        let head = loop {
            match self.next()? {
                None => return Ok(None),
                // It ends its lap, and `next` takes none at the start of one: no second pass.
                Some(pad) if pad.kind == PAD => self.consume(pad.len),
                Some(record) => break record,
            }
        };
        let len = head.len as usize;
        let at = self.position() + layout::RECORD_HEAD_BYTES;
        if self.body.len() < len {
            self.body.resize(len, 0);
        }
        let (body, _) = self.body.split_at_mut(len);
        self.area.read(at, body);
        let message = M::decode(head.kind, body)?;
        self.consume(head.len);
        Ok(Some(message))
    }

    /// The head of the next record if that is there and can be.
    fn next(&self) -> Result<Option<Head>, Broken> {
        let position = self.position();
        if self.area.seq(position) != self.number {
            return Ok(None);
        }
        let head = self.area.head(position);
        let Head { len, kind, flags } = head;
        let left = self.left();
        let size = layout::RECORD_HEAD_BYTES + u64::from(len);
        if flags != 0 {
            return Err(Broken::Flags(flags));
        }
        // A pad is smaller than the record that did not fit in its place.
        if kind == PAD && (size != left || size >= self.area.largest()) {
            return Err(Broken::Pad { len, left });
        }
        if kind != PAD && size > left.min(self.area.largest()) {
            return Err(Broken::Length { len, left });
        }
        Ok(Some(head))
    }

    /// Gives the room of a record with `len` bytes of body back to the writer.
    fn consume(&mut self, len: u32) {
        self.consumed += record_bytes(len.into());
        self.number += 1;
        self.area.set_tail(self.consumed);
    }

    fn position(&self) -> u64 {
        self.consumed % self.area.capacity()
    }

    fn left(&self) -> u64 {
        self.area.capacity() - self.position()
    }
}
