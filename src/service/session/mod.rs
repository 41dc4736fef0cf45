//! One attached worker.

pub mod requests;
