//! `engram completions`: what a shell needs to complete the command line.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::{Shell, generate};

use super::remote::print;

/// Print completions for a shell.
///
/// bash: engram completions bash > ~/.local/share/bash-completion/completions/engram
/// zsh:  engram completions zsh > "${fpath[1]}/_engram"
/// fish: engram completions fish > ~/.config/fish/completions/engram.fish
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The shell.
    shell: Shell,
}

/// Prints the script.
pub fn run(args: &Args) -> ExitCode {
    let mut command = super::Cli::command();
    let mut script = Vec::new();
    generate(args.shell, &mut command, "engram", &mut script);
    print(&String::from_utf8_lossy(&script))
}
