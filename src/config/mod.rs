//! The configuration: one TOML file, assembled from the sections that the modules own.
//!
//! Every knob has a default that is safe and bounded, so an empty file is a valid configuration.
//! A misspelt key is an error that names the line. [`Config::validate`] returns every problem at
//! once, and nothing is bound or created before it passed.

mod grpc;
mod memory;
#[cfg(test)]
pub(crate) mod parsers;
mod store;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use grpc::Grpc;
pub use store::{Budget, Disk, Store};

use crate::{rest, service, telemetry, upstream, webhooks};

/// All of `engram.toml`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Section `[log]`.
    pub log: telemetry::log::Config,
    /// Section `[rest]`.
    pub rest: rest::Config,
    /// Section `[grpc]`.
    pub grpc: Grpc,
    /// Section `[store]`.
    pub store: Store,
    /// Section `[service]`.
    pub service: service::Config,
    /// Section `[upstream]`.
    pub upstream: upstream::Config,
    /// Sections `[[webhooks]]`: who is told of events. Default: nobody.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub webhooks: Vec<webhooks::Config>,
}

/// Why a configuration cannot be used. The process exits with [`EXIT_CONFIG`].
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file is not TOML, or has a key or a value that does not exist.
    #[error("{}: {error}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, column and what was expected.
        error: Box<toml::de::Error>,
    },
    /// Values that cannot work, alone or together.
    #[error("{}", problems.join("\n"))]
    Invalid {
        /// Each one as `section.key: what is wrong`.
        problems: Vec<String>,
    },
}

/// Exit code of a bad configuration (`EX_USAGE`).
pub const EXIT_CONFIG: u8 = 64;

/// A configuration file larger than this is not one.
const FILE_MAX: u64 = 1 << 20;

// === impl Config ===

impl Config {
    /// Reads and validates a file.
    ///
    /// # Errors
    /// Every problem of the file at once, see [`ConfigError`].
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        use std::io::Read as _;

        let read = |error| ConfigError::Read {
            path: path.into(),
            error,
        };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(read)?;
        file.take(FILE_MAX + 1)
            .read_to_string(&mut text)
            .map_err(read)?;
        if text.len() as u64 > FILE_MAX {
            return Err(read(std::io::Error::other("larger than 1 MiB")));
        }
        let config: Config = toml::from_str(&text).map_err(|error| ConfigError::Parse {
            path: path.into(),
            error: Box::new(error),
        })?;
        config.validate()?;
        Ok(config)
    }

    /// Checks every section and what holds between sections.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with every problem.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Config {
            log,
            rest,
            grpc,
            store,
            service,
            upstream,
            webhooks,
        } = self;
        let mut problems = Vec::new();
        log.validate(&mut problems);
        rest.validate(&mut problems);
        grpc.validate(&mut problems);
        store.validate(&mut problems);
        service.validate(&mut problems);
        upstream.validate(&mut problems);
        webhooks::Config::validate(webhooks, &mut problems);
        if grpc.listen.is_some() && service.token_file.is_none() {
            problems.push("grpc.listen: workers over TCP need service.token_file".into());
        }
        distinct_sockets(self, &mut problems);
        if problems.is_empty() {
            Ok(())
        } else {
            Err(ConfigError::Invalid { problems })
        }
    }
}

/// No two sockets have one path: the second would find the first in its place.
fn distinct_sockets(config: &Config, problems: &mut Vec<String>) {
    let sockets = [
        ("rest.socket", config.rest.socket.as_deref()),
        ("grpc.socket", Some(config.grpc.socket.as_path())),
        (
            "service.fd_socket",
            Some(config.service.fd_socket.as_path()),
        ),
    ];
    for (at, (key, path)) in sockets.iter().enumerate() {
        let same = |(_, other): &&(&str, Option<&Path>)| path.is_some() && other == path;
        for (other, _) in sockets.iter().skip(at + 1).filter(same) {
            let path = path.unwrap_or(Path::new(""));
            problems.push(format!(
                "{key}: {} is the path of {other}, too: each needs its own",
                path.display()
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../deploy/engram.example.toml");

    #[test]
    fn an_empty_file_is_the_default_and_the_default_is_valid() {
        let config: Config = toml::from_str("").unwrap();
        assert_eq!(config, Config::default());
        config.validate().unwrap();
    }

    #[test]
    fn the_example_shows_every_default() {
        let example: Config = toml::from_str(EXAMPLE).unwrap();
        assert_eq!(example, Config::default());
        // Every knob is named in the file, those without a value too (as a comment).
        for (section, keys) in &table(&Config::default()) {
            assert!(EXAMPLE.contains(&format!("\n[{section}]\n")), "[{section}]");
            assert_named(keys.as_table().unwrap(), section);
        }
    }

    fn table(config: &Config) -> toml::Table {
        toml::Table::try_from(config).unwrap()
    }

    #[test]
    fn knobs_without_a_value_are_in_the_example_too() {
        // With every comment of the shape `# key = value` made real, the file is still valid, and
        // no further key exists that the default leaves out.
        let real: String = EXAMPLE
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(knob) if knob.split_once(" = ").is_some_and(|(k, _)| is_key(k)) => knob,
                _ => line,
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        let config: Config = toml::from_str(&real).unwrap();
        let Config {
            rest,
            grpc,
            service,
            upstream,
            ..
        } = config;
        assert!(rest.socket.is_some() && rest.token_file.is_some());
        assert!(grpc.listen.is_some() && service.token_file.is_some());
        assert!(service.prefill_tokens_per_second.is_some());
        assert!(upstream.url.is_some() && upstream.api_key_file.is_some());
        assert!(upstream.tokenizer.is_some());
    }

    #[test]
    fn the_example_shows_a_webhook() {
        let start = EXAMPLE.find("# [[webhooks]]").unwrap();
        let lines = EXAMPLE[start..]
            .lines()
            .map_while(|line| line.strip_prefix("# "));
        let text: String = lines.flat_map(|line| [line, "\n"]).collect();
        let config: Config = toml::from_str(&text).unwrap();
        let table = toml::Table::try_from(&config.webhooks[0]).unwrap();
        for key in table.keys() {
            assert!(text.contains(&format!(" {key} = ")), "{key}");
        }
    }

    fn is_key(text: &str) -> bool {
        text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
    }

    fn assert_named(keys: &toml::Table, section: &str) {
        for (key, value) in keys {
            let path = format!("{section}.{key}");
            match value.as_table() {
                Some(inner) => {
                    assert!(EXAMPLE.contains(&format!("\n[{path}]\n")), "[{path}]");
                    assert_named(inner, &path);
                }
                None => assert!(EXAMPLE.contains(&format!("\n{key} = ")), "{path}"),
            }
        }
    }

    #[test]
    fn a_misspelt_key_is_named_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("engram.toml");
        std::fs::write(
            &path,
            "[rest]\nlisten = \"127.0.0.1:0\"\ntoken_fil = \"x\"\n",
        )
        .unwrap();
        let error = Config::load(&path).unwrap_err().to_string();
        assert!(error.contains("line 3"), "{error}");
        assert!(error.contains("token_fil"), "{error}");
        assert!(error.contains("`token_file`"), "{error}");
    }

    #[test]
    fn every_problem_is_said_at_once() {
        let config: Config = toml::from_str(
            "[log]\nfilter = \"=!\"\n\
             [rest]\nlisten = \"0.0.0.0:7070\"\nmax_requests = 0\ntimeout = \"1ms\"\n\
             [store.disk]\npath = \"relative\"\n",
        )
        .unwrap();
        let ConfigError::Invalid { problems } = config.validate().unwrap_err() else {
            panic!("another error");
        };
        for name in [
            "log.filter",
            "rest.listen",
            "rest.max_requests",
            "rest.timeout",
            "store.disk.path",
        ] {
            assert!(
                problems.iter().any(|p| p.starts_with(name)),
                "{name}: {problems:?}"
            );
        }
        assert_eq!(problems.len(), 5, "{problems:?}");
    }

    #[test]
    fn sockets_have_paths_of_their_own() {
        let problems = |text: &str| match toml::from_str::<Config>(text).unwrap().validate() {
            Ok(()) => Vec::new(),
            Err(ConfigError::Invalid { problems }) => problems,
            Err(other) => panic!("{other}"),
        };
        let text = |rest, grpc, fd| {
            format!(
                "[rest]\nsocket = \"{rest}\"\n[grpc]\nsocket = \"{grpc}\"\n\
                 [service]\nfd_socket = \"{fd}\"\n"
            )
        };
        assert_eq!(problems(&text("/r/a", "/r/b", "/r/c")), [""; 0]);
        for (config, keys) in [
            (
                text("/r/a", "/r/b", "/r/b"),
                ["grpc.socket", "service.fd_socket"],
            ),
            (
                text("/r/a", "/r//a", "/r/c"),
                ["rest.socket", "grpc.socket"],
            ),
            (
                text("/r/a", "/r/b", "/r/a"),
                ["rest.socket", "service.fd_socket"],
            ),
        ] {
            let problems = problems(&config);
            assert_eq!(problems.len(), 1, "{problems:?}");
            let told = |key| problems.iter().any(|text| text.contains(key));
            assert!(keys.into_iter().all(told), "{problems:?}");
        }
        assert_eq!(problems(&text("/r/a", "/r/a", "/r/a")).len(), 3);
    }

    #[test]
    fn units_are_required_and_understood() {
        assert!(toml::from_str::<Config>("[rest]\ntimeout = 5\n").is_err());
        assert!(toml::from_str::<Config>("[rest]\nmax_body = \"many\"\n").is_err());
        assert!(toml::from_str::<Config>("[rest]\nlisten = \"localhost\"\n").is_err());
        let config: Config = toml::from_str("[store]\nram = \"3 GiB\"\n").unwrap();
        assert_eq!(config.store.ram, Budget::Bytes(bytesize::ByteSize::gib(3)));
    }
}
