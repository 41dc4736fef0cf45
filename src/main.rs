//! The daemon, its client, the embedded engine and the demo: one binary.

#![deny(clippy::unwrap_used, clippy::indexing_slicing)]

use std::process::ExitCode;

fn main() -> ExitCode {
    engram::cli::main()
}
