//! A full disk: who waits hears of it, it is told, and the daemon still stops.

mod common;

use std::thread;

use common::daemon::Daemon;
use common::wait_for;
use common::worker::{Model, Worker, prompt};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const TOKENS: u32 = 200;

/// Free space that no disk has, and a stop that would wait for it.
fn greedy() -> Vec<(&'static str, toml::Value)> {
    vec![
        ("service.write_after", "1h".into()),
        ("service.drain_timeout", "1h".into()),
        ("store.disk.min_free", "8 EiB".into()),
    ]
}

/// Conversations `c0`, `c1`, … in RAM.
fn talk(daemon: &Daemon, count: u32) -> Worker {
    let mut worker = Worker::attach_as(daemon, &Model::default());
    for number in 0..count {
        let tokens = prompt(number + 1, TOKENS as usize);
        worker.turn(&format!("c{number}"), &tokens, TOKENS);
    }
    worker
}

fn disk(daemon: &Daemon) -> Value {
    let tiers = daemon.get("/v1/tiers").json();
    let mut tiers = tiers["tiers"].as_array().unwrap().iter();
    tiers.find(|row| row["tier"] == "disk").unwrap().clone()
}

#[test]
fn a_full_disk_is_told_and_does_not_flood_the_log() {
    let mut daemon = Daemon::start(&greedy());
    assert_eq!(daemon.get("/readyz").json()["warnings"], Value::Null);
    assert_eq!(disk(&daemon)["full"], false);
    let mut worker = talk(&daemon, 3);
    for _ in 0..5 {
        for number in 0..3 {
            let body = json!({ "conversation_id": format!("c{number}"), "branch_name": "b" });
            let answer = daemon.post("/save_snapshot", &body);
            assert_eq!(answer.status, 507, "{}", answer.text());
            assert_eq!(answer.json()["error"]["retryable"], true);
            assert_eq!(answer.header("retry-after"), Some("10"));
        }
    }
    let ready = daemon.get("/readyz");
    assert_eq!(ready.status, 200);
    let warnings = ready.json()["warnings"].clone();
    let text = warnings[0].as_str().unwrap();
    assert!(text.starts_with("the disk is full since 2"), "{text}");
    assert_eq!(
        daemon.get("/v1/status").json()["warnings"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let row = disk(&daemon);
    assert_eq!(
        (&row["full"], &row["healthy"]),
        (&json!(true), &json!(true))
    );
    assert!(row["full_since"].as_f64().unwrap() <= row["last_failure_at"].as_f64().unwrap());
    assert!(
        row["last_failure"].as_str().unwrap().contains("available"),
        "{row}"
    );
    wait_for("the metric", || {
        (daemon.metric("engram_disk_full") == 1.0).then_some(())
    });
    let failures = r#"engram_write_failures_total{reason="no_space"}"#;
    assert!(daemon.metric(failures) >= 5.0);
    let log = daemon.process().log();
    let told = log.matches("Could not write to disk").count();
    assert!((1..=2).contains(&told), "told {told} times:\n{log}");
    // No name is left, and what is there is served.
    let list = daemon
        .post("/list_snapshots", &json!({ "conversation_id": "c0" }))
        .json();
    assert_eq!(
        (&list["total"], &list["snapshots"][0]["pinned"]),
        (&json!(1), &json!(false))
    );
    let tokens = prompt(1, TOKENS as usize);
    assert_eq!(worker.restore(&tokens).unwrap().boundary, TOKENS);
}

#[test]
fn a_stop_on_a_full_disk_answers_who_waits_and_says_what_is_not_durable() {
    let mut daemon = Daemon::start(&greedy());
    let until = daemon.folder().join("go on");
    let hold = [
        ("ENGRAM_HOLD", "save:Writing"),
        ("ENGRAM_HOLD_UNTIL", until.to_str().unwrap()),
    ];
    daemon.restart_in(&hold);
    let _worker = talk(&daemon, 4);
    let place = daemon.place().clone();
    let saves: Vec<_> = (0..4)
        .map(|number| {
            let place = place.clone();
            let body = json!({ "conversation_id": format!("c{number}") });
            thread::spawn(move || place.post("/save_snapshot", &body))
        })
        .collect();
    // A snapshot is pinned while a save waits for it.
    wait_for("four saves that wait", || {
        let rows = daemon.get("/v1/snapshots").json();
        let rows = rows["snapshots"].as_array().unwrap().clone();
        (rows.len() == 4 && rows.iter().all(|row| row["pinned"] == true)).then_some(())
    });
    daemon.process().signal(Signal::SIGTERM);
    std::fs::write(&until, "").unwrap();
    for save in saves {
        let answer = save.join().unwrap();
        assert!(matches!(answer.status, 503 | 507), "{}", answer.text());
        assert!(["no_space", "unavailable"].contains(&&*answer.kind()));
    }
    assert!(daemon.process().wait().success());
    let log = daemon.process().log();
    assert!(
        log.contains("Stopping with 4 snapshots that are not durable"),
        "{log}"
    );
    assert!(
        log.contains("Session over: the daemon ends the session (shutdown)"),
        "{log}"
    );
    assert!(!log.contains("silent_peer"), "{log}");
    assert!(!log.contains("cut off"), "{log}");
}

#[test]
fn a_data_directory_that_is_taken_away_is_told_until_it_is_back() {
    let mut daemon = Daemon::start(&[("service.write_after", "1h".into())]);
    let mut worker = talk(&daemon, 2);
    let (data, away) = (daemon.data(), daemon.folder().join("away"));
    std::fs::rename(&data, &away).unwrap();
    let told = || daemon.get("/readyz").json()["warnings"].clone();
    wait_for("a warning", || told().is_array().then_some(()));
    let text = told()[0].as_str().unwrap().to_owned();
    assert!(
        text.starts_with("the data directory is gone since 2"),
        "{text}"
    );
    let row = disk(&daemon);
    assert_eq!(
        (&row["trouble"], &row["healthy"], &row["full"]),
        (&json!("removed"), &json!(false), &json!(false))
    );
    assert!(row["trouble_since"].is_f64());
    let metric = r#"engram_disk_trouble{reason="removed"}"#;
    wait_for("the metric", || {
        (daemon.metric(metric) == 1.0).then_some(())
    });
    let body = json!({ "conversation_id": "c0" });
    let answer = daemon.post("/save_snapshot", &body);
    assert_eq!((answer.status, &*answer.kind()), (503, "unavailable"));
    assert_eq!(answer.json()["error"]["retryable"], true);
    let tokens = prompt(1, TOKENS as usize);
    assert_eq!(worker.restore(&tokens).unwrap().boundary, TOKENS);
    std::fs::rename(&away, &data).unwrap();
    wait_for("the end of it", || told().is_null().then_some(()));
    let answer = daemon.post("/save_snapshot", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let log = daemon.process().log();
    assert_eq!(log.matches("Could not write to disk").count(), 1, "{log}");
    assert_eq!(
        log.matches("The disk takes writes again").count(),
        1,
        "{log}"
    );
}

#[test]
fn a_budget_that_the_file_system_cannot_hold_is_said_at_the_start() {
    let warned = |daemon: &mut Daemon| {
        daemon
            .process()
            .log()
            .contains("store.disk.budget is above")
    };
    let mut daemon = Daemon::start(&[("store.disk.budget", "1 EiB".into())]);
    assert!(warned(&mut daemon), "{}", daemon.process().log());
    let mut daemon = Daemon::start(&[("store.disk.budget", "16 MiB".into())]);
    assert!(!warned(&mut daemon), "{}", daemon.process().log());
}
