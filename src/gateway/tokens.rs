//! Text and messages to tokens and back: by the model's own tokenizer, or by the server's endpoints.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{Fields, GatewayError};
use crate::tokenizer::{Chat, Tokenizer, TokenizerError};
use crate::upstream::{Upstream, UpstreamError};

/// Who tokenizes.
#[derive(Clone, Debug)]
pub(super) enum Tokens {
    /// The model's own tokenizer, read from its files.
    Own(Arc<Tokenizer>),
    /// The server.
    Server(Upstream),
}

/// What a chat template takes beside messages.
#[derive(Clone, Debug, Default)]
pub(super) struct Extras(Map<String, Value>);

/// Fields of a chat body that its rendering depends on.
const EXTRAS: [&str; 5] = [
    "model",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template_kwargs",
];

// === impl Extras ===

impl Extras {
    /// What a body says of it.
    pub fn of(body: &Fields) -> Extras {
        let said = EXTRAS.iter().filter_map(|name| {
            let value = body.get(*name).filter(|value| !value.is_null())?;
            Some(((*name).to_owned(), value.clone()))
        });
        Extras(said.collect())
    }
}

// === impl Tokens ===

impl Tokens {
    /// The prompt of some messages.
    pub async fn chat(
        &self,
        messages: &[Value],
        extras: &Extras,
        generation: bool,
    ) -> Result<Vec<u32>, GatewayError> {
        match self {
            Tokens::Own(tokenizer) => {
                let (messages, Extras(extras)) = (messages.to_vec(), extras.clone());
                let render = move |tokenizer: &Tokenizer| {
                    tokenizer.encode_chat(&Chat {
                        messages: &messages,
                        tools: extras.get("tools"),
                        generation,
                        extra: extras
                            .get("chat_template_kwargs")
                            .and_then(Value::as_object),
                    })
                };
                blocking(tokenizer, render).await
            }
            Tokens::Server(server) => {
                let mut body = extras.0.clone();
                body.insert("messages".into(), messages.into());
                if !generation {
                    body.insert("add_generation_prompt".into(), false.into());
                }
                let answer = server.json("/tokenize", &Value::Object(body)).await;
                ids(answer)
            }
        }
    }

    /// The tokens of a text. `special`: with those that the model puts around a prompt.
    pub async fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, GatewayError> {
        if text.is_empty() && !special {
            return Ok(Vec::new());
        }
        match self {
            Tokens::Own(tokenizer) => {
                let text = text.to_owned();
                blocking(tokenizer, move |it| it.encode(&text, special)).await
            }
            Tokens::Server(server) => {
                let body = json!({ "prompt": text, "add_special_tokens": special });
                ids(server.json("/tokenize", &body).await)
            }
        }
    }

    /// The text of tokens, special ones too unless they are skipped.
    pub async fn decode(&self, tokens: &[u32], skip: bool) -> Result<String, GatewayError> {
        if tokens.is_empty() {
            return Ok(String::new());
        }
        match self {
            Tokens::Own(tokenizer) => {
                let tokens = tokens.to_vec();
                blocking(tokenizer, move |it| it.decode(&tokens, skip)).await
            }
            Tokens::Server(server) => {
                let body = json!({ "tokens": tokens, "skip_special_tokens": skip });
                let answer = server.json("/detokenize", &body).await;
                let answer = answer.map_err(refused)?;
                match answer.get("text") {
                    Some(Value::String(text)) => Ok(text.clone()),
                    _ => Err(odd("/detokenize")),
                }
            }
        }
    }

    /// Whether a token is no text.
    pub async fn is_special(&self, token: u32) -> Result<bool, GatewayError> {
        match self {
            Tokens::Own(tokenizer) => Ok(tokenizer.is_special(token)),
            Tokens::Server(_) => Ok(self.decode(&[token], true).await?.is_empty()
                && !self.decode(&[token], false).await?.is_empty()),
        }
    }

    /// For people: who it is.
    pub fn name(&self) -> &'static str {
        match self {
            Tokens::Own(_) => "local",
            Tokens::Server(_) => "server",
        }
    }
}

/// Long texts take their time, which belongs to no connection.
async fn blocking<T: Send + 'static>(
    tokenizer: &Arc<Tokenizer>,
    work: impl FnOnce(&Tokenizer) -> Result<T, TokenizerError> + Send + 'static,
) -> Result<T, GatewayError> {
    let tokenizer = Arc::clone(tokenizer);
    let done = tokio::task::spawn_blocking(move || work(&tokenizer)).await;
    let done = done.map_err(|error| GatewayError::Tokenization(error.to_string()))?;
    done.map_err(|error| GatewayError::Tokenization(error.to_string()))
}

fn ids(answer: Result<Value, UpstreamError>) -> Result<Vec<u32>, GatewayError> {
    let answer = answer.map_err(refused)?;
    let tokens = answer.get("tokens").cloned().unwrap_or_default();
    serde_json::from_value(tokens).map_err(|_| odd("/tokenize"))
}

/// A refusal of the tokenizing endpoints is one of the client's messages, but not in their words.
fn refused(error: UpstreamError) -> GatewayError {
    match error {
        UpstreamError::Refused(refusal) if refusal.status == 400 => {
            let said: Value = serde_json::from_slice(&refusal.body).unwrap_or_default();
            let text = ["/message", "/error/message"]
                .iter()
                .find_map(|at| said.pointer(at)?.as_str());
            let text = text.unwrap_or("the server does not tokenize this");
            GatewayError::Tokenization(text.to_owned())
        }
        UpstreamError::Refused(refusal) => GatewayError::Upstream(UpstreamError::Bad(format!(
            "its tokenizing endpoint answers with status {}",
            refusal.status
        ))),
        error => GatewayError::Upstream(error),
    }
}

fn odd(path: &str) -> GatewayError {
    GatewayError::Upstream(UpstreamError::Bad(format!("an odd answer of {path}")))
}
