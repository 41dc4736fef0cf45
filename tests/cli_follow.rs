//! `engram events` follows what happens, and `engram completions` prints what shells take.

mod common;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use common::daemon::Daemon;
use common::process::run;
use common::worker::{Worker, prompt};
use serde_json::Value;

#[test]
fn events_are_followed_until_the_daemon_ends() {
    let mut daemon = Daemon::start(&[("service.write_after", "20ms".into())]);
    let mut worker = Worker::attach(&daemon);
    // From the beginning: nothing depends on who was first.
    let after = "00000000000000000000000000000000-1";
    let mut child = Command::new(env!("CARGO_BIN_EXE_engram"))
        .args(["events", "--json", "--types", "saved,durable,turn_finished"])
        .args(["--after", after, "--url", &daemon.url()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    assert_eq!(next()["event"], "missed");
    worker.turn("c d", &prompt(1, 40), 40);
    let mut seen = Vec::new();
    while seen
        .last()
        .is_none_or(|it: &Value| it["event"] != "durable")
    {
        seen.push(next());
    }
    let saved = seen.iter().find(|it| it["event"] == "saved").unwrap();
    assert_eq!(saved["conversation_id"], "c d");
    assert!(saved["id"].is_string() && saved["at"].is_f64());
    assert!(daemon.stop().success());
    assert!(lines.next().is_none());
    assert!(child.wait().unwrap().success());
    let (code, _, error) = run(&["events", "--url", &daemon.url()]);
    assert_eq!(code, 3, "{error}");
}

#[test]
fn wrong_names_of_events_are_told() {
    let daemon = Daemon::start(&[]);
    let (code, out, error) = run(&["events", "--types", "nothing", "--url", &daemon.url()]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(error.contains("turn_finished"), "{error}");
}

#[test]
fn completions_name_every_command() {
    for (shell, command) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef engram"),
        ("fish", "complete -c engram"),
    ] {
        let (code, script, error) = run(&["completions", shell]);
        assert_eq!(code, 0, "{error}");
        assert!(script.contains(command), "{shell}");
        for name in ["serve", "chat", "events", "completions", "--conversation"] {
            let name = name.trim_start_matches("--");
            assert!(script.contains(name), "{shell}: {name}");
        }
    }
    let (_, script, _) = run(&["completions", "bash"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("engram");
    std::fs::write(&path, script).unwrap();
    let checked = Command::new("bash").arg("-n").arg(&path).status().unwrap();
    assert!(checked.success());
    let (code, ..) = run(&["completions", "tcsh"]);
    assert_eq!(code, 2);
}
