//! The embedded engine.
pub mod batch;
pub mod cache;
pub mod device_memory;
pub mod ids;
pub mod ledger;
pub mod memory;
pub mod model;
pub mod pools;
pub mod request;
pub mod rng;
pub mod scheduler;
