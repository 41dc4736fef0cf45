//! Parts of conversations, as requests name them.

use super::body::Fields;
use super::error::ApiError;
use super::names::checked;
use crate::service::Selector;

/// A number from 1.
pub(super) fn number(field: &str, text: &str) -> Result<u32, ApiError> {
    match text.parse() {
        Ok(number @ 1..) => Ok(number),
        _ => Err(ApiError::invalid(format!(
            "`{field}` is not a number from 1"
        ))),
    }
}

/// The turn or the branch that a body names, by either name of the field.
pub(super) fn which(body: &mut Fields) -> Result<(Option<u32>, Option<String>), ApiError> {
    let turn = one_of(
        "turn",
        body.take("turn")?,
        "turn_number",
        body.take("turn_number")?,
    )?;
    let branch = (body.take("branch")?, body.take("branch_name")?);
    let branch = one_of("branch", branch.0, "branch_name", branch.1)?;
    Ok((turn, branch))
}

/// Two names of one field.
///
/// # Errors
/// 400 when they say different things.
pub(super) fn one_of<T: PartialEq>(
    name: &str,
    value: Option<T>,
    other: &str,
    alias: Option<T>,
) -> Result<Option<T>, ApiError> {
    match (value, alias) {
        (Some(value), Some(alias)) if value != alias => Err(ApiError::invalid(format!(
            "`{name}` and `{other}` are the same, and say different things"
        ))),
        (value, alias) => Ok(value.or(alias)),
    }
}

/// A turn or a branch of a conversation.
pub(super) fn part(
    select: Selector,
    turn: Option<u32>,
    branch: Option<String>,
) -> Result<Selector, ApiError> {
    match (turn, &branch) {
        (Some(0), _) => Err(ApiError::invalid("`turn` counts from 1")),
        (Some(_), Some(_)) => Err(ApiError::invalid("`turn` and `branch`: give one of them")),
        _ => Ok(Selector {
            turn_number: turn,
            branch_name: checked("branch", branch)?,
            ..select
        }),
    }
}

/// One side of a comparison.
pub(super) fn side(
    field: &str,
    select: Selector,
    text: Option<String>,
) -> Result<Selector, ApiError> {
    let Some(text) = text else { return Ok(select) };
    if let Some(turn) = text.strip_prefix("turn:") {
        return part(select, Some(number(field, turn)?), None);
    }
    if let Some(branch) = text.strip_prefix("branch:") {
        return part(select, None, Some(branch.to_owned()));
    }
    match number(field, &text) {
        Ok(turn) => part(select, Some(turn), None),
        Err(_) => part(select, None, Some(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_is_a_turn_a_branch_or_the_latest() {
        let of = |text: &str| {
            let select = Selector::conversation("c");
            let found = side("a", select, Some(text.to_owned())).ok()?;
            Some((found.turn_number, found.branch_name))
        };
        let branch = |name: &str| Some((None, Some(name.to_owned())));
        assert_eq!(of("3"), Some((Some(3), None)));
        assert_eq!(of("turn:3"), Some((Some(3), None)));
        assert_eq!(of("before"), branch("before"));
        assert_eq!(of("branch:3"), branch("3"));
        assert_eq!(of("0"), branch("0"));
        for bad in ["turn:0", "turn:x", "branch:", "", "branch:../x"] {
            assert_eq!(of(bad), None, "{bad}");
        }
        let latest = side("a", Selector::conversation("c"), None).unwrap();
        assert_eq!(latest, Selector::conversation("c"));
    }
}
