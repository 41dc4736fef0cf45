//! Fields of the daemon's answers, as people read them.

use serde_json::Value;

use super::table::{plain, size, time};

/// One snapshot, a field a line; what is not in the answer is left out.
pub fn describe(row: &Value) -> String {
    let lines = [
        ("message", text(row, "message")),
        ("snapshot", text(row, "snapshot_id")),
        ("conversation", text(row, "conversation_id")),
        ("turn", text(row, "turn_number")),
        ("branch", text(row, "branch_name")),
        ("label", text(row, "label")),
        ("request", text(row, "rid")),
        ("model", text(row, "model_name")),
        ("tokens", text(row, "boundary")),
        ("after boundary", text(row, "tokens_after_boundary")),
        ("parent", text(row, "parent_snapshot")),
        ("tier", text(row, "tier")),
        ("from tier", text(row, "from_tier")),
        ("moved", bytes(row, "moved_bytes")),
        ("took ms", text(row, "restore_time_ms")),
        ("written", bytes(row, "written_bytes")),
        ("size", bytes(row, "size_bytes")),
        ("durable", text(row, "durable")),
        ("pinned", text(row, "pinned")),
        ("pinned by", names(row, "pinned_by")),
        ("pinned until", moment(row, "pinned_until")),
        ("time", moment(row, "timestamp")),
        ("created", moment(row, "created_at")),
    ];
    let lines = lines.iter().filter(|(_, value)| value != NOTHING);
    lines
        .map(|(name, value)| format!("{name:<15} {value}\n"))
        .collect()
}

/// What stands for a missing value.
const NOTHING: &str = "-";

/// The rows of a list in an answer; none where there is no such list.
pub fn rows<'a>(answer: &'a Value, key: &str) -> &'a [Value] {
    let rows = answer.get(key).and_then(Value::as_array);
    rows.map_or(&[], Vec::as_slice)
}

/// Says how many rows of a list follow those that were shown, which begin at `offset`; nothing if none do.
pub fn and_more(answer: &Value, offset: u64, shown: usize) -> String {
    let total = answer.get("total").and_then(Value::as_u64).unwrap_or(0);
    let seen = offset + shown as u64;
    match total.checked_sub(seen) {
        None | Some(0) => String::new(),
        Some(more) => format!("({more} more: --offset {seen})\n"),
    }
}

/// A field of an answer.
pub fn text(row: &Value, key: &str) -> String {
    match row.get(key) {
        None | Some(Value::Null) => NOTHING.into(),
        Some(Value::String(text)) => plain(text),
        Some(Value::Bool(true)) => "yes".into(),
        Some(Value::Bool(false)) => "no".into(),
        Some(Value::Number(number)) if number.is_f64() => {
            format!("{:.1}", number.as_f64().unwrap_or(0.0))
        }
        Some(other) => plain(&other.to_string()),
    }
}

/// A list of names.
pub fn names(row: &Value, key: &str) -> String {
    let names = row
        .get(key)
        .and_then(Value::as_array)
        .map_or(&[][..], Vec::as_slice);
    let names: Vec<_> = names.iter().filter_map(Value::as_str).map(plain).collect();
    if names.is_empty() {
        NOTHING.into()
    } else {
        names.join(",")
    }
}

/// A number of bytes.
pub fn bytes(row: &Value, key: &str) -> String {
    row.get(key)
        .and_then(Value::as_u64)
        .map_or(NOTHING.into(), size)
}

/// A time in Unix seconds.
pub fn moment(row: &Value, key: &str) -> String {
    row.get(key)
        .and_then(Value::as_f64)
        .map_or(NOTHING.into(), time)
}

/// `1 name`, `2 names`.
pub fn count(row: &Value, key: &str, one: &str) -> String {
    let number = row.get(key).and_then(Value::as_u64).unwrap_or(0);
    let s = if number == 1 { "" } else { "s" };
    format!("{number} {one}{s}")
}

/// A refusal in the words of the command line instead of those of the REST surface.
pub fn as_flags(message: &str) -> String {
    const WORDS: [(&str, &str); 9] = [
        ("`conversation_id`", "CONVERSATION"),
        ("`turn_number`", "`--turn`"),
        ("`branch_name`", "`--branch`"),
        ("`snapshot_id`", "`--snapshot`"),
        ("`pin_seconds`", "`--pin` in seconds"),
        ("`rid`", "`--rid`"),
        ("`whole`", "`--all`"),
        ("`limit`", "`--limit`"),
        ("`offset`", "`--offset`"),
    ];
    WORDS
        .iter()
        .fold(message.to_owned(), |text, (field, flag)| {
            text.replace(field, flag)
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn one_is_one() {
        let row = json!({ "names": 1, "objects": 2 });
        assert_eq!(count(&row, "names", "name"), "1 name");
        assert_eq!(count(&row, "objects", "object"), "2 objects");
        assert_eq!(count(&row, "none", "object"), "0 objects");
    }

    #[test]
    fn refusals_speak_of_flags() {
        assert_eq!(
            as_flags("`turn_number`, `branch_name` or `snapshot_id` is needed"),
            "`--turn`, `--branch` or `--snapshot` is needed"
        );
    }
}
