//! `engram demo --keep`: what it leaves running answers, and goes with it however it ends.

mod common;

use std::time::Duration;

use common::process::{Process, run};
use common::{wait_for, wait_within};
use nix::sys::signal::Signal;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(300);

struct Kept {
    demo: Process,
    folder: tempfile::TempDir,
    url: String,
}

impl Kept {
    fn start() -> Kept {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("tmp");
        std::fs::create_dir(&inner).unwrap();
        let env = [("TMPDIR", inner.to_str().unwrap())];
        let args = ["demo", "--turns", "10", "--json", "--keep"];
        let log = folder.path().join("demo.log");
        let mut demo = Process::start_with("the demo", &args, &env, &log);
        let url = wait_within(PATIENCE, "the end of the play", || {
            assert!(demo.alive(), "it ended: {}", demo.log());
            let log = demo.log();
            let line = log
                .lines()
                .find_map(|line| line.trim().strip_prefix("export ENGRAM_URL="));
            line.map(str::to_owned)
        });
        Kept { demo, folder, url }
    }

    fn wait_gone(&self) {
        wait_for("the end of the daemon", || {
            let (code, ..) = run(&["ls", "--url", &self.url]);
            (code == 3).then_some(())
        });
    }
}

#[test]
fn what_is_kept_can_be_tried_and_an_interrupt_removes_it() {
    let mut kept = Kept::start();
    let (code, out, error) = run(&["ls", "demo", "--url", &kept.url, "--json"]);
    assert_eq!(code, 0, "{error}");
    let list: Value = serde_json::from_str(&out).unwrap();
    assert!(list["snapshots"].as_array().unwrap().len() >= 5, "{list}");
    let (code, _, error) = run(&["save", "demo", "--branch", "mine", "--url", &kept.url]);
    assert_eq!(code, 0, "{error}");
    let (code, _, error) = run(&["restore", "demo", "--turn", "4", "--url", &kept.url]);
    assert_eq!(code, 0, "{error}");

    let report = kept.demo.log();
    let report = report.lines().find(|line| line.starts_with('{')).unwrap();
    let report: Value = serde_json::from_str(report).unwrap();
    kept.demo.signal(Signal::SIGINT);
    let status = kept.demo.wait();
    assert_eq!(
        status.success(),
        report["ok"] == true,
        "the verdict is that of the play"
    );
    assert!(report["ok"] == true, "{}", report["failures"]);
    kept.wait_gone();
    let left = std::fs::read_dir(kept.folder.path().join("tmp")).unwrap();
    assert_eq!(left.count(), 0, "something was left behind");
}

#[test]
fn commands_to_paste_name_the_binary_and_the_end_of_the_daemon_is_said() {
    let mut kept = Kept::start();
    let binary = env!("CARGO_BIN_EXE_engram");
    let line = format!("{binary} restore demo --turn");
    assert!(kept.demo.log().contains(&line), "{}", kept.demo.log());
    // The daemon's lock says who it is.
    let folders = std::fs::read_dir(kept.folder.path().join("tmp")).unwrap();
    let folder = folders.map(|entry| entry.unwrap().path()).next().unwrap();
    let announced = std::fs::read(folder.join("daemon.json")).unwrap();
    let announced: Value = serde_json::from_slice(&announced).unwrap();
    let pid = announced["pid"].as_i64().unwrap().try_into().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let status = kept.demo.wait();
    assert_eq!(status.code(), Some(1));
    let log = kept.demo.log();
    assert!(log.contains("the daemon ended"), "{log}");
}

#[test]
fn children_do_not_outlive_a_killed_demo() {
    let mut kept = Kept::start();
    kept.demo.kill();
    kept.wait_gone();
}
