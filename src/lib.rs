//! A durable memory for language models with a recurrent state, beside an unmodified SGLang.
//!
//! Layers, lowest first; each module may use only those above it in this list:
//!
//! ```text
//! types, util   ids, units, clock, secrets, sockets
//! device        shared memory, descriptors, copies: the only `unsafe`
//! proto         the wire: gRPC, and the shared-memory channel
//! pool          geometry of a worker's pools, fingerprint, addresses (pure)
//! store         tiers: RAM arena, disk files, manifests
//! index         which prefixes are known (pure)
//! service       every decision: save, restore, tiers, conversations
//! tokenizer     a model's tokenizer and chat template
//! upstream      HTTP client of the inference server behind the daemon
//! gateway       generating from state: composes prompts, forwards, records
//! grpc, rest    wire to service and back, no logic
//! cli, app      the command line; putting the parts together
//! engine        the embedded engine: a client of `proto`, no part of the daemon
//! ```

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::indexing_slicing)]

pub mod app;
pub mod cli;
pub mod config;
pub mod device;
pub mod engine;
pub mod gateway;
pub mod grpc;
pub mod index;
pub mod pool;
pub mod proto;
pub mod rest;
pub mod service;
pub mod store;
pub mod telemetry;
pub mod tokenizer;
pub mod types;
pub mod upstream;
pub mod util;
pub mod webhooks;
