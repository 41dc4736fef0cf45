//! Engram.
#![deny(unsafe_code, missing_docs)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::indexing_slicing))]

pub mod engine;
