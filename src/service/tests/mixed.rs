//! Everything at once, in a random but repeatable order, on tiers that are far too small.

use std::time::Duration;

use bytesize::ByteSize;

use super::fake::*;
use crate::proto::channel::msg::RequestClose;
use crate::service::{DeleteRequest, RestoreRequest, SaveRequest, Selector, ServiceError};

/// A small generator; the test must be the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// A conversation: a beginning that some share, then its own tokens.
fn tokens_of(conversation: u64, len: u64) -> Vec<u32> {
    let shared = [0, 700, 1024, 1500][(conversation % 4) as usize];
    let mut tokens = prompt(1000, shared);
    tokens.extend(prompt(conversation as u32, 6000));
    tokens.truncate(len as usize);
    tokens
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_foreign_ever_comes_back_and_the_books_are_right() {
    let mut settings = Settings {
        ram: ByteSize::kib(2200),
        disk: Some(ByteSize::mib(5)),
        ..Settings::default()
    };
    settings.config.write_after = Duration::from_millis(5);
    settings.config.room_wait = Duration::from_secs(20);
    let mut world = World::with(settings).await;
    let mut fake = Fake::attach(&world).await;
    let mut random = Random(0x5eed_1234_5678_9abc);
    let (mut saved, mut restored) = (0, 0);
    for step in 0..250 {
        let conversation = random.below(14);
        let name = format!("c{conversation}");
        let boundary = 256 * (1 + random.below(13));
        let tokens = tokens_of(conversation, boundary + 100);
        match random.below(10) {
            0..=3 => {
                let req = fake.open(&name, &tokens);
                let end = fake.save_at(req, &tokens, boundary as usize).await;
                saved += u32::from(matches!(end, SaveEnd::Saved(..)));
                fake.finish(req, tokens.len());
                fake.say(RequestClose { req });
            }
            4..=6 => restored += u32::from(fake.restore(&tokens).await.is_some()),
            7 => {
                let mut request = SaveRequest::new(Selector::conversation(&*name));
                request.timeout = Duration::from_secs(20);
                if random.below(3) == 0 {
                    request.select.branch_name = Some("kept".into());
                }
                // Whether there is something to save is chance; that it hangs or breaks is not.
                let _ = world.service.save(request).await;
            }
            8 => {
                let select = Selector::conversation(&*name);
                if random.below(2) == 0 {
                    let _ = world
                        .service
                        .delete(DeleteRequest {
                            select,
                            whole: true,
                        })
                        .await;
                } else {
                    let pin_for = Some(Duration::from_millis(random.below(50)));
                    let _ = world
                        .service
                        .restore(RestoreRequest { select, pin_for })
                        .await;
                }
            }
            _ if step % 5 == 0 => {
                world = world.killed().await;
                fake = Fake::attach(&world).await;
            }
            _ => world.service.let_go(random.below(1 << 20)),
        }
        world.check();
    }
    assert!(
        saved > 30 && restored > 10,
        "{saved} saved, {restored} restored"
    );
    world.all_durable().await;
    let used: u64 = world
        .files("")
        .iter()
        .map(|path| path.metadata().unwrap().len())
        .sum();
    assert!(used <= 5 << 20, "{used}");
    // What is listed is there.
    let rows = world
        .service
        .list(crate::service::ListRequest::default())
        .unwrap();
    for row in rows.snapshots {
        let select = Selector::snapshot(row.snapshot_id);
        let pin_for = Some(Duration::ZERO);
        // Copies under way may hold what little RAM there is; they end.
        let mut tries = 0;
        loop {
            let select = select.clone();
            match world
                .service
                .restore(RestoreRequest { select, pin_for })
                .await
            {
                Err(ServiceError::NoSpace(_)) if tries < 200 => tries += 1,
                restored => break drop(restored.unwrap()),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
