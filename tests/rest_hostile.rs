//! Names, bodies and connections that no honest client makes: refused, and nothing else is lost.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use common::daemon::Daemon;
use common::http::Place;
use common::wait_for;
use serde_json::json;

const JSON: (&str, &str) = ("Content-Type", "application/json");
const POSTS: [&str; 5] = [
    "/save_snapshot",
    "/restore_snapshot",
    "/list_snapshots",
    "/get_snapshot_info",
    "/delete_snapshot",
];

#[test]
fn hostile_names_are_refused_or_harmless() {
    let daemon = Daemon::start(&[]);
    let long = "x".repeat(256);
    let bad = [
        "",
        "..",
        ".",
        "../x",
        "/abs",
        "a/../b",
        "/etc/passwd",
        "a\0b",
        "a\nb",
        "\u{1b}[2J",
        &long,
    ];
    for name in bad {
        for path in POSTS {
            let body = json!({ "conversation_id": name, "turn_number": 1 });
            let answer = daemon.post(path, &body);
            assert_eq!(answer.kind(), "invalid_request", "{path} {name:?}");
            assert_eq!(answer.status, 400, "{path} {name:?}");
        }
        let body = json!({ "conversation_id": "good", "branch_name": name });
        assert_eq!(
            daemon.post("/get_snapshot_info", &body).status,
            400,
            "{name:?}"
        );
        let body = json!({ "rid": name });
        assert_eq!(daemon.post("/save_snapshot", &body).status, 400, "{name:?}");
    }
    for name in [
        "a:b/c",
        "Grüße 🦀",
        "...",
        "%2e%2e%2f",
        &long[..255],
        "a b'\"\\<>&",
    ] {
        let body = json!({ "conversation_id": name, "turn_number": 1 });
        assert_eq!(
            daemon.post("/get_snapshot_info", &body).status,
            404,
            "{name:?}"
        );
    }
    assert_eq!(daemon.get("/healthz").status, 200);
}

#[test]
fn hostile_bodies_are_refused() {
    let daemon = Daemon::start(&[("rest.max_body", "16 KiB".into())]);
    let deep = "[".repeat(8000);
    let deep = format!("{{\"conversation_id\":{deep}");
    let bad: [&[u8]; 8] = [
        b"",
        b"{",
        b"nonsense",
        b"{\"conversation_id\":\"\xff\"}",
        b"{\"conversation_id\":\"\\ud800\"}",
        b"{\"conversation_id\":\"a\"}{}",
        b"[\"a\", null, null]",
        deep.as_bytes(),
    ];
    for body in bad {
        for path in POSTS {
            let answer = daemon.place().request("POST", path, &[JSON], body).unwrap();
            let shown = String::from_utf8_lossy(&body[..body.len().min(60)]);
            assert_eq!(answer.status, 400, "{path} {shown}");
            assert_eq!(answer.kind(), "invalid_request", "{path} {shown}");
        }
    }
    let place = daemon.place();
    let good = br#"{"conversation_id":"a"}"#;
    for headers in [
        &[][..],
        &[("Content-Type", "text/plain")],
        &[("Content-Type", "")],
    ] {
        let answer = place
            .request("POST", "/list_snapshots", headers, good)
            .unwrap();
        assert_eq!(
            (answer.status, &*answer.kind()),
            (415, "unsupported_media_type")
        );
    }
    let charset = [("Content-Type", "application/json; charset=utf-8")];
    assert_eq!(
        place
            .request("POST", "/list_snapshots", &charset, good)
            .unwrap()
            .status,
        200
    );

    // Larger than allowed, with its length said and not said, or only said.
    let large = format!("{{\"conversation_id\":\"{}\"}}", "x".repeat(16 << 10));
    let answer = place
        .request("POST", "/list_snapshots", &[JSON], large.as_bytes())
        .unwrap();
    assert_eq!((answer.status, &*answer.kind()), (413, "too_large"));
    let chunked = format!("{:x}\r\n{large}\r\n0\r\n\r\n", large.len());
    let headers = [JSON, ("Transfer-Encoding", "chunked")];
    let answer = place
        .request("POST", "/list_snapshots", &headers, chunked.as_bytes())
        .unwrap();
    assert_eq!((answer.status, &*answer.kind()), (413, "too_large"));
    let headers = [JSON, ("Content-Length", "99999999999")];
    let answer = place
        .request("POST", "/list_snapshots", &headers, b"{}")
        .unwrap();
    assert_eq!((answer.status, &*answer.kind()), (413, "too_large"));
    assert_eq!(daemon.get("/healthz").status, 200);
}

#[test]
fn a_body_that_never_comes_is_given_up() {
    let daemon = Daemon::start(&[("rest.timeout", "300ms".into())]);
    let headers = [JSON, ("Content-Length", "100")];
    let answer = daemon
        .place()
        .request("POST", "/list_snapshots", &headers, b"{")
        .unwrap();
    assert_eq!((answer.status, &*answer.kind()), (408, "request_timeout"));
    assert!(answer.json()["error"]["retryable"].as_bool().unwrap());
}

#[test]
fn what_is_no_http_ends_only_its_own_connection() {
    let daemon = Daemon::start(&[("rest.timeout", "500ms".into())]);
    let Place::Tcp(address) = daemon.place() else {
        panic!("no TCP")
    };
    let many = vec![b'A'; 200_000];
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"\0\0\0\0\r\n\r\n",
        &many,
        b"GET /\r\n",
    ] {
        // Whatever comes back, a connection that is closed is all that is asked for.
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(bytes).ok();
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        std::io::copy(&mut stream, &mut std::io::sink()).ok();
    }
    assert_eq!(daemon.get("/healthz").status, 200);
}

#[test]
fn too_many_connections_are_closed_and_the_others_served() {
    let mut daemon = Daemon::start(&[("rest.max_connections", 4.into())]);
    let Place::Tcp(address) = daemon.place() else {
        panic!("no TCP")
    };
    let held: Vec<_> = (0..8)
        .map(|_| {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_nonblocking(true).unwrap();
            stream
        })
        .collect();
    wait_for("those too many to be closed", || {
        let closed = |mut stream: &TcpStream| matches!(stream.read(&mut [0]), Ok(0));
        (held.iter().filter(|stream| closed(stream)).count() >= 4).then_some(())
    });
    drop(held);
    wait_for("a free place", || {
        let answer = daemon.place().request("GET", "/healthz", &[], b"").ok()?;
        (answer.status == 200).then_some(())
    });
    // A flood of them floods no log.
    let log = daemon.process().log();
    let told = log
        .lines()
        .filter(|line| line.contains("Too many connections"));
    assert_eq!(told.count(), 1, "{log}");
}
