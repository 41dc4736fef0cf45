//! The REST surface of a really started daemon: status codes, typed bodies, probes.

mod common;

use common::daemon::Daemon;
use serde_json::{Value, json};

const POSTS: [&str; 5] = [
    "/save_snapshot",
    "/restore_snapshot",
    "/list_snapshots",
    "/get_snapshot_info",
    "/delete_snapshot",
];

#[test]
fn every_failure_has_a_status_and_a_typed_body() {
    let daemon = Daemon::start(&[]);
    let conv = |more: Value| {
        let mut body = json!({ "conversation_id": "nobody" });
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        body
    };
    let id = "0190163d-8694-739b-aea5-966c26f8ad91";
    let none = json!({});
    let cases = [
        // What is not there.
        ("/save_snapshot", conv(none.clone()), 404, "not_found"),
        (
            "/save_snapshot",
            json!({ "rid": "nobody" }),
            404,
            "not_found",
        ),
        (
            "/save_snapshot",
            conv(json!({ "snapshot_id": "label" })),
            404,
            "not_found",
        ),
        ("/restore_snapshot", conv(none.clone()), 404, "not_found"),
        (
            "/restore_snapshot",
            conv(json!({ "turn_number": 1 })),
            404,
            "not_found",
        ),
        (
            "/restore_snapshot",
            json!({ "snapshot_id": id }),
            404,
            "not_found",
        ),
        (
            "/get_snapshot_info",
            conv(json!({ "turn_number": 1 })),
            404,
            "not_found",
        ),
        (
            "/get_snapshot_info",
            conv(json!({ "branch_name": "b" })),
            404,
            "not_found",
        ),
        (
            "/delete_snapshot",
            conv(json!({ "turn_number": 1 })),
            404,
            "not_found",
        ),
        (
            "/delete_snapshot",
            conv(json!({ "whole": true })),
            404,
            "not_found",
        ),
        (
            "/delete_snapshot",
            json!({ "snapshot_id": id }),
            404,
            "not_found",
        ),
        // Rules between fields.
        ("/save_snapshot", none.clone(), 400, "invalid_request"),
        ("/restore_snapshot", none.clone(), 400, "invalid_request"),
        ("/list_snapshots", none.clone(), 400, "invalid_request"),
        ("/get_snapshot_info", none.clone(), 400, "invalid_request"),
        (
            "/get_snapshot_info",
            conv(none.clone()),
            400,
            "invalid_request",
        ),
        (
            "/delete_snapshot",
            conv(none.clone()),
            400,
            "invalid_request",
        ),
        (
            "/restore_snapshot",
            conv(json!({ "continuation_ids": [1] })),
            400,
            "invalid_request",
        ),
        (
            "/restore_snapshot",
            conv(json!({ "max_new_tokens": 1 })),
            400,
            "invalid_request",
        ),
        (
            "/restore_snapshot",
            conv(json!({ "create_new_request": true })),
            400,
            "invalid_request",
        ),
        (
            "/restore_snapshot",
            conv(json!({ "create_new_request": true, "max_new_tokens": 1 })),
            400,
            "invalid_request",
        ),
        (
            "/restore_snapshot",
            conv(json!({
                "create_new_request": true, "max_new_tokens": 1, "continuation_ids": [1, 2]
            })),
            501,
            "not_implemented",
        ),
        (
            "/restore_snapshot",
            conv(json!({ "pin_seconds": -1 })),
            400,
            "invalid_request",
        ),
        (
            "/restore_snapshot",
            json!({ "snapshot_id": "label" }),
            400,
            "invalid_request",
        ),
        // Wrong types and ranges.
        (
            "/save_snapshot",
            json!({ "conversation_id": 7 }),
            400,
            "invalid_request",
        ),
        (
            "/save_snapshot",
            json!({ "rid": ["a"] }),
            400,
            "invalid_request",
        ),
        (
            "/save_snapshot",
            conv(json!({ "turn_number": "1" })),
            400,
            "invalid_request",
        ),
        (
            "/save_snapshot",
            conv(json!({ "turn_number": 1.5 })),
            400,
            "invalid_request",
        ),
        (
            "/save_snapshot",
            conv(json!({ "durable": "yes" })),
            400,
            "invalid_request",
        ),
        (
            "/get_snapshot_info",
            conv(json!({ "turn_number": 0 })),
            400,
            "invalid_request",
        ),
        (
            "/get_snapshot_info",
            conv(json!({ "turn_number": -1 })),
            400,
            "invalid_request",
        ),
        (
            "/get_snapshot_info",
            conv(json!({ "turn_number": 1u64 << 40 })),
            400,
            "invalid_request",
        ),
        (
            "/list_snapshots",
            conv(json!({ "limit": -1 })),
            400,
            "invalid_request",
        ),
        ("/list_snapshots", json!(["nobody"]), 400, "invalid_request"),
        ("/list_snapshots", json!(null), 400, "invalid_request"),
        ("/list_snapshots", json!("nobody"), 400, "invalid_request"),
    ];
    for (path, body, status, kind) in cases {
        let answer = daemon.post(path, &body);
        assert_eq!(
            (answer.status, answer.kind().as_str()),
            (status, kind),
            "{path} {body}"
        );
        let json = answer.json();
        assert_eq!(json["success"], false, "{path} {body}");
        let message = json["message"].as_str().unwrap();
        assert!(
            !message.is_empty() && json["error"]["message"] == message,
            "{path} {body}"
        );
        assert_eq!(answer.header("content-type"), Some("application/json"));
    }
    let answer = daemon.post("/save_snapshot", &conv(json!({ "turn_number": "1" })));
    let message = answer.json()["message"].as_str().unwrap().to_owned();
    assert!(
        message.contains("`turn_number`"),
        "a wrong type names its field: {message}"
    );
    // Nulls are as good as absent fields, and foreign fields are nobody's business.
    let body = conv(json!({
        "rid": null, "turn_number": null, "branch_name": null, "tenant": null,
        "http_worker_ipc": null, "anything": { "at": "all" },
    }));
    assert_eq!(daemon.post("/save_snapshot", &body).status, 404);
}

#[test]
fn an_unknown_conversation_has_an_empty_list_and_leaves_no_trace() {
    let daemon = Daemon::start(&[]);
    let answer = daemon.post("/list_snapshots", &json!({ "conversation_id": "nobody" }));
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.json(),
        json!({ "success": true, "snapshots": [], "total": 0 })
    );
    assert_eq!(
        daemon.get("/v1/conversations").json(),
        json!({ "conversations": [], "total": 0 })
    );
}

#[test]
fn unknown_paths_and_methods_are_typed() {
    let daemon = Daemon::start(&[]);
    for path in [
        "/",
        "/nothing",
        "/v1",
        "/v1/nothing",
        "/save_snapshot/",
        "/../etc/passwd",
        "/%00",
    ] {
        let answer = daemon.get(path);
        assert_eq!(
            (answer.status, &*answer.kind()),
            (404, "not_found"),
            "{path}"
        );
    }
    for path in POSTS {
        let answer = daemon.get(path);
        assert_eq!(
            (answer.status, &*answer.kind()),
            (405, "method_not_allowed"),
            "{path}"
        );
    }
    for path in ["/healthz", "/v1/tiers"] {
        assert_eq!(daemon.post(path, &json!({})).status, 405, "{path}");
    }
    for path in [
        "/v1/conversations?limit=0",
        "/v1/conversations?limit=x",
        "/v1/snapshots?offset=-1",
    ] {
        let answer = daemon.get(path);
        assert_eq!(
            (answer.status, &*answer.kind()),
            (400, "invalid_request"),
            "{path}"
        );
    }
    let answer = daemon.get("/v1/snapshots/nonsense");
    assert_eq!((answer.status, &*answer.kind()), (400, "invalid_request"));
}

#[test]
fn a_request_id_comes_back() {
    let daemon = Daemon::start(&[]);
    let ask = |headers: &[(&str, &str)]| {
        let answer = daemon
            .place()
            .request("GET", "/v1/tiers", headers, b"")
            .unwrap();
        answer.header("x-request-id").unwrap().to_owned()
    };
    assert_eq!(ask(&[("X-Request-Id", "mine-7")]), "mine-7");
    let made = ask(&[]);
    assert_ne!(made, ask(&[]));
    assert_eq!(made.len(), 32);
    assert_eq!(ask(&[("X-Request-Id", &"x".repeat(129))]).len(), 32);
    assert_eq!(ask(&[("X-Request-Id", "two words")]).len(), 32);
    // Refusals carry one too.
    let answer = daemon
        .place()
        .request("GET", "/nothing", &[("X-Request-Id", "a")], b"")
        .unwrap();
    assert_eq!(answer.header("x-request-id"), Some("a"));
}

#[test]
fn probes_and_metrics_can_be_read() {
    let daemon = Daemon::start(&[]);
    assert_eq!(daemon.get("/healthz").json(), json!({ "status": "ok" }));
    assert_eq!(
        daemon.get("/readyz").json(),
        json!({ "ready": true, "reasons": [] })
    );
    daemon.get("/nothing");
    let answer = daemon.get("/metrics");
    assert!(
        answer
            .header("content-type")
            .unwrap()
            .starts_with("application/openmetrics-text")
    );
    check_open_metrics(answer.text());
    let sample = r#"engram_rest_requests_total{route="other",method="GET",status="404"}"#;
    assert_eq!(daemon.metric(sample), 1.0);
    let sample = r#"engram_rest_requests_total{route="/readyz",method="GET",status="200"}"#;
    assert!(daemon.metric(sample) >= 1.0);
}

/// The rules of the format that a scraper depends on.
fn check_open_metrics(text: &str) {
    assert!(text.ends_with("# EOF\n"), "{text}");
    let mut families = std::collections::BTreeMap::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(families.insert(name, kind).is_none(), "{name} twice");
        } else if !line.starts_with("# ") {
            let end = line.find(['{', ' ']).unwrap();
            let (name, _) = line.split_at(end);
            assert!(name.starts_with("engram_"), "{line}");
            let known = families.keys().any(|family| name.starts_with(family));
            assert!(known, "a sample without a family: {line}");
            let value = line.rsplit(' ').next().unwrap();
            value.parse::<f64>().unwrap();
        }
    }
    assert!(!families.is_empty());
}

#[test]
fn tiers_and_workers_are_shown() {
    let daemon = Daemon::start(&[
        ("store.ram", "32 MiB".into()),
        ("store.ram_headroom", "4 MiB".into()),
    ]);
    let tiers = daemon.get("/v1/tiers").json();
    let tiers = tiers["tiers"].as_array().unwrap();
    let tier = |name: &str| tiers.iter().find(|tier| tier["tier"] == name).unwrap();
    assert_eq!(tier("ram")["budget_bytes"], 28 << 20);
    assert_eq!(tier("disk")["budget_bytes"], 1 << 30);
    assert_eq!(tier("disk")["healthy"], true);
    assert_eq!(
        daemon.get("/v1/workers").json(),
        json!({ "workers": [], "refused": [] })
    );
    let status = daemon.get("/v1/status").json();
    assert_eq!(status["ready"], true);
    assert_eq!(status["pending_writes"], 0);
}
