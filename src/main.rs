//! The daemon and its client.

#![deny(clippy::unwrap_used, clippy::indexing_slicing)]

fn main() {}
