//! `engram export` and `engram import`: a snapshot as a pair of files.
//!
//! Both ask the daemon, or, with `--data`, work on the data directory of one that is stopped: then
//! the service itself runs in this process, without any socket, for as long as it takes.

pub mod export;
pub mod import;
mod offline;
mod pair;

use std::process::ExitCode;

use super::client::ClientError;
use super::remote::{self, EXIT_REFUSED};
use crate::service::{ErrorKind, ServiceError};
use crate::store::bundle::BundleError;

/// Exit code: the pair is damaged, or is none that this version knows.
const EXIT_BAD: u8 = 4;

/// Why nothing was exported or imported.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// The daemon.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The service in this process.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The pair.
    #[error("{path}: {error}")]
    Bad {
        /// Which of the two files.
        path: String,
        /// What is wrong with it.
        error: BundleError,
    },
    /// A file, or what else the system refused.
    #[error("{0}")]
    Other(String),
}

impl Failure {
    fn file(path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::Other(format!("{}: {error}", path.display()))
    }

    fn bad(path: &std::path::Path, error: BundleError) -> Self {
        Self::Bad {
            path: path.display().to_string(),
            error,
        }
    }

    /// Says it.
    fn exit(&self) -> ExitCode {
        match self {
            Self::Client(error) => return remote::tell(error),
            Self::Service(error) if error.kind() == ErrorKind::Mismatch => {
                eprintln!("engram: {}", told(&error.to_string()));
            }
            error => eprintln!("engram: {error}"),
        }
        ExitCode::from(match self {
            Self::Bad { .. } => EXIT_BAD,
            _ => EXIT_REFUSED,
        })
    }
}

/// A message as people at a command line know its words.
fn told(message: &str) -> String {
    message.replace("`new_model`", "`--new-model`")
}

/// Runs it in a runtime of its own.
fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| Failure::Other(error.to_string()))?;
    runtime.block_on(work)
}
