//! An embedded engine, alone or beside a daemon.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::daemon::Daemon;
use super::http::{Answer, Place};
use super::process::Process;
use super::{MODE, wait_for};

/// A running engine. After a kill it can be started again with the same arguments.
pub struct Engine {
    // Before the folder, whose log it shows when a test fails.
    process: Process,
    place: Place,
    args: Vec<String>,
    folder: tempfile::TempDir,
}

/// The answer to a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The answer's tokens.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt that were not prefilled.
    pub cached: u64,
    /// All that the engine says of it.
    pub meta: Value,
}

impl Engine {
    /// Starts one that is attached to nothing.
    pub fn alone(args: &[&str]) -> Engine {
        Engine::start(args)
    }

    /// Starts one beside a daemon and waits until it is attached.
    pub fn beside(daemon: &Daemon, args: &[&str]) -> Engine {
        let engine = Engine::start(&[args, &attach_args(&daemon.grpc_socket())].concat());
        engine.wait_attached(daemon);
        engine
    }

    /// Starts one that finds the daemon's socket at `socket`, whoever listens there, if anybody.
    pub fn toward(socket: &Path, args: &[&str]) -> Engine {
        Engine::start(&[args, &attach_args(socket)].concat())
    }

    fn start(args: &[&str]) -> Engine {
        let folder = tempfile::Builder::new()
            .prefix("engram-engine-")
            .tempdir()
            .unwrap();
        let args: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
        let (process, place) = spawn(folder.path(), &args);
        Engine {
            folder,
            args,
            process,
            place,
        }
    }

    /// Answers a prompt greedily with `length` tokens, as a turn of `session`.
    pub fn generate(&self, session: &str, rid: &str, prompt: &[u32], length: usize) -> Reply {
        let body = json!({
            "input_ids": prompt,
            "sampling_params": { "max_new_tokens": length, "temperature": 0.0 },
            "rid": rid,
            "session_id": session,
        });
        let answer = self.post("/generate", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let json = answer.json();
        Reply {
            tokens: serde_json::from_value(json["output_ids"].clone()).unwrap(),
            cached: json["meta_info"]["cached_tokens"].as_u64().unwrap(),
            meta: json["meta_info"].clone(),
        }
    }

    /// All that the engine says of itself; `sanity_check` is `"ok"` when its accounts fit.
    pub fn info(&self) -> Value {
        self.place.get("/server_info").json()
    }

    /// Waits until no save and no restore is under way, and returns what it says of its memory.
    pub fn settled(&self) -> Value {
        wait_for("the end of all saves and restores", || {
            let memory = self.info()["memory"].take();
            let idle = |machines: &Value| machines.as_object().unwrap().values().all(|n| n == 0);
            (idle(&memory["saves"]) && idle(&memory["restores"])).then_some(memory)
        })
    }

    /// Every slot and page is free once all is done and the cache is emptied.
    pub fn check_accounts(&self) {
        self.settled();
        self.flush();
        let info = self.info();
        assert_eq!(info["sanity_check"], "ok", "{info}");
        for pool in ["slots", "pages"] {
            assert_eq!(info[pool]["free"], info[pool]["total"], "{info}");
        }
    }

    /// Empties the device cache.
    pub fn flush(&self) {
        wait_for("an empty device cache", || {
            let answer = self.post("/flush_cache", &json!({}));
            (answer.status == 200).then_some(())
        });
    }

    /// POST of JSON.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.place.post(path, body)
    }

    /// Where it listens.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts it again, attached to nothing yet.
    pub fn restart(&mut self) {
        self.process.kill();
        (self.process, self.place) = spawn(self.folder.path(), &self.args);
    }

    /// Starts it again and waits until it is attached.
    pub fn restart_beside(&mut self, daemon: &Daemon) {
        self.restart();
        self.wait_attached(daemon);
    }

    /// Waits until both sides have the same session, and its channel is open: after a death either
    /// may still see the session of before.
    pub fn wait_attached(&self, daemon: &Daemon) {
        wait_for("the engine to attach", || {
            let info = self.info();
            let session = info["memory"]["session"].as_str()?;
            let workers = daemon.get("/v1/workers").json();
            let same = |worker: &Value| {
                worker["session"].as_str().unwrap().replace('-', "") == session
                    && worker["bound"] == true
            };
            workers["workers"]
                .as_array()
                .unwrap()
                .iter()
                .any(same)
                .then_some(())
        });
    }
}

/// Workers of a daemon whose channel is open.
pub fn workers(daemon: &Daemon) -> usize {
    let workers = daemon.get("/v1/workers").json();
    workers["workers"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|worker| worker["bound"] == true)
        .count()
}

/// Token ids that look like chance: the same for the same seed.
pub fn tokens(seed: u64, length: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % 2048) as u32
        })
        .collect()
}

fn attach_args(socket: &Path) -> [&str; 2] {
    ["--engram", socket.to_str().unwrap()]
}

fn spawn(folder: &Path, args: &[String]) -> (Process, Place) {
    let announced: PathBuf = folder.join("address.json");
    std::fs::remove_file(&announced).ok();
    let fixed = [
        "engine",
        "--listen",
        "127.0.0.1:0",
        "--announce",
        announced.to_str().unwrap(),
        "--mode",
        MODE.as_str(),
    ];
    let args: Vec<&str> = fixed
        .into_iter()
        .chain(args.iter().map(String::as_str))
        .collect();
    let mut process = Process::start("the engine", &args, &folder.join("engine.log"));
    let bound: Value = wait_for("the engine's address", || {
        assert!(process.alive(), "the engine ended: {}", process.log());
        serde_json::from_slice(&std::fs::read(&announced).ok()?).ok()
    });
    let url = bound["http"].as_str().unwrap();
    (
        process,
        Place::Tcp(url.strip_prefix("http://").unwrap().into()),
    )
}
