//! All tokens of turns, and which conversation a request goes on with.

use super::fake::*;
use crate::proto::channel::msg::{RequestClose, TurnFinished};
use crate::service::{
    DeleteRequest, ErrorKind, InfoRequest, SaveRequest, Selector, ServiceError, TokenStream,
};
use crate::types::TokenId;

fn turn(conversation: &str, number: u32) -> Selector {
    Selector {
        turn_number: Some(number),
        ..Selector::conversation(conversation)
    }
}

async fn stream(world: &World, select: Selector) -> Result<TokenStream, ServiceError> {
    world.service.token_stream(&select).await
}

async fn kind(world: &World, select: Selector) -> ErrorKind {
    stream(world, select).await.unwrap_err().kind()
}

/// The turn is known with exactly these tokens.
async fn is_known(world: &World, select: Selector, tokens: &[TokenId], boundary: u32) {
    let found = stream(world, select.clone()).await;
    let found = found.unwrap_or_else(|error| panic!("{select:?}: {error}"));
    assert!(found.tokens == tokens, "{select:?} has other tokens");
    assert_eq!(found.boundary, boundary, "{select:?}");
    assert_eq!(found.snapshot.is_some(), boundary > 0, "{select:?}");
}

impl Fake {
    /// A whole turn of a request that nobody named, with a state at `boundary`.
    async fn unnamed(&mut self, rid: &str, tokens: &[TokenId], prompt: usize, boundary: usize) {
        let req = self.open_as("", rid, tokens, |_| ());
        if boundary > 0 {
            let saved = self.save_at(req, tokens, boundary).await;
            assert!(matches!(saved, SaveEnd::Saved(..)), "{saved:?}");
        }
        self.say(TurnFinished {
            req,
            attempt: 0,
            prompt_tokens: prompt as u32,
            total_tokens: tokens.len() as u32,
            cached_tokens: 0,
            prefilled_tokens: prompt as u32,
            finish: crate::proto::channel::layout::Finish::Stop,
        });
        self.say(RequestClose { req });
        self.heard_all().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_and_answer_are_known_to_the_last_token_over_restarts() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    // Too short for a state, then with one, then without a new one.
    let req = fake.open_as("c", "r1", &tokens[..90], |_| ());
    fake.finish(req, 90);
    fake.say(RequestClose { req });
    fake.turn("c", &tokens[..1100], 1024).await;
    let req = fake.open_as("c", "r3", &tokens[..1150], |_| ());
    fake.finish(req, 1150);
    fake.say(RequestClose { req });
    fake.heard_all().await;
    let check = async |world: &World| {
        is_known(world, turn("c", 1), &tokens[..90], 0).await;
        is_known(world, turn("c", 2), &tokens[..1100], 1024).await;
        is_known(world, turn("c", 3), &tokens[..1150], 1024).await;
        is_known(world, Selector::conversation("c"), &tokens[..1150], 1024).await;
        is_known(world, Selector::rid("r1"), &tokens[..90], 0).await;
    };
    check(&world).await;
    let found = stream(&world, Selector::rid("r3")).await.unwrap();
    assert_eq!((found.turn, &*found.rid), (3, "r3"));
    world.all_durable().await;
    let world = world.killed().await;
    check(&world).await;
    // Read, nothing said, written again.
    let again = SaveRequest {
        select: Selector {
            branch_name: Some("b".into()),
            ..turn("c", 2)
        },
        ..SaveRequest::new(Selector::default())
    };
    world.service.save(again).await.unwrap();
    world.all_durable().await;
    let world = world.killed().await;
    check(&world).await;
    let branch = Selector {
        branch_name: Some("b".into()),
        ..Selector::conversation("c")
    };
    // The latest turn with that snapshot.
    is_known(&world, branch, &tokens[..1150], 1024).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_without_any_state_is_written_down_and_removed() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 200);
    fake.unnamed("r1", &tokens[..100], 60, 0).await;
    fake.unnamed("r2", &tokens, 150, 0).await;
    world.all_durable().await;
    assert_eq!(world.files("refs").len(), 1);
    let world = world.killed().await;
    is_known(&world, turn("r1", 1), &tokens[..100], 0).await;
    is_known(&world, turn("r2", 2), &tokens, 0).await;
    // It goes on over the restart, too.
    let mut fake = Fake::attach(&world).await;
    let mut more = tokens.clone();
    more.extend(prompt(2, 100));
    fake.unnamed("r3", &more, 250, 0).await;
    is_known(&world, turn("r1", 3), &more, 0).await;
    let whole = DeleteRequest {
        select: Selector::conversation("r1"),
        whole: true,
    };
    world.service.delete(whole).await.unwrap();
    assert_eq!(world.files("refs"), Vec::<std::path::PathBuf>::new());
    assert_eq!(kind(&world, turn("r1", 1)).await, ErrorKind::NotFound);
    let world = world.killed().await;
    assert_eq!(kind(&world, Selector::rid("r2")).await, ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_before_the_state_is_durable_loses_no_token() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.turn("c", &tokens[..1100], 1024).await;
    fake.turn("c", &tokens[..2100], 2048).await;
    fake.heard_all().await;
    is_known(&world, turn("c", 2), &tokens[..2100], 2048).await;
    eventually("the names are written", || {
        !world.service.core.lock().conversations.any_dirty() && !world.files("refs").is_empty()
    })
    .await;
    let world = world.killed().await;
    assert_eq!(world.service.status().snapshots, 0);
    is_known(&world, turn("c", 1), &tokens[..1100], 0).await;
    is_known(&world, turn("c", 2), &tokens[..2100], 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_stay_when_their_snapshot_goes() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let first = fake.turn("c", &tokens[..1100], 1024).await;
    let second = fake.turn("c", &tokens[..2100], 2048).await;
    fake.heard_all().await;
    let delete = async |id| {
        let select = Selector::snapshot(id);
        let request = DeleteRequest {
            select,
            whole: false,
        };
        world.service.delete(request).await.unwrap();
    };
    delete(first).await;
    is_known(&world, turn("c", 1), &tokens[..1100], 0).await;
    delete(second).await;
    let both = async |world: &World| {
        is_known(world, turn("c", 1), &tokens[..1100], 0).await;
        is_known(world, turn("c", 2), &tokens[..2100], 0).await;
    };
    both(&world).await;
    // Over a restart, too.
    world.all_durable().await;
    let world = world.killed().await;
    both(&world).await;
    let mut fake = Fake::attach(&world).await;
    // What is said next begins with them.
    fake.turn("c", &tokens, 2816).await;
    fake.heard_all().await;
    both(&world).await;
    is_known(&world, turn("c", 3), &tokens, 2816).await;
    let latest = DeleteRequest {
        select: turn("c", 2),
        whole: false,
    };
    world.service.delete(latest).await.unwrap();
    is_known(&world, turn("c", 1), &tokens[..1100], 0).await;
    is_known(&world, turn("c", 3), &tokens, 2816).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_is_deleted_leaves_the_tokens_that_others_know_by_it() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let delete = async |select| {
        let request = DeleteRequest {
            select,
            whole: false,
        };
        world.service.delete(request).await.unwrap();
    };
    let first = fake.turn("c", &tokens[..1100], 1024).await;
    let second = fake.turn("c", &tokens[..2100], 2048).await;
    fake.turn("c", &tokens, 2816).await;
    fake.heard_all().await;
    // The third alone has what was said in the others.
    delete(Selector::snapshot(first)).await;
    delete(Selector::snapshot(second)).await;
    delete(turn("c", 3)).await;
    is_known(&world, turn("c", 2), &tokens[..2100], 0).await;
    is_known(&world, turn("c", 1), &tokens[..1100], 0).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_stay_when_the_rest_of_them_is_on_disk_alone() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let id = fake.turn("c", &tokens[..1100], 1024).await;
    fake.heard_all().await;
    world.all_durable().await;
    world.service.core.lock().conversations.shelve(0, true);
    let request = DeleteRequest {
        select: Selector::snapshot(id),
        whole: false,
    };
    world.service.delete(request).await.unwrap();
    is_known(&world, turn("c", 1), &tokens[..1100], 0).await;
    world.all_durable().await;
    let world = world.killed().await;
    is_known(&world, turn("c", 1), &tokens[..1100], 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_stay_when_a_part_of_their_snapshot_is_found_missing() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.turn("c", &tokens[..1100], 1024).await;
    fake.turn("c", &tokens[..2100], 2048).await;
    fake.heard_all().await;
    world.all_durable().await;
    // From disk alone, and there the first KV is gone: nothing of it can be restored.
    let world = world.killed().await;
    let first = {
        let core = world.service.core.lock();
        let id = core.index.iter().next().unwrap();
        core.index.hit(&id).unwrap().kv[0].object
    };
    world.service.lost_on_disk(&first);
    assert_eq!(world.service.status().snapshots, 0);
    is_known(&world, turn("c", 1), &tokens[..1100], 0).await;
    is_known(&world, turn("c", 2), &tokens[..2100], 0).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_falls_back_to_an_ancestor_keeps_what_is_still_known() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.turn("c", &tokens[..1100], 1024).await;
    // The second turn ends with the first's state, and its own comes later.
    let req = fake.open("c", &tokens[..2100]);
    let save = fake.offer(req, 2048);
    let parts = fake.answer(save).await.unwrap();
    fake.finish(req, 2100);
    fake.heard_all().await;
    is_known(&world, turn("c", 2), &tokens[..2100], 1024).await;
    fake.drain_all(save, &tokens[..2048], &parts).await;
    let second = fake.saved(save).await.unwrap();
    is_known(&world, turn("c", 2), &tokens[..2100], 2048).await;
    let request = DeleteRequest {
        select: Selector::snapshot(second),
        whole: false,
    };
    world.service.delete(request).await.unwrap();
    is_known(&world, turn("c", 2), &tokens[..2100], 1024).await;
    is_known(&world, turn("c", 1), &tokens[..1100], 1024).await;
    world.all_durable().await;
    let world = world.killed().await;
    is_known(&world, turn("c", 2), &tokens[..2100], 1024).await;
    is_known(&world, turn("c", 1), &tokens[..1100], 1024).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_a_name_go_on_with_what_their_prompt_begins_with() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.unnamed("r1", &tokens[..1100], 1050, 1024).await;
    fake.unnamed("r2", &tokens[..2100], 1200, 2048).await;
    for name in ["r1", "r2"] {
        let found = world.service.info(InfoRequest {
            select: Selector::conversation(name),
            with_tokens: false,
        });
        let row = found.unwrap();
        assert_eq!(row.conversation_id.as_deref(), Some("r1"));
        assert_eq!((row.turn_number, row.boundary), (Some(2), 2048));
    }
    // A divergence after the first turn.
    let mut other = tokens[..1100].to_vec();
    other.extend(prompt(2, 1000));
    fake.unnamed("r3", &other, 1200, 2048).await;
    let (rows, total) = world
        .service
        .conversations(&crate::service::ConversationsRequest::default());
    assert_eq!(total, 2);
    let names: Vec<_> = rows
        .iter()
        .map(|row| (&*row.conversation_id, row.turns))
        .collect();
    assert_eq!(names, [("r3", 1), ("r1", 2)]);
    world.all_durable().await;
    let world = world.killed().await;
    // As before the restart: the next turn, and all names of it.
    let mut fake = Fake::attach(&world).await;
    fake.unnamed("r4", &tokens, 2200, 2816).await;
    is_known(&world, Selector::rid("r4"), &tokens, 2816).await;
    is_known(&world, turn("r2", 3), &tokens, 2816).await;
    is_known(&world, turn("r1", 1), &tokens[..1100], 1024).await;
    // Deleting by any of its names deletes all of it, what its later requests made included.
    let whole = DeleteRequest {
        select: Selector::conversation("r4"),
        whole: true,
    };
    world.service.delete(whole).await.unwrap();
    assert_eq!(world.service.status().snapshots, 1);
    is_known(&world, Selector::conversation("r3"), &other, 2048).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_that_ends_after_its_request_went_on_finds_the_conversation() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.unnamed("r1", &tokens[..1100], 1050, 1024).await;
    let req = fake.open_as("", "r2", &tokens[..2100], |_| ());
    let save = fake.offer(req, 2048);
    let parts = fake.answer(save).await.unwrap();
    fake.finish(req, 2100);
    fake.heard_all().await;
    is_known(&world, turn("r1", 2), &tokens[..2100], 1024).await;
    fake.drain_all(save, &tokens[..2048], &parts).await;
    fake.saved(save).await.unwrap();
    fake.say(RequestClose { req });
    is_known(&world, turn("r1", 2), &tokens[..2100], 2048).await;
    let (_, total) = world
        .service
        .conversations(&crate::service::ConversationsRequest::default());
    assert_eq!(total, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_known_is_told_apart() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 300);
    let gone = |select| kind(&world, select);
    assert_eq!(gone(Selector::conversation("c")).await, ErrorKind::NotFound);
    assert_eq!(gone(Selector::default()).await, ErrorKind::Invalid);
    let req = fake.open_as("c", "r1", &tokens, |_| ());
    fake.heard_all().await;
    assert_eq!(
        gone(Selector::conversation("c")).await,
        ErrorKind::TokensUnknown
    );
    assert_eq!(gone(turn("c", 1)).await, ErrorKind::NotFound);
    // Some of its tokens never came.
    fake.finish(req, 310);
    fake.heard_all().await;
    assert_eq!(gone(turn("c", 1)).await, ErrorKind::TokensUnknown);
    let branch = Selector {
        branch_name: Some("b".into()),
        ..Selector::conversation("c")
    };
    assert_eq!(gone(branch).await, ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_stand_beside_the_tokens_if_every_turn_has_some() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 300);
    let say = |text: &str| vec![serde_json::json!({ "role": "user", "content": text })];
    let messages = async |world: &World, number| {
        let found = stream(world, turn("c", number)).await.unwrap();
        found.messages.map(|all| all.len())
    };
    let note = |world: &World, rid: &str, text: &str| {
        world.service.note_messages(None, "c", rid, say(text));
    };
    note(&world, "r1", "before the end");
    for (rid, end) in [("r1", 100), ("r2", 200), ("r3", 300)] {
        let req = fake.open_as("c", rid, &tokens[..end], |_| ());
        fake.finish(req, end);
        fake.say(RequestClose { req });
    }
    fake.heard_all().await;
    note(&world, "r3", "after it");
    assert_eq!(messages(&world, 1).await, Some(1));
    assert_eq!(
        (messages(&world, 2).await, messages(&world, 3).await),
        (None, None)
    );
    note(&world, "r2", "at last");
    assert_eq!(messages(&world, 3).await, Some(3));
    world.all_durable().await;
    let world = world.killed().await;
    assert_eq!(messages(&world, 3).await, Some(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_said_comes_back_from_disk_when_memory_has_let_go_of_it() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2000);
    fake.turn("c", &tokens[..1100], 1024).await;
    fake.heard_all().await;
    world.all_durable().await;
    let shelve = || world.service.core.lock().conversations.shelve(0, true);
    shelve();
    is_known(&world, turn("c", 1), &tokens[..1100], 1024).await;
    shelve();
    // What is said next does not lose what only the record has.
    let req = fake.open_as("c", "r2", &tokens[..1200], |_| ());
    fake.finish(req, 1200);
    fake.say(RequestClose { req });
    fake.heard_all().await;
    world.all_durable().await;
    let world = world.killed().await;
    is_known(&world, turn("c", 1), &tokens[..1100], 1024).await;
    is_known(&world, turn("c", 2), &tokens[..1200], 1024).await;
}
