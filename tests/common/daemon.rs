//! A daemon in a folder of its own.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use serde_json::Value;

use super::http::{Answer, Place};
use super::process::Process;
use super::wait_for;

/// A running daemon. Its folder outlives a kill, so that it can be started again.
pub struct Daemon {
    // Before the folder, whose log it shows when a test fails.
    process: Process,
    place: Place,
    folder: tempfile::TempDir,
}

/// Changes of a configuration: `"section.key"` to a value.
pub type Knobs<'a> = &'a [(&'a str, toml::Value)];

impl Daemon {
    /// Starts one and waits until it is ready. `knobs` change the configuration, which else has
    /// sockets and disk in the folder, 64 MiB of RAM tier and 1 GiB of disk tier.
    pub fn start(knobs: Knobs) -> Daemon {
        Daemon::start_in(&std::env::temp_dir(), knobs)
    }

    /// The same with its folder in this one.
    pub fn start_in(parent: &Path, knobs: Knobs) -> Daemon {
        let folder = tempfile::Builder::new()
            .prefix("engram-")
            .tempdir_in(parent)
            .unwrap();
        write_config(folder.path(), knobs);
        let (process, place) = spawn(folder.path(), &[]);
        let daemon = Daemon {
            folder,
            process,
            place,
        };
        daemon.wait_ready();
        daemon
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The folder of its disk tier.
    pub fn data(&self) -> PathBuf {
        self.folder().join("data")
    }

    /// The Unix socket on which workers attach.
    pub fn grpc_socket(&self) -> PathBuf {
        self.folder().join("grpc.sock")
    }

    /// The Unix socket of the REST surface.
    pub fn rest_socket(&self) -> PathBuf {
        self.folder().join("rest.sock")
    }

    /// Where the REST surface listens on TCP.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// `http://HOST:PORT`.
    pub fn url(&self) -> String {
        match &self.place {
            Place::Tcp(address) => format!("http://{address}"),
            Place::Unix(path) => format!("unix:{}", path.display()),
        }
    }

    /// GET over TCP.
    pub fn get(&self, path: &str) -> Answer {
        self.place.get(path)
    }

    /// Waits until everything visible is on disk.
    pub fn all_durable(&self) {
        wait_for("everything on disk", || {
            (self.get("/v1/status").json()["pending_writes"] == 0).then_some(())
        });
    }

    /// POST of JSON over TCP.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.place.post(path, body)
    }

    /// A sample of `/metrics`: the value of the line that starts with `name` and its labels, which
    /// must be written as they are there. Absent: 0.
    pub fn metric(&self, sample: &str) -> f64 {
        let answer = self.get("/metrics");
        let line = answer
            .text()
            .lines()
            .find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// SIGTERM, and waits for its end.
    pub fn stop(&mut self) -> ExitStatus {
        self.process.stop()
    }

    /// Starts it again in the same folder, and waits until it is ready.
    pub fn restart(&mut self) {
        self.restart_in(&[]);
    }

    /// Starts it again with these variables of the environment.
    pub fn restart_in(&mut self, env: &[(&str, &str)]) {
        self.process.kill();
        (self.process, self.place) = spawn(self.folder.path(), env);
        self.wait_ready();
    }

    /// Starts it again and kills it after a moment, ready or not.
    pub fn die_starting(&mut self, after: Duration) {
        let config = self.folder().join("engram.toml");
        let args = ["serve".as_ref(), "--config".as_ref(), config.as_os_str()];
        let log = self.folder().join("daemon.log");
        let mut process = Process::start("the daemon", &args, &log);
        std::thread::sleep(after);
        process.kill();
    }

    /// Starts it again with other knobs.
    pub fn restart_with(&mut self, knobs: Knobs) {
        write_config(self.folder.path(), knobs);
        self.restart();
    }

    fn wait_ready(&self) {
        wait_for("a ready daemon", || {
            (self.get("/readyz").status == 200).then_some(())
        });
    }
}

/// The text of a configuration in this folder.
pub fn config(folder: &Path, knobs: Knobs) -> String {
    let path = |name: &str| toml::Value::from(folder.join(name).to_str().unwrap());
    let mut config = toml::Table::new();
    let defaults = [
        ("rest.listen", toml::Value::from("127.0.0.1:0")),
        ("rest.socket", path("rest.sock")),
        ("grpc.socket", path("grpc.sock")),
        ("service.fd_socket", path("fd.sock")),
        ("store.ram", toml::Value::from("64 MiB")),
        ("store.disk.path", path("data")),
        ("store.disk.budget", toml::Value::from("1 GiB")),
        ("store.disk.min_free", toml::Value::from("16 MiB")),
        ("log.filter", toml::Value::from("info,engram=debug")),
    ];
    for (name, value) in defaults.iter().chain(knobs) {
        let mut parts: Vec<_> = name.split('.').collect();
        let key = parts.pop().unwrap();
        let mut table = &mut config;
        for part in parts {
            let inner = table
                .entry(part)
                .or_insert_with(|| toml::Table::new().into());
            table = inner.as_table_mut().unwrap();
        }
        table.insert(key.into(), value.clone());
    }
    config.to_string()
}

fn write_config(folder: &Path, knobs: Knobs) {
    std::fs::write(folder.join("engram.toml"), config(folder, knobs)).unwrap();
}

fn spawn(folder: &Path, env: &[(&str, &str)]) -> (Process, Place) {
    let announced = folder.join("addresses.json");
    std::fs::remove_file(&announced).ok();
    let config = folder.join("engram.toml");
    let args = ["serve".as_ref(), "--config".as_ref(), config.as_os_str()];
    let args = [&args[..], &["--announce".as_ref(), announced.as_os_str()]].concat();
    let mut process = Process::start_with("the daemon", &args, env, &folder.join("daemon.log"));
    let bound: Value = wait_for("the daemon's addresses", || {
        assert!(process.alive(), "the daemon ended: {}", process.log());
        serde_json::from_slice(&std::fs::read(&announced).ok()?).ok()
    });
    let place = match bound["rest"].as_str() {
        Some(url) => Place::Tcp(url.strip_prefix("http://").unwrap().into()),
        None => Place::Unix(folder.join("rest.sock")),
    };
    (process, place)
}
