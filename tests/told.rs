//! What the daemon tells of itself is what is there.

mod common;

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
