//! The engine with a fake daemon: what is saved and restored, and every state of both machines under
//! deadlines, lost sessions, late and impossible answers.

#[expect(clippy::duplicate_mod, reason = "the same tests for both modes")]
mod engine_mode;
mod fake;
mod garbled;
mod restores;
mod rig;
mod round;
mod saves;
