//! `POST /generate`.

use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Json, http::StatusCode};
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};

use super::run::{End, Order, Output, Run, Texts, check_greedy, prompt_of};
use super::{Failure, Front, event_stream, parse};
use crate::engine::model::Logprobs;
use crate::engine::request::FinishReason;

/// Fields that SGLang has and this engine does not are ignored.
#[derive(Debug, Deserialize)]
struct GenerateBody {
    input_ids: Option<Vec<i64>>,
    text: Option<String>,
    #[serde(default)]
    sampling_params: SamplingBody,
    rid: Option<String>,
    session_id: Option<String>,
    extra_key: Option<String>,
    cache_salt: Option<String>,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    return_logprob: Option<bool>,
    top_logprobs_num: Option<usize>,
    logprob_start_len: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
struct SamplingBody {
    max_new_tokens: Option<usize>,
    temperature: Option<f64>,
    stop: Option<Texts>,
    stop_token_ids: Option<Vec<u32>>,
    n: Option<u32>,
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
}

/// Answers with tokens, and text where there is a tokenizer.
pub(super) async fn generate(State(front): State<Front>, body: Bytes) -> Result<Response, Failure> {
    let body: GenerateBody = parse(&body)?;
    let stream = body.stream;
    let mut run = Run::start(&front, body.into_order(&front)?)?;
    if !stream {
        let (run, output) = run.finish().await?;
        let reply = reply(&run.rid, run.prompt_tokens, &output, 0);
        return Ok((StatusCode::OK, Json(reply)).into_response());
    }
    run.begin().await?;
    let incremental = front.parts.incremental;
    let mut given = (0, 0);
    let events = run.outputs().map(move |(rid, prompt, mut output)| {
        let (ids, text) = given;
        if incremental {
            given = (
                output.ids.len(),
                output.text.as_ref().map_or(0, String::len),
            );
            output.ids.drain(..ids.min(output.ids.len()));
            if let Some(all) = &mut output.text {
                *all = all.get(text..).unwrap_or_default().to_owned();
            }
            let known = output.logprobs.len().min(ids);
            output.logprobs.drain(..known);
        }
        reply(&rid, prompt, &output, if incremental { ids } else { 0 })
    });
    Ok(event_stream(events))
}

/// `before`: tokens that earlier events told.
fn reply(rid: &str, prompt_tokens: usize, output: &Output, before: usize) -> Value {
    let mut meta = json!({
        "id": rid,
        "finish_reason": output.end.as_ref().map(finish_reason),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": before + output.ids.len(),
    });
    if let (Some(End { answer, took, .. }), Some(meta)) = (&output.end, meta.as_object_mut()) {
        let restored = answer.restored.as_ref().map(|restored| {
            json!({
                "restored_tokens": restored.restored_tokens,
                "reused_tokens": restored.reused_tokens,
                "tier": restored.tier,
                "restore_ms": restored.took.as_secs_f64() * 1000.0,
            })
        });
        meta.insert("cached_tokens".into(), answer.cached_tokens.into());
        meta.insert("e2e_latency".into(), took.as_secs_f64().into());
        meta.insert("engram".into(), restored.into());
    }
    if !output.logprobs.is_empty()
        && let Some(meta) = meta.as_object_mut()
    {
        let (own, top) = logprob_lists(output);
        meta.insert("input_token_logprobs".into(), json!([]));
        meta.insert("output_token_logprobs".into(), own);
        meta.insert("output_top_logprobs".into(), top);
    }
    let mut reply = json!({ "output_ids": output.ids, "meta_info": meta });
    if let (Some(text), Some(reply)) = (&output.text, reply.as_object_mut()) {
        reply.insert("text".into(), text.as_str().into());
    }
    reply
}

/// Why an answer ended, as SGLang says it.
fn finish_reason(end: &End) -> Value {
    match end.answer.finish_reason {
        FinishReason::Length => {
            json!({ "type": "length", "length": end.answer.output_ids.len() })
        }
        FinishReason::Stop(token) => json!({ "type": "stop", "matched": token }),
        FinishReason::Text(_) => json!({ "type": "stop", "matched": end.matched }),
        FinishReason::Abort => json!({ "type": "abort", "message": "Aborted" }),
    }
}

fn logprob_lists(output: &Output) -> (Value, Value) {
    let tokens = output.ids.iter().zip(&output.logprobs);
    let own = tokens.map(|(id, Logprobs { token, .. })| json!([token, id, null]));
    let list = |top: &[(f32, u32)]| -> Value {
        let entries = top.iter().map(|(logprob, id)| json!([logprob, id, null]));
        entries.collect()
    };
    let top = output.logprobs.iter().map(|it| list(&it.top));
    (own.collect(), top.collect())
}

// === impl GenerateBody ===

impl GenerateBody {
    fn into_order(self, front: &Front) -> Result<Order, Failure> {
        let sampling = self.sampling_params;
        check_greedy(sampling.temperature, sampling.n)?;
        let prompt = match (&self.input_ids, &self.text) {
            (Some(_), Some(_)) => {
                return Err(Failure::Body("either input_ids or text".to_owned()));
            }
            (Some(ids), None) => prompt_of(ids)?,
            (None, Some(text)) => front.tokenizer()?.encode(text, true)?,
            (None, None) => front
                .tokenizer()
                .and(Err(Failure::Body("input_ids or text".to_owned())))?,
        };
        if self.logprob_start_len.is_some_and(|from| from >= 0) {
            return Err(Failure::Unsupported(
                "logprob_start_len: of the answer only",
            ));
        }
        let top = self.top_logprobs_num.unwrap_or(0);
        Ok(Order {
            prompt,
            rid: self.rid,
            session_id: self.session_id,
            extra_key: self.extra_key,
            cache_salt: self.cache_salt,
            max_new_tokens: sampling.max_new_tokens,
            stop: sampling.stop.map(Texts::into_vec).unwrap_or_default(),
            stop_token_ids: sampling.stop_token_ids.unwrap_or_default(),
            ignore_eos: sampling.ignore_eos.unwrap_or(false),
            keep_special: sampling.skip_special_tokens == Some(false),
            logprobs: self.return_logprob.unwrap_or(false).then_some(top),
        })
    }
}
