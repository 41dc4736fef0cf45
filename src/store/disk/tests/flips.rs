//! Every byte of a small store is flipped once, and every file cut at every 512 bytes: never a wrong
//! byte, never a panic, and the check names the damage.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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

/// Whether the store saw that something is wrong. Whatever it gives is what was stored.
fn store_notices(
    it: &TrueStore,
    conversation: &ConversationRef,
    mark: &ScrubMark,
    dir: &Path,
) -> bool {
    let config = Config {
        ram: ByteSize::mib(1),
        ram_headroom: None,
        disk: Some(DiskConfig {
            bytes: ByteSize::mib(64),
            min_free: ByteSize::b(0),
            io_threads: 1,
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
            return true;
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
    let mut whole = 0;
    for manifest in &start.snapshots {
        assert!(it.manifests.contains(manifest));
        let kv = manifest.kv.iter().map(|part| part.object);
        let all = kv.chain([manifest.state.object]).all(|id| {
            match start.disk().get(&id, &start.store.arena) {
                Ok(object) => {
                    assert!(it.copy(&id).is(&object), "changed bytes of {id}");
                    true
                }
                Err(error) => {
                    assert!(
                        matches!(error.kind(), ErrorKind::Data | ErrorKind::NotFound),
                        "{error}"
                    );
                    false
                }
            }
        });
        whole += usize::from(all);
    }
    whole != it.manifests.len() || conversations.is_empty() || known.is_none()
}

fn check_names(dir: &Path, path: &Path) -> bool {
    let options = Options {
        threads: 1,
        ..options(dir)
    };
    match run(&options) {
        Ok(report) => report
            .findings
            .iter()
            .any(|finding| Path::new(&finding.path) == path),
        Err(StoreError::Version { path: at, .. }) => at.ends_with(path),
        Err(error) => panic!("{error}"),
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
    let mut cases = Vec::new();
    for (path, bytes) in &pristine {
        let Some(bytes) = bytes else { continue };
        cases.extend((0..bytes.len()).map(|at| (path, bytes, Damage::Flip(at))));
        let cuts = (0..bytes.len()).step_by(512);
        cases.extend(cuts.map(|len| (path, bytes, Damage::Cut(len))));
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
                while let Some((path, bytes, damage)) = cases.get(next.fetch_add(1, Relaxed)) {
                    lay_out(&dir, pristine);
                    fs::write(dir.join(path), damaged(bytes, *damage)).unwrap();
                    let named = check_names(&dir, path);
                    let noticed = store_notices(it, conversation, mark, &dir);
                    for (seen, by) in [(named, "check"), (noticed, "store")] {
                        if !seen {
                            let path = (*path).clone();
                            overlooked.lock().unwrap().insert(Overlooked { path, by });
                        }
                    }
                }
            });
        }
    });
    assert!(cases.len() > 20_000, "{}", cases.len());
    // The lock's note is for people, written anew by whoever takes the lock. And the store does
    // without a model's description when its worker brings it again.
    let lock = |by| Overlooked {
        path: "LOCK".into(),
        by,
    };
    let expected = BTreeSet::from([lock("check"), lock("store")]);
    assert_eq!(overlooked.into_inner().unwrap(), expected);
}
