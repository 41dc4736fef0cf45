//! Who may ask: tokens, and names of other sites.

mod common;

use common::daemon::Daemon;
use common::http::Place;
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
fn with_a_token_only_its_bearer_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, "0123456789abcdef\n").unwrap();
    let token = ("rest.token_file", file.to_str().unwrap().into());
    let mut daemon = Daemon::start(std::slice::from_ref(&token));
    let unix = Place::Unix(daemon.rest_socket());
    let body = br#"{"conversation_id":"a"}"#;
    for place in [daemon.place(), &unix] {
        let ask = |auth: &str| {
            let headers = [JSON, ("Authorization", auth)];
            place
                .request("POST", "/list_snapshots", &headers, body)
                .unwrap()
        };
        assert_eq!(ask("Bearer 0123456789abcdef").status, 200);
        for bad in [
            "Bearer 0123456789abcdeF",
            "Bearer ",
            "Basic 0123456789abcdef",
            "x",
            "",
        ] {
            let answer = ask(bad);
            assert_eq!(
                (answer.status, &*answer.kind()),
                (401, "unauthorized"),
                "{bad}"
            );
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
        for path in POSTS {
            assert_eq!(
                place.post(path, &json!({ "conversation_id": "a" })).status,
                401,
                "{path}"
            );
        }
        for path in [
            "/v1/tiers",
            "/v1/workers",
            "/v1/conversations",
            "/v1/status",
            "/nothing",
        ] {
            assert_eq!(place.get(path).status, 401, "{path}");
        }
        for path in ["/healthz", "/readyz", "/metrics"] {
            assert_eq!(place.get(path).status, 200, "{path}");
        }
    }
    assert!(
        !daemon.process().log().contains("0123456789abcdef"),
        "the token is in the log"
    );
}

#[test]
fn names_of_other_sites_do_not_reach_loopback() {
    let daemon = Daemon::start(&[("rest.allowed_hosts", vec!["engram.test"].into())]);
    let status = |place: &Place, host: &str| {
        place
            .request("GET", "/v1/tiers", &[("Host", host)], b"")
            .unwrap()
            .status
    };
    for good in [
        "localhost",
        "localhost:7070",
        "127.0.0.1:1",
        "[::1]:1",
        "engram.test:80",
    ] {
        assert_eq!(status(daemon.place(), good), 200, "{good}");
    }
    for bad in [
        "evil.example",
        "localhost.evil.example:7070",
        "10.0.0.1",
        "engram.test.evil",
    ] {
        assert_eq!(status(daemon.place(), bad), 403, "{bad}");
    }
    let absolute = b"GET http://evil.example/v1/tiers HTTP/1.1\r\nHost: localhost\r\n\
                     Connection: close\r\n\r\n";
    assert_eq!(daemon.place().raw(absolute).unwrap().status, 403);
    // A browser cannot open a Unix socket.
    assert_eq!(
        status(&Place::Unix(daemon.rest_socket()), "evil.example"),
        200
    );
}
