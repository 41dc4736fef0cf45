//! The shared-memory channel.

mod codec;

pub use codec::{At, DecodeError, Message};

include!(concat!(env!("OUT_DIR"), "/channel.rs"));
