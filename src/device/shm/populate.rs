//! Fetching a map's pages from the system ahead of their first use.

use std::sync::Arc;
use std::thread;

use nix::libc;

use super::SharedMap;

/// Pieces that a thread fetches at once.
const PIECE: u64 = 1 << 30;

/// Threads that fetch an arena's pages.
pub(in crate::device) const TOUCHERS: u64 = 16;

/// Fetches all pages of `map` on a thread of its own. Without a thread they are fetched at their
/// first use.
pub fn populate_in_background(map: Arc<SharedMap>) {
    let touch = thread::Builder::new().name("engram-touch".to_owned());
    if let Err(error) = touch.spawn(move || map.populate(TOUCHERS)) {
        tracing::warn!(%error, "The RAM tier is not fetched ahead");
    }
}

// === impl SharedMap ===

impl SharedMap {
    /// Fetches all pages, by several threads, as huge ones where the system has them. What is in
    /// the memory stays. A system that cannot do it fetches them at their first use, as ever.
    pub(in crate::device) fn populate(&self, threads: u64) {
        let len = self.len();
        self.advise(0, len, libc::MADV_HUGEPAGE);
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
        let piece = (len / threads.clamp(1, cores)).clamp(1 << 21, PIECE);
        let piece = piece.next_multiple_of(1 << 21);
        let starts = (0..len).step_by(usize::try_from(piece).unwrap_or(usize::MAX));
        let (sender, pieces) = crossbeam_channel::unbounded();
        for start in starts {
            // The receiver lives below.
            let _ = sender.send(start);
        }
        drop(sender);
        thread::scope(|scope| {
            for _ in 0..threads.clamp(1, cores) {
                let pieces = &pieces;
                scope.spawn(move || {
                    for start in pieces {
                        self.advise(start, piece.min(len - start), libc::MADV_POPULATE_WRITE);
                    }
                });
            }
        });
    }

    /// `madvise`; what it refuses is an optimisation that is not to be had.
    fn advise(&self, offset: u64, len: u64, advice: libc::c_int) {
        let Ok(start) = self.at(offset, len, 1) else {
            return;
        };
        // SAFETY: the range lies in this live mapping of our own, and neither advice that is used
        // here changes what is in it.
        let refused = unsafe { libc::madvise(start.cast(), len as usize, advice) } != 0;
        if refused {
            let error = std::io::Error::last_os_error();
            tracing::debug!(%error, advice, "madvise");
        }
    }
}
