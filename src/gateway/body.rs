//! Reading what a client sent.

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Fields, GatewayError};

/// Takes a field, if it is there and not null.
///
/// # Errors
/// `Invalid` when it has another type.
pub(super) fn take<T: DeserializeOwned>(
    body: &mut Fields,
    name: &str,
) -> Result<Option<T>, GatewayError> {
    match body.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => T::deserialize(value)
            .map(Some)
            .map_err(|error| GatewayError::Invalid(format!("`{name}`: {error}"))),
    }
}

/// A field that is not taken.
///
/// # Errors
/// As [`take`].
pub(super) fn look<T: DeserializeOwned>(
    body: &Fields,
    name: &str,
) -> Result<Option<T>, GatewayError> {
    match body.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => T::deserialize(value)
            .map(Some)
            .map_err(|error| GatewayError::Invalid(format!("`{name}`: {error}"))),
    }
}

/// Refuses fields that say something else than nothing: null, `false`, an empty list or text.
///
/// # Errors
/// `Unsupported`, naming the field.
pub(super) fn refuse(body: &Fields, names: &[&str]) -> Result<(), GatewayError> {
    let says = |value: &Value| match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    };
    match names.iter().find(|name| body.get(**name).is_some_and(says)) {
        Some(name) => Err(GatewayError::Unsupported(format!("`{name}`"))),
        None => Ok(()),
    }
}

/// Refuses counts of answers other than one.
///
/// # Errors
/// `Unsupported`, naming the field.
pub(super) fn one_answer(body: &Fields, names: &[&str]) -> Result<(), GatewayError> {
    for name in names {
        if look::<u32>(body, name)?.is_some_and(|count| count != 1) {
            let text = format!("`{name}` other than 1: a turn has one answer");
            return Err(GatewayError::Unsupported(text));
        }
    }
    Ok(())
}

/// Fields of requests with other input than tokens.
pub(super) const OTHER_INPUT: [&str; 9] = [
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "session_id",
    "session_params",
    "mm_hashes",
    "positional_embed_overrides",
    "return_prompt_token_ids",
];
