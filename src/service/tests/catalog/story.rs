//! Any story of saves, deletions and ends leaves a catalog that says what the manifests say.

use super::*;

/// What happens to a daemon.
#[derive(Clone, Debug)]
enum Step {
    /// A turn of one of four conversations.
    Turn {
        conversation: u32,
        tokens: u32,
    },
    /// A conversation that leaves another one somewhere.
    Branch {
        of: u32,
        at: u32,
        tokens: u32,
    },
    Delete {
        conversation: u32,
    },
    Compact,
    /// It ends in good order and starts again.
    Restart,
    /// It dies and starts again.
    Kill,
    /// It dies at the n-th operation on the disk from now.
    Doom {
        operations: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..4_u32, 1..700_u32)
            .prop_map(|(conversation, tokens)| Step::Turn { conversation, tokens }),
        2 => (0..4_u32, 1..1000_u32, 1..300_u32)
            .prop_map(|(of, at, tokens)| Step::Branch { of, at, tokens }),
        1 => (0..4_u32).prop_map(|conversation| Step::Delete { conversation }),
        1 => Just(Step::Compact),
        1 => Just(Step::Restart),
        2 => Just(Step::Kill),
        3 => (0..60_u64).prop_map(|operations| Step::Doom { operations }),
    ]
}

#[test]
fn any_story_ends_with_the_same_picture() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let config = ProptestConfig {
        cases: 24,
        max_shrink_iters: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new(config);
    let stories = prop::collection::vec(step(), 1..12);
    let told = runner.run(&stories, |story| {
        runtime.block_on(live(story));
        Ok(())
    });
    told.unwrap();
}

async fn live(story: Vec<Step>) {
    let mut world = World::with(trusting()).await;
    let mut fake = Fake::attach(&world).await;
    let mut lengths = [200_u32; 4];
    let mut doomed = false;
    let mut branches = 0;
    for step in story.into_iter().chain([Step::Kill]) {
        match step {
            Step::Turn {
                conversation,
                tokens,
            } => {
                let length = &mut lengths[conversation as usize];
                *length = (*length + tokens).min(3900);
                let all = prompt(conversation, *length as usize);
                fake.turn(&format!("c{conversation}"), &all, *length as usize)
                    .await;
                if !doomed {
                    world.all_durable().await;
                }
            }
            Step::Branch { of, at, tokens } => {
                branches += 1;
                let mut all = prompt(of, lengths[of as usize] as usize);
                all.truncate(at as usize);
                all.extend(prompt(100 + branches, tokens as usize));
                let length = all.len();
                fake.turn(&format!("b{branches}"), &all, length).await;
                if !doomed {
                    world.all_durable().await;
                }
            }
            Step::Delete { conversation } if !doomed => {
                let select = Selector::conversation(format!("c{conversation}"));
                let request = DeleteRequest {
                    select,
                    whole: true,
                };
                let _ = world.service.delete(request).await;
            }
            Step::Compact if !doomed => compact(&world),
            Step::Doom { operations } if !doomed => {
                world.faults.arm(None, operations, Fault::Torn);
                doomed = true;
            }
            Step::Restart | Step::Kill => {
                if matches!(step, Step::Restart) && !doomed {
                    world.service.shutdown().await;
                }
                drop(fake);
                world = world.killed().await;
                doomed = false;
                assert_same_as_thorough(&world).await;
                fake = Fake::attach(&world).await;
            }
            Step::Delete { .. } | Step::Compact | Step::Doom { .. } => {}
        }
    }
}
