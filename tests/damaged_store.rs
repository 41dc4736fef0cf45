//! Files on disk that are cut, flipped, missing or planted: each costs what needs it and nothing
//! else, is put aside and counted, and the daemon lives.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::disk::{self, manifests_of, object_path, reseal};
use common::scene::{keep, start};
use common::wait_for;
use common::worker::{Names, Worker, prompt};
use engram::proto::channel::layout::Status;
use serde_json::{Value, json};

/// Tokens of a conversation: two blocks.
const TOKENS: u32 = 1500;

/// What a conversation has on disk.
struct Files {
    manifest: PathBuf,
    state: PathBuf,
    kv: PathBuf,
    /// The state of another conversation.
    other: PathBuf,
}

/// How the damage shows when the conversation is asked for after a restart.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Seen {
    /// Already at the start: it is not known.
    AtStart,
    /// When it is read: the daemon thought that it had it.
    WhenRead,
}

/// A name, what is done, how it shows, and the reasons under which files go to quarantine.
type Case = (&'static str, fn(&Files), Seen, &'static [&'static str]);

const CASES: &[Case] = &[
    (
        "half a state",
        |it| cut(&it.state, |len| len / 2),
        Seen::AtStart,
        &["length", "incomplete"],
    ),
    (
        "half a KV",
        |it| cut(&it.kv, |len| len / 2),
        Seen::AtStart,
        &["length", "incomplete"],
    ),
    (
        "a state less a byte",
        |it| cut(&it.state, |len| len - 1),
        Seen::AtStart,
        &["length", "incomplete"],
    ),
    (
        "a KV less a byte",
        |it| cut(&it.kv, |len| len - 1),
        Seen::AtStart,
        &["length", "incomplete"],
    ),
    (
        "an empty state",
        |it| cut(&it.state, |_| 0),
        Seen::AtStart,
        &["length", "incomplete"],
    ),
    (
        "an empty KV",
        |it| cut(&it.kv, |_| 0),
        Seen::AtStart,
        &["length", "incomplete"],
    ),
    (
        "no state",
        |it| fs::remove_file(&it.state).unwrap(),
        Seen::AtStart,
        &["incomplete"],
    ),
    (
        "no KV",
        |it| fs::remove_file(&it.kv).unwrap(),
        Seen::AtStart,
        &["incomplete"],
    ),
    (
        "a bit of a state",
        |it| flip(&it.state, 4096 + 100),
        Seen::WhenRead,
        &["checksum"],
    ),
    (
        "a bit of a KV",
        |it| flip(&it.kv, 4096 * 30),
        Seen::WhenRead,
        &["checksum"],
    ),
    (
        "a bit of a header",
        |it| flip(&it.state, 200),
        Seen::WhenRead,
        &["header"],
    ),
    (
        "a bit of a length",
        |it| flip(&it.state, 1),
        Seen::WhenRead,
        &["length"],
    ),
    (
        "another's state",
        |it| replace(&it.state, &it.other),
        Seen::WhenRead,
        &["mismatch"],
    ),
    (
        "a link as a state",
        |it| relink(&it.state, &it.other),
        Seen::AtStart,
        &["not_a_file", "incomplete"],
    ),
    (
        "a link as a KV",
        |it| relink(&it.kv, Path::new("/etc/passwd")),
        Seen::AtStart,
        &["not_a_file", "incomplete"],
    ),
    (
        "half a manifest",
        |it| cut(&it.manifest, |len| len / 2),
        Seen::AtStart,
        &["checksum"],
    ),
    (
        "an empty manifest",
        |it| cut(&it.manifest, |_| 0),
        Seen::AtStart,
        &["length"],
    ),
    (
        "a bit of a manifest",
        |it| flip(&it.manifest, 60),
        Seen::AtStart,
        &["checksum"],
    ),
    (
        "no manifest",
        |it| fs::remove_file(&it.manifest).unwrap(),
        Seen::AtStart,
        &[],
    ),
    (
        "a link as a manifest",
        |it| relink(&it.manifest, Path::new("/etc/passwd")),
        Seen::AtStart,
        &["not_a_file"],
    ),
    (
        "an unknown field",
        |it| change(&it.manifest, "surprise", json!(1)),
        Seen::AtStart,
        &["unknown_field"],
    ),
    (
        "an unknown version",
        |it| change(&it.manifest, "format_version", json!(2)),
        Seen::AtStart,
        &["version"],
    ),
    (
        "no version",
        |it| change(&it.manifest, "format_version", Value::Null),
        Seen::AtStart,
        &["malformed"],
    ),
    (
        "a hole in the KV",
        |it| change(&it.manifest, "kv", json!([])),
        Seen::AtStart,
        &[],
    ),
    (
        "another boundary",
        |it| change(&it.manifest, "boundary", json!(1)),
        Seen::AtStart,
        &["invalid"],
    ),
    (
        "shards without end",
        |it| change(&it.manifest, "shards", json!(4_000_000_000_u32)),
        Seen::AtStart,
        &["invalid"],
    ),
    (
        "its own parent",
        |it| {
            let own = it
                .manifest
                .file_stem()
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            change(&it.manifest, "parent", json!(own));
        },
        Seen::AtStart,
        &["invalid"],
    ),
    (
        "another's name",
        |it| {
            let name = "00000000-0000-7000-8000-000000000000.json";
            fs::rename(&it.manifest, it.manifest.with_file_name(name)).unwrap();
        },
        Seen::AtStart,
        &["mismatch"],
    ),
    (
        "a manifest of nonsense",
        |it| fs::write(&it.manifest, [0xff; 4096]).unwrap(),
        Seen::AtStart,
        &["checksum"],
    ),
    (
        "JSON without bottom",
        |it| {
            fs::write(&it.manifest, "[".repeat(1 << 20)).unwrap();
        },
        Seen::AtStart,
        &["checksum"],
    ),
];

fn cut(path: &Path, len: fn(u64) -> u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(len(file.metadata().unwrap().len())).unwrap();
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

fn replace(path: &Path, by: &Path) {
    fs::copy(by, path).unwrap();
}

fn relink(path: &Path, to: &Path) {
    fs::remove_file(path).unwrap();
    symlink(to, path).unwrap();
}

/// Changes one field, and makes the checksum right again. Null removes it.
fn change(path: &Path, field: &str, value: Value) {
    let bytes = reseal(&fs::read(path).unwrap(), |json| {
        if value.is_null() {
            json.remove(field);
        } else {
            json.insert(field.to_owned(), value);
        }
    });
    fs::write(path, bytes).unwrap();
}

/// What the newest snapshot of a conversation has on disk.
fn files(data: &Path, name: &str, other: &str) -> Files {
    let newest = |name| manifests_of(data, name).pop().unwrap();
    let (manifest, json) = newest(name);
    let kv = json["kv"].as_array().unwrap().last().unwrap();
    Files {
        state: object_path(data, &json["state"]["object"]),
        kv: object_path(data, &kv["object"]),
        other: object_path(data, &newest(other).1["state"]["object"]),
        manifest,
    }
}

#[test]
fn damage_costs_what_needs_it_and_nothing_else() {
    let mut daemon = start();
    let mut worker = Worker::attach(&daemon);
    let seed = |case: usize| case as u32 + 10;
    // Of each conversation only the second turn is damaged.
    for ((name, ..), case) in CASES.iter().zip(0..) {
        let tokens = prompt(seed(case), TOKENS as usize);
        keep(&daemon, &mut worker, name, &tokens[..700], 600);
        keep(&daemon, &mut worker, name, &tokens, TOKENS);
    }
    let sound = prompt(1, TOKENS as usize);
    keep(&daemon, &mut worker, "sound", &sound, TOKENS);
    daemon.kill();
    let all = CASES
        .iter()
        .map(|(name, ..)| files(&daemon.data(), name, "sound"));
    let all: Vec<Files> = all.collect();
    for ((_, damage, ..), files) in CASES.iter().zip(&all) {
        damage(files);
    }
    let passwd = fs::read("/etc/passwd").unwrap();
    daemon.restart();
    let mut worker = Worker::attach(&daemon);
    for ((name, _, seen, _), case) in CASES.iter().zip(0..) {
        let tokens = prompt(seed(case), TOKENS as usize);
        let mut first = worker.try_restore(&Names::default(), &tokens);
        if *seen == Seen::WhenRead {
            assert_eq!(first, Err(Status::Lost), "{name}");
            // Asked for again it is a miss of what is damaged.
            first = worker.try_restore(&Names::default(), &tokens);
        }
        let boundary = first.map(|got| got.map(|got| got.boundary));
        assert_eq!(boundary, Ok(Some(600)), "{name}: the first turn is whole");
        // By name: the turn is known, and its state is not.
        let turn = json!({ "conversation_id": name, "turn_number": 2 });
        let answer = daemon.post("/restore_snapshot", &turn);
        let typed = match answer.status {
            // What is left of it: the state of the turn before.
            200 => answer.json()["boundary"] == 600,
            404 | 409 => ["not_found", "no_state"].contains(&&*answer.kind()),
            _ => false,
        };
        assert!(typed, "{name}: {} {}", answer.status, answer.text());
    }
    assert_eq!(worker.restore(&sound).unwrap().boundary, TOKENS);
    assert_eq!(fs::read("/etc/passwd").unwrap(), passwd);
    // Put aside and counted.
    let aside = disk::quarantine(&daemon.data());
    for reason in REASONS {
        let expected: usize = CASES
            .iter()
            .map(|(.., reasons)| reasons.iter().filter(|it| it == &reason).count())
            .sum();
        let found = aside.iter().filter(|(_, other)| other == reason).count();
        assert_eq!(found, expected, "{reason}: {aside:?}");
        let metric = format!("engram_quarantined_files{{reason=\"{reason}\"}}");
        wait_for(&metric, || {
            (daemon.metric(&metric) == expected as f64).then_some(())
        });
    }
    assert_eq!(daemon.get("/readyz").status, 200);
    // The next start has nothing to complain about.
    daemon.restart();
    let again = disk::quarantine(&daemon.data());
    assert_eq!(again.len(), aside.len(), "found again");
    let mut worker = Worker::attach(&daemon);
    for case in 0..CASES.len() {
        let tokens = prompt(seed(case), TOKENS as usize);
        assert_eq!(worker.restore(&tokens).unwrap().boundary, 600);
    }
}

const REASONS: &[&str] = &[
    "length",
    "header",
    "checksum",
    "mismatch",
    "version",
    "unknown_field",
    "malformed",
    "invalid",
    "not_a_file",
    "incomplete",
];

#[test]
fn damage_under_a_running_daemon_is_found_when_it_is_read() {
    let mut daemon = start();
    let mut worker = Worker::attach(&daemon);
    let cases: Vec<&Case> = CASES.iter().take(14).collect();
    let name = |case: usize| format!("live {case}");
    let tokens = |case: usize| prompt(case as u32 + 10, TOKENS as usize);
    for case in 0..cases.len() {
        keep(&daemon, &mut worker, &name(case), &tokens(case), TOKENS);
    }
    let sound = prompt(1, TOKENS as usize);
    keep(&daemon, &mut worker, "sound", &sound, TOKENS);
    // Nothing is in RAM after this.
    daemon.restart();
    let mut worker = Worker::attach(&daemon);
    let all = (0..cases.len()).map(|case| files(&daemon.data(), &name(case), "sound"));
    let all: Vec<Files> = all.collect();
    for ((_, damage, ..), files) in cases.iter().zip(&all) {
        damage(files);
    }
    for (case, (what, ..)) in cases.iter().enumerate() {
        if case.is_multiple_of(2) {
            let got = worker.try_restore(&Names::default(), &tokens(case));
            assert_eq!(got, Err(Status::Lost), "{what}");
        } else {
            let body = json!({ "conversation_id": name(case) });
            let answer = daemon.post("/restore_snapshot", &body);
            assert_eq!(
                (answer.status, &*answer.kind()),
                (500, "data"),
                "{what}: {}",
                answer.text()
            );
        }
        assert_eq!(worker.restore(&tokens(case)), None, "{what}");
        let answer = daemon.post(
            "/restore_snapshot",
            &json!({ "conversation_id": name(case) }),
        );
        assert!(
            [404, 409].contains(&answer.status),
            "{what}: {}",
            answer.text()
        );
    }
    assert_eq!(worker.restore(&sound).unwrap().boundary, TOKENS);
    let lost = daemon.metric(r#"engram_errors_total{type="lost_snapshot"}"#);
    assert_eq!(lost, cases.len() as f64);
    // What was lost can be saved again, and then it is there.
    let case = 0;
    keep(&daemon, &mut worker, &name(case), &tokens(case), TOKENS);
    daemon.restart();
    let mut worker = Worker::attach(&daemon);
    assert_eq!(worker.restore(&tokens(case)).unwrap().boundary, TOKENS);
    assert_eq!(daemon.get("/readyz").status, 200);
}

type Damage = fn(&Path);

#[test]
fn damaged_names_cost_names_only() {
    let mut daemon = start();
    let mut worker = Worker::attach(&daemon);
    let tokens = |i: u32| prompt(i + 1, 300);
    let damages: [(&str, Damage); 6] = [
        ("cut", |path| cut(path, |len| len / 2)),
        ("empty", |path| cut(path, |_| 0)),
        ("flipped", |path| flip(path, 30)),
        ("linked", |path| relink(path, Path::new("/etc/passwd"))),
        ("a field", |path| change(path, "surprise", json!(1))),
        ("a version", |path| change(path, "format_version", json!(9))),
    ];
    for ((name, _), i) in damages.iter().zip(0..) {
        keep(&daemon, &mut worker, name, &tokens(i), 256);
    }
    keep(&daemon, &mut worker, "sound", &tokens(99), 256);
    daemon.kill();
    for path in disk::files(&daemon.data().join("refs")).into_keys() {
        let text = fs::read_to_string(&path).unwrap();
        let named = damages
            .iter()
            .find(|(name, _)| text.contains(&format!("\"{name}\"")));
        if let Some((_, damage)) = named {
            damage(&path);
        }
    }
    daemon.restart();
    assert_eq!(disk::quarantine(&daemon.data()).len(), damages.len());
    let mut worker = Worker::attach(&daemon);
    for ((name, _), i) in damages.iter().zip(0..) {
        assert_eq!(worker.restore(&tokens(i)).unwrap().boundary, 256, "{name}");
    }
    let list = daemon.post("/list_snapshots", &json!({ "conversation_id": "sound" }));
    assert_eq!(list.json()["total"], 1);
    assert_eq!(
        daemon.get("/v1/snapshots").json()["total"],
        damages.len() + 1
    );
}
