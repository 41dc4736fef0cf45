//! `engram fork | tree | compare | pin | unpin | policy`: what is done with conversations.

use std::time::Duration;

use clap::{ArgAction, Args};
use humantime_serde::re::humantime;
use serde_json::{Value, json};

use super::client::{Client, ClientError};
use super::fields::{describe, names, rows, text};
use super::remote::{Ask, Remote};
use super::table::{Table, plain};

/// Let a new conversation begin as another one went, up to some turn. Nothing is copied.
#[derive(Debug, Args)]
pub struct Fork {
    /// The conversation, by its name or by any request of it.
    conversation: String,
    /// The name of the new one.
    new_id: String,
    /// The last turn that both have. [default: the latest]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    turn: Option<u32>,
    /// The branch at which the new one begins.
    #[arg(long, value_name = "NAME", conflicts_with = "turn")]
    branch: Option<String>,
    #[command(flatten)]
    remote: Remote,
}

/// Show all conversations that parted from one another, with their turns and branches.
#[derive(Debug, Args)]
pub struct Tree {
    /// Any of them, by its name or by any request of it.
    conversation: String,
    #[command(flatten)]
    remote: Remote,
}

/// Say where two turns or branches part.
#[derive(Debug, Args)]
pub struct Compare {
    /// The conversation, by its name or by any request of it.
    conversation: String,
    /// A turn (3 or turn:3) or a branch (NAME or branch:NAME).
    a: String,
    /// The other one.
    b: String,
    /// The conversation of the other one, if it is another.
    #[arg(long, value_name = "CONVERSATION")]
    with: Option<String>,
    #[command(flatten)]
    remote: Remote,
}

/// Keep a snapshot from eviction, and call it something.
#[derive(Debug, Args)]
pub struct Pin {
    /// The snapshot's id, as `engram ls CONVERSATION` tells it.
    snapshot: String,
    /// What to call it; an empty one takes the label away.
    #[arg(long, value_name = "TEXT", action = ArgAction::Set)]
    label: Option<String>,
    #[command(flatten)]
    remote: Remote,
}

/// Let a snapshot be evicted again.
#[derive(Debug, Args)]
pub struct Unpin {
    /// The snapshot's id, as `engram ls CONVERSATION` tells it.
    snapshot: String,
    #[command(flatten)]
    remote: Remote,
}

/// Say which states of a conversation go to disk by themselves, or change that.
#[derive(Debug, Args)]
pub struct Policy {
    /// The conversation, by its name or by any request of it.
    conversation: String,
    /// Its own policy from now on, also before its first turn.
    #[arg(long, value_name = "POLICY", value_parser = POLICIES)]
    set: Option<String>,
    /// How many turns every_n_turns means.
    #[arg(long, value_name = "N", requires = "set", value_parser = clap::value_parser!(u32).range(1..))]
    every: Option<u32>,
    /// Between two turns that are written at least so much time passes.
    #[arg(long, value_name = "TIME", requires = "set", value_parser = humantime::parse_duration)]
    min_interval: Option<Duration>,
    /// As the daemon is configured, from now on.
    #[arg(long, conflicts_with = "set")]
    unset: bool,
    #[command(flatten)]
    remote: Remote,
}

/// The policies that there are.
const POLICIES: [&str; 5] = [
    "every_turn",
    "every_n_turns",
    "on_tool_call",
    "on_eviction",
    "manual_only",
];

/// A path of a conversation; every byte that could mean something in it is encoded.
pub fn path(conversation: &str, rest: &str) -> String {
    format!("/v1/conversations/{}{rest}", encoded(conversation))
}

fn encoded(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

// === impl Ask ===

impl Ask for Fork {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Fork {
            conversation,
            new_id,
            turn,
            branch,
            remote: _,
        } = self;
        let body = json!({ "new_id": new_id, "turn": turn, "branch": branch });
        client.post(&path(conversation, "/fork"), &body).await
    }

    fn show(&self, answer: &Value) -> String {
        turns(answer)
    }
}

impl Ask for Tree {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        client.get(&path(&self.conversation, "/tree")).await
    }

    fn show(&self, answer: &Value) -> String {
        let mut out = String::new();
        draw(answer, 0, &mut out);
        out
    }
}

impl Ask for Compare {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Compare {
            conversation,
            a,
            b,
            with,
            remote: _,
        } = self;
        let with = with
            .as_deref()
            .map(|with| format!("&with={}", encoded(with)));
        let with = with.unwrap_or_default();
        let query = format!("/compare?a={}&b={}{with}", encoded(a), encoded(b));
        client.get(&path(conversation, &query)).await
    }

    fn show(&self, answer: &Value) -> String {
        let told = match answer.get("relation").and_then(Value::as_str) {
            Some("same") => "They are the same.",
            Some("a_extends_b") => "The first goes on from the second.",
            Some("b_extends_a") => "The second goes on from the first.",
            _ => "They part.",
        };
        let mut table = Table::new(&["", "CONVERSATION", ">TURN", ">TOKENS", "SNAPSHOT"]);
        for side in ["a", "b"] {
            let row = answer.get(side).unwrap_or(&Value::Null);
            table.row([
                side.to_owned(),
                text(row, "conversation_id"),
                text(row, "turn_number"),
                text(row, "tokens"),
                text(row, "snapshot_id"),
            ]);
        }
        format!(
            "{}{told} Common tokens: {}; of these in a common snapshot: {}\n",
            table.render(),
            text(answer, "common_tokens"),
            text(answer, "common_boundary"),
        )
    }
}

impl Ask for Pin {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let mut body = json!({ "pinned": true });
        if let (Value::Object(body), Some(label)) = (&mut body, &self.label) {
            let label = match label.as_str() {
                "" => Value::Null,
                label => Value::from(label),
            };
            body.insert("label".to_owned(), label);
        }
        client.patch(&snapshot(&self.snapshot), &body).await
    }

    fn show(&self, answer: &Value) -> String {
        describe(answer)
    }
}

impl Ask for Unpin {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let body = json!({ "pinned": false });
        client.patch(&snapshot(&self.snapshot), &body).await
    }

    fn show(&self, answer: &Value) -> String {
        describe(answer)
    }
}

impl Ask for Policy {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Policy {
            conversation,
            set,
            every,
            min_interval,
            unset,
            remote: _,
        } = self;
        let path = path(conversation, "/policy");
        match (set, unset) {
            (Some(policy), _) => {
                let body = json!({
                    "policy": policy,
                    "every_n_turns": every,
                    "min_interval_seconds": min_interval.map(|time| time.as_secs_f64()),
                });
                client.put(&path, &body).await
            }
            (None, true) => client.delete(&path).await,
            (None, false) => client.get(&path).await,
        }
    }

    fn show(&self, answer: &Value) -> String {
        let lines = [
            ("policy", text(answer, "policy")),
            ("its own", text(answer, "own")),
            ("every n turns", text(answer, "every_n_turns")),
            ("min interval s", text(answer, "min_interval_seconds")),
        ];
        let lines = lines.map(|(name, value)| format!("{name:<15} {value}\n"));
        lines.concat()
    }
}

fn snapshot(id: &str) -> String {
    format!("/v1/snapshots/{}", encoded(id))
}

/// The turns of one conversation.
pub fn turns(answer: &Value) -> String {
    let head = [
        ">TURN", ">TOKENS", ">PROMPT", ">STATE", "TIER", "DURABLE", "SNAPSHOT", "BRANCHES", "LABEL",
    ];
    let mut table = Table::new(&head);
    for row in rows(answer, "turns") {
        table.row([
            text(row, "turn_number"),
            text(row, "total_tokens"),
            text(row, "prompt_tokens"),
            text(row, "boundary"),
            text(row, "tier"),
            text(row, "durable"),
            text(row, "snapshot_id"),
            names(row, "branches"),
            text(row, "label"),
        ]);
    }
    let mut out = format!("conversation {}\n", text(answer, "conversation_id"));
    if let Some(origin) = answer.get("origin").filter(|origin| !origin.is_null()) {
        out += &format!(
            "parted from  {} after turn {}\n",
            text(origin, "conversation_id"),
            text(origin, "turn_number")
        );
    }
    for fork in rows(answer, "forks") {
        let (name, turn) = (text(fork, "conversation_id"), text(fork, "turn_number"));
        out += &format!("forked into  {name} after turn {turn}\n");
    }
    out + &table.render()
}

/// A conversation, a turn a line; what parted from it is further in.
fn draw(node: &Value, depth: usize, out: &mut String) {
    let pad = "  ".repeat(depth);
    let star = match node.get("selected").and_then(Value::as_bool) {
        Some(true) => " *",
        _ => "",
    };
    *out += &format!("{pad}{}{star}\n", text(node, "conversation_id"));
    for fork in rows(node, "forks") {
        draw(fork, depth + 1, out);
    }
    for turn in rows(node, "turns") {
        let branches = rows(turn, "branches").iter().filter_map(Value::as_str);
        let branches: String = branches.map(|name| format!(" [{}]", plain(name))).collect();
        let (number, tokens) = (text(turn, "turn_number"), text(turn, "total_tokens"));
        *out += &format!("{pad}  {number}: {tokens} tokens{branches}\n");
        for fork in rows(turn, "forks") {
            draw(fork, depth + 2, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_paths_mean_nothing_else() {
        let path = path("a/b?c=é #%", "/tree");
        assert_eq!(path, "/v1/conversations/a%2Fb%3Fc%3D%C3%A9%20%23%25/tree");
    }

    #[test]
    fn a_tree_is_drawn_turn_by_turn() {
        let node = json!({
            "conversation_id": "c", "selected": true, "forks": [],
            "turns": [
                { "turn_number": 1, "total_tokens": 10, "branches": ["b"], "forks": [
                    { "conversation_id": "d", "selected": false, "forks": [], "turns": [
                        { "turn_number": 2, "total_tokens": 30, "branches": [], "forks": [] },
                    ] },
                ] },
                { "turn_number": 2, "total_tokens": 20, "branches": [], "forks": [] },
            ],
        });
        let mut out = String::new();
        draw(&node, 0, &mut out);
        let lines = [
            "c *",
            "  1: 10 tokens [b]",
            "    d",
            "      2: 30 tokens",
            "  2: 20 tokens",
            "",
        ];
        assert_eq!(out, lines.join("\n"));
    }
}
