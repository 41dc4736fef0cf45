//! Entity tags of a really started daemon: what is known is not sent again, and what has changed is
//! not changed by who did not see it.

mod common;

use common::daemon::Daemon;
use common::http::Answer;
use common::worker::{Worker, prompt};
use serde_json::json;

fn ask(daemon: &Daemon, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let json = ("Content-Type", "application/json");
    let headers = [headers, &[json]].concat();
    let answer = daemon
        .place()
        .request(method, path, &headers, body.as_bytes());
    answer.unwrap()
}

fn tag(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("etag").unwrap().to_owned()
}

#[test]
fn what_a_client_has_is_not_sent_again() {
    let daemon = Daemon::start(&[("service.write_after", "20ms".into())]);
    let mut worker = Worker::attach(&daemon);
    worker.turn("c", &prompt(1, 40), 40);
    daemon.all_durable();
    let id = daemon.get("/v1/snapshots").json()["snapshots"][0]["snapshot_id"].clone();
    for path in [
        format!("/v1/snapshots/{}", id.as_str().unwrap()),
        "/v1/snapshots".to_owned(),
        "/v1/snapshots?durable=true&limit=5".to_owned(),
        "/v1/conversations".to_owned(),
        "/v1/conversations/c".to_owned(),
        "/v1/conversations/c/tokens".to_owned(),
        "/v1/conversations/c/policy".to_owned(),
    ] {
        let first = tag(&daemon.get(&path));
        assert_eq!(tag(&daemon.get(&path)), first, "{path}");
        for known in [&*first, "*", &format!("\"other\", W/{first}")] {
            let answer = ask(&daemon, "GET", &path, &[("If-None-Match", known)], "");
            assert_eq!((answer.status, answer.body.len()), (304, 0), "{path}");
            assert_eq!(answer.header("etag"), Some(&*first), "{path}");
        }
        let answer = ask(&daemon, "GET", &path, &[("If-None-Match", "\"other\"")], "");
        assert_eq!(answer.status, 200, "{path}");
    }
    let before = tag(&daemon.get("/v1/conversations/c"));
    worker.turn("c", &prompt(1, 80), 80);
    daemon.all_durable();
    assert_ne!(tag(&daemon.get("/v1/conversations/c")), before);
    assert_eq!(daemon.get("/v1/conversations/none").header("etag"), None);
}

#[test]
fn what_has_changed_is_not_changed_by_who_did_not_see_it() {
    let daemon = Daemon::start(&[("service.write_after", "20ms".into())]);
    let mut worker = Worker::attach(&daemon);
    worker.turn("c", &prompt(1, 40), 40);
    daemon.all_durable();
    let id = daemon.get("/v1/snapshots").json()["snapshots"][0]["snapshot_id"].clone();
    let snapshot = format!("/v1/snapshots/{}", id.as_str().unwrap());
    let if_match = |method: &str, path: &str, tag: &str, body: &str| {
        let answer = ask(&daemon, method, path, &[("If-Match", tag)], body);
        if answer.status == 412 {
            assert_eq!(
                answer.header("content-type"),
                Some("application/problem+json")
            );
            assert_eq!(answer.json()["code"], "precondition_failed");
        }
        answer.status
    };
    // Of two who saw the same, one goes through.
    let seen = tag(&daemon.get(&snapshot));
    let conversation = tag(&daemon.get("/v1/conversations/c"));
    let label = |text: &str| json!({ "label": text }).to_string();
    assert_eq!(if_match("PATCH", &snapshot, &seen, &label("a")), 200);
    assert_eq!(if_match("PATCH", &snapshot, &seen, &label("b")), 412);
    assert_eq!(daemon.get(&snapshot).json()["label"], "a");
    assert_eq!(if_match("DELETE", &snapshot, &seen, ""), 412);
    // The label is shown in the conversation, too.
    assert_eq!(
        if_match("DELETE", "/v1/conversations/c", &conversation, ""),
        412
    );
    assert_eq!(
        if_match("DELETE", "/v1/conversations/c/turns/1", &conversation, ""),
        412
    );
    assert_eq!(
        if_match("DELETE", "/v1/conversations/none", &conversation, ""),
        404
    );
    assert_eq!(if_match("DELETE", &snapshot, "no tag", ""), 400);
    let rules = tag(&daemon.get("/v1/conversations/c/policy"));
    let policy = json!({ "policy": "manual_only" }).to_string();
    assert_eq!(
        if_match("PUT", "/v1/conversations/c/policy", &rules, &policy),
        200
    );
    assert_eq!(
        if_match("PUT", "/v1/conversations/c/policy", &rules, &policy),
        412
    );
    assert_eq!(
        if_match("DELETE", "/v1/conversations/c/policy", &rules, ""),
        412
    );
    let conversation = tag(&daemon.get("/v1/conversations/c"));
    assert_eq!(
        if_match("DELETE", "/v1/conversations/c", &conversation, ""),
        200
    );
    assert_eq!(daemon.get("/v1/conversations/c").status, 404);
}

#[test]
fn lists_are_filtered_and_nothing_unheard_of_is_asked() {
    let daemon = Daemon::start(&[("service.write_after", "20ms".into())]);
    let mut worker = Worker::attach(&daemon);
    for (number, name) in ["ab", "ac", "b"].iter().enumerate() {
        worker.turn(name, &prompt(number as u32, 40), 40);
    }
    daemon.all_durable();
    let list = daemon.get("/v1/snapshots").json()["snapshots"].clone();
    let id = list[0]["snapshot_id"].as_str().unwrap();
    let body = json!({ "pinned": true, "label": "x y" }).to_string();
    let path = format!("/v1/snapshots/{id}");
    assert_eq!(ask(&daemon, "PATCH", &path, &[], &body).status, 200);
    let total = |path: &str| {
        let answer = daemon.get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()["total"].as_u64().unwrap()
    };
    let updated =
        daemon.get("/v1/conversations?prefix=b").json()["conversations"][0]["updated_at"].clone();
    for (path, expected) in [
        ("/v1/snapshots?durable=true", 3),
        ("/v1/snapshots?durable=false", 0),
        ("/v1/snapshots?pinned=true", 1),
        ("/v1/snapshots?pinned=false&tier=ram", 2),
        ("/v1/snapshots?tier=disk", 0),
        ("/v1/snapshots?label=x%20y", 1),
        ("/v1/snapshots?label=x", 0),
        ("/v1/snapshots?conversation_id=ab&durable=false", 0),
        ("/v1/snapshots?tenant=t", 0),
        ("/v1/conversations?prefix=a", 2),
        ("/v1/conversations?prefix=a&limit=1&offset=1", 2),
        ("/v1/conversations?tenant=t", 0),
        (&format!("/v1/conversations?updated_after={updated}"), 0),
        ("/v1/conversations?updated_after=0", 3),
    ] {
        assert_eq!(total(path), expected, "{path}");
    }
    for path in [
        "/v1/snapshots?unheard=1",
        "/v1/snapshots?tier=cloud",
        "/v1/snapshots?durable=maybe",
        "/v1/snapshots?limit=1001",
        "/v1/conversations?limit=0",
        "/v1/conversations?updated_after=NaN",
        "/v1/conversations/ab?turn=1",
        "/v1/tiers?x=",
        "/v1/status?x",
    ] {
        let answer = daemon.get(path);
        assert_eq!(
            (answer.status, answer.kind().as_str()),
            (400, "invalid_request"),
            "{path}"
        );
    }
}
