//! `engram engine`.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;

use super::announce;
use super::why::why;
use crate::{engine, telemetry};

/// Run the embedded engine: a small hybrid language model behind an HTTP surface.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    engine: engine::Args,
    /// Once it listens, write its address as JSON to this file: for scripts that let the system
    /// choose the port.
    #[arg(long, value_name = "FILE")]
    announce: Option<PathBuf>,
}

/// Exit code: wrong usage.
const EXIT_USAGE: u8 = 2;

/// Runs until a signal ends it.
pub fn run(
    Args {
        engine: args,
        announce,
    }: Args,
) -> ExitCode {
    telemetry::log::Config::default().init();
    let tell = |address| match &announce {
        Some(path) => announce::write(path, &json!({ "http": format!("http://{address}") })),
        None => Ok(()),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let outcome = runtime
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(engine::run(args, tell)));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("engram: {}", why(&error));
            match error.downcast_ref::<engine::BadArgs>() {
                Some(_) => ExitCode::from(EXIT_USAGE),
                None => ExitCode::FAILURE,
            }
        }
    }
}
