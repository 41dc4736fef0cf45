use std::collections::HashMap;

use proptest::{prelude::*, sample::Index};

use super::*;
use crate::pool::{DType, GeometrySpec, KvLayer, StateSpec, geometry::tests::request};

/// A pool of bytes, filled and read by plain index arithmetic on element coordinates: what a server
/// does, written without anything of this module but the sizes of its buffers.
struct BytePool {
    map: PoolMap,
    buffers: HashMap<Buffer, Vec<u8>>,
}

/// The bytes of the model, apart from any pool: what slot and token really hold.
struct Content {
    /// `[tensor][layer][byte]`
    state: Vec<Vec<Vec<u8>>>,
    /// `[layer][K, V][token][byte]`
    kv: Vec<[Vec<Vec<u8>>; 2]>,
}

// === impl Content ===

impl Content {
    fn new(geometry: &Geometry, tokens: usize, seed: u64) -> Self {
        let mut state = seed;
        let mut byte = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(seed | 1);
            (state >> 56) as u8
        };
        let mut bytes = move |n: u64| (0..n).map(|_| byte()).collect::<Vec<u8>>();
        Self {
            state: geometry
                .state_tensors()
                .iter()
                .map(|tensor| {
                    tensor
                        .spec
                        .layers
                        .iter()
                        .map(|_| bytes(tensor.slot_bytes))
                        .collect()
                })
                .collect(),
            kv: geometry
                .kv_layers()
                .iter()
                .map(|layer| {
                    [layer.k_row(), layer.v_row()]
                        .map(|row| (0..tokens).map(|_| bytes(row)).collect())
                })
                .collect(),
        }
    }

    /// The packed state, from the words of its definition.
    fn packed_state(&self) -> Vec<u8> {
        self.state.iter().flatten().flatten().copied().collect()
    }

    fn packed_kv(&self) -> Vec<u8> {
        self.kv
            .iter()
            .flatten()
            .flatten()
            .flatten()
            .copied()
            .collect()
    }
}

// === impl BytePool ===

impl BytePool {
    fn new(map: PoolMap) -> Self {
        let states = map.geometry().state_tensors().len();
        let layers = map.geometry().kv_layers().len();
        let buffers = (0..states)
            .map(Buffer::State)
            .chain((0..layers).flat_map(|i| [Buffer::K(i), Buffer::V(i)]))
            .chain([Buffer::StateRaw, Buffer::KvRaw])
            .map(|buffer| (buffer, vec![0xee; map.buffer_bytes(buffer) as usize]))
            .collect();
        Self { map, buffers }
    }

    fn put(&mut self, buffer: Buffer, at: usize, bytes: &[u8]) {
        self.buffers.get_mut(&buffer).unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put_state(&mut self, slot: usize, content: &Content) {
        let slots = self.map.slots() as usize;
        let slot_bytes: usize = content.state.iter().flatten().map(Vec::len).sum();
        let mut in_slot = 0;
        for (i, tensor) in content.state.iter().enumerate() {
            for (l, bytes) in tensor.iter().enumerate() {
                match self.map.layout() {
                    Layout::PerLayer => {
                        self.put(Buffer::State(i), (l * slots + slot) * bytes.len(), bytes);
                    }
                    Layout::PageMajor => {
                        self.put(Buffer::StateRaw, slot * slot_bytes + in_slot, bytes);
                    }
                }
                in_slot += bytes.len();
            }
        }
    }

    fn put_kv(&mut self, rows: &[u32], content: &Content) {
        let page = self.map.page_size() as usize;
        let widths: Vec<[usize; 2]> = self
            .map
            .geometry()
            .kv_layers()
            .iter()
            .map(|layer| [layer.k_row() as usize, layer.v_row() as usize])
            .collect();
        let token_bytes: usize = widths.iter().flatten().sum();
        for (l, roles) in content.kv.iter().enumerate() {
            for (role, tokens) in roles.iter().enumerate() {
                let width = widths[l][role];
                let before: usize = widths[..l].iter().flatten().sum::<usize>()
                    + widths[l][..role].iter().sum::<usize>();
                for (token, bytes) in tokens.iter().enumerate() {
                    let row = rows[token] as usize;
                    match self.map.layout() {
                        Layout::PerLayer => {
                            let buffer = [Buffer::K(l), Buffer::V(l)][role];
                            self.put(buffer, row * width, bytes);
                        }
                        Layout::PageMajor => {
                            let at = row / page * page * token_bytes
                                + before * page
                                + row % page * width;
                            self.put(Buffer::KvRaw, at, bytes);
                        }
                    }
                }
            }
        }
    }

    fn read(&self, spans: &[Span]) -> Vec<u8> {
        let mut out = Vec::new();
        for span in spans {
            assert_ne!(span.len, 0);
            let at = span.offset as usize;
            out.extend_from_slice(&self.buffers[&span.buffer][at..at + span.len as usize]);
        }
        for pair in spans.windows(2) {
            let joins =
                pair[0].buffer == pair[1].buffer && pair[0].offset + pair[0].len == pair[1].offset;
            assert!(!joins, "neighbours are merged");
        }
        out
    }
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(&DType::ALL[..])
}

fn geometries() -> impl Strategy<Value = Geometry> {
    let layers = |most| {
        prop::collection::btree_set(0_u32..50, 1..most)
            .prop_map(|set| set.into_iter().collect::<Vec<u32>>())
    };
    let tensor = (dtypes(), layers(5), prop::collection::vec(0_u32..5, 0..4));
    let state = prop::collection::vec(tensor, 0..4);
    let kv = layers(4).prop_flat_map(|layers| {
        let layer = (dtypes(), 0_u32..4, 0_u32..6, 0_u32..6);
        let n = layers.len();
        prop::collection::vec(layer, n).prop_map(move |shapes| {
            layers
                .iter()
                .zip(shapes)
                .map(|(&layer, (dtype, heads, k_head_dim, v_head_dim))| KvLayer {
                    layer,
                    dtype,
                    heads,
                    k_head_dim,
                    v_head_dim,
                })
                .collect::<Vec<_>>()
        })
    });
    (state, kv).prop_map(|(state, mut kv)| {
        let mut state: Vec<StateSpec> = state
            .into_iter()
            .enumerate()
            .map(|(i, (dtype, layers, shape))| StateSpec {
                name: format!("conv.{i}"),
                dtype,
                layers,
                shape,
            })
            .collect();
        // Never all empty.
        let (name, layers) = ("temporal".to_owned(), vec![1, 4]);
        state.push(StateSpec {
            name,
            dtype: DType::F32,
            layers,
            shape: vec![3],
        });
        kv.push(KvLayer {
            layer: 99,
            dtype: DType::BF16,
            heads: 1,
            k_head_dim: 3,
            v_head_dim: 2,
        });
        Geometry::new(GeometrySpec { state, kv }).unwrap()
    })
}

/// Layout, page size, pages, slots, which slot, and which rows tokens land in.
#[derive(Debug, Clone)]
struct Place {
    layout: Layout,
    page_size: u32,
    pages: u32,
    slots: u32,
    slot: Index,
    /// Picks pages without putting one back; tokens fill a page in order, as servers do.
    order: Vec<Index>,
    /// With page size 1 some runs of neighbours, as fresh pools have.
    ascending: bool,
}

fn places() -> impl Strategy<Value = Place> {
    (
        prop::sample::select(vec![Layout::PerLayer, Layout::PageMajor]),
        prop::sample::select(vec![1_u32, 3, 64]),
        1_u32..6,
        1_u32..7,
        any::<Index>(),
        prop::collection::vec(any::<Index>(), 80),
        any::<bool>(),
    )
        .prop_map(
            |(layout, page_size, spare, slots, slot, order, ascending)| Place {
                layout,
                page_size,
                pages: 70_u32.div_ceil(page_size) + spare,
                slots,
                slot,
                order,
                ascending,
            },
        )
}

// === impl Place ===

impl Place {
    fn rows(&self, tokens: usize) -> Vec<u32> {
        let mut free: Vec<u32> = (0..self.pages).collect();
        let mut order = self.order.iter();
        let mut rows = Vec::new();
        while rows.len() < tokens {
            let pick = match self.ascending {
                true => 0,
                false => order.next().unwrap().index(free.len()),
            };
            let page = free.remove(pick);
            rows.extend(page * self.page_size..(page + 1) * self.page_size);
        }
        rows.truncate(tokens);
        rows
    }

    /// Packs `content` out of a pool where it lies at this place.
    fn pack(&self, geometry: &Geometry, tokens: usize, content: &Content) -> (Vec<u8>, Vec<u8>) {
        let map = PoolMap::new(
            geometry.clone(),
            self.layout,
            self.page_size,
            u64::from(self.slots),
            u64::from(self.pages * self.page_size),
        )
        .unwrap();
        let slot = self.slot.index(self.slots as usize);
        let rows = self.rows(tokens);
        let mut pool = BytePool::new(map);
        pool.put_state(slot, content);
        pool.put_kv(&rows, content);
        let state = pool.read(&pool.map.state_spans(slot as u32).unwrap());
        let kv = pool.read(&pool.map.kv_spans(&rows).unwrap());
        (state, kv)
    }
}

proptest! {
    /// The packed form is that of the definition, wherever the bytes lay.
    #[test]
    fn packed_form_does_not_depend_on_the_place(
        geometry in geometries(),
        one in places(),
        other in places(),
        tokens in 0_usize..70,
        seed in any::<u64>(),
    ) {
        let content = Content::new(&geometry, tokens, seed);
        let (state, kv) = (content.packed_state(), content.packed_kv());
        prop_assert_eq!(state.len() as u64, geometry.state_bytes());
        prop_assert_eq!(kv.len() as u64, geometry.kv_row_bytes() * tokens as u64);
        for place in [one, other] {
            let (packed_state, packed_kv) = place.pack(&geometry, tokens, &content);
            prop_assert!(packed_state == state, "state of {:?}", place);
            prop_assert!(packed_kv == kv, "KV of {:?}", place);
        }
    }

    /// Rows in any order, repeated, fragmented.
    #[test]
    fn any_rows_are_read_one_by_one(
        geometry in geometries(),
        layout in prop::sample::select(vec![Layout::PerLayer, Layout::PageMajor]),
        page_size in prop::sample::select(vec![1_u32, 4, 64]),
        rows in prop::collection::vec(0_u32..128, 0..40),
    ) {
        let map = PoolMap::new(geometry.clone(), layout, page_size, 2, 128).unwrap();
        let content = Content::new(&geometry, 128, 7);
        let mut pool = BytePool::new(map);
        pool.put_kv(&(0..128).collect::<Vec<u32>>(), &content);
        let mut expected = Vec::new();
        for roles in &content.kv {
            for role in roles {
                rows.iter().for_each(|&row| expected.extend_from_slice(&role[row as usize]));
            }
        }
        prop_assert!(pool.read(&pool.map.kv_spans(&rows).unwrap()) == expected);
    }
}

#[test]
fn neighbours_are_merged_as_far_as_the_layout_allows() {
    let count = |layout, page_size, rows: &[u32]| {
        let geometry = Geometry::try_from(&request()).unwrap();
        PoolMap::new(geometry, layout, page_size, 9, 128)
            .unwrap()
            .kv_spans(rows)
            .unwrap()
            .len()
    };
    let all: Vec<u32> = (0..128).collect();
    let scattered: Vec<u32> = (0..64).map(|i| i * 2).collect();
    assert_eq!(count(Layout::PerLayer, 1, &all), 4, "K and V of two layers");
    assert_eq!(count(Layout::PerLayer, 64, &all), 4);
    assert_eq!(count(Layout::PerLayer, 1, &scattered), 4 * 64);
    assert_eq!(count(Layout::PageMajor, 64, &all[..64]), 1, "a whole page");
    assert_eq!(
        count(Layout::PageMajor, 64, &all),
        8,
        "two pages, each role apart"
    );
    assert_eq!(count(Layout::PageMajor, 64, &[]), 0);
}

#[test]
fn a_page_major_state_is_one_span() {
    let geometry = Geometry::try_from(&request()).unwrap();
    let map = PoolMap::new(geometry, Layout::PageMajor, 1, 9, 128).unwrap();
    let span = Span {
        buffer: Buffer::StateRaw,
        offset: 3 * 588,
        len: 588,
    };
    assert_eq!(map.state_spans(3).unwrap(), [span]);
    assert_eq!(map.buffer_bytes(Buffer::StateRaw), 9 * 588);
    assert_eq!(map.buffer_bytes(Buffer::State(0)), 0);
}

#[test]
fn hostile_pools_are_refused() {
    let refused = |change: fn(&mut v1::AttachRequest)| {
        let mut request = request();
        change(&mut request);
        PoolMap::try_from(&request).unwrap_err()
    };
    assert_eq!(refused(|r| r.layout = 0), GeometryError::Layout(0));
    assert_eq!(refused(|r| r.layout = 9), GeometryError::Layout(9));
    assert_eq!(refused(|r| r.slots = 0), GeometryError::Empty("slots"));
    assert_eq!(refused(|r| r.rows = 0), GeometryError::Empty("rows"));
    assert!(matches!(
        refused(|r| r.slots = u64::MAX),
        GeometryError::TooMany { .. }
    ));
    assert!(matches!(
        refused(|r| r.rows = 1 << 32),
        GeometryError::TooMany { .. }
    ));
    for page_size in [0, 3, 129, u32::MAX] {
        let mut request = request();
        request.page_size = page_size;
        let error = PoolMap::try_from(&request).unwrap_err();
        assert_eq!(
            error,
            GeometryError::Pages {
                rows: 128,
                page_size
            }
        );
    }
    assert!(matches!(refused(|r| r.kv.clear()), GeometryError::NoKv));
}

#[test]
fn slots_and_rows_outside_the_pool_are_refused() {
    let map = PoolMap::try_from(&request()).unwrap();
    assert!(map.state_spans(8).is_ok());
    let error = map.state_spans(9).unwrap_err();
    assert_eq!(
        error,
        GeometryError::OutOfPool {
            what: "slot",
            index: 9,
            count: 9
        }
    );
    assert!(map.kv_spans(&[127]).is_ok());
    let error = map.kv_spans(&[0, u32::MAX]).unwrap_err();
    let index = u64::from(u32::MAX);
    assert_eq!(
        error,
        GeometryError::OutOfPool {
            what: "row",
            index,
            count: 128
        }
    );
}

/// The largest pools that are accepted: every offset is still a number.
#[test]
fn offsets_of_the_largest_pools_do_not_overflow() {
    let state = StateSpec {
        name: "temporal".to_owned(),
        dtype: DType::F32,
        layers: (0..1024).collect(),
        shape: vec![1 << 20],
    };
    let kv = |layer| KvLayer {
        layer,
        dtype: DType::U8,
        heads: 1,
        k_head_dim: 512,
        v_head_dim: 512,
    };
    let spec = GeometrySpec {
        state: vec![state],
        kv: (0..1024).map(kv).collect(),
    };
    let geometry = Geometry::new(spec).unwrap();
    assert_eq!(
        (geometry.state_bytes(), geometry.kv_row_bytes()),
        (4 << 30, 1 << 20)
    );
    let last = u32::MAX - 1;
    for (layout, state_buffer, kv_buffer) in [
        (Layout::PerLayer, Buffer::State(0), Buffer::V(1023)),
        (Layout::PageMajor, Buffer::StateRaw, Buffer::KvRaw),
    ] {
        let most = u64::from(u32::MAX);
        let map = PoolMap::new(geometry.clone(), layout, u32::MAX, most, most).unwrap();
        let end = map
            .state_spans(last)
            .unwrap()
            .last()
            .map(|span| span.offset + span.len);
        assert_eq!(end, Some(map.buffer_bytes(state_buffer)));
        let end = map
            .kv_spans(&[last])
            .unwrap()
            .last()
            .map(|span| span.offset + span.len);
        assert_eq!(end, Some(map.buffer_bytes(kv_buffer)));
    }
}
