//! What was measured, and whether it is good enough.

use std::fmt::Write as _;

use serde::Serialize;

use super::plan::{Line, Plan};
use crate::cli::table::Table;

/// Least part of all prompt tokens that must not be prefilled.
pub const TOKEN_REDUCTION: f64 = 0.90;
/// Least part of what an unlimited device cache reuses that must be reused.
pub const REUSE_EFFICIENCY: f64 = 0.99;
/// A shorter conversation has too short prompts for both: the first one, and the state of the moment
/// at which the engine is killed, weigh too much.
const JUDGED_FROM: u32 = 50;

/// One turn, as the engine measured it.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its number on its conversation.
    pub turn: u32,
    /// `main`, `branch` or `second`.
    #[serde(serialize_with = "line_name")]
    pub line: Line,
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Those that were not prefilled.
    pub reused: u64,
    /// Those that were, by the engine's own count.
    pub prefilled: u64,
    /// Tokens that came from the daemon.
    pub restored: u64,
    /// Where the deepest reused state was: `device`, or the daemon's tier it came from.
    pub tier: Option<String>,
    /// Time that the restore took.
    pub restore_ms: Option<f64>,
    /// What an engine with an unlimited device cache reused.
    pub unlimited_reused: u64,
    /// The answer is that of an engine without any cache.
    pub identical: bool,
    /// Distinct tokens of the answer.
    pub distinct: usize,
}

/// Everything that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Turns of the conversation, both lines. The sums below are over these.
    pub turns: u32,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Those that were prefilled.
    pub prefilled_tokens: u64,
    /// Those that were not.
    pub reused_tokens: u64,
    /// Tokens that came from the daemon.
    pub restored_tokens: u64,
    /// Turns whose answer is that of an engine without any cache.
    pub identical_turns: u32,
    /// How bytes moved between the engine's ring and the daemon: `ipc` or `engine`.
    pub mode: String,
    /// Times the engine was killed.
    pub engine_kills: u32,
    /// Times the daemon was killed.
    pub daemon_kills: u32,
    /// Part of all prompt tokens that was not prefilled.
    pub token_reduction: f64,
    /// Reused tokens of all turns, those of the second conversation too, over what an engine with an
    /// unlimited device cache and no kills reused of the same prompts.
    pub reuse_efficiency: f64,
    /// The second conversation.
    pub second: Second,
    /// States that the small device pools evicted.
    pub device_evictions: u64,
    /// Time of the whole play.
    pub seconds: f64,
    /// Everything is as it should be.
    pub ok: bool,
    /// What is not.
    pub failures: Vec<String>,
    /// Every turn.
    pub rows: Vec<Row>,
}

/// Sums of the second conversation.
#[derive(Clone, Debug, Serialize)]
pub struct Second {
    /// Its turns.
    pub turns: u32,
    /// Turns whose answer is that of an engine without any cache.
    pub identical_turns: u32,
    /// Tokens of its prompts.
    pub prompt_tokens: u64,
    /// Those that were not prefilled.
    pub reused_tokens: u64,
}

/// What happened beside the turns.
#[derive(Clone, Debug, Default)]
pub struct Events {
    /// How bytes moved, as the daemon says.
    pub mode: String,
    /// Times the engine was killed.
    pub engine_kills: u32,
    /// Times the daemon was killed.
    pub daemon_kills: u32,
    /// States and KV pages that the small device pools evicted.
    pub device_evictions: u64,
    /// Time of the whole play.
    pub seconds: f64,
}

fn line_name<S: serde::Serializer>(line: &Line, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(line.as_str())
}

// === impl Report ===

impl Report {
    /// Sums the rows up and judges them.
    pub fn new(plan: Plan, rows: Vec<Row>, events: Events) -> Report {
        let Events {
            mode,
            engine_kills,
            daemon_kills,
            device_evictions,
            seconds,
        } = events;
        let (side, main): (Vec<&Row>, Vec<&Row>) =
            rows.iter().partition(|row| row.line == Line::Side);
        let sum = |rows: &[&Row], field: fn(&Row) -> u64| rows.iter().map(|row| field(row)).sum();
        let identical = |rows: &[&Row]| rows.iter().filter(|row| row.identical).count() as u32;
        let prompt_tokens: u64 = sum(&main, |row| row.prompt);
        let reused_tokens: u64 = sum(&main, |row| row.reused);
        let reused_in_all: u64 = rows.iter().map(|row| row.reused).sum();
        let unlimited: u64 = rows.iter().map(|row| row.unlimited_reused).sum();
        let ratio = |part: u64, whole: u64| {
            if whole == 0 {
                0.0
            } else {
                part as f64 / whole as f64
            }
        };
        let mut report = Report {
            turns: main.len() as u32,
            prompt_tokens,
            prefilled_tokens: sum(&main, |row| row.prefilled),
            reused_tokens,
            restored_tokens: sum(&main, |row| row.restored),
            identical_turns: identical(&main),
            mode,
            engine_kills,
            daemon_kills,
            token_reduction: ratio(reused_tokens, prompt_tokens),
            reuse_efficiency: ratio(reused_in_all, unlimited),
            second: Second {
                turns: side.len() as u32,
                identical_turns: identical(&side),
                prompt_tokens: sum(&side, |row| row.prompt),
                reused_tokens: sum(&side, |row| row.reused),
            },
            device_evictions,
            seconds,
            ok: false,
            failures: Vec::new(),
            rows: Vec::new(),
        };
        report.rows = rows;
        report.failures = report.judge(plan);
        report.ok = report.failures.is_empty();
        report
    }

    fn judge(&self, plan: Plan) -> Vec<String> {
        let mut failures = Vec::new();
        for row in &self.rows {
            let name = format!("turn {} ({})", row.turn, row.line.as_str());
            if !row.identical {
                failures.push(format!(
                    "{name}: the answer differs from that of a cold run"
                ));
            }
            if row.unlimited_reused > 0 && row.reused == 0 {
                failures.push(format!("{name}: nothing was reused"));
            }
            if row.reused + row.prefilled != row.prompt {
                failures.push(format!(
                    "{name}: {} reused and {} prefilled tokens are not the {} of the prompt",
                    row.reused, row.prefilled, row.prompt
                ));
            }
        }
        if self.turns != plan.turns {
            failures.push(format!(
                "{} of {} turns were played",
                self.turns, plan.turns
            ));
        }
        if (self.engine_kills, self.daemon_kills) != (1, 1) {
            failures.push("the engine and the daemon were not each killed once".into());
        }
        if plan.turns >= JUDGED_FROM && self.token_reduction < TOKEN_REDUCTION {
            failures.push(format!(
                "token_reduction is {:.4}, less than {TOKEN_REDUCTION}",
                self.token_reduction
            ));
        }
        if plan.turns >= JUDGED_FROM && self.reuse_efficiency < REUSE_EFFICIENCY {
            failures.push(format!(
                "reuse_efficiency is {:.4}, less than {REUSE_EFFICIENCY}",
                self.reuse_efficiency
            ));
        }
        failures
    }

    /// The table and the sums, for people.
    pub fn render(&self) -> String {
        let head = [
            "TURN",
            "LINE",
            ">PROMPT",
            ">REUSED",
            ">PREFILLED",
            "TIER",
            ">RESTORE MS",
            "IDENTICAL",
        ];
        let mut table = Table::new(&head);
        for row in &self.rows {
            table.row([
                row.turn.to_string(),
                row.line.as_str().into(),
                row.prompt.to_string(),
                row.reused.to_string(),
                row.prefilled.to_string(),
                row.tier.clone().unwrap_or("-".into()),
                row.restore_ms.map_or("-".into(), |ms| format!("{ms:.1}")),
                if row.identical { "yes" } else { "NO" }.into(),
            ]);
        }
        let mut text = table.render();
        text.push('\n');
        let mut line = |name: &str, value: String| {
            // Writing to a string does not fail.
            writeln!(text, "{name:<26} {value}").ok();
        };
        line(
            "identical answers",
            format!("{} of {}", self.identical_turns, self.turns),
        );
        line("prompt tokens", self.prompt_tokens.to_string());
        line("  prefilled", self.prefilled_tokens.to_string());
        line("  reused", self.reused_tokens.to_string());
        line(
            "  of these from the daemon",
            self.restored_tokens.to_string(),
        );
        line(
            "token reduction",
            format!("{:.2} %", self.token_reduction * 100.0),
        );
        line(
            "reuse efficiency",
            format!(
                "{:.2} % of an unlimited device cache",
                self.reuse_efficiency * 100.0
            ),
        );
        let Second {
            turns,
            identical_turns,
            prompt_tokens,
            reused_tokens,
        } = self.second;
        line(
            "second conversation",
            format!(
                "{identical_turns} of {turns} identical, {reused_tokens} of {prompt_tokens} \
                 tokens reused"
            ),
        );
        line(
            "kills (SIGKILL)",
            format!("engine {}, daemon {}", self.engine_kills, self.daemon_kills),
        );
        line("device evictions", self.device_evictions.to_string());
        line("time", format!("{:.1} s", self.seconds));
        for failure in &self.failures {
            line("FAILED", failure.clone());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(plan: Plan) -> Vec<Row> {
        let row = |turn, line| Row {
            turn,
            line,
            prompt: 2000,
            reused: 1900,
            prefilled: 100,
            restored: 0,
            tier: Some("device".into()),
            restore_ms: None,
            unlimited_reused: 1900,
            identical: true,
            distinct: 40,
        };
        let main = (1..=plan.turns).map(|turn| row(turn, plan.line(turn)));
        main.chain((1..=3).map(|turn| row(turn, Line::Side)))
            .collect()
    }

    fn judged(change: impl FnOnce(&mut Vec<Row>, &mut Events)) -> Report {
        let plan = Plan::new(50);
        let mut rows = rows(plan);
        let mut events = Events {
            engine_kills: 1,
            daemon_kills: 1,
            ..Events::default()
        };
        change(&mut rows, &mut events);
        Report::new(plan, rows, events)
    }

    #[test]
    fn a_good_run_is_good() {
        let report = judged(|_, _| {});
        assert!(report.ok, "{:?}", report.failures);
        assert_eq!((report.turns, report.identical_turns), (50, 50));
        assert_eq!(report.prompt_tokens, 100_000);
        assert_eq!(report.reused_tokens + report.prefilled_tokens, 100_000);
        assert_eq!(report.reuse_efficiency, 1.0);
        let json = serde_json::to_value(&report).unwrap();
        for key in [
            "turns",
            "prompt_tokens",
            "prefilled_tokens",
            "reused_tokens",
            "identical_turns",
            "engine_kills",
            "daemon_kills",
            "token_reduction",
            "reuse_efficiency",
            "rows",
        ] {
            assert!(!json[key].is_null(), "{key}");
        }
        assert_eq!(json["rows"][0]["line"], "main");
    }

    #[test]
    fn each_shortcoming_is_told() {
        let told = |change: fn(&mut Vec<Row>, &mut Events), word: &str| {
            let report = judged(change);
            assert!(!report.ok);
            assert!(
                report.failures.iter().any(|f| f.contains(word)),
                "{:?}",
                report.failures
            );
            assert!(report.render().contains("FAILED"));
        };
        told(
            |rows, _| rows[6].identical = false,
            "turn 7 (main): the answer differs",
        );
        told(
            |rows, _| rows[50].identical = false,
            "turn 1 (second): the answer differs",
        );
        told(
            |rows, _| (rows[3].reused, rows[3].prefilled) = (0, 2000),
            "turn 4 (main): nothing was reused",
        );
        told(
            |rows, _| rows[3].prefilled += 1,
            "are not the 2000 of the prompt",
        );
        told(|rows, _| drop(rows.remove(0)), "49 of 50 turns");
        told(|_, events| events.daemon_kills = 0, "killed");
        told(
            |rows, _| rows.iter_mut().for_each(|row| row.unlimited_reused = 1950),
            "efficiency",
        );
        told(
            |rows, _| {
                for row in rows {
                    (row.reused, row.prefilled, row.unlimited_reused) = (1700, 300, 1700);
                }
            },
            "token_reduction",
        );
    }
}
