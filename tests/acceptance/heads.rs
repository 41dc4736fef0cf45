//! One generation at a time goes on from a conversation's head; others wait or branch.

use serde_json::{Value, json};

use crate::common::engine::tokens;
use crate::common::wait_for;
use crate::stage::{Stage, events, ids, number, order};

#[test]
fn requests_without_a_turn_go_on_one_after_another() {
    let stage = Stage::new(&[]);
    let first = tokens(1, 100);
    let mut known = [first.clone(), ids(&stage.generate("c", &first, 10))].concat();
    let new: Vec<Vec<u32>> = (0..6).map(|i| tokens(10 + i, 15)).collect();
    let mut answers: Vec<(u64, &Vec<u32>, Vec<u32>)> = std::thread::scope(|scope| {
        let stage = &stage;
        let asks = new.iter().map(|new| {
            scope.spawn(move || {
                let answer = stage.generate("c", new, 10);
                assert_eq!(answer["engram"]["branched"], false);
                (number(&answer, "/engram/from_turn"), new, ids(&answer))
            })
        });
        let asks: Vec<_> = asks.collect();
        asks.into_iter().map(|ask| ask.join().unwrap()).collect()
    });
    answers.sort();
    for (turn, (from, new, answer)) in (1..).zip(answers) {
        assert_eq!(from, turn);
        known.extend(new);
        assert_eq!(answer, stage.truth(&known, 10));
        known.extend(answer);
    }
}

#[test]
fn a_request_that_names_a_turn_branches() {
    let stage = Stage::new(&[]);
    let (a, b, c) = (tokens(1, 120), tokens(2, 20), tokens(3, 20));
    let first = stage.generate("c", &a, 8);
    let second = stage.generate("c", &b, 8);
    let known = [a.clone(), ids(&first)].concat();
    let mut body = order("c", &c, 8);
    body["turn"] = json!(1);
    let branch = stage.post("/v1/generate", &body);
    assert_eq!(branch["engram"]["branched"], true);
    assert_eq!(ids(&branch), stage.truth(&[&known[..], &c].concat(), 8));
    // The main line goes on where it was, by its turn; it is not the latest any more.
    let main = [known.clone(), b, ids(&second)].concat();
    let mut body = order("c", &c, 8);
    body["turn"] = json!(2);
    let on = stage.post("/v1/generate", &body);
    assert_eq!(ids(&on), stage.truth(&[&main[..], &c].concat(), 8));
    // Naming the latest is going on from the head.
    let latest = number(&on, "/engram/from_turn") + 2;
    let mut body = order("c", &c, 8);
    body["turn"] = json!(latest);
    assert_eq!(
        stage.post("/v1/generate", &body)["engram"]["branched"],
        false
    );
}

#[test]
fn a_named_branch_is_gone_on_from() {
    let stage = Stage::new(&[]);
    let (a, b, c) = (tokens(1, 300), tokens(2, 20), tokens(3, 20));
    let known = [a.clone(), ids(&stage.generate("c", &a, 8))].concat();
    let save = json!({ "conversation_id": "c", "branch_name": "before" });
    wait_for("a branch", || {
        (stage.daemon.post("/save_snapshot", &save).status == 200).then_some(())
    });
    stage.generate("c", &b, 8);
    let mut body = order("c", &c, 8);
    body["branch"] = json!("before");
    let answer = stage.post("/v1/generate", &body);
    assert_eq!(ids(&answer), stage.truth(&[known, c].concat(), 8));
    assert_eq!(answer["engram"]["branched"], true);
}

#[test]
fn the_same_turn_at_the_same_time_is_a_branch() {
    let stage = Stage::new(&[]);
    let (a, b, c) = (tokens(1, 120), tokens(2, 20), tokens(3, 20));
    let known = [a.clone(), ids(&stage.generate("c", &a, 8))].concat();
    let truths = [(&b, 700), (&c, 8)].map(|(new, n)| stage.truth(&[&known[..], new].concat(), n));
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| stage.generate("c", &b, 700));
        wait_for("a running request", || {
            (stage.engine.info()["running"] == 1).then_some(())
        });
        let mut body = order("c", &c, 8);
        body["turn"] = json!(1);
        let branch = stage.post("/v1/generate", &body);
        let slow = slow.join().unwrap();
        assert_eq!(
            (ids(&slow), ids(&branch)),
            (truths[0].clone(), truths[1].clone())
        );
        assert_eq!(branch["engram"]["branched"], true);
        assert_eq!(slow["engram"]["branched"], false);
    });
}

#[test]
fn ids_are_echoed_and_belong_to_one_request() {
    let stage = Stage::new(&[]);
    let send = |body: &Value, id: &str| {
        let headers = [("Content-Type", "application/json"), ("X-Request-Id", id)];
        let body = body.to_string();
        let place = stage.daemon.place();
        place
            .request("POST", "/v1/generate", &headers, body.as_bytes())
            .unwrap()
    };
    let answer = send(&order("c", &tokens(1, 20), 4), "mine-1");
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    let said = answer.json();
    assert_eq!(said["engram"]["request_id"], "mine-1");
    assert_eq!(said["id"], said["meta_info"]["id"]);
    assert_eq!(said["id"].as_str().unwrap().len(), 32);
    let mut body = order("c", &tokens(2, 20), 5);
    body["stream"] = json!(true);
    body["rid"] = json!("named");
    let answer = send(&body, "mine-2");
    assert_eq!(answer.header("x-request-id"), Some("mine-2"));
    let events = events(&answer);
    // One for each token, and the end.
    assert_eq!(events.len(), 6);
    assert!(
        events
            .iter()
            .all(|event| event["meta_info"]["id"] == "named")
    );
    let last = events.last().unwrap();
    assert_eq!(
        (&last["id"], &last["engram"]["request_id"]),
        (&json!("named"), &json!("mine-2"))
    );
    // An id is taken while its request runs, and only then.
    std::thread::scope(|scope| {
        let mut body = order("long", &tokens(3, 20), 600);
        body["rid"] = json!("taken");
        let stage = &stage;
        let first = scope.spawn(move || stage.daemon.post("/v1/generate", &body));
        wait_for("a running request", || {
            (stage.engine.info()["running"] == 1).then_some(())
        });
        let mut other = order("else", &tokens(4, 20), 4);
        other["rid"] = json!("taken");
        let second = stage.daemon.post("/v1/generate", &other);
        assert_eq!((second.status, &*second.kind()), (409, "conflict"));
        assert_eq!(first.join().unwrap().status, 200);
        assert_eq!(stage.daemon.post("/v1/generate", &other).status, 200);
    });
}

#[test]
fn what_was_deleted_is_not_waited_for() {
    let stage = Stage::new(&[]);
    let (a, b, c) = (tokens(1, 100), tokens(2, 20), tokens(3, 20));
    stage.generate("c", &a, 8);
    stage.generate("c", &b, 8);
    wait_for("both turns", || {
        let row = stage.daemon.get("/v1/conversations/c").json();
        (row["turns"].as_array()?.len() == 2).then_some(())
    });
    assert_eq!(delete(&stage, "/v1/conversations/c/turns/2"), 200);
    let on = stage.generate("c", &c, 8);
    assert_eq!(number(&on, "/engram/from_turn"), 1);
    wait_for("its turn", || {
        let row = stage.daemon.get("/v1/conversations/c").json();
        (row["turns"].as_array()?.len() == 2).then_some(())
    });
    assert_eq!(delete(&stage, "/v1/conversations/c"), 200);
    let anew = stage.generate("c", &c, 8);
    assert_eq!(ids(&anew), stage.truth(&c, 8));
}

#[test]
fn a_policy_may_come_before_the_first_turn() {
    let stage = Stage::new(&[]);
    let json = [("Content-Type", "application/json")];
    let path = "/v1/conversations/early/policy";
    let body = br#"{"policy":"every_turn"}"#;
    let put = stage.daemon.place().request("PUT", path, &json, body);
    assert!(put.unwrap().status < 300);
    let first = tokens(1, 50);
    let answer = stage.generate("early", &first, 8);
    assert_eq!(ids(&answer), stage.truth(&first, 8));
}

#[test]
fn a_body_that_cannot_be_read_never_loses_its_conversation() {
    let stage = Stage::new(&[]);
    for body in [
        r#"{"conversation_id":"c","messages":[{"role":"user","content":"\ud83d"}]}"#,
        r#"{"conversation_id":"c","temperature":NaN,"messages":[]}"#,
    ] {
        let json = [("Content-Type", "application/json")];
        let path = "/v1/chat/completions";
        let answer = stage
            .daemon
            .place()
            .request("POST", path, &json, body.as_bytes());
        assert_eq!(answer.unwrap().status, 400, "{body}");
    }
}

fn delete(stage: &Stage, path: &str) -> u16 {
    let answer = stage.daemon.place().request("DELETE", path, &[], b"");
    answer.unwrap().status
}
