//! Progress on standard error: a line that rewrites itself on a terminal, else a line each turn.

use std::io::{IsTerminal as _, Write as _};

use super::plan::{Line, Plan};
use super::report::Row;

/// Shows progress.
#[derive(Debug)]
pub struct Progress {
    terminal: bool,
    /// The line that is shown now will be rewritten.
    open: bool,
}

// === impl Progress ===

impl Progress {
    /// On standard error.
    pub fn new() -> Progress {
        Progress {
            terminal: std::io::stderr().is_terminal(),
            open: false,
        }
    }

    /// A turn is done.
    pub fn turn(&mut self, row: &Row, plan: Plan) {
        let Row {
            turn,
            line,
            prompt,
            reused,
            tier,
            ..
        } = row;
        let number = match line {
            Line::Main => format!("turn {turn}/{}", plan.turns),
            Line::Branch => format!("turn {turn}/{} (branch)", plan.turns),
            Line::Side => format!("second conversation, turn {turn}"),
        };
        let tier = tier.as_deref().unwrap_or("nowhere");
        let text = format!("{number}: {reused} of {prompt} tokens reused, from {tier}");
        if self.terminal {
            // Losing progress is no reason to stop.
            write!(std::io::stderr(), "\r\x1b[K{text}").ok();
            self.open = true;
        } else {
            eprintln!("{text}");
        }
    }

    /// Something else happens.
    pub fn say(&mut self, text: &str) {
        self.end_line();
        eprintln!("{text}");
    }

    /// Nothing is rewritten any more.
    pub fn end_line(&mut self) {
        if std::mem::take(&mut self.open) {
            eprintln!();
        }
    }
}
