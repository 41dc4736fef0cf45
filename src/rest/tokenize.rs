//! `POST /tokenize_chat`: the tokens of messages, for clients that compose prompts by themselves.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::bodies::TokenizeChatBody;
use super::body::Fields;
use super::error::ApiError;
use super::generate::refusal;
use super::state::Shared;

/// Messages as the tokens of a prompt.
#[derive(Debug, ToSchema)]
pub struct Tokenized {
    /// Always `true`.
    pub success: bool,
    /// How many they are.
    pub token_count: usize,
    /// All of them.
    pub token_ids: Vec<u32>,
    /// Whose chat template it was.
    pub chat_template_name: String,
}

/// The tokens of messages, for clients that compose prompts by themselves.
#[utoipa::path(
    post,
    path = "/tokenize_chat",
    tags = ["compatible", "generate"],
    request_body = TokenizeChatBody,
    responses((status = 200, body = Tokenized))
)]
pub async fn chat(State(shared): State<Shared>, mut body: Fields) -> Result<Json<Value>, Response> {
    let (messages, generation) = read(&mut body).map_err(ApiError::into_response)?;
    let gateway = shared.gateway().map_err(refusal)?;
    let tokens = gateway.tokenize_chat(&messages, body.rest(), generation);
    let (tokens, who) = tokens.await.map_err(refusal)?;
    Ok(Json(json!({
        "success": true,
        "token_count": tokens.len(),
        "token_ids": tokens,
        "chat_template_name": who,
    })))
}

fn read(body: &mut Fields) -> Result<(Vec<Value>, bool), ApiError> {
    let messages: Option<Vec<Value>> = body.take("messages")?;
    let generation = body.take("add_generation_prompt")?.unwrap_or(false);
    let messages = messages.ok_or_else(|| ApiError::invalid("`messages` is needed"))?;
    Ok((messages, generation))
}
