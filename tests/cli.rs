//! The client commands against a really started daemon: what they print and how they exit.

mod common;

use common::daemon::Daemon;
use common::process::run;
use common::worker::{Worker, prompt};
use serde_json::{Value, json};

const COMMANDS: [&[&str]; 6] = [
    &["ls"],
    &["ls", "a"],
    &["show", "a", "--turn", "1"],
    &["save", "a"],
    &["restore", "a"],
    &["rm", "a", "--all"],
];

fn with<'a>(command: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [command, more].concat()
}

#[test]
fn nobody_there_exits_3() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("unix:{}", folder.path().join("none").display());
    for command in COMMANDS {
        let (code, out, error) = run(&with(command, &["--url", &url]));
        assert_eq!((code, out.as_str()), (3, ""), "{command:?}: {error}");
        assert!(error.contains("no Engram daemon answers"), "{error}");
        assert!(
            error.contains(&url) && !error.contains("localhost"),
            "{error}"
        );
    }
}

#[test]
fn wrong_usage_exits_2() {
    let cases: [&[&str]; 17] = [
        &["show", "a", "--rid", "r", "--branch", "b"],
        &["restore", "--rid", "r", "--snapshot", "x"],
        &["rm", "a", "--all", "--rid", "r"],
        &["ls", "--limit", "0"],
        &["ls", "--url", "https://localhost"],
        &["ls", "--url", "nonsense"],
        &["show"],
        &["show", "a", "--turn", "x"],
        &["show", "a", "--turn", "1", "--branch", "b"],
        &["show", "a", "--tokens"],
        &["save"],
        &["rm", "a", "--all", "--turn", "1"],
        &["rm", "a"],
        &["rm", "a", "--turn", "0"],
        &["ls", "--timeout", "0s"],
        &["save", "a", "--timeout", "0ms"],
        &["nothing"],
    ];
    for case in cases {
        let (code, out, error) = run(case);
        assert_eq!((code, out.as_str()), (2, ""), "{case:?}: {error}");
        assert!(!error.is_empty());
    }
    // What is missing is said in flags.
    let (_, _, error) = run(&["rm", "a"]);
    for flag in ["--turn", "--branch", "--snapshot", "--all"] {
        assert!(error.contains(flag), "{error}");
    }
    let (_, _, error) = run(&["ls", "--timeout", "0s"]);
    assert!(error.contains("no answer comes within no time"), "{error}");
}

#[test]
fn a_refusal_exits_1_and_says_why() {
    let daemon = Daemon::start(&[]);
    let unix = format!("unix:{}", daemon.rest_socket().display());
    for url in [daemon.url(), unix] {
        for command in &COMMANDS[2..] {
            let (code, out, error) = run(&with(command, &["--url", &url]));
            assert_eq!((code, out.as_str()), (1, ""), "{command:?}: {error}");
            assert!(error.contains("not_found, status 404"), "{error}");
            let (code, out, _) = run(&with(command, &["--url", &url, "--json"]));
            let body: Value = serde_json::from_str(&out).unwrap();
            assert_eq!((code, &body["error"]["type"]), (1, &json!("not_found")));
        }
        // The daemon's own rules, in the words of the command line.
        for (command, flag) in [
            (["rm", "--snapshot", "nonsense"], "`--snapshot`"),
            (["save", "a", "--branch="], "`--branch`"),
        ] {
            let (code, _, error) = run(&with(&command, &["--url", &url]));
            assert_eq!(code, 1, "{error}");
            assert!(error.contains("invalid_request"), "{error}");
            assert!(error.contains(flag), "{error}");
        }
    }
}

#[test]
fn an_empty_list_has_its_head() {
    let daemon = Daemon::start(&[]);
    let url = daemon.url();
    let (code, out, _) = run(&["ls", "--url", &url]);
    assert_eq!(code, 0);
    assert!(
        out.starts_with("CONVERSATION") && out.lines().count() == 1,
        "{out}"
    );
    let (code, out, _) = run(&["ls", "--url", &url, "--json"]);
    assert_eq!(code, 0);
    let body: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(body, json!({ "conversations": [], "total": 0 }));
}

#[test]
fn the_latest_of_a_long_conversation_is_shown() {
    let daemon = Daemon::start(&[]);
    let mut worker = Worker::attach(&daemon);
    let first = prompt(1, 300);
    worker.turn("c", &first, 256);
    // More turns than a list has in one answer; all have the same state.
    for turn in 2..=1001 {
        let req = worker.open("c", &first);
        let save = worker.offer(req, 256);
        assert!(worker.answer(save).is_err(), "turn {turn} is stored again");
        worker.finish(req, first.len());
    }
    worker.turn("c", &prompt(2, 600), 512);
    worker.heard_all();
    let (code, out, error) = run(&["show", "c", "--url", &daemon.url()]);
    assert_eq!(code, 0, "{error}");
    let line = |name: &str| {
        let line = out.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().last().map(str::to_owned))
    };
    assert_eq!(line("turn ").as_deref(), Some("1002"), "{out}");
    assert_eq!(line("tokens ").as_deref(), Some("512"), "{out}");
}

#[test]
fn a_token_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, "0123456789abcdef").unwrap();
    let daemon = Daemon::start(&[("rest.token_file", file.to_str().unwrap().into())]);
    let url = daemon.url();
    let (code, _, error) = run(&["ls", "--url", &url]);
    assert_eq!(code, 1);
    assert!(error.contains("unauthorized"), "{error}");
    let (code, ..) = run(&["ls", "--url", &url, "--token", "0123456789abcdef"]);
    assert_eq!(code, 0);
}

#[test]
fn help_has_examples() {
    let (code, out, _) = run(&["--help"]);
    assert_eq!(code, 0);
    for word in ["engram demo", "engram serve --config", "ENGRAM_URL"] {
        assert!(out.contains(word), "{word}: {out}");
    }
}
