//! `engram engine`.

use std::process::ExitCode;

use crate::{engine, telemetry};

/// Exit code: wrong usage.
const EXIT_USAGE: u8 = 2;

/// Runs until a signal ends it.
pub fn run(args: engine::Args) -> ExitCode {
    telemetry::log::Config::default().init();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let outcome = runtime
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(engine::run(args)));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("engram: {error:#}");
            match error.downcast_ref::<engine::BadArgs>() {
                Some(_) => ExitCode::from(EXIT_USAGE),
                None => ExitCode::FAILURE,
            }
        }
    }
}
