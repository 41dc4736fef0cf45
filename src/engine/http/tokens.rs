//! `POST /tokenize` and `POST /detokenize`.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::run::Texts;
use super::{Failure, Front, parse};
use crate::engine::model::MAX_TOKENS;
use crate::tokenizer::Chat;

#[derive(Debug, Deserialize)]
struct TokenizeBody {
    prompt: Option<Texts>,
    messages: Option<Vec<Value>>,
    tools: Option<Value>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
struct DetokenizeBody {
    tokens: Vec<u32>,
    skip_special_tokens: Option<bool>,
}

/// The tokens of a text, of several, or of messages.
pub(super) async fn tokenize(
    State(front): State<Front>,
    body: Bytes,
) -> Result<Json<Value>, Failure> {
    let body: TokenizeBody = parse(&body)?;
    let tokenizer = front.tokenizer()?;
    let special = body.add_special_tokens.unwrap_or(true);
    let (tokens, count) = match (&body.prompt, &body.messages) {
        (Some(Texts::One(text)), None) => {
            let ids = tokenizer.encode(text, special)?;
            (json!(ids), json!(ids.len()))
        }
        (Some(Texts::Many(texts)), None) => {
            let ids = texts.iter().map(|text| tokenizer.encode(text, special));
            let ids = ids.collect::<Result<Vec<_>, _>>()?;
            let counts: Vec<usize> = ids.iter().map(Vec::len).collect();
            (json!(ids), json!(counts))
        }
        (None, Some(messages)) => {
            let ids = tokenizer.encode_chat(&Chat {
                messages,
                tools: body.tools.as_ref(),
                generation: body.add_generation_prompt.unwrap_or(true),
                extra: body.chat_template_kwargs.as_ref(),
            })?;
            (json!(ids), json!(ids.len()))
        }
        _ => {
            let text = "Exactly one of 'prompt' or 'messages' must be provided.";
            return Err(Failure::Body(text.to_owned()));
        }
    };
    Ok(Json(json!({
        "tokens": tokens, "count": count, "max_model_len": MAX_TOKENS,
    })))
}

/// The text of tokens.
pub(super) async fn detokenize(
    State(front): State<Front>,
    body: Bytes,
) -> Result<Json<Value>, Failure> {
    let body: DetokenizeBody = parse(&body)?;
    let skip = body.skip_special_tokens.unwrap_or(true);
    let text = front.tokenizer()?.decode(&body.tokens, skip)?;
    Ok(Json(json!({ "text": text })))
}
