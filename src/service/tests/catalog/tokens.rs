//! The token log written anew.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_that_nobody_knows_are_given_back_at_an_orderly_end() {
    let world = some(trusting()).await;
    let mut fake = Fake::attach(&world).await;
    for n in 100..180_u32 {
        let name = format!("c{n}");
        fake.turn(&name, &prompt(n, 300), 256).await;
        world.all_durable().await;
        if n % 4 != 0 {
            delete(&world, &name).await;
        }
    }
    let tokens = || fs::metadata(&world.files("data/tokens.")[0]).unwrap();
    let before = (tokens().len(), tokens().ino());
    assert!(world.service.core.lock().index.log().is_wasteful());
    let right: Vec<_> = picture(&world).snapshots.into_keys().collect();
    world.service.shutdown().await;
    let after = (tokens().len(), tokens().ino());
    assert!(
        after.0 < before.0 * 2 / 3 && after.1 != before.1,
        "{before:?}, {after:?}"
    );
    let world = world.killed().await;
    assert!(world.was_recalled());
    let again: Vec<_> = picture(&world).snapshots.into_keys().collect();
    assert_eq!(again, right);
    assert_same_as_thorough(&world).await;
    let mut fake = Fake::attach(&world).await;
    for n in (100..180).step_by(4) {
        let got = fake.restore(&prompt(n, 300)).await;
        assert_eq!(got.unwrap().boundary, 256);
    }
    fake.turn("c104", &prompt(104, 800), 700).await;
    world.all_durable().await;
    let world = world.killed().await;
    assert!(world.was_recalled());
    assert_same_as_thorough(&world).await;
}
