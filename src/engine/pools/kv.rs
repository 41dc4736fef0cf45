//! The KV pool: K and V of each attention layer, one row a token, `page_size` rows a page.

use super::{Dtype, Layout, PoolError, mul};
use crate::engine::ids::{PageId, PoolId};

/// The KV pool's geometry, without its capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpec {
    /// Number of attention layers.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Type of an element.
    pub dtype: Dtype,
}

/// Which half of an attention layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The keys.
    K,
    /// The values.
    V,
}

/// The KV pool.
#[derive(Debug)]
pub struct KvPool {
    spec: KvSpec,
    layout: Layout,
    pages: u32,
    page_size: usize,
    row_bytes: usize,
    /// Per layer: K and V of layer 0, K and V of layer 1, ... Page-major: one buffer.
    buffers: Vec<Vec<u8>>,
}

// === impl Half ===

impl Half {
    /// Both halves in packing order.
    pub const BOTH: [Self; 2] = [Self::K, Self::V];

    fn index(self) -> usize {
        match self {
            Self::K => 0,
            Self::V => 1,
        }
    }
}

// === impl KvPool ===

impl KvPool {
    /// A zeroed pool of `pages` pages beside the reserved one, `page_size` (at least 1) rows each.
    ///
    /// # Errors
    ///
    /// [`PoolError::TooLarge`].
    pub fn new(
        spec: KvSpec,
        layout: Layout,
        pages: u32,
        page_size: usize,
    ) -> Result<Self, PoolError> {
        let row_bytes = mul(mul(spec.kv_heads, spec.head_dim)?, spec.dtype.bytes())?;
        let rows = mul(pages as usize + 1, page_size)?;
        let half = mul(rows, row_bytes)?;
        let halves = mul(spec.layers, 2)?;
        let buffers = match layout {
            Layout::PerLayer => (0..halves).map(|_| vec![0; half]).collect(),
            Layout::PageMajor => vec![vec![0; mul(half, halves)?]],
        };
        Ok(Self {
            spec,
            layout,
            pages,
            page_size,
            row_bytes,
            buffers,
        })
    }

    /// The geometry.
    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    /// The layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Usable pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Rows of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Bytes of one row of one half of one layer.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of the packed KV of one token: all layers, both halves.
    pub fn token_bytes(&self) -> usize {
        self.row_bytes * 2 * self.spec.layers
    }

    /// The rows of one page of one layer (`0..layers`): `page_size * row_bytes` bytes.
    pub fn page(&self, layer: usize, half: Half, page: PageId) -> &[u8] {
        let (buffer, start, len) = self.locate(layer, half, page);
        self.buffers
            .get(buffer)
            .and_then(|bytes| bytes.get(start..start + len))
            .expect("layer and page are of this pool")
    }

    /// The same bytes, to be written.
    pub fn page_mut(&mut self, layer: usize, half: Half, page: PageId) -> &mut [u8] {
        let (buffer, start, len) = self.locate(layer, half, page);
        self.buffers
            .get_mut(buffer)
            .and_then(|bytes| bytes.get_mut(start..start + len))
            .expect("layer and page are of this pool")
    }

    /// Copies the KV of tokens `[start, end)` to `out`, packed. `pages` are those of the sequence
    /// from token 0 on.
    ///
    /// # Errors
    ///
    /// [`PoolError::TokenRange`], [`PoolError::Page`], [`PoolError::PackedLength`]; then nothing
    /// is written.
    pub fn gather(
        &self,
        pages: &[PageId],
        start: usize,
        end: usize,
        out: &mut [u8],
    ) -> Result<(), PoolError> {
        self.check(pages, start, end, out.len())?;
        let mut rest = out;
        for layer in 0..self.spec.layers {
            for half in Half::BOTH {
                for (page, from, to) in self.runs(pages, start, end) {
                    let rows = self.page(layer, half, page);
                    let rows = rows.get(from..to).expect("a run lies inside its page");
                    let (target, tail) = rest.split_at_mut(rows.len());
                    target.copy_from_slice(rows);
                    rest = tail;
                }
            }
        }
        Ok(())
    }

    /// Copies packed KV of tokens `[start, end)` into their pages.
    ///
    /// # Errors
    ///
    /// As [`Self::gather`]; then nothing is written.
    pub fn scatter(
        &mut self,
        pages: &[PageId],
        start: usize,
        end: usize,
        packed: &[u8],
    ) -> Result<(), PoolError> {
        self.check(pages, start, end, packed.len())?;
        let mut rest = packed;
        for layer in 0..self.spec.layers {
            for half in Half::BOTH {
                for at in self.runs(pages, start, end) {
                    let (page, from, to) = at;
                    let rows = self.page_mut(layer, half, page);
                    let rows = rows.get_mut(from..to).expect("a run lies inside its page");
                    let (bytes, tail) = rest.split_at(rows.len());
                    rows.copy_from_slice(bytes);
                    rest = tail;
                }
            }
        }
        Ok(())
    }

    /// Zeroes pages.
    pub fn clear(&mut self, pages: &[PageId]) {
        for layer in 0..self.spec.layers {
            for half in Half::BOTH {
                for page in pages {
                    self.page_mut(layer, half, *page).fill(0);
                }
            }
        }
    }

    /// The byte ranges inside pages that hold tokens `[start, end)`.
    fn runs<'a>(
        &self,
        pages: &'a [PageId],
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (PageId, usize, usize)> + use<'a> {
        let (size, row) = (self.page_size, self.row_bytes);
        pages
            .iter()
            .enumerate()
            .skip(start / size)
            .map_while(move |(index, page)| {
                let first = index * size;
                let from = start.saturating_sub(first);
                let to = end.saturating_sub(first).min(size);
                (from < to).then_some((*page, from * row, to * row))
            })
    }

    fn check(
        &self,
        pages: &[PageId],
        start: usize,
        end: usize,
        packed: usize,
    ) -> Result<(), PoolError> {
        if start > end || end.div_ceil(self.page_size) > pages.len() {
            return Err(PoolError::TokenRange {
                start,
                end,
                pages: pages.len(),
            });
        }
        if let Some(page) = pages
            .iter()
            .find(|page| page.raw() == 0 || page.raw() > self.pages)
        {
            return Err(PoolError::Page(page.raw()));
        }
        let expected = mul(end - start, self.token_bytes())?;
        if packed != expected {
            return Err(PoolError::PackedLength {
                expected,
                got: packed,
            });
        }
        Ok(())
    }

    /// Buffer, offset and length. Cannot overflow: the whole pool is allocated.
    fn locate(&self, layer: usize, half: Half, page: PageId) -> (usize, usize, usize) {
        let len = self.page_size * self.row_bytes;
        let at = layer * 2 + half.index();
        match self.layout {
            Layout::PerLayer => (at, page.index() * len, len),
            Layout::PageMajor => (0, (page.index() * self.spec.layers * 2 + at) * len, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> KvSpec {
        KvSpec {
            layers: 2,
            kv_heads: 2,
            head_dim: 3,
            dtype: Dtype::Bf16,
        }
    }

    fn ids(raw: &[u32]) -> Vec<PageId> {
        raw.iter().map(|raw| PageId::from_raw(*raw)).collect()
    }

    #[test]
    fn packed_kv_depends_on_neither_pages_nor_page_size_nor_layout() {
        let bytes: Vec<u8> = (0..11 * 48).map(|i| (i % 251) as u8).collect();
        for layout in [Layout::PerLayer, Layout::PageMajor] {
            for (size, pages) in [
                (
                    1,
                    ids(&[9, 2, 8, 14, 1, 3, 7, 6, 11, 12, 20, 19, 18, 17, 16, 15]),
                ),
                (4, ids(&[3, 9, 1, 2])),
                (64, ids(&[5])),
            ] {
                let mut pool = KvPool::new(spec(), layout, 20, size).unwrap();
                // Tokens [3, 14) in one go, read back in two parts.
                pool.scatter(&pages, 3, 14, &bytes).unwrap();
                let mut all = vec![0; bytes.len()];
                pool.gather(&pages, 3, 14, &mut all).unwrap();
                assert_eq!(all, bytes);
                let mut part = vec![0; 5 * 48];
                pool.gather(&pages, 5, 10, &mut part).unwrap();
                // The part's first run: K of layer 0, tokens 5..10.
                assert_eq!(part[..5 * 12], bytes[2 * 12..7 * 12]);
            }
        }
    }

    #[test]
    fn page_major_page_is_one_range() {
        let mut pool = KvPool::new(spec(), Layout::PageMajor, 3, 4).unwrap();
        let bytes: Vec<u8> = (0..4 * 48).map(|i| (i % 253) as u8).collect();
        pool.scatter(&ids(&[2]), 0, 4, &bytes).unwrap();
        assert_eq!(
            &pool.buffers[0][2 * bytes.len()..3 * bytes.len()],
            &bytes[..]
        );
    }

    #[test]
    fn bad_ranges_are_refused() {
        let pool = KvPool::new(spec(), Layout::PerLayer, 3, 4).unwrap();
        let mut out = vec![0; 48];
        let beyond = pool.gather(&ids(&[1]), 4, 5, &mut out);
        assert_eq!(
            beyond,
            Err(PoolError::TokenRange {
                start: 4,
                end: 5,
                pages: 1
            })
        );
        assert_eq!(
            pool.gather(&ids(&[4]), 0, 1, &mut out),
            Err(PoolError::Page(4))
        );
        assert_eq!(
            pool.gather(&ids(&[0]), 0, 1, &mut out),
            Err(PoolError::Page(0))
        );
        let short = pool.gather(&ids(&[1]), 0, 2, &mut out);
        assert_eq!(
            short,
            Err(PoolError::PackedLength {
                expected: 96,
                got: 48
            })
        );
    }
}
