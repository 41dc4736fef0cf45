//! What an insert takes and what it refuses.

use std::{cell::Cell, io, rc::Rc};

use super::*;

#[test]
fn a_repeated_insert_changes_nothing_but_copies() {
    let mut bed = Bed::new(ram_and_disk());
    let tokens = run(0, 100);
    let first = bed.save(&key(1), &tokens);
    let (stats, usage) = (bed.index.stats(), bed.index.usage(TierKind::Ram));
    let logged = bed.index.log().len();

    let mut again = bed.new_snapshot(&key(1), &tokens);
    again.state.tiers = ram_and_disk();
    let redundant = kv_of(&key(1), &tokens, 50, ram());
    again.new_objects.push(redundant);
    let inserted = bed.index.insert(&key(1), &tokens, again).unwrap();
    bed.index.check().unwrap();
    assert_eq!(
        inserted,
        Inserted {
            snapshot: first,
            fresh: false,
            unused: vec![redundant.id],
        }
    );
    assert_eq!(bed.index.stats(), stats);
    assert_eq!(bed.index.usage(TierKind::Ram), usage);
    assert_eq!(bed.index.log().len(), logged);
    assert_eq!(
        bed.index.snapshot(&first).unwrap().state_tiers,
        ram_and_disk()
    );
}

#[test]
fn objects_that_no_reference_names_are_not_taken_in() {
    let mut bed = Bed::new(ram());
    let tokens = run(0, 100);
    let mut new = bed.new_snapshot(&key(1), &tokens);
    let stray = kv_of(&key(1), &tokens, 7, ram());
    new.new_objects.push(stray);
    let inserted = bed.index.insert(&key(1), &tokens, new).unwrap();
    assert!(inserted.fresh);
    assert_eq!(inserted.unused, [stray.id]);
    assert_eq!(bed.index.object(&stray.id), None);
}

/// Changes a good insert of the tokens that `good` is for, and says how it is refused.
fn refusal(bed: &mut Bed, tokens: &[TokenId], spoil: impl FnOnce(&mut NewSnapshot)) -> IndexError {
    let mut new = bed.new_snapshot(&key(1), tokens);
    spoil(&mut new);
    let before = (bed.index.stats(), bed.index.usage(TierKind::Ram));
    let error = bed.index.insert(&key(1), tokens, new).unwrap_err();
    assert_eq!((bed.index.stats(), bed.index.usage(TierKind::Ram)), before);
    bed.index.check().unwrap();
    error
}

#[test]
fn contradictions_are_refused_and_change_nothing() {
    let mut bed = Bed::new(ram());
    let tokens = run(0, 100);
    let longer = run(0, 150);
    let first = bed.save(&key(1), &tokens);
    let bed = &mut bed;

    assert!(matches!(refusal(bed, &[], |_| {}), IndexError::Empty));
    let bad = |error: IndexError, text: &str| match error {
        IndexError::BadObject { what, .. } => assert!(what.contains(text), "{what}"),
        other => panic!("{other}"),
    };
    bad(
        refusal(bed, &longer, |new| new.state.range.end = 151),
        "at the boundary",
    );
    bad(
        refusal(bed, &longer, |new| new.state.kind = ObjectKind::Kv),
        "at the boundary",
    );
    bad(
        refusal(bed, &longer, |new| new.state.tiers = TierSet::EMPTY),
        "no copy",
    );
    bad(
        refusal(bed, &longer, |new| new.state.bytes = u64::MAX),
        "larger",
    );
    bad(
        refusal(bed, &longer, |new| {
            new.new_objects[0].kind = ObjectKind::State
        }),
        "no KV",
    );
    bad(
        refusal(bed, &longer, |new| {
            new.new_objects[0].range = TokenRange::at(150)
        }),
        "no KV",
    );
    bad(
        refusal(bed, &longer, |new| {
            let twice = new.new_objects[0];
            new.new_objects.push(twice);
        }),
        "twice",
    );
    bad(
        refusal(bed, &longer, |new| new.new_objects[0].id = new.state.id),
        "twice",
    );
    bad(
        refusal(bed, &longer, |new| new.new_objects[0].range.start += 1),
        "another range",
    );
    bad(
        refusal(bed, &longer, |new| new.kv[1].range.end += 1),
        "outside its range",
    );
    bad(
        refusal(bed, &longer, |new| new.kv[0].object_range.end += 1),
        "another kind or range",
    );
    let known = state_of(&key(1), &tokens, ram());
    bad(
        refusal(bed, &longer, |new| new.state.id = known.id),
        "another kind, range or size",
    );
    let gap = |error: IndexError, at: u32| match error {
        IndexError::Gap { at: found } => assert_eq!(found, at),
        other => panic!("{other}"),
    };
    gap(refusal(bed, &longer, |new| new.kv.clear()), 0);
    gap(refusal(bed, &longer, |new| new.kv = new.kv.split_off(1)), 0);
    gap(refusal(bed, &longer, |new| new.kv.truncate(1)), 100);
    gap(refusal(bed, &longer, |new| new.kv[1].range.start += 1), 100);
    assert!(matches!(
        refusal(bed, &longer, |new| new.new_objects.clear()),
        IndexError::UnknownObject(_)
    ));
    assert!(matches!(
        refusal(bed, &longer, |new| new.id = first),
        IndexError::DuplicateSnapshot(id) if id == first
    ));
}

#[test]
fn objects_of_other_tokens_are_refused() {
    let mut bed = Bed::new(ram());
    let a = run(0, 100);
    bed.save(&key(1), &a);
    let object = kv_of(&key(1), &a, 0, ram());
    for shared in [0, 40, 99] {
        let mut b = a.clone();
        b[shared] = 5555;
        let error = refusal(&mut bed, &b, |new| {
            new.kv = vec![part(&object, 0, 100)];
            new.new_objects.clear();
        });
        assert!(matches!(error, IndexError::Foreign(id) if id == object.id));
    }
    // Where the snapshot's own prefix is known as far, by another object.
    let c = run(7000, 100);
    bed.save(&key(1), &c);
    let longer = join(&c, &[1]);
    let error = refusal(&mut bed, &longer, |new| {
        new.kv[0] = part(&object, 0, 100);
    });
    assert!(matches!(error, IndexError::Foreign(id) if id == object.id));
    // The same tokens in another tree are other tokens, too.
    let mut new = bed.new_snapshot(&key(2), &a);
    new.kv = vec![part(&object, 0, 100)];
    new.new_objects.clear();
    let error = bed.index.insert(&key(2), &a, new).unwrap_err();
    assert!(matches!(error, IndexError::Foreign(_)));
    bed.index.check().unwrap();
}

#[test]
fn a_manifest_of_a_branch_comes_before_that_of_the_object_it_shares() {
    let mut bed = Bed::new(ram());
    let a = run(0, 2000);
    let b = join(&a[..1500], &run(20_000, 10));
    let shared = kv_of(&key(1), &a, 0, ram());
    let own = kv_of(&key(1), &b, 1500, ram());

    let mut new = bed.new_snapshot(&key(1), &b);
    new.kv = vec![part(&shared, 0, 1500), part(&own, 1500, 1510)];
    new.new_objects = vec![shared, own];
    bed.index.insert(&key(1), &b, new).unwrap();
    bed.index.check().unwrap();
    // The tokens of the object beyond the branch are not known yet.
    assert_eq!(bed.index.coverage(&key(1), &a).kv, 1500);

    let mut new = bed.new_snapshot(&key(1), &a);
    new.kv = vec![part(&shared, 0, 2000)];
    new.new_objects = vec![shared];
    let id = bed.index.insert(&key(1), &a, new).unwrap().snapshot;
    bed.index.check().unwrap();
    assert_eq!(bed.find(&key(1), &a), Some((id, 2000)));
    assert_eq!(bed.index.hit(&id).unwrap().kv, [part(&shared, 0, 2000)]);
}

#[test]
fn an_object_has_one_continuation() {
    let mut bed = Bed::new(ram());
    let a = run(0, 100);
    let shared = kv_of(&key(1), &a, 0, ram());
    // Each claims tokens of the object beyond those that both have.
    let claim = |bed: &mut Bed, tokens: &[TokenId]| {
        let mut new = bed.new_snapshot(&key(1), tokens);
        new.kv = vec![part(&shared, 0, 80)];
        new.new_objects = vec![shared];
        let inserted = bed.index.insert(&key(1), tokens, new);
        bed.index.check().unwrap();
        inserted
    };
    claim(&mut bed, &a[..80]).unwrap();
    let other = join(&a[..60], &run(900, 20));
    let refused = claim(&mut bed, &other);
    assert!(matches!(refused, Err(IndexError::Foreign(id)) if id == shared.id));
}

/// A log whose next append fails when it is told so, and that can lose all its tokens.
#[derive(Default)]
struct BadLog {
    log: VecLog,
    full: Rc<Cell<bool>>,
    lost: Rc<Cell<bool>>,
}

impl Tokens for BadLog {
    fn append(&mut self, tokens: &[TokenId]) -> io::Result<u64> {
        if self.full.get() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.log.append(tokens)
    }

    fn get(&self, offset: u64, len: u32, f: &mut dyn FnMut(&[TokenId])) {
        if !self.lost.get() {
            self.log.get(offset, len, f);
        }
    }
}

#[test]
fn a_failing_log_makes_misses_and_refusals_alone() {
    let mut bed = Bed::new(ram());
    let (a, b) = (run(0, 100), join(&run(0, 50), &run(500, 50)));
    let (new_a, new_b) = (bed.new_snapshot(&key(1), &a), bed.new_snapshot(&key(1), &b));
    let log = BadLog::default();
    let (full, lost) = (Rc::clone(&log.full), Rc::clone(&log.lost));
    let mut index = Index::new(log, ram());

    full.set(true);
    let error = index.insert(&key(1), &a, new_a.clone()).unwrap_err();
    assert!(matches!(error, IndexError::Log(_)));
    index.check().unwrap();
    assert_eq!(index.stats(), Stats::default());

    full.set(false);
    index.insert(&key(1), &a, new_a).unwrap();
    lost.set(true);
    assert_eq!(index.lookup(&key(1), &a, 100), None);
    assert_eq!(index.coverage(&key(1), &a).kv, 0);
    let error = index.insert(&key(1), &b, new_b.clone()).unwrap_err();
    assert!(matches!(error, IndexError::Log(_)));
    assert!(!index.read_tokens(&new_b.id, &mut Vec::new()));

    lost.set(false);
    index.insert(&key(1), &b, new_b).unwrap();
    index.check().unwrap();
    assert!(index.lookup(&key(1), &a, 100).is_some());
}
