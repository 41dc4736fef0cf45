//! `engram export` and `engram import` between real daemons: what comes out of one goes into another,
//! bit for bit, and whatever is wrong with it is refused.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::daemon::Daemon;
use common::engine::Engine;
use common::process::run;
use common::scene::{keep, start};
use common::worker::{Model, Worker, prompt};
use serde_json::{Value, json};

const TOKENS: u32 = 1500;

/// A pair in a folder of its own.
struct Pair {
    folder: tempfile::TempDir,
}

impl Pair {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder }
    }

    fn name(&self) -> String {
        self.folder.path().join("chat").to_str().unwrap().to_owned()
    }

    fn file(&self, end: &str) -> PathBuf {
        self.folder.path().join(format!("chat.{end}"))
    }
}

fn ok(args: &[&str]) -> Value {
    let args = [args, &["--json"]].concat();
    let (code, out, error) = run(&args);
    assert_eq!(code, 0, "{args:?}: {out}{error}");
    serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"))
}

fn refused(code: i32, said: &str, args: &[&str]) {
    let (got, out, error) = run(args);
    assert_eq!(got, code, "{args:?}: {out}{error}");
    assert!(error.contains(said), "{args:?}: {error}");
}

fn export(daemon: &Daemon, pair: &Pair, what: &[&str]) -> Value {
    let (url, name) = (daemon.url(), pair.name());
    ok(&[&["export", "--url", &url, "--out", &name], what].concat())
}

fn import(daemon: &Daemon, pair: &Pair, more: &[&str]) -> Value {
    let (url, name) = (daemon.url(), pair.name());
    ok(&[&["import", &name, "--url", &url], more].concat())
}

fn tokens(seed: u32) -> Vec<u32> {
    prompt(seed, TOKENS as usize)
}

/// A daemon that keeps two turns of a conversation and a branch, and the snapshot of the last.
fn told(model: &Model) -> (Daemon, Worker, String) {
    let daemon = start();
    let mut worker = Worker::attach_as(&daemon, model);
    let tokens = tokens(1);
    keep(&daemon, &mut worker, "chat", &tokens[..700], 700);
    keep(&daemon, &mut worker, "chat", &tokens, TOKENS);
    let branch = json!({ "conversation_id": "chat", "branch_name": "kept" });
    let answer = daemon.post("/save_snapshot", &branch);
    let id = answer.json()["snapshot_id"].as_str().unwrap().to_owned();
    (daemon, worker, id)
}

/// Another daemon and its worker, of the same model.
fn other(model: &Model) -> (Daemon, Worker) {
    let daemon = start();
    let worker = Worker::attach_as(&daemon, model);
    (daemon, worker)
}

#[test]
fn what_one_daemon_exports_another_restores_bit_for_bit() {
    let (model, pair) = (Model::default(), Pair::new());
    let (daemon, worker, id) = told(&model);
    let said = export(&daemon, &pair, &[&id]);
    assert_eq!(said["snapshot_id"], id);
    assert_eq!(said["boundary"], TOKENS);
    assert_eq!(said["names"]["turn"], 2);
    assert_eq!(said["names"]["branches"], json!(["kept"]));
    let bytes = fs::metadata(pair.file("safetensors")).unwrap().len();
    assert_eq!(said["file_bytes"], bytes);
    assert_eq!(fs::read_dir(pair.folder.path()).unwrap().count(), 2);
    // It is not written over by accident.
    let (url, name) = (daemon.url(), pair.name());
    refused(
        1,
        "--force",
        &["export", &id, "--url", &url, "--out", &name],
    );
    export(&daemon, &pair, &["chat", "--turn", "2", "--force"]);
    drop((daemon, worker));

    let (mut daemon, mut worker) = other(&model);
    assert_eq!(worker.restore(&tokens(1)), None);
    let said = import(&daemon, &pair, &[]);
    assert_eq!(said["already_here"], false, "{said}");
    assert_eq!(said["durable"], true, "{said}");
    assert_eq!(said["conversation_id"], "chat");
    assert_eq!(said["exported_as"], id);
    let got = worker.restore(&tokens(1)).unwrap();
    assert_eq!(got.boundary, TOKENS);
    // Again: nothing is written.
    let written = daemon.metric("engram_written_bytes_total");
    let again = import(&daemon, &pair, &[]);
    assert_eq!(again["already_here"], true, "{again}");
    assert_eq!(again["snapshot_id"], said["snapshot_id"]);
    assert_eq!(daemon.metric("engram_written_bytes_total"), written);
    assert_eq!(daemon.get("/v1/status").json()["snapshots"], 1);
    // It is durable, with its names.
    drop(worker);
    daemon.kill();
    daemon.restart();
    let list = daemon.post("/list_snapshots", &json!({ "conversation_id": "chat" }));
    let list = list.json();
    let rows = list["snapshots"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "{list}");
    assert_eq!(
        (&rows[0]["turn_number"], &rows[1]["branch_name"]),
        (&2.into(), &"kept".into())
    );
    let mut worker = Worker::attach_as(&daemon, &model);
    assert_eq!(worker.restore(&tokens(1)).unwrap().boundary, TOKENS);
    drop(worker);
    daemon.stop();
    let (code, out, _) = run(&["fsck", daemon.data().to_str().unwrap()]);
    assert_eq!(code, 0, "{out}");
}

#[test]
fn a_conversation_goes_on_where_it_was_imported_as_if_it_had_begun_there() {
    let pair = Pair::new();
    let first: Vec<u32> = prompt(3, 1536).iter().map(|token| token % 250).collect();
    let turn = |engine: &Engine, rid: &str, prompt: &[u32]| {
        let reply = engine.generate("chat", rid, prompt, 6);
        (reply.tokens, reply.cached)
    };
    // Nobody remembers anything here.
    let alone = Engine::alone(&[]);
    let (answer, _) = turn(&alone, "a", &first);
    let mut second = [&first[..], &answer].concat();
    second.extend(prompt(4, 300).iter().map(|token| token % 250));
    alone.flush();
    let (expected, _) = turn(&alone, "b", &second);
    drop(alone);

    let daemon = start();
    let engine = Engine::beside(&daemon, &[]);
    assert_eq!(turn(&engine, "a", &first).0, answer);
    engine.settled();
    let saved = daemon.post("/save_snapshot", &json!({ "conversation_id": "chat" }));
    assert_eq!(saved.status, 200, "{}", saved.text());
    export(&daemon, &pair, &["chat"]);
    let whole = json!({ "conversation_id": "chat", "whole": true });
    assert_eq!(daemon.post("/delete_snapshot", &whole).status, 200);
    drop((engine, daemon));

    let mut daemon = start();
    import(&daemon, &pair, &[]);
    daemon.restart();
    let engine = Engine::beside(&daemon, &[]);
    let (tokens, cached) = turn(&engine, "b", &second);
    assert!(cached >= 1024, "{cached} tokens were remembered");
    assert_eq!(tokens, expected);
    let list = daemon
        .post("/list_snapshots", &json!({ "conversation_id": "chat" }))
        .json();
    assert_eq!(list["snapshots"][0]["turn_number"], 1, "{list}");
}

#[test]
fn an_export_is_of_its_own_tokens_only_however_they_are_stored() {
    let (model, pair) = (Model::default(), Pair::new());
    let daemon = start();
    let mut worker = Worker::attach_as(&daemon, &model);
    // One object has the KV of all; the branch uses a part of it, and adds its own.
    keep(&daemon, &mut worker, "long", &tokens(1), TOKENS);
    let mut branch = tokens(1)[..1100].to_vec();
    branch.extend(prompt(9, 600));
    keep(&daemon, &mut worker, "branch", &branch, 1700);
    export(&daemon, &pair, &["branch"]);
    let (daemon, mut worker) = other(&model);
    import(&daemon, &pair, &[]);
    assert_eq!(worker.restore(&branch).unwrap().boundary, 1700);
    assert_eq!(
        worker.restore(&tokens(1)),
        None,
        "tokens of another branch came"
    );
}

#[test]
fn what_is_in_ram_alone_is_exported_and_the_store_of_a_stopped_daemon_is_read_and_written() {
    let (model, pair) = (Model::default(), Pair::new());
    let daemon = start();
    let mut worker = Worker::attach_as(&daemon, &model);
    worker.turn("chat", &tokens(1), TOKENS);
    let said = export(&daemon, &pair, &["chat"]);
    assert_eq!(daemon.metric("engram_written_bytes_total"), 0.0);
    drop((daemon, worker));
    // Into a folder that is not there yet.
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let data = data.to_str().unwrap();
    refused(
        1,
        "not a data directory",
        &["export", "chat", "--data", data],
    );
    let name = pair.name();
    let imported = ok(&["import", &name, "--data", data]);
    assert_eq!(imported["durable"], true, "{imported}");
    assert_eq!(run(&["fsck", data]).0, 0);
    // And out of it again: the same bytes.
    let second = Pair::new();
    let again = ok(&["export", "chat", "--data", data, "--out", &second.name()]);
    assert_eq!(again["boundary"], said["boundary"]);
    let tensors = |pair: &Pair| fs::read(pair.file("safetensors")).unwrap();
    let header = |bytes: &[u8]| 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (first, second) = (tensors(&pair), tensors(&second));
    assert!(first[header(&first)..] == second[header(&second)..]);
    // A daemon starts on it.
    let mut daemon = Daemon::start(&[("store.disk.path", data.into())]);
    let mut worker = Worker::attach_as(&daemon, &model);
    assert_eq!(worker.restore(&tokens(1)).unwrap().boundary, TOKENS);
    let pid = daemon.process().pid();
    let owner = format!("process {pid} on ");
    refused(1, &owner, &["import", &name, "--data", data]);
    refused(1, &owner, &["export", "chat", "--data", data]);
}

#[test]
fn another_model_is_refused_by_name_unless_it_is_asked_for() {
    let (model, pair) = (Model::default(), Pair::new());
    let (daemon, worker, id) = told(&model);
    export(&daemon, &pair, &[&id]);
    drop((daemon, worker));
    let strange = Model {
        weights: 7,
        ..Model::default()
    };
    let (daemon, worker) = other(&strange);
    let (url, name) = (daemon.url(), pair.name());
    let args = ["import", &name, "--url", &url];
    let (code, _, error) = run(&args);
    assert_eq!(code, 1, "{error}");
    assert!(
        error.contains("mismatch") && error.contains("--new-model"),
        "{error}"
    );
    assert_eq!(daemon.get("/v1/status").json()["snapshots"], 0);
    let said = import(&daemon, &pair, &["--new-model", "--conversation", "mine"]);
    assert_eq!(said["conversation_id"], "mine", "{said}");
    drop(worker);
    let mut worker = Worker::attach_as(&daemon, &model);
    assert_eq!(worker.restore(&tokens(1)).unwrap().boundary, TOKENS);
}

#[test]
fn names_that_others_have_stay_theirs() {
    let (model, pair) = (Model::default(), Pair::new());
    let (daemon, worker, id) = told(&model);
    export(&daemon, &pair, &[&id]);
    drop((daemon, worker));
    let (daemon, mut worker) = other(&model);
    keep(&daemon, &mut worker, "chat", &tokens(5)[..700], 700);
    keep(&daemon, &mut worker, "chat", &tokens(5), TOKENS);
    let said = import(&daemon, &pair, &[]);
    assert_eq!(said["names_taken"], json!(["turn 2"]), "{said}");
    assert_eq!(said["branch_name"], "kept");
    let turn = json!({ "conversation_id": "chat", "turn_number": 2 });
    let turn = daemon.post("/get_snapshot_info", &turn).json();
    assert_ne!(turn["metadata"]["snapshot_id"], said["snapshot_id"]);
}

#[test]
fn a_damaged_pair_is_refused_before_anything_is_taken_in() {
    let (model, pair) = (Model::default(), Pair::new());
    let (daemon, worker, id) = told(&model);
    export(&daemon, &pair, &[&id]);
    drop((daemon, worker));
    let name = pair.name();
    assert_eq!(run(&["import", &name, "--check"]).0, 0);
    let (daemon, mut worker) = other(&model);
    let url = daemon.url();
    let (tensors, description) = (pair.file("safetensors"), pair.file("json"));
    let whole = [fs::read(&tensors).unwrap(), fs::read(&description).unwrap()];
    type Change = fn(&mut Vec<u8>, &mut Vec<u8>);
    let cases: [(&str, Change); 5] = [
        ("does not have its checksum", |bytes, _| {
            *bytes.last_mut().unwrap() ^= 1
        }),
        ("end after", |bytes, _| bytes.truncate(5000)),
        ("more behind", |bytes, _| bytes.push(0)),
        ("checksum", |_, json| json[40] ^= 1),
        ("description", |_, json| json.clear()),
    ];
    let restore = |bytes: &[Vec<u8>; 2]| {
        fs::write(&tensors, &bytes[0]).unwrap();
        fs::write(&description, &bytes[1]).unwrap();
    };
    for (said, change) in cases {
        let mut bad = whole.clone();
        let [bytes, json] = &mut bad;
        change(bytes, json);
        restore(&bad);
        for more in [&["--url", url.as_str()][..], &["--check"]] {
            refused(4, said, &[&["import", name.as_str()], more].concat());
        }
        // The daemon trusts no client.
        let [bytes, json] = &bad;
        let body = [&(json.len() as u64).to_le_bytes()[..], json, bytes].concat();
        let kind = [("Content-Type", "application/octet-stream")];
        let place = daemon.place();
        let answer = place.request("POST", "/v1/import", &kind, &body).unwrap();
        assert_eq!(answer.status, 400, "{said}: {}", answer.text());
        assert_eq!(answer.json()["error"]["type"], "invalid_request");
    }
    assert_eq!(daemon.get("/v1/status").json()["snapshots"], 0);
    assert_eq!(worker.restore(&tokens(1)), None);
    wait_for_no_ram(&daemon);
    restore(&whole);
    import(&daemon, &pair, &[]);
    assert_eq!(worker.restore(&tokens(1)).unwrap().boundary, TOKENS);
}

fn wait_for_no_ram(daemon: &Daemon) {
    common::wait_for("the arena to be empty", || {
        (daemon.metric("engram_arena_used_bytes") == 0.0).then_some(())
    });
}

#[test]
fn what_is_damaged_on_disk_is_not_exported() {
    let (model, pair) = (Model::default(), Pair::new());
    let (mut daemon, worker, id) = told(&model);
    drop(worker);
    daemon.kill();
    let state = common::disk::objects(&daemon.data())
        .into_iter()
        .find(|object| object.kind == "state" && object.range == "1500-1500")
        .unwrap();
    let mut bytes = fs::read(&state.path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&state.path, bytes).unwrap();
    daemon.restart();
    let (url, name) = (daemon.url(), pair.name());
    refused(
        1,
        "broke off",
        &["export", &id, "--url", &url, "--out", &name],
    );
    assert_eq!(fs::read_dir(pair.folder.path()).unwrap().count(), 0);
}

#[test]
fn a_client_that_goes_away_holds_nothing() {
    let (model, pair) = (Model::default(), Pair::new());
    let (daemon, mut worker, id) = told(&model);
    export(&daemon, &pair, &[&id]);
    drop(daemon.place().request(
        "POST",
        "/v1/export",
        &[("Content-Type", "application/json")],
        b"{",
    ));
    // Half an import.
    let half = fs::read(pair.file("safetensors")).unwrap();
    let json = fs::read(pair.file("json")).unwrap();
    let head = (json.len() as u64).to_le_bytes();
    let body = [&head[..], &json, &half[..half.len() / 2]].concat();
    let kind = [("Content-Type", "application/octet-stream")];
    let answer = daemon
        .place()
        .request("POST", "/v1/import", &kind, &body)
        .unwrap();
    assert_eq!(answer.status, 400, "{}", answer.text());
    // All places are free again, and the snapshot can go.
    for _ in 0..6 {
        export(&daemon, &pair, &[&id, "--force"]);
    }
    let whole = json!({ "conversation_id": "chat", "whole": true });
    assert_eq!(daemon.post("/delete_snapshot", &whole).status, 200);
    assert_eq!(worker.restore(&tokens(1)), None);
    wait_for_no_ram(&daemon);
}

#[test]
fn help_teaches_and_wrong_usage_exits_2() {
    for command in ["export", "import"] {
        let (code, out, _) = run(&[command, "--help"]);
        assert_eq!(code, 0);
        assert!(
            out.contains("Exit codes:") && out.contains("--data"),
            "{out}"
        );
        assert_eq!(run(&[command]).0, 2);
    }
    assert_eq!(run(&["import", "x", "--check", "--data", "y"]).0, 2);
    refused(
        3,
        "no Engram daemon",
        &["export", "chat", "--url", "http://127.0.0.1:1"],
    );
    let missing = Path::new("/nonexistent/x");
    refused(1, "x.json", &["import", missing.to_str().unwrap()]);
}
