//! How bytes move.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Who copies between a worker's staging ring and memory that the daemon reaches.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TransferMode {
    /// The daemon: it opened the ring.
    Ipc,
    /// The worker: between its ring and a window of host memory that the daemon has mapped.
    Engine,
}

/// Which modes a worker allows.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub enum ModeChoice {
    /// Both: the daemon chooses.
    #[default]
    Auto,
    /// This one.
    Only(TransferMode),
}

/// A text that is neither a mode nor `auto`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is none of auto, ipc, engine")]
pub struct BadMode(String);

// === impl ModeChoice ===

impl ModeChoice {
    /// The modes, best first.
    #[must_use]
    pub fn modes(self) -> Vec<TransferMode> {
        match self {
            Self::Auto => TransferMode::ALL.to_vec(),
            Self::Only(mode) => vec![mode],
        }
    }
}

impl FromStr for ModeChoice {
    type Err = BadMode;

    fn from_str(text: &str) -> Result<Self, BadMode> {
        let only = TransferMode::ALL
            .into_iter()
            .find(|mode| mode.as_str() == text);
        match (only, text) {
            (Some(mode), _) => Ok(Self::Only(mode)),
            (None, "auto") => Ok(Self::Auto),
            (None, _) => Err(BadMode(text.to_owned())),
        }
    }
}

impl fmt::Display for ModeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Only(mode) => f.pad(mode.as_str()),
        }
    }
}

// === impl TransferMode ===

impl TransferMode {
    /// Both, the one without a further copy first.
    pub const ALL: [Self; 2] = [Self::Ipc, Self::Engine];

    /// The name in the API and in settings.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ipc => "ipc",
            Self::Engine => "engine",
        }
    }
}

impl fmt::Display for TransferMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_told_as_it_is_written() {
        for text in ["auto", "ipc", "engine"] {
            let choice: ModeChoice = text.parse().unwrap();
            assert_eq!(choice.to_string(), text);
            assert_eq!(choice.modes().len(), if text == "auto" { 2 } else { 1 });
        }
        for bad in ["", "IPC", "ipc,engine"] {
            assert_eq!(bad.parse::<ModeChoice>(), Err(BadMode(bad.to_owned())));
        }
    }
}
