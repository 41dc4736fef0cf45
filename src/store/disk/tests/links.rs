//! Links, pipes and folders planted where files of ours should be: never followed.

use std::os::unix::fs::{FileTypeExt, symlink};

use super::*;
use crate::store::{ErrorKind, Reason};

/// A folder outside with a file in it that must stay as it is.
struct Outside {
    folder: TempDir,
}

impl Outside {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("precious"), "precious").unwrap();
        Self { folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("precious")
    }

    fn is_untouched(&self) -> bool {
        let names = fs::read_dir(self.folder.path()).unwrap().count();
        names == 1 && fs::read(self.file()).unwrap() == b"precious"
    }
}

fn replace_by_link(path: &Path, target: &Path) {
    if path.is_dir() {
        fs::remove_dir_all(path).unwrap();
    } else if path.exists() {
        fs::remove_file(path).unwrap();
    }
    symlink(target, path).unwrap();
}

/// Opens the store of a bed.
type Opener<'a> = &'a dyn Fn(&Bed) -> Result<Store, StoreError>;

/// Runs with openat2 and without.
fn both_ways(test: &dyn Fn(Opener<'_>)) {
    test(&|bed| bed.open());
    test(&|bed| {
        let faults = Faults::default();
        faults.deny_openat2();
        bed.open_with(faults)
    });
}

fn start_by(open: Opener<'_>, bed: &Bed) -> Start {
    let start = scan(open(bed).unwrap()).unwrap();
    register(&start.store).unwrap();
    start
}

#[test]
fn a_linked_object_is_corrupt() {
    both_ways(&|open| {
        let (bed, outside) = (Bed::new(), Outside::new());
        let start = start_by(open, &bed);
        start.snapshot(1);
        start.snapshot(11);
        replace_by_link(&bed.object(&sample::id(2), 0), &outside.file());
        let error = start
            .disk()
            .get(&sample::id(2), &start.store.arena)
            .unwrap_err();
        let expected = Reason::NotAFile;
        assert!(
            matches!(&error, StoreError::Corrupt { reason, .. } if *reason == expected),
            "{error}"
        );
        assert!(outside.is_untouched());
        assert!(start.is_right(12));
        // Writing it again replaces what is planted there meanwhile.
        symlink(outside.file(), bed.object(&sample::id(2), 0)).unwrap();
        start.put(&sample::kv(
            &start.store.arena,
            &sample::geometry(),
            0,
            1024,
            2,
        ));
        assert!(start.is_right(2) && outside.is_untouched());
    });
}

#[test]
fn links_found_at_the_start_go_aside() {
    both_ways(&|open| {
        let (bed, outside) = (Bed::new(), Outside::new());
        let first = start_by(open, &bed);
        let good = first.snapshot(1);
        let bad = [first.snapshot(11), first.snapshot(21), first.snapshot(31)];
        drop(first);
        let object = bed.object(&sample::id(12), 1);
        replace_by_link(&object, &outside.file());
        replace_by_link(&bed.manifest(&bad[1]), &outside.file());
        replace_by_link(
            bed.object(&sample::id(32), 0).parent().unwrap(),
            outside.folder.path(),
        );
        let pipe = bed.object(&sample::id(99), 0);
        fs::create_dir_all(pipe.parent().unwrap()).unwrap();
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();

        let again = start_by(open, &bed);
        assert_eq!(again.snapshots, [good]);
        assert!(outside.is_untouched());
        assert!(again.is_right(1) && again.is_right(2));
        assert_eq!(again.store.counts().quarantined_for(Reason::NotAFile), 4);
        // The folder is usable again.
        again.put(&sample::kv(
            &again.store.arena,
            &sample::geometry(),
            0,
            1024,
            32,
        ));
        assert!(again.is_right(32) && outside.is_untouched());
        let kinds = fs::read_dir(bed.dir().join(layout::QUARANTINE)).unwrap();
        let kinds: Vec<fs::FileType> = kinds.map(|e| e.unwrap().file_type().unwrap()).collect();
        assert_eq!(kinds.iter().filter(|kind| kind.is_symlink()).count(), 3);
        assert_eq!(kinds.iter().filter(|kind| kind.is_fifo()).count(), 1);
    });
}

#[test]
fn linked_folders_of_a_model_go_aside() {
    both_ways(&|open| {
        for part in ["", layout::OBJECTS, layout::MANIFESTS] {
            let (bed, outside) = (Bed::new(), Outside::new());
            let first = start_by(open, &bed);
            first.snapshot(1);
            drop(first);
            let model = bed
                .dir()
                .join(layout::model_folder(&sample::MODEL).as_path());
            replace_by_link(
                model.join(part).components().as_path(),
                outside.folder.path(),
            );
            let again = start_by(open, &bed);
            assert!(again.snapshots.is_empty());
            again.snapshot(1);
            assert!(again.is_right(1) && outside.is_untouched(), "{part}");
            drop(again);
            assert_eq!(start_by(open, &bed).snapshots.len(), 1, "{part}");
        }
    });
}

#[test]
fn a_folder_linked_while_running_is_an_error() {
    both_ways(&|open| {
        let (bed, outside) = (Bed::new(), Outside::new());
        let start = start_by(open, &bed);
        start.snapshot(1);
        start.refs().scan(&mut |_| {}).unwrap();
        let id = sample::id(50);
        let folder = bed.object(&id, 0).parent().unwrap().to_owned();
        fs::create_dir_all(folder.parent().unwrap()).unwrap();
        symlink(outside.folder.path(), &folder).unwrap();
        let object = sample::kv(&start.store.arena, &sample::geometry(), 0, 9, 50);
        let error = start.disk().put(&object).unwrap_err();
        assert!(matches!(error, StoreError::UnsafePath { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Internal);

        let conversation = crate::store::ConversationRef::new(None, "../../x".into(), Millis(1));
        let path = layout::conversation(&conversation.key());
        let folder = bed.dir().join(path.parent().as_path());
        symlink(outside.folder.path(), folder).unwrap();
        let error = start.refs().put(&conversation).unwrap_err();
        assert!(matches!(error, StoreError::UnsafePath { .. }), "{error}");
        assert!(start.refs().get(&conversation.key()).is_err());
        assert!(outside.is_untouched());
        assert_eq!(start.disk().poisoned(), None);
        assert!(start.is_right(1));
    });
}

#[test]
fn linked_top_level_names_are_refused_or_replaced() {
    both_ways(&|open| {
        for name in [
            layout::LOCK,
            layout::FORMAT,
            layout::MODELS,
            layout::QUARANTINE,
        ] {
            let (bed, outside) = (Bed::new(), Outside::new());
            drop(start_by(open, &bed));
            let folder = bed.dir().join(name).is_dir();
            let target = if folder {
                outside.folder.path().to_owned()
            } else {
                outside.file()
            };
            replace_by_link(&bed.dir().join(name), &target);
            let error = open(&bed).unwrap_err();
            assert!(
                matches!(error, StoreError::UnsafePath { .. }),
                "{name}: {error}"
            );
            assert!(outside.is_untouched(), "{name}");
        }
        let (bed, outside) = (Bed::new(), Outside::new());
        drop(start_by(open, &bed));
        replace_by_link(&bed.dir().join(layout::TOKENS), &outside.file());
        let start = start_by(open, &bed);
        start.store.token_log().unwrap();
        assert!(outside.is_untouched());
        drop(start);
        replace_by_link(&bed.dir().join(layout::REFS), outside.folder.path());
        let start = scan(open(&bed).unwrap()).unwrap();
        start.refs().scan(&mut |_| {}).unwrap();
        assert!(outside.is_untouched());
    });
}
