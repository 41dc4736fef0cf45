//! `POST /v1/chat/completions` and `POST /v1/completions`: with a `conversation_id` the body has
//! only what is new; without one it passes through as it is.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};

use super::bodies::{ChatBody, CompletionBody, ServerSentEvent};
use super::error::ApiError;
use super::generate::{NAMED, answer, refusal};
use super::guard::Admitted;
use super::sent::Sent;
use super::state::Shared;
use crate::gateway::{Ask, Gateway, GatewayError, Reply};

/// Go on with a conversation: the messages are only the new ones.
///
/// Without `conversation_id` all of it passes through, and the inference server answers.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "generate",
    request_body = ChatBody,
    responses((status = 200, description = "As OpenAI's", content(
        (Object = "application/json"),
        (ServerSentEvent = "text/event-stream"),
    )))
)]
pub async fn chat(
    State(shared): State<Shared>,
    Extension(admitted): Extension<Admitted>,
    request: Request,
) -> Response {
    go_on(&shared, &admitted, request, |gateway, ask| async move {
        gateway.chat(ask).await
    })
    .await
}

/// Go on with a conversation: the prompt is only what is new.
///
/// Without `conversation_id` all of it passes through, and the inference server answers.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "generate",
    request_body = CompletionBody,
    responses((status = 200, description = "As OpenAI's", content(
        (Object = "application/json"),
        (ServerSentEvent = "text/event-stream"),
    )))
)]
pub async fn complete(
    State(shared): State<Shared>,
    Extension(admitted): Extension<Admitted>,
    request: Request,
) -> Response {
    go_on(&shared, &admitted, request, |gateway, ask| async move {
        gateway.complete(ask).await
    })
    .await
}

/// Goes on with the conversation that the body names, or passes the request through.
async fn go_on<F>(
    shared: &Shared,
    admitted: &Admitted,
    request: Request,
    with: impl FnOnce(Arc<Gateway>, Ask) -> F,
) -> Response
where
    F: Future<Output = Result<Reply, GatewayError>>,
{
    let work = async {
        let sent = Sent::read(request).await?;
        match sent
            .ask(admitted, &NAMED)
            .map_err(ApiError::into_response)?
        {
            Some(ask) => {
                let gateway = shared.gateway().map_err(refusal)?;
                with(Arc::clone(gateway), ask).await.map_err(refusal)
            }
            None => sent.pass(shared, admitted).await,
        }
    };
    answer(work.await)
}
