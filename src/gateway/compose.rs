//! The whole prompt of a request that says only what is new.
//!
//! # Append-only
//! A conversation's tokens are what the model read and wrote; they are never made again from text,
//! as the same text may have other tokens. What is new is tokenized by itself and put behind them.
//!
//! # Checked
//! Where every earlier message is known, all of them are rendered with the new ones by the chat
//! template. If that begins with the conversation's tokens, it is the prompt. If it begins with
//! their text, only the tokens of an answer differ from those that its text would get: the
//! conversation's own are kept. If not even the text is the same, the template shows the past in
//! another way (a thought that it leaves out, blanks that it trims): the rendering is the prompt, as
//! that is what the model is made for, and the answer says `prefix-mismatch`.
//!
//! Where earlier messages are not known, the new ones are rendered behind a question and an answer
//! made up for the purpose, and what follows that answer is what is new.

use serde_json::{Value, json};

use super::base::Base;
use super::tokens::{Extras, Tokens};
use super::{Gateway, GatewayError};

/// Tokens before the first difference that are decoded with what follows, so that no character is
/// cut.
const CONTEXT: usize = 8;
/// The answer that is made up.
const ANSWER: &str = "ENGRAM-7f3a9c41-ANSWER";

/// A prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Composed {
    pub tokens: Vec<u32>,
    /// How many of them the client sent, in words or as tokens.
    pub wire_tokens: usize,
    pub fallback: Option<Fallback>,
}

/// Why a prompt is not what was known with what is new behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The chat template shows the past in another way than it was.
    PrefixMismatch,
}

// === impl Fallback ===

impl Fallback {
    /// The name that clients know.
    pub fn as_str(self) -> &'static str {
        match self {
            Fallback::PrefixMismatch => "prefix-mismatch",
        }
    }
}

// === impl Composed ===

impl Composed {
    /// What is new behind what is known.
    pub fn append(base: &[u32], new: &[u32]) -> Composed {
        Composed {
            tokens: [base, new].concat(),
            wire_tokens: new.len(),
            fallback: None,
        }
    }
}

// === impl Gateway ===

impl Gateway {
    /// New messages after what is known.
    ///
    /// # Errors
    /// `Tokenization`, and those of the server.
    pub(super) async fn compose(
        &self,
        base: &Base,
        new: &[Value],
        extras: &Extras,
    ) -> Result<Composed, GatewayError> {
        compose(&self.tokens, base, new, extras).await
    }
}

async fn compose(
    tokens: &Tokens,
    base: &Base,
    new: &[Value],
    extras: &Extras,
) -> Result<Composed, GatewayError> {
    if base.tokens.is_empty() {
        let all = tokens.chat(new, extras, true).await?;
        return Ok(Composed::append(&[], &all));
    }
    let Some(said) = &base.messages else {
        let new = behind_answer(tokens, base, new, extras).await?;
        return Ok(Composed::append(&base.tokens, &new));
    };
    let all = [said.as_slice(), new].concat();
    let whole = tokens.chat(&all, extras, true).await?;
    if let Some(rest) = whole.strip_prefix(base.tokens.as_slice()) {
        return Ok(Composed::append(&base.tokens, rest));
    }
    if let Some(rest) = rest_of_text(tokens, &base.tokens, &whole).await? {
        let rest = tokens.encode(&rest, false).await?;
        return Ok(Composed::append(&base.tokens, &rest));
    }
    let wire_tokens = tokens.chat(new, extras, true).await?.len();
    Ok(Composed {
        tokens: whole,
        wire_tokens,
        fallback: Some(Fallback::PrefixMismatch),
    })
}

/// What the text of `whole` has beyond that of `known`, if it begins with that.
async fn rest_of_text(
    tokens: &Tokens,
    known: &[u32],
    whole: &[u32],
) -> Result<Option<String>, GatewayError> {
    let same = known.iter().zip(whole).take_while(|(a, b)| a == b).count();
    let mut from = same.saturating_sub(CONTEXT);
    loop {
        let tail = |all: &[u32]| all.get(from..).unwrap_or_default().to_vec();
        let known = tokens.decode(&tail(known), false).await?;
        let whole = tokens.decode(&tail(whole), false).await?;
        if let Some(rest) = whole.strip_prefix(known.as_str()) {
            return Ok(Some(rest.to_owned()));
        }
        if from == 0 {
            return Ok(None);
        }
        from = 0;
    }
}

/// The tokens of new messages that follow an answer.
async fn behind_answer(
    tokens: &Tokens,
    base: &Base,
    new: &[Value],
    extras: &Extras,
) -> Result<Vec<u32>, GatewayError> {
    let made_up = [
        json!({ "role": "user", "content": "x" }),
        json!({ "role": "assistant", "content": ANSWER }),
    ];
    let all = [&made_up[..], new].concat();
    let whole = tokens.chat(&all, extras, true).await?;
    let text = tokens.decode(&whole, false).await?;
    let Some((_, rest)) = text.split_once(ANSWER) else {
        let text = "the chat template leaves earlier answers out";
        return Err(GatewayError::Tokenization(text.to_owned()));
    };
    let mut rest = tokens.encode(rest, false).await?;
    // The token that ended the last answer is a part of what is known.
    if let (Some(last), Some(first)) = (base.tokens.last(), rest.first())
        && last == first
        && tokens.is_special(*last).await?
    {
        rest.remove(0);
    }
    Ok(rest)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::tokenizer::Tokenizer;
    use crate::tokenizer::testing::{CHATML, write};

    fn tokens(template: &str) -> (tempfile::TempDir, Tokens, Arc<Tokenizer>) {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), template).unwrap();
        let tokenizer = Arc::new(Tokenizer::load(folder.path()).unwrap());
        (folder, Tokens::Own(Arc::clone(&tokenizer)), tokenizer)
    }

    fn user(text: &str) -> Value {
        json!({ "role": "user", "content": text })
    }

    fn assistant(text: &str) -> Value {
        json!({ "role": "assistant", "content": text })
    }

    const ASKED: &str = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    const NEXT: &str = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n";

    /// After one turn with this answer, as tokens.
    fn base(tokenizer: &Tokenizer, answer: &[u32], said: Option<&str>) -> Base {
        let asked = tokenizer.encode(ASKED, false).unwrap();
        Base {
            tokens: [&asked[..], answer].concat(),
            turn: 1,
            messages: said.map(|said| vec![user("hi"), assistant(said)]),
            is_head: true,
            ..Base::default()
        }
    }

    async fn composed(tokens: &Tokens, base: &Base) -> Composed {
        let new = [user("more")];
        compose(tokens, base, &new, &Extras::default())
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn what_is_new_goes_behind_the_exact_tokens() {
        let (_folder, tokens, tokenizer) = tokens(CHATML);
        let encode = |text: &str| tokenizer.encode(text, false).unwrap();
        // An answer whose text would get other tokens: one letter at a time.
        let letters: Vec<u32> = "blue"
            .chars()
            .flat_map(|c| encode(&c.to_string()))
            .collect();
        assert_ne!(letters, encode("blue"));
        let eos = encode("<|im_end|>");
        for (answer, said, rest) in [
            (
                [encode("blue"), eos.clone()].concat(),
                Some("blue"),
                format!("\n{NEXT}"),
            ),
            (encode("blue"), Some("blue"), format!("<|im_end|>\n{NEXT}")),
            (
                [letters.clone(), eos.clone()].concat(),
                Some("blue"),
                format!("\n{NEXT}"),
            ),
            (letters.clone(), Some("blue"), format!("<|im_end|>\n{NEXT}")),
            (letters.clone(), None, format!("<|im_end|>\n{NEXT}")),
            ([letters, eos].concat(), None, format!("\n{NEXT}")),
        ] {
            let base = base(&tokenizer, &answer, said);
            let composed = composed(&tokens, &base).await;
            let (known, new) = composed.tokens.split_at(base.tokens.len());
            assert_eq!(known, base.tokens);
            assert_eq!(tokenizer.decode(new, false).unwrap(), rest);
            assert_eq!(composed.wire_tokens, new.len());
            assert_eq!(composed.fallback, None, "{said:?}");
        }
    }

    #[tokio::test]
    async fn a_character_in_pieces_is_no_difference() {
        let (_folder, tokens, tokenizer) = tokens(CHATML);
        let half = tokenizer.encode("é", false).unwrap()[0];
        let fox = tokenizer.encode("🦊", false).unwrap();
        for answer in [vec![half], fox, vec![half, half]] {
            let said = tokenizer.decode(&answer, true).unwrap();
            let base = base(&tokenizer, &answer, Some(&said));
            let composed = composed(&tokens, &base).await;
            assert!(composed.tokens.starts_with(&base.tokens), "{said}");
            assert_eq!(composed.fallback, None);
        }
    }

    #[tokio::test]
    async fn a_past_that_is_shown_in_another_way_is_said_and_rendered() {
        let thoughtless = CHATML.replace(
            "{{ message.content }}",
            "{{ message.content.split('</think>')[-1] }}",
        );
        let (_folder, tokens, tokenizer) = tokens(&thoughtless);
        let said = "<think>well</think>blue";
        let answer = tokenizer
            .encode(&format!("{said}<|im_end|>"), false)
            .unwrap();
        let base = base(&tokenizer, &answer, Some(said));
        let composed = composed(&tokens, &base).await;
        assert_eq!(
            composed.fallback.map(Fallback::as_str),
            Some("prefix-mismatch")
        );
        assert_eq!(
            tokenizer.decode(&composed.tokens, false).unwrap(),
            format!("{ASKED}blue<|im_end|>\n{NEXT}")
        );
        assert_eq!(
            composed.wire_tokens,
            tokenizer.encode(NEXT, false).unwrap().len()
        );
    }

    #[tokio::test]
    async fn the_first_messages_are_the_whole_prompt() {
        let (_folder, tokens, tokenizer) = tokens(CHATML);
        let (base, new) = (Base::default(), [user("hi")]);
        let first = compose(&tokens, &base, &new, &Extras::default())
            .await
            .unwrap();
        assert_eq!(tokenizer.decode(&first.tokens, false).unwrap(), ASKED);
        assert_eq!(first.wire_tokens, first.tokens.len());
    }
}
