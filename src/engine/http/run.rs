//! One request from its body to its answer, whole or piece by piece.

use std::time::{Duration, Instant};

use futures_util::Stream;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use super::watch::{Piece, TextRules, watch};
use super::{Failure, Front};
use crate::engine::cache::Namespace;
use crate::engine::model::{Logprobs, VOCAB};
use crate::engine::request::{Answer, FinishReason, Refusal, Request, RequestInfo, Sampling};
use crate::engine::scheduler::Command;
use crate::tokenizer::Tokenizer;

/// `max_new_tokens` where a request says nothing, as SGLang's.
const DEFAULT_NEW_TOKENS: usize = 128;
/// Most log probabilities at one position.
const MAX_TOP: usize = 100;
/// Most texts that end an answer.
const MAX_STOPS: usize = 64;

/// What to generate, however it was asked for.
#[derive(Debug, Default)]
pub(super) struct Order {
    pub prompt: Vec<u32>,
    pub rid: Option<String>,
    pub session_id: Option<String>,
    pub extra_key: Option<String>,
    pub cache_salt: Option<String>,
    pub max_new_tokens: Option<usize>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub keep_special: bool,
    pub logprobs: Option<usize>,
}

/// One text or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Texts {
    One(String),
    Many(Vec<String>),
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Run {
    pub rid: String,
    pub prompt_tokens: usize,
    rules: Option<TextRules>,
    arrived: Instant,
    pieces: mpsc::UnboundedReceiver<Piece>,
    answer: oneshot::Receiver<Result<Answer, Refusal>>,
    output: Output,
}

/// An answer so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Output {
    pub ids: Vec<u32>,
    /// Text that may be shown; `None` without a tokenizer.
    pub text: Option<String>,
    pub logprobs: Vec<Logprobs>,
    /// Set once it is complete.
    pub end: Option<End>,
    /// Text that is held back.
    held: String,
}

/// The end of an answer.
#[derive(Clone, Debug)]
pub(super) struct End {
    pub answer: Answer,
    /// The text that ended it.
    pub matched: Option<String>,
    pub took: Duration,
}

// === impl Texts ===

impl Texts {
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Texts::One(text) => vec![text],
            Texts::Many(texts) => texts,
        }
    }
}

/// The tokens of a prompt, as they were sent.
pub(super) fn prompt_of(ids: &[i64]) -> Result<Vec<u32>, Failure> {
    let check = |(index, token): (usize, &i64)| {
        let id = u32::try_from(*token)
            .ok()
            .filter(|id| (*id as usize) < VOCAB);
        id.ok_or(Refusal::Vocabulary {
            index,
            token: *token,
        })
    };
    let prompt = ids.iter().enumerate().map(check);
    prompt.collect::<Result<_, _>>().map_err(Failure::Refused)
}

/// The engine is greedy, and gives one answer.
pub(super) fn check_greedy(temperature: Option<f64>, n: Option<u32>) -> Result<(), Failure> {
    if temperature.is_some_and(|temperature| temperature != 0.0) {
        return Err(Failure::Unsupported("temperature: the engine is greedy"));
    }
    if n.is_some_and(|n| n != 1) {
        return Err(Failure::Unsupported("n: the engine gives one answer"));
    }
    Ok(())
}

// === impl Run ===

impl Run {
    /// Checks a request and hands it to the scheduler.
    pub fn start(front: &Front, order: Order) -> Result<Run, Failure> {
        let arrived = Instant::now();
        let tokenizer = front.parts.tokenizer.as_ref();
        if !order.stop.is_empty() && tokenizer.is_none() {
            return Err(Failure::Unsupported("stop: there is no tokenizer"));
        }
        if order.stop.len() > MAX_STOPS || order.stop.iter().any(String::is_empty) {
            return Err(Failure::Body("stop: up to 64 texts, none empty".to_owned()));
        }
        if order.logprobs.is_some_and(|top| top > MAX_TOP) {
            return Err(Failure::Body(
                "at most 100 top log probabilities".to_owned(),
            ));
        }
        let mut stop_token_ids = order.stop_token_ids;
        if !order.ignore_eos {
            stop_token_ids.extend(tokenizer.and_then(|tokenizer| tokenizer.eos()));
        }
        let info = RequestInfo {
            id: front.fresh_id(),
            rid: order
                .rid
                .unwrap_or_else(|| Uuid::new_v4().simple().to_string()),
            session_id: order.session_id,
            // SGLang takes an empty key or salt for none.
            namespace: Namespace {
                extra_key: order.extra_key.filter(|key| !key.is_empty()),
                cache_salt: order.cache_salt.filter(|salt| !salt.is_empty()),
            },
            prompt: order.prompt,
        };
        let sampling = Sampling {
            max_new_tokens: order.max_new_tokens.unwrap_or(DEFAULT_NEW_TOKENS),
            stop_token_ids,
            logprobs: order.logprobs,
        };
        info.check(&sampling).map_err(Failure::Refused)?;
        let rules = tokenizer.map(|tokenizer| TextRules {
            tokenizer: tokenizer.clone(),
            skip_special: !order.keep_special,
            stops: order.stop,
        });
        let (rid, prompt_tokens) = (info.rid.clone(), info.prompt.len());
        let (listener, pieces) = watch(rules.clone());
        let (reply, answer) = oneshot::channel();
        let request = Request {
            info,
            sampling,
            arrived,
            listener: Some(listener),
            reply,
        };
        front.send(Command::Submit(Box::new(request)))?;
        let output = Output {
            text: rules.as_ref().map(|_| String::new()),
            ..Output::default()
        };
        Ok(Run {
            rid,
            prompt_tokens,
            rules,
            arrived,
            pieces,
            answer,
            output,
        })
    }

    /// The whole answer.
    pub async fn finish(mut self) -> Result<(Run, Output), Failure> {
        while let Some(piece) = self.pieces.recv().await {
            self.take(piece);
        }
        self.end().await?;
        let output = std::mem::take(&mut self.output);
        Ok((self, output))
    }

    /// Waits for the first token, so that a refusal is one before any head is sent.
    pub async fn begin(&mut self) -> Result<(), Failure> {
        match self.pieces.recv().await {
            Some(piece) => {
                self.take(piece);
                Ok(())
            }
            None => self.end().await,
        }
    }

    /// The answer so far, each time that it has grown; the last one has its end.
    pub fn outputs(self) -> impl Stream<Item = (std::sync::Arc<str>, usize, Output)> + Send {
        let rid: std::sync::Arc<str> = self.rid.as_str().into();
        futures_util::stream::unfold(Some((self, true)), move |state| {
            let rid = rid.clone();
            async move {
                let (mut run, first) = state?;
                let started = first && !run.output.ids.is_empty();
                if run.output.end.is_none() && !started {
                    match run.pieces.recv().await {
                        Some(piece) => run.take(piece),
                        // A scheduler that ended cannot be told in a stream: it just ends.
                        None => run.end().await.ok()?,
                    }
                }
                let output = run.output.clone();
                let prompt_tokens = run.prompt_tokens;
                let rest = output.end.is_none().then_some((run, false));
                Some(((rid, prompt_tokens, output), rest))
            }
        })
    }

    fn take(&mut self, piece: Piece) {
        let output = &mut self.output;
        output.ids.push(piece.token);
        output.logprobs.extend(piece.logprobs);
        if let Some(text) = &mut output.text {
            let mut all = std::mem::take(&mut output.held) + &piece.text;
            match piece.cut {
                Some(at) => all.truncate(at.saturating_sub(text.len())),
                None => output.held = all.split_off(all.len().saturating_sub(piece.held)),
            }
            text.push_str(&all);
        }
    }

    async fn end(&mut self) -> Result<(), Failure> {
        let answer = (&mut self.answer).await;
        let answer = answer
            .map_err(|_| Failure::Gone)?
            .map_err(Failure::Refused)?;
        let matched = match answer.finish_reason {
            FinishReason::Text(number) => self
                .rules
                .as_ref()
                .and_then(|rules| rules.stops.get(number).cloned()),
            _ => None,
        };
        if let (Some(text), Some(rules), None) = (&mut self.output.text, &self.rules, &matched) {
            *text = whole(&rules.tokenizer, rules.skip_special, &answer);
        }
        self.output.end = Some(End {
            answer,
            matched,
            took: self.arrived.elapsed(),
        });
        Ok(())
    }
}

/// The text of a whole answer, without the token that ended it.
fn whole(tokenizer: &Tokenizer, skip_special: bool, answer: &Answer) -> String {
    let ids = match (answer.finish_reason, answer.output_ids.split_last()) {
        (FinishReason::Stop(_), Some((_, ids))) => ids,
        _ => &answer.output_ids,
    };
    tokenizer.decode(ids, skip_special).unwrap_or_default()
}
