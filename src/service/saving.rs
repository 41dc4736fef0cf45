//! Which states go to disk: facts in, action out.
//!
//! Every state that a worker offers comes into RAM; a policy says what becomes of it there. What
//! somebody saves, names or pins is written whatever the policy says.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most token ids that mean a tool call.
const MAX_TOOL_TOKENS: usize = 64;

/// Longest time of a rule.
const MAX_TIME: Duration = Duration::from_secs(30 * 24 * 3600);

/// Which states go to disk by themselves.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// That of every turn.
    #[default]
    EveryTurn,
    /// That of every so many turns.
    EveryNTurns,
    /// That of a turn that calls a tool.
    OnToolCall,
    /// Whatever has to leave RAM.
    OnEviction,
    /// None.
    ManualOnly,
}

/// A policy and what belongs to it.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct SavingRules {
    /// Which states.
    pub policy: Policy,
    /// How many turns `every_n_turns` means.
    pub every_n_turns: u32,
    /// Between two turns of a conversation that are written at least so much time passes.
    pub min_interval: Duration,
}

/// The rules of a conversation, as they are shown.
#[derive(Clone, PartialEq, Debug, Serialize, ToSchema)]
pub struct RulesRow {
    /// Which states go to disk by themselves.
    pub policy: Policy,
    /// How many turns `every_n_turns` means.
    pub every_n_turns: u32,
    /// Between two turns that are written at least so much time passes.
    pub min_interval_seconds: f64,
    /// They are the conversation's own; otherwise those of the configuration.
    pub own: bool,
}

/// Section `[service.saving]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Saving {
    /// Which states go to disk, unless a conversation has its own policy. Default: `every_turn`.
    pub policy: Policy,
    /// How many turns `every_n_turns` means. Default: 5.
    pub every_n_turns: u32,
    /// Between two turns of a conversation that are written at least so much time passes: the newest
    /// is then written. Default: none.
    #[serde(with = "humantime_serde")]
    pub min_interval: Duration,
    /// How long the newest state of a conversation that is not written stays in RAM. Default: `5m`.
    #[serde(with = "humantime_serde")]
    pub unsaved_for: Duration,
    /// Tokens with which an answer calls a tool, for `on_tool_call`. Default: none, then the client
    /// says so.
    pub tool_call_tokens: Vec<u32>,
}

/// What is known of a state when it appears, or when its turn ends.
#[derive(Copy, Clone, Debug)]
pub struct Facts {
    /// The turn that its request is, or will be.
    pub turn: u32,
    /// That turn calls a tool.
    pub tool_call: bool,
    /// How long ago the last other turn of the conversation was let be written.
    pub since_last: Option<Duration>,
    /// How long every state waits before it is written.
    pub write_after: Duration,
}

/// What becomes of a state.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// It is written after this time. `deferred`: a newer turn's state takes its place until then.
    Write {
        /// From now on.
        after: Duration,
        /// The interval is what it waits for.
        deferred: bool,
    },
    /// It is written when it has to leave RAM.
    WhenEvicted,
    /// It is not written. The newest one of the conversation stays in RAM for a while.
    Hold,
}

// === impl Policy ===

impl Policy {
    /// Its name in configuration and bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::EveryTurn => "every_turn",
            Self::EveryNTurns => "every_n_turns",
            Self::OnToolCall => "on_tool_call",
            Self::OnEviction => "on_eviction",
            Self::ManualOnly => "manual_only",
        }
    }
}

// === impl SavingRules ===

impl SavingRules {
    /// What is wrong with them.
    ///
    /// # Errors
    /// The field and the problem.
    pub fn check(&self) -> Result<(), (&'static str, &'static str)> {
        if self.every_n_turns == 0 {
            return Err(("every_n_turns", "must be at least 1"));
        }
        if self.min_interval > MAX_TIME {
            return Err(("min_interval", "must not be above 30 days"));
        }
        Ok(())
    }
}

// === impl Saving ===

impl Default for Saving {
    fn default() -> Self {
        Self {
            policy: Policy::EveryTurn,
            every_n_turns: 5,
            min_interval: Duration::ZERO,
            unsaved_for: Duration::from_secs(300),
            tool_call_tokens: Vec::new(),
        }
    }
}

impl Saving {
    /// The rules of a conversation without its own.
    pub fn rules(&self) -> SavingRules {
        SavingRules {
            policy: self.policy,
            every_n_turns: self.every_n_turns,
            min_interval: self.min_interval,
        }
    }

    /// The answer calls a tool.
    pub fn calls_tool(&self, answer: &[u32]) -> bool {
        let calls = |token| self.tool_call_tokens.contains(token);
        !self.tool_call_tokens.is_empty() && answer.iter().any(calls)
    }

    /// Adds every problem of this section to `problems`, each as `service.saving.key: what is wrong`.
    pub fn validate(&self, problems: &mut Vec<String>) {
        if let Err((field, problem)) = self.rules().check() {
            problems.push(format!("service.saving.{field}: {problem}"));
        }
        if self.unsaved_for > MAX_TIME {
            problems.push("service.saving.unsaved_for: must not be above 30 days".to_owned());
        }
        if self.tool_call_tokens.len() > MAX_TOOL_TOKENS {
            problems.push(format!(
                "service.saving.tool_call_tokens: more than {MAX_TOOL_TOKENS}"
            ));
        }
    }
}

/// What becomes of a state.
pub fn decide(rules: &SavingRules, facts: &Facts) -> Action {
    let wanted = match rules.policy {
        Policy::EveryTurn => true,
        Policy::EveryNTurns => facts.turn.is_multiple_of(rules.every_n_turns.max(1)),
        Policy::OnToolCall => facts.tool_call,
        Policy::OnEviction => return Action::WhenEvicted,
        Policy::ManualOnly => false,
    };
    if !wanted {
        return Action::Hold;
    }
    let left = |since| rules.min_interval.saturating_sub(since);
    let wait = facts.since_last.map_or(Duration::ZERO, left);
    Action::Write {
        after: wait.max(facts.write_after),
        deferred: wait > facts.write_after,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn every_policy_writes_what_it_says() {
        use Policy::{EveryNTurns, EveryTurn, ManualOnly, OnEviction, OnToolCall};
        let write = |after| Action::Write {
            after: s(after),
            deferred: false,
        };
        let deferred = |after| Action::Write {
            after: s(after),
            deferred: true,
        };
        // Policy, minimum interval, turn, a tool call, seconds since the last: what becomes of it.
        let table = [
            (EveryTurn, 0, 1, false, None, write(10)),
            (EveryTurn, 0, 2, false, Some(0), write(10)),
            (EveryTurn, 60, 1, false, None, write(10)),
            (EveryTurn, 60, 2, false, Some(0), deferred(60)),
            (EveryTurn, 60, 2, true, Some(20), deferred(40)),
            (EveryTurn, 60, 2, false, Some(50), write(10)),
            (EveryTurn, 60, 2, false, Some(55), write(10)),
            (EveryTurn, 60, 2, false, Some(600), write(10)),
            (EveryNTurns, 0, 1, true, None, Action::Hold),
            (EveryNTurns, 0, 2, false, None, Action::Hold),
            (EveryNTurns, 0, 3, false, None, write(10)),
            (EveryNTurns, 0, 6, false, Some(1), write(10)),
            (EveryNTurns, 30, 6, false, Some(1), deferred(29)),
            (OnToolCall, 0, 3, false, None, Action::Hold),
            (OnToolCall, 0, 1, true, None, write(10)),
            (OnToolCall, 30, 2, true, Some(10), deferred(20)),
            (OnEviction, 30, 3, true, Some(0), Action::WhenEvicted),
            (ManualOnly, 0, 3, true, None, Action::Hold),
        ];
        for (policy, min_interval, turn, tool_call, since_last, action) in table {
            let rules = SavingRules {
                policy,
                every_n_turns: 3,
                min_interval: s(min_interval),
            };
            let facts = Facts {
                turn,
                tool_call,
                since_last: since_last.map(s),
                write_after: s(10),
            };
            assert_eq!(decide(&rules, &facts), action, "{rules:?} {facts:?}");
        }
    }

    #[test]
    fn a_tool_call_is_one_of_the_tokens() {
        let mut saving = Saving::default();
        assert!(!saving.calls_tool(&[1, 2]));
        saving.tool_call_tokens = vec![7, 9];
        assert!(!saving.calls_tool(&[1, 2]) && !saving.calls_tool(&[]));
        assert!(saving.calls_tool(&[1, 9]));
    }

    #[test]
    fn the_configuration_is_checked() {
        let mut problems = Vec::new();
        Saving::default().validate(&mut problems);
        assert_eq!(problems, Vec::<String>::new());
        let bad = Saving {
            every_n_turns: 0,
            unsaved_for: s(31 * 24 * 3600),
            tool_call_tokens: vec![0; 65],
            ..Saving::default()
        };
        bad.validate(&mut problems);
        assert_eq!(problems.len(), 3, "{problems:?}");
        let json = serde_json::to_value(Policy::EveryNTurns).unwrap();
        assert_eq!(json, Policy::EveryNTurns.as_str());
    }
}
