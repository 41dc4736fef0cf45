//! The `Host` header as a guard against DNS rebinding.

use std::net::IpAddr;

/// Whether a `Host` header names this machine's loopback, or one of `allowed`.
///
/// A page of another site whose name was made to resolve to 127.0.0.1 sends its own name here.
pub fn host_is_local(host: &str, allowed: &[String]) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((name, port)) if port.is_empty() || is_port(port) => name,
            _ => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            Some(_) => return false,
            None => host,
        },
    };
    let name = name.strip_suffix('.').unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
        || allowed.iter().any(|other| other.eq_ignore_ascii_case(name))
}

fn is_port(text: &str) -> bool {
    text.strip_prefix(':')
        .is_some_and(|port| port.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_other_sites_are_not_local() {
        let allowed = ["engram.internal".to_string()];
        for good in [
            "localhost",
            "LOCALHOST:7070",
            "localhost.",
            "127.0.0.1",
            "127.0.0.1:80",
            "127.9.9.9",
            "[::1]",
            "[::1]:7070",
            "engram.internal:1",
        ] {
            assert!(host_is_local(good, &allowed), "{good}");
        }
        for bad in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "localhost:x",
            "[::1",
            "[::1]x",
            "0.0.0.0",
            "[::2]:1",
            "::1",
            "localhost:1:2",
        ] {
            assert!(!host_is_local(bad, &allowed), "{bad}");
        }
    }
}
