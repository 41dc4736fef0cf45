//! What is played: a pure function of the number of turns, so that every run and every engine see
//! the same questions.

/// Tokens of an answer.
pub const ANSWER_TOKENS: usize = 48;
/// Tokens of the system prompt that both conversations share.
const SYSTEM_TOKENS: usize = 1100;
/// Fewest and most new tokens of a turn's question.
const QUESTION_TOKENS: (u64, u64) = (120, 170);
/// Fewest turns that leave room for every part of the plan.
pub const TURNS_MIN: u32 = 10;
/// Most turns: the longest prompt must fit the engine.
pub const TURNS_MAX: u32 = 400;

/// A turn count, and what happens when.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Turns of the conversation.
    pub turns: u32,
    /// The branch leaves the main line after this turn.
    pub branch_at: u32,
    /// First turn that is played on the branch.
    pub branch_from: u32,
    /// The engine is killed after this turn.
    pub kill_engine_after: u32,
    /// The daemon is killed after this turn.
    pub kill_daemon_after: u32,
}

/// One thing that happens.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A turn of a line is played.
    Turn(Line, u32),
    /// The engine is killed and started again.
    KillEngine,
    /// The daemon is killed and started again.
    KillDaemon,
}

/// On which line a turn is.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Line {
    /// The conversation.
    Main,
    /// The conversation, from another past.
    Branch,
    /// The second conversation.
    Side,
}

/// What was said on each line so far, in tokens.
#[derive(Clone, Debug)]
pub struct Transcript {
    plan: Plan,
    vocabulary: u32,
    main: Vec<u32>,
    branch: Vec<u32>,
    side: Vec<u32>,
}

// === impl Plan ===

impl Plan {
    /// A plan of so many turns: at 50 the branch is at 20 and played from 41, the engine is killed
    /// after 25 and the daemon after 35.
    pub fn new(turns: u32) -> Plan {
        Plan {
            turns,
            branch_at: turns * 2 / 5,
            branch_from: turns * 4 / 5 + 1,
            kill_engine_after: turns / 2,
            kill_daemon_after: turns * 7 / 10,
        }
    }

    /// Everything in order.
    pub fn steps(&self) -> Vec<Step> {
        let Plan {
            turns,
            branch_at: _,
            branch_from: _,
            kill_engine_after,
            kill_daemon_after,
        } = *self;
        let sides = [turns / 5, turns * 3 / 5, turns * 9 / 10];
        let mut side = 0;
        let mut steps = Vec::new();
        for turn in 1..=turns {
            steps.push(Step::Turn(self.line(turn), turn));
            if turn == kill_engine_after {
                steps.push(Step::KillEngine);
            }
            if turn == kill_daemon_after {
                steps.push(Step::KillDaemon);
            }
            if sides.contains(&turn) {
                side += 1;
                steps.push(Step::Turn(Line::Side, side));
            }
        }
        steps
    }

    /// On which line a turn of the conversation is.
    pub fn line(&self, turn: u32) -> Line {
        if turn < self.branch_from {
            Line::Main
        } else {
            Line::Branch
        }
    }

    /// Tokens of the longest prompt with its answer, at most.
    pub fn longest(&self) -> usize {
        let turn = QUESTION_TOKENS.1 as usize + ANSWER_TOKENS;
        SYSTEM_TOKENS + self.branch_from.saturating_sub(1) as usize * turn
    }
}

// === impl Line ===

impl Line {
    /// For people and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Line::Main => "main",
            Line::Branch => "branch",
            Line::Side => "second",
        }
    }

    /// The session that requests of this line carry.
    pub fn session(self) -> &'static str {
        match self {
            Line::Main | Line::Branch => "demo",
            Line::Side => "demo-second",
        }
    }
}

// === impl Transcript ===

impl Transcript {
    /// Nothing said yet. Token ids will be below `vocabulary`.
    pub fn new(plan: Plan, vocabulary: u32) -> Transcript {
        let system = tokens(0, SYSTEM_TOKENS, vocabulary);
        Transcript {
            plan,
            vocabulary,
            main: system.clone(),
            branch: Vec::new(),
            side: system,
        }
    }

    /// The prompt of a line's next turn: all that was said on it, and a question of its own.
    pub fn ask(&mut self, line: Line, turn: u32) -> &[u32] {
        let stream = (u64::from(turn) << 8) | (line as u64 + 1);
        let (fewest, most) = QUESTION_TOKENS;
        let length = fewest + splitmix(stream) % (most - fewest + 1);
        let question = tokens(stream, length as usize, self.vocabulary);
        let said = self.line(line);
        said.extend(question);
        said
    }

    /// The answer that was given to the last question of a line.
    pub fn answered(&mut self, line: Line, turn: u32, answer: &[u32]) {
        self.line(line).extend(answer);
        if line == Line::Main && turn == self.plan.branch_at {
            self.branch = self.main.clone();
        }
    }

    fn line(&mut self, line: Line) -> &mut Vec<u32> {
        match line {
            Line::Main => &mut self.main,
            Line::Branch => &mut self.branch,
            Line::Side => &mut self.side,
        }
    }
}

/// Token ids that look like chance and never change.
fn tokens(stream: u64, length: usize, vocabulary: u32) -> Vec<u32> {
    let start = splitmix(stream ^ 0x656e_6772_616d);
    (0..length as u64)
        .map(|index| (splitmix(start.wrapping_add(index)) % u64::from(vocabulary.max(1))) as u32)
        .collect()
}

/// One step of SplitMix64.
fn splitmix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIDE_TURNS: u32 = 3;

    #[test]
    fn fifty_turns_are_as_the_documents_say() {
        let plan = Plan::new(50);
        assert_eq!((plan.branch_at, plan.branch_from), (20, 41));
        assert_eq!((plan.kill_engine_after, plan.kill_daemon_after), (25, 35));
        assert_eq!(plan.line(40), Line::Main);
        assert_eq!(plan.line(41), Line::Branch);
    }

    #[test]
    fn every_length_has_all_parts_in_order() {
        for turns in TURNS_MIN..=TURNS_MAX {
            let plan = Plan::new(turns);
            assert!(0 < plan.branch_at && plan.branch_at < plan.kill_engine_after);
            assert!(plan.kill_engine_after < plan.kill_daemon_after);
            assert!(plan.kill_daemon_after < plan.branch_from && plan.branch_from <= turns);
            let steps = plan.steps();
            let count = |wanted: fn(&Step) -> bool| steps.iter().filter(|s| wanted(s)).count();
            assert_eq!(
                count(|s| matches!(s, Step::Turn(..))),
                (turns + SIDE_TURNS) as usize
            );
            assert_eq!(
                count(|s| matches!(s, Step::Turn(Line::Side, _))),
                SIDE_TURNS as usize
            );
            assert_eq!(count(|s| matches!(s, Step::KillEngine)), 1);
            assert_eq!(count(|s| matches!(s, Step::KillDaemon)), 1);
        }
    }

    #[test]
    fn the_branch_extends_the_turn_it_leaves_from() {
        let plan = Plan::new(10);
        let mut said = Transcript::new(plan, 100);
        let mut at_branch = Vec::new();
        for turn in 1..plan.branch_from {
            let prompt = said.ask(Line::Main, turn).to_vec();
            assert!(prompt.len() <= plan.longest());
            assert!(prompt.iter().all(|token| *token < 100));
            said.answered(Line::Main, turn, &[7; ANSWER_TOKENS]);
            if turn == plan.branch_at {
                at_branch = [prompt, vec![7; ANSWER_TOKENS]].concat();
            }
        }
        let branch = said.ask(Line::Branch, plan.branch_from).to_vec();
        assert!(branch.starts_with(&at_branch));
        let new = branch.len() - at_branch.len();
        assert!((120..=170).contains(&new), "{new}");
        assert!(!branch.starts_with(&said.main[..branch.len()]));
        let side = said.ask(Line::Side, 1).to_vec();
        assert_eq!(side[..SYSTEM_TOKENS], branch[..SYSTEM_TOKENS]);
        assert_ne!(side[SYSTEM_TOKENS], branch[SYSTEM_TOKENS]);
    }
}
