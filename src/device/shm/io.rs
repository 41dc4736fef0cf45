//! File IO straight between a file and a map: no buffer between, so it works with `O_DIRECT` when
//! offsets and length are aligned.

use std::{
    fs::File,
    io::{self, ErrorKind},
    os::fd::AsRawFd,
};

use nix::libc;

use super::SharedMap;

/// Bytes of one call: below the kernel's own limit, and a multiple of any block.
const MAX_CALL: u64 = 1 << 30;

impl SharedMap {
    /// Reads exactly `len` bytes at `file_offset` into `offset`. A file that ends before is
    /// [`ErrorKind::UnexpectedEof`]; what was read until then stays written.
    pub fn pread_exact(
        &self,
        file: &File,
        file_offset: u64,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        self.transfer(
            file_offset,
            offset,
            len,
            ErrorKind::UnexpectedEof,
            |at, n, file_at| {
                // SAFETY: `transfer` gives addresses of `n` bytes inside the live mapping.
                unsafe { libc::pread(file.as_raw_fd(), at.cast(), n, file_at) }
            },
        )
    }

    /// Writes exactly `len` bytes at `offset` to `file_offset`.
    pub fn pwrite_all(
        &self,
        file: &File,
        file_offset: u64,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        self.transfer(
            file_offset,
            offset,
            len,
            ErrorKind::WriteZero,
            |at, n, file_at| {
                // SAFETY: as in `pread_exact`.
                unsafe { libc::pwrite(file.as_raw_fd(), at.cast(), n, file_at) }
            },
        )
    }

    /// Repeats `call(address, bytes, file offset)` until `len` bytes are moved.
    fn transfer(
        &self,
        file_offset: u64,
        offset: u64,
        len: u64,
        on_zero: ErrorKind,
        mut call: impl FnMut(*mut u8, usize, i64) -> isize,
    ) -> io::Result<()> {
        let mut at = self.at(offset, len, 1)?;
        let mut left = len;
        let mut file_at = file_offset;
        while left > 0 {
            let n = left.min(MAX_CALL) as usize;
            let position = i64::try_from(file_at).map_err(|_| ErrorKind::InvalidInput)?;
            match u64::try_from(call(at, n, position)) {
                Ok(0) => return Err(on_zero.into()),
                Ok(moved) => {
                    at = at.wrapping_add(moved as usize);
                    left -= moved;
                    file_at = file_at.checked_add(moved).ok_or(ErrorKind::InvalidInput)?;
                }
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}
