//! The temporary folder in which the demo plays.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

use crate::util::socket::PATH_MAX;

/// How often is looked.
const POLL: Duration = Duration::from_millis(20);
/// The longest name of a socket in it.
const LONGEST_SOCKET: &str = "grpc.sock";
/// Lines of a log that are shown after a failure.
const LOG_TAIL: usize = 30;

/// A temporary folder, removed on drop.
#[derive(Debug)]
pub struct Folder(PathBuf);

// === impl Folder ===

impl Folder {
    /// Makes one that only this user can enter.
    pub fn new() -> anyhow::Result<Folder> {
        use std::os::unix::fs::DirBuilderExt as _;

        let name = format!("engram-demo-{}", uuid::Uuid::new_v4().simple());
        let path = std::env::temp_dir().join(name);
        check_length(&path)?;
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("making {}", path.display()))?;
        Ok(Folder(path))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The last lines of every log in it.
    pub fn logs(&self) -> String {
        let mut text = String::new();
        let Ok(entries) = std::fs::read_dir(&self.0) else {
            return text;
        };
        let mut logs: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
            .collect();
        logs.sort();
        for path in logs {
            let log = std::fs::read(&path).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<&str> = log.lines().collect();
            let from = lines.len().saturating_sub(LOG_TAIL);
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            text.push_str(&format!("--- {name}\n"));
            for line in lines.iter().skip(from) {
                text.push_str(line);
                text.push('\n');
            }
        }
        text
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A child that was just killed may still make a file for a moment.
        for _ in 0..50 {
            match std::fs::remove_dir_all(&self.0) {
                Ok(()) => return,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
                Err(_) => std::thread::sleep(POLL),
            }
        }
        eprintln!("engram: {} is left behind", self.0.display());
    }
}

/// Sockets in the folder have paths that the system takes.
fn check_length(path: &Path) -> anyhow::Result<()> {
    let bytes = path.join(LONGEST_SOCKET).as_os_str().len();
    anyhow::ensure!(
        bytes <= PATH_MAX,
        "the folder for temporary files, {}, is {} bytes too long for sockets in it: set TMPDIR to \
         a shorter one",
        std::env::temp_dir().display(),
        bytes - PATH_MAX
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_too_long_for_sockets_says_what_to_set() {
        let most = PATH_MAX - "/grpc.sock".len() - 1;
        let path = |bytes: usize| PathBuf::from(format!("/{}", "x".repeat(bytes)));
        check_length(&path(most)).unwrap();
        let error = check_length(&path(most + 1)).unwrap_err().to_string();
        assert!(error.contains("TMPDIR"), "{error}");
        assert!(error.contains(" 1 bytes too long"), "{error}");
    }

    #[test]
    fn a_folder_goes_with_all_that_is_in_it() {
        let folder = Folder::new().unwrap();
        let path = folder.path().to_owned();
        std::fs::write(path.join("x.log"), "a\nb\n").unwrap();
        std::fs::create_dir(path.join("data")).unwrap();
        assert_eq!(folder.logs(), "--- x.log\na\nb\n");
        drop(folder);
        assert!(!path.exists());
    }
}
