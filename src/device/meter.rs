//! How much memory a piece of code asks for; in tests alone.

#![expect(unsafe_code, reason = "an allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, which counts for each thread.
struct Metered;

#[global_allocator]
static METERED: Metered = Metered;

thread_local! {
    /// Bytes that this thread took and did not give back.
    static HELD: Cell<i64> = const { Cell::new(0) };
    /// The most of it since the last reset.
    static MOST: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    // A thread that ends has no counter any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get().wrapping_add(bytes));
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

// SAFETY: every call goes to the system's allocator unchanged, and counting allocates nothing.
unsafe impl GlobalAlloc for Metered {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as the caller says.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as the caller says.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // While it is copied both are there.
        count(size as i64);
        count(-(layout.size() as i64));
        // SAFETY: as the caller says.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// The most memory that this thread held at once while `f` ran, in bytes, beyond what it held before.
pub fn most_held<R>(f: impl FnOnce() -> R) -> (R, u64) {
    let before = HELD.get();
    MOST.set(before);
    let result = f();
    (result, u64::try_from(MOST.get() - before).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_back_counts_too() {
        let (len, most) = most_held(|| {
            let first = vec![1_u8; 100_000];
            let second = first.clone();
            drop(first);
            second.len()
        });
        assert_eq!(len, 100_000);
        assert!((200_000..210_000).contains(&most), "{most}");
        let (_, none) = most_held(|| ());
        assert_eq!(none, 0);
    }
}
