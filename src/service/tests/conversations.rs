use std::time::Duration;

use super::fake::*;
use crate::proto::channel::layout::{Piece, Tier};
use crate::proto::channel::msg::RequestClose;
use crate::service::{
    DeleteRequest, ErrorKind, Event, InfoRequest, ListRequest, RestoreRequest, SaveRequest,
    Selector, ServiceError,
};
use crate::types::TierKind;

fn kind<T: std::fmt::Debug>(result: Result<T, ServiceError>) -> ErrorKind {
    result.unwrap_err().kind()
}

fn branch(conversation: &str, name: &str) -> Selector {
    Selector {
        branch_name: Some(name.into()),
        ..Selector::conversation(conversation)
    }
}

fn turn(conversation: &str, number: u32) -> Selector {
    Selector {
        turn_number: Some(number),
        ..Selector::conversation(conversation)
    }
}

fn list(world: &World, conversation: &str) -> Vec<(Option<u32>, Option<String>, u32)> {
    let conversation_id = Some(conversation.to_owned());
    let reply = world.service.list(ListRequest {
        conversation_id,
        ..ListRequest::default()
    });
    let rows = reply.unwrap().snapshots.into_iter();
    rows.map(|row| (row.turn_number, row.branch_name, row.boundary))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_and_branches_are_listed_and_named_ones_are_kept() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.turn("c", &tokens[..1100], 1024).await;
    fake.turn("c", &tokens[..2100], 2048).await;
    fake.heard_all().await;
    let mut request = SaveRequest::new(turn("c", 1));
    request.select.branch_name = Some("before".into());
    let reply = world.service.save(request).await.unwrap();
    assert_eq!((reply.row.turn_number, reply.row.boundary), (Some(1), 1024));
    assert_eq!(reply.row.branch_name.as_deref(), Some("before"));
    assert!(reply.row.pinned);
    let rows = [
        (Some(1), None, 1024),
        (Some(2), None, 2048),
        (None, Some("before".into()), 1024),
    ];
    assert_eq!(list(&world, "c"), rows);
    let found = world.service.info(InfoRequest {
        select: branch("c", "before"),
        with_tokens: false,
    });
    assert_eq!(found.unwrap().boundary, 1024);
    world.all_durable().await;
    let world = world.killed().await;
    assert_eq!(list(&world, "c"), rows);
    let (conversations, total) = world
        .service
        .conversations(&crate::service::ConversationsRequest::default());
    assert_eq!(
        (
            total,
            conversations[0].turns,
            &*conversations[0].branches[0]
        ),
        (1, 2, "before")
    );
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_say_what_is_missing() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    let req = fake.open_as("c", "r-1", &tokens, |_| ());
    fake.finish(req, 1500);
    fake.heard_all().await;
    let save = |select| world.service.save(SaveRequest::new(select));
    assert_eq!(
        kind(save(Selector::conversation("nobody")).await),
        ErrorKind::NotFound
    );
    assert_eq!(
        kind(save(Selector::rid("nobody")).await),
        ErrorKind::NotFound
    );
    assert_eq!(
        kind(save(Selector::conversation("c")).await),
        ErrorKind::NoState
    );
    assert_eq!(kind(save(Selector::rid("r-1")).await), ErrorKind::NoState);
    assert_eq!(kind(save(Selector::default()).await), ErrorKind::Invalid);
    assert_eq!(
        kind(save(Selector::conversation("x".repeat(5000))).await),
        ErrorKind::Invalid
    );
    assert_eq!(kind(save(turn("c", 0)).await), ErrorKind::Invalid);
    let restore = |select| {
        world.service.restore(RestoreRequest {
            select,
            pin_for: None,
        })
    };
    assert_eq!(
        kind(restore(Selector::conversation("nobody")).await),
        ErrorKind::NotFound
    );
    assert_eq!(
        kind(restore(Selector::conversation("c")).await),
        ErrorKind::NoState
    );
    assert_eq!(
        kind(restore(branch("c", "none")).await),
        ErrorKind::NotFound
    );
    let delete = |select, whole| world.service.delete(DeleteRequest { select, whole });
    assert_eq!(
        kind(delete(Selector::conversation("c"), false).await),
        ErrorKind::Invalid
    );
    assert_eq!(kind(delete(turn("c", 7), false).await), ErrorKind::NotFound);
    assert_eq!(
        kind(delete(Selector::conversation("d"), true).await),
        ErrorKind::NotFound
    );
    let all = ListRequest {
        conversation_id: Some("d".into()),
        ..ListRequest::default()
    };
    assert_eq!(kind(world.service.list(all)), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_waits_for_the_state_that_is_under_way() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    let req = fake.open_as("c", "r-1", &tokens, |_| ());
    let save = fake.offer(req, 1280);
    let parts = fake.answer(save).await.unwrap();
    fake.finish(req, 1500);
    fake.heard_all().await;
    let service = std::sync::Arc::clone(&world.service);
    let saving =
        tokio::spawn(async move { service.save(SaveRequest::new(Selector::rid("r-1"))).await });
    fake.drain_all(save, &tokens[..1280], &parts).await;
    let reply = saving.await.unwrap().unwrap();
    assert_eq!((reply.row.boundary, reply.row.turn_number), (1280, Some(1)));
    assert!(reply.row.durable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_that_passes_is_busy() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    let req = fake.open("c", &tokens);
    let save = fake.offer(req, 1280);
    fake.answer(save).await.unwrap();
    let timeout = Duration::from_millis(30);
    let request = SaveRequest {
        timeout,
        ..SaveRequest::new(Selector::conversation("c"))
    };
    assert_eq!(kind(world.service.save(request).await), ErrorKind::Busy);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_becomes_a_turn_of_the_conversation_that_the_client_names() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    // The client sends no session; it learns the rid from the answer, and saves under its own name.
    let req = fake.open_as("", "chatcmpl-1", &tokens, |_| ());
    fake.save_at(req, &tokens, 1280).await;
    fake.finish(req, 1500);
    fake.say(RequestClose { req });
    fake.heard_all().await;
    let select = Selector {
        conversation_id: Some("chat:1/a".into()),
        turn_number: Some(5),
        ..Selector::rid("chatcmpl-1")
    };
    let reply = world.service.save(SaveRequest::new(select)).await.unwrap();
    assert_eq!(reply.row.conversation_id.as_deref(), Some("chat:1/a"));
    assert_eq!(
        (reply.row.turn_number, reply.row.tokens_after_boundary),
        (Some(5), 220)
    );
    let restored = world.service.restore(RestoreRequest {
        select: Selector::conversation("chat:1/a"),
        pin_for: None,
    });
    assert_eq!(restored.await.unwrap().row.boundary, 1280);
    let world = world.killed().await;
    assert_eq!(list(&world, "chat:1/a"), [(Some(5), None, 1280)]);
    assert_eq!(list(&world, "chatcmpl-1"), [(Some(1), None, 1280)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_by_name_brings_it_up_and_holds_it() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    world.all_durable().await;
    world.service.let_go(u64::MAX);
    let restore = || {
        let select = Selector::conversation("c");
        world.service.restore(RestoreRequest {
            select,
            pin_for: None,
        })
    };
    let reply = restore().await.unwrap();
    assert_eq!(
        (reply.from_tier, reply.row.tier),
        (TierKind::Disk, TierKind::Ram)
    );
    assert_eq!(reply.moved_bytes, STATE + 1280 * ROW);
    assert_eq!(reply.row.token_count, 1280);
    assert!(reply.row.pinned);
    world.service.let_go(u64::MAX);
    let reply = restore().await.unwrap();
    assert_eq!((reply.from_tier, reply.moved_bytes), (TierKind::Ram, 0));
    assert_eq!(fake.restore(&tokens).await.unwrap().tier, Tier::Ram);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_of_another_model_is_a_mismatch() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    fake.turn("c", &prompt(1, 1500), 1280).await;
    fake.heard_all().await;
    world.service.detach(fake.session, "a test");
    eventually("the end", || world.service.workers().is_empty()).await;
    let restore = || {
        let select = Selector::conversation("c");
        world.service.restore(RestoreRequest {
            select,
            pin_for: None,
        })
    };
    restore().await.unwrap();
    let other = Fake::attach_as(
        &world,
        &Variant {
            weights: 7,
            ..Variant::default()
        },
    )
    .await;
    assert_eq!(kind(restore().await), ErrorKind::Mismatch);
    let _right = Fake::attach(&world).await;
    restore().await.unwrap();
    drop(other);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleting_leaves_nothing_but_what_others_use() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    let mut other = tokens[..1024].to_vec();
    other.extend(prompt(2, 1000));
    // Two states of one request: the shallower has no name of its own.
    let req = fake.open("c", &tokens);
    fake.save_at(req, &tokens, 2048).await;
    fake.save_at(req, &tokens, 2816).await;
    fake.finish(req, 3000);
    fake.say(RequestClose { req });
    fake.turn("d", &other, 2000).await;
    world.all_durable().await;
    let mut events = world.service.events();
    let whole = DeleteRequest {
        select: Selector::conversation("c"),
        whole: true,
    };
    let reply = world.service.delete(whole).await.unwrap();
    assert_eq!((reply.snapshots.len(), reply.names), (2, 1));
    assert!(matches!(
        events.recv().await.unwrap(),
        Event::Removed {
            reason: "deleted",
            ..
        }
    ));
    assert_eq!(fake.restore(&tokens).await, None);
    assert_eq!(fake.restore(&other).await.unwrap().boundary, 2000);
    let list_c = ListRequest {
        conversation_id: Some("c".into()),
        ..ListRequest::default()
    };
    assert_eq!(kind(world.service.list(list_c)), ErrorKind::NotFound);
    // What is left: the other's state and KV, and the beginning that both have.
    assert_eq!(world.files("manifests").len(), 1);
    assert_eq!(world.files("refs").len(), 1);
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&tokens).await, None);
    assert_eq!(fake.restore(&other).await.unwrap().boundary, 2000);
    let whole = DeleteRequest {
        select: Selector::conversation("d"),
        whole: true,
    };
    world.service.delete(whole).await.unwrap();
    assert_eq!(world.files("objects"), Vec::<std::path::PathBuf>::new());
    assert_eq!(
        world.files("manifests").len() + world.files("refs").len(),
        0
    );
    eventually("the memory", || world.service.store.arena.used() == 0).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleting_one_turn_leaves_the_next() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.turn("c", &tokens[..1100], 1024).await;
    fake.turn("c", &tokens[..2100], 2048).await;
    world.all_durable().await;
    let one = DeleteRequest {
        select: turn("c", 1),
        whole: false,
    };
    assert_eq!(world.service.delete(one).await.unwrap().snapshots.len(), 1);
    assert_eq!(list(&world, "c"), [(Some(2), None, 2048)]);
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 2048);
    assert_eq!(fake.restore(&tokens[..1500]).await, None);
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(list(&world, "c"), [(Some(2), None, 2048)]);
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 2048);
    // Turns count on, and are not used again.
    fake.turn("c", &tokens, 2816).await;
    fake.heard_all().await;
    assert_eq!(
        list(&world, "c"),
        [(Some(2), None, 2048), (Some(3), None, 2816)]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_being_restored_can_be_deleted() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    fake.turn("c", &tokens, 1280).await;
    world.all_durable().await;
    let req = fake.open("x", &tokens);
    let hit = fake.lookup(req, 1500, (0, 0)).await;
    assert!(fake.fill(hit.lease, Piece::State, 0, STATE).await.is_ok());
    let whole = DeleteRequest {
        select: Selector::conversation("c"),
        whole: true,
    };
    world.service.delete(whole).await.unwrap();
    // What was held can still be read, whole, and then it is gone everywhere.
    fake.fill_all(&hit, &tokens).await.unwrap();
    let (lease, outcome) = (hit.lease, crate::proto::channel::layout::Outcome::Used);
    fake.say(crate::proto::channel::msg::Release {
        lease,
        outcome,
        reused: 1280,
    });
    fake.say(RequestClose { req });
    eventually("the memory", || world.service.store.arena.used() == 0).await;
    eventually("the files", || world.files("objects").is_empty()).await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_whose_snapshot_is_deleted_meanwhile_says_so() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let id = fake.turn("c", &prompt(1, 1500), 1280).await;
    fake.heard_all().await;
    world.service.hold.set(Some("save:Writing"));
    let service = std::sync::Arc::clone(&world.service);
    let saving = tokio::spawn(async move {
        let request = SaveRequest::new(Selector::conversation("c"));
        service.save(request).await
    });
    eventually("a write under way", || {
        world
            .service
            .hold
            .held()
            .iter()
            .any(|held| held.starts_with("save:Writing"))
    })
    .await;
    let service = std::sync::Arc::clone(&world.service);
    let deleting = tokio::spawn(async move {
        let select = Selector::conversation("c");
        let whole = true;
        service.delete(DeleteRequest { select, whole }).await
    });
    let error = saving.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    let text = format!("snapshot {id} was deleted meanwhile");
    assert_eq!(error.to_string(), text);
    world.service.hold.set(None);
    assert_eq!(deleting.await.unwrap().unwrap().snapshots, [id]);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_does_what_it_says_or_nothing() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    fake.turn("c", &tokens[..1100], 1024).await;
    let id = fake.turn("c", &tokens[..2100], 2048).await;
    fake.heard_all().await;
    let delete = |select, whole| world.service.delete(DeleteRequest { select, whole });
    let by_id = Selector {
        conversation_id: Some("c".into()),
        ..Selector::snapshot(id)
    };
    for (select, field) in [
        (by_id, "`snapshot_id`"),
        (turn("c", 1), "`turn_number`"),
        (branch("c", "b"), "`branch_name`"),
    ] {
        let error = delete(select, true).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let text = error.to_string();
        assert!(text.contains(field) && text.contains("`whole`"), "{text}");
    }
    // The name of a conversation is not that of a request.
    let error = delete(Selector::rid("c"), false).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(list(&world, "c").len(), 2, "nothing went");
    // A turn and a branch: both names go with the snapshot.
    let mut request = SaveRequest::new(turn("c", 2));
    request.select.branch_name = Some("b".into());
    world.service.save(request).await.unwrap();
    let reply = delete(Selector::snapshot(id), false).await.unwrap();
    assert_eq!((reply.names, &*reply.snapshots), (2, &[id][..]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_alone_names_its_turn() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3000);
    for (rid, len, at) in [
        ("r-1", 1100, 1024),
        ("r-2", 2100, 2048),
        ("r-2", 3000, 2816),
    ] {
        let req = fake.open_as("c", rid, &tokens[..len], |_| ());
        fake.save_at(req, &tokens, at).await;
        fake.finish(req, len);
        fake.say(RequestClose { req });
        fake.heard_all().await;
    }
    let info = world.service.info(InfoRequest {
        select: Selector::rid("r-1"),
        with_tokens: false,
    });
    assert_eq!(info.unwrap().turn_number, Some(1));
    let delete = |select| {
        let whole = false;
        world.service.delete(DeleteRequest { select, whole })
    };
    assert_eq!(kind(delete(Selector::rid("r-2")).await), ErrorKind::Invalid);
    let second = Selector {
        turn_number: Some(2),
        ..Selector::rid("r-2")
    };
    assert_eq!(delete(second).await.unwrap().names, 1);
    assert_eq!(delete(Selector::rid("r-2")).await.unwrap().names, 1);
    assert_eq!(list(&world, "c"), [(Some(1), None, 1024)]);
    assert_eq!(delete(Selector::rid("r-1")).await.unwrap().names, 1);
    assert_eq!(
        kind(delete(Selector::rid("r-1")).await),
        ErrorKind::NotFound
    );
}
