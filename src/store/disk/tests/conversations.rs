//! Conversations: names from outside, restarts, damage.

use super::*;
use crate::store::{ConversationRef, Reason};

#[test]
fn conversations_survive_and_bad_ones_go_aside() {
    let bed = Bed::new();
    let start = bed.start();
    let hostile = [
        "../x",
        "/abs",
        "a\0b",
        ".",
        "..",
        "é\u{202e}",
        "x/../../y",
        &"n".repeat(300),
    ];
    let all: Vec<ConversationRef> = hostile
        .iter()
        .map(|name| ConversationRef::new(Some("t/..".into()), (*name).into(), Millis(4)))
        .collect();
    let early = start.refs().put(&all[0]);
    assert!(matches!(early, Err(StoreError::NotScanned)));
    start.refs().scan(&mut |_| panic!("nothing there")).unwrap();
    for conversation in &all {
        start.refs().put(conversation).unwrap();
        start.refs().put(conversation).unwrap();
        let key = conversation.key();
        assert_eq!(start.refs().get(&key).unwrap().unwrap(), *conversation);
    }
    assert_eq!(start.disk().usage().bytes, du(&bed.dir()));
    assert_eq!(
        fs::read_dir(bed.folder.path()).unwrap().count(),
        1,
        "nothing beside"
    );
    assert!(start.refs().remove(&all[0].key()).unwrap());
    assert!(!start.refs().remove(&all[0].key()).unwrap());
    assert_eq!(start.refs().get(&all[0].key()).unwrap(), None);
    drop(start);

    let path = |c: &ConversationRef| bed.dir().join(layout::conversation(&c.key()).as_path());
    fs::write(path(&all[1]), "{").unwrap();
    fs::copy(path(&all[3]), path(&all[2])).unwrap();
    let again = bed.start();
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    let each = &mut |found: Result<ConversationRef, Quarantined>| match found {
        Ok(conversation) => good.push(conversation.conversation),
        Err(quarantined) => bad.push(quarantined.reason),
    };
    again.refs().scan(each).unwrap();
    good.sort();
    let mut expected: Vec<&str> = hostile[3..].to_vec();
    expected.sort_unstable();
    assert_eq!(good, expected);
    bad.sort();
    assert_eq!(bad, [Reason::Length, Reason::Mismatch]);
    assert!(again.refs().scan(&mut |_| {}).is_err(), "only once");
    fs::write(path(&all[4]), "{}").unwrap();
    let error = again.refs().get(&all[4].key()).unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }));
    assert_eq!(again.refs().get(&all[4].key()).unwrap(), None);
}
