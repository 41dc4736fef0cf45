//! Every byte of a small store is flipped once, and every file cut at every 512 bytes: never a wrong
//! byte, never a panic, and the check names the damage.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

use super::fsck::{options, run};
use super::true_store::TrueStore;
use super::*;
use crate::store::{ConversationRef, ErrorKind, fsck::Options, scrub::ScrubMark};

/// One way in which one file is not what was written.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Flip(usize),
    Cut(usize),
}

/// A damage that somebody overlooked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Overlooked {
    path: PathBuf,
    by: &'static str,
}

/// All files below a folder, and the folders themselves.
type Tree = Vec<(PathBuf, Option<Vec<u8>>)>;

fn tree(folder: &Path, below: &Path, all: &mut Tree) {
    let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(Result::unwrap).collect();
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let rel = below.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            all.push((rel.clone(), None));
            tree(&entry.path(), &rel, all);
        } else {
            all.push((rel, Some(fs::read(entry.path()).unwrap())));
        }
    }
}

fn lay_out(folder: &Path, tree: &Tree) {
    if folder.exists() {
        fs::remove_dir_all(folder).unwrap();
    }
    fs::create_dir(folder).unwrap();
    for (rel, bytes) in tree {
        match bytes {
            None => fs::create_dir(folder.join(rel)).unwrap(),
            Some(bytes) => fs::write(folder.join(rel), bytes).unwrap(),
        }
    }
}

fn damaged(bytes: &[u8], damage: Damage) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    match damage {
        // Another bit in each byte.
        Damage::Flip(at) => bytes[at] ^= 1 << (at % 8),
        Damage::Cut(len) => bytes.truncate(len),
    }
    bytes
}

/// The files of which the store saw that they are wrong; all of them where one costs the snapshot.
/// Whatever it gives is what was stored.
fn store_notices(
    it: &TrueStore,
    conversation: &ConversationRef,
    mark: &ScrubMark,
    dir: &Path,
) -> Noticed {
    let config = Config {
        ram: ByteSize::mib(1),
        ram_headroom: None,
        disk: Some(DiskConfig {
            bytes: ByteSize::mib(64),
            min_free: ByteSize::b(0),
            io_threads: 1,
            io_engine: crate::store::IoEngine::Threads,
            direct_io: false,
            ..DiskConfig::at(dir.to_owned())
        }),
    };
    let store = match config.build(Arc::new(ManualClock::new(Millis(1_000)))) {
        Ok(store) => store,
        Err(error) => {
            let typed = matches!(
                error,
                StoreError::Damaged { .. } | StoreError::Version { .. }
            );
            assert!(typed, "{error}");
            return Noticed::All;
        }
    };
    let start = scan(store).unwrap();
    let mut conversations = Vec::new();
    start
        .refs()
        .scan(&mut |found| conversations.extend(found.ok()))
        .unwrap();
    assert!(conversations.iter().all(|found| found == conversation));
    let known = start.disk().scrub_mark();
    assert!(known.is_none_or(|known| known == *mark));
    if start.snapshots.is_empty() || conversations.is_empty() || known.is_none() {
        return Noticed::All;
    }
    assert_eq!(start.snapshots, it.manifests);
    let mut bad = Vec::new();
    for copy in &it.copies {
        match start.disk().get(&copy.id, &start.store.arena) {
            Ok(object) => assert!(copy.is(&object), "changed bytes of {}", copy.id),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Data, "{error}");
                let rel = layout::object(&sample::MODEL, &copy.id, 0);
                bad.push(rel.as_path().to_owned());
            }
        }
    }
    Noticed::These(bad)
}

/// What the store saw.
enum Noticed {
    All,
    These(Vec<PathBuf>),
}

fn check_names(dir: &Path) -> Noticed {
    let options = Options {
        threads: 1,
        ..options(dir)
    };
    match run(&options) {
        Ok(report) => Noticed::These(
            report
                .findings
                .iter()
                .map(|f| f.path.clone().into())
                .collect(),
        ),
        Err(StoreError::Version { .. }) => Noticed::All,
        Err(error) => panic!("{error}"),
    }
}

impl Noticed {
    fn has(&self, path: &Path) -> bool {
        match self {
            Self::All => true,
            Self::These(paths) => paths.iter().any(|other| other == path),
        }
    }
}

#[test]
fn every_flip_and_every_cut_is_found() {
    let it = TrueStore::tiny();
    let start = it.bed.start();
    let mark = ScrubMark {
        format_version: 1,
        began: Millis(7),
        last: Some(it.copies[0].id),
        ended: None,
    };
    start.disk().put_scrub_mark(&mark).unwrap();
    let mut conversation = None;
    start
        .refs()
        .scan(&mut |found| conversation = found.ok())
        .unwrap();
    let conversation = conversation.unwrap();
    drop(start);
    let mut pristine = Tree::new();
    tree(&it.bed.dir(), Path::new(""), &mut pristine);
    // One file is damaged at a time; of the objects all, as each is read by itself.
    let files = pristine
        .iter()
        .filter_map(|(path, bytes)| Some((path, bytes.as_ref()?)));
    let (objects, others): (Vec<_>, Vec<_>) =
        files.partition(|(path, _)| path.extension().is_some_and(|end| end == "safetensors"));
    let longest = objects.iter().map(|(_, bytes)| bytes.len()).max().unwrap();
    let mut cases: Vec<Vec<(&PathBuf, &Vec<u8>, Damage)>> = (0..longest)
        .map(|at| {
            let long = objects.iter().filter(|(_, bytes)| at < bytes.len());
            long.map(|(path, bytes)| (*path, *bytes, Damage::Flip(at)))
                .collect()
        })
        .collect();
    for (path, bytes) in &others {
        cases.extend((0..bytes.len()).map(|at| vec![(*path, *bytes, Damage::Flip(at))]));
    }
    for (path, bytes) in objects.iter().chain(&others) {
        let cuts = (0..bytes.len()).step_by(512);
        cases.extend(cuts.map(|len| vec![(*path, *bytes, Damage::Cut(len))]));
    }
    let next = AtomicUsize::new(0);
    let overlooked = Mutex::new(BTreeSet::new());
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for number in 0..threads {
            let dir = it.bed.folder.path().join(format!("copy-{number}"));
            let (cases, next, overlooked) = (&cases, &next, &overlooked);
            let (it, pristine, conversation, mark) = (&it, &pristine, &conversation, &mark);
            scope.spawn(move || {
                while let Some(case) = cases.get(next.fetch_add(1, Relaxed)) {
                    lay_out(&dir, pristine);
                    for (path, bytes, damage) in case {
                        fs::write(dir.join(path), damaged(bytes, *damage)).unwrap();
                    }
                    let named = check_names(&dir);
                    let noticed = store_notices(it, conversation, mark, &dir);
                    for (path, ..) in case {
                        for (seen, by) in [(&named, "check"), (&noticed, "store")] {
                            if !seen.has(path) {
                                let path = (*path).clone();
                                overlooked.lock().insert(Overlooked { path, by });
                            }
                        }
                    }
                }
            });
        }
    });
    let flipped: usize = cases.iter().flatten().count();
    assert!(flipped > 20_000, "{flipped}");
    // The lock's note is for people, and written anew by whoever takes the lock: nothing reads it.
    let lock = |by| Overlooked {
        path: "LOCK".into(),
        by,
    };
    let expected = BTreeSet::from([lock("check"), lock("store")]);
    assert_eq!(overlooked.into_inner(), expected);
}
