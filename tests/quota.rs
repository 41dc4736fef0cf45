//! Quotas of a real daemon: what a client is told, and what it sees.

mod common;

use common::daemon::Daemon;
use common::process::run;
use common::scene::keep;
use common::wait_for;
use common::worker::{Model, Names, SaveEnd, Worker, prompt};
use engram::proto::channel::layout::DeclineReason;
use serde_json::{Value, json};

const TOKENS: u32 = 1500;

fn size(model: &Model) -> u64 {
    model.state_bytes() + u64::from(TOKENS) * model.row_bytes()
}

fn tokens(seed: u32) -> Vec<u32> {
    prompt(seed, TOKENS as usize)
}

fn named(conversation: &str) -> Names<'_> {
    Names {
        session_id: Some(conversation),
        ..Names::default()
    }
}

/// A turn, and how the offer of its state ended.
fn offer(worker: &mut Worker, names: &Names, tokens: &[u32]) -> SaveEnd {
    let req = worker.open_as(names, tokens);
    let end = worker.save_at(req, tokens, TOKENS);
    worker.finish(req, tokens.len());
    end
}

fn namespaces(daemon: &Daemon) -> Value {
    daemon.get("/v1/namespaces").json()
}

#[test]
fn a_full_namespace_is_told_with_its_numbers_and_goes_on_after_a_deletion() {
    let model = Model::default();
    let quota = 2 * size(&model) + 100;
    let quota_text = format!("{quota} B");
    let daemon = Daemon::start(&[
        ("service.limits.quota", quota_text.as_str().into()),
        ("service.write_after", "1h".into()),
    ]);
    let mut worker = Worker::attach_as(&daemon, &model);
    for seed in 0..2 {
        let name = format!("c{seed}");
        keep(&daemon, &mut worker, &name, &tokens(seed), TOKENS);
        let branch = json!({ "conversation_id": name, "branch_name": "kept" });
        assert_eq!(daemon.post("/save_snapshot", &branch).status, 200);
    }
    // All is kept by name: nothing can make room.
    let end = offer(&mut worker, &named("c2"), &tokens(2));
    assert_eq!(end, SaveEnd::Declined(DeclineReason::NoRoom));
    let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": "c2" }));
    assert_eq!(answer.status, 507, "{}", answer.text());
    let error = &answer.json()["error"];
    assert_eq!(error["type"], "quota_exceeded");
    assert_eq!(error["retryable"], true);
    assert_eq!(error["used_bytes"], 2 * size(&model));
    assert_eq!(error["quota_bytes"], quota);
    assert_eq!(error["need_bytes"], size(&model));
    assert!(answer.header("retry-after").is_some());
    let (code, _, text) = run(&["save", "c2", "--url", &daemon.url()]);
    assert_eq!(code, 1);
    assert!(text.contains("quota_exceeded"), "{text}");
    let seen = namespaces(&daemon);
    assert_eq!(seen["total"], 1);
    let row = &seen["namespaces"][0];
    let numbers = (&row["used_bytes"], &row["quota_bytes"], &row["snapshots"]);
    let expected = (json!(2 * size(&model)), json!(quota), json!(2));
    assert_eq!(numbers, (&expected.0, &expected.1, &expected.2), "{seen}");
    let (code, table, _) = run(&["namespaces", "--url", &daemon.url()]);
    assert_eq!(code, 0);
    let row = table.lines().nth(1).unwrap_or_default();
    assert!(table.contains("QUOTA") && row.contains("KiB"), "{table}");
    assert_eq!(daemon.metric("engram_quota_declined_total"), 1.0);
    wait_for("the level", || {
        (daemon.metric("engram_namespaces_full") == 1.0).then_some(())
    });
    // A client makes room, and the state is offered again.
    let whole = json!({ "conversation_id": "c0", "whole": true });
    assert_eq!(daemon.post("/delete_snapshot", &whole).status, 200);
    keep(&daemon, &mut worker, "c2", &tokens(2), TOKENS);
    assert_eq!(worker.restore(&tokens(2)).unwrap().boundary, TOKENS);
}

#[test]
fn what_is_larger_than_the_quota_is_refused_for_good() {
    let model = Model::default();
    let quota = format!("{} B", size(&model) - 1);
    let daemon = Daemon::start(&[("service.limits.quota", quota.as_str().into())]);
    let mut worker = Worker::attach_as(&daemon, &model);
    let end = offer(&mut worker, &named("c"), &tokens(1));
    assert_eq!(end, SaveEnd::Declined(DeclineReason::NoRoom));
    let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": "c" }));
    assert_eq!(answer.status, 507, "{}", answer.text());
    let error = &answer.json()["error"];
    assert_eq!(
        (&error["type"], &error["retryable"]),
        (&"quota_exceeded".into(), &false.into())
    );
    assert!(answer.header("retry-after").is_none());
}

#[test]
fn limits_hold_over_a_restart_and_for_imports() {
    let model = Model::default();
    let own = |quota: u64| -> toml::Value {
        let mut table = toml::Table::new();
        table.insert("name".into(), "acme".into());
        table.insert("tenant".into(), "acme".into());
        table.insert("quota".into(), format!("{quota} B").into());
        vec![toml::Value::from(table)].into()
    };
    let mut daemon = Daemon::start(&[("service.limits.namespaces", own(10 * size(&model)))]);
    let mut worker = Worker::attach_as(&daemon, &model);
    let names = |name| Names {
        session_id: Some(name),
        tenant: Some("acme"),
        ..Names::default()
    };
    let mut last = String::new();
    for (seed, name) in ["a", "b", "c"].into_iter().enumerate() {
        let end = offer(&mut worker, &names(name), &tokens(seed as u32));
        let SaveEnd::Saved(_, id) = end else {
            panic!("{end:?}");
        };
        last = id.to_string();
    }
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join("pair");
    let name = name.to_str().unwrap();
    let url = daemon.url();
    assert_eq!(run(&["export", &last, "--out", name, "--url", &url]).0, 0);
    drop(worker);
    daemon.stop();
    // The catalog and the manifests say the same of who holds what; more than the quota stays.
    daemon.restart_with(&[("service.limits.namespaces", own(2 * size(&model)))]);
    let row = namespaces(&daemon)["namespaces"][0].clone();
    assert_eq!(row["used_bytes"], 3 * size(&model), "{row}");
    assert_eq!(
        (&row["name"], &row["tenant"]),
        (&"acme".into(), &"acme".into())
    );
    // An import pays as a save does: here it makes room at the cost of the oldest.
    let id = json!({ "snapshot_id": last });
    assert_eq!(daemon.post("/delete_snapshot", &id).status, 200);
    let url = daemon.url();
    let (code, out, error) = run(&["import", name, "--url", &url]);
    assert_eq!(code, 0, "{out}{error}");
    let row = namespaces(&daemon)["namespaces"][0].clone();
    assert_eq!(
        (&row["used_bytes"], &row["snapshots"]),
        (&json!(2 * size(&model)), &json!(2))
    );
    // And is refused where it cannot.
    daemon.restart_with(&[("service.limits.namespaces", own(size(&model) / 2))]);
    assert_eq!(
        daemon
            .post(
                "/delete_snapshot",
                &json!({ "snapshot_id": newest(&daemon) })
            )
            .status,
        200
    );
    let url = daemon.url();
    let (code, _, error) = run(&["import", name, "--url", &url]);
    assert_eq!(code, 1);
    assert!(error.contains("quota_exceeded"), "{error}");
}

fn newest(daemon: &Daemon) -> String {
    let all = daemon.get("/v1/snapshots?tenant=acme").json();
    all["snapshots"][0]["snapshot_id"]
        .as_str()
        .unwrap()
        .to_owned()
}
