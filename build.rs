//! Makes Rust code from the two descriptions of the protocol: `engram.proto` (gRPC, compiled without
//! protoc) and `channel.toml` (the shared-memory channel).

#[path = "build/channel/mod.rs"]
mod channel;

use std::error::Error;
use std::path::PathBuf;
use std::{env, fs};

const PROTO: &str = "proto/engram/v1/engram.proto";
const CHANNEL: &str = "proto/engram/v1/channel.toml";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed={PROTO}");
    println!("cargo::rerun-if-changed={CHANNEL}");

    let descriptors = protox::compile([PROTO], ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(descriptors)?;

    let code = channel::generate(&fs::read_to_string(CHANNEL)?)?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    fs::write(out.join("channel.rs"), code)?;
    Ok(())
}
