use super::super::api::Selector;
use super::super::error::{ErrorKind, ServiceError};
use super::*;
use crate::store::{ConversationRef, TurnRef};
use crate::types::{NamespaceId, SessionId, TokenId};

fn arc(text: &str) -> Arc<str> {
    Arc::from(text)
}

fn ending(total_tokens: u32) -> Ending {
    Ending {
        total_tokens,
        finish: "stop",
        ..Ending::default()
    }
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
        self.it.open(&key, owner, (&arc(rid), name == rid), now);
        let id = boundary.map(|_| SnapshotId::new());
        if let Some((id, boundary)) = id.zip(boundary) {
            self.it.saw(&key, owner, id, boundary, now);
        }
        let now = self.tick();
        let ending = ending(boundary.unwrap_or(0) + 7);
        self.it.finish(&key, owner, ending, now).unwrap();
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
    world.it.open(&key, owner, (&arc("r"), false), Millis(1));
    world.it.saw(&key, owner, early, 256, Millis(2));
    world.it.count_saves(&key, owner, 1);
    world.it.finish(&key, owner, ending(600), Millis(3));
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
    world.it.open(&key, owner, (&arc("r3"), false), now);
    let third = SnapshotId::new();
    world.it.saw(&key, owner, third, 192, now);
    assert_eq!(named(&world), Some(third));
}

const NAMESPACE: NamespaceId = NamespaceId([7; 32]);

/// Whatever the tokens are, they are different for another seed.
fn stream(seed: u32, count: u32) -> Vec<TokenId> {
    (0..count).map(|n| seed * 100_000 + n).collect()
}

impl World {
    /// A whole turn of a request that nobody named, with its tokens. Returns where it went.
    fn said(&mut self, rid: &str, tokens: &[TokenId], prompt: u32) -> (ConversationKey, u32) {
        let key = ConversationKey::new(None, rid);
        let owner = (self.session, self.next);
        self.next += 1;
        let now = self.tick();
        self.it.open(&key, owner, (&arc(rid), true), now);
        let chain = Chain::of(&NAMESPACE, tokens);
        let known = self.it.ancestor(&chain, prompt);
        let known = known.filter(|it| digest_of(&tokens[..it.tokens as usize]) == it.print.digest);
        if let Some(known) = known {
            self.it.go_on(owner, &known);
        }
        let ending = Ending {
            tail: Some(Tail::new(0, Arc::from(tokens))),
            print: Some(print_of(&NAMESPACE, tokens)),
            ..ending(tokens.len() as u32)
        };
        let now = self.tick();
        let key = self.it.home(owner, &key);
        let number = self.it.finish(&key, owner, ending, now).unwrap();
        self.it.close(&key, owner);
        (key, number)
    }
}

#[test]
fn a_prompt_that_goes_on_with_a_turn_is_the_next_one() {
    let mut world = World::new();
    let tokens = stream(1, 900);
    let (key, number) = world.said("r1", &tokens[..300], 200);
    assert_eq!((&*key.name, number), ("r1", 1));
    // Exactly what was said, and nothing new, is the shortest prompt that goes on with it.
    assert_eq!(world.said("r2", &tokens[..400], 300), (key.clone(), 2));
    assert_eq!(world.said("r3", &tokens, 401), (key.clone(), 3));
    for name in ["r1", "r2", "r3"] {
        let found = world.find(Selector::conversation(name)).unwrap();
        assert_eq!((&found.key, found.turn), (&key, Some(3)), "{name}");
        let turn = name[1..].parse().ok();
        assert_eq!(world.find(Selector::rid(name)).unwrap().turn, turn);
    }
    assert_eq!(world.it.len(), 1);
    assert!(world.it.open.is_empty());
}

#[test]
fn a_divergence_is_its_own_conversation_and_knows_where_it_parted() {
    let mut world = World::new();
    let tokens = stream(1, 900);
    world.said("r1", &tokens[..300], 200);
    world.said("r2", &tokens[..400], 350);
    // An answer said otherwise, and a prompt that is not even the whole first turn.
    let mut other = tokens[..300].to_vec();
    other.extend(stream(2, 50));
    let (key, number) = world.said("r3", &other, 320);
    assert_eq!((&*key.name, number), ("r3", 1));
    let origin = world.it.get(&key).unwrap().origin.clone().unwrap();
    assert_eq!((&*origin.conversation, origin.turn), ("r1", 1));
    let (key, _) = world.said("r4", &tokens[..250], 240);
    assert_eq!(world.it.get(&key).unwrap().origin, None);
    // Of the two that can be gone on with, each has its own.
    other.extend(stream(3, 50));
    assert_eq!(world.said("r5", &other, 360).0.name, arc("r3"));
    assert_eq!(world.said("r6", &tokens, 500).0.name, arc("r1"));
}

#[test]
fn other_namespaces_and_conversations_with_a_name_are_not_gone_on_with() {
    let mut world = World::new();
    let tokens = stream(1, 900);
    world.said("r1", &tokens[..300], 200);
    let chain = Chain::of(&NamespaceId([8; 32]), &tokens);
    assert_eq!(world.it.ancestor(&chain, 900), None);
    let chain = Chain::of(&NAMESPACE, &tokens);
    assert!(world.it.ancestor(&chain, 300).is_some());
    assert_eq!(world.it.ancestor(&chain, 299), None);
    let key = ConversationKey::new(None, "r1");
    world.it.delete_turn(&key, 1);
    assert_eq!(world.it.ancestor(&chain, 900), None);
    assert_eq!((world.it.len(), world.it.weight), (0, 0));
}

#[test]
fn the_memory_of_what_was_said_is_counted_and_bounded() {
    let mut world = World::new();
    let tokens = stream(1, 900);
    world.said("r1", &tokens[..300], 200);
    world.said("r2", &tokens[..400], 350);
    // The second turn has the tokens of both.
    assert_eq!(world.it.weight, 1600);
    let key = ConversationKey::new(None, "r1");
    assert_eq!(
        world.it.get(&key).unwrap().turn(1).unwrap().beyond(),
        Some(&tokens[..300])
    );
    world.it.note(&key, &arc("r1"), Arc::from("[]"));
    assert_eq!(world.it.weight, 1602);
    // What is not on disk yet is not left to it.
    world.it.shelve(0, true);
    assert_eq!(world.it.weight, 1602);
    world.it.take_dirty();
    world.it.shelve(0, true);
    assert_eq!(world.it.weight, 0);
    assert!(world.it.is_shelved(&key));
    assert_eq!(world.it.get(&key).unwrap().turn(1).unwrap().beyond(), None);
    let mut stored = ConversationRef::new(None, "r1".into(), Millis(1));
    let turn = |turn: u32, total_tokens: u32| TurnRef {
        turn,
        snapshot: None,
        boundary: 0,
        total_tokens,
        prompt_tokens: None,
        rid: format!("r{turn}"),
        finished: Millis(1),
        finish: "stop".into(),
        tail: Some(Arc::from(&tokens[..total_tokens as usize])),
        print: None,
        said: Some(Arc::from("[1]")),
        namespace: None,
    };
    // One that is another turn by now is not put back.
    stored.turns = vec![turn(1, 300), turn(2, 401)];
    world.it.unshelve(&key, Some(stored));
    assert_eq!(world.it.weight, 1203);
    let conversation = world.it.get(&key).unwrap();
    assert_eq!(conversation.turn(1).unwrap().beyond(), Some(&tokens[..300]));
    assert_eq!(conversation.turn(2).unwrap().beyond(), None);
    assert!(!world.it.is_shelved(&key));
    // Without a disk it is forgotten.
    world.it.shelve(0, false);
    assert_eq!((world.it.weight, world.it.is_shelved(&key)), (0, false));
}

#[test]
fn what_was_said_without_a_state_takes_only_so_much_of_a_full_disk() {
    let mut world = World::new();
    let rids = ["r1", "r2", "r3"];
    for (seed, rid) in (1..).zip(rids) {
        world.said(rid, &stream(seed, 100), 50);
    }
    world.turn("kept", "k1", Some(256));
    world.it.take_dirty();
    world.it.trim_bytes(1700);
    // The two that changed last, and what has a state.
    let there = |name: &str| world.it.get(&ConversationKey::new(None, name)).is_some();
    assert_eq!(rids.map(there), [false, true, true]);
    assert!(there("kept"));
    assert_eq!(world.it.dirty(), 1);
}

#[test]
fn messages_may_come_before_and_after_their_turn() {
    let mut world = World::new();
    let key = ConversationKey::new(None, "c");
    world.it.note(&key, &arc("r1"), arc("[1]"));
    world.it.note(&key, &arc("r9"), arc("[9]"));
    world.turn("c", "r1", None);
    world.turn("c", "r2", None);
    world.it.note(&key, &arc("r2"), arc("[2]"));
    let said = |number| {
        world
            .it
            .get(&key)
            .unwrap()
            .turn(number)
            .unwrap()
            .said
            .clone()
    };
    assert_eq!((said(1), said(2)), (Some(arc("[1]")), Some(arc("[2]"))));
}
