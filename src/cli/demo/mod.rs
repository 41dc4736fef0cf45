//! `engram demo`: see it work, without GPU or server.
//!
//! # What
//! A conversation on the embedded engine whose device pools are too small for it, with a daemon
//! beside it. The engine is killed after half of the turns, the daemon after most, and the last
//! turns branch off from an early one. Every answer is compared with that of an engine that caches
//! nothing, and reuse with that of an engine which never has to forget.
//!
//! # Cancellation
//! Ctrl-C or SIGTERM kills every child and removes the folder.
//!
//! # Errors
//! Exit code 1 when anything is not as it should be, with the reason, and the logs when a process
//! failed.

mod children;
mod folder;
mod plan;
mod play;
mod progress;
mod report;

use std::cell::Cell;
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};

use folder::Folder;
use plan::{Line, Plan, TURNS_MAX, TURNS_MIN};
use play::Stage;
use progress::Progress;

use super::why::why;
use crate::types::ModeChoice;

/// See it work: a conversation that survives the death of its engine and of the daemon.
///
/// Starts a daemon and engines as child processes in a temporary folder, plays a conversation with
/// a shared system prompt and a branch, kills the engine and later the daemon on the way, and
/// compares every answer with an engine that has no cache. Exits 0 only if every answer is
/// identical and enough was reused.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Turns of the conversation. Below 50 the two ratios are shown but not judged.
    #[arg(
        long,
        default_value_t = 50,
        value_parser = clap::value_parser!(u32).range(i64::from(TURNS_MIN)..=i64::from(TURNS_MAX))
    )]
    turns: u32,
    /// Print exactly one JSON object on standard output.
    #[arg(long)]
    json: bool,
    /// Who copies between the engine's ring and memory that the daemon reaches: `ipc` (the daemon),
    /// `engine` (the engine itself), or `auto` (the daemon chooses).
    #[arg(long, value_name = "MODE", default_value_t)]
    mode: ModeChoice,
    /// Leave daemon and engine running afterwards, until Ctrl-C, to try the REST surface on them.
    #[arg(long)]
    keep: bool,
}

/// Exit code after an interrupt.
const EXIT_INTERRUPTED: u8 = 130;

/// Runs the demo.
pub fn run(args: Args) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let outcome = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            // An interrupt after the play is how `--keep` ends, and changes no verdict.
            let verdict = Cell::new(EXIT_INTERRUPTED);
            tokio::select! {
                outcome = demo(args, &verdict) => outcome?,
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            Ok(ExitCode::from(verdict.get()))
        })
    });
    outcome.unwrap_or_else(|error| {
        eprintln!("engram: the demo failed: {}", why(&error));
        ExitCode::FAILURE
    })
}

async fn demo(args: Args, verdict: &Cell<u8>) -> anyhow::Result<()> {
    let Args {
        turns,
        json,
        mode,
        keep,
    } = args;
    let plan = Plan::new(turns);
    // Declared first, so that it goes last: children write in it.
    let folder = Folder::new()?;
    let mut progress = Progress::new();
    let played = async {
        progress.say("starting a daemon and three engines");
        let mut stage = Stage::start(folder.path(), plan, mode).await?;
        let report = stage.play(plan, &mut progress).await?;
        Ok((stage, report))
    };
    let played: anyhow::Result<_> = played.await;
    progress.end_line();
    let (mut stage, report) = match played {
        Ok(played) => played,
        Err(error) => {
            eprint!("{}", folder.logs());
            return Err(error);
        }
    };
    match json {
        true => {
            println!("{}", serde_json::to_string(&report)?);
            for failure in &report.failures {
                eprintln!("engram: {failure}");
            }
        }
        false => print!("{}", report.render()),
    }
    verdict.set(u8::from(!report.ok));
    if keep {
        eprint!("{}", how_to_try(&stage)?);
        let (who, status) = stage.first_to_end().await?;
        eprint!("{}", folder.logs());
        verdict.set(1);
        anyhow::bail!("{who} ended: {status}");
    }
    Ok(())
}

/// What to type while daemon and engine run.
fn how_to_try(stage: &Stage) -> anyhow::Result<String> {
    let binary = std::env::current_exe()?;
    let engram = quoted(&binary.display().to_string());
    let daemon = stage.daemon.url();
    let engine = stage.engine.url();
    let session = Line::Main.session();
    Ok(format!(
        "
The daemon and the engine run until Ctrl-C. Try:

  export ENGRAM_URL={daemon}
  {engram} ls
  {engram} ls {session}
  {engram} save {session} --branch mine
  {engram} restore {session} --turn 20
  curl -s {daemon}/v1/tiers
  curl -s {daemon}/metrics
  curl -s {daemon}/get_snapshot_info -H 'Content-Type: application/json' \\
      -d '{{\"conversation_id\": \"{session}\", \"turn_number\": 20}}'
  curl -s {engine}/generate -H 'Content-Type: application/json' \\
      -d '{{\"input_ids\": [1, 2, 3], \"sampling_params\": {{\"max_new_tokens\": 8}}}}'

"
    ))
}

/// A word that a shell takes as it is.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    match word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_safe_to_paste() {
        assert_eq!(quoted("/opt/a-b/engram"), "/opt/a-b/engram");
        assert_eq!(quoted("/it's mine"), "'/it'\\''s mine'");
    }
}
