//! The shared-memory channel between a worker and the daemon.
//!
//! # What
//!
//! Two rings of records in one memfd: `up` from the worker to the daemon, `down` back. Each has one
//! [`Writer`] and one [`Reader`]. Layout and messages are generated from `channel.toml`, which is
//! the specification; Python has a twin made from the same file. Nothing here waits or makes a
//! system call: the worker wakes the daemon through an eventfd and polls what comes back.
//!
//! Pieces of states and KV do not come through here: messages name places in the worker's *window*,
//! which is its ring (mode ipc) or memory beside it (mode engine). `channel.toml`, "Modes", tells what
//! each is, whose a place is when, and why the daemon's arena is never shared.
//!
//! # State
//!
//! Each side keeps its own positions and record numbers in private memory. From the peer's memory
//! it takes its tail word (a writer), its records (a reader), its beat and its closed word. Peers
//! can write anything anywhere at any time, so a tail is believed only if it moved forward within
//! what was written, a head is loaded as one word, and a record is copied out before it is parsed.
//!
//! # Order of writes
//!
//! A writer stores body and head, then a 0 into the seq word that follows the record, then the
//! record's number into its own seq word. That last store is a release, and the reader's load of the
//! word an acquire: a reader that sees number n sees all that was stored before it. The 0 is part of
//! that: the seq word of record n + 1 may lie where an older lap left a body whose bytes happen to
//! be n + 1. As the reader looks there only after it saw n, it finds the 0 or what came after it. The
//! writer may store the 0 because it asked for room for one more head than the record needs.
//!
//! The other way round, a reader stores its tail (release) after it copied the record out, and the
//! writer loads it (acquire) before it writes over that room: so no byte changes while it is copied.
//!
//! # Cancellation
//!
//! A side that dies in the middle of a record leaves a seq word that is not the expected one: the
//! record does not exist. Nothing has to be undone.
//!
//! # Errors
//!
//! No room: [`PushError::Full`], and the caller decides whether to say it again. What cannot be:
//! [`Broken`], and the session ends. What is not a channel: [`BadChannel`].

mod area;
mod codec;
mod ends;
mod reader;
pub mod run;
#[cfg(test)]
mod tests;
mod writer;

pub use area::Broken;
pub use codec::{At, DecodeError, Message};
pub use ends::{BadChannel, Capacities, DaemonEnd, Link, WorkerEnd};
pub use reader::Reader;
pub use writer::{PushError, Writer};

include!(concat!(env!("OUT_DIR"), "/channel.rs"));

impl msg::TokensWide {
    /// The same with ids of 32 bits; `None` if one does not fit.
    pub fn narrow(&self) -> Option<msg::Tokens> {
        let ids: Option<Vec<u32>> = self.ids.iter().map(|id| u32::try_from(*id).ok()).collect();
        ids.map(|ids| msg::Tokens {
            req: self.req,
            offset: self.offset,
            ids,
        })
    }
}
