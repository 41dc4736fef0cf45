//! How `engram serve` starts, refuses to start, and stops.

mod common;

use common::daemon::{Daemon, Knobs};
use common::process;

#[test]
fn a_bad_configuration_exits_64_before_anything_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engram.toml");
    let data = folder.path().join("data");
    let check = |text: String| {
        std::fs::write(&file, text).unwrap();
        let (code, _, error) = process::run(&["serve", "--config", file.to_str().unwrap()]);
        assert!(!data.exists(), "something was made");
        (code, error)
    };
    let config = |knobs: Knobs| common::daemon::config(folder.path(), knobs);
    let (code, error) = check(config(&[("rest.listen", "0.0.0.0:0".into())]));
    assert_eq!(code, 64);
    assert!(error.contains("rest.token_file"), "{error}");
    let (code, error) = check(config(&[("store.ram", "512 TiB".into())]));
    assert_eq!(code, 64);
    assert!(
        error.contains("store.ram: 512") && error.contains("memory"),
        "{error}"
    );
    let (code, error) = check(config(&[("rest.listn", "127.0.0.1:0".into())]));
    assert_eq!(code, 64);
    assert!(
        error.contains("unknown field `listn`") && error.contains("`listen`"),
        "{error}"
    );
    let (code, error) = check(config(&[
        ("rest.token_file", "/nowhere/token".into()),
        ("rest.max_requests", 0.into()),
        ("service.ram_low", 2.0.into()),
        ("store.disk.path", "data".into()),
    ]));
    assert_eq!(code, 64);
    for name in [
        "rest.token_file",
        "rest.max_requests",
        "service.ram",
        "store.disk.path",
    ] {
        assert!(error.contains(name), "{name}: {error}");
    }
    let same: toml::Value = folder.path().join("s").to_str().unwrap().into();
    let (code, error) = check(config(&[
        ("grpc.socket", same.clone()),
        ("service.fd_socket", same),
    ]));
    assert_eq!(code, 64);
    let both = ["grpc.socket", "service.fd_socket"];
    assert!(both.iter().all(|key| error.contains(key)), "{error}");
    assert_eq!(check("\0".into()).0, 64);
    let (code, _, error) = process::run(&["serve", "--config", "/nowhere/engram.toml"]);
    assert_eq!(code, 64);
    assert!(error.contains("/nowhere/engram.toml"), "{error}");
}

#[test]
fn check_says_that_a_configuration_is_good_and_makes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engram.toml");
    std::fs::write(&file, common::daemon::config(folder.path(), &[])).unwrap();
    let (code, _, error) = process::run(&["serve", "--config", file.to_str().unwrap(), "--check"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_signal_ends_it_cleanly_and_it_starts_again() {
    let mut daemon = Daemon::start(&[]);
    assert!(daemon.rest_socket().exists());
    assert!(daemon.stop().success(), "{}", daemon.process().log());
    assert!(!daemon.rest_socket().exists(), "a socket was left behind");
    daemon.restart();
    // A dead daemon leaves its sockets; the next one takes their place.
    daemon.kill();
    assert!(daemon.rest_socket().exists());
    daemon.restart();
    assert_eq!(daemon.get("/healthz").status, 200);
}

#[test]
fn two_daemons_do_not_share_sockets_or_a_disk() {
    let daemon = Daemon::start(&[]);
    let file = daemon.folder().join("engram.toml");
    let args = ["serve", "--config", file.to_str().unwrap()];
    let (code, _, error) = process::run(&args);
    assert_eq!(code, 1, "{error}");
    // The same disk under other sockets.
    let other = tempfile::tempdir().unwrap();
    let data = daemon.data().to_str().unwrap().to_owned();
    let config = common::daemon::config(other.path(), &[("store.disk.path", data.into())]);
    let file = other.path().join("engram.toml");
    std::fs::write(&file, config).unwrap();
    let (code, _, error) = process::run(&["serve", "--config", file.to_str().unwrap()]);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("is in use by process"), "{error}");
    assert!(
        error.contains(", since 2") && error.contains(" ago)"),
        "{error}"
    );
    assert_eq!(daemon.get("/healthz").status, 200);
}

#[test]
fn a_damaged_format_file_says_what_to_do_and_that_helps() {
    let mut daemon = Daemon::start(&[]);
    daemon.kill();
    let format = daemon.data().join("format.json");
    std::fs::write(&format, "{").unwrap();
    let file = daemon.folder().join("engram.toml");
    let (code, _, error) = process::run(&["serve", "--config", file.to_str().unwrap()]);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("copy format.json from"), "{error}");
    let other = Daemon::start(&[]);
    std::fs::copy(other.data().join("format.json"), &format).unwrap();
    daemon.restart();
}

#[test]
fn a_stop_is_told_as_the_reason_to_those_attached() {
    let mut daemon = Daemon::start(&[]);
    let _worker = common::worker::Worker::attach(&daemon);
    assert!(daemon.stop().success());
    let log = daemon.process().log();
    let why = "Session over: the daemon ends the session (shutdown)";
    assert!(log.contains(why) && !log.contains("silent_peer"), "{log}");
}
