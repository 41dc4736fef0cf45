//! `engram chat`: a conversation, line by line. Only the new line is sent.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Map, Value, json};

use super::client::{Client, ClientError};
use super::remote::{EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, Remote, runtime};
use super::table::plain;

/// Talk with the model behind the daemon: each line is a message, and only that is sent.
///
/// After every answer it says how many tokens were there already, and the time that saved at the
/// fastest prefill seen so far. The conversation goes on where it was, also tomorrow.
#[derive(Debug, Args)]
pub struct Chat {
    /// The conversation.
    conversation: String,
    /// Begin after this turn instead of the latest.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    turn: Option<u32>,
    /// Begin at this named branch.
    #[arg(long, value_name = "NAME", conflicts_with = "turn")]
    branch: Option<String>,
    /// A system message before the first line, for a conversation that begins.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 512)]
    max_tokens: u32,
    /// Sampling temperature; the server's own when left out.
    #[arg(long)]
    temperature: Option<f64>,
    /// The model, where the server has several.
    #[arg(long, default_value = "default")]
    model: String,
    #[command(flatten)]
    remote: Remote,
}

/// One answer.
#[derive(Debug, Default)]
struct Said {
    text: String,
    /// The last chunk's `usage` and `engram`.
    usage: Value,
    origin: Value,
    /// From the question to the first piece.
    first: Option<Duration>,
    error: Option<String>,
}

/// Prefill speed, as far as it was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    /// Tokens a second of the fastest turn: what is saved is said with that.
    best: f64,
}

/// Reads lines until there are no more.
pub fn run(mut chat: Chat) -> ExitCode {
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(code) => return code,
    };
    let Remote {
        url,
        token,
        timeout,
        json,
    } = &chat.remote;
    let client = Client::streaming(url, token.clone(), *timeout);
    let (client, as_json) = match client {
        Ok(client) => (client, *json),
        Err(error) => return failed(&error),
    };
    let people = std::io::stdin().is_terminal() && !as_json;
    // An error is said, and the next line may do better; the end tells of the last one.
    let mut last = ExitCode::SUCCESS;
    let mut speed = Speed::default();
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if people {
            print!("> ");
            std::io::stdout().flush().ok();
        }
        let line = match lines.next() {
            Some(Ok(line)) if line.trim().is_empty() => continue,
            Some(Ok(line)) => line,
            Some(Err(error)) => {
                eprintln!("engram: reading standard input: {error}");
                return ExitCode::from(EXIT_REFUSED);
            }
            None => return last,
        };
        let body = chat.body(&line);
        let said = match runtime.block_on(ask(&client, &body, !as_json)) {
            Ok(said) => said,
            Err(error) => {
                last = failed(&error);
                if as_json {
                    println!("{}", json!({ "error": error.to_string() }));
                }
                continue;
            }
        };
        if let Some(error) = said.error {
            eprintln!("engram: {}", plain(&error));
            if as_json {
                println!("{}", json!({ "text": said.text, "error": error }));
            }
            last = ExitCode::from(EXIT_REFUSED);
            continue;
        }
        match as_json {
            true => println!(
                "{}",
                json!({ "text": said.text, "usage": said.usage, "engram": said.origin })
            ),
            false => println!("\n{}", speed.told(&said)),
        }
        // The next line goes on from this one.
        (chat.turn, chat.branch, chat.system) = (None, None, None);
    }
}

fn failed(error: &ClientError) -> ExitCode {
    eprintln!("engram: {}", plain(&error.to_string()));
    ExitCode::from(match error {
        ClientError::Url { .. } => EXIT_USAGE,
        ClientError::Unreachable { .. } => EXIT_UNREACHABLE,
        ClientError::Refused { .. } => EXIT_REFUSED,
    })
}

// === impl Chat ===

impl Chat {
    fn body(&self, line: &str) -> Value {
        let system = self.system.iter();
        let system = system.map(|text| json!({ "role": "system", "content": text }));
        let user = json!({ "role": "user", "content": line });
        let messages: Vec<Value> = system.chain([user]).collect();
        let mut body = Map::new();
        for (name, value) in [
            ("conversation_id", json!(self.conversation)),
            ("model", json!(self.model)),
            ("messages", json!(messages)),
            ("max_tokens", json!(self.max_tokens)),
            ("temperature", json!(self.temperature)),
            ("turn", json!(self.turn)),
            ("branch", json!(self.branch)),
            ("stream", json!(true)),
        ] {
            if !value.is_null() {
                body.insert(name.to_owned(), value);
            }
        }
        Value::Object(body)
    }
}

/// Sends one message, and prints the answer as it comes if it is for people.
async fn ask(client: &Client, body: &Value, print: bool) -> Result<Said, ClientError> {
    let asked = Instant::now();
    let mut response = client.open("/v1/chat/completions", body).await?;
    let mut said = Said::default();
    let mut open = Vec::new();
    loop {
        let chunk = match response.chunk().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => break,
            Err(error) => {
                said.error = Some(super::client::root_cause(&error));
                break;
            }
        };
        open.extend_from_slice(&chunk);
        while let Some(end) = open.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = open.drain(..=end).collect();
            if let Some(data) = line.strip_prefix(b"data: ")
                && let Ok(event) = serde_json::from_slice::<Value>(data)
            {
                let new = said.take(&event, asked.elapsed());
                if print {
                    print!("{}", visible(&new));
                    std::io::stdout().flush().ok();
                }
            }
        }
    }
    if said.usage.is_null() && said.error.is_none() {
        said.error = Some("the answer broke off".to_owned());
    }
    Ok(said)
}

/// An answer's text with nothing that a terminal obeys.
fn visible(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(plain).collect();
    lines.join("\n")
}

// === impl Said ===

impl Said {
    /// One chunk. Returns the text that it adds.
    fn take(&mut self, event: &Value, elapsed: Duration) -> String {
        if let Some(error) = event.pointer("/error/message").and_then(Value::as_str) {
            self.error = Some(error.to_owned());
        }
        for (name, kept) in [("usage", &mut self.usage), ("engram", &mut self.origin)] {
            if let Some(value) = event.get(name).filter(|value| !value.is_null()) {
                *kept = value.clone();
            }
        }
        let new = event.pointer("/choices/0/delta/content");
        let new = new.and_then(Value::as_str).unwrap_or_default();
        if !new.is_empty() {
            self.first.get_or_insert(elapsed);
            self.text.push_str(new);
        }
        new.to_owned()
    }
}

// === impl Speed ===

impl Speed {
    /// What an answer cost and what it did not.
    fn told(&mut self, said: &Said) -> String {
        let count = |name: &str| said.usage.get(name).and_then(Value::as_u64);
        let (Some(prompt), Some(cached)) = (count("prompt_tokens"), count("cached_tokens")) else {
            return "(the server does not say what was cached)".to_owned();
        };
        let prefilled = prompt.saturating_sub(cached);
        let first = said.first.unwrap_or_default().as_secs_f64();
        if first > 0.0 {
            self.best = self.best.max(prefilled as f64 / first);
        }
        let saved = match self.best > 0.0 {
            true => format!(", about {:.2} s saved", cached as f64 / self.best),
            false => String::new(),
        };
        let fallback = said.origin.get("fallback_reason").and_then(Value::as_str);
        let fallback = fallback.map_or_else(String::new, |why| format!("; {}", plain(why)));
        format!(
            "({cached} of {prompt} tokens reused, {} sent; first token after {first:.2} s{saved}\
             {fallback})",
            count("wire_tokens").unwrap_or(prompt),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_is_said_with_the_fastest_prefill() {
        let said = |prompt: u64, cached: u64, ms: u64| Said {
            usage: json!({ "prompt_tokens": prompt, "cached_tokens": cached, "wire_tokens": 5 }),
            first: Some(Duration::from_millis(ms)),
            ..Said::default()
        };
        let mut speed = Speed::default();
        assert_eq!(
            speed.told(&said(1000, 0, 1000)),
            "(0 of 1000 tokens reused, 5 sent; first token after 1.00 s, about 0.00 s saved)"
        );
        let told = speed.told(&said(1100, 1000, 200));
        assert!(
            told.ends_with("first token after 0.20 s, about 1.00 s saved)"),
            "{told}"
        );
        let none = Said::default();
        assert!(speed.told(&none).contains("does not say"));
    }

    #[test]
    fn an_answer_cannot_command_the_terminal() {
        assert_eq!(visible("a\nb\u{1b}[2J"), "a\nb\\u{1b}[2J");
    }
}
