//! The same, where the engine copies between its ring and a window by itself.

pub mod rig {
    //! The rig, in mode engine.

    pub use super::super::rig::{LIMITS, Reply, Rig, Shape, cold, prompt};
    use crate::types::TransferMode;

    pub const SHAPE: Shape = Shape {
        mode: TransferMode::Engine,
        ..super::super::rig::SHAPE
    };
}

use super::fake;

#[path = "garbled.rs"]
mod garbled;
#[path = "restores.rs"]
mod restores;
#[path = "round.rs"]
mod round;
#[path = "saves.rs"]
mod saves;
