//! Tables for people, and how values are shown in them.

use std::time::{Duration, UNIX_EPOCH};

use humantime_serde::re::humantime;

/// Rows of text under a head; columns are as wide as they need.
#[derive(Debug)]
pub struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

// === impl Table ===

impl Table {
    /// A table with these columns. A name that starts with `>` is of a column of numbers.
    pub fn new(head: &[&'static str]) -> Table {
        Table {
            head: head.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row: as many cells as columns.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The text, with a line end after each row.
    pub fn render(&self) -> String {
        let widths: Vec<usize> = self
            .head
            .iter()
            .enumerate()
            .map(|(column, name)| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
                widest.max(name.trim_start_matches('>').chars().count())
            })
            .collect();
        let head: Vec<String> = self
            .head
            .iter()
            .map(|name| name.trim_start_matches('>').to_owned())
            .collect();
        let mut text = String::new();
        for row in std::iter::once(&head).chain(&self.rows) {
            let mut line = String::new();
            for ((cell, width), name) in row.iter().zip(&widths).zip(&self.head) {
                let padding = " ".repeat(width.saturating_sub(cell.chars().count()));
                match name.starts_with('>') {
                    true => line.extend([padding.as_str(), cell, "  "]),
                    false => line.extend([cell, padding.as_str(), "  "]),
                }
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// A name of a client, safe to print: control characters are shown, not obeyed.
pub fn plain(text: &str) -> String {
    text.chars()
        .flat_map(|c| match c.is_control() {
            true => c.escape_default().collect::<Vec<_>>(),
            false => vec![c],
        })
        .collect()
}

/// A size in bytes.
pub fn size(bytes: u64) -> String {
    bytesize::ByteSize::b(bytes).display().iec().to_string()
}

/// Unix seconds as a date and time in UTC.
pub fn time(seconds: f64) -> String {
    match Duration::try_from_secs_f64(seconds)
        .ok()
        .and_then(|d| UNIX_EPOCH.checked_add(d))
    {
        // The formatter refuses years past 9999.
        Some(time) if seconds < 253_402_300_800.0 => {
            humantime::format_rfc3339_seconds(time).to_string()
        }
        _ => "?".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["NAME", ">TOKENS"]);
        table.row(["é".into(), "5".into()]);
        table.row(["longer".into(), "1024".into()]);
        assert_eq!(
            table.render(),
            "NAME    TOKENS\né            5\nlonger    1024\n"
        );
    }

    #[test]
    fn values_are_readable_and_harmless() {
        assert_eq!(plain("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
        assert_eq!(size(3 << 20), "3.0 MiB");
        assert_eq!(time(0.5), "1970-01-01T00:00:00Z");
        for odd in [f64::NAN, -1.0, 1e300, f64::INFINITY, 253_402_300_800.0] {
            assert_eq!(time(odd), "?");
        }
    }
}
