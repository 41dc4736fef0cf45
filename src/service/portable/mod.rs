//! Snapshots that leave as a pair of files, and come in from one.
//!
//! # What
//! An *export* reads one snapshot, whatever tiers it is in, and gives it as a stream: the safetensors
//! file, and after its last byte the JSON file, whose checksums are known only then. An *import* takes
//! the JSON first and then the other file; it is a save whose bytes come from a file instead of a
//! ring, and goes on as any other save: RAM tier, index, disk, names.
//!
//! # Order
//! Nothing of an import can be found before every chunk, the header and the end of the file were
//! compared with the description; then the snapshot becomes visible at once, durable by the store's
//! own protocol, and gets its names last. An import of what is here already only verifies the file.
//!
//! # State
//! An export holds a lease on its snapshot, so nothing of it can go meanwhile; it needs the memory of
//! one block. An import needs room in RAM for all that is not stored yet.
//!
//! # Cancellation
//! A reader that goes away or stands still for long ends an export; a sender that does ends an
//! import, which then leaves nothing.
//!
//! # Errors
//! [`ServiceError`]: `Invalid` for a pair that is damaged or contradicts itself, `OtherModel` for a
//! model that this store does not hold, `TooLarge` and `NoSpace` for the want of room.

mod adopt;
mod export;
mod import;
mod pipe;

use std::time::Duration;

pub use export::{Export, ExportRequest};
pub use import::{ImportReply, ImportRequest};

use super::error::ServiceError;
use crate::store::bundle::BundleError;

/// Exports and imports at a time.
pub(super) const AT_ONCE: usize = 4;

/// How long the other side may stand still.
const STALL: Duration = Duration::from_secs(60);

/// Chunks of 1 MiB between the disk and the wire.
const AHEAD: usize = 4;

fn refused(error: BundleError) -> ServiceError {
    match error {
        // The sender went away, or stood still.
        BundleError::Io(error) => ServiceError::Busy(format!("the snapshot did not come: {error}")),
        error => ServiceError::Invalid(error.to_string()),
    }
}

fn too_many() -> ServiceError {
    ServiceError::Busy(format!("{AT_ONCE} exports and imports are going on"))
}
