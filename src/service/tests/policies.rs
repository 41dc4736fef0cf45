//! What the policies of saving let be written.

use std::time::Duration;

use super::fake::*;
use crate::proto::channel::layout::Finish;
use crate::proto::channel::msg::{RequestClose, TurnFinished};
use crate::service::{
    ErrorKind, Expected, Policy, RulesRow, SaveRequest, SavingRules, Selector, Tag,
};
use crate::types::{SnapshotId, TokenId};

fn rules(policy: Policy) -> SavingRules {
    SavingRules {
        policy,
        every_n_turns: 2,
        min_interval: Duration::ZERO,
    }
}

async fn world(policy: Policy) -> World {
    let mut settings = Settings::default();
    settings.config.saving.policy = policy;
    settings.config.saving.every_n_turns = 2;
    settings.config.saving.tool_call_tokens = vec![TOOL];
    World::with(settings).await
}

/// A token that prompts do not have.
const TOOL: TokenId = 4_000_000_000;

fn durable(world: &World, ids: &[SnapshotId]) -> Vec<bool> {
    let core = world.service.core.lock();
    ids.iter().map(|id| core.is_durable(id)).collect()
}

fn transient(world: &World, id: SnapshotId) -> (bool, bool) {
    let core = world.service.core.lock();
    let info = core.index.snapshot(&id).unwrap();
    (
        info.retain == crate::index::Retain::Transient,
        info.pinned_until.is_some(),
    )
}

/// Three turns of one conversation.
async fn talk(fake: &mut Fake, name: &str, tokens: &[TokenId]) -> [SnapshotId; 3] {
    let mut ids = Vec::new();
    for (end, boundary) in [(1100, 1024), (2100, 2048), (3100, 3072)] {
        ids.push(fake.turn(name, &tokens[..end], boundary).await);
        fake.heard_all().await;
    }
    ids.try_into().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_so_many_turns_are_written_and_the_newest_other_is_held() {
    let world = world(Policy::EveryNTurns).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3200);
    let ids = talk(&mut fake, "c", &tokens).await;
    world.all_durable().await;
    assert_eq!(durable(&world, &ids), [false, true, false]);
    assert_eq!(transient(&world, ids[2]), (true, true));
    assert_eq!(transient(&world, ids[0]), (true, false));
    // It ends without what it was not to write.
    world.service.shutdown().await;
    let world = world.killed().await;
    assert_eq!(world.service.status().snapshots, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_by_itself_and_what_is_saved_by_name_is() {
    let world = world(Policy::ManualOnly).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3200);
    let ids = talk(&mut fake, "c", &tokens).await;
    world.all_durable().await;
    assert_eq!(durable(&world, &ids), [false; 3]);
    assert_eq!(world.files("objects"), Vec::<std::path::PathBuf>::new());
    // The newest is kept however little room there is; those before it go.
    world.service.let_go(u64::MAX);
    let got = fake.restore(&tokens).await.unwrap();
    assert_eq!(got.boundary, 3072);
    assert_eq!(world.service.status().snapshots, 1);
    let save = SaveRequest::new(Selector::conversation("c"));
    assert!(world.service.save(save).await.unwrap().row.durable);
    let world = world.killed().await;
    let mut fake = Fake::attach(&world).await;
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 3072);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_to_leave_ram_is_written_and_also_when_the_daemon_ends() {
    let world = world(Policy::OnEviction).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3200);
    let ids = talk(&mut fake, "c", &tokens).await;
    let other = fake.turn("d", &prompt(2, 1200), 1024).await;
    fake.heard_all().await;
    world.all_durable().await;
    assert_eq!(durable(&world, &ids), [false; 3]);
    world.service.let_go(1);
    eventually("one is written", || durable(&world, &ids).contains(&true)).await;
    world.service.shutdown().await;
    let world = world.killed().await;
    assert_eq!(durable(&world, &ids), [true; 3]);
    assert_eq!(durable(&world, &[other]), [true]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_calls_a_tool_is_written_by_its_tokens_or_by_the_clients_word() {
    let world = world(Policy::OnToolCall).await;
    let mut fake = Fake::attach(&world).await;
    let mut tokens = prompt(1, 1150);
    // In the prompt it is no call.
    tokens[500] = TOOL;
    let first = fake.turn("c", &tokens[..1100], 1024).await;
    // In the answer it is.
    tokens.extend(prompt(2, 1000));
    tokens[2110] = TOOL;
    let req = fake.open("c", &tokens);
    let SaveEnd::Saved(_, second) = fake.save_at(req, &tokens, 2048).await else {
        panic!("not saved");
    };
    fake.heard_all().await;
    world.all_durable().await;
    assert_eq!(durable(&world, &[first, second]), [false, false]);
    fake.say(TurnFinished {
        req,
        attempt: 0,
        prompt_tokens: 2100,
        total_tokens: 2150,
        cached_tokens: 0,
        prefilled_tokens: 2100,
        finish: Finish::Stop,
    });
    fake.say(RequestClose { req });
    eventually("the call is written", || {
        durable(&world, &[second]) == [true]
    })
    .await;
    assert_eq!(durable(&world, &[first]), [false]);
    let said = Selector {
        turn_number: Some(1),
        ..Selector::conversation("c")
    };
    world.service.calls_tool(&said).unwrap();
    eventually("the other, too", || durable(&world, &[first]) == [true]).await;
    let nobody = world.service.calls_tool(&Selector::conversation("x"));
    assert_eq!(nobody.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn within_the_interval_only_the_newest_waits() {
    let mut settings = Settings::default();
    settings.config.saving.min_interval = Duration::from_secs(3600);
    let world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3200);
    let ids = talk(&mut fake, "c", &tokens).await;
    eventually("the first", || {
        durable(&world, &ids) == [true, false, false]
    })
    .await;
    let waits = |id| world.service.core.lock().queue.contains(&id);
    assert_eq!(ids.map(waits), [false, false, true]);
    assert_eq!(transient(&world, ids[1]), (true, false));
    // Other conversations do not wait for it.
    let other = fake.turn("d", &prompt(2, 1200), 1024).await;
    eventually("the other", || durable(&world, &[other]) == [true]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_has_rules_of_its_own_also_before_its_first_turn_and_after_a_restart() {
    let world = World::new().await;
    let select = Selector::conversation("c");
    let set = |world: &World, rules| world.service.set_rules(&select, rules, &Expected::Anything);
    assert_eq!(set(&world, None).unwrap_err().kind(), ErrorKind::NotFound);
    let bad = SavingRules {
        every_n_turns: 0,
        ..rules(Policy::EveryNTurns)
    };
    assert_eq!(
        set(&world, Some(bad)).unwrap_err().kind(),
        ErrorKind::Invalid
    );
    set(&world, Some(rules(Policy::ManualOnly))).unwrap();
    world.all_durable().await;
    let world = world.killed().await;
    let found = world.service.rules(&select).unwrap();
    assert_eq!((found.policy, found.own), (Policy::ManualOnly, true));
    // Who saw other rules changes nothing.
    let seen = Expected::Seen(vec![
        Tag::of(&RulesRow {
            own: false,
            ..found.clone()
        })
        .unwrap(),
    ]);
    let error = world.service.set_rules(&select, None, &seen).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed);
    let seen = Expected::Seen(vec![Tag::of(&found).unwrap()]);
    let rules = world
        .service
        .set_rules(&select, Some(rules(Policy::ManualOnly)), &seen);
    assert_eq!(rules.unwrap(), found);
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 3200);
    let ids = talk(&mut fake, "c", &tokens).await;
    let other = fake.turn("d", &prompt(2, 1200), 1024).await;
    world.all_durable().await;
    assert_eq!(durable(&world, &ids), [false; 3]);
    assert_eq!(durable(&world, &[other]), [true]);
    set(&world, None).unwrap();
    assert!(!world.service.rules(&select).unwrap().own);
    let mut more = tokens.clone();
    more.extend(prompt(3, 1000));
    let last = fake.turn("c", &more, 4096).await;
    eventually("as configured", || durable(&world, &[last]) == [true]).await;
}
