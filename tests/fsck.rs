//! `engram fsck` on what a real daemon left: what it prints and how it exits.

mod common;

use std::fs;
use std::path::Path;

use common::daemon::Daemon;
use common::disk::{files, objects};
use common::process::run;
use common::scene::{keep, start};
use common::worker::{Worker, prompt};
use serde_json::Value;

fn fsck(data: &Path, flags: &[&str]) -> (i32, String, String) {
    let data = data.to_str().unwrap();
    run(&[&["fsck", data], flags].concat())
}

fn json(data: &Path, flags: &[&str]) -> (i32, Value) {
    let (code, out, error) = fsck(data, &[&["--json"], flags].concat());
    let json: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"));
    assert_eq!(json["exit_code"], code);
    (code, json)
}

#[test]
fn it_checks_and_repairs_what_a_daemon_left() {
    let mut daemon = start();
    let mut worker = Worker::attach(&daemon);
    let tokens = |seed| prompt(seed, 1500);
    for seed in 1..=3 {
        let name = format!("c{seed}");
        keep(&daemon, &mut worker, &name, &tokens(seed)[..700], 600);
        keep(&daemon, &mut worker, &name, &tokens(seed), 1500);
    }
    let data = daemon.data();
    // In use.
    for flags in [&[][..], &["--repair"]] {
        let (code, out, error) = fsck(&data, flags);
        assert_eq!((code, out.as_str()), (8, ""), "{error}");
        let pid = daemon.process().pid();
        assert!(error.contains(&format!("process {pid} on ")), "{error}");
    }
    drop(worker);
    daemon.kill();
    let before = files(&data);
    let (code, report) = json(&data, &[]);
    assert_eq!((code, &report["snapshots"]), (0, &6.into()), "{report}");
    assert_eq!(report["conversations"], 3);
    assert!(report["verified_bytes"].as_u64().unwrap() > 0);
    let (code, out, error) = fsck(&data, &["--fast"]);
    assert_eq!(code, 0, "{out}{error}");
    assert!(out.contains("6 snapshots"), "{out}");
    assert_eq!(files(&data), before, "nothing was changed");
    // A flipped bit of a state.
    let state = objects(&data)
        .into_iter()
        .find(|object| object.kind == "state" && object.range == "1500-1500")
        .unwrap();
    let mut bytes = fs::read(&state.path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&state.path, bytes).unwrap();
    assert_eq!(fsck(&data, &["--fast"]).0, 0, "it reads no chunks");
    let (code, out, _) = fsck(&data, &[]);
    assert_eq!(code, 4, "{out}");
    assert!(out.contains(&state.id) && out.contains("checksum"), "{out}");
    let (code, report) = json(&data, &["--repair"]);
    assert_eq!((code, &report["damage_left"]), (1, &0.into()), "{report}");
    let (code, report) = json(&data, &["--repair"]);
    assert_eq!((code, &report["repaired"]), (0, &0.into()), "{report}");
    assert_eq!(
        (&report["snapshots"], &report["findings"]),
        (&5.into(), &Value::Array(vec![]))
    );
    // The daemon goes on with what is left.
    daemon.restart();
    let mut worker = Worker::attach(&daemon);
    let mut boundaries: Vec<u32> = (1..=3)
        .map(|seed| worker.restore(&tokens(seed)).unwrap().boundary)
        .collect();
    boundaries.sort_unstable();
    assert_eq!(boundaries, [600, 1500, 1500]);
    assert_eq!(daemon.get("/readyz").status, 200);
}

#[test]
fn the_catalog_and_the_token_log_are_checked_too() {
    let mut daemon = Daemon::start(&[
        ("service.write_after", "1h".into()),
        ("service.catalog_from", 0.into()),
    ]);
    let mut worker = Worker::attach(&daemon);
    for seed in 1..=3 {
        keep(
            &daemon,
            &mut worker,
            &format!("c{seed}"),
            &prompt(seed, 900),
            800,
        );
    }
    drop(worker);
    let data = daemon.data();
    daemon.kill();
    let (code, report) = json(&data, &[]);
    assert_eq!((code, &report["catalogued"]), (0, &3.into()), "{report}");
    daemon.restart();
    assert_eq!(daemon.metric("engram_catalog_used"), 1.0);
    assert!(daemon.stop().success());
    let names = || {
        let names = files(&data).into_keys();
        names.filter(|path| path.parent() == Some(&data))
    };
    let log = names().find(|path| path.to_str().unwrap().contains("tokens."));
    let log = log.unwrap();
    let flipped = [
        (data.join("catalog.log"), 100, "checksum"),
        (data.join("catalog.log"), 0, "checksum"),
        (data.join("catalog.json"), 30, ""),
        (log, 3000, "checksum"),
    ];
    for (path, at, reason) in flipped {
        let before: Vec<_> = names()
            .map(|path| (fs::read(&path).unwrap(), path))
            .collect();
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 1;
        fs::write(&path, bytes).unwrap();
        let (code, report) = json(&data, &[]);
        assert_eq!(code, 4, "{path:?}: {report}");
        let finding = &report["findings"][0];
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(
            (&finding["class"], &finding["path"]),
            (&"damage".into(), &name.into())
        );
        assert!(
            reason.is_empty() || finding["reason"] == reason,
            "{finding}"
        );
        // Repaired, nothing is lost but time: it is made again.
        let (code, report) = json(&data, &["--repair"]);
        assert_eq!((code, &report["damage_left"]), (1, &0.into()), "{report}");
        assert!(names().all(|path| !path.to_str().unwrap().contains("catalog")));
        let (code, report) = json(&data, &[]);
        assert_eq!((code, &report["snapshots"]), (0, &3.into()), "{report}");
        for (bytes, path) in before {
            fs::write(path, bytes).unwrap();
        }
    }
    fs::write(data.join("tokens.0123456789abcdef.log"), "x").unwrap();
    let (code, report) = json(&data, &[]);
    assert_eq!(
        report["findings"][0]["class"], "leftover",
        "{code}: {report}"
    );
    daemon.restart();
    assert_eq!(daemon.metric("engram_catalog_used"), 1.0);
    assert!(!data.join("tokens.0123456789abcdef.log").exists());
    let mut worker = Worker::attach(&daemon);
    assert_eq!(worker.restore(&prompt(2, 900)).unwrap().boundary, 800);
}

#[test]
fn what_is_no_data_directory_exits_8_and_wrong_usage_2() {
    let folder = tempfile::tempdir().unwrap();
    let (code, out, error) = fsck(&folder.path().join("none"), &[]);
    assert_eq!((code, out.as_str()), (8, ""), "{error}");
    fs::write(folder.path().join("mine"), "x").unwrap();
    let (code, _, error) = fsck(folder.path(), &["--repair"]);
    assert_eq!(code, 8);
    assert!(error.contains("not a data directory"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    for wrong in [
        &["fsck"][..],
        &["fsck", "x", "--threads", "0"],
        &["fsck", "x", "--mend"],
    ] {
        assert_eq!(run(wrong).0, 2, "{wrong:?}");
    }
    let (code, out, _) = run(&["fsck", "--help"]);
    assert_eq!(code, 0);
    assert!(
        out.contains("Exit codes:") && out.contains("--repair"),
        "{out}"
    );
}
