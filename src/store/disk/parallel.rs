//! The parts of one large object, read or written by a few threads together.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
};

use parking_lot::Mutex;

/// Calls `f` for each of `0..count` on up to `threads` threads, this one included. Stops handing out
/// work at the first error and says that one.
pub(crate) fn for_each<E: Send>(
    threads: usize,
    count: usize,
    f: impl Fn(usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    if threads <= 1 || count <= 1 {
        return (0..count).try_for_each(f);
    }
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let failed = Mutex::new(None);
    let work = || {
        while !stop.load(Relaxed) {
            let index = next.fetch_add(1, Relaxed);
            if index >= count {
                return;
            }
            if let Err(error) = f(index) {
                failed.lock().get_or_insert(error);
                stop.store(true, Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            scope.spawn(work);
        }
        work();
    });
    failed.into_inner().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn all_once_and_the_first_error_is_said() {
        for threads in [1, 3, 200] {
            let seen = Mutex::new(HashSet::new());
            let done = for_each(threads, 100, |index| {
                assert!(seen.lock().insert(index));
                Ok::<(), ()>(())
            });
            assert_eq!((done, seen.lock().len()), (Ok(()), 100));
            let done = for_each(
                threads,
                100,
                |index| if index == 7 { Err(7) } else { Ok(()) },
            );
            assert_eq!(done, Err(7));
        }
        assert_eq!(for_each(4, 0, |_| Err(1)), Ok(()));
    }
}
