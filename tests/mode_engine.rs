//! What workers of mode `ipc` do elsewhere, here in mode `engine`: the same tests, and what only that
//! mode can go wrong in. `common::MODE` knows where it is compiled.

#![cfg(feature = "testing")]
#![expect(
    clippy::duplicate_mod,
    reason = "each test brings the part that all share"
)]

#[path = "engine_memory.rs"]
mod engine_memory;
#[path = "hostile_worker.rs"]
mod hostile_worker;
#[path = "identity.rs"]
mod identity;
#[path = "kill_matrix.rs"]
mod kill_matrix;
#[path = "markers.rs"]
mod markers;

mod common;

use common::daemon::Daemon;
use common::engine::{Engine, tokens};
use common::wait_for;
use common::worker::{Model, RING, Worker, attach, prompt, ranges, ring, shake};
use engram::proto::channel::layout::{Piece, Status};
use engram::proto::v1;
use engram::proto::v1::refusal::Reason;
use engram::types::TransferMode;
use std::os::fd::AsFd as _;

/// Links in a process's descriptors, and lines of its mappings, that name a worker's shared memory.
fn windows(pid: i32) -> (usize, usize) {
    let names = |text: &str| text.contains("memfd:engram-window") || text.contains("memfd:ring");
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    let open = links.filter(|link| names(&link.to_string_lossy())).count();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    (open, maps.lines().filter(|line| names(line)).count())
}

#[test]
fn the_mode_is_told_with_its_reason() {
    let daemon = Daemon::start(&[]);
    let _worker = Worker::attach(&daemon);
    let row = daemon.get("/v1/workers").json()["workers"][0].take();
    assert_eq!(row["mode"], "engine");
    assert_eq!(row["mode_why"], "the worker allows engine only");
}

#[test]
fn a_daemon_may_forbid_a_mode() {
    let only = |mode: &str| toml::Value::from(vec![mode]);
    let both = |it: &mut v1::AttachRequest| {
        it.modes = [TransferMode::Ipc, TransferMode::Engine]
            .map(|mode| v1::TransferMode::from(mode).into())
            .to_vec();
    };
    let daemon = Daemon::start(&[("service.modes", only("engine"))]);
    let mut request = Model::default().request();
    both(&mut request);
    let attached = attach(&daemon.grpc_socket(), request).unwrap();
    assert_eq!(attached.mode(), v1::TransferMode::Engine);
    let row = daemon.get("/v1/workers").json()["workers"][0].take();
    assert!(row["mode_why"].as_str().unwrap().contains("service.modes"));

    let daemon = Daemon::start(&[("service.modes", only("ipc"))]);
    let refusal = attach(&daemon.grpc_socket(), Model::default().request()).unwrap_err();
    assert_eq!(refusal.reason(), Reason::NoCommonMode);
    assert!(
        refusal.message.contains("service.modes"),
        "{}",
        refusal.message
    );
    let mut request = Model::default().request();
    both(&mut request);
    let attached = attach(&daemon.grpc_socket(), request).unwrap();
    assert_eq!(attached.mode(), v1::TransferMode::Ipc);
}

/// The worker of a GPU that is not the daemon's: all that the daemon sees of it is memory.
#[test]
fn a_ring_on_a_gpu_is_served_by_a_daemon_without_one() {
    let daemon = Daemon::start(&[]);
    let mut request = Model::default().request();
    request.ring.as_mut().unwrap().device = v1::DeviceKind::Cuda.into();
    let attached = attach(&daemon.grpc_socket(), request).unwrap();
    assert_eq!(attached.mode(), v1::TransferMode::Engine);
    let window = ring();
    let passed = shake(&attached, &attached.secret, Some(window.fd().as_fd())).unwrap();
    assert_eq!(passed.mode, TransferMode::Engine);
    let mut worker = Worker::from_parts(&attached, passed, window, &Model::default());
    let row = daemon.get("/v1/workers").json()["workers"][0].take();
    assert_eq!(
        (&row["device"], &row["mode"]),
        (&"cuda".into(), &"engine".into())
    );
    let tokens = prompt(1, 2500);
    worker.turn("chat", &tokens, 2500);
    assert_eq!(worker.restore(&tokens).unwrap().boundary, 2500);
}

#[test]
fn without_a_window_there_is_no_session() {
    let daemon = Daemon::start(&[]);
    let attached = attach(&daemon.grpc_socket(), Model::default().request()).unwrap();
    let error = shake(&attached, &attached.secret, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("window"), "{error}");
    wait_for("the end of the session", || {
        (common::engine::workers(&daemon) == 0).then_some(())
    });
}

/// Whatever end a worker of either sort finds, nothing of its memory stays open in the daemon.
#[test]
fn the_daemon_lets_go_of_the_window_of_a_worker_that_is_gone() {
    let mut daemon = Daemon::start(&[]);
    let pid = daemon.process().pid();
    assert_eq!(windows(pid), (0, 0));
    for round in 0..8 {
        let mut worker = Worker::attach(&daemon);
        worker.turn("chat", &prompt(round, 1500), 1500);
        assert_eq!(windows(pid), (1, 1), "only the window");
        worker.die();
        wait_for("the end of the window", || {
            (windows(pid) == (0, 0)).then_some(())
        });
    }
    let mut engine = Engine::beside(&daemon, &[]);
    engine.generate("chat", "chat-1", &tokens(1, 700), 8);
    engine.kill();
    wait_for("the end of the engine's window", || {
        (windows(pid) == (0, 0)).then_some(())
    });
}

/// A daemon that dies while the worker copies takes nothing along that the worker needs: what it
/// answered for is in the worker's own memory.
#[test]
fn what_a_dead_daemon_had_answered_for_is_still_there() {
    let mut daemon = Daemon::start(&[]);
    let mut worker = Worker::attach(&daemon);
    let tokens = prompt(3, 3000);
    worker.turn("chat", &tokens, 3000);
    let req = worker.open("chat", &tokens);
    let hit = worker.lookup(req, 3000);
    let part = ranges(&hit.parts)[0].clone();
    let right = worker.model.kv(&tokens, &part);
    let place = (4096, right.len() as u64);
    assert_eq!(worker.fill_at(hit.lease, Piece::Kv, 0, place), Status::Ok);
    daemon.kill();
    let mut there = vec![0; right.len()];
    worker.ring.read(place.0, &mut there).unwrap();
    assert!(there == right);
}

/// The window of one worker is no way to what others saved.
#[test]
fn a_window_shows_only_what_its_worker_asked_for() {
    let daemon = Daemon::start(&[]);
    let mut rich = Worker::attach(&daemon);
    rich.turn("chat", &prompt(4, 4000), 4000);
    let poor = Worker::attach_as(
        &daemon,
        &Model {
            weights: 7,
            ..Model::default()
        },
    );
    let mut bytes = vec![0xff; RING as usize];
    poor.ring.read(0, &mut bytes).unwrap();
    let test = engram::proto::channel::layout::HANDSHAKE_SELF_TEST_BYTES as usize;
    assert!(bytes[test..].iter().all(|byte| *byte == 0));
}
