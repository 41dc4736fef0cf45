//! What is told of an answer while it is computed: tokens, and where there is a tokenizer their
//! text, which may end the answer.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::engine::model::{Logprobs, Predicted};
use crate::engine::request::Listener;
use crate::tokenizer::{Detokenizer, Tokenizer};

/// One token of an answer.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub token: u32,
    /// What it adds to the text.
    pub text: String,
    /// How many bytes at the end of all text may be the beginning of an end.
    pub held: usize,
    /// The text ends here, before one of its ends.
    pub cut: Option<usize>,
    pub logprobs: Option<Logprobs>,
}

/// How the text of an answer is made, and where it ends.
#[derive(Clone, Debug)]
pub(super) struct TextRules {
    pub tokenizer: Arc<Tokenizer>,
    pub skip_special: bool,
    pub stops: Vec<String>,
}

/// The text so far.
struct Text {
    rules: TextRules,
    pieces: Detokenizer,
    all: String,
}

/// A listener, and what it hears: at most as many pieces as the answer has tokens.
pub(super) fn watch(rules: Option<TextRules>) -> (Listener, mpsc::UnboundedReceiver<Piece>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let mut text = rules.map(Text::new);
    let hear = move |next: &Predicted| {
        let (text, held, found) = match &mut text {
            Some(text) => text.push(next.token),
            None => (String::new(), 0, None),
        };
        let piece = Piece {
            token: next.token,
            text,
            held,
            cut: found.map(|(_, at)| at),
            logprobs: next.logprobs.clone(),
        };
        // The client may have gone; the scheduler sees that by itself.
        let _gone = sender.send(piece);
        found.map(|(number, _)| number)
    };
    (Listener(Box::new(hear)), receiver)
}

// === impl Text ===

impl Text {
    fn new(rules: TextRules) -> Text {
        Text {
            pieces: Detokenizer::new(rules.skip_special),
            rules,
            all: String::new(),
        }
    }

    /// What a token adds, how much of the end is held back, and which stop was found where.
    fn push(&mut self, token: u32) -> (String, usize, Option<(usize, usize)>) {
        let new = self.pieces.push(&self.rules.tokenizer, token);
        let before = self.all.len();
        self.all += &new;
        let stops = || self.rules.stops.iter().enumerate();
        let found = stops().filter_map(|(number, stop)| {
            // It cannot lie in what was looked at before.
            let from = before.saturating_sub(stop.len());
            let from = (0..=from).rev().find(|at| self.all.is_char_boundary(*at))?;
            let at = self.all.get(from..)?.find(stop.as_str())?;
            Some((number, from + at))
        });
        if let Some(found) = found.min_by_key(|(_, at)| *at) {
            return (new, 0, Some(found));
        }
        let held = stops().map(|(_, stop)| overlap(&self.all, stop)).max();
        (new, held.unwrap_or(0), None)
    }
}

/// The longest beginning of `stop`, not all of it, with which the text ends.
fn overlap(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).rev();
    lengths
        .into_iter()
        .find(|at| stop.get(..*at).is_some_and(|start| text.ends_with(start)))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_begin_an_end_is_held_back() {
        for (text, stop, held) in [
            ("abc", "cde", 1),
            ("abc", "bcd", 2),
            ("abc", "abc", 0),
            ("abc", "x", 0),
            ("aé", "éa", 2),
            ("", "x", 0),
        ] {
            assert_eq!(overlap(text, stop), held, "{text} {stop}");
        }
    }
}
