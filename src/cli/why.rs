//! An error with its causes, for people.

/// The error and what caused it, each said once: many errors tell their cause themselves.
pub fn why(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.contains(&cause) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("data: {source}")]
    struct Told {
        source: std::io::Error,
    }

    #[test]
    fn every_cause_is_said_once() {
        let source = std::io::Error::other("no such thing");
        let error = anyhow::Error::from(Told { source }).context("opening the store");
        assert_eq!(why(&error), "opening the store: data: no such thing");
        let error = anyhow::anyhow!("inner").context("outer");
        assert_eq!(why(&error), "outer: inner");
    }
}
