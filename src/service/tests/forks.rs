//! Forks, the tree of what parted, comparing, pins and labels.

use super::fake::*;
use crate::service::{
    ConversationView, DeleteRequest, ErrorKind, ForkRequest, MarkRequest, Relation, SaveRequest,
    Selector, ServiceError, SnapshotRow, TreeNode,
};
use crate::store::fault::{Fault, Op};
use crate::types::SnapshotId;

fn turn(conversation: &str, number: u32) -> Selector {
    Selector {
        turn_number: Some(number),
        ..Selector::conversation(conversation)
    }
}

fn branch(conversation: &str, name: &str) -> Selector {
    Selector {
        branch_name: Some(name.into()),
        ..Selector::conversation(conversation)
    }
}

async fn fork(
    world: &World,
    select: Selector,
    new_id: &str,
) -> Result<ConversationView, ServiceError> {
    let request = ForkRequest {
        select,
        new_id: new_id.into(),
        timeout: LONG,
    };
    world.service.fork(request).await
}

async fn delete(world: &World, select: Selector, whole: bool) -> Vec<SnapshotId> {
    let request = DeleteRequest { select, whole };
    world.service.delete(request).await.unwrap().snapshots
}

async fn mark(
    world: &World,
    snapshot: SnapshotId,
    pinned: Option<bool>,
    label: Option<Option<&str>>,
) -> Result<SnapshotRow, ServiceError> {
    let request = MarkRequest {
        snapshot,
        pinned,
        label: label.map(|label| label.map(str::to_owned)),
        timeout: LONG,
    };
    world.service.mark(request).await
}

fn view(world: &World, name: &str) -> ConversationView {
    let select = Selector::conversation(name);
    world.service.conversation(&select, 100, 0).unwrap()
}

/// A node as `name[turns](forks)`, forks behind the turn after which they parted.
fn drawn(node: &TreeNode) -> String {
    let forks = |forks: &[TreeNode]| forks.iter().map(|it| format!("({})", drawn(it))).collect();
    let turns: Vec<String> = node
        .turns
        .iter()
        .map(|turn| {
            let forks: String = forks(&turn.forks);
            format!("{}{forks}", turn.turn_number)
        })
        .collect();
    let before: String = forks(&node.forks);
    let star = if node.selected { "*" } else { "" };
    format!(
        "{}{star}[{}]{before}",
        node.conversation_id,
        turns.join(" ")
    )
}

fn tree(world: &World, name: &str) -> String {
    drawn(&world.service.tree(&Selector::conversation(name)).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_has_the_turns_and_copies_no_payload() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 4000);
    fake.turn("c", &tokens[..1100], 1024).await;
    fake.turn("c", &tokens[..2100], 2048).await;
    let last = fake.turn("c", &tokens[..3100], 3072).await;
    world.all_durable().await;
    let (objects, written) = (
        world.files("objects").len(),
        world.metric("engram_written_bytes_total"),
    );
    let forked = fork(&world, turn("c", 2), "c/edited").await.unwrap();
    assert_eq!((forked.turns.len(), forked.total_tokens), (2, 2100));
    let origin = forked.origin.unwrap();
    assert_eq!((&*origin.conversation_id, origin.turn_number), ("c", 2));
    assert_eq!(world.files("objects").len(), objects);
    assert_eq!(world.metric("engram_written_bytes_total"), written);
    let stream = world
        .service
        .token_stream(&turn("c/edited", 2))
        .await
        .unwrap();
    assert!(stream.tokens == tokens[..2100] && stream.boundary == 2048);
    // It goes on by itself.
    let mut other = tokens[..2100].to_vec();
    other.extend(prompt(2, 900));
    fake.turn("c/edited", &other, 2816).await;
    fake.heard_all().await;
    assert_eq!(
        (
            view(&world, "c").turns_total,
            view(&world, "c/edited").turns_total
        ),
        (3, 3)
    );
    assert_eq!(view(&world, "c").forks[0].conversation_id, "c/edited");
    // What both name stays until neither does.
    assert_eq!(
        delete(&world, Selector::conversation("c"), true).await,
        [last]
    );
    world.all_durable().await;
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&other).await.unwrap().boundary, 2816);
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 2048);
    assert_eq!(view(&world, "c/edited").turns_total, 3);
    delete(&world, Selector::conversation("c/edited"), true).await;
    assert_eq!(world.files("objects").len() + world.files("refs").len(), 0);
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_that_cannot_be_is_refused_and_leaves_nothing() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1200);
    let req = fake.open_as("c", "r1", &tokens, |_| ());
    fake.save_at(req, &tokens, 1024).await;
    fake.finish(req, 1200);
    fake.heard_all().await;
    world.all_durable().await;
    let kind = async |select, name| fork(&world, select, name).await.unwrap_err().kind();
    assert_eq!(
        kind(Selector::conversation("x"), "y").await,
        ErrorKind::NotFound
    );
    assert_eq!(kind(turn("c", 2), "y").await, ErrorKind::NotFound);
    assert_eq!(kind(branch("c", "b"), "y").await, ErrorKind::NotFound);
    assert_eq!(kind(turn("c", 1), "").await, ErrorKind::Invalid);
    assert_eq!(kind(turn("c", 1), "c").await, ErrorKind::Exists);
    // The id of a request is a name of its conversation.
    assert_eq!(kind(turn("c", 1), "r1").await, ErrorKind::Exists);
    world
        .faults
        .arm(Op::Write, 0, Fault::Errno(nix::libc::EROFS));
    assert_eq!(kind(turn("c", 1), "y").await, ErrorKind::Unavailable);
    let gone = world
        .service
        .conversation(&Selector::conversation("y"), 1, 0);
    assert_eq!(gone.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn branches_and_forks_are_a_tree_also_after_a_restart() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3200);
    fake.turn("c", &tokens[..1100], 1024).await;
    fake.turn("c", &tokens[..2100], 2048).await;
    fake.turn("c", &tokens[..3100], 3072).await;
    world.all_durable().await;
    let save = SaveRequest::new(branch("c", "before"));
    let select = Selector {
        turn_number: Some(2),
        ..save.select.clone()
    };
    world
        .service
        .save(SaveRequest { select, ..save })
        .await
        .unwrap();
    fork(&world, turn("c", 1), "d").await.unwrap();
    fork(&world, branch("c", "before"), "e").await.unwrap();
    fork(&world, turn("e", 1), "f").await.unwrap();
    let check = |world: &World| {
        assert_eq!(tree(world, "c"), "c*[1(d[]) 2(e[](f[])) 3]");
        assert_eq!(tree(world, "f"), "c[1(d[]) 2(e[](f*[])) 3]");
        let it = view(world, "c");
        assert_eq!(it.turns[1].branches, ["before"]);
        assert_eq!(it.branches[0].turn_number, Some(2));
        assert_eq!((it.forks.len(), it.turns[2].durable), (2, true));
    };
    check(&world);
    world.all_durable().await;
    let world = world.killed().await;
    check(&world);
    // Names that go and come again lead round in no circle.
    delete(&world, Selector::conversation("c"), true).await;
    assert_eq!(tree(&world, "f"), "e[1(f*[]) 2]");
    fork(&world, turn("f", 1), "c").await.unwrap();
    assert!(tree(&world, "c").contains("c*"));
    assert!(tree(&world, "f").contains("f*"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_turns_are_compared_token_by_token() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2100);
    let first = fake.turn("c", &tokens[..1100], 1024).await;
    fake.turn("c", &tokens, 2048).await;
    let mut other = tokens[..1500].to_vec();
    other.extend(prompt(2, 500));
    fake.turn("d", &other, 1792).await;
    fake.heard_all().await;
    let compare = async |a, b| world.service.compare(&a, &b).await.unwrap();
    let it = compare(turn("c", 2), turn("d", 1)).await;
    assert_eq!((it.common_tokens, it.relation), (1500, Relation::Parted));
    assert_eq!(
        (it.common_snapshot, it.common_boundary),
        (Some(first), 1024)
    );
    let it = compare(turn("c", 1), turn("c", 2)).await;
    assert_eq!((it.common_tokens, it.relation), (1100, Relation::BExtendsA));
    let it = compare(turn("c", 2), turn("c", 1)).await;
    assert_eq!(it.relation, Relation::AExtendsB);
    let it = compare(Selector::conversation("c"), turn("c", 2)).await;
    assert_eq!((it.common_tokens, it.relation), (2100, Relation::Same));
    assert_eq!((it.a.turn_number, it.a.tokens), (2, 2100));
    let missing = world.service.compare(&turn("c", 1), &turn("c", 9)).await;
    assert_eq!(missing.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pin_keeps_it_and_a_label_calls_it_over_a_restart() {
    let world = World::lazy().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2100);
    let first = fake.turn("c", &tokens[..1100], 1024).await;
    fake.turn("c", &tokens, 2048).await;
    fake.heard_all().await;
    let row = mark(&world, first, Some(true), Some(Some("before")))
        .await
        .unwrap();
    assert!(row.pinned);
    assert_eq!(row.label.as_deref(), Some("before"));
    // Twice is once.
    mark(&world, first, Some(true), None).await.unwrap();
    // It is written although nothing else is.
    eventually("the pinned one is durable", || {
        world.service.core.lock().is_durable(&first)
    })
    .await;
    eventually("the names are written", || {
        !world.service.core.lock().conversations.any_dirty()
    })
    .await;
    let world = world.killed().await;
    let names = |world: &World| {
        world
            .service
            .core
            .lock()
            .index
            .snapshot(&first)
            .unwrap()
            .names
    };
    assert_eq!(names(&world), 1);
    assert_eq!(view(&world, "c").turns[0].label.as_deref(), Some("before"));
    let row = mark(&world, first, Some(false), None).await.unwrap();
    assert_eq!((row.pinned, row.label.as_deref()), (false, Some("before")));
    let row = mark(&world, first, Some(false), Some(None)).await.unwrap();
    assert_eq!((row.pinned, row.label), (false, None));
    assert_eq!(names(&world), 0);
    let world = world.killed().await;
    assert_eq!(names(&world), 0);
    let long = "x".repeat(1025);
    for (id, label, kind) in [
        (first, Some(&*long), ErrorKind::Invalid),
        (first, Some(""), ErrorKind::Invalid),
        (SnapshotId::new(), Some("x"), ErrorKind::NotFound),
    ] {
        let refused = mark(&world, id, None, Some(label)).await.unwrap_err();
        assert_eq!(refused.kind(), kind);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_conversation_gives_its_pins_back_or_leaves_them_to_its_fork() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2100);
    let first = fake.turn("c", &tokens[..1100], 1024).await;
    let second = fake.turn("c", &tokens, 2048).await;
    world.all_durable().await;
    mark(&world, first, Some(true), None).await.unwrap();
    mark(&world, second, Some(true), None).await.unwrap();
    fork(&world, turn("c", 1), "d").await.unwrap();
    assert_eq!(
        delete(&world, Selector::conversation("c"), true).await,
        [second]
    );
    let names = |world: &World| {
        world
            .service
            .core
            .lock()
            .index
            .snapshot(&first)
            .unwrap()
            .names
    };
    assert_eq!(names(&world), 1);
    let world = world.killed().await;
    assert_eq!(names(&world), 1);
    assert_eq!(delete(&world, turn("d", 1), false).await, [first]);
    assert_eq!(world.files("objects").len() + world.files("refs").len(), 0);
    world.check();
}
