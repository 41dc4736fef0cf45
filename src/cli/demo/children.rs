//! The processes that the demo plays on: one daemon and three engines, all of this binary, in one
//! temporary folder that goes when they do.
//!
//! # Cancellation
//! Dropping a [`Child`] kills it; dropping the [`Folder`] removes it. A child also ends when this
//! process does, however that ends: its standard input is a pipe that only we hold.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;
use tokio::process::{ChildStdin, Command};
use tokio::time::Instant;

use crate::cli::Client;

/// How long a child may take to start: a slow machine under load is still faster.
const START: Duration = Duration::from_secs(60);
/// How often is looked.
const POLL: Duration = Duration::from_millis(20);

/// A running process.
#[derive(Debug)]
pub struct Child {
    process: tokio::process::Child,
    _lifeline: Option<ChildStdin>,
}

/// How the daemon is started, again and again in the same folder.
#[derive(Debug)]
pub struct Daemon {
    folder: PathBuf,
    child: Option<Child>,
    client: Option<Client>,
    url: String,
}

/// How an engine is started.
#[derive(Debug)]
pub struct Engine {
    name: &'static str,
    folder: PathBuf,
    args: Vec<String>,
    child: Option<Child>,
    client: Option<Client>,
    url: String,
}

// === impl Child ===

impl Child {
    fn start(folder: &Path, name: &str, args: &[String]) -> anyhow::Result<Child> {
        let log = folder.join(format!("{name}.log"));
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(log)?;
        let mut process = Command::new(std::env::current_exe()?)
            .arg("--lifeline")
            .args(args)
            .env_remove("ENGRAM_CONFIG")
            .env_remove("ENGRAM_LOG")
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            // An interrupt from the terminal is for us; we end them in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let lifeline = process.stdin.take();
        Ok(Child {
            process,
            _lifeline: lifeline,
        })
    }

    /// SIGKILL, and waits until it is gone.
    async fn kill(mut self) -> anyhow::Result<()> {
        self.process.kill().await.context("killing a child")
    }

    /// Waits until it ends by itself.
    async fn ended(&mut self) -> std::io::Result<ExitStatus> {
        self.process.wait().await
    }

    /// Waits for the file in which it says where it listens.
    async fn announced(&mut self, file: &Path, name: &str) -> anyhow::Result<Value> {
        let deadline = Instant::now() + START;
        loop {
            if let Ok(bytes) = tokio::fs::read(file).await {
                return Ok(serde_json::from_slice(&bytes)?);
            }
            if let Some(status) = self.process.try_wait()? {
                bail!("{name} ended early: {status}");
            }
            if Instant::now() > deadline {
                bail!("{name} did not start within {START:?}");
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

// === impl Daemon ===

impl Daemon {
    /// A daemon in this folder, not started.
    pub fn new(folder: &Path) -> anyhow::Result<Daemon> {
        let text = daemon_config(folder)?;
        std::fs::write(folder.join("engram.toml"), text)?;
        Ok(Daemon {
            folder: folder.into(),
            child: None,
            client: None,
            url: String::new(),
        })
    }

    /// Starts it and waits until it is ready.
    pub async fn start(&mut self) -> anyhow::Result<()> {
        let announced = self.folder.join("daemon.json");
        tokio::fs::remove_file(&announced).await.ok();
        let path = |name: &str| self.folder.join(name).display().to_string();
        let args = [
            "serve",
            "--config",
            &path("engram.toml"),
            "--announce",
            &path("daemon.json"),
        ];
        let mut child = Child::start(&self.folder, "daemon", &args.map(str::to_owned))?;
        let bound = child.announced(&announced, "the daemon").await?;
        let url = bound
            .get("rest")
            .and_then(Value::as_str)
            .context("the daemon has no address")?;
        let client = Client::new(url, None, START)?;
        wait_for("the daemon to be ready", || async {
            Ok(client.get("/readyz").await.is_ok().then_some(()))
        })
        .await?;
        self.url = url.to_owned();
        self.client = Some(client);
        self.child = Some(child);
        Ok(())
    }

    /// SIGKILL.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        self.child
            .take()
            .context("the daemon does not run")?
            .kill()
            .await
    }

    /// Its REST surface.
    pub fn client(&self) -> anyhow::Result<&Client> {
        self.client.as_ref().context("the daemon does not run")
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Waits until it ends by itself. Cancel safe.
    pub async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let child = self.child.as_mut().context("the daemon does not run")?;
        Ok(child.ended().await?)
    }

    /// The socket on which engines attach.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("grpc.sock")
    }
}

// === impl Engine ===

impl Engine {
    /// An engine that is started with these arguments, not started.
    pub fn new(folder: &Path, name: &'static str, args: &[String]) -> Engine {
        let announced = folder.join(format!("{name}.json")).display().to_string();
        let common = [
            "engine",
            "--listen",
            "127.0.0.1:0",
            "--announce",
            &announced,
        ]
        .map(str::to_owned);
        let args = common.iter().chain(args).cloned().collect();
        Engine {
            name,
            folder: folder.into(),
            args,
            child: None,
            client: None,
            url: String::new(),
        }
    }

    /// Starts it and waits until it answers.
    pub async fn start(&mut self) -> anyhow::Result<()> {
        let announced = self.folder.join(format!("{}.json", self.name));
        tokio::fs::remove_file(&announced).await.ok();
        let mut child = Child::start(&self.folder, self.name, &self.args)?;
        let bound = child.announced(&announced, self.name).await?;
        let url = bound
            .get("http")
            .and_then(Value::as_str)
            .context("the engine has no address")?;
        let client = Client::new(url, None, START * 5)?;
        client.get("/health").await?;
        self.url = url.to_owned();
        self.client = Some(client);
        self.child = Some(child);
        Ok(())
    }

    /// Waits until it ends by itself. Cancel safe.
    pub async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let child = self.child.as_mut().context("the engine does not run")?;
        Ok(child.ended().await?)
    }

    /// SIGKILL.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        self.child
            .take()
            .context("the engine does not run")?
            .kill()
            .await
    }

    /// Its HTTP surface.
    pub fn client(&self) -> anyhow::Result<&Client> {
        self.client.as_ref().context("the engine does not run")
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// Polls until `probe` gives something.
pub async fn wait_for<T, F>(what: &str, mut probe: impl FnMut() -> F) -> anyhow::Result<T>
where
    F: Future<Output = anyhow::Result<Option<T>>>,
{
    let deadline = Instant::now() + START;
    loop {
        if let Some(found) = probe().await? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("waited {START:?} in vain for {what}");
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Everything in the folder, small budgets, and nothing read ahead, so that what comes from disk
/// after a restart is seen to come from there.
fn daemon_config(folder: &Path) -> anyhow::Result<String> {
    let path = |name: &str| {
        let path = folder.join(name);
        path.to_str()
            .map(toml::Value::from)
            .context("the temporary folder's name is not UTF-8")
    };
    let text = |text: &str| toml::Value::from(text);
    let sections = [
        (
            "rest",
            vec![
                ("listen", text("127.0.0.1:0")),
                ("socket", path("rest.sock")?),
            ],
        ),
        ("grpc", vec![("socket", path("grpc.sock")?)]),
        (
            "service",
            vec![("fd_socket", path("fd.sock")?), ("preload", text("0 B"))],
        ),
        (
            "store",
            vec![
                ("ram", text("128 MiB")),
                (
                    "disk",
                    toml::Table::from_iter([
                        ("path".to_owned(), path("data")?),
                        ("budget".to_owned(), text("512 MiB")),
                        ("min_free".to_owned(), text("0 B")),
                    ])
                    .into(),
                ),
            ],
        ),
    ];
    let table: toml::Table = sections
        .into_iter()
        .map(|(name, knobs)| {
            let knobs = knobs
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value));
            (name.to_owned(), toml::Value::Table(knobs.collect()))
        })
        .collect();
    Ok(table.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_configuration_is_valid() {
        let text = daemon_config(Path::new("/tmp/x")).unwrap();
        let config: crate::config::Config = toml::from_str(&text).unwrap();
        config.validate().unwrap();
    }
}
