//! The two files of a pair.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use super::Failure;
use crate::store::bundle::{Bundle, BundleError, Outgoing, verify};

/// Where the two are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// `NAME.safetensors`.
    pub tensors: PathBuf,
    /// `NAME.json`.
    pub description: PathBuf,
}

/// A pair that is being written. Until it is complete there is no file under its names.
#[derive(Debug)]
pub struct Writing {
    pair: Pair,
    temporary: PathBuf,
    complete: bool,
}

// === impl Pair ===

impl Pair {
    /// The pair that a path stands for: `NAME`, or either of its files.
    pub fn of(path: &Path) -> Pair {
        let ours = |end: &str| matches!(end, "safetensors" | "json");
        let name = match path.extension().and_then(|end| end.to_str()) {
            Some(end) if ours(end) => path.with_extension(""),
            _ => path.to_owned(),
        };
        // Not `with_extension`: a name may have dots of its own.
        let with = |end: &str| {
            let mut name = name.clone().into_os_string();
            name.push(end);
            PathBuf::from(name)
        };
        Pair {
            tensors: with(".safetensors"),
            description: with(".json"),
        }
    }

    /// The description, and its bytes.
    pub fn describe(&self) -> Result<(Bundle, Vec<u8>), Failure> {
        let path = &self.description;
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| {
            let limit = Bundle::max_bytes().saturating_add(1);
            file.take(limit).read_to_end(&mut bytes)
        });
        read.map_err(|error| Failure::file(path, &error))?;
        let bundle = Bundle::decode(&bytes).map_err(|error| Failure::bad(path, error))?;
        Ok((bundle, bytes))
    }

    /// Opens the tensors.
    pub fn open(&self) -> Result<File, Failure> {
        File::open(&self.tensors).map_err(|error| Failure::file(&self.tensors, &error))
    }

    /// Reads all of the tensors and compares them with the description.
    pub fn verify(&self, bundle: &Bundle, told: &mut dyn FnMut(u64)) -> Result<(), Failure> {
        verify(bundle, self.open()?, told).map_err(|error| match error {
            BundleError::Io(error) => Failure::file(&self.tensors, &error),
            error => Failure::bad(&self.tensors, error),
        })
    }

    /// Neither of them is there.
    pub fn check_free(&self) -> Result<(), Failure> {
        for path in [&self.tensors, &self.description] {
            if path.symlink_metadata().is_ok() {
                let path = path.display();
                return Err(Failure::Other(format!(
                    "{path} is there; --force writes over it"
                )));
            }
        }
        Ok(())
    }
}

// === impl Writing ===

impl Writing {
    /// Starts a pair. Gives what takes the bytes of the tensors, too.
    #[expect(clippy::type_complexity, reason = "the closure has no name")]
    pub fn start(
        pair: Pair,
    ) -> Result<
        (
            Self,
            File,
            Outgoing<impl FnMut(Vec<u8>) -> io::Result<()> + Send>,
        ),
        Failure,
    > {
        let mut temporary = pair.tensors.clone().into_os_string();
        temporary.push(format!(".{}.part", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(&temporary);
        let failed = |error: io::Error| Failure::file(&temporary, &error);
        let mut file = file.map_err(failed)?;
        let kept = file.try_clone().map_err(failed)?;
        let writing = Self {
            pair,
            temporary,
            complete: false,
        };
        let out = Outgoing::new(move |chunk: Vec<u8>| file.write_all(&chunk));
        Ok((writing, kept, out))
    }

    /// The tensors are written: they get their name, and then the description does.
    pub fn finish(mut self, file: &File, description: &[u8]) -> Result<Pair, Failure> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error: io::Error| Failure::file(&path, &error)
        };
        file.sync_all().map_err(failed(&self.temporary))?;
        // A description beside tensors that are not its own would be worse than none.
        if let Err(error) = fs::remove_file(&self.pair.description)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(Failure::file(&self.pair.description, &error));
        }
        fs::rename(&self.temporary, &self.pair.tensors).map_err(failed(&self.pair.tensors))?;
        self.complete = true;
        let path = &self.pair.description;
        let mut part = path.clone().into_os_string();
        part.push(format!(".{}.part", std::process::id()));
        let part = PathBuf::from(part);
        let written = File::create_new(&part).and_then(|mut file| {
            file.write_all(description)?;
            file.sync_all()?;
            fs::rename(&part, path)?;
            let folder = path
                .parent()
                .filter(|folder| !folder.as_os_str().is_empty());
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
        });
        if let Err(error) = written {
            // It may not be there.
            let _ = fs::remove_file(&part);
            return Err(Failure::file(path, &error));
        }
        Ok(self.pair.clone())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.complete {
            // It may not be there.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stands_for_both_files() {
        let pair = |path: &str| {
            let Pair {
                tensors,
                description,
            } = Pair::of(Path::new(path));
            let text = |path: PathBuf| path.to_str().unwrap().to_owned();
            (text(tensors), text(description))
        };
        let both = |name: &str| (format!("{name}.safetensors"), format!("{name}.json"));
        assert_eq!(pair("a/chat"), both("a/chat"));
        assert_eq!(pair("a/chat.json"), both("a/chat"));
        assert_eq!(pair("chat.safetensors"), both("chat"));
        assert_eq!(pair("v1.2"), both("v1.2"));
    }

    #[test]
    fn what_is_not_finished_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let pair = Pair::of(&folder.path().join("x"));
        let (writing, file, mut out) = Writing::start(pair.clone()).unwrap();
        out.write(&[1; 100]).unwrap();
        out.finish().unwrap();
        drop((writing, file));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let (writing, file, mut out) = Writing::start(pair.clone()).unwrap();
        out.write(&[1; 100]).unwrap();
        out.finish().unwrap();
        writing.finish(&file, b"{}").unwrap();
        assert_eq!(fs::read(&pair.tensors).unwrap(), [1; 100]);
        assert_eq!(fs::read(&pair.description).unwrap(), b"{}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        assert!(pair.check_free().is_err());
    }
}
