//! What a daemon left on disk, read without its code.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// One file, as far as a change of it would show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Length.
    pub len: u64,
    /// Bytes on disk.
    pub blocks: u64,
    /// Another file has another.
    pub inode: u64,
    /// Last change, in nanoseconds.
    pub changed: i128,
}

/// An object file.
#[derive(Clone, Debug)]
pub struct ObjectFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its id.
    pub id: String,
    /// `state` or `kv`.
    pub kind: String,
    /// `<start>-<end>`.
    pub range: String,
    /// Bytes of states and KV in it.
    pub payload: u64,
}

/// Every file and link below a folder.
pub fn files(folder: &Path) -> BTreeMap<PathBuf, Seen> {
    let mut found = BTreeMap::new();
    walk(folder, &mut |path, meta| {
        let seen = Seen {
            len: meta.len(),
            blocks: meta.blocks() * 512,
            inode: meta.ino(),
            changed: i128::from(meta.ctime()) * 1_000_000_000 + i128::from(meta.ctime_nsec()),
        };
        if !meta.is_dir() {
            found.insert(path.to_owned(), seen);
        }
    });
    found
}

/// Bytes on disk of everything below a folder, and itself, as `du` counts them.
pub fn du(folder: &Path) -> u64 {
    let mut sum = fs::symlink_metadata(folder).map_or(0, |meta| meta.blocks() * 512);
    walk(folder, &mut |_, meta| sum += meta.blocks() * 512);
    sum
}

/// What goes while it is looked at is not there.
fn walk(folder: &Path, f: &mut impl FnMut(&Path, &fs::Metadata)) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(meta) = fs::symlink_metadata(&path) else {
            continue;
        };
        f(&path, &meta);
        if meta.is_dir() {
            walk(&path, f);
        }
    }
}

/// All object files of a data directory.
pub fn objects(data: &Path) -> Vec<ObjectFile> {
    let all = files(&data.join("models")).into_keys();
    all.filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .map(|path| object(&path))
        .collect()
}

/// One object file, by its safetensors header.
pub fn object(path: &Path) -> ObjectFile {
    let bytes = fs::read(path).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let length = u64::from_le_bytes(*length) as usize;
    let header: Value = serde_json::from_slice(&rest[..length]).unwrap();
    let text = |name: &str| header["__metadata__"][name].as_str().unwrap().to_owned();
    let mut payload = 0;
    for (name, tensor) in header.as_object().unwrap() {
        if name == "__metadata__" || name == "tokens" || name.starts_with("_pad") {
            continue;
        }
        let offset = |i: usize| tensor["data_offsets"][i].as_u64().unwrap();
        payload += offset(1) - offset(0);
    }
    ObjectFile {
        path: path.to_owned(),
        id: text("object"),
        kind: text("kind"),
        range: text("range"),
        payload,
    }
}

/// Bytes of states and KV in all object files.
pub fn payload(data: &Path) -> u64 {
    objects(data).iter().map(|object| object.payload).sum()
}

/// All manifests of a data directory.
pub fn manifests(data: &Path) -> Vec<(PathBuf, Value)> {
    let all = files(&data.join("models")).into_keys();
    all.filter(|path| {
        path.parent()
            .unwrap()
            .parent()
            .unwrap()
            .ends_with("manifests")
    })
    .map(|path| {
        let manifest = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        (path, manifest)
    })
    .collect()
}

/// The manifests of a conversation's snapshots, the shallowest first.
pub fn manifests_of(data: &Path, conversation: &str) -> Vec<(PathBuf, Value)> {
    let mut all = manifests(data);
    all.retain(|(_, manifest)| manifest["labels"]["conversation"] == conversation);
    all.sort_by_key(|(_, manifest)| manifest["boundary"].as_u64());
    assert!(!all.is_empty(), "no manifest of {conversation}");
    all
}

/// The file of an object.
pub fn object_path(data: &Path, id: &Value) -> PathBuf {
    let name = format!("{}.0.safetensors", id.as_str().unwrap());
    let mut all = files(&data.join("models")).into_keys();
    all.find(|path| path.file_name().unwrap() == &*name)
        .unwrap_or_else(|| panic!("{name} is not there"))
}

/// A manifest or the like after a change, with a right checksum again.
pub fn reseal(bytes: &[u8], change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(bytes).unwrap();
    let fields = json.as_object_mut().unwrap();
    fields.remove("checksum");
    change(fields);
    let mut bytes = serde_json::to_vec(&json).unwrap();
    assert_eq!(bytes.pop(), Some(b'}'));
    let checksum = blake3::hash(&bytes).to_hex();
    bytes.extend(format!(",\"checksum\":\"{checksum}\"}}\n").into_bytes());
    bytes
}

/// Names of files in quarantine, notes left out, and the reasons that the notes give.
pub fn quarantine(data: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for path in files(&data.join("quarantine")).into_keys() {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if let Some(name) = name.strip_suffix(".reason.json") {
            let note: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            found.push((name.to_owned(), note["reason"].as_str().unwrap().to_owned()));
        }
    }
    found
}
