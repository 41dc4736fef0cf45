//! Proof that a ring is the worker's and that both directions of a copy work, without touching a
//! pool: the worker leaves a pattern, the daemon answers with its complement.

use std::sync::{Arc, mpsc};

use super::{DeviceError, Ring, shm::SharedMap};

/// Bytes at the ring's start that the self-test uses (`[handshake]` of the channel's description).
pub const SELF_TEST_BYTES: u64 = 64 << 10;

/// Byte `i` of what the worker leaves.
#[must_use]
pub fn pattern(i: u64) -> u8 {
    (i.wrapping_mul(31).wrapping_add(7) % 256) as u8
}

/// The test, by the ring's own copies.
pub(super) fn run(ring: &dyn Ring) -> Result<(), DeviceError> {
    let scratch =
        SharedMap::anonymous(SELF_TEST_BYTES).map_err(|source| super::ShmError::System {
            call: "memfd_create",
            source,
        })?;
    let scratch = Arc::new(scratch);
    wait(|done| ring.copy_out(0, &scratch, 0, SELF_TEST_BYTES, done))?;
    let mut answer = vec![0; SELF_TEST_BYTES as usize];
    scratch.read(0, &mut answer)?;
    for (i, byte) in (0..).zip(&mut answer) {
        if *byte != pattern(i) {
            return Err(DeviceError::SelfTest { at: i });
        }
        *byte = !*byte;
    }
    scratch.write(0, &answer)?;
    wait(|done| ring.copy_in(&scratch, 0, 0, SELF_TEST_BYTES, done))
}

/// Starts a copy and blocks until it is over.
fn wait(start: impl FnOnce(super::Done)) -> Result<(), DeviceError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    start(Box::new(move |result| {
        // The receiver waits below, and nothing else can end it.
        let _ = sender.send(result);
    }));
    receiver.recv().unwrap_or(Err(DeviceError::Stopped))
}
