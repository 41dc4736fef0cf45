//! `/v1/completions` with a conversation: a text or tokens behind what is known.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::json;

use super::body::{OTHER_INPUT, look, one_answer, refuse, take};
use super::chat::{DETAILS, finish};
use super::chat_stream::{ChatStream, Wanted};
use super::compose::Composed;
use super::{Ask, Gateway, GatewayError, Reply};

/// Where the server answers.
const PATH: &str = "/v1/completions";
/// Fields that a conversation leaves no room for.
const REFUSED: [&str; 4] = ["echo", "suffix", "input_ids", "return_hidden_states"];

/// One prompt.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

// === impl Gateway ===

impl Gateway {
    /// Goes on with a conversation from a text or tokens, which are only what is new.
    ///
    /// # Errors
    /// All of [`GatewayError`].
    pub async fn complete(self: &Arc<Self>, ask: Ask) -> Result<Reply, GatewayError> {
        let Ask {
            request_id,
            target,
            mut body,
        } = ask;
        let flight = self.takeoff(take(&mut body, "rid")?)?;
        refuse(&body, &OTHER_INPUT)?;
        refuse(&body, &REFUSED)?;
        one_answer(&body, &["n", "best_of"])?;
        let prompt: Option<Prompt> = take(&mut body, "prompt").map_err(|_| {
            let text = "`prompt` must be one text, or one list of tokens";
            GatewayError::Unsupported(text.to_owned())
        })?;
        let Some(prompt) = prompt else {
            return Err(GatewayError::Invalid("`prompt` is needed".to_owned()));
        };
        let wanted = Wanted::of(&body)?;
        let stream = look(&body, "stream")?.unwrap_or(false);
        let (mut order, base) = self.enter(flight, body, (request_id, target)).await?;
        let new = match prompt {
            Prompt::Ids(ids) => ids,
            Prompt::Text(text) => self.tokens.encode(&text, base.tokens.is_empty()).await?,
        };
        let composed = Composed::append(&base.tokens, &new);
        order.compose(&composed)?;
        // This endpoint takes tokens under another name.
        order.body.remove("input_ids");
        order.body.insert("prompt".into(), json!(composed.tokens));
        order.body.insert(DETAILS.into(), true.into());
        if stream {
            order.ask_usage();
            let (events, order) = order.events(PATH).await?;
            let stream = ChatStream::new(events, order, None, wanted);
            return Ok(Reply::Events(stream.into_bodies()));
        }
        let (mut answer, mut order) = order.json(PATH).await?;
        finish(&mut order.flight, &order.facts, &mut answer, None, wanted);
        Ok(Reply::Json(answer))
    }

    /// The prompt of some messages, for clients that compose by themselves.
    ///
    /// # Errors
    /// `Tokenization`, `NotImplemented`, and those of the server.
    pub async fn tokenize_chat(
        &self,
        messages: &[serde_json::Value],
        body: &super::Fields,
        generation: bool,
    ) -> Result<(Vec<u32>, &'static str), GatewayError> {
        let extras = super::tokens::Extras::of(body);
        let tokens = self.tokens.chat(messages, &extras, generation).await?;
        if !generation && self.tokens.name() == "server" {
            // Older servers always open the answer and do not say so.
            let open = self.tokens.chat(messages, &extras, true).await?;
            if open == tokens {
                return Err(GatewayError::NotImplemented(
                    "the server does not render without the beginning of an answer: set \
                     upstream.tokenizer",
                ));
            }
        }
        Ok((tokens, self.tokens.name()))
    }
}
