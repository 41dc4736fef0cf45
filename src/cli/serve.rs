//! `engram serve`.

use std::path::PathBuf;
use std::process::ExitCode;

use super::announce;
use super::why::why;
use crate::app::{self, Bound};
use crate::config::{Config, EXIT_CONFIG};

/// Run the daemon.
///
/// Without a file every knob has its default: see deploy/engram.example.toml. Exits 64 when the
/// configuration cannot be used, before anything is bound or created.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Configuration, in TOML.
    #[arg(long, env = "ENGRAM_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the configuration and exit.
    #[arg(long)]
    check: bool,
    /// Once everything listens, write the addresses as JSON to this file: for scripts that let the
    /// system choose the port.
    #[arg(long, value_name = "FILE")]
    announce: Option<PathBuf>,
}

/// Runs until a signal ends it.
pub fn run(args: Args) -> ExitCode {
    let Args {
        config,
        check,
        announce,
    } = args;
    let config = match &config {
        Some(path) => Config::load(path),
        None => Config::default().validate().map(|()| Config::default()),
    };
    let config = match config {
        Ok(config) => config,
        Err(error) => {
            eprintln!("engram: the configuration cannot be used:\n{error}");
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    if check {
        println!("The configuration is good.");
        return ExitCode::SUCCESS;
    }
    config.log.init();
    let tell = |bound: &Bound| match &announce {
        Some(path) => announce::write(path, bound),
        None => Ok(()),
    };
    match app::run(config, tell) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", why(&error));
            ExitCode::FAILURE
        }
    }
}
