//! The engine with a fake daemon: what is saved and restored, and every state of both machines under
//! deadlines, lost sessions, late and impossible answers. All of it in both transfer modes.

mod fake;
mod garbled;
mod restores;
mod rig;
mod round;
mod saves;

use crate::types::TransferMode;

/// Runs all tests of a file once more, where the engine copies between its ring and a window.
fn in_mode_engine(source: &str, tests: &[fn()]) {
    let there = source.lines().filter(|line| line.trim() == "#[test]");
    assert_eq!(there.count(), tests.len(), "one is not in its list");
    rig::MODE.set(TransferMode::Engine);
    tests.iter().for_each(|test| test());
}

#[test]
fn saves_in_mode_engine() {
    in_mode_engine(include_str!("saves.rs"), saves::ALL);
}

#[test]
fn restores_in_mode_engine() {
    in_mode_engine(include_str!("restores.rs"), restores::ALL);
}

#[test]
fn rounds_in_mode_engine() {
    in_mode_engine(include_str!("round.rs"), round::ALL);
}

#[test]
fn garbled_answers_in_mode_engine() {
    in_mode_engine(include_str!("garbled.rs"), garbled::ALL);
}
