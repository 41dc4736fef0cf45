//! The engine with a fake daemon: what is saved and restored, and every state of both machines under
//! deadlines, lost sessions, late and impossible answers.

mod fake;
mod garbled;
mod restores;
mod rig;
mod round;
mod saves;
