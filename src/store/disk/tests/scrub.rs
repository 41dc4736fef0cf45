//! Passes over everything on disk.

use super::true_store::TrueStore;
use super::*;
use crate::store::{
    ErrorKind,
    fsck::Class,
    scrub::{Scrub, ScrubMark, Scrubbed},
};

/// Goes to the end of a pass: bytes read, and what was bad.
fn pass(start: &Start, scrub: &mut Scrub) -> (u64, Vec<(ObjectId, ErrorKind)>) {
    let (mut sum, mut bad) = (0, Vec::new());
    loop {
        match start.disk().scrub(scrub) {
            Scrubbed::Bytes(bytes) => sum += bytes,
            Scrubbed::Bad(id, error) => bad.push((id, error.kind())),
            Scrubbed::End => return (sum, bad),
        }
    }
}

fn data_bytes(it: &TrueStore) -> u64 {
    let report = super::fsck::check(&it.bed.dir());
    assert_eq!(report.left(), 0);
    report.verified_bytes
}

#[test]
fn a_pass_reads_everything_once_and_the_next_one_again() {
    let it = TrueStore::new();
    let all = data_bytes(&it);
    let start = it.bed.start();
    let mut scrub = Scrub::after(None).unwrap();
    for _ in 0..3 {
        assert_eq!(pass(&start, &mut scrub), (all, Vec::new()));
        assert_eq!(scrub.last(), None);
    }
    let written = start.store.counts().written_bytes;
    assert!(written < 8192, "{written}: nothing is written to be read");
}

#[test]
fn a_pass_goes_on_where_it_was() {
    let it = TrueStore::new();
    let all = data_bytes(&it);
    let start = it.bed.start();
    assert_eq!(start.disk().scrub_mark(), None);
    let mut scrub = Scrub::after(None).unwrap();
    let mut sum = 0;
    while scrub.last().is_none() {
        match start.disk().scrub(&mut scrub) {
            Scrubbed::Bytes(bytes) => sum += bytes,
            other => panic!("{other:?}"),
        }
    }
    let mark = ScrubMark {
        format_version: 1,
        began: Millis(5),
        last: scrub.last(),
        ended: None,
    };
    start.refs().scan(&mut |_| {}).unwrap();
    start.disk().put_scrub_mark(&mark).unwrap();
    assert_eq!(start.disk().usage().bytes, du(&it.bed.dir()));
    drop(start);
    let start = it.bed.start();
    assert_eq!(start.disk().scrub_mark(), Some(mark));
    let (rest, bad) = pass(&start, &mut Scrub::after(mark.last).unwrap());
    assert_eq!(bad, []);
    assert!(rest < all && rest > 0);
    // The first chunk of the object at which it was noticed is read twice.
    assert!(
        sum + rest > all && sum + rest <= all + sum,
        "{sum} {rest} {all}"
    );
    drop(start);
    // A bad mark costs its place only.
    fs::write(it.bed.dir().join(layout::SCRUB), "x").unwrap();
    let report = super::fsck::check(&it.bed.dir());
    assert_eq!((report.left(), report.of(Class::Damage).count()), (1, 1));
    let start = it.bed.start();
    assert_eq!(start.disk().scrub_mark(), None);
    start.disk().put_scrub_mark(&mark).unwrap();
    assert_eq!(start.disk().scrub_mark(), Some(mark));
}

#[test]
fn damage_goes_aside_and_the_pass_goes_on() {
    let it = TrueStore::new();
    let (flipped, gone) = (it.manifests[0].state.object, it.manifests[2].state.object);
    let start = it.bed.start();
    let path = it.bed.object(&flipped, 1);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    fs::remove_file(it.bed.object(&gone, 0)).unwrap();
    let mut scrub = Scrub::after(None).unwrap();
    let (_, mut bad) = pass(&start, &mut scrub);
    bad.sort_by_key(|(id, _)| id.0);
    let mut expected = [(flipped, ErrorKind::Data), (gone, ErrorKind::Data)];
    expected.sort_by_key(|(id, _)| id.0);
    assert_eq!(bad, expected);
    assert!(!start.disk().contains(&flipped) && !start.disk().contains(&gone));
    assert_eq!(it.bed.quarantined(".safetensors").len(), 3);
    assert_eq!(pass(&start, &mut scrub).1, []);
}

#[test]
fn what_goes_meanwhile_is_no_damage() {
    let it = TrueStore::new();
    let start = it.bed.start();
    let mut scrub = Scrub::after(None).unwrap();
    assert!(matches!(start.disk().scrub(&mut scrub), Scrubbed::Bytes(_)));
    for manifest in &it.manifests {
        start.manifests().remove(&manifest.snapshot).unwrap();
    }
    for copy in &it.copies {
        start.disk().remove(&copy.id).unwrap();
    }
    assert_eq!(pass(&start, &mut scrub).1, []);
    assert_eq!(start.store.counts().quarantined_total(), 0);
}
