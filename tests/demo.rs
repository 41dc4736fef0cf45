//! `engram demo` as a user runs it.

mod common;

use std::time::Duration;

use common::process::run_within;
use serde_json::Value;

/// The engine without cache computes every prompt in full.
const PATIENCE: Duration = Duration::from_secs(600);

#[test]
fn fifty_turns_survive_both_kills_with_identical_answers() {
    play("ipc");
}

#[test]
fn so_they_do_where_the_engine_copies_by_itself() {
    play("engine");
}

fn play(mode: &str) {
    let folder = tempfile::tempdir().unwrap();
    let env = [("TMPDIR", folder.path().to_str().unwrap())];
    let (code, out, error) = run_within(PATIENCE, &["demo", "--json", "--mode", mode], &env);
    assert_eq!(
        out.lines().count(),
        1,
        "not exactly one object: {out}\n{error}"
    );
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 0, "{}\n{error}", report["failures"]);
    let number = |key: &str| report[key].as_f64().unwrap_or_else(|| panic!("no {key}"));
    assert_eq!(report["mode"], mode);
    assert_eq!(number("turns"), 50.0);
    assert_eq!(number("identical_turns"), 50.0);
    assert_eq!((number("engine_kills"), number("daemon_kills")), (1.0, 1.0));
    assert!(number("token_reduction") >= 0.90, "{report}");
    assert!(number("reuse_efficiency") >= 0.99, "{report}");
    assert_eq!(
        number("reused_tokens") + number("prefilled_tokens"),
        number("prompt_tokens")
    );
    assert!(number("restored_tokens") > 0.0);
    assert!(
        number("device_evictions") > 0.0,
        "the device pools were not too small"
    );

    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 53, "50 turns, and 3 of the second conversation");
    assert!(rows.iter().all(|row| row["identical"] == true));
    assert!(
        rows.iter()
            .all(|row| row["distinct"].as_u64().unwrap() >= 20),
        "answers do not vary"
    );
    let turn = |number: u64| {
        let is = |row: &&Value| row["turn"] == number && row["line"] != "second";
        rows.iter().find(is).unwrap()
    };
    // After the engine's death its turns come from the daemon, and after the daemon's death what the
    // device forgot comes from disk.
    assert!(turn(26)["restored"].as_u64().unwrap() > 0);
    assert_eq!(turn(26)["tier"], "ram");
    assert_eq!(turn(41)["line"], "branch");
    assert!(turn(41)["restored"].as_u64().unwrap() > 0);
    assert_eq!(turn(41)["tier"], "disk");
    let second = rows.iter().find(|row| row["line"] == "second").unwrap();
    assert!(
        second["reused"].as_u64().unwrap() >= 1024,
        "the system prompt was not shared"
    );
    let left = std::fs::read_dir(folder.path()).unwrap();
    assert_eq!(left.count(), 0, "something was left behind");
}
