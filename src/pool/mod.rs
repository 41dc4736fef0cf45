//! Geometry of a worker's pools, and the names of what is packed from them. Pure.
//!
//! # What
//! A worker holds recurrent states in *slots* and attention KV in *rows*, one row a token, grouped
//! in pages. Saved bytes are in a **packed form** that depends on none of that:
//!
//! ```text
//! state   for each state tensor, in order:  [layer][bytes of one slot of one layer]
//! piece   for each KV layer, in order:      [K | V][token][bytes of one row]
//! ```
//!
//! so bytes saved from one slot, page size, layout or capacity are right for every other.
//! [`Geometry`] knows the packed form, [`PoolMap`] which bytes of the pools make it up.
//!
//! # Names
//! A [`fingerprint`] covers all that makes bytes interchangeable and nothing else. [`PrefixHasher`]
//! turns it, a namespace and the tokens into the address of an object.
//!
//! # Errors
//! All numbers come from a peer: every product is checked and every size has a limit, so that what
//! was accepted can be computed with. Each [`GeometryError`] names its typed refusal.

mod address;
mod dtype;
mod error;
mod fingerprint;
mod geometry;
mod map;
#[cfg(test)]
pub(crate) mod parsers;

pub use address::{PrefixHasher, cut};
pub use dtype::DType;
pub use error::GeometryError;
pub use fingerprint::{IdentityError, PACKING, fingerprint};
pub use geometry::{
    Geometry, GeometrySpec, KvLayer, KvUniform, MAX_LAYERS, MAX_RANK, MAX_ROW_BYTES,
    MAX_STATE_BYTES, MAX_STATE_TENSORS, Shard, StateSpec, StateTensor,
};
pub use map::{Buffer, Layout, PoolMap, Span};
