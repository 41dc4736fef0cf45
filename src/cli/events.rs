//! `engram events`: what happens, as it happens.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Client, ClientError, root_cause};
use super::fields::moment;
use super::remote::{Remote, print, runtime, tell};

/// How long a stream may stand still: the daemon gives a sign of life four times as often.
const SILENCE: Duration = Duration::from_secs(60);

/// One event at most; the daemon's are far smaller.
const EVENT_MAX: usize = 1 << 20;

/// Follow what happens: saves, turns, evictions, workers that come and go. Ends with the daemon.
#[derive(Debug, clap::Args)]
pub struct Events {
    /// Only these, with commas between: saved, durable, restored, evicted, deleted, turn_finished,
    /// budget_changed, attached, detached.
    #[arg(long, value_name = "NAMES")]
    types: Option<String>,
    /// Only those of this conversation.
    #[arg(long, value_name = "NAME")]
    conversation: Option<String>,
    /// Begin after the event of this id, as far as it is kept.
    #[arg(long, value_name = "ID")]
    after: Option<String>,
    #[command(flatten)]
    remote: Remote,
}

/// An event as it came.
#[derive(Debug, Default, PartialEq)]
struct Told {
    id: String,
    name: String,
    data: Value,
}

/// Lines that came, and are no whole event yet.
#[derive(Debug, Default)]
struct Lines {
    bytes: Vec<u8>,
    id: String,
    name: String,
    data: String,
}

/// Follows until the daemon ends the stream, or the reader of the output leaves.
pub fn run(args: &Events) -> ExitCode {
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(code) => return code,
    };
    match runtime.block_on(args.follow()) {
        Ok(code) => code,
        Err(error) => tell(&error),
    }
}

// === impl Events ===

impl Events {
    async fn follow(&self) -> Result<ExitCode, ClientError> {
        let Remote {
            url,
            token,
            timeout,
            json,
        } = &self.remote;
        let client = Client::streaming(url, token.clone(), *timeout)?;
        let mut response = client.follow(&self.path(), *timeout).await?;
        let mut lines = Lines::default();
        loop {
            let chunk = match tokio::time::timeout(SILENCE, response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => return Ok(ExitCode::SUCCESS),
                Ok(Err(error)) => return Err(client.lost(&root_cause(&error))),
                Err(_) => return Err(client.lost("the stream stands still")),
            };
            lines.bytes.extend_from_slice(&chunk);
            while let Some(told) = lines.take() {
                let text = match json {
                    true => format!("{}\n", told.as_json()),
                    false => told.for_people(),
                };
                if !print_now(&text) {
                    return Ok(ExitCode::SUCCESS);
                }
            }
            if lines.held() > EVENT_MAX {
                return Err(client.lost("something else answers there: no events"));
            }
        }
    }

    fn path(&self) -> String {
        let mut query = reqwest::Url::parse("http://x/v1/events").expect("it is a URL");
        for (name, value) in [
            ("types", &self.types),
            ("conversation_id", &self.conversation),
            ("last_event_id", &self.after),
        ] {
            if let Some(value) = value {
                query.query_pairs_mut().append_pair(name, value);
            }
        }
        let query = query.query().map_or(String::new(), |it| format!("?{it}"));
        format!("/v1/events{query}")
    }
}

/// Prints at once; `false`: the reader left.
fn print_now(text: &str) -> bool {
    use std::io::Write as _;

    print(text) == ExitCode::SUCCESS && std::io::stdout().flush().is_ok()
}

// === impl Told ===

impl Told {
    fn as_json(&self) -> Value {
        let mut all = json!({ "id": self.id, "event": self.name });
        if let (Value::Object(all), Value::Object(data)) = (&mut all, &self.data) {
            all.extend(data.clone());
        }
        all
    }

    /// Time, name and fields in a line.
    fn for_people(&self) -> String {
        let fields = self.data.as_object().into_iter().flatten();
        let fields = fields.filter(|(name, value)| *name != "at" && !value.is_null());
        let fields: Vec<_> = fields
            .map(|(name, value)| match value {
                Value::String(text) => format!("{name}={text}"),
                other => format!("{name}={other}"),
            })
            .collect();
        let at = moment(&self.data, "at");
        format!("{at}  {:<14}  {}\n", self.name, fields.join("  "))
    }
}

// === impl Lines ===

impl Lines {
    fn held(&self) -> usize {
        self.bytes.len() + self.data.len()
    }

    /// The next whole event, if there is one.
    fn take(&mut self) -> Option<Told> {
        loop {
            let end = self.bytes.iter().position(|byte| *byte == b'\n')?;
            let line: Vec<u8> = self.bytes.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches(['\n', '\r']);
            if line.is_empty() {
                let data = std::mem::take(&mut self.data);
                let (id, name) = (std::mem::take(&mut self.id), std::mem::take(&mut self.name));
                if data.is_empty() {
                    continue;
                }
                let data = serde_json::from_str(&data).unwrap_or(Value::Null);
                return Some(Told { id, name, data });
            }
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "id" => self.id = value.to_owned(),
                "event" => self.name = value.to_owned(),
                "data" => {
                    if !self.data.is_empty() {
                        self.data.push('\n');
                    }
                    self.data.push_str(value);
                }
                // Comments are signs of life.
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_however_they_come() {
        let text = b":\n\nid: b-1\nevent: saved\ndata: {\"at\":0.0,\"boundary\":7}\n\n:\n\nevent: missed\ndata: {\"count\":null}\n\n";
        let mut found = Vec::new();
        let mut lines = Lines::default();
        for byte in text {
            lines.bytes.push(*byte);
            found.extend(lines.take());
        }
        let [saved, missed] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!((&*saved.id, &*saved.name), ("b-1", "saved"));
        assert_eq!(saved.as_json()["boundary"], 7);
        assert!(
            saved.for_people().contains("saved           boundary=7"),
            "{}",
            saved.for_people()
        );
        assert_eq!((&*missed.id, &*missed.name), ("", "missed"));
        assert_eq!(lines.held(), 0);
    }
}
