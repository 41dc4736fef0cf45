//! The command line.
//!
//! Exit codes: 0 done; 1 refused by the daemon, or failed; 2 wrong usage; 3 no daemon answers;
//! 64 bad configuration. `engram fsck` has its own, and `engram import` one more, see there.

mod announce;
mod chat;
mod client;
mod completions;
mod demo;
mod engine;
mod events;
mod fields;
mod fsck;
mod lifeline;
mod namespaces;
mod portable;
mod remote;
mod serve;
mod table;
mod talks;
mod teller;
mod why;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use client::{Client, ClientError};

/// A durable memory for language models with a recurrent state.
#[derive(Debug, Parser)]
#[command(name = "engram", version, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    /// End when standard input does: for a child whose parent may be killed.
    #[arg(long, global = true, hide = true)]
    lifeline: bool,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  engram demo                                 see it work, without GPU or server
  engram serve --config /etc/engram.toml      run the daemon
  engram ls                                   conversations that it knows
  engram ls chat-42                           their turns and branches
  engram save chat-42 --branch before-edit    keep the latest state under a name
  engram fork chat-42 chat-42b --turn 7       go on from turn 7 under another name
  engram tree chat-42                         what parted from what
  engram fsck /var/lib/engram                 check what a stopped daemon has on disk
  engram restore chat-42 --turn 7             bring a turn into RAM for the next request
  engram chat chat-42                         go on with it, only the new line is sent
  engram export chat-42 --out chat            write it as chat.safetensors and chat.json
  engram import chat                          take it in on another host
  engram events --types saved,evicted         follow what happens

ENGRAM_URL and ENGRAM_TOKEN say where the daemon is and who asks.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon.
    Serve(serve::Args),
    /// Run the embedded engine: a small hybrid language model to try the daemon with.
    Engine(engine::Args),
    /// See it work: a conversation that survives the death of its engine and of the daemon.
    Demo(demo::Args),
    /// Check a data directory that no daemon uses, and repair it.
    Fsck(fsck::Args),
    /// List conversations, or the snapshots of one.
    Ls(remote::Ls),
    /// Show one snapshot.
    Show(remote::Show),
    /// Keep the state of a conversation on disk.
    Save(remote::Save),
    /// Bring a snapshot into RAM and keep it there for the next request.
    Restore(remote::Restore),
    /// Delete snapshots, or a conversation.
    Rm(remote::Rm),
    /// Let a new conversation begin as another one went.
    Fork(talks::Fork),
    /// Show what parted from one another.
    Tree(talks::Tree),
    /// Say where two turns or branches part.
    Compare(talks::Compare),
    /// Keep a snapshot from eviction.
    Pin(talks::Pin),
    /// Let a snapshot be evicted again.
    Unpin(talks::Unpin),
    /// Say which states of a conversation go to disk, or change that.
    Policy(talks::Policy),
    /// Talk with the model behind the daemon; only the new line is sent.
    Chat(chat::Chat),
    /// Follow what happens.
    Events(events::Events),
    /// List who holds how much.
    Namespaces(namespaces::Namespaces),
    /// Write a snapshot as a pair of files that needs nothing else.
    Export(portable::export::Args),
    /// Take a snapshot in from a pair of files.
    Import(portable::import::Args),
    /// Print completions for a shell.
    Completions(completions::Args),
}

/// Runs what the command line asks for.
pub fn main() -> ExitCode {
    let Cli { lifeline, command } = Cli::parse();
    if lifeline {
        lifeline::hold();
    }
    match command {
        Command::Serve(args) => serve::run(args),
        Command::Engine(args) => engine::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Fsck(args) => fsck::run(args),
        Command::Ls(args) => remote::run(args),
        Command::Show(args) => remote::run(args),
        Command::Save(args) => remote::run(args),
        Command::Restore(args) => remote::run(args),
        Command::Rm(args) => remote::run(args),
        Command::Fork(args) => remote::run(args),
        Command::Tree(args) => remote::run(args),
        Command::Compare(args) => remote::run(args),
        Command::Pin(args) => remote::run(args),
        Command::Unpin(args) => remote::run(args),
        Command::Policy(args) => remote::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Events(args) => events::run(&args),
        Command::Namespaces(args) => remote::run(args),
        Command::Export(args) => portable::export::run(args),
        Command::Import(args) => portable::import::run(args),
        Command::Completions(args) => completions::run(&args),
    }
}
