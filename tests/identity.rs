//! Who may have whose states: the same model in any shape of its pools, and nobody else.

mod common;

use common::daemon::Daemon;
use common::engine::{Engine, tokens, workers};
use common::wait_for;
use common::worker::{Model, Names, SaveEnd, Worker, attach, prompt};
use engram::proto::channel::layout::{Miss, RevokeReason};
use engram::proto::channel::msg::{Down, Epoch};
use engram::proto::v1;
use serde_json::{Value, json};

/// Tokens of a prompt, and of an answer.
const PROMPT: usize = 1300;
const ANSWER: usize = 24;

/// The deepest multiple of 256 in it.
const BOUNDARY: u64 = 1280;

/// A daemon that holds one conversation of the usual engine, durably; and the answer.
struct Kept {
    daemon: Daemon,
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

impl Kept {
    fn new() -> Kept {
        let daemon = Daemon::start(&[]);
        let engine = Engine::beside(&daemon, &[]);
        let prompt = tokens(1, PROMPT);
        let reply = engine.generate("c", "r1", &prompt, ANSWER);
        assert_eq!(reply.cached, 0);
        let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": "c" }));
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["boundary"], BOUNDARY);
        drop(engine);
        wait_for("the engine's end", || (workers(&daemon) == 0).then_some(()));
        Kept {
            daemon,
            prompt,
            answer: reply.tokens,
        }
    }

    fn restore(&self) -> (u16, Value) {
        let answer = self
            .daemon
            .post("/restore_snapshot", &json!({ "conversation_id": "c" }));
        (answer.status, answer.json())
    }
}

#[test]
fn another_model_never_hits_and_is_refused_by_name() {
    let kept = Kept::new();
    for args in [
        &["--seed", "2"][..],
        // The same name and shape, one weight changed.
        &["--perturb-weights"],
        &["--temporal-dtype", "bf16"],
    ] {
        let other = Engine::beside(&kept.daemon, args);
        let (status, body) = kept.restore();
        assert_eq!(
            (status, &body["error"]["type"]),
            (409, &json!("mismatch")),
            "{args:?}: {body}"
        );
        assert_eq!(body["success"], false);
        let reply = other.generate("x", "r2", &kept.prompt, ANSWER);
        assert_eq!(reply.cached, 0, "{args:?}: a hit of another model");
        let alone = Engine::alone(&[args, &["--no-cache"]].concat());
        let oracle = alone.generate("x", "r2", &kept.prompt, ANSWER);
        assert_eq!(reply.tokens, oracle.tokens, "{args:?}");
        // One weight may change little; the states are other ones in any case.
        if args[0] == "--seed" {
            assert_ne!(reply.tokens, kept.answer);
        }
        drop(other);
        wait_for("its end", || (workers(&kept.daemon) == 0).then_some(()));
    }
    // With nobody attached there is nothing to be refused; and the model itself still hits.
    let (status, body) = kept.restore();
    assert_eq!(status, 200, "{body}");
    let same = Engine::beside(&kept.daemon, &[]);
    assert_eq!(kept.restore().0, 200);
    let reply = same.generate("d", "r3", &kept.prompt, ANSWER);
    assert_eq!((reply.cached, &reply.tokens), (BOUNDARY, &kept.answer));
}

#[test]
fn the_same_model_hits_whatever_its_pools_look_like() {
    let kept = Kept::new();
    for args in [
        &["--page-size", "1"][..],
        &["--page-size", "16"],
        &["--page-size", "128", "--pages", "64"],
        &["--layout", "page-major"],
        &["--layout", "page-major", "--page-size", "1"],
        &["--slots", "40", "--pages", "48"],
        &["--model-name", "another-name"],
        &["--chunk", "96", "--ring", "2 MiB"],
    ] {
        let engine = Engine::beside(&kept.daemon, args);
        assert_eq!(kept.restore().0, 200, "{args:?}");
        let reply = engine.generate("d", "r2", &kept.prompt, ANSWER);
        assert_eq!(reply.cached, BOUNDARY, "{args:?}: no hit");
        assert_eq!(reply.tokens, kept.answer, "{args:?}");
        let info = engine.info();
        assert_eq!(info["sanity_check"], "ok", "{args:?}: {info}");
    }
}

#[test]
fn a_namespace_shares_with_itself_only() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    let ids = tokens(1, PROMPT);
    let mut turns = 0;
    let mut ask = |extra_key: Option<&str>, cache_salt: Option<&str>| {
        turns += 1;
        let body = json!({
            "input_ids": ids,
            "sampling_params": { "max_new_tokens": ANSWER, "temperature": 0 },
            "rid": format!("r{turns}"),
            "session_id": format!("s{turns}"),
            "extra_key": extra_key,
            "cache_salt": cache_salt,
        });
        let answer = engine.post("/generate", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer = answer.json();
        // What it may have next has to come from the daemon.
        let saved = daemon.post(
            "/save_snapshot",
            &json!({ "conversation_id": format!("s{turns}") }),
        );
        assert_eq!(saved.status, 200, "{}", saved.text());
        engine.flush();
        let cached = answer["meta_info"]["cached_tokens"].as_u64().unwrap();
        (cached, answer["output_ids"].clone())
    };
    let spaces = [
        (None, None),
        (Some("a"), None),
        (None, Some("a")),
        (Some("a"), Some("b")),
        (Some("b"), Some("a")),
        (Some("ab"), None),
        (Some("A"), None),
    ];
    let mut answers = Vec::new();
    for (key, salt) in spaces {
        let (cached, answer) = ask(key, salt);
        assert_eq!(cached, 0, "{key:?} {salt:?} hit another namespace");
        answers.push(answer);
    }
    for ((key, salt), first) in spaces.into_iter().zip(answers) {
        let (cached, answer) = ask(key, salt);
        assert_eq!((cached, answer), (BOUNDARY, first), "{key:?} {salt:?}");
    }
}

#[test]
fn every_part_of_a_namespace_counts() {
    let daemon = Daemon::start(&[]);
    let mut worker = Worker::attach(&daemon);
    let ids = prompt(1, 300);
    let some = |name| Some(name);
    let spaces = [
        Names::default(),
        Names {
            tenant: some("a"),
            ..Names::default()
        },
        Names {
            extra_key: some("a"),
            ..Names::default()
        },
        Names {
            cache_salt: some("a"),
            ..Names::default()
        },
        Names {
            adapter: Some([b'a'; 32]),
            ..Names::default()
        },
        Names {
            adapter: Some([0; 32]),
            ..Names::default()
        },
        // Absent is not empty, and parts do not run into each other.
        Names {
            tenant: some(""),
            ..Names::default()
        },
        Names {
            extra_key: some(""),
            ..Names::default()
        },
        Names {
            cache_salt: some(""),
            ..Names::default()
        },
        Names {
            tenant: some("a"),
            extra_key: some("bc"),
            ..Names::default()
        },
        Names {
            tenant: some("ab"),
            extra_key: some("c"),
            ..Names::default()
        },
        Names {
            tenant: some("abc"),
            ..Names::default()
        },
    ];
    for (names, i) in spaces.iter().zip(1..) {
        assert_eq!(worker.restore_as(names, &ids), None, "{names:?}");
        let req = worker.open_as(names, &ids);
        let end = worker.save_at(req, &ids, 256);
        assert!(matches!(end, SaveEnd::Saved(..)), "{names:?}: {end:?}");
        worker.finish(req, ids.len());
        worker.heard_all();
        assert_eq!(daemon.metric("engram_saved_snapshots_total"), f64::from(i));
    }
    for names in &spaces {
        assert_eq!(
            worker.restore_as(names, &ids).unwrap().boundary,
            256,
            "{names:?}"
        );
    }
}

#[test]
fn a_tenant_reaches_only_its_own_by_name() {
    let daemon = Daemon::start(&[]);
    let mut worker = Worker::attach(&daemon);
    let ids = prompt(1, 300);
    let names = Names {
        session_id: Some("c"),
        tenant: Some("a"),
        ..Names::default()
    };
    let req = worker.open_as(&names, &ids);
    let end = worker.save_at(req, &ids, 256);
    assert!(matches!(end, SaveEnd::Saved(..)), "{end:?}");
    worker.finish(req, ids.len());
    worker.heard_all();
    let ask = |path: &str, tenant: Option<&str>| {
        let body = json!({ "conversation_id": "c", "tenant": tenant, "turn_number": 1 });
        daemon.post(path, &body)
    };
    for tenant in [None, Some("b"), Some("A"), Some("a ")] {
        for path in ["/restore_snapshot", "/get_snapshot_info", "/save_snapshot"] {
            let answer = ask(path, tenant);
            let told = (answer.status, answer.kind());
            assert_eq!(told, (404, "not_found".to_owned()), "{path} {tenant:?}");
        }
        // Nor is it deleted by another.
        assert_eq!(ask("/delete_snapshot", tenant).status, 404, "{tenant:?}");
    }
    let answer = ask("/restore_snapshot", Some("a"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["boundary"], 256);
}

#[test]
fn every_part_of_an_identity_counts_and_nothing_else() {
    let daemon = Daemon::start(&[]);
    let usual = Model::default();
    let mut worker = Worker::attach_as(&daemon, &usual);
    let ids = prompt(1, 300);
    worker.turn("c", &ids, 256);
    let new = || *uuid::Uuid::new_v4().as_bytes();
    let others = [
        (
            "weights",
            Model {
                weights: 1,
                instance: new(),
                ..usual.clone()
            },
        ),
        (
            "dtype",
            Model {
                temporal_dtype: v1::DType::DtypeBf16,
                instance: new(),
                ..usual.clone()
            },
        ),
        (
            "dtype, same bytes",
            Model {
                temporal_dtype: v1::DType::DtypeBf16,
                temporal: [8, 8],
                instance: new(),
                ..usual.clone()
            },
        ),
        (
            "shape, same bytes",
            Model {
                temporal: [8, 4],
                instance: new(),
                ..usual.clone()
            },
        ),
        (
            "heads",
            Model {
                heads: 4,
                instance: new(),
                ..usual.clone()
            },
        ),
    ];
    for (name, model) in others {
        let mut other = Worker::attach_as(&daemon, &model);
        assert_ne!(other.fingerprint, worker.fingerprint, "{name}");
        assert_eq!(other.restore(&ids), None, "{name}");
        // Its own it gets, beside the other's.
        other.turn(name, &ids, 256);
        assert_eq!(other.restore(&ids).unwrap().boundary, 256, "{name}");
    }
    assert_eq!(worker.restore(&ids).unwrap().boundary, 256);
    let layout = v1::PoolLayout::PageMajor;
    let same = [
        (
            "pages",
            Model {
                page_size: 64,
                instance: new(),
                ..usual.clone()
            },
        ),
        (
            "layout",
            Model {
                layout,
                page_size: 64,
                instance: new(),
                ..usual.clone()
            },
        ),
        (
            "capacity",
            Model {
                capacity: (3, 128),
                instance: new(),
                ..usual.clone()
            },
        ),
    ];
    for (name, model) in same {
        let mut other = Worker::attach_as(&daemon, &model);
        assert_eq!(other.fingerprint, worker.fingerprint, "{name}");
        assert_eq!(other.restore(&ids).unwrap().boundary, 256, "{name}");
    }
    // Parts of the description that a model of this test does not vary.
    let change = |change: fn(&mut v1::AttachRequest)| {
        let mut request = Model {
            instance: new(),
            ..usual.clone()
        }
        .request();
        change(&mut request);
        attach(&daemon.grpc_socket(), request)
            .unwrap()
            .fingerprint
            .to_vec()
    };
    let own = worker.fingerprint.to_vec();
    assert_ne!(
        change(|it| it.model.as_mut().unwrap().architecture = "other".into()),
        own
    );
    assert_ne!(
        change(|it| it.model.as_mut().unwrap().config_digest = vec![2; 32].into()),
        own
    );
    assert_ne!(
        change(|it| it.kv[0].dtype = v1::DType::DtypeF16.into()),
        own
    );
    assert_ne!(change(|it| it.kv[0].layer = 0), own);
    assert_ne!(change(|it| it.state[0].layers = vec![0, 1]), own);
    assert_ne!(change(|it| it.state[0].name = "conv.1".into()), own);
    assert_eq!(
        change(|it| it.model.as_mut().unwrap().display_name = "x".into()),
        own
    );
    assert_eq!(change(|it| it.ring.as_mut().unwrap().bytes *= 2), own);
    assert_eq!(change(|it| it.versions.clear()), own);
    assert_eq!(change(|it| it.epoch = 77), own);
}

#[test]
fn a_server_of_another_tp_size_shares_nothing() {
    let daemon = Daemon::start(&[]);
    let mut worker = Worker::attach(&daemon);
    let ids = prompt(1, 300);
    worker.turn("c", &ids, 256);
    for tp in [2, 4, 8] {
        let model = Model {
            tp,
            instance: [tp as u8; 16],
            ..Model::default()
        };
        let mut rank = Worker::attach_as(&daemon, &model);
        assert_ne!(rank.fingerprint, worker.fingerprint, "tp {tp}");
        assert_eq!(rank.restore(&ids), None, "tp {tp}");
    }
    assert_eq!(worker.restore(&ids).unwrap().boundary, 256);
    // By name it is refused where only servers of another size are attached.
    let by_name = || daemon.post("/restore_snapshot", &json!({ "conversation_id": "c" }));
    assert_eq!(by_name().status, 200);
    drop(worker);
    wait_for("the worker's end", || (workers(&daemon) == 0).then_some(()));
    let model = Model {
        tp: 2,
        instance: [9; 16],
        ..Model::default()
    };
    let _rank = Worker::attach_as(&daemon, &model);
    let answer = by_name();
    let told = (answer.status, answer.kind());
    assert_eq!(told, (409, "mismatch".to_owned()), "{}", answer.text());
}

#[test]
fn another_epoch_is_another_model_at_once() {
    let daemon = Daemon::start(&[]);
    let mut worker = Worker::attach(&daemon);
    let ids = prompt(1, 600);
    worker.turn("c", &ids, 512);
    let by_name = || {
        let answer = daemon.post("/restore_snapshot", &json!({ "conversation_id": "c" }));
        (
            answer.status,
            if answer.status == 200 {
                "none".to_owned()
            } else {
                answer.kind()
            },
        )
    };
    assert_eq!(by_name().0, 200);
    // A lease and a save that span the change.
    let spanning = worker.open("", &ids);
    let hit = worker.lookup(spanning, 512);
    let saving = worker.open("d", &prompt(2, 600));
    let save = worker.offer(saving, 512);
    worker.answer(save).unwrap();
    worker.say(Epoch {
        epoch: 2,
        weights_digest: [0; 32],
    });
    let revoked = worker.hear(|message| match message {
        Down::Revoke(revoke) if revoke.lease == hit.lease => Some(revoke.reason),
        _ => None,
    });
    assert_eq!(revoked, RevokeReason::StaleEpoch);
    assert!(worker.saved(save).is_err());
    // Weights that nobody knows yet: neither by prompt nor by name.
    worker.epoch = 2;
    let req = worker.open("", &ids);
    assert_eq!(worker.lookup(req, 512).reason, Some(Miss::StaleEpoch));
    assert_eq!(by_name(), (409, "mismatch".to_owned()));
    // Known ones, and others than before.
    worker.say(Epoch {
        epoch: 3,
        weights_digest: [9; 32],
    });
    worker.epoch = 3;
    assert_eq!(worker.restore(&ids), None);
    assert_eq!(by_name(), (409, "mismatch".to_owned()));
    // A request of an earlier epoch is neither saved nor restored in this one.
    let late = worker.offer(saving, 512);
    assert!(worker.answer(late).is_err());
    worker.turn("e", &ids, 256);
    assert_eq!(worker.restore(&ids).unwrap().boundary, 256);
    // The first weights again.
    worker.say(Epoch {
        epoch: 4,
        weights_digest: [1; 32],
    });
    worker.epoch = 4;
    assert_eq!(worker.restore(&ids).unwrap().boundary, 512);
    assert_eq!(by_name().0, 200);
}
