use super::*;
use crate::types::TierKind;

const FULL: Option<Ailment> = Some(Ailment::Full);

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn no_space(need: u64) -> StoreError {
    StoreError::NoSpace {
        tier: TierKind::Disk,
        need,
        free: 0,
    }
}

#[test]
fn a_complaint_is_told_at_once_and_then_once_a_minute_with_its_number() {
    let mut trouble = Trouble::default();
    let mut fail = |at: u64| {
        let now = (Millis(1000 * at), s(at));
        trouble.failed(Failure::NoSpace, (FULL, &no_space(7)), now)
    };
    assert_eq!(fail(5), Some(1));
    for at in 6..65 {
        assert_eq!(fail(at), None);
    }
    assert_eq!(fail(65), Some(60));
    assert_eq!(fail(66), None);
    let full = trouble.full().unwrap();
    assert_eq!((full.since, full.last), (Millis(5000), Millis(66_000)));
    assert_eq!((full.failures, full.need), (62, 7));
    let text = full.tell();
    assert!(text.contains("since 1970-01-01T00:00:05"), "{text}");
    let (over, other) = trouble.over();
    assert_eq!((over.unwrap().failures, other), (62, false));
    assert!(trouble.full().is_none());
    // What comes and goes within a minute is neither told nor taken back.
    let again = trouble.failed(
        Failure::NoSpace,
        (FULL, &no_space(7)),
        (Millis(70_000), s(70)),
    );
    assert_eq!(again, None);
    assert!(trouble.full().is_some());
    assert!(trouble.over().0.is_none());
    let again = trouble.failed(
        Failure::NoSpace,
        (FULL, &no_space(7)),
        (Millis(126_000), s(126)),
    );
    assert_eq!(again, Some(1));
}

#[test]
fn who_waits_hears_of_what_concerns_every_write() {
    let mut trouble = Trouble::default();
    let now = (Millis(0), s(0));
    let first = trouble.mark();
    trouble.failed(Failure::Other, (None, &no_space(1)), now);
    trouble.failed(Failure::TooLarge, (FULL, &no_space(1)), now);
    assert_eq!(trouble.since(first), None);
    assert!(trouble.full().is_none());
    trouble.failed(Failure::NoSpace, (FULL, &no_space(1)), now);
    assert_eq!(trouble.since(first), Some(Failure::NoSpace));
    assert_eq!(trouble.since(trouble.mark()), None);
}

#[test]
fn another_ailment_is_told_at_once_and_has_a_time_of_its_own() {
    let mut trouble = Trouble::default();
    let mut fail = |what, at: u64| {
        let now = (Millis(1000 * at), s(at));
        trouble.failed(Failure::Unavailable, (Some(what), &no_space(1)), now)
    };
    assert_eq!(fail(Ailment::Full, 1), Some(1));
    assert_eq!(fail(Ailment::Full, 2), None);
    assert_eq!(fail(Ailment::ReadOnly, 3), Some(1));
    assert_eq!(fail(Ailment::ReadOnly, 4), None);
    assert!(trouble.full().is_none() && !trouble.lasts());
    let ill = trouble.ill().unwrap();
    assert_eq!((ill.since, ill.failures), (Millis(3000), 2));
    let text = trouble.tell();
    assert!(
        text[0].starts_with("the data directory is read-only since"),
        "{text:?}"
    );
    assert_eq!(trouble.over().0.unwrap().what, Ailment::ReadOnly);
    assert!(trouble.tell().is_empty());
}

#[test]
fn what_cannot_be_removed_is_told_until_it_can() {
    let mut trouble = Trouble::default();
    let mark = trouble.mark();
    assert_eq!(
        trouble.not_removed(&no_space(1), (Millis(1), s(1))),
        Some(1)
    );
    assert_eq!(trouble.not_removed(&no_space(1), (Millis(2), s(2))), None);
    assert_eq!(trouble.stuck_since(mark).unwrap().failures, 2);
    assert!(trouble.stuck_since(trouble.mark()).is_none());
    assert_eq!(trouble.since(mark), None);
    assert_eq!(trouble.tell().len(), 1);
    assert!(trouble.unstuck() && !trouble.unstuck());
    assert!(trouble.tell().is_empty());
}
