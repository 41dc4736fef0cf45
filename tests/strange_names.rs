//! Links, folders and names that somebody else chose lead nowhere.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::daemon::Daemon;
use common::disk::{self, reseal};
use common::scene::{keep, start};
use common::wait_for;
use common::worker::{Worker, prompt};
use serde_json::{Value, json};

type Place = fn(&Path) -> PathBuf;

#[test]
fn links_planted_in_the_store_lead_nowhere() {
    let planted: [(&str, Place); 5] = [
        ("models", |data| data.join("models")),
        ("refs", |data| data.join("refs")),
        ("quarantine", |data| data.join("quarantine")),
        ("objects", |data| {
            folder_in(&data.join("models")).join("objects")
        }),
        ("a model", |data| folder_in(&data.join("models"))),
    ];
    for (name, place) in planted {
        let mut daemon = start();
        let mut worker = Worker::attach(&daemon);
        let tokens = prompt(1, 300);
        keep(&daemon, &mut worker, "c", &tokens, 256);
        daemon.kill();
        let place = place(&daemon.data());
        let outside = daemon.folder().join("outside");
        fs::rename(&place, &outside).unwrap();
        symlink(&outside, &place).unwrap();
        let before = disk::files(&outside);
        // It starts without what is behind the link, or says why it does not start.
        let file = daemon.folder().join("engram.toml");
        let mut process = common::process::Process::start(
            "a daemon with a planted link",
            &[
                "serve",
                "--config",
                file.to_str().unwrap(),
                "--announce",
                daemon.folder().join("linked.json").to_str().unwrap(),
            ],
            &daemon.folder().join("linked.log"),
        );
        let started = wait_for("a start or an end", || {
            let bytes = fs::read(daemon.folder().join("linked.json")).ok();
            match bytes.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok()) {
                Some(_) => Some(true),
                None => (!process.alive()).then_some(false),
            }
        });
        // One that cannot read what is there stays alive and unready.
        let rest = common::http::Place::Unix(daemon.rest_socket());
        let ready = started
            && wait_for("ready, or not to be", || {
                let answer = rest.get("/readyz");
                let hopeless = answer.text().contains("cannot be read");
                (answer.status == 200 || hopeless).then_some(answer.status == 200)
            });
        if ready {
            let mut worker = Worker::attach(&daemon);
            let more = prompt(2, 300);
            worker.turn("d", &more, 256);
            let body = json!({ "conversation_id": "d" });
            let answer = rest.post("/save_snapshot", &body);
            assert!(
                answer.status == 200 || answer.json()["error"]["type"].is_string(),
                "{name}"
            );
            assert!(process.alive(), "{name}: {}", process.log());
        } else {
            assert!(
                process.log().contains("Error") || process.log().contains("ERROR"),
                "{name}: {}",
                process.log()
            );
        }
        assert_eq!(
            disk::files(&outside),
            before,
            "{name}: something outside was touched"
        );
    }
}

fn folder_in(folder: &Path) -> PathBuf {
    let mut entries = fs::read_dir(folder).unwrap();
    entries.next().unwrap().unwrap().path()
}

#[test]
fn a_directory_of_another_format_or_of_somebody_else_is_left_alone() {
    let mut daemon = start();
    let mut worker = Worker::attach(&daemon);
    let tokens = prompt(1, 300);
    keep(&daemon, &mut worker, "c", &tokens, 256);
    daemon.kill();
    let config = daemon.folder().join("engram.toml");
    let serve = ["serve", "--config", config.to_str().unwrap()];
    let format = daemon.data().join("format.json");
    let good = fs::read(&format).unwrap();
    let versions = [
        reseal(&good, |json| {
            drop(json.insert("format_version".into(), json!(2)))
        }),
        b"{}".to_vec(),
        Vec::new(),
        good[..good.len() - 4].to_vec(),
    ];
    for bytes in versions {
        fs::write(&format, &bytes).unwrap();
        let before = disk::files(&daemon.data().join("models"));
        let (code, _, error) = common::process::run(&serve);
        assert_eq!(code, 1, "{error}");
        assert!(error.contains("format.json"), "{error}");
        assert_eq!(disk::files(&daemon.data().join("models")), before);
    }
    fs::write(&format, good).unwrap();
    daemon.restart();
    let mut worker = Worker::attach(&daemon);
    assert_eq!(worker.restore(&tokens).unwrap().boundary, 256);
    // A folder with other things in it is not taken over.
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("letter.txt"), "dear").unwrap();
    let path = other.path().to_str().unwrap().to_owned();
    let folder = tempfile::tempdir().unwrap();
    let text = common::daemon::config(folder.path(), &[("store.disk.path", path.into())]);
    let config = folder.path().join("engram.toml");
    fs::write(&config, text).unwrap();
    let (code, _, error) = common::process::run(&["serve", "--config", config.to_str().unwrap()]);
    assert_eq!(code, 1, "{error}");
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 1);
}

#[test]
fn hostile_names_of_conversations_stay_names() {
    let mut daemon = start();
    let mut worker = Worker::attach(&daemon);
    let long = "x".repeat(300);
    let names = [
        "../x",
        "../../../../tmp/engram-was-here",
        "/abs",
        "/etc/passwd",
        "a/../b",
        ".",
        "..",
        "a\0b",
        "a\nb",
        "\u{1b}[2J",
        "Grüße 🦀",
        "\u{202e}live",
        "con",
        "a b'\"\\<>&",
        "%2e%2e%2f",
        &long,
        "-rf",
        "refs",
    ];
    let outside = |daemon: &Daemon| {
        let mut all = disk::files(daemon.folder());
        all.retain(|path, _| !path.starts_with(daemon.data()));
        all.into_keys().collect::<Vec<_>>()
    };
    let before = outside(&daemon);
    for (name, i) in names.iter().zip(0..) {
        let tokens = prompt(i + 1, 300);
        worker.turn(name, &tokens, 256);
        // The surface refuses what is no name by its rules, and saves the others.
        let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": name }));
        let refused = (answer.status, &*answer.kind()) == (400, "invalid_request");
        assert!(
            answer.status == 200 || refused,
            "{name:?}: {}",
            answer.text()
        );
        // Whatever it is called, it can be found by its id and kept.
        let list = daemon.get("/v1/snapshots?limit=1").json();
        let id = &list["snapshots"][0]["snapshot_id"];
        let answer = daemon.post("/save_snapshot", &json!({ "snapshot_id": id }));
        assert_eq!(answer.status, 200, "{name:?}: {}", answer.text());
    }
    assert_eq!(outside(&daemon), before);
    assert!(!Path::new("/tmp/engram-was-here").exists());
    for path in disk::files(&daemon.data()).into_keys() {
        let name = path.file_name().unwrap().to_str().unwrap();
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        assert!(name.chars().all(plain), "{name:?} came from a client");
    }
    daemon.restart();
    let mut worker = Worker::attach(&daemon);
    for (name, i) in names.iter().zip(0..) {
        let tokens = prompt(i + 1, 300);
        assert_eq!(worker.restore(&tokens).unwrap().boundary, 256, "{name:?}");
    }
    worker.heard_all();
    let conversations = daemon.get("/v1/conversations").json();
    assert_eq!(conversations["total"], names.len(), "{conversations}");
    assert_eq!(disk::quarantine(&daemon.data()), []);
}
