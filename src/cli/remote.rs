//! `engram ls | show | save | restore | rm`: the REST surface for people.

use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueHint};
use humantime_serde::re::humantime;
use serde_json::{Value, json};

use super::client::{Client, ClientError};
use super::fields::{and_more, as_flags, bytes, count, describe, moment, names, rows, text};
use super::table::Table;
use super::talks;

/// Exit code: the daemon refused.
pub const EXIT_REFUSED: u8 = 1;
/// Exit code: wrong usage.
pub const EXIT_USAGE: u8 = 2;
/// Exit code: no daemon answers.
pub const EXIT_UNREACHABLE: u8 = 3;

/// Rows asked for at a time.
const PAGE: u64 = 1000;

/// Where the daemon is.
#[derive(Debug, Args)]
pub struct Remote {
    /// http://HOST:PORT, or unix:/PATH of a socket.
    #[arg(long, env = "ENGRAM_URL", default_value = "http://127.0.0.1:7070", value_hint = ValueHint::Url)]
    pub url: String,
    /// Token, if the daemon wants one.
    #[arg(long, env = "ENGRAM_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// Give up after this time.
    #[arg(long, default_value = "60s", value_parser = patience)]
    pub timeout: Duration,
    /// Print the daemon's answer as it is.
    #[arg(long)]
    pub json: bool,
}

/// Which snapshot of a conversation.
#[derive(Debug, Args)]
pub struct Which {
    /// Turn, counted from 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub turn: Option<u32>,
    /// Named branch.
    #[arg(long, value_name = "NAME", conflicts_with = "turn")]
    pub branch: Option<String>,
    /// The turn of this request; then no conversation is needed.
    #[arg(long, value_name = "RID", conflicts_with = "branch")]
    pub rid: Option<String>,
    /// The snapshot's own id; then no conversation is needed.
    #[arg(long, value_name = "UUID", conflicts_with_all = ["turn", "branch", "rid"])]
    pub snapshot: Option<String>,
}

/// List conversations, or the snapshots of one.
#[derive(Debug, Args)]
pub struct Ls {
    /// The conversation, by its name or by any request of it; all when left out.
    conversation: Option<String>,
    /// At most so many rows.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1000))]
    limit: u64,
    /// Skip so many rows.
    #[arg(long, default_value_t = 0)]
    offset: u64,
    #[command(flatten)]
    remote: Remote,
}

/// Show one snapshot: the latest, or the one named; or all turns of a conversation.
#[derive(Debug, Args)]
pub struct Show {
    /// The conversation. The id of a request stands for its whole conversation; --rid for its turn.
    #[arg(required_unless_present_any = ["snapshot", "rid"])]
    conversation: Option<String>,
    #[command(flatten)]
    which: Which,
    /// Show every turn of the conversation, where it parted from another, and what parted from it.
    #[arg(long, requires = "conversation", conflicts_with_all = ["turn", "branch", "rid", "snapshot"])]
    turns: bool,
    /// Print the token ids too (with --json).
    #[arg(long, requires = "json", conflicts_with = "turns")]
    tokens: bool,
    #[command(flatten)]
    remote: Remote,
}

/// Keep the state of a conversation on disk, so that it survives a crash.
#[derive(Debug, Args)]
pub struct Save {
    /// The conversation. The id of a request stands for its whole conversation; --rid for its state.
    #[arg(required_unless_present = "rid")]
    conversation: Option<String>,
    /// Give the state this name, and keep it until it is deleted.
    #[arg(long, value_name = "NAME")]
    branch: Option<String>,
    /// The turn to save instead of the latest.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    turn: Option<u32>,
    /// The request whose state is meant. Beside a CONVERSATION that is not its own, the state
    /// becomes a turn of that one.
    #[arg(long, value_name = "RID")]
    rid: Option<String>,
    /// Do not wait until it is on disk.
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    remote: Remote,
}

/// Bring a snapshot into RAM and keep it there for the next request.
#[derive(Debug, Args)]
pub struct Restore {
    /// The conversation. The id of a request stands for its whole conversation; --rid for its turn.
    #[arg(required_unless_present_any = ["snapshot", "rid"])]
    conversation: Option<String>,
    #[command(flatten)]
    which: Which,
    /// Keep it in RAM for so long, at most a day. [default: as the daemon is configured]
    #[arg(long, value_parser = humantime::parse_duration)]
    pin: Option<Duration>,
    #[command(flatten)]
    remote: Remote,
}

/// Delete one turn, branch or snapshot, or a whole conversation.
#[derive(Debug, Args)]
#[command(
    override_usage = "engram rm [OPTIONS] CONVERSATION --turn N | --branch NAME | --all\n       \
    engram rm [OPTIONS] [CONVERSATION] --rid RID\n       engram rm [OPTIONS] --snapshot ID"
)]
#[command(group = ArgGroup::new("what").required(true).args(["turn", "branch", "rid", "snapshot", "all"]).multiple(true))]
pub struct Rm {
    /// The conversation. The id of a request stands for its whole conversation; --rid for its turn.
    #[arg(required_unless_present_any = ["snapshot", "rid"])]
    conversation: Option<String>,
    #[command(flatten)]
    which: Which,
    /// The whole conversation with all its turns and branches.
    #[arg(long, conflicts_with_all = ["turn", "branch", "rid", "snapshot"])]
    all: bool,
    #[command(flatten)]
    remote: Remote,
}

/// A command that asks the daemon.
pub trait Ask {
    /// Where and how.
    fn remote(&self) -> &Remote;
    /// Asks; the answer as it came.
    fn ask(&self, client: &Client) -> impl Future<Output = Result<Value, ClientError>>;
    /// The answer for people.
    fn show(&self, answer: &Value) -> String;
}

/// A runtime on this thread; `Err`: the system has none, which was said.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, ExitCode> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| {
            eprintln!("engram: {error}");
            ExitCode::from(EXIT_REFUSED)
        })
}

/// Runs a command and prints its answer.
pub fn run(command: impl Ask) -> ExitCode {
    let Remote {
        url,
        token,
        timeout,
        json,
    } = command.remote();
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(code) => return code,
    };
    let answer = Client::new(url, token.clone(), *timeout)
        .and_then(|client| runtime.block_on(command.ask(&client)));
    match answer {
        Ok(answer) => {
            let text = match json {
                true => format!("{answer}\n"),
                false => command.show(&answer),
            };
            print(&text)
        }
        Err(error) => {
            if let (true, ClientError::Refused { body, .. }) = (json, &error) {
                print(&format!("{body}\n"));
            }
            tell(&error)
        }
    }
}

/// Says why there is no good answer.
pub fn tell(error: &ClientError) -> ExitCode {
    let told = match error {
        ClientError::Refused { kind, .. } if kind == "invalid_request" => {
            as_flags(&error.to_string())
        }
        error => error.to_string(),
    };
    eprintln!("engram: {told}");
    ExitCode::from(match error {
        ClientError::Url { .. } => EXIT_USAGE,
        ClientError::Unreachable { .. } => EXIT_UNREACHABLE,
        ClientError::Refused { .. } => EXIT_REFUSED,
    })
}

/// How long to wait for an answer: some time.
fn patience(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match time.is_zero() {
        true => Err("no answer comes within no time: give at least 1ms".to_owned()),
        false => Ok(time),
    }
}

/// Prints; a reader that left early (`engram ls | head`) is no failure.
pub fn print(text: &str) -> ExitCode {
    use std::io::Write as _;

    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("engram: {error}");
            ExitCode::from(EXIT_REFUSED)
        }
        _ => ExitCode::SUCCESS,
    }
}

/// The fields that say which snapshot is meant.
pub fn select(conversation: Option<&str>, which: &Which) -> Value {
    let Which {
        turn,
        branch,
        rid,
        snapshot,
    } = which;
    json!({
        "conversation_id": conversation,
        "rid": rid,
        "turn_number": turn,
        "branch_name": branch,
        "snapshot_id": snapshot,
    })
}

/// The id of a conversation's latest snapshot; a list has turns first, so all of it is read.
async fn latest(client: &Client, conversation: Option<&str>) -> Result<Option<Value>, ClientError> {
    let when = |row: &Value| row.get("timestamp").and_then(Value::as_f64).unwrap_or(0.0);
    let mut best: Option<(f64, Value)> = None;
    let mut offset = 0;
    loop {
        let page = json!({ "conversation_id": conversation, "limit": PAGE, "offset": offset });
        let list = client.post("/list_snapshots", &page).await?;
        let rows = list.get("snapshots").and_then(Value::as_array);
        let rows = rows.map_or(&[][..], Vec::as_slice);
        for row in rows {
            let id = row.get("snapshot_id").filter(|id| !id.is_null());
            let newer = best.as_ref().is_none_or(|(at, _)| when(row) >= *at);
            if let Some(id) = id.filter(|_| newer) {
                best = Some((when(row), id.clone()));
            }
        }
        offset += PAGE;
        if offset >= list.get("total").and_then(Value::as_u64).unwrap_or(0) {
            return Ok(best.map(|(_, id)| id));
        }
    }
}

fn with(mut body: Value, more: Value) -> Value {
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

// === impl Ask ===

impl Ask for Ls {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Ls {
            conversation,
            limit,
            offset,
            remote: _,
        } = self;
        match conversation {
            None => {
                client
                    .get(&format!("/v1/conversations?limit={limit}&offset={offset}"))
                    .await
            }
            Some(name) => {
                let body = json!({ "conversation_id": name, "limit": limit, "offset": offset });
                client.post("/list_snapshots", &body).await
            }
        }
    }

    fn show(&self, answer: &Value) -> String {
        let (key, mut table) = match self.conversation {
            None => {
                let head = [
                    "CONVERSATION",
                    ">TURNS",
                    ">SNAPSHOTS",
                    ">TOKENS",
                    "CHANGED",
                    "BRANCHES",
                ];
                ("conversations", Table::new(&head))
            }
            Some(_) => {
                let head = [
                    "TURN", "BRANCH", "SNAPSHOT", ">TOKENS", ">AFTER", "TIER", ">SIZE", "DURABLE",
                    "PINNED", "TIME",
                ];
                ("snapshots", Table::new(&head))
            }
        };
        let rows = rows(answer, key);
        for row in rows {
            table.row(match self.conversation {
                None => vec![
                    text(row, "conversation_id"),
                    text(row, "turns"),
                    text(row, "snapshots"),
                    text(row, "total_tokens"),
                    moment(row, "updated_at"),
                    names(row, "branches"),
                ],
                Some(_) => vec![
                    text(row, "turn_number"),
                    text(row, "branch_name"),
                    text(row, "snapshot_id"),
                    text(row, "boundary"),
                    text(row, "tokens_after_boundary"),
                    text(row, "tier"),
                    bytes(row, "size_bytes"),
                    text(row, "durable"),
                    text(row, "pinned"),
                    moment(row, "timestamp"),
                ],
            });
        }
        table.render() + &and_more(answer, self.offset, rows.len())
    }
}

impl Ask for Show {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Show {
            conversation,
            which,
            turns,
            tokens,
            remote: _,
        } = self;
        if let (true, Some(name)) = (turns, conversation) {
            return client.get(&talks::path(name, "")).await;
        }
        let mut body = select(conversation.as_deref(), which);
        let Which {
            turn,
            branch,
            rid,
            snapshot,
        } = which;
        if let (None, None, None, None) = (turn, branch, rid, snapshot) {
            let latest = latest(client, conversation.as_deref()).await?;
            body = with(body, json!({ "snapshot_id": latest, "turn_number": 1 }));
        }
        client
            .post(
                "/get_snapshot_info",
                &with(body, json!({ "with_tokens": tokens })),
            )
            .await
    }

    fn show(&self, answer: &Value) -> String {
        if self.turns {
            return talks::turns(answer);
        }
        describe(answer.get("metadata").unwrap_or(&Value::Null))
    }
}

impl Ask for Save {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Save {
            conversation,
            branch,
            turn,
            rid,
            no_wait,
            remote: _,
        } = self;
        let body = json!({
            "conversation_id": conversation,
            "branch_name": branch,
            "turn_number": turn,
            "rid": rid,
            "durable": !no_wait,
        });
        client.post("/save_snapshot", &body).await
    }

    fn show(&self, answer: &Value) -> String {
        describe(answer)
    }
}

impl Ask for Restore {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Restore {
            conversation,
            which,
            pin,
            remote: _,
        } = self;
        let pin = json!({ "pin_seconds": pin.map(|pin| pin.as_secs_f64()) });
        client
            .post(
                "/restore_snapshot",
                &with(select(conversation.as_deref(), which), pin),
            )
            .await
    }

    fn show(&self, answer: &Value) -> String {
        describe(answer)
    }
}

impl Ask for Rm {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Rm {
            conversation,
            which,
            all,
            remote: _,
        } = self;
        let body = with(
            select(conversation.as_deref(), which),
            json!({ "whole": all }),
        );
        client.post("/delete_snapshot", &body).await
    }

    fn show(&self, answer: &Value) -> String {
        format!(
            "{} and {} deleted, {} freed\n",
            count(answer, "names", "name"),
            count(answer, "objects", "object"),
            bytes(answer, "bytes")
        )
    }
}
