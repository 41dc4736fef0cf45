//! Section `[rest]`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use crate::util::secret::Token;
use crate::util::socket::PATH_MAX;

/// Where and how the REST surface listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// TCP address and port; port 0 lets the system choose; `""` for no TCP. An address that is
    /// reachable from other hosts needs `token_file`. Default: `"127.0.0.1:7070"`.
    #[serde(with = "optional_address")]
    pub listen: Option<SocketAddr>,
    /// Path of a Unix socket (mode 0660) that serves the same; none when absent. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// File with the token that clients send as `Authorization: Bearer TOKEN`: one line of 16 to
    /// 4096 visible ASCII characters. Absent: no token is asked for. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// Serve `/healthz`, `/readyz`, `/metrics`, `/openapi.json` and `/docs` without the token.
    /// Default: `true`.
    pub open_probes: bool,
    /// Names that a request's `Host` header may carry on a loopback address, beside `localhost` and
    /// loopback addresses: a guard against DNS rebinding. Default: `[]`.
    pub allowed_hosts: Vec<String>,
    /// Largest request body. Default: `"4 MiB"`.
    pub max_body: ByteSize,
    /// Largest body of a request that generates or passes through to the inference server. Default:
    /// `"64 MiB"`.
    pub max_generate_body: ByteSize,
    /// How long a client may take no byte of its answer before its connection is closed. Default: `"1m"`.
    #[serde(with = "humantime_serde")]
    pub write_timeout: Duration,
    /// Longest time for reading a request's head, for reading its body, and for answering it.
    /// Default: `"30s"`.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// Requests served at a time; more are answered with 503. Default: `128`.
    pub max_requests: u32,
    /// Connections held at a time; more are closed at once. Default: `1024`.
    pub max_connections: u32,
}

/// `""` for none, else an address with a port.
mod optional_address {
    use super::SocketAddr;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(value: &Option<SocketAddr>, s: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(address) => s.collect_str(address),
            None => s.serialize_str(""),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
        let text = String::deserialize(d)?;
        if text.is_empty() {
            return Ok(None);
        }
        text.parse().map(Some).map_err(|_| {
            D::Error::custom(format!(
                "`{text}` is not ADDRESS:PORT, such as 127.0.0.1:7070"
            ))
        })
    }
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Config {
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 7070))),
            socket: None,
            token_file: None,
            open_probes: true,
            allowed_hosts: Vec::new(),
            max_body: ByteSize::mib(4),
            max_generate_body: ByteSize::mib(64),
            write_timeout: Duration::from_secs(60),
            timeout: Duration::from_secs(30),
            max_requests: 128,
            max_connections: 1024,
        }
    }
}

impl Config {
    /// Adds every problem of this section to `problems`. Reads the token file, writes nothing.
    pub fn validate(&self, problems: &mut Vec<String>) {
        let Config {
            listen,
            socket,
            token_file,
            open_probes: _,
            allowed_hosts,
            max_body,
            max_generate_body,
            write_timeout,
            timeout,
            max_requests,
            max_connections,
        } = self;
        if let Some(address) = listen
            && !address.ip().is_loopback()
            && token_file.is_none()
        {
            problems.push(format!(
                "rest.listen: {address} can be reached from other hosts: set rest.token_file, or \
                 listen on 127.0.0.1"
            ));
        }
        if let Some(path) = socket
            && (!path.is_absolute() || path.as_os_str().len() > PATH_MAX)
        {
            problems.push(format!(
                "rest.socket: {} is not an absolute path of at most {PATH_MAX} bytes",
                path.display()
            ));
        }
        if let Some(path) = token_file
            && let Err(error) = Token::read(path)
        {
            problems.push(format!("rest.token_file: {error}"));
        }
        if let Some(bad) = allowed_hosts
            .iter()
            .find(|h| h.is_empty() || h.contains([':', '/']))
        {
            problems.push(format!(
                "rest.allowed_hosts: `{bad}` is not a host name without port"
            ));
        }
        for (name, value) in [
            ("max_body", max_body),
            ("max_generate_body", max_generate_body),
        ] {
            if !(1024..=1 << 30).contains(&value.as_u64()) {
                problems.push(format!(
                    "rest.{name}: {value} is not between 1 KiB and 1 GiB"
                ));
            }
        }
        for (name, value) in [("timeout", timeout), ("write_timeout", write_timeout)] {
            if !(Duration::from_millis(100)..=Duration::from_secs(3600)).contains(value) {
                problems.push(format!("rest.{name}: not between 100ms and 1h"));
            }
        }
        for (name, value) in [
            ("max_requests", max_requests),
            ("max_connections", max_connections),
        ] {
            if !(1..=65_536).contains(value) {
                problems.push(format!("rest.{name}: {value} is not between 1 and 65536"));
            }
        }
    }
}
