//! The bodies of requests, as the OpenAPI document describes them. Handlers take the fields one by
//! one from [`Fields`](super::body::Fields), so that a refusal names the field and unknown ones do no
//! harm; a test holds both together.

use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::service::Policy;
use crate::types::SnapshotId;

/// What to save: `conversation_id` or `rid` is needed.
#[derive(Debug, ToSchema)]
pub struct SaveBody {
    /// Whose conversation it is. Default: nobody's.
    #[schema(min_length = 1, max_length = 255)]
    pub tenant: Option<String>,
    /// The request, as the inference server knows it.
    #[schema(min_length = 1, max_length = 255)]
    pub rid: Option<String>,
    /// The conversation, by its `session_id` or by the rid of a request of it.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: Option<String>,
    /// The turn, counted from 1; without it the latest.
    #[schema(minimum = 1)]
    pub turn_number: Option<u32>,
    /// Names the state, which also keeps it from eviction.
    #[schema(min_length = 1, max_length = 255)]
    pub branch_name: Option<String>,
    /// A snapshot's id selects it; any other text is given back as `label`.
    pub snapshot_id: Option<String>,
    /// Wait until it is on disk. Default: true.
    pub durable: Option<bool>,
}

/// What to bring into RAM, or to generate from: `conversation_id`, `rid` or `snapshot_id` is needed;
/// without a turn or branch the latest by time is meant.
#[derive(Debug, ToSchema)]
pub struct RestoreBody {
    /// Whose conversation it is. Default: nobody's.
    #[schema(min_length = 1, max_length = 255)]
    pub tenant: Option<String>,
    /// The request, as the inference server knows it.
    #[schema(min_length = 1, max_length = 255)]
    pub rid: Option<String>,
    /// The conversation, by its `session_id` or by the rid of a request of it.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: Option<String>,
    /// The turn, counted from 1.
    #[schema(minimum = 1)]
    pub turn_number: Option<u32>,
    /// A named branch.
    #[schema(min_length = 1, max_length = 255)]
    pub branch_name: Option<String>,
    /// The snapshot itself.
    pub snapshot_id: Option<SnapshotId>,
    /// How long it stays in RAM at least. Default: as configured.
    #[schema(minimum = 0, maximum = 86400)]
    pub pin_seconds: Option<f64>,
    /// Given back in the answer.
    pub request_id: Option<String>,
    /// Generate from it; then `continuation_ids` and `max_new_tokens` are needed, else forbidden.
    pub create_new_request: Option<bool>,
    /// The new tokens.
    pub continuation_ids: Option<Vec<u32>>,
    /// How many tokens to generate at most.
    pub max_new_tokens: Option<u32>,
    /// Whatever else the inference server knows of sampling.
    #[schema(value_type = Option<Object>)]
    pub sampling_params: Option<Map<String, Value>>,
    /// Where the new tokens follow: `turn`, its end, or `boundary`, that of the snapshot. Default:
    /// `boundary` if they begin with what is between.
    pub append_to: Option<String>,
}

/// Which snapshots to list.
#[derive(Debug, ToSchema)]
pub struct ListBody {
    /// Whose conversation it is. Default: nobody's.
    #[schema(min_length = 1, max_length = 255)]
    pub tenant: Option<String>,
    /// The conversation, by its `session_id` or by the rid of a request of it.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: String,
    /// At most so many rows; 0: the default of 1000.
    pub limit: Option<usize>,
    /// Skip so many rows.
    pub offset: Option<usize>,
}

/// One snapshot: `snapshot_id`, or a conversation or request with a turn, a branch, or its own rid.
#[derive(Debug, ToSchema)]
pub struct InfoBody {
    /// Whose conversation it is. Default: nobody's.
    #[schema(min_length = 1, max_length = 255)]
    pub tenant: Option<String>,
    /// The request, as the inference server knows it.
    #[schema(min_length = 1, max_length = 255)]
    pub rid: Option<String>,
    /// The conversation, by its `session_id` or by the rid of a request of it.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: Option<String>,
    /// The turn, counted from 1.
    #[schema(minimum = 1)]
    pub turn_number: Option<u32>,
    /// A named branch.
    #[schema(min_length = 1, max_length = 255)]
    pub branch_name: Option<String>,
    /// The snapshot itself.
    pub snapshot_id: Option<SnapshotId>,
    /// Tell the token ids, too. Default: true.
    pub with_tokens: Option<bool>,
}

/// What to delete: as in [`InfoBody`], or all of a conversation.
#[derive(Debug, ToSchema)]
pub struct DeleteBody {
    /// Whose conversation it is. Default: nobody's.
    #[schema(min_length = 1, max_length = 255)]
    pub tenant: Option<String>,
    /// The request, as the inference server knows it.
    #[schema(min_length = 1, max_length = 255)]
    pub rid: Option<String>,
    /// The conversation, by its `session_id` or by the rid of a request of it.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: Option<String>,
    /// The turn, counted from 1.
    #[schema(minimum = 1)]
    pub turn_number: Option<u32>,
    /// A named branch.
    #[schema(min_length = 1, max_length = 255)]
    pub branch_name: Option<String>,
    /// The snapshot itself.
    pub snapshot_id: Option<SnapshotId>,
    /// The whole conversation; then no part of it may be named. Default: false.
    pub whole: Option<bool>,
}

/// Which snapshot to export: as in [`RestoreBody`].
#[derive(Debug, ToSchema)]
pub struct ExportBody {
    /// Whose conversation it is. Default: nobody's.
    #[schema(min_length = 1, max_length = 255)]
    pub tenant: Option<String>,
    /// The request, as the inference server knows it.
    #[schema(min_length = 1, max_length = 255)]
    pub rid: Option<String>,
    /// The conversation, by its `session_id` or by the rid of a request of it.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: Option<String>,
    /// The turn, counted from 1.
    #[schema(minimum = 1)]
    pub turn_number: Option<u32>,
    /// A named branch.
    #[schema(min_length = 1, max_length = 255)]
    pub branch_name: Option<String>,
    /// The snapshot itself.
    pub snapshot_id: Option<SnapshotId>,
}

/// What the new conversation begins with.
#[derive(Debug, ToSchema)]
pub struct ForkBody {
    /// Its name.
    #[schema(min_length = 1, max_length = 255)]
    pub new_id: String,
    /// Whose conversation it is; also `?tenant=`.
    #[schema(min_length = 1, max_length = 255)]
    pub tenant: Option<String>,
    /// The last turn that it has; without a turn or branch the latest.
    #[schema(minimum = 1)]
    pub turn: Option<u32>,
    /// The branch that it begins with.
    #[schema(min_length = 1, max_length = 255)]
    pub branch: Option<String>,
}

/// Rules of saving.
#[derive(Debug, ToSchema)]
pub struct PolicyBody {
    /// Which states go to disk by themselves.
    pub policy: Policy,
    /// How many turns `every_n_turns` means. Default: as configured.
    #[schema(minimum = 1)]
    pub every_n_turns: Option<u32>,
    /// Between two turns that are written at least so much time passes. Default: as configured.
    #[schema(minimum = 0, maximum = 2592000)]
    pub min_interval_seconds: Option<f64>,
}

/// Which turn calls a tool: without a word the latest.
#[derive(Debug, ToSchema)]
pub struct ToolCallBody {
    /// The turn's request.
    #[schema(min_length = 1, max_length = 255)]
    pub rid: Option<String>,
    /// The turn, counted from 1.
    #[schema(minimum = 1)]
    pub turn: Option<u32>,
}

/// What is to change: at least one of both.
#[derive(Debug, ToSchema)]
pub struct MarkBody {
    /// Keep it from eviction, or no longer.
    pub pinned: Option<bool>,
    /// Call it so; null takes that away.
    #[schema(min_length = 1, max_length = 1024)]
    pub label: Option<String>,
}

/// Messages to be made into tokens.
#[derive(Debug, ToSchema)]
pub struct TokenizeChatBody {
    /// The messages, as the chat template takes them.
    #[schema(value_type = Vec<Object>)]
    pub messages: Vec<Value>,
    /// End with what lets the model answer. Default: false.
    pub add_generation_prompt: Option<bool>,
}

/// What is new in a conversation, as tokens or text. Whatever else SGLang's `/generate` takes passes
/// through.
#[derive(Debug, ToSchema)]
pub struct GenerateBody {
    /// The conversation; new, or known by any of its names.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: String,
    /// The turn to go on from, counted from 1; without a turn or branch the latest.
    #[schema(minimum = 1)]
    pub turn: Option<u32>,
    /// The branch to go on from.
    #[schema(min_length = 1, max_length = 255)]
    pub branch: Option<String>,
    /// The new tokens.
    pub input_ids: Option<Vec<u32>>,
    /// The new text, instead.
    pub text: Option<String>,
    /// Sampling, as SGLang knows it.
    #[schema(value_type = Option<Object>)]
    pub sampling_params: Option<Map<String, Value>>,
    /// Answer with server-sent events. Default: false.
    pub stream: Option<bool>,
}

/// A request of OpenAI's chat completions. With `conversation_id` the messages are only the new ones;
/// without it all of it passes through. Whatever else the inference server takes passes through.
#[derive(Debug, ToSchema)]
pub struct ChatBody {
    /// The messages.
    #[schema(value_type = Vec<Object>)]
    pub messages: Vec<Value>,
    /// The conversation; new, or known by any of its names.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: Option<String>,
    /// The turn to go on from, counted from 1; without a turn or branch the latest.
    #[schema(minimum = 1)]
    pub turn: Option<u32>,
    /// The branch to go on from.
    #[schema(min_length = 1, max_length = 255)]
    pub branch: Option<String>,
    /// The model, as the inference server calls it.
    pub model: Option<String>,
    /// Answer with server-sent events. Default: false.
    pub stream: Option<bool>,
}

/// A request of OpenAI's completions. With `conversation_id` the prompt is only what is new; without
/// it all of it passes through. Whatever else the inference server takes passes through.
#[derive(Debug, ToSchema)]
pub struct CompletionBody {
    /// Text or tokens.
    #[schema(value_type = Value)]
    pub prompt: Value,
    /// The conversation; new, or known by any of its names.
    #[schema(min_length = 1, max_length = 255)]
    pub conversation_id: Option<String>,
    /// The turn to go on from, counted from 1; without a turn or branch the latest.
    #[schema(minimum = 1)]
    pub turn: Option<u32>,
    /// The branch to go on from.
    #[schema(min_length = 1, max_length = 255)]
    pub branch: Option<String>,
    /// The model, as the inference server calls it.
    pub model: Option<String>,
    /// Answer with server-sent events. Default: false.
    pub stream: Option<bool>,
}

/// One event of a stream.
#[derive(Debug, ToSchema)]
pub struct ServerSentEvent {
    /// JSON, or `[DONE]`.
    pub data: String,
    /// Its name.
    pub event: Option<String>,
    /// Its id.
    pub id: Option<String>,
}

#[cfg(test)]
mod tests {
    use utoipa::PartialSchema;

    use super::super::body::Fields;
    use super::super::snapshots;
    use super::*;

    /// The fields of a documented body, all null.
    fn nulls<T: PartialSchema>() -> (usize, Fields) {
        let schema = serde_json::to_value(T::schema()).unwrap();
        let names = schema["properties"].as_object().unwrap().keys();
        let nulls: Map<String, Value> = names.map(|name| (name.clone(), Value::Null)).collect();
        let bytes = serde_json::to_vec(&nulls).unwrap();
        (nulls.len(), Fields::parse(&bytes).unwrap())
    }

    #[test]
    fn what_is_documented_is_read() {
        let left = |(count, mut fields): (usize, Fields), read: fn(&mut Fields)| {
            read(&mut fields);
            (count, fields.rest().keys().cloned().collect::<Vec<_>>())
        };
        let none = Vec::<String>::new();
        assert_eq!(
            left(nulls::<SaveBody>(), |it| drop(snapshots::save_of(it))),
            (7, none.clone())
        );
        assert_eq!(
            left(nulls::<RestoreBody>(), |it| drop(snapshots::restore_of(it))),
            (13, none.clone())
        );
        assert_eq!(
            left(nulls::<InfoBody>(), |it| drop(snapshots::info_of(it))),
            (7, none.clone())
        );
        assert_eq!(
            left(nulls::<DeleteBody>(), |it| drop(snapshots::delete_of(it))),
            (7, none)
        );
    }
}
