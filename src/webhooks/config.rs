//! Sections `[[webhooks]]`.

use std::path::PathBuf;
use std::time::Duration;

use reqwest::Url;
use serde::{Deserialize, Serialize};

use super::secret::Secret;
use crate::service::Event;

/// Webhooks at most.
const MOST: usize = 16;

/// One receiver of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// `http://HOST:PORT/PATH` that events are posted to.
    pub url: String,
    /// File with the secret that signs them: `whsec_` and base64 of 24 to 64 bytes, or one line of 16
    /// to 4096 visible ASCII characters.
    pub secret_file: PathBuf,
    /// Names of the events that are wanted. Default: all.
    #[serde(default)]
    pub events: Vec<String>,
    /// How long one attempt may take. Default: `"10s"`.
    #[serde(default = "Config::default_timeout", with = "humantime_serde")]
    pub timeout: Duration,
    /// Attempts at one event before it is given up. Default: `10`.
    #[serde(default = "Config::default_attempts")]
    pub attempts: u32,
    /// How long to wait after the first failed attempt; twice as long after each further one.
    /// Default: `"1s"`.
    #[serde(default = "Config::default_retry_after", with = "humantime_serde")]
    pub retry_after: Duration,
    /// The longest such wait. Default: `"1m"`.
    #[serde(default = "Config::default_retry_most", with = "humantime_serde")]
    pub retry_most: Duration,
}

// === impl Config ===

impl Config {
    fn default_timeout() -> Duration {
        Duration::from_secs(10)
    }

    fn default_attempts() -> u32 {
        10
    }

    fn default_retry_after() -> Duration {
        Duration::from_secs(1)
    }

    fn default_retry_most() -> Duration {
        Duration::from_secs(60)
    }

    /// Adds every problem of these sections to `problems`. Reads the secrets, and asks nobody.
    pub fn validate(all: &[Config], problems: &mut Vec<String>) {
        if all.len() > MOST {
            problems.push(format!("webhooks: more than {MOST}"));
        }
        for (at, one) in all.iter().enumerate() {
            let mut problem = |text: String| problems.push(format!("webhooks[{at}].{text}"));
            if let Err(text) = one.address() {
                problem(format!("url: {text}"));
            }
            if let Err(error) = Secret::read(&one.secret_file) {
                problem(format!("secret_file: {error}"));
            }
            for name in &one.events {
                if !Event::NAMES.contains(&name.as_str()) {
                    let known = Event::NAMES.join(", ");
                    problem(format!("events: `{name}` is none of {known}"));
                }
            }
            let short = Duration::from_millis(1)..=Duration::from_secs(3600);
            for (name, value) in [
                ("timeout", one.timeout),
                ("retry_after", one.retry_after),
                ("retry_most", one.retry_most),
            ] {
                if !short.contains(&value) {
                    problem(format!("{name}: not between 1ms and 1h"));
                }
            }
            if !(1..=1000).contains(&one.attempts) {
                problem(format!(
                    "attempts: {} is not between 1 and 1000",
                    one.attempts
                ));
            }
        }
    }

    /// Where to.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub(super) fn address(&self) -> Result<Url, String> {
        let url = Url::parse(&self.url)
            .map_err(|_| format!("`{}` is not http://HOST:PORT/PATH", self.url))?;
        match url.scheme() {
            "http" => {}
            "https" => {
                return Err(
                    "https is not spoken here: let a proxy on this machine do it, and name that"
                        .to_owned(),
                );
            }
            _ => return Err(format!("`{}` is not http://HOST:PORT/PATH", self.url)),
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("a name or password does not belong here: events are signed".to_owned());
        }
        Ok(url)
    }

    /// The address without what may be secret in it: a label of metrics, and for logs.
    pub(super) fn label(&self) -> String {
        self.address().map_or_else(
            |_| "bad".to_owned(),
            |mut url| {
                url.set_query(None);
                url.set_fragment(None);
                url.to_string()
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        #[derive(Deserialize)]
        struct File {
            webhooks: Vec<Config>,
        }
        let file: File = toml::from_str(text).unwrap();
        let mut problems = Vec::new();
        Config::validate(&file.webhooks, &mut problems);
        problems
    }

    #[test]
    fn every_problem_is_told_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "0123456789abcdef\n").unwrap();
        let secret = secret.display();
        let good = format!("[[webhooks]]\nurl = 'http://h:1/x'\nsecret_file = '{secret}'\n");
        assert_eq!(problems(&good), [""; 0]);
        let bad = format!(
            "{good}events = ['saved', 'nothing']\n\
             [[webhooks]]\nurl = 'https://h/x'\nsecret_file = '/none'\ntimeout = '0s'\nattempts = 0\n\
             [[webhooks]]\nurl = 'http://u:p@h/x'\nsecret_file = '{secret}'\n\
             [[webhooks]]\nurl = 'h/x'\nsecret_file = '{secret}'\n"
        );
        let found = problems(&bad);
        let places = [
            "webhooks[0].events",
            "webhooks[1].url: https is not spoken here",
            "webhooks[1].secret_file",
            "webhooks[1].timeout",
            "webhooks[1].attempts",
            "webhooks[2].url: a name or password",
            "webhooks[3].url",
        ];
        assert_eq!(found.len(), places.len(), "{found:?}");
        for (found, place) in found.iter().zip(places) {
            assert!(found.starts_with(place), "{found}");
        }
        assert_eq!(problems(&good.repeat(MOST + 1)).len(), 1);
    }

    #[test]
    fn labels_have_no_secrets() {
        let config = Config {
            url: "http://h:1/x?key=s#t".into(),
            ..toml::from_str("url = ''\nsecret_file = ''").unwrap()
        };
        assert_eq!(config.label(), "http://h:1/x");
    }
}
