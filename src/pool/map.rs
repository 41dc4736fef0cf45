//! Where in a worker's pools the bytes of a state or of a piece lie.
//!
//! Both layouts are those of SGLang. Per layer: a tensor `[L, slots, ...shape]` for each state tensor,
//! and a K and a V tensor `[rows, heads, head_dim]` for each KV layer. Page major: one buffer for
//! the states, a slot being one range in packed order; one buffer for the KV, a page being one range
//! `[layer][K | V][row of the page]`.

use super::{Geometry, GeometryError};
use crate::proto::v1;

/// Order of bytes in the pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One tensor for each layer and role.
    PerLayer,
    /// One slot, and one page of all layers, is one range.
    PageMajor,
}

/// A buffer of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// The state tensor of this index in the geometry.
    State(usize),
    /// All states, page major.
    StateRaw,
    /// K of the KV layer of this index in the geometry.
    K(usize),
    /// V of the KV layer of this index in the geometry.
    V(usize),
    /// All KV, page major.
    KvRaw,
}

/// Bytes `[offset, offset + len)` of a buffer; `len` is not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Which buffer.
    pub buffer: Buffer,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// The pools of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolMap {
    geometry: Geometry,
    layout: Layout,
    page_size: u32,
    slots: u32,
    rows: u32,
}

// === impl PoolMap ===

impl PoolMap {
    /// Pools of `slots` slots and `rows` rows, the reserved ones counted; `rows` are whole pages.
    pub fn new(
        geometry: Geometry,
        layout: Layout,
        page_size: u32,
        slots: u64,
        rows: u64,
    ) -> Result<Self, GeometryError> {
        let count = |what, have: u64| match u32::try_from(have) {
            Ok(0) => Err(GeometryError::Empty(what)),
            Ok(count) => Ok(count),
            Err(_) => Err(GeometryError::TooMany {
                what,
                have,
                most: u64::from(u32::MAX),
            }),
        };
        let slots = count("slots", slots)?;
        let pages = count("rows", rows)?.checked_rem(page_size);
        if pages != Some(0) {
            return Err(GeometryError::Pages { rows, page_size });
        }
        // Bytes of a pool are at most 2^32 states of 2^32 bytes, less one: offsets never overflow.
        Ok(Self {
            geometry,
            layout,
            page_size,
            slots,
            rows: rows as u32,
        })
    }

    /// The packed form that its spans make up.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Order of bytes in the pools.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Rows of a page.
    #[must_use]
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Slots, the reserved ones counted.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Rows, the reserved ones counted.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Size of a buffer in bytes; zero if the layout or the geometry has no such buffer.
    #[must_use]
    pub fn buffer_bytes(&self, buffer: Buffer) -> u64 {
        let (slots, rows) = (u64::from(self.slots), u64::from(self.rows));
        let layer = |i: usize| self.geometry.kv_layers().get(i);
        match (self.layout, buffer) {
            (Layout::PerLayer, Buffer::State(i)) => self
                .geometry
                .state_tensors()
                .get(i)
                .map_or(0, |tensor| tensor.bytes * slots),
            (Layout::PerLayer, Buffer::K(i)) => layer(i).map_or(0, |layer| layer.k_row() * rows),
            (Layout::PerLayer, Buffer::V(i)) => layer(i).map_or(0, |layer| layer.v_row() * rows),
            (Layout::PageMajor, Buffer::StateRaw) => self.geometry.state_bytes() * slots,
            (Layout::PageMajor, Buffer::KvRaw) => self.geometry.kv_row_bytes() * rows,
            _ => 0,
        }
    }

    /// The bytes of a slot, in packed order.
    pub fn state_spans(&self, slot: u32) -> Result<Vec<Span>, GeometryError> {
        if slot >= self.slots {
            let (index, count) = (u64::from(slot), u64::from(self.slots));
            return Err(GeometryError::OutOfPool {
                what: "slot",
                index,
                count,
            });
        }
        let (slot, slots) = (u64::from(slot), u64::from(self.slots));
        let mut spans = Merged::default();
        match self.layout {
            Layout::PageMajor => {
                let len = self.geometry.state_bytes();
                spans.push(Buffer::StateRaw, slot * len, len);
            }
            Layout::PerLayer => {
                for (i, tensor) in self.geometry.state_tensors().iter().enumerate() {
                    for layer in 0..tensor.spec.layers.len() as u64 {
                        let offset = (layer * slots + slot) * tensor.slot_bytes;
                        spans.push(Buffer::State(i), offset, tensor.slot_bytes);
                    }
                }
            }
        }
        Ok(spans.0)
    }

    /// The bytes of the tokens in these rows, in packed order, neighbours merged.
    pub fn kv_spans(&self, rows: &[u32]) -> Result<Vec<Span>, GeometryError> {
        let runs = self.runs(rows)?;
        let mut spans = Merged::default();
        let mut before = 0;
        for (i, layer) in self.geometry.kv_layers().iter().enumerate() {
            let (k, v) = (layer.k_row(), layer.v_row());
            for (buffer, row, before) in [(Buffer::K(i), k, before), (Buffer::V(i), v, before + k)]
            {
                for &(first, count) in &runs {
                    self.push_run(&mut spans, buffer, row, before, first, count);
                }
            }
            before += k + v;
        }
        Ok(spans.0)
    }

    /// One role of rows `[first, first + count)`, which lie in one page if the layout is page major.
    /// `before` is the bytes of a token that a page holds before this role.
    fn push_run(
        &self,
        spans: &mut Merged,
        buffer: Buffer,
        row: u64,
        before: u64,
        first: u32,
        count: u32,
    ) {
        let len = u64::from(count) * row;
        match self.layout {
            Layout::PerLayer => spans.push(buffer, u64::from(first) * row, len),
            Layout::PageMajor => {
                let size = u64::from(self.page_size);
                let page = u64::from(first / self.page_size);
                let in_page = u64::from(first % self.page_size);
                let page_bytes = size * self.geometry.kv_row_bytes();
                let offset = page * page_bytes + size * before + in_page * row;
                spans.push(Buffer::KvRaw, offset, len);
            }
        }
    }

    /// Rows as runs of neighbours `(first, count)`; page major: cut at page borders.
    fn runs(&self, rows: &[u32]) -> Result<Vec<(u32, u32)>, GeometryError> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &row in rows {
            if row >= self.rows {
                let (index, count) = (u64::from(row), u64::from(self.rows));
                return Err(GeometryError::OutOfPool {
                    what: "row",
                    index,
                    count,
                });
            }
            let new_page = self.layout == Layout::PageMajor && row % self.page_size == 0;
            match runs.last_mut() {
                Some((first, count)) if *first + *count == row && !new_page => *count += 1,
                _ => runs.push((row, 1)),
            }
        }
        Ok(runs)
    }
}

impl TryFrom<&v1::AttachRequest> for PoolMap {
    type Error = GeometryError;

    fn try_from(request: &v1::AttachRequest) -> Result<Self, GeometryError> {
        let layout = match v1::PoolLayout::try_from(request.layout) {
            Ok(v1::PoolLayout::PerLayer) => Layout::PerLayer,
            Ok(v1::PoolLayout::PageMajor) => Layout::PageMajor,
            _ => return Err(GeometryError::Layout(request.layout)),
        };
        let geometry = Geometry::try_from(request)?;
        Self::new(
            geometry,
            layout,
            request.page_size,
            request.slots,
            request.rows,
        )
    }
}

/// Spans in order; one that continues the last is joined to it, an empty one left out.
#[derive(Default)]
struct Merged(Vec<Span>);

// === impl Merged ===

impl Merged {
    fn push(&mut self, buffer: Buffer, offset: u64, len: u64) {
        match self.0.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.buffer == buffer && last.offset + last.len == offset => {
                last.len += len;
            }
            _ => self.0.push(Span {
                buffer,
                offset,
                len,
            }),
        }
    }
}

#[cfg(test)]
mod tests;
