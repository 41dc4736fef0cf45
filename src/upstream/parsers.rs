//! The parser of what the inference server streams. See `util::parser`.

use super::events::{Event, read_all};
use crate::util::parser::{Parser, case, refused};

/// All of them.
pub(crate) fn parsers() -> Vec<Parser> {
    vec![Parser {
        name: "upstream-events",
        parse: events,
        exact: false,
        seal: None,
        factor: 64,
        valid: || {
            vec![
                case(
                    "two",
                    "data: {\"a\":1}\n\ndata: b\ndata:  c\n\ndata: [DONE]\n\n",
                ),
                case(
                    "crlf",
                    ": ping\r\nevent: x\r\ndata:a\r\n\r\ndata: [DONE]\r\n\r\n",
                ),
                case("more", "data: [DONE]\n\ndata: late"),
            ]
        },
        hostile: || {
            let ended = "just ended";
            vec![
                refused("empty", "", ended),
                refused("cut", "data: x\n\ndata: [DONE]\n", ended),
                refused("not-events", "{\"error\": \"x\"}", ended),
                refused("no-line", "data: ".repeat(4000), ended),
                refused("many", "data:\n".repeat(4000), ended),
            ]
        },
    }]
}

fn events(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut written = Vec::new();
    for event in read_all(bytes)? {
        let data = match &event {
            Event::Data(data) => &data[..],
            Event::Done => b"[DONE]",
        };
        for line in data.split(|byte| *byte == b'\n') {
            written.extend_from_slice(b"data: ");
            written.extend_from_slice(line);
            written.push(b'\n');
        }
        written.push(b'\n');
    }
    Ok(written)
}
