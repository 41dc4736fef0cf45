//! Budgets that change while the daemon runs: what is too much leaves at once, and it is told.

mod common;

use common::daemon::Daemon;
use common::http::Answer;
use common::wait_for;
use common::worker::{Model, Worker, prompt};
use serde_json::{Value, json};

const TOKENS: u32 = 200;

fn change(daemon: &Daemon, body: &Value) -> Answer {
    let json = [("Content-Type", "application/json")];
    let place = daemon.place();
    let answer = place.request("PATCH", "/v1/tiers", &json, body.to_string().as_bytes());
    answer.unwrap()
}

fn tier(daemon: &Daemon, name: &str) -> Value {
    let tiers = daemon.get("/v1/tiers").json()["tiers"].clone();
    let mut rows = tiers.as_array().unwrap().iter();
    rows.find(|row| row["tier"] == name).unwrap().clone()
}

#[test]
fn less_room_is_in_force_at_once_and_told() {
    let mut daemon = Daemon::start(&[("service.write_after", "20ms".into())]);
    let mut worker = Worker::attach_as(&daemon, &Model::large());
    for number in 0..24 {
        worker.turn(
            &format!("c{number}"),
            &prompt(number, TOKENS as usize),
            TOKENS,
        );
    }
    daemon.all_durable();
    let used = |name| tier(&daemon, name)["used_bytes"].as_u64().unwrap();
    assert!(used("ram") > 16 << 20 && used("disk") > 18 << 20);
    let most = tier(&daemon, "ram")["budget_bytes"].clone();
    let answer = change(&daemon, &json!({ "ram_budget_bytes": 8 << 20 }));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["tiers"][0]["budget_bytes"], 8 << 20);
    wait_for("RAM to let go", || (used("ram") <= 8 << 20).then_some(()));
    let total = |daemon: &Daemon| daemon.get("/v1/snapshots").json()["total"].clone();
    assert_eq!(total(&daemon), 24, "the disk has them");
    let answer = change(
        &daemon,
        &json!({ "disk_budget_bytes": 16 << 20, "disk_min_free_bytes": 0 }),
    );
    assert_eq!(answer.status, 200, "{}", answer.text());
    wait_for("the disk to let go", || {
        (used("disk") <= 16 << 20).then_some(())
    });
    assert_eq!(tier(&daemon, "disk")["min_free_bytes"], 0);
    wait_for("some to be gone", || (total(&daemon) != 24).then_some(()));
    // And more again, but never more than the start took.
    assert_eq!(
        change(&daemon, &json!({ "ram_budget_bytes": most })).status,
        200
    );
    let events = format!(
        "{}?types=budget_changed&last_event_id=00000000000000000000000000000000-1",
        "/v1/events"
    );
    let told = events_of(&daemon, &events, 3);
    assert!(
        told.contains("\"tier\":\"ram\"") && told.contains("\"min_free_bytes\":0"),
        "{told}"
    );
    // The next start takes what the configuration says.
    daemon.restart();
    assert_eq!(tier(&daemon, "ram")["budget_bytes"], most);
    assert_eq!(tier(&daemon, "disk")["budget_bytes"], 1 << 30);
}

/// The text of a stream until there are so many of the events.
fn events_of(daemon: &Daemon, path: &str, count: usize) -> String {
    use std::io::{Read as _, Write as _};
    let address = daemon.url().replace("http://", "");
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut text = String::new();
    while text.matches("event: budget_changed").count() < count {
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece).unwrap();
        assert!(read > 0, "{text}");
        text += std::str::from_utf8(&piece[..read]).unwrap();
    }
    text
}

#[test]
fn budgets_that_cannot_be_are_refused_and_change_nothing() {
    let daemon = Daemon::start(&[]);
    let before = daemon.get("/v1/tiers").json();
    let most = tier(&daemon, "ram")["budget_bytes"].as_u64().unwrap();
    for body in [
        json!({}),
        json!({ "ram_budget_bytes": null }),
        json!({ "ram_budget_bytes": most + 1 }),
        json!({ "ram_budget_bytes": 1 }),
        json!({ "ram_budget_bytes": -1 }),
        json!({ "ram_budget_bytes": "8 MiB" }),
        json!({ "ram_budget_bytes": 8 << 20, "disk_budget_bytes": 1 }),
        json!({ "disk_min_free_bytes": u64::MAX }),
        json!({ "ram_budget": 8 << 20 }),
        json!([]),
    ] {
        let answer = change(&daemon, &body);
        assert_eq!(
            (answer.status, answer.kind().as_str()),
            (400, "invalid_request"),
            "{body}"
        );
    }
    assert_eq!(daemon.get("/v1/tiers").json(), before);
    let without = Daemon::start(&[("store.disk.path", "".into())]);
    let answer = change(&without, &json!({ "disk_budget_bytes": 1 << 30 }));
    assert_eq!(answer.status, 400, "{}", answer.text());
    let token = without.folder().join("token");
    std::fs::write(&token, "0123456789abcdef\n").unwrap();
    let locked = Daemon::start(&[("rest.token_file", token.display().to_string().into())]);
    assert_eq!(
        change(&locked, &json!({ "ram_budget_bytes": 8 << 20 })).status,
        401
    );
}
