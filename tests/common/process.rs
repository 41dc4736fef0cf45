//! A child process with a log file, killed on drop.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::wait_within;

/// A running process of our binary.
pub struct Process {
    name: String,
    child: Child,
    /// Its standard input: when this test is killed, its end tells the child to end.
    _lifeline: Option<ChildStdin>,
    log: PathBuf,
    status: Option<ExitStatus>,
}

/// Our binary.
pub fn engram() -> Command {
    Command::new(env!("CARGO_BIN_EXE_engram"))
}

/// Runs our binary to its end: exit code, standard output, standard error.
pub fn run(args: &[&str]) -> (i32, String, String) {
    run_within(super::PATIENCE, args, &[])
}

/// The same for what takes longer, with variables of the environment.
pub fn run_within(
    patience: Duration,
    args: &[&str],
    env: &[(&str, &str)],
) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| File::create(folder.path().join(name)).unwrap();
    let child = engram()
        .args(args)
        .env_remove("ENGRAM_URL")
        .env_remove("ENGRAM_TOKEN")
        .env_remove("ENGRAM_CONFIG")
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .stdout(file("stdout"))
        .stderr(file("stderr"))
        .spawn()
        .unwrap();
    let log = folder.path().join("stderr");
    let name = format!("engram {}", args.join(" "));
    let status = Process {
        name,
        child,
        _lifeline: None,
        log,
        status: None,
    }
    .wait_within(patience);
    let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    (status.code().unwrap_or(-1), text("stdout"), text("stderr"))
}

impl Process {
    /// Starts our binary; what it prints is appended to `log`.
    pub fn start<S: AsRef<std::ffi::OsStr>>(name: &str, args: &[S], log: &Path) -> Process {
        Process::start_with(name, args, &[], log)
    }

    /// The same with variables of the environment.
    pub fn start_with<S: AsRef<std::ffi::OsStr>>(
        name: &str,
        args: &[S],
        env: &[(&str, &str)],
        log: &Path,
    ) -> Process {
        let out = File::options().create(true).append(true).open(log).unwrap();
        let mut child = engram()
            .arg("--lifeline")
            .args(args)
            .env_remove("ENGRAM_LOG")
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(out.try_clone().unwrap())
            .stderr(out)
            .spawn()
            .unwrap();
        let lifeline = child.stdin.take();
        Process {
            name: name.into(),
            child,
            _lifeline: lifeline,
            log: log.into(),
            status: None,
        }
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id().try_into().unwrap()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().ok();
        self.status = self.child.wait().ok();
    }

    /// SIGTERM, and waits until it ended by itself.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait()
    }

    /// SIGSTOP, and waits until it stands still: it does not run until [`Process::resume`].
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
        let pid = Pid::from_raw(self.pid());
        let status = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Waits until it ended.
    pub fn wait(&mut self) -> ExitStatus {
        self.wait_within(super::PATIENCE)
    }

    /// Waits at most so long until it ended.
    pub fn wait_within(&mut self, patience: Duration) -> ExitStatus {
        let name = format!("the end of {}", self.name);
        let status = wait_within(patience, &name, || self.child.try_wait().unwrap());
        self.status = Some(status);
        status
    }

    /// Whether it still runs.
    pub fn alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// What it printed so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(40)..].join("\n");
            eprintln!(
                "--- last lines of {} ({})\n{tail}",
                self.name,
                self.log.display()
            );
        }
    }
}
