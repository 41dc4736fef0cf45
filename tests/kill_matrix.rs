//! The daemon is killed, stopped or restarted in every state of a save and of a restore, of the
//! worker's machines and of its own. The engine answers as if nothing had happened, gives back
//! everything it held, serves on, attaches again; and what the daemon then lists is whole.

#![cfg(feature = "testing")]

mod common;

use std::collections::HashSet;
use std::path::PathBuf;
use std::thread;

use common::daemon::Daemon;
use common::engine::{Engine, Reply, tokens, workers};
use common::wait_for;
use engram::{engine, service};
use serde_json::{Value, json};

/// Tokens of a prompt: one boundary, at 256, and one block of KV.
const PROMPT: usize = 300;
/// Tokens of an answer.
const ANSWER: usize = 8;

/// What happens to the daemon.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Blow {
    /// SIGKILL, then another start.
    Kill,
    /// SIGSTOP until the engine has given it up, then SIGCONT.
    Stop,
    /// SIGTERM, then another start.
    Restart,
}

/// Whose machine is held.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    Worker,
    Daemon,
}

/// One machine, and its states with a kill test.
struct Row {
    side: Side,
    machine: &'static str,
    states: &'static [&'static str],
}

/// States of the daemon's save in which its snapshot is visible.
const VISIBLE: [&str; 4] = ["Visible", "Writing", "Sealing", "Durable"];

#[rustfmt::skip] // One machine a line or two.
const MATRIX: [Row; 4] = [
    Row { side: Side::Worker, machine: "save",
          states: &["Offered", "Gathering", "Draining", "Finishing"] },
    Row { side: Side::Worker, machine: "restore",
          states: &["LookingUp", "Leased", "Filling", "Placing", "Placed", "Releasing"] },
    Row { side: Side::Daemon, machine: "save",
          states: &["Offered", "Reserving", "Wanted", "Draining", "Committing", "Visible",
                    "Writing", "Sealing", "Durable"] },
    Row { side: Side::Daemon, machine: "restore",
          states: &["Leased", "Promoting", "Ready", "Filling", "Filled", "Released"] },
];

/// The states that a machine has.
fn states(side: Side, machine: &str) -> Vec<&'static str> {
    match (side, machine) {
        (Side::Worker, "save") => engine::attach::SaveState::ALL.map(|s| s.as_str()).to_vec(),
        (Side::Worker, _) => engine::attach::RestoreState::ALL
            .map(|s| s.as_str())
            .to_vec(),
        (Side::Daemon, "save") => service::SaveState::ALL.map(|s| s.as_str()).to_vec(),
        (Side::Daemon, _) => service::RestoreState::ALL.map(|s| s.as_str()).to_vec(),
    }
}

#[test]
fn every_state_of_every_machine_has_its_kill_tests() {
    for Row {
        side,
        machine,
        states: tested,
    } in &MATRIX
    {
        assert_eq!(&states(*side, machine), tested, "{side:?} {machine}");
    }
}

/// A daemon, an engine beside it, and one that computes every prompt in full.
struct Stage {
    daemon: Daemon,
    engine: Engine,
    oracle: Engine,
    seed: u64,
    /// Snapshots that were found whole.
    whole: HashSet<String>,
}

/// Says on a panic in which case it was.
struct Case(String);

impl Drop for Case {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- in the case: {}", self.0);
        }
    }
}

impl Stage {
    fn new(seed: u64) -> Stage {
        let text = |text: &str| toml::Value::from(text);
        let daemon = Daemon::start(&[
            ("service.write_after", text("0s")),
            ("service.preload", text("0 B")),
            ("service.drain_timeout", text("500ms")),
        ]);
        let args = ["--restore-patience", "3s", "--daemon-silence", "1500ms"];
        Stage {
            engine: Engine::beside(&daemon, &args),
            oracle: Engine::alone(&["--no-cache"]),
            daemon,
            seed,
            whole: HashSet::new(),
        }
    }

    /// A prompt that nobody asked before.
    fn fresh(&mut self) -> Vec<u32> {
        self.seed += 1;
        tokens(self.seed, PROMPT)
    }

    fn ask(&self, prompt: &[u32]) -> Reply {
        let rid = rid_of(prompt);
        self.engine.generate(&rid, &rid, prompt, ANSWER)
    }

    /// All is in RAM when it is asked for: else it may be filled before the last object came.
    fn bring_into_ram(&self, prompt: &[u32]) {
        let rid = rid_of(prompt);
        let rows = self.daemon.get("/v1/snapshots?limit=1000").json();
        let its = rows["snapshots"].as_array().unwrap().iter();
        let its: Vec<_> = its.filter(|row| row["rid"] == rid.as_str()).collect();
        assert!(!its.is_empty(), "{rows}");
        for row in its {
            let body = json!({ "snapshot_id": row["snapshot_id"] });
            let answer = self.daemon.post("/restore_snapshot", &body);
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }

    fn cold(&self, prompt: &[u32]) -> Vec<u32> {
        self.oracle.generate("cold", "cold", prompt, ANSWER).tokens
    }

    fn memory(&self) -> Value {
        self.engine.info()["memory"].take()
    }

    /// Waits until nothing is under way, and everything visible is on disk.
    fn settle(&self) {
        self.engine.settled();
    }

    /// Nothing is held once all is done, and nothing is lost.
    fn check_accounts(&self) {
        self.settle();
        self.engine.flush();
        let info = self.engine.info();
        assert_eq!(info["sanity_check"], "ok", "{info}");
        for pool in ["slots", "pages"] {
            assert_eq!(info[pool]["free"], info[pool]["total"], "{info}");
        }
        let memory = &info["memory"];
        assert!(memory["ring_free"].is_null() || memory["ring_free"] == memory["ring_bytes"]);
        assert_eq!(memory["counts"]["garbled"], 0, "{info}");
    }

    /// Waits until the engine is attached to this start of the daemon, and nobody else is.
    fn wait_attached(&self) {
        let boot = self.daemon.get("/v1/status").json()["boot"].take();
        let boot = boot.as_str().unwrap().replace('-', "");
        wait_for("the engine beside this daemon", || {
            let memory = self.memory();
            (memory["attached"] == true && memory["boot"] == boot.as_str()).then_some(())
        });
        wait_for("one session", || (workers(&self.daemon) == 1).then_some(()));
    }

    /// The daemon went on after the engine had given it up, and had filled the ring with noise: nothing
    /// of that request is visible.
    fn check_nothing_late(&self, rid: &str) {
        let rows = self.daemon.get("/v1/snapshots?limit=1000").json();
        let late = |row: &&Value| row["rid"] == rid;
        let late: Vec<_> = rows["snapshots"]
            .as_array()
            .unwrap()
            .iter()
            .filter(late)
            .collect();
        assert!(late.is_empty(), "{late:?}");
    }

    /// Every snapshot that is listed restores to the right answer.
    fn check_snapshots(&mut self) {
        let rows = self.daemon.get("/v1/snapshots?limit=1000").json();
        for row in rows["snapshots"].as_array().unwrap() {
            let id = row["snapshot_id"].as_str().unwrap().to_owned();
            if !self.whole.insert(id.clone()) {
                continue;
            }
            let info = self
                .daemon
                .post("/get_snapshot_info", &json!({ "snapshot_id": id }));
            // It may have been replaced by the same prefix saved again.
            if info.status == 404 {
                continue;
            }
            let ids = info.json()["metadata"]["fill_ids"].take();
            let ids: Vec<u32> = serde_json::from_value(ids).unwrap();
            assert_eq!(ids.len() as u64, row["boundary"].as_u64().unwrap());
            let prompt = [ids.clone(), tokens(1, 20)].concat();
            let reply = self.ask(&prompt);
            assert_eq!(reply.cached, ids.len() as u64, "{row}: {}", reply.meta);
            assert_eq!(reply.tokens, self.cold(&prompt), "{row}");
        }
    }

    /// Keeps the machine in its state; asks; strikes when it is there; checks everything.
    fn play(&mut self, side: Side, machine: &str, state: &str, blow: Blow) {
        let _case = Case(format!("{side:?} {machine} {state}: {blow:?}"));
        let prompt = self.fresh();
        let right = self.cold(&prompt);
        if machine == "restore" {
            assert_eq!(self.ask(&prompt).tokens, right);
            self.settle();
            self.daemon.all_durable();
        }
        let lift = self.hold(side, machine, state);
        if (side, state) == (Side::Daemon, "Ready") {
            self.bring_into_ram(&prompt);
        }
        self.engine.flush();
        let (place, rid) = (self.engine.place().clone(), format!("held-{}", self.seed));
        let held = rid.clone();
        let body = json!({
            "input_ids": prompt, "rid": rid, "session_id": rid,
            "sampling_params": { "max_new_tokens": ANSWER },
        });
        let asked = thread::spawn(move || place.post("/generate", &body));
        let name = format!("{machine}:{state}");
        wait_for(&name, || {
            let held = match side {
                Side::Worker => self.memory()["held"].take(),
                Side::Daemon => self.daemon.get("/v1/status").json()["held"].take(),
            };
            held.as_array()?.contains(&json!(name)).then_some(())
        });

        match blow {
            Blow::Kill => self.daemon.kill(),
            Blow::Stop => self.daemon.process().pause(),
            Blow::Restart => drop(self.daemon.stop()),
        }
        let answer = asked.join().unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["output_ids"], json!(right));
        wait_for("the engine to give the daemon up", || {
            (self.memory()["attached"] == false).then_some(())
        });
        self.engine.post("/testing/release", &json!({}));
        self.check_accounts();
        // It serves on, alone.
        let other = self.fresh();
        assert_eq!(self.ask(&other).tokens, self.cold(&other));

        std::fs::write(&lift, "").unwrap();
        match blow {
            Blow::Kill | Blow::Restart => self.daemon.restart(),
            Blow::Stop => self.daemon.process().resume(),
        }
        self.wait_attached();
        self.check_accounts();
        let unfinished = side == Side::Daemon && machine == "save" && !VISIBLE.contains(&state);
        if unfinished && blow == Blow::Stop {
            self.check_nothing_late(&held);
        }
        self.check_snapshots();
        self.check_accounts();
        // It saves and restores again.
        assert_eq!(self.ask(&prompt).tokens, right);
        self.check_accounts();
        let again = self.ask(&prompt);
        assert_eq!((again.tokens, again.cached), (right, 256), "{}", again.meta);
        self.check_accounts();
    }

    /// Sets the hold. Returns the file that lifts one of the daemon's.
    fn hold(&mut self, side: Side, machine: &str, state: &str) -> PathBuf {
        let lift = self.daemon.folder().join("lift");
        std::fs::remove_file(&lift).ok();
        match side {
            Side::Worker => {
                let body = json!({ "machine": machine, "state": state });
                let answer = self.engine.post("/testing/hold", &body);
                assert_eq!(answer.status, 200, "{}", answer.text());
            }
            Side::Daemon => {
                let name = format!("{machine}:{state}");
                let until = lift.to_str().unwrap();
                self.daemon
                    .restart_in(&[("ENGRAM_HOLD", &name), ("ENGRAM_HOLD_UNTIL", until)]);
                self.wait_attached();
            }
        }
        lift
    }
}

/// The request, and the conversation, of a prompt.
fn rid_of(prompt: &[u32]) -> String {
    format!("r{}", prompt.iter().map(|id| u64::from(*id)).sum::<u64>())
}

/// All states of one machine under one blow.
fn play(side: Side, machine: &str, blow: Blow) {
    let row = MATRIX
        .iter()
        .position(|row| (row.side, row.machine) == (side, machine))
        .unwrap();
    let mut stage = Stage::new(1000 * (1 + row as u64) + 100 * blow as u64);
    for state in MATRIX[row].states {
        stage.play(side, machine, state, blow);
    }
    let counts = stage.memory()["counts"].take();
    let blows = MATRIX[row].states.len() as u64;
    assert!(counts["sessions"].as_u64().unwrap() > blows, "{counts}");
    // No death left anything behind that is not whole.
    let metrics = stage.daemon.get("/metrics");
    let bad = |line: &&str| line.starts_with("engram_quarantined_files{") && !line.ends_with(" 0");
    assert_eq!(metrics.text().lines().find(bad), None);
}

#[test]
fn a_daemon_killed_in_every_state_of_the_workers_save() {
    play(Side::Worker, "save", Blow::Kill);
}

#[test]
fn a_daemon_killed_in_every_state_of_the_workers_restore() {
    play(Side::Worker, "restore", Blow::Kill);
}

#[test]
fn a_daemon_killed_in_every_state_of_its_save() {
    play(Side::Daemon, "save", Blow::Kill);
}

#[test]
fn a_daemon_killed_in_every_state_of_its_restore() {
    play(Side::Daemon, "restore", Blow::Kill);
}

#[test]
fn a_daemon_stopped_in_every_state_of_the_workers_save() {
    play(Side::Worker, "save", Blow::Stop);
}

#[test]
fn a_daemon_stopped_in_every_state_of_the_workers_restore() {
    play(Side::Worker, "restore", Blow::Stop);
}

#[test]
fn a_daemon_stopped_in_every_state_of_its_save() {
    play(Side::Daemon, "save", Blow::Stop);
}

#[test]
fn a_daemon_stopped_in_every_state_of_its_restore() {
    play(Side::Daemon, "restore", Blow::Stop);
}

#[test]
fn a_daemon_restarted_in_every_state_of_the_workers_save() {
    play(Side::Worker, "save", Blow::Restart);
}

#[test]
fn a_daemon_restarted_in_every_state_of_the_workers_restore() {
    play(Side::Worker, "restore", Blow::Restart);
}

#[test]
fn a_daemon_restarted_in_every_state_of_its_save() {
    play(Side::Daemon, "save", Blow::Restart);
}

#[test]
fn a_daemon_restarted_in_every_state_of_its_restore() {
    play(Side::Daemon, "restore", Blow::Restart);
}
