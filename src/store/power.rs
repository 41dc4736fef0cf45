//! What a power cut leaves: a tape of everything that was done to a data directory, and the folder
//! that a disk may show after it was cut off at any place of the tape.
//!
//! # Model
//! A file's bytes are safe once the file was synced, a name in a folder once the folder was. What was
//! not synced may be there or not, in any combination, and a write may be there in part. Names given
//! by one rename come and go together.

use std::{collections::BTreeMap, fs, io, path::Path};

/// Something that was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A file came to be.
    Create(String),
    /// Bytes were written.
    Write {
        /// Where.
        path: String,
        /// At which offset.
        at: u64,
        /// Which.
        bytes: Vec<u8>,
    },
    /// A file has this length now.
    Len(String, u64),
    /// A file was synced.
    SyncFile(String),
    /// A folder was synced.
    SyncFolder(String),
    /// A name was given, another one taken.
    Rename(String, String),
    /// A name was removed.
    Unlink(String),
    /// A folder came to be.
    Mkdir(String),
    /// Something that the test says.
    Mark(u64),
}

/// What is there of what was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Nothing.
    Nothing,
    /// All names; of the bytes, nothing: files have their lengths, and zeros.
    Names,
    /// All bytes, no names.
    Bytes,
    /// Some names, some writes, some of them in part; other seeds, other ones.
    Some(u64),
}

/// A folder as a disk has it.
#[derive(Debug, Default)]
pub struct Platter {
    files: Vec<Inode>,
    folders: BTreeMap<String, Folder>,
}

#[derive(Debug, Default)]
struct Inode {
    now: Vec<u8>,
    safe: Vec<u8>,
    /// Since the last sync.
    writes: Vec<(u64, Vec<u8>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    File(usize),
    Folder,
}

#[derive(Debug, Default)]
struct Folder {
    now: BTreeMap<String, Entry>,
    safe: BTreeMap<String, Entry>,
    /// Since the last sync: names that came, with what they name, and names that went.
    changes: Vec<Vec<(String, Option<Entry>)>>,
}

/// Numbers that follow from a seed.
struct Dice(u64);

// === impl Dice ===

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        let Self(x) = self;
        *x ^= *x << 13;
        *x ^= *x >> 7;
        *x ^= *x << 17;
        *x % below.max(1)
    }
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

// === impl Inode ===

impl Inode {
    fn put(bytes: &mut Vec<u8>, at: u64, part: &[u8]) {
        let at = at as usize;
        if bytes.len() < at + part.len() {
            bytes.resize(at + part.len(), 0);
        }
        if let Some(place) = bytes.get_mut(at..at + part.len()) {
            place.copy_from_slice(part);
        }
    }

    fn after(&self, cut: Cut, dice: &mut Dice) -> Vec<u8> {
        match cut {
            Cut::Nothing => self.safe.clone(),
            Cut::Names => {
                let mut bytes = self.safe.clone();
                bytes.resize(self.now.len(), 0);
                bytes
            }
            Cut::Bytes => self.now.clone(),
            Cut::Some(_) => {
                let mut bytes = self.safe.clone();
                for (at, part) in &self.writes {
                    let whole = part.len() as u64;
                    let len = match dice.roll(3) {
                        0 => 0,
                        1 => dice.roll(whole) / 512 * 512,
                        _ => whole,
                    };
                    Self::put(&mut bytes, *at, part.get(..len as usize).unwrap_or(part));
                }
                bytes
            }
        }
    }
}

// === impl Platter ===

impl Platter {
    /// Does a step.
    ///
    /// # Panics
    /// If the step cannot be done: the tape does not tell everything.
    pub fn step(&mut self, step: &Step) {
        match step {
            Step::Create(path) => {
                if !matches!(self.entry(path), Some(Entry::File(_))) {
                    self.files.push(Inode::default());
                    let entry = Entry::File(self.files.len() - 1);
                    self.change(vec![(path, Some(entry))]);
                }
            }
            Step::Write { path, at, bytes } => {
                let file = self.file(path);
                Inode::put(&mut file.now, *at, bytes);
                file.writes.push((*at, bytes.clone()));
            }
            Step::Len(path, len) => {
                let file = self.file(path);
                file.now.resize(*len as usize, 0);
                // A cut comes before what is written after it, or nothing of both.
                file.safe.truncate(*len as usize);
                file.writes.retain(|(at, _)| at < len);
            }
            Step::SyncFile(path) => {
                let file = self.file(path);
                file.safe.clone_from(&file.now);
                file.writes.clear();
            }
            Step::SyncFolder(path) => {
                let folder = self.folders.entry(path.clone()).or_default();
                folder.safe.clone_from(&folder.now);
                folder.changes.clear();
            }
            Step::Rename(from, to) => {
                let entry = self.entry(from).unwrap_or_else(|| panic!("no {from}"));
                self.change(vec![(from, None), (to, Some(entry))]);
            }
            Step::Unlink(path) => self.change(vec![(path, None)]),
            Step::Mkdir(path) => {
                self.folders.entry(path.clone()).or_default();
                self.change(vec![(path, Some(Entry::Folder))]);
            }
            Step::Mark(_) => {}
        }
    }

    fn entry(&self, path: &str) -> Option<Entry> {
        let (folder, name) = split(path);
        self.folders.get(folder)?.now.get(name).copied()
    }

    fn file(&mut self, path: &str) -> &mut Inode {
        let Some(Entry::File(number)) = self.entry(path) else {
            panic!("no file {path}");
        };
        self.files.get_mut(number).expect("an entry's file")
    }

    /// Changes of one step. Those in one folder come and go together.
    fn change(&mut self, parts: Vec<(&str, Option<Entry>)>) {
        let mut of: BTreeMap<&str, Vec<(String, Option<Entry>)>> = BTreeMap::new();
        for (path, entry) in parts {
            let (folder, name) = split(path);
            of.entry(folder).or_default().push((name.to_owned(), entry));
        }
        for (folder, parts) in of {
            let folder = self.folders.entry(folder.to_owned()).or_default();
            apply(&mut folder.now, &parts);
            folder.changes.push(parts);
        }
    }

    /// Writes down what a disk may show after a cut here.
    ///
    /// # Errors
    /// Those of the system.
    pub fn show(&self, cut: Cut, at: &Path) -> io::Result<()> {
        let mut dice = Dice(match cut {
            Cut::Some(seed) => seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            _ => 1,
        });
        self.show_folder(cut, &mut dice, "", at)
    }

    fn show_folder(&self, cut: Cut, dice: &mut Dice, path: &str, at: &Path) -> io::Result<()> {
        fs::create_dir_all(at)?;
        let Some(folder) = self.folders.get(path) else {
            return Ok(());
        };
        let mut names = match cut {
            Cut::Names => folder.now.clone(),
            _ => folder.safe.clone(),
        };
        if let Cut::Some(_) = cut {
            for parts in &folder.changes {
                if dice.roll(2) == 0 {
                    apply(&mut names, parts);
                }
            }
        }
        for (name, entry) in names {
            let place = at.join(&name);
            match entry {
                Entry::File(number) => {
                    let file = self.files.get(number).expect("an entry's file");
                    fs::write(place, file.after(cut, dice))?;
                }
                Entry::Folder => {
                    let path = match path {
                        "" => name,
                        path => format!("{path}/{name}"),
                    };
                    self.show_folder(cut, dice, &path, &place)?;
                }
            }
        }
        Ok(())
    }
}

fn apply(names: &mut BTreeMap<String, Entry>, parts: &[(String, Option<Entry>)]) {
    for (name, entry) in parts {
        match entry {
            Some(entry) => {
                names.insert(name.clone(), *entry);
            }
            None => {
                names.remove(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(steps: &[Step], cut: Cut) -> BTreeMap<String, Vec<u8>> {
        let mut platter = Platter::default();
        steps.iter().for_each(|step| platter.step(step));
        let folder = tempfile::tempdir().unwrap();
        platter.show(cut, folder.path()).unwrap();
        let entries = fs::read_dir(folder.path()).unwrap();
        entries
            .map(|entry| {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                (name, fs::read(path).unwrap())
            })
            .collect()
    }

    #[test]
    fn only_what_was_synced_is_sure() {
        let path = |name: &str| name.to_owned();
        let write = Step::Write {
            path: path("a"),
            at: 1,
            bytes: vec![7],
        };
        let mut steps = vec![Step::Create(path("a")), write];
        let files = |names: &[(&str, &[u8])]| {
            let names = names.iter();
            names
                .map(|(name, bytes)| (path(name), bytes.to_vec()))
                .collect::<BTreeMap<_, _>>()
        };
        assert_eq!(after(&steps, Cut::Nothing), files(&[]));
        assert_eq!(after(&steps, Cut::Names), files(&[("a", &[0, 0])]));
        steps.push(Step::SyncFolder(path("")));
        assert_eq!(after(&steps, Cut::Nothing), files(&[("a", &[])]));
        assert_eq!(after(&steps, Cut::Bytes), files(&[("a", &[0, 7])]));
        steps.push(Step::SyncFile(path("a")));
        assert_eq!(after(&steps, Cut::Nothing), files(&[("a", &[0, 7])]));
        steps.push(Step::Rename(path("a"), path("b")));
        assert_eq!(after(&steps, Cut::Nothing), files(&[("a", &[0, 7])]));
        assert_eq!(after(&steps, Cut::Names), files(&[("b", &[0, 7])]));
        let some: Vec<_> = (0..20).map(|seed| after(&steps, Cut::Some(seed))).collect();
        assert!(some.contains(&files(&[("a", &[0, 7])])));
        assert!(some.contains(&files(&[("b", &[0, 7])])));
        assert!(some.iter().all(|files| files.len() == 1));
        steps.push(Step::Unlink(path("b")));
        steps.push(Step::SyncFolder(path("")));
        assert_eq!(after(&steps, Cut::Nothing), files(&[]));
    }
}
