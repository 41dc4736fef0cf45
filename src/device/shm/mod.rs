//! Memory shared with another process.
//!
//! # What
//! A [`SharedMap`] is a mapping of a sealed memfd. It gives copies, atomic words and file IO by
//! offset, all checked, and never a reference: no `&[u8]` can exist to bytes that a peer may change.
//!
//! # Trust
//! A descriptor comes from a peer that may be broken or hostile. Memory that can shrink kills its
//! reader by SIGBUS, so [`SharedMap::open`] takes only a memfd that is sealed against shrinking and
//! long enough; on huge-page files a hole punched by the peer can do the same, so those are refused.
//! What the bytes say is never trusted here: users copy out first and check the copy.
//!
//! # Ordering
//! Plain copies order nothing between processes. What publishes data is a word stored by
//! [`SharedMap::store_u64`] (release) after the data and loaded by [`SharedMap::load_u64`] (acquire)
//! before it: correct on x86, where plain stores happen to stay in order, and on ARM, where they do
//! not. Words are little endian and naturally aligned.
//!
//! A peer that breaks the protocol can make a copy tear. It gets wrong bytes into its own data, which
//! checksums and decoders meet; the copies here are by raw pointer and have no other effect.

#![expect(
    unsafe_code,
    reason = "raw access to memory that another process writes"
)]

mod io;
mod populate;

pub(in crate::device) use populate::TOUCHERS;
pub use populate::populate_in_background;

use std::{
    ffi::CString,
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use memmap2::{MmapOptions, MmapRaw};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::fstat,
        statfs::{TMPFS_MAGIC, fstatfs},
    },
    unistd::ftruncate,
};

/// Bytes copied at a time through a private buffer: it stays in the first-level cache, and the copy
/// is one of vectors (a checksum of 256 MiB: 4 KiB 16 GB/s, 16 KiB 11 GB/s).
const CHUNK: usize = 4 << 10;

/// A mapping of a sealed memfd, readable and writable, shared with whoever has the descriptor.
pub struct SharedMap {
    map: MmapRaw,
    fd: OwnedFd,
    len: u64,
}

/// An access that the memory does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {offset} (aligned to {align}) are not in a memory of {size} bytes")]
pub struct OutOfBounds {
    /// Where it should start.
    pub offset: u64,
    /// How long it should be.
    pub len: u64,
    /// What `offset` must be a multiple of.
    pub align: u64,
    /// What there is.
    pub size: u64,
}

impl OutOfBounds {
    /// Whether `len` bytes lie in each of the memories: where they start there, and its size.
    pub(super) fn check_all(places: [(u64, u64); 2], len: u64) -> Result<(), Self> {
        let align = 1;
        let outside =
            |(offset, size): &(u64, u64)| offset.checked_add(len).is_none_or(|end| end > *size);
        match places.into_iter().find(outside) {
            None => Ok(()),
            Some((offset, size)) => Err(Self {
                offset,
                len,
                align,
                size,
            }),
        }
    }
}

/// Why a descriptor is not taken as shared memory.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// Not a memfd of ordinary pages.
    #[error("not a memfd of ordinary pages")]
    NotMemory,
    /// The peer could shrink it under us.
    #[error("not sealed against shrinking")]
    NotSealed,
    /// Shorter than said.
    #[error("{have} bytes long, not {want}")]
    Short {
        /// Real size.
        have: u64,
        /// Wanted size.
        want: u64,
    },
    /// A length of zero, or more than this machine can address.
    #[error("a length of {0} bytes cannot be mapped")]
    BadLength(u64),
    /// The system said no.
    #[error("{call}: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// What it said.
        source: std::io::Error,
    },
}

// === impl SharedMap ===

impl SharedMap {
    /// Makes `len` bytes of zeros that can neither shrink nor grow. The second value is a descriptor
    /// to give away; `name` shows up in `/proc/*/maps`.
    pub fn create(name: &str, len: u64) -> std::io::Result<(Self, OwnedFd)> {
        let name = CString::new(name)?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(name.as_c_str(), flags)?;
        ftruncate(&fd, size_of_file(len)?)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
        let other = fd.try_clone()?;
        let map = Self::open(fd, len).map_err(|error| match error {
            ShmError::System { source, .. } => source,
            other => std::io::Error::new(std::io::ErrorKind::InvalidInput, other),
        })?;
        Ok((map, other))
    }

    /// Maps the first `len` bytes of a memfd that came from anywhere.
    pub fn open(fd: OwnedFd, len: u64) -> Result<Self, ShmError> {
        let failed = |call| {
            move |source: nix::Error| ShmError::System {
                call,
                source: source.into(),
            }
        };
        // Files that know no seals (regular ones, pipes, devices) say EINVAL.
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS).map_err(|_| ShmError::NotMemory)?;
        if fstatfs(&fd).map_err(failed("fstatfs"))?.filesystem_type() != TMPFS_MAGIC {
            return Err(ShmError::NotMemory);
        }
        if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
            return Err(ShmError::NotSealed);
        }
        // After the seal was seen, so the size can only grow.
        let have = u64::try_from(fstat(&fd).map_err(failed("fstat"))?.st_size).unwrap_or(0);
        if have < len {
            return Err(ShmError::Short { have, want: len });
        }
        let bytes = usize::try_from(len).map_err(|_| ShmError::BadLength(len))?;
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(ShmError::BadLength(len));
        }
        let map = MmapOptions::new()
            .len(bytes)
            .map_raw(&fd)
            .map_err(|source| ShmError::System {
                call: "mmap",
                source,
            })?;
        Ok(Self { map, fd, len })
    }

    /// Memory that nobody else has, with the same interface.
    pub fn anonymous(len: u64) -> std::io::Result<Self> {
        Self::create("engram-private", len).map(|(map, _)| map)
    }

    /// Size in bytes; never zero.
    #[expect(clippy::len_without_is_empty, reason = "a map is never empty")]
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The memfd.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Copies `out.len()` bytes at `offset` into `out`.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.at(offset, out.len() as u64, 1)?;
        // SAFETY: `at` checked that the range lies in the live mapping; `out` is exclusive memory of
        // this process and no reference into a mapping exists, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let to = self.at(offset, bytes.len() as u64, 1)?;
        // SAFETY: as in `read`, the other way round.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Sets `len` bytes at `offset` to `byte`.
    pub fn fill(&self, offset: u64, len: u64, byte: u8) -> Result<(), OutOfBounds> {
        let to = self.at(offset, len, 1)?;
        // SAFETY: `at` checked that the range lies in the live, writable mapping, and so that `len`
        // fits a usize.
        unsafe { ptr::write_bytes(to, byte, len as usize) };
        Ok(())
    }

    /// Copies `len` bytes at `offset` to `to_offset` of `to`, which may be the same memory and may
    /// overlap.
    pub fn copy(
        &self,
        offset: u64,
        to: &Self,
        to_offset: u64,
        len: u64,
    ) -> Result<(), OutOfBounds> {
        let from = self.at(offset, len, 1)?;
        let to = to.at(to_offset, len, 1)?;
        // SAFETY: both ranges were checked against their live mappings; `ptr::copy` allows overlap,
        // which can also come from two mappings of one memfd.
        unsafe { ptr::copy(from, to, len as usize) };
        Ok(())
    }

    /// Loads the aligned word at `offset`; orders at least what `order` says of loads.
    pub fn load_u32(&self, offset: u64, order: Ordering) -> Result<u32, OutOfBounds> {
        let word = self.at(offset, 4, 4)?.cast();
        // SAFETY: in the live mapping and aligned (the mapping starts on a page); a peer that writes
        // it otherwise than atomically can only make the value wrong.
        let word = unsafe { AtomicU32::from_ptr(word) };
        Ok(u32::from_le(word.load(load_order(order))))
    }

    /// Loads the aligned word at `offset`; orders at least what `order` says of loads.
    pub fn load_u64(&self, offset: u64, order: Ordering) -> Result<u64, OutOfBounds> {
        let word = self.at(offset, 8, 8)?.cast();
        // SAFETY: as in `load_u32`.
        let word = unsafe { AtomicU64::from_ptr(word) };
        Ok(u64::from_le(word.load(load_order(order))))
    }

    /// Stores the aligned word at `offset`; orders at least what `order` says of stores.
    pub fn store_u32(&self, offset: u64, value: u32, order: Ordering) -> Result<(), OutOfBounds> {
        let word = self.at(offset, 4, 4)?.cast();
        // SAFETY: as in `load_u32`.
        let word = unsafe { AtomicU32::from_ptr(word) };
        word.store(value.to_le(), store_order(order));
        Ok(())
    }

    /// Stores the aligned word at `offset`; orders at least what `order` says of stores.
    pub fn store_u64(&self, offset: u64, value: u64, order: Ordering) -> Result<(), OutOfBounds> {
        let word = self.at(offset, 8, 8)?.cast();
        // SAFETY: as in `load_u32`.
        let word = unsafe { AtomicU64::from_ptr(word) };
        word.store(value.to_le(), store_order(order));
        Ok(())
    }

    /// CRC-32C (Castagnoli) of `len` bytes at `offset`.
    pub fn crc32c(&self, offset: u64, len: u64) -> Result<u32, OutOfBounds> {
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        self.chunks(offset, len, |bytes| digest.update(bytes))?;
        Ok(digest.finalize() as u32)
    }

    /// Calls `f` with private copies of consecutive pieces of `len` bytes at `offset`, 4 KiB at
    /// most. Allocates nothing.
    pub fn chunks(
        &self,
        offset: u64,
        len: u64,
        mut f: impl FnMut(&[u8]),
    ) -> Result<(), OutOfBounds> {
        self.at(offset, len, 1)?;
        let mut buffer = [0; CHUNK];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(CHUNK as u64);
            let (piece, _) = buffer.split_at_mut(n as usize);
            self.read(offset + done, piece)?;
            f(piece);
            done += n;
        }
        Ok(())
    }

    /// Calls `f` with a private copy of `len` bytes at `offset`. For headers and the like: it
    /// allocates `len` bytes. Payload goes by [`Self::chunks`], [`Self::copy`] or file IO.
    pub fn with_bytes<R>(
        &self,
        offset: u64,
        len: u64,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, OutOfBounds> {
        self.at(offset, len, 1)?;
        let mut bytes = vec![0; len as usize];
        self.read(offset, &mut bytes)?;
        Ok(f(&bytes))
    }

    /// The address of `len` bytes at `offset`, if they are all there and `offset` is aligned.
    pub(in crate::device) fn at(
        &self,
        offset: u64,
        len: u64,
        align: u64,
    ) -> Result<*mut u8, OutOfBounds> {
        let end = offset.checked_add(len);
        if end.is_none_or(|end| end > self.len) || !offset.is_multiple_of(align) {
            return Err(OutOfBounds {
                offset,
                len,
                align,
                size: self.len,
            });
        }
        // Offsets up to `len` fit a usize, as the mapping does.
        Ok(self.map.as_mut_ptr().wrapping_add(offset as usize))
    }
}

impl fmt::Debug for SharedMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMap")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

// === impl OutOfBounds ===

impl From<OutOfBounds> for std::io::Error {
    fn from(error: OutOfBounds) -> Self {
        Self::new(std::io::ErrorKind::InvalidInput, error)
    }
}

fn size_of_file(len: u64) -> std::io::Result<i64> {
    i64::try_from(len).map_err(|_| std::io::ErrorKind::InvalidInput.into())
}

/// Loads know no release.
fn load_order(order: Ordering) -> Ordering {
    match order {
        Ordering::Release | Ordering::AcqRel => Ordering::Acquire,
        order => order,
    }
}

/// Stores know no acquire.
fn store_order(order: Ordering) -> Ordering {
    match order {
        Ordering::Acquire | Ordering::AcqRel => Ordering::Release,
        order => order,
    }
}

#[cfg(test)]
mod tests;
