//! Real processes for tests: a daemon, and whatever talks to it, each in a folder of its own.
//!
//! Everything is killed on drop, however the test ends, and a test that panics prints the last
//! lines of every process. Waiting is polling with a deadline, never a fixed sleep.

#![expect(dead_code, reason = "each test uses a part of this")]

pub mod daemon;
pub mod disk;
pub mod engine;
pub mod http;
pub mod process;
pub mod scene;
pub mod worker;

use std::time::{Duration, Instant};

use engram::types::TransferMode;

/// How bytes of workers move in this test: `mode_engine` compiles others anew.
pub const MODE: TransferMode = mode();

const fn mode() -> TransferMode {
    let (here, there) = (module_path!().as_bytes(), b"mode_engine::");
    let mut at = 0;
    while at < there.len() {
        if at >= here.len() || here[at] != there[at] {
            return TransferMode::Ipc;
        }
        at += 1;
    }
    TransferMode::Engine
}

/// Long enough for a slow machine under load; nothing waits for it when all is well.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `probe` gives something.
pub fn wait_for<T>(what: &str, probe: impl FnMut() -> Option<T>) -> T {
    wait_within(PATIENCE, what, probe)
}

/// Waits at most `patience` until `probe` gives something.
pub fn wait_within<T>(patience: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "waited {patience:?} in vain for: {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// `0..count` in an order that follows from the seed.
pub fn shuffled(seed: u64, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for i in (1..count).rev() {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        order.swap(i, (x % (i as u64 + 1)) as usize);
    }
    order
}

/// Keeps the expectation at the top true in a test that uses all of this.
fn never_used() {}
