//! Section `[upstream]`.

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use reqwest::header::HeaderValue;
use serde::{Deserialize, Serialize};

/// Longest key in bytes.
const KEY_MAX: u64 = 4096;

/// The inference server behind the daemon, for requests that generate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `http://HOST:PORT` of the SGLang server. Absent: the daemon does not generate. Default:
    /// absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// File with the key that the server asks for (`--api-key`), one line. Absent: none is sent.
    /// Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_file: Option<PathBuf>,
    /// The tenant that the server's worker is configured with: requests that go on with a conversation
    /// must name it (`tenant`). Absent: none. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Folder with the model's `tokenizer.json` and chat template. Absent: the server tokenizes.
    /// Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// How long connecting may take. Default: `"5s"`.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// How long a streamed answer may stand still, its first piece included. Default: `"2m"`.
    #[serde(with = "humantime_serde")]
    pub idle_timeout: Duration,
    /// How long a whole answer may take. Default: `"1h"`.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// How long a request waits for the one before it in its conversation. Default: `"1m"`.
    #[serde(with = "humantime_serde")]
    pub turn_wait: Duration,
    /// How long a shutdown lets answers under way go on, before anything else is stopped. Default:
    /// `"10s"`.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
    /// Largest answer, and largest event of a streamed one. Default: `"64 MiB"`.
    pub max_answer: ByteSize,
    /// Answers under way at a time; more requests are answered with 503. Default: `2048`.
    pub max_requests: u32,
    /// Idle connections that are kept for later requests. Default: `256`.
    pub pool: u32,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Config {
            url: None,
            api_key_file: None,
            tenant: None,
            tokenizer: None,
            connect_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(120),
            timeout: Duration::from_secs(3600),
            turn_wait: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(10),
            max_answer: ByteSize::mib(64),
            max_requests: 2048,
            pool: 256,
        }
    }
}

impl Config {
    /// Adds every problem of this section to `problems`. Reads the key, and only looks for the
    /// tokenizer.
    pub fn validate(&self, problems: &mut Vec<String>) {
        let Config {
            url,
            api_key_file,
            tenant,
            tokenizer,
            connect_timeout,
            idle_timeout,
            timeout,
            turn_wait,
            drain_timeout,
            max_answer,
            max_requests,
            pool,
        } = self;
        if let Err(problem) = self.base() {
            problems.push(problem);
        }
        if let Err(problem) = self.key() {
            problems.push(problem);
        }
        if url.is_none() && (api_key_file.is_some() || tokenizer.is_some() || tenant.is_some()) {
            problems.push("upstream.url: missing, and other knobs of the section need it".into());
        }
        if let Some(folder) = tokenizer
            && !folder.join("tokenizer.json").is_file()
        {
            problems.push(format!(
                "upstream.tokenizer: there is no tokenizer.json in {}",
                folder.display()
            ));
        }
        let most = Duration::from_secs(7 * 86_400);
        for (name, value) in [
            ("connect_timeout", connect_timeout),
            ("idle_timeout", idle_timeout),
            ("timeout", timeout),
            ("turn_wait", turn_wait),
        ] {
            if !(Duration::from_millis(10)..=most).contains(value) {
                problems.push(format!("upstream.{name}: not between 10ms and 7days"));
            }
        }
        if *drain_timeout > Duration::from_secs(3600) {
            problems.push("upstream.drain_timeout: more than 1h".into());
        }
        if !(64 << 10..=1 << 30).contains(&max_answer.as_u64()) {
            problems.push(format!(
                "upstream.max_answer: {max_answer} is not between 64 KiB and 1 GiB"
            ));
        }
        if !(1..=65_536).contains(max_requests) {
            problems.push(format!(
                "upstream.max_requests: {max_requests} is not between 1 and 65536"
            ));
        }
        if *pool > 65_536 {
            problems.push(format!("upstream.pool: {pool} is more than 65536"));
        }
    }

    /// The beginning of every URL.
    pub(super) fn base(&self) -> Result<Option<String>, String> {
        let Some(url) = &self.url else {
            return Ok(None);
        };
        let good = reqwest::Url::parse(url).is_ok_and(|parsed| {
            parsed.scheme() == "http"
                && parsed.host_str().is_some()
                && parsed.username().is_empty()
                && parsed.query().is_none()
                && parsed.fragment().is_none()
        });
        if !good {
            return Err(format!("upstream.url: `{url}` is not http://HOST:PORT"));
        }
        Ok(Some(url.trim_end_matches('/').to_owned()))
    }

    /// The header that carries the key.
    pub(super) fn key(&self) -> Result<Option<HeaderValue>, String> {
        use std::io::Read as _;

        let Some(path) = &self.api_key_file else {
            return Ok(None);
        };
        let bad = |what: &str| format!("upstream.api_key_file: {}: {what}", path.display());
        let mut text = String::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(KEY_MAX + 2).read_to_string(&mut text))
            .map_err(|error| bad(&error.to_string()))?;
        let key = text.trim_end_matches(['\r', '\n']);
        let visible = key.bytes().all(|byte| byte.is_ascii_graphic());
        if key.is_empty() || key.len() as u64 > KEY_MAX || !visible {
            return Err(bad("not one line of visible ASCII characters"));
        }
        let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
            .map_err(|_| bad("not one line of visible ASCII characters"))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(config: &Config) -> Vec<String> {
        let mut problems = Vec::new();
        config.validate(&mut problems);
        problems
    }

    #[test]
    fn addresses_are_checked() {
        let with = |url: &str| Config {
            url: Some(url.into()),
            ..Config::default()
        };
        for good in [
            "http://127.0.0.1:30000",
            "http://sglang:80/",
            "http://[::1]:1",
        ] {
            assert_eq!(problems(&with(good)), [""; 0], "{good}");
        }
        assert_eq!(
            with("http://h:1/").base().unwrap().as_deref(),
            Some("http://h:1")
        );
        for bad in [
            "",
            "h:1",
            "https://h",
            "http://",
            "http://u@h",
            "http://h/?x",
        ] {
            assert_eq!(problems(&with(bad)).len(), 1, "{bad}");
        }
        assert_eq!(problems(&Config::default()), [""; 0]);
    }

    #[test]
    fn keys_are_one_line_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let config = Config {
            url: Some("http://h:1".into()),
            api_key_file: Some(path.clone()),
            ..Config::default()
        };
        assert!(problems(&config)[0].starts_with("upstream.api_key_file"));
        for bad in ["", "\n", "two words", "a\nb"] {
            std::fs::write(&path, bad).unwrap();
            assert_eq!(problems(&config).len(), 1, "{bad:?}");
        }
        std::fs::write(&path, "secret\n").unwrap();
        let key = config.key().unwrap().unwrap();
        assert_eq!(key.as_bytes(), b"Bearer secret");
        assert!(!format!("{key:?}").contains("secret"));
    }

    #[test]
    fn every_problem_is_said() {
        let config = Config {
            tokenizer: Some("/nowhere".into()),
            timeout: Duration::ZERO,
            max_answer: ByteSize::b(1),
            max_requests: 0,
            ..Config::default()
        };
        assert_eq!(problems(&config).len(), 5, "{:?}", problems(&config));
    }
}
