//! Names that clients give: conversations, requests, branches, tenants.
//!
//! A name is any UTF-8 of 1 to 255 bytes without control characters. `:` and `/` are allowed, as
//! clients use them; what could only be a path is not: a leading `/`, and the parts `.` and `..`
//! between slashes. Names reach the file system only as hashes, so this is a second wall, and keeps
//! logs and tables readable.

use super::error::ApiError;

/// Longest name in bytes.
const NAME_MAX: usize = 255;

/// `value` when it is a good name.
///
/// # Errors
/// 400 which says the `field` and the rule.
pub fn checked(field: &str, value: Option<String>) -> Result<Option<String>, ApiError> {
    let Some(name) = value else { return Ok(None) };
    let problem = if name.is_empty() {
        "must not be empty"
    } else if name.len() > NAME_MAX {
        "is longer than 255 bytes"
    } else if name.chars().any(char::is_control) {
        "must not contain control characters"
    } else if name.starts_with('/') || name.split('/').any(|part| matches!(part, "." | "..")) {
        "must not look like a path"
    } else {
        return Ok(Some(name));
    };
    Err(ApiError::invalid(format!("`{field}` {problem}")))
}
