//! Text of an answer that grows token by token.

use super::Tokenizer;

/// Tokens that are decoded again with each new one, so that what depends on its neighbours is right.
const CONTEXT: usize = 6;
/// What stands for bytes that are no character yet.
const INCOMPLETE: char = '\u{FFFD}';

/// Turns the tokens of one answer into text as they come.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    skip_special: bool,
    ids: Vec<u32>,
    /// The tokens from here on are decoded.
    start: usize,
    /// The text of those before here is given.
    given: usize,
}

// === impl Detokenizer ===

impl Detokenizer {
    /// For one answer, of which special tokens are left out or not.
    pub fn new(skip_special: bool) -> Detokenizer {
        Detokenizer {
            skip_special,
            ..Detokenizer::default()
        }
    }

    /// The text that a token adds: empty while a character is not complete.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.ids.push(id);
        let (before, now) = self.texts(tokenizer);
        match now.strip_prefix(before.as_str()) {
            Some(new) if !new.ends_with(INCOMPLETE) && !new.is_empty() => {
                self.given = self.ids.len();
                self.start = self.given.saturating_sub(CONTEXT).max(self.start);
                new.to_owned()
            }
            _ => String::new(),
        }
    }

    /// What is left at the end, complete or not.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        let (before, now) = self.texts(tokenizer);
        self.given = self.ids.len();
        now.strip_prefix(before.as_str())
            .unwrap_or_default()
            .to_owned()
    }

    fn texts(&self, tokenizer: &Tokenizer) -> (String, String) {
        let decode = |ids: Option<&[u32]>| {
            tokenizer
                .decode(ids.unwrap_or_default(), self.skip_special)
                .unwrap_or_default()
        };
        let before = decode(self.ids.get(self.start..self.given));
        (before, decode(self.ids.get(self.start..)))
    }
}
