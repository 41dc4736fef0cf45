//! What the daemon tells of itself is what is there.

mod common;

use std::time::Duration;

use common::daemon::Daemon;
use common::wait_for;
use common::worker::{Model, Worker, prompt};
use engram::proto::channel::layout::Miss;
use serde_json::json;

#[test]
fn a_restore_slower_than_prefill_is_skipped_and_counted() {
    let daemon = Daemon::start(&[("service.prefill_tokens_per_second", 1e12.into())]);
    let mut worker = Worker::attach(&daemon);
    let ids = prompt(1, 600);
    worker.turn("c", &ids, 512);
    let req = worker.open("c", &ids);
    let result = worker.lookup(req, 600);
    assert_eq!(
        (result.lease, result.reason),
        (0, Some(Miss::SlowerThanPrefill))
    );
    let skipped = r#"engram_restores_skipped_total{reason="slower_than_prefill"}"#;
    assert_eq!(daemon.metric(skipped), 1.0);
}

/// The worker takes long for what it computes itself, and says so by when its states come.
#[test]
fn prefill_is_learned_and_a_restore_that_is_slower_skipped() {
    let daemon = Daemon::start(&[("service.learn_prefill", true.into())]);
    let mut worker = Worker::attach(&daemon);
    let cost = || daemon.get("/v1/workers").json()["workers"][0]["cost"].clone();
    assert_eq!(cost()["prefill_tokens_per_second"], json!(null));
    assert_eq!(cost()["break_even_tokens"]["ram"], json!(null));
    let compute = |worker: &mut Worker, seed: u32, time: Duration| {
        let ids = prompt(seed, 2050);
        let req = worker.open(&format!("c{seed}"), &ids);
        assert_eq!(worker.lookup(req, 2049).lease, 0);
        std::thread::sleep(time);
        worker.save_at(req, &ids, 1024);
        worker.finish(req, 2050);
        ids
    };
    let mut last = Vec::new();
    for seed in 0..6 {
        last = compute(&mut worker, seed, Duration::from_millis(200));
    }
    let speed = cost()["prefill_tokens_per_second"].as_f64().unwrap();
    assert!(speed > 0.0 && speed < 1024.0 / 0.2, "{speed}");
    let even = cost()["break_even_tokens"]["ram"].as_u64().unwrap();
    assert!(even < 1024, "{even} tokens at {speed}");
    assert_eq!(worker.restore(&last).unwrap().boundary, 1024);
    // A worker so fast that nothing is worth a restore.
    let mut fast = Worker::attach(&daemon);
    for seed in 10..90 {
        last = compute(&mut fast, seed, Duration::from_millis(2));
    }
    let row = daemon.get("/v1/workers").json();
    let rows = row["workers"].as_array().unwrap();
    let fast_row = rows.iter().max_by(|a, b| {
        let speed = |row: &serde_json::Value| row["cost"]["prefill_tokens_per_second"].as_f64();
        speed(a).partial_cmp(&speed(b)).unwrap()
    });
    let learned = fast_row.unwrap()["cost"]["prefill_tokens_per_second"].as_f64();
    assert!(learned.unwrap() > speed, "{learned:?} and {speed}");
    assert!(
        worker.restore(&last).is_some(),
        "the slow one still restores"
    );
}

#[test]
fn every_tier_tells_what_it_holds_and_may_hold() {
    let daemon = Daemon::start(&[
        ("store.ram", "24 MiB".into()),
        ("store.ram_headroom", "8 MiB".into()),
        ("store.disk.budget", "100 MiB".into()),
    ]);
    let mut worker = Worker::attach(&daemon);
    let ids = prompt(1, 3000);
    worker.turn("c", &ids, 3000);
    let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": "c" }));
    assert_eq!(answer.status, 200);
    worker.restore(&ids).unwrap();
    let model = Model::default();
    let payload = (model.state_bytes() + 3000 * model.row_bytes()) as f64;
    let of =
        |metric: &str, tier: &str| daemon.metric(&format!("engram_{metric}{{tier=\"{tier}\"}}"));
    for (tier, budget) in [("ram", 16 << 20), ("disk", 100 << 20)] {
        wait_for("levels", || {
            (of("tier_used_bytes", tier) >= payload).then_some(())
        });
        assert!(of("tier_used_bytes", tier) < payload + 200e3, "{tier}");
        assert_eq!(of("tier_budget_bytes", tier), f64::from(budget), "{tier}");
        assert_eq!(of("tier_objects", tier), 2.0, "{tier}");
    }
    assert_eq!(of("lookup_hits_total", "ram"), 1.0);
    assert_eq!(of("lookup_hits_total", "disk"), 0.0);
}
