//! Unix sockets in the file system.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Removes the socket's file when dropped.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

/// Longest path of a Unix socket that every system takes, in bytes.
pub const PATH_MAX: usize = 100;

/// Binds a Unix socket (mode 0660, not blocking), replacing the file of a process that is gone.
///
/// # Errors
/// Another process listens there, the path is a file that is no socket, or the system refuses.
pub fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            let message = "the path exists and is no socket";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    let file = SocketFile(path.into());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    listener.set_nonblocking(true)?;
    Ok((listener, file))
}

// === impl SocketFile ===

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone already, with its folder.
        std::fs::remove_file(&self.0).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_socket_is_replaced_and_a_living_one_or_a_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a dead listener leaves its file");
        let (listener, file) = bind(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o660);
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop((listener, file));
        assert!(!path.exists());
        std::fs::write(&path, "mine").unwrap();
        assert_eq!(
            bind(&path).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }
}
