//! A child that ends with its parent, however the parent ends: the parent holds the other end of
//! our standard input, and never writes.

use std::io::Read as _;

use nix::sys::signal::{Signal, raise};

/// Watches standard input in a thread; its end is taken as SIGTERM.
pub fn hold() {
    let watch = || {
        let mut byte = [0];
        // Data, an error and the end all mean that there is no parent which keeps the promise.
        while matches!(std::io::stdin().read(&mut byte), Ok(1)) {}
        // The default action ends the process when nobody handles the signal yet.
        if raise_to_process().is_err() {
            std::process::exit(1);
        }
    };
    if std::thread::Builder::new()
        .name("lifeline".into())
        .spawn(watch)
        .is_err()
    {
        std::process::exit(1);
    }
}

fn raise_to_process() -> nix::Result<()> {
    // `raise` signals the calling thread; a handler installed by the runtime is per process, so
    // either way is seen by it.
    raise(Signal::SIGTERM)
}
