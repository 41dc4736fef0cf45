use super::super::api::Selector;
use super::super::error::{ErrorKind, ServiceError};
use super::*;

fn arc(text: &str) -> Arc<str> {
    Arc::from(text)
}

struct World {
    it: Conversations,
    session: SessionId,
    now: u64,
    next: u64,
}

impl World {
    fn new() -> Self {
        Self {
            it: Conversations::default(),
            session: SessionId::random(),
            now: 1000,
            next: 1,
        }
    }

    fn tick(&mut self) -> Millis {
        self.now += 1;
        Millis(self.now)
    }

    /// A whole turn with a snapshot at `boundary`, or without any.
    fn turn(&mut self, name: &str, rid: &str, boundary: Option<u32>) -> Option<SnapshotId> {
        let key = ConversationKey::new(None, name);
        let owner = (self.session, self.next);
        self.next += 1;
        let now = self.tick();
        self.it.open(&key, owner, &arc(rid), now);
        let id = boundary.map(|_| SnapshotId::new());
        if let Some((id, boundary)) = id.zip(boundary) {
            self.it.saw(&key, owner, id, boundary, now);
        }
        let now = self.tick();
        self.it
            .finish(&key, owner, boundary.unwrap_or(0) + 7, "stop", now)
            .unwrap();
        self.it.close(&key, owner);
        id
    }

    fn find(&self, select: Selector) -> Result<Found, ErrorKind> {
        self.it
            .find(&select, Need::Existing)
            .map_err(|error: ServiceError| error.kind())
    }
}

fn turn(name: &str, number: u32) -> Selector {
    Selector {
        turn_number: Some(number),
        ..Selector::conversation(name)
    }
}

#[test]
fn turns_count_from_one_and_the_latest_is_by_time() {
    let mut world = World::new();
    let first = world.turn("c", "r1", Some(256));
    let second = world.turn("c", "r2", Some(512));
    assert_eq!(world.find(turn("c", 1)).unwrap().snapshot, first);
    assert_eq!(world.find(turn("c", 2)).unwrap().snapshot, second);
    assert_eq!(world.find(turn("c", 0)), Err(ErrorKind::NotFound));
    assert_eq!(world.find(turn("c", 3)), Err(ErrorKind::NotFound));
    let latest = world.find(Selector::conversation("c")).unwrap();
    assert_eq!((latest.turn, latest.total_tokens), (Some(2), Some(519)));
    // A conversation is found by the rid of any turn, which then names that turn.
    assert_eq!(world.find(Selector::rid("r1")).unwrap().turn, Some(1));
    assert_eq!(
        world.find(Selector::conversation("r1")).unwrap().turn,
        Some(2)
    );
    assert_eq!(world.find(Selector::rid("r9")), Err(ErrorKind::NotFound));
    assert_eq!(world.find(Selector::default()), Err(ErrorKind::Invalid));
}

#[test]
fn a_request_without_session_is_a_conversation_of_its_own() {
    let mut world = World::new();
    let id = world.turn("r1", "r1", Some(256));
    assert_eq!(world.find(Selector::rid("r1")).unwrap().snapshot, id);
    assert_eq!(
        world.find(Selector::conversation("r1")).unwrap().snapshot,
        id
    );
}

#[test]
fn a_turn_without_state_is_known_but_the_latest_with_state_is_taken() {
    let mut world = World::new();
    let first = world.turn("c", "r1", Some(256));
    world.turn("c", "r2", None);
    assert_eq!(world.find(turn("c", 2)).unwrap().snapshot, None);
    assert_eq!(
        world.find(Selector::conversation("c")).unwrap().snapshot,
        first
    );
    assert_eq!(world.find(Selector::rid("r2")).unwrap().snapshot, None);
}

#[test]
fn a_snapshot_that_comes_after_the_end_becomes_the_turns() {
    let mut world = World::new();
    let key = ConversationKey::new(None, "c");
    let owner = (world.session, 1);
    let (early, late) = (SnapshotId::new(), SnapshotId::new());
    world.it.open(&key, owner, &arc("r"), Millis(1));
    world.it.saw(&key, owner, early, 256, Millis(2));
    world.it.count_saves(&key, owner, 1);
    world.it.finish(&key, owner, 600, "stop", Millis(3));
    assert_eq!(world.find(Selector::rid("r")).unwrap().saves, 1);
    assert_eq!(world.it.saw(&key, owner, late, 512, Millis(4)), Some(1));
    world.it.count_saves(&key, owner, -1);
    let found = world.find(Selector::rid("r")).unwrap();
    assert_eq!((found.snapshot, found.saves), (Some(late), 0));
    assert!(!world.it.is_named(early) && world.it.is_named(late));
    // Not a shallower one.
    assert_eq!(world.it.saw(&key, owner, early, 256, Millis(5)), None);
    assert_eq!(world.find(Selector::rid("r")).unwrap().snapshot, Some(late));
}

#[test]
fn an_evicted_snapshot_leaves_its_ancestor_and_no_branch() {
    let mut world = World::new();
    let first = world.turn("c", "r1", Some(256)).unwrap();
    let second = world.turn("c", "r2", Some(512)).unwrap();
    let key = ConversationKey::new(None, "c");
    world.it.set_branch(&key, "b", second, Millis(5000));
    world.it.lost(second, Some((first, 256)));
    let found = world.find(turn("c", 2)).unwrap();
    assert_eq!(found.snapshot, Some(first));
    let branch = Selector {
        branch_name: Some("b".into()),
        ..Selector::conversation("c")
    };
    assert_eq!(world.find(branch), Err(ErrorKind::NotFound));
    world.it.lost(first, None);
    assert_eq!(world.find(turn("c", 2)).unwrap().snapshot, None);
    assert!(!world.it.is_named(first));
}

#[test]
fn deleting_gives_back_only_what_nothing_else_names() {
    let mut world = World::new();
    let first = world.turn("c", "r1", Some(256)).unwrap();
    let second = world.turn("c", "r2", Some(512)).unwrap();
    let key = ConversationKey::new(None, "c");
    let other = ConversationKey::new(None, "d");
    world.it.set_branch(&other, "kept", first, Millis(5000));
    assert_eq!(world.it.delete_turn(&key, 1), None);
    assert_eq!(world.it.delete_turn(&key, 1), None);
    assert_eq!(world.it.delete_all(&key), (1, vec![second]));
    assert_eq!(
        world.find(Selector::conversation("c")),
        Err(ErrorKind::NotFound)
    );
    assert_eq!(world.find(Selector::rid("r2")), Err(ErrorKind::NotFound));
    assert_eq!(world.it.delete_branch(&other, "kept"), Some(first));
    assert!(world.it.is_empty());
}

#[test]
fn tenants_do_not_see_each_other() {
    let mut world = World::new();
    world.turn("c", "r1", Some(256));
    let select = Selector {
        tenant: Some("t".into()),
        ..Selector::conversation("c")
    };
    assert_eq!(world.find(select), Err(ErrorKind::NotFound));
    let select = Selector {
        tenant: Some("t".into()),
        ..Selector::rid("r1")
    };
    assert_eq!(world.find(select), Err(ErrorKind::NotFound));
}

#[test]
fn a_source_is_found_by_its_request_even_under_another_conversations_name() {
    let mut world = World::new();
    let id = world.turn("r1", "r1", Some(256));
    let select = Selector {
        conversation_id: Some("chat".into()),
        turn_number: Some(5),
        branch_name: Some("b".into()),
        ..Selector::rid("r1")
    };
    let found = world.it.find(&select, Need::Source).unwrap();
    assert_eq!((found.snapshot, found.turn), (id, Some(1)));
    assert!(world.it.find(&select, Need::Existing).is_err());
}

#[test]
fn trim_forgets_the_oldest_without_state() {
    let mut world = World::new();
    world.turn("old", "r1", None);
    world.turn("new", "r2", None);
    world.turn("kept", "r3", Some(256));
    world.it.trim(1);
    assert_eq!(
        world.find(Selector::conversation("old")),
        Err(ErrorKind::NotFound)
    );
    assert!(world.find(Selector::conversation("new")).is_ok());
    assert!(world.find(Selector::conversation("kept")).is_ok());
}

#[test]
fn the_latest_is_the_last_although_the_clock_went_back() {
    let mut world = World::new();
    world.turn("c", "r1", Some(64)).unwrap();
    world.now -= 500;
    let second = world.turn("c", "r2", Some(128));
    let named = |world: &World| {
        let select = Selector {
            conversation_id: Some("c".to_owned()),
            ..Selector::default()
        };
        world.find(select).unwrap().snapshot
    };
    assert_eq!(named(&world), second);
    // A request under way, too.
    let key = ConversationKey::new(None, "c");
    let owner = (world.session, 99);
    let now = world.tick();
    world.it.open(&key, owner, &arc("r3"), now);
    let third = SnapshotId::new();
    world.it.saw(&key, owner, third, 192, now);
    assert_eq!(named(&world), Some(third));
}
