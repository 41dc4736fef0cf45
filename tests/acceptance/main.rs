//! What people use, phase by phase: a daemon with an inference server behind it. The server is the
//! embedded engine with a real tokenizer that is made here.

#![cfg(feature = "testing")]

mod baseline;
mod chat;
mod clients;
#[path = "../common/mod.rs"]
mod common;
mod fakes;
mod gauntlet;
mod heads;
mod lasting;
mod reduction;
mod snapshot;
mod stage;
mod stateful;
mod streams;
mod tokens;
mod trouble;
