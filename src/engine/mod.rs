//! The embedded engine.
pub mod ids;
pub mod model;
pub mod pools;
pub mod rng;
