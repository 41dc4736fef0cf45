//! Which of the three surfaces a path is of. Each says errors in the shape that its clients read.

/// A family of paths with one shape of errors.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Surface {
    /// `/v1/…`, the probes, and whatever is no path: problem details (RFC 9457).
    Native,
    /// What clients of snapshot servers know, at the root: `{success, message, error}`.
    Compatible,
    /// What clients of OpenAI's API know: `{error: {message, type, param, code}}`.
    OpenAi,
}

/// Paths of [`Surface::Compatible`].
const COMPATIBLE: [&str; 13] = [
    "/save_snapshot",
    "/restore_snapshot",
    "/list_snapshots",
    "/get_snapshot_info",
    "/delete_snapshot",
    "/tokenize_chat",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
    "/health",
    "/server_info",
];

/// Paths of [`Surface::OpenAi`].
const OPEN_AI: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/models"];

// === impl Surface ===

impl Surface {
    /// The surface of a path, or of a path's template.
    pub fn of(path: &str) -> Surface {
        if COMPATIBLE.contains(&path) {
            Surface::Compatible
        } else if OPEN_AI.contains(&path) {
            Surface::OpenAi
        } else {
            Surface::Native
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_path_is_native() {
        assert_eq!(Surface::of("/save_snapshot"), Surface::Compatible);
        assert_eq!(Surface::of("/v1/completions"), Surface::OpenAi);
        for native in [
            "/v1/generate",
            "/v1/snapshots",
            "/readyz",
            "/",
            "/save_snapshot/",
        ] {
            assert_eq!(Surface::of(native), Surface::Native, "{native}");
        }
    }
}
