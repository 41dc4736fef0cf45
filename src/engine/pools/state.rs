//! The state pool: one recurrent state of all recurrent layers a slot.

use super::{Dtype, Layout, PoolError, mul};
use crate::engine::ids::{PoolId, SlotId};

/// One tensor of the state pool: `[L_m, slots+1, shape..]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// `conv.0`, `temporal`.
    pub name: String,
    /// Shape of one slot of one layer.
    pub shape: Vec<usize>,
    /// Type of an element.
    pub dtype: Dtype,
}

/// The state pool's geometry, without its capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Number of recurrent layers, `L_m`.
    pub layers: usize,
    /// All state tensors, in packing order.
    pub tensors: Vec<TensorSpec>,
}

/// The state pool.
#[derive(Debug)]
pub struct StatePool {
    spec: StateSpec,
    layout: Layout,
    slots: u32,
    /// Bytes of one slot of one layer, of each tensor.
    unit: Vec<usize>,
    /// Offset of each tensor in a packed state.
    packed_at: Vec<usize>,
    packed_len: usize,
    /// Per layer: one buffer a tensor. Page-major: one buffer.
    buffers: Vec<Vec<u8>>,
}

// === impl TensorSpec ===

impl TensorSpec {
    /// Bytes of one slot of one layer.
    ///
    /// # Errors
    ///
    /// [`PoolError::TooLarge`] if that is no size.
    pub fn unit_bytes(&self) -> Result<usize, PoolError> {
        self.shape
            .iter()
            .try_fold(self.dtype.bytes(), |bytes, dim| mul(bytes, *dim))
    }
}

// === impl StatePool ===

impl StatePool {
    /// A zeroed pool of `slots` slots beside the reserved one.
    ///
    /// # Errors
    ///
    /// [`PoolError::TooLarge`].
    pub fn new(spec: StateSpec, layout: Layout, slots: u32) -> Result<Self, PoolError> {
        let unit: Vec<usize> = spec
            .tensors
            .iter()
            .map(TensorSpec::unit_bytes)
            .collect::<Result<_, _>>()?;
        let mut packed_at = Vec::with_capacity(unit.len());
        let mut packed_len = 0_usize;
        for bytes in &unit {
            packed_at.push(packed_len);
            packed_len = packed_len
                .checked_add(mul(*bytes, spec.layers)?)
                .ok_or(PoolError::TooLarge)?;
        }
        let rows = slots as usize + 1;
        let buffers = match layout {
            Layout::PerLayer => unit
                .iter()
                .map(|bytes| Ok(vec![0; mul(mul(*bytes, spec.layers)?, rows)?]))
                .collect::<Result<_, PoolError>>()?,
            Layout::PageMajor => vec![vec![0; mul(packed_len, rows)?]],
        };
        Ok(Self {
            spec,
            layout,
            slots,
            unit,
            packed_at,
            packed_len,
            buffers,
        })
    }

    /// The geometry.
    pub fn spec(&self) -> &StateSpec {
        &self.spec
    }

    /// The layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Usable slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of a packed state.
    pub fn packed_len(&self) -> usize {
        self.packed_len
    }

    /// The bytes of one tensor (`0..tensors`), one layer (`0..L_m`), one slot.
    pub fn unit(&self, tensor: usize, layer: usize, slot: SlotId) -> &[u8] {
        let (buffer, start, len) = self.locate(tensor, layer, slot);
        self.buffers
            .get(buffer)
            .and_then(|bytes| bytes.get(start..start + len))
            .expect("tensor, layer and slot are of this pool")
    }

    /// The same bytes, to be written.
    pub fn unit_mut(&mut self, tensor: usize, layer: usize, slot: SlotId) -> &mut [u8] {
        let (buffer, start, len) = self.locate(tensor, layer, slot);
        self.buffers
            .get_mut(buffer)
            .and_then(|bytes| bytes.get_mut(start..start + len))
            .expect("tensor, layer and slot are of this pool")
    }

    /// Copies a slot's state to `out`, packed.
    ///
    /// # Errors
    ///
    /// [`PoolError::PackedLength`], [`PoolError::Slot`]; then nothing is written.
    pub fn gather(&self, slot: SlotId, out: &mut [u8]) -> Result<(), PoolError> {
        self.check(slot, out.len())?;
        let mut rest = out;
        for tensor in 0..self.unit.len() {
            for layer in 0..self.spec.layers {
                let bytes = self.unit(tensor, layer, slot);
                let (to, tail) = rest.split_at_mut(bytes.len());
                to.copy_from_slice(bytes);
                rest = tail;
            }
        }
        Ok(())
    }

    /// Copies a packed state into a slot.
    ///
    /// # Errors
    ///
    /// [`PoolError::PackedLength`], [`PoolError::Slot`]; then nothing is written.
    pub fn scatter(&mut self, slot: SlotId, packed: &[u8]) -> Result<(), PoolError> {
        self.check(slot, packed.len())?;
        let mut rest = packed;
        for tensor in 0..self.unit.len() {
            for layer in 0..self.spec.layers {
                let to = self.unit_mut(tensor, layer, slot);
                let (bytes, tail) = rest.split_at(to.len());
                to.copy_from_slice(bytes);
                rest = tail;
            }
        }
        Ok(())
    }

    /// Copies the state of `from` to `to`.
    pub fn copy(&mut self, from: SlotId, to: SlotId) {
        for tensor in 0..self.unit.len() {
            for layer in 0..self.spec.layers {
                let (buffer, start, len) = self.locate(tensor, layer, from);
                let (_, target, _) = self.locate(tensor, layer, to);
                let bytes = self.buffers.get_mut(buffer).expect("the buffer exists");
                bytes.copy_within(start..start + len, target);
            }
        }
    }

    /// Zeroes a slot: the state before the first token.
    pub fn clear(&mut self, slot: SlotId) {
        for tensor in 0..self.unit.len() {
            for layer in 0..self.spec.layers {
                self.unit_mut(tensor, layer, slot).fill(0);
            }
        }
    }

    fn check(&self, slot: SlotId, packed: usize) -> Result<(), PoolError> {
        if slot.raw() == 0 || slot.raw() > self.slots {
            return Err(PoolError::Slot(slot.raw()));
        }
        if packed != self.packed_len {
            return Err(PoolError::PackedLength {
                expected: self.packed_len,
                got: packed,
            });
        }
        Ok(())
    }

    /// Buffer, offset and length. Cannot overflow: the whole pool is allocated.
    fn locate(&self, tensor: usize, layer: usize, slot: SlotId) -> (usize, usize, usize) {
        let len = self.unit.get(tensor).copied().expect("the tensor exists");
        match self.layout {
            Layout::PerLayer => {
                let rows = self.slots as usize + 1;
                (tensor, (layer * rows + slot.index()) * len, len)
            }
            Layout::PageMajor => {
                let at = self
                    .packed_at
                    .get(tensor)
                    .copied()
                    .expect("the tensor exists");
                (0, slot.index() * self.packed_len + at + layer * len, len)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> StateSpec {
        let tensor = |name: &str, shape: &[usize], dtype| TensorSpec {
            name: name.to_owned(),
            shape: shape.to_vec(),
            dtype,
        };
        StateSpec {
            layers: 3,
            tensors: vec![
                tensor("conv.0", &[5, 3], Dtype::Bf16),
                tensor("temporal", &[2, 4, 2], Dtype::F32),
            ],
        }
    }

    #[test]
    fn packed_state_depends_on_neither_slot_nor_layout() {
        let bytes: Vec<u8> = (0..3 * 30 + 3 * 64).map(|i| (i % 251) as u8).collect();
        for layout in [Layout::PerLayer, Layout::PageMajor] {
            let mut pool = StatePool::new(spec(), layout, 7).unwrap();
            assert_eq!(pool.packed_len(), bytes.len());
            pool.scatter(SlotId::from_raw(3), &bytes).unwrap();
            assert_eq!(
                pool.unit(1, 2, SlotId::from_raw(3)),
                &bytes[90 + 128..90 + 192]
            );
            pool.copy(SlotId::from_raw(3), SlotId::from_raw(7));
            pool.clear(SlotId::from_raw(3));
            let mut out = vec![0; bytes.len()];
            pool.gather(SlotId::from_raw(7), &mut out).unwrap();
            assert_eq!(out, bytes);
            pool.gather(SlotId::from_raw(3), &mut out).unwrap();
            assert!(out.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn page_major_slot_is_one_range_in_packed_order() {
        let mut pool = StatePool::new(spec(), Layout::PageMajor, 2).unwrap();
        let bytes: Vec<u8> = (0..pool.packed_len()).map(|i| (i % 253) as u8).collect();
        pool.scatter(SlotId::from_raw(2), &bytes).unwrap();
        assert_eq!(&pool.buffers[0][2 * bytes.len()..], &bytes[..]);
    }

    #[test]
    fn bad_slot_and_length_are_refused() {
        let mut pool = StatePool::new(spec(), Layout::PerLayer, 2).unwrap();
        let mut out = vec![0; pool.packed_len()];
        assert_eq!(
            pool.gather(SlotId::from_raw(0), &mut out),
            Err(PoolError::Slot(0))
        );
        assert_eq!(
            pool.gather(SlotId::from_raw(3), &mut out),
            Err(PoolError::Slot(3))
        );
        let short = out.len() - 1;
        assert_eq!(
            pool.scatter(SlotId::from_raw(1), &out[..short]),
            Err(PoolError::PackedLength {
                expected: out.len(),
                got: short
            })
        );
    }
}
