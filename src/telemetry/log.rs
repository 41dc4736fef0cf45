//! Log output: one line an event, on standard error.

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

/// Section `[log]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// What is logged, as `tracing` directives: a level, or `target=level` parts with commas between.
    /// The variable `ENGRAM_LOG` wins over it. Default: `"info"`.
    pub filter: String,
    /// `"text"` for people or `"json"` for machines. Default: `"text"`.
    pub format: Format,
}

/// Shape of a log line.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Time, level, target, message, fields.
    Text,
    /// One JSON object a line.
    Json,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Config {
            filter: "info".into(),
            format: Format::Text,
        }
    }
}

impl Config {
    /// Adds every problem of this section to `problems`.
    pub fn validate(&self, problems: &mut Vec<String>) {
        let Config { filter, format: _ } = self;
        if let Err(error) = EnvFilter::try_new(filter) {
            problems.push(format!("log.filter: {error}"));
        }
    }

    /// Starts logging for the whole process. A second call changes nothing.
    pub fn init(&self) {
        let filter = std::env::var("ENGRAM_LOG")
            .ok()
            .and_then(|text| EnvFilter::try_new(text).ok())
            .or_else(|| EnvFilter::try_new(&self.filter).ok())
            .unwrap_or_else(|| EnvFilter::new("info"));
        let builder = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false);
        let started = match self.format {
            Format::Text => builder.try_init(),
            Format::Json => builder.json().flatten_event(true).try_init(),
        };
        if started.is_err() {
            tracing::debug!("Logging was started before");
        }
    }
}
