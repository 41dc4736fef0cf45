//! Reads and writes between a file and maps, many at once by one thread: io_uring.
//!
//! # What
//! [`Uring::run`] takes a row of [`Move`]s and keeps up to a fixed number of them under way. The kernel
//! reads and writes the maps itself, as with [`SharedMap::pread_exact`], so that `O_DIRECT` works when
//! offsets and lengths are aligned. What comes short is gone on with.
//!
//! # Cancellation
//! The kernel may write to a map as long as a move is under way. So nothing returns, and no panic gets
//! out, before all are over. Should the kernel refuse to tell, the process ends: it could not know what
//! is written to its memory.
//!
//! # Errors
//! [`Uring::new`] fails where the kernel, or a container's filter of system calls, does not have it.

#![expect(unsafe_code, reason = "the kernel is given addresses inside mappings")]

use std::{
    fs::File,
    io::{self, ErrorKind},
    os::fd::AsRawFd,
};

use io_uring::{IoUring, Probe, opcode, types};
use nix::libc;

use super::shm::SharedMap;

/// Bytes of one operation: below the kernel's own limit, and a multiple of any block.
const MAX_CALL: u64 = 1 << 30;

/// Moves between files and maps, some of them at the same time.
pub struct Uring {
    ring: IoUring,
    depth: usize,
}

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the file to the map.
    In,
    /// From the map to the file.
    Out,
}

/// Bytes that lie together in the file and in the map.
#[derive(Clone, Copy, Debug)]
pub struct Move<'m> {
    /// Where they are, or come to.
    pub map: &'m SharedMap,
    /// Where in the map.
    pub offset: u64,
    /// Where in the file.
    pub file_offset: u64,
    /// How many, in bytes.
    pub len: u64,
}

/// What the kernel works on. Waits for all of it when dropped.
struct Flights<'r, 'm> {
    ring: &'r mut IoUring,
    /// The move and what of it is left, by the number that the kernel knows.
    slots: Vec<Option<(usize, Move<'m>)>>,
    under_way: usize,
}

// === impl Uring ===

impl Uring {
    /// A ring for `depth` moves at a time (1 to 1024).
    ///
    /// # Errors
    /// `Unsupported` if the kernel has no reads and writes on a ring; else what it says.
    pub fn new(depth: u32) -> io::Result<Self> {
        let depth = depth.clamp(1, 1024);
        let ring = IoUring::new(depth)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(ErrorKind::Unsupported.into());
        }
        Ok(Self {
            ring,
            depth: depth as usize,
        })
    }

    /// Does all of `moves`, as many at a time as the ring has room for, and calls `done` with the number
    /// of each one that is over, in any order. An item that is an error, an error of a move or of
    /// `done` ends it: no other move begins, and those under way are waited for.
    ///
    /// # Errors
    /// The first one. A file that ends before is [`ErrorKind::UnexpectedEof`]; what was read until then
    /// stays written.
    pub fn run<'m, E: From<io::Error>>(
        &mut self,
        file: &File,
        way: Way,
        moves: impl IntoIterator<Item = Result<Move<'m>, E>>,
        mut done: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut moves = moves.into_iter().enumerate();
        let mut flights = Flights {
            ring: &mut self.ring,
            slots: (0..self.depth).map(|_| None).collect(),
            under_way: 0,
        };
        let mut more = true;
        let mut failed = None;
        loop {
            while more && failed.is_none() && flights.under_way < flights.slots.len() {
                match moves.next() {
                    None => more = false,
                    Some((_, Err(error))) => failed = Some(error),
                    Some((index, Ok(one))) if one.len == 0 => failed = done(index).err(),
                    Some((index, Ok(one))) => {
                        failed = flights.begin(file, way, index, one).err().map(E::from);
                    }
                }
            }
            if flights.under_way == 0 {
                return failed.map_or(Ok(()), Err);
            }
            for (index, one, result) in flights.wait() {
                let error = match result {
                    Ok(0) if way == Way::In => ErrorKind::UnexpectedEof.into(),
                    Ok(0) => ErrorKind::WriteZero.into(),
                    Ok(moved) if moved >= one.len => {
                        if failed.is_none() {
                            failed = done(index).err();
                        }
                        continue;
                    }
                    Ok(moved) => match one.rest(moved) {
                        Some(rest) if failed.is_none() => {
                            match flights.begin(file, way, index, rest) {
                                Ok(()) => continue,
                                Err(error) => error,
                            }
                        }
                        Some(_) => continue,
                        None => ErrorKind::InvalidInput.into(),
                    },
                    Err(error)
                        if matches!(
                            error.kind(),
                            ErrorKind::Interrupted | ErrorKind::WouldBlock
                        ) && failed.is_none() =>
                    {
                        match flights.begin(file, way, index, one) {
                            Ok(()) => continue,
                            Err(error) => error,
                        }
                    }
                    Err(error) => error,
                };
                failed.get_or_insert_with(|| E::from(error));
            }
        }
    }
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}

// === impl Move ===

impl Move<'_> {
    /// What is left once the first `moved` bytes are there.
    fn rest(self, moved: u64) -> Option<Self> {
        Some(Self {
            map: self.map,
            offset: self.offset.checked_add(moved)?,
            file_offset: self.file_offset.checked_add(moved)?,
            len: self.len.checked_sub(moved)?,
        })
    }
}

// === impl Flights ===

impl<'m> Flights<'_, 'm> {
    fn begin(&mut self, file: &File, way: Way, index: usize, one: Move<'m>) -> io::Result<()> {
        let at = one.map.at(one.offset, one.len, 1)?;
        let (fd, len) = (types::Fd(file.as_raw_fd()), one.len.min(MAX_CALL) as u32);
        let free = self.slots.iter().position(Option::is_none);
        let slot = free.expect("a caller looks for room");
        let entry = match way {
            Way::In => opcode::Read::new(fd, at, len)
                .offset(one.file_offset)
                .build(),
            Way::Out => opcode::Write::new(fd, at, len)
                .offset(one.file_offset)
                .build(),
        };
        // SAFETY: `at` has `len` bytes inside a mapping that lives as long as `'m`, which is longer
        // than `self`; and `self` is not gone before the kernel is done with it, see `drop`. The file
        // outlives the call of `run`, and so do the flights in it.
        let pushed = unsafe {
            let entry = entry.user_data(slot as u64);
            self.ring.submission().push(&entry)
        };
        pushed.map_err(|_| io::Error::from(ErrorKind::WouldBlock))?;
        if let Some(place) = self.slots.get_mut(slot) {
            *place = Some((index, one));
        }
        self.under_way += 1;
        Ok(())
    }

    /// Waits until at least one is over, and gives those that are: number, move, bytes moved.
    fn wait(&mut self) -> Vec<(usize, Move<'m>, io::Result<u64>)> {
        let mut over = Vec::new();
        while over.is_empty() && self.under_way > 0 {
            if let Err(error) = self.ring.submit_and_wait(1) {
                match error.raw_os_error() {
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                    _ => give_up(&error),
                }
            }
            for entry in self.ring.completion() {
                let slot = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
                let Some((index, one)) = self.slots.get_mut(slot).and_then(Option::take) else {
                    continue;
                };
                self.under_way -= 1;
                let result = match u64::try_from(entry.result()) {
                    Ok(moved) => Ok(moved),
                    Err(_) => Err(io::Error::from_raw_os_error(
                        entry.result().saturating_neg(),
                    )),
                };
                over.push((index, one, result));
            }
        }
        over
    }
}

impl Drop for Flights<'_, '_> {
    fn drop(&mut self) {
        while self.under_way > 0 {
            self.wait();
        }
    }
}

/// The kernel does not say what it still writes to.
fn give_up(error: &io::Error) -> ! {
    tracing::error!(%error, "io_uring does not tell what is over");
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::fs::FileExt};

    use super::*;

    fn ring(depth: u32) -> Option<Uring> {
        Uring::new(depth)
            .map_err(|error| eprintln!("not here: {error}"))
            .ok()
    }

    fn noise(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n * 7 % 251) as u8).collect()
    }

    fn moves(map: &SharedMap, unit: u64) -> Vec<Result<Move<'_>, io::Error>> {
        let count = map.len().div_ceil(unit);
        let one = |n| {
            let offset = n * unit;
            Ok(Move {
                map,
                offset,
                file_offset: offset,
                len: unit.min(map.len() - offset),
            })
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn bytes_go_out_and_come_back() {
        for depth in [1, 3, 64] {
            let Some(mut ring) = ring(depth) else { return };
            let file = tempfile::tempfile().unwrap();
            let out = SharedMap::anonymous(1 << 20).unwrap();
            out.write(0, &noise(1 << 20)).unwrap();
            let mut seen = vec![0; 17];
            let unit = (1 << 20) / 16 - 100;
            ring.run(&file, Way::Out, moves(&out, unit), |index| {
                seen[index] += 1;
                Ok::<(), io::Error>(())
            })
            .unwrap();
            assert_eq!(seen, [1; 17]);
            let mut bytes = vec![0; 1 << 20];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes == noise(1 << 20));
            let back = SharedMap::anonymous(1 << 20).unwrap();
            ring.run(&file, Way::In, moves(&back, unit), |_| {
                Ok::<(), io::Error>(())
            })
            .unwrap();
            back.read(0, &mut bytes).unwrap();
            assert!(bytes == noise(1 << 20));
        }
    }

    #[test]
    fn a_file_that_ends_early_is_an_error_and_nothing_is_left_under_way() {
        let Some(mut ring) = ring(4) else { return };
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&noise(10_000)).unwrap();
        let map = SharedMap::anonymous(64 << 10).unwrap();
        let run = ring.run(&file, Way::In, moves(&map, 4096), |_| {
            Ok::<(), io::Error>(())
        });
        assert_eq!(run.unwrap_err().kind(), ErrorKind::UnexpectedEof);
        // The same ring goes on.
        let short = SharedMap::anonymous(8192).unwrap();
        ring.run(&file, Way::In, moves(&short, 4096), |_| {
            Ok::<(), io::Error>(())
        })
        .unwrap();
    }

    #[test]
    fn the_first_error_ends_it_whoever_has_it() {
        let Some(mut ring) = ring(2) else { return };
        let file = tempfile::tempfile().unwrap();
        let map = SharedMap::anonymous(64 << 10).unwrap();
        let mut begun = 0;
        let told = moves(&map, 4096).into_iter().map(|one| {
            begun += 1;
            if begun == 3 {
                Err(io::Error::other("third"))
            } else {
                one
            }
        });
        let run = ring.run(&file, Way::Out, told, |_| Ok(()));
        assert_eq!((run.unwrap_err().to_string().as_str(), begun), ("third", 3));
        let mut over = 0;
        let run = ring.run(&file, Way::Out, moves(&map, 4096), |_| {
            over += 1;
            if over == 2 {
                Err(io::Error::other("second"))
            } else {
                Ok(())
            }
        });
        assert_eq!((run.unwrap_err().to_string().as_str(), over), ("second", 2));
        let beyond = Move {
            map: &map,
            offset: 60 << 10,
            file_offset: 0,
            len: 8 << 10,
        };
        let run = ring.run(&file, Way::Out, [Ok(beyond)], |_| Ok::<(), io::Error>(()));
        assert_eq!(run.unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_panic_waits_for_what_is_under_way() {
        let Some(mut ring) = ring(8) else { return };
        let file = tempfile::tempfile().unwrap();
        let map = SharedMap::anonymous(1 << 20).unwrap();
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            ring.run(
                &file,
                Way::Out,
                moves(&map, 4096),
                |_| -> Result<(), io::Error> { panic!("on purpose") },
            )
        }));
        assert!(run.is_err());
        ring.run(&file, Way::Out, moves(&map, 4096), |_| {
            Ok::<(), io::Error>(())
        })
        .unwrap();
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    }
}
