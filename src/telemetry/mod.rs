//! Logs and readiness of the process. Metrics sit beside the code that they measure; the registry
//! is made by `app`.

pub mod log;
pub mod readiness;

pub use readiness::{Latch, Readiness};
