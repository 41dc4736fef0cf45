//! The play itself: one engine with small pools and a daemon beside it, killed on the way; and, fed
//! with the same prompts at their own pace, one engine that caches nothing and one whose device
//! cache is never full.

use std::path::Path;
use std::process::ExitStatus;
use std::time::Instant;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::children::{Daemon, Engine, wait_for};
use super::plan::{ANSWER_TOKENS, Line, Plan, Step, Transcript};
use super::progress::Progress;
use super::report::{Events, Report, Row};
use crate::cli::Client;
use crate::types::ModeChoice;

/// Tokens of a page in every engine here.
const PAGE: usize = 64;

/// The processes, for as long as they are needed.
#[derive(Debug)]
pub struct Stage {
    /// The daemon.
    pub daemon: Daemon,
    /// The engine beside it.
    pub engine: Engine,
    /// Caches nothing.
    oracle: Engine,
    /// Never evicts anything.
    unlimited: Engine,
}

/// An answer of an engine, as far as the demo reads it.
#[derive(Debug, Deserialize)]
struct Answer {
    output_ids: Vec<u32>,
    meta_info: Meta,
}

#[derive(Debug, Deserialize)]
struct Meta {
    prompt_tokens: u64,
    cached_tokens: u64,
    #[serde(default)]
    engram: Option<Restored>,
}

/// What the daemon did for a request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Restored {
    restored_tokens: u64,
    tier: Option<String>,
    restore_ms: Option<f64>,
}

/// A prompt for the two engines that are compared with.
#[derive(Clone, Debug)]
struct Question {
    line: Line,
    turn: u32,
    prompt: Vec<u32>,
}

/// Answers of one engine to all questions, in order: the tokens, and how many were cached.
type Answers = Vec<(Vec<u32>, u64)>;

// === impl Stage ===

impl Stage {
    /// Starts all four processes.
    pub async fn start(folder: &Path, plan: Plan, mode: ModeChoice) -> anyhow::Result<Stage> {
        let daemon = Daemon::new(folder)?;
        // Room for the longest prompt and little more, and for few states: the device forgets.
        let pages = plan.longest().div_ceil(PAGE) * 21 / 20 + 2;
        let small = format!(
            "--slots 6 --max-running 2 --pages {pages} --mode {mode} --engram {}",
            daemon.socket().display()
        );
        let split = |args: &str| args.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let enough = plan.turns as usize * 8 * plan.longest().div_ceil(PAGE);
        let unlimited = format!("--slots 4096 --pages {}", enough.min(60_000));
        let mut stage = Stage {
            engine: Engine::new(folder, "engine", &split(&small)),
            oracle: Engine::new(folder, "engine-no-cache", &split("--no-cache")),
            unlimited: Engine::new(folder, "engine-unlimited", &split(&unlimited)),
            daemon,
        };
        stage.daemon.start().await?;
        tokio::try_join!(
            stage.engine.start(),
            stage.oracle.start(),
            stage.unlimited.start()
        )?;
        stage.wait_attached().await?;
        Ok(stage)
    }

    /// Waits until the daemon or the engine beside it ends by itself: which, and how.
    pub async fn first_to_end(&mut self) -> anyhow::Result<(&'static str, ExitStatus)> {
        tokio::select! {
            status = self.daemon.ended() => Ok(("the daemon", status?)),
            status = self.engine.ended() => Ok(("the engine", status?)),
        }
    }

    /// Plays everything and sums it up. The two engines that are compared with end here.
    pub async fn play(&mut self, plan: Plan, progress: &mut Progress) -> anyhow::Result<Report> {
        let started = Instant::now();
        let mut transcript = Transcript::new(plan, vocabulary(self.engine.client()?).await?);
        let mut events = Events::default();
        let mut rows = Vec::new();
        let mut answers = Vec::new();
        let cold = Compared::start(self.oracle.client()?.clone());
        let unlimited = Compared::start(self.unlimited.client()?.clone());
        for step in plan.steps() {
            match step {
                Step::Turn(line, turn) => {
                    let prompt = transcript.ask(line, turn).to_vec();
                    let (row, answer) = self.turn(line, turn, &prompt).await?;
                    progress.turn(&row, plan);
                    transcript.answered(line, turn, &answer);
                    cold.ask(line, turn, &prompt)?;
                    unlimited.ask(line, turn, &prompt)?;
                    rows.push(row);
                    answers.push(answer);
                }
                Step::KillEngine => {
                    events.device_evictions += evictions(self.engine.client()?).await?;
                    progress.say("killing the engine (SIGKILL)");
                    self.engine.kill().await?;
                    events.engine_kills += 1;
                    self.engine.start().await?;
                    self.wait_attached().await?;
                }
                Step::KillDaemon => {
                    self.make_durable().await?;
                    progress.say("killing the daemon (SIGKILL)");
                    self.daemon.kill().await?;
                    events.daemon_kills += 1;
                    self.daemon.start().await?;
                    self.wait_attached().await?;
                }
            }
        }
        events.mode = self.mode().await?;
        events.device_evictions += evictions(self.engine.client()?).await?;
        progress.say("waiting for the engine without cache, which computes every prompt in full");
        let cold = cold.finish().await.context("the engine without cache")?;
        let unlimited = unlimited
            .finish()
            .await
            .context("the engine with an unlimited cache")?;
        for (((row, answer), cold), unlimited) in
            rows.iter_mut().zip(&answers).zip(&cold).zip(&unlimited)
        {
            row.identical = *answer == cold.0;
            row.unlimited_reused = unlimited.1;
        }
        self.oracle.kill().await?;
        self.unlimited.kill().await?;
        events.seconds = started.elapsed().as_secs_f64();
        Ok(Report::new(plan, rows, events))
    }

    /// One request to the engine under test; `identical` and `unlimited_reused` come later.
    async fn turn(&self, line: Line, turn: u32, prompt: &[u32]) -> anyhow::Result<(Row, Vec<u32>)> {
        let client = self.engine.client()?;
        let before = prefilled(client).await?;
        let Answer {
            output_ids,
            meta_info,
        } = generate(client, line, turn, prompt).await?;
        let after = prefilled(client).await?;
        let Meta {
            prompt_tokens,
            cached_tokens,
            engram,
        } = meta_info;
        let Restored {
            restored_tokens,
            tier,
            restore_ms,
        } = engram.unwrap_or_default();
        let from_daemon = restored_tokens > 0;
        let tier = match (from_daemon, cached_tokens) {
            (true, _) => tier,
            (false, 0) => None,
            (false, _) => Some("device".into()),
        };
        let mut distinct = output_ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let row = Row {
            turn,
            line,
            prompt: prompt_tokens,
            reused: cached_tokens,
            prefilled: after.saturating_sub(before),
            restored: restored_tokens,
            tier,
            restore_ms: restore_ms.filter(|_| from_daemon),
            unlimited_reused: 0,
            identical: false,
            distinct: distinct.len(),
        };
        Ok((row, output_ids))
    }

    /// Waits until both sides have the same session, and its channel is open: after a death either
    /// may still see the session of before.
    async fn wait_attached(&self) -> anyhow::Result<()> {
        let (daemon, engine) = (self.daemon.client()?, self.engine.client()?);
        wait_for("the engine to attach", || async {
            let info = engine.get("/server_info").await?;
            let session = info.pointer("/memory/session").and_then(Value::as_str);
            let Some(session) = session else {
                return Ok(None);
            };
            let answer = daemon.get("/v1/workers").await?;
            let workers = answer.get("workers").and_then(Value::as_array);
            let same = |worker: &Value| {
                let theirs = worker
                    .get("session")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                theirs.replace('-', "") == session && worker.get("bound") == Some(&json!(true))
            };
            Ok(workers
                .is_some_and(|workers| workers.iter().any(same))
                .then_some(()))
        })
        .await
    }

    /// How the engine's bytes move, as the daemon says.
    async fn mode(&self) -> anyhow::Result<String> {
        let answer = self.daemon.client()?.get("/v1/workers").await?;
        let mode = answer.pointer("/workers/0/mode").and_then(Value::as_str);
        Ok(mode.context("no worker is attached")?.to_owned())
    }

    /// Asks for the last turn to be durable, and waits until nothing is left to be written.
    async fn make_durable(&self) -> anyhow::Result<()> {
        let client = self.daemon.client()?;
        let save = json!({ "conversation_id": Line::Main.session(), "durable": true });
        let saved = client.post("/save_snapshot", &save).await?;
        if saved.get("durable") != Some(&Value::Bool(true)) {
            bail!("the daemon did not make the last turn durable: {saved}");
        }
        wait_for("everything to be on disk", || async {
            let status = client.get("/v1/status").await?;
            Ok((status.get("pending_writes").and_then(Value::as_u64) == Some(0)).then_some(()))
        })
        .await
    }
}

/// An engine that is fed with questions in the background.
struct Compared {
    questions: mpsc::UnboundedSender<Question>,
    answers: JoinHandle<anyhow::Result<Answers>>,
}

// === impl Compared ===

impl Compared {
    fn start(client: Client) -> Compared {
        // As many questions as the plan has: that bounds it.
        let (questions, mut asked) = mpsc::unbounded_channel::<Question>();
        let answers = tokio::spawn(async move {
            let mut answers = Answers::new();
            while let Some(Question { line, turn, prompt }) = asked.recv().await {
                let answer = generate(&client, line, turn, &prompt).await?;
                answers.push((answer.output_ids, answer.meta_info.cached_tokens));
            }
            Ok(answers)
        });
        Compared { questions, answers }
    }

    fn ask(&self, line: Line, turn: u32, prompt: &[u32]) -> anyhow::Result<()> {
        let question = Question {
            line,
            turn,
            prompt: prompt.to_vec(),
        };
        self.questions
            .send(question)
            .ok()
            .context("an engine to compare with gave up")
    }

    async fn finish(self) -> anyhow::Result<Answers> {
        drop(self.questions);
        self.answers.await?
    }
}

async fn generate(
    client: &Client,
    line: Line,
    turn: u32,
    prompt: &[u32],
) -> anyhow::Result<Answer> {
    let request = json!({
        "input_ids": prompt,
        "sampling_params": { "max_new_tokens": ANSWER_TOKENS, "temperature": 0.0 },
        "rid": format!("{}-{turn}", line.as_str()),
        "session_id": line.session(),
    });
    let answer = client.post("/generate", &request).await?;
    let answer: Answer = serde_json::from_value(answer).context("reading the engine's answer")?;
    if answer.output_ids.len() != ANSWER_TOKENS {
        bail!(
            "turn {turn}: an answer of {} tokens",
            answer.output_ids.len()
        );
    }
    Ok(answer)
}

/// Sizes of the model's vocabulary.
async fn vocabulary(client: &Client) -> anyhow::Result<u32> {
    let info = client.get("/server_info").await?;
    let size = info.pointer("/model/vocab_size").and_then(Value::as_u64);
    u32::try_from(size.context("the engine does not say its vocabulary")?).context("vocabulary")
}

/// Tokens that the engine computed of prompts since it started, by its own count.
async fn prefilled(client: &Client) -> anyhow::Result<u64> {
    let info = client.get("/server_info").await?;
    let count = info
        .pointer("/counts/prefilled_tokens")
        .and_then(Value::as_u64);
    count.context("the engine does not count prefilled tokens")
}

/// What the engine's device cache evicted since it started.
async fn evictions(client: &Client) -> anyhow::Result<u64> {
    let info = client.get("/server_info").await?;
    let evicted = info
        .get("evicted")
        .context("the engine does not count evictions")?;
    Ok(match evicted {
        Value::Object(kinds) => kinds.values().filter_map(Value::as_u64).sum(),
        other => other.as_u64().unwrap_or(0),
    })
}
