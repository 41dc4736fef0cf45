//! Progress of what may take long, on standard error.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How often progress is told to a terminal, and to anything else.
const OFTEN: Duration = Duration::from_millis(200);
const SELDOM: Duration = Duration::from_secs(10);

/// Tells how far something is, if it takes long.
#[derive(Debug)]
pub struct Teller {
    terminal: bool,
    last: Mutex<(Instant, bool)>,
}

// === impl Teller ===

impl Teller {
    /// Nothing is told yet.
    pub fn new() -> Self {
        Self {
            terminal: std::io::stderr().is_terminal(),
            last: Mutex::new((Instant::now(), false)),
        }
    }

    /// Tells it, unless something was told just now.
    pub fn tell(&self, text: impl FnOnce() -> String) {
        let every = if self.terminal { OFTEN } else { SELDOM };
        // Who comes while another tells has nothing new.
        let Some(mut last) = self.last.try_lock() else {
            return;
        };
        if last.0.elapsed() < every {
            return;
        }
        *last = (Instant::now(), true);
        let text = text();
        match self.terminal {
            true => eprint!("\r\x1b[K{text}"),
            false => eprintln!("{text}"),
        }
    }

    /// Takes the last line away, where it can be taken away.
    pub fn done(&self) {
        if self.terminal && self.last.lock().1 {
            eprint!("\r\x1b[K");
        }
    }
}
