//! `POST /v1/chat/completions`, `POST /v1/completions` and `GET /v1/models`.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt as _, stream};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::run::{End, Order, Output, Run, Texts, check_greedy, prompt_of};
use super::{Failure, Front, event_stream, parse};
use crate::engine::model::MAX_TOKENS;
use crate::engine::request::FinishReason;
use crate::tokenizer::{Chat, Tokenizer};

/// What both endpoints take.
#[derive(Debug, Deserialize)]
struct Common {
    model: Option<String>,
    max_tokens: Option<usize>,
    temperature: Option<f64>,
    stop: Option<Texts>,
    stop_token_ids: Option<Vec<u32>>,
    n: Option<u32>,
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
    rid: Option<String>,
    session_id: Option<String>,
    extra_key: Option<String>,
    cache_salt: Option<String>,
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    return_cached_tokens_details: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ChatBody {
    messages: Vec<Value>,
    input_ids: Option<Vec<i64>>,
    tools: Option<Value>,
    max_completion_tokens: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(flatten)]
    common: Common,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Ids(Vec<i64>),
    Text(String),
}

#[derive(Debug, Deserialize)]
struct CompletionBody {
    prompt: Prompt,
    echo: Option<bool>,
    logprobs: Option<usize>,
    #[serde(flatten)]
    common: Common,
}

/// Which of the two an answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    Text,
}

/// How an answer is written.
#[derive(Clone, Debug)]
struct Writer {
    kind: Kind,
    model: String,
    created: u64,
    tokenizer: std::sync::Arc<Tokenizer>,
    include_usage: bool,
    details: bool,
}

/// The assistant's answer to messages.
pub(super) async fn chat(State(front): State<Front>, body: Bytes) -> Result<Response, Failure> {
    let body: ChatBody = parse(&body)?;
    let tokenizer = front.tokenizer()?;
    let prompt = match &body.input_ids {
        Some(ids) => prompt_of(ids)?,
        None => tokenizer.encode_chat(&Chat {
            messages: &body.messages,
            tools: body.tools.as_ref(),
            generation: true,
            extra: body.chat_template_kwargs.as_ref(),
        })?,
    };
    let order = Order {
        prompt,
        max_new_tokens: body.max_completion_tokens,
        logprobs: (body.logprobs == Some(true)).then_some(body.top_logprobs.unwrap_or(0)),
        ..Order::default()
    };
    answer(&front, Kind::Chat, order, body.common).await
}

/// The continuation of a text.
pub(super) async fn complete(State(front): State<Front>, body: Bytes) -> Result<Response, Failure> {
    let body: CompletionBody = parse(&body)?;
    if body.echo == Some(true) {
        return Err(Failure::Unsupported("echo"));
    }
    let prompt = match &body.prompt {
        Prompt::Ids(ids) => prompt_of(ids)?,
        Prompt::Text(text) => front.tokenizer()?.encode(text, true)?,
    };
    let order = Order {
        prompt,
        logprobs: body.logprobs,
        ..Order::default()
    };
    answer(&front, Kind::Text, order, body.common).await
}

/// The one model.
pub(super) async fn models(State(front): State<Front>) -> Json<Value> {
    let name = &front.parts.model;
    let model = json!({
        "id": name, "object": "model", "owned_by": "engram", "root": name,
        "max_model_len": MAX_TOKENS,
    });
    Json(json!({ "object": "list", "data": [model] }))
}

async fn answer(
    front: &Front,
    kind: Kind,
    order: Order,
    common: Common,
) -> Result<Response, Failure> {
    check_greedy(common.temperature, common.n)?;
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
    let writer = Writer {
        kind,
        model: common.model.unwrap_or_else(|| front.parts.model.clone()),
        created: since.unwrap_or_default().as_secs(),
        tokenizer: front.tokenizer()?.clone(),
        include_usage: common
            .stream_options
            .and_then(|options| options.include_usage)
            .unwrap_or(false),
        details: common.return_cached_tokens_details.unwrap_or(false),
    };
    let order = Order {
        max_new_tokens: order.max_new_tokens.or(common.max_tokens),
        rid: common.rid,
        session_id: common.session_id,
        extra_key: common.extra_key,
        cache_salt: common.cache_salt,
        stop: common.stop.map(Texts::into_vec).unwrap_or_default(),
        stop_token_ids: common.stop_token_ids.unwrap_or_default(),
        ignore_eos: common.ignore_eos.unwrap_or(false),
        keep_special: common.skip_special_tokens == Some(false),
        ..order
    };
    let mut run = Run::start(front, order)?;
    if common.stream {
        run.begin().await?;
        return Ok(event_stream(writer.chunks(run)));
    }
    let (run, output) = run.finish().await?;
    Ok(Json(writer.whole(&run.rid, &output)).into_response())
}

// === impl Writer ===

impl Writer {
    fn whole(&self, rid: &str, output: &Output) -> Value {
        let text = output.text.as_deref().unwrap_or_default();
        let mut choice = json!({
            "index": 0,
            "finish_reason": output.end.as_ref().map(finish_reason),
            "matched_stop": output.end.as_ref().map(matched_stop),
            "logprobs": self.logprobs(output, 0),
        });
        let (name, value) = match self.kind {
            Kind::Chat => (
                "message",
                json!({ "role": "assistant", "content": text, "tool_calls": null }),
            ),
            Kind::Text => ("text", text.into()),
        };
        if let Some(choice) = choice.as_object_mut() {
            choice.insert(name.into(), value);
        }
        let mut reply = self.frame(rid, "");
        if let (Some(reply), Some(end)) = (reply.as_object_mut(), &output.end) {
            reply.insert("choices".into(), json!([choice]));
            reply.insert("usage".into(), usage(end));
            if let Some(details) = self.details(end) {
                reply.insert("sglext".into(), details);
            }
        }
        reply
    }

    fn frame(&self, rid: &str, suffix: &str) -> Value {
        let object = match self.kind {
            Kind::Chat => format!("chat.completion{suffix}"),
            Kind::Text => "text_completion".to_owned(),
        };
        json!({ "id": rid, "object": object, "created": self.created, "model": self.model })
    }

    fn chunks(self, run: Run) -> impl Stream<Item = Value> + Send + 'static {
        let (mut shown, mut told, mut first) = (0, 0, true);
        run.outputs().flat_map(move |(rid, _, output)| {
            let mut chunks = Vec::new();
            if std::mem::take(&mut first) && self.kind == Kind::Chat {
                let delta = json!({ "role": "assistant", "content": "" });
                chunks.push(self.chunk(&rid, "delta", delta, None, Value::Null));
            }
            let text = output.text.as_deref().unwrap_or_default();
            let new = text.get(shown..).unwrap_or_default();
            shown = text.len();
            if !new.is_empty() || output.ids.len() > told {
                let (name, value) = match self.kind {
                    Kind::Chat => ("delta", json!({ "content": new })),
                    Kind::Text => ("text", new.into()),
                };
                let logprobs = self.logprobs(&output, told);
                chunks.push(self.chunk(&rid, name, value, None, logprobs));
            }
            told = output.ids.len();
            if let Some(end) = &output.end {
                let (name, value) = match self.kind {
                    Kind::Chat => ("delta", json!({})),
                    Kind::Text => ("text", "".into()),
                };
                chunks.push(self.chunk(&rid, name, value, Some(end), Value::Null));
                let mut last = |name: &str, value: Value| {
                    let mut chunk = self.frame(&rid, ".chunk");
                    if let Some(chunk) = chunk.as_object_mut() {
                        chunk.insert("choices".into(), json!([]));
                        chunk.insert(name.into(), value);
                    }
                    chunks.push(chunk);
                };
                if let Some(details) = self.details(end) {
                    last("sglext", details);
                }
                if self.include_usage {
                    last("usage", usage(end));
                }
            }
            stream::iter(chunks)
        })
    }

    fn chunk(
        &self,
        rid: &str,
        name: &str,
        value: Value,
        end: Option<&End>,
        logprobs: Value,
    ) -> Value {
        let mut choice = json!({
            "index": 0,
            "finish_reason": end.map(finish_reason),
            "matched_stop": end.map(matched_stop),
            "logprobs": logprobs,
        });
        if let Some(choice) = choice.as_object_mut() {
            choice.insert(name.into(), value);
        }
        let mut chunk = self.frame(rid, ".chunk");
        if let Some(chunk) = chunk.as_object_mut() {
            chunk.insert("choices".into(), json!([choice]));
            chunk.insert("usage".into(), Value::Null);
        }
        chunk
    }

    /// How much was cached, where that is wanted and anything was.
    fn details(&self, end: &End) -> Option<Value> {
        let device = Some(end.answer.cached_tokens).filter(|count| self.details && *count > 0)?;
        Some(json!({ "cached_tokens_details": { "device": device, "host": 0 } }))
    }

    /// Log probabilities from the token `from` on.
    fn logprobs(&self, output: &Output, from: usize) -> Value {
        let all = output.ids.iter().zip(&output.logprobs).skip(from);
        let text = |id: u32| self.tokenizer.decode(&[id], false).unwrap_or_default();
        if output.logprobs.is_empty() {
            return Value::Null;
        }
        match self.kind {
            Kind::Chat => {
                let entry = |id: u32, logprob: f32| {
                    let text = text(id);
                    json!({ "token": text, "bytes": text.as_bytes(), "logprob": logprob })
                };
                let content = all.map(|(id, it)| {
                    let top = it.top.iter().map(|(logprob, id)| entry(*id, *logprob));
                    let top: Vec<Value> = top.collect();
                    let mut own = entry(*id, it.token);
                    if let Some(own) = own.as_object_mut() {
                        own.insert("top_logprobs".into(), top.into());
                    }
                    own
                });
                json!({ "content": content.collect::<Vec<_>>() })
            }
            Kind::Text => {
                let (mut tokens, mut own, mut top) = (Vec::new(), Vec::new(), Vec::new());
                for (id, it) in all {
                    tokens.push(text(*id));
                    own.push(it.token);
                    let likely = it
                        .top
                        .iter()
                        .map(|(logprob, id)| (text(*id), json!(logprob)));
                    top.push(Value::Object(likely.collect()));
                }
                json!({
                    "tokens": tokens, "token_logprobs": own, "top_logprobs": top,
                    "text_offset": [],
                })
            }
        }
    }
}

fn finish_reason(end: &End) -> &'static str {
    match end.answer.finish_reason {
        FinishReason::Length => "length",
        FinishReason::Stop(_) | FinishReason::Text(_) => "stop",
        FinishReason::Abort => "abort",
    }
}

fn matched_stop(end: &End) -> Value {
    match end.answer.finish_reason {
        FinishReason::Stop(token) => token.into(),
        FinishReason::Text(_) => json!(end.matched),
        FinishReason::Length | FinishReason::Abort => Value::Null,
    }
}

/// As SGLang without its cache report: how much was cached is in [`details`].
fn usage(end: &End) -> Value {
    let (prompt, answer) = (end.answer.prompt_tokens, end.answer.output_ids.len());
    json!({
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        "prompt_tokens_details": null, "reasoning_tokens": 0,
    })
}
