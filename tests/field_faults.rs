//! What users of systems like this one report, shown not to happen here.
//!
//! Which test excludes which kind of fault (without a name of a file: a test of this one):
//!
//! | what was reported | test |
//! |---|---|
//! | a shared prefix after eviction gives wrong answers | `markers.rs`: `answers_after_a_restore_…` |
//! | another layout is taken for the recorded one, a part of the bytes is stored | `identity.rs`: `every_part_of_an_identity_counts_…`; `written_bytes.rs`: `each_turn_writes_…` |
//! | attention comes back without the recurrent state | `damaged_store.rs`: `damage_costs_what_needs_it_…` ("no state") |
//! | the page is no multiple of the state's chunk; the state comes back in another dtype | `identity.rs`: `the_same_model_hits_…`, `another_model_never_hits_…` |
//! | prompts one token beyond a page go wrong after a hit | `answers_are_right_at_every_edge_of_a_page_and_a_block` |
//! | a restore and an insert of the same prefix race | `many_ask_for_the_same_prefix_while_it_is_made` |
//! | side state that nobody told of is not carried | `hostile_attach.rs`: `every_lie_of_a_description_…` ("unknown pool") |
//! | what is given up in the middle leaks, or loses its state | `requests_given_up_in_the_middle_leave_nothing` |
//! | states are still written while they are saved | `what_is_saved_while_others_decode_is_right` |
//! | answers degenerate after a restart | `a_soak_of_deaths_keeps_every_answer` |
//! | a restore answers 200 and everything is prefilled again | `restored_and_reused_are_told_apart_and_true` |
//! | a new process finds nothing of what is stored | `identity.rs`: `the_same_model_hits_…`; `engine_memory.rs`: `a_killed_engine_finds_…` |
//! | an unsupported model is silently not cached | `hostile_attach.rs`; `engine_memory.rs`: `over_tcp_…_a_refusal_leaves_the_engine_serving` |
//! | the beginning of a prefix is missing, its tail stays for ever | `a_tail_without_its_beginning_is_reported_and_collected` |
//! | keys depend on the process: nothing is found after a restart | `a_soak_of_deaths_keeps_every_answer`; `tiers.rs`: `what_is_called_durable_…` |
//! | another tensor-parallel size | `identity.rs`: `a_server_of_another_tp_size_…` |
//! | another model under the same name | `identity.rs`: `another_model_never_hits_…` |
//! | sessions back from disk answer with others' content | `markers.rs`: `answers_after_a_restore_…` |
//! | an unrelated conversation comes back while others are evicted | `markers.rs`: `restored_bytes_are_those_…`; `crash.rs`: `kills_while_the_disk_evicts_…` |
//! | caps of the disk are ignored | `tiers.rs`: `the_disk_never_holds_…`, after a restart, too |
//! | without a setting nothing is ever evicted | `config` (unit): `automatic_budgets_are_bounded` |
//! | files are left or useless after a restart | `tiers.rs`: `the_index_is_rebuilt_…`; `crash.rs`, both; `service` (unit): `no_cut_of_the_power_…` |
//! | a restart loses the index of the disk | `tiers.rs`: `the_index_is_rebuilt_…`; `service` (unit): `one_that_cannot_be_trusted_is_rebuilt` |
//! | a truncated or flipped file, or a failing medium, kills the reader | `damaged_store.rs`; `store` (unit): `every_flip_and_every_cut_is_found`, `faults` |
//! | millions of files in one folder | `many_snapshots_spread_over_folders` |
//! | listed but empty | `tiers.rs`: `the_disk_never_holds_…` (every row is restored); `crash.rs`, both |
//! | the disk is filled for everybody else | `tiers.rs`: `a_full_disk_is_said_…`; `full_disk.rs` |
//! | a disk that fails is told by nobody | `full_disk.rs`; `service` (unit): `sick_disk` |
//! | the same is written again and again | `written_bytes.rs` |
//! | a restarted daemon is not noticed | `a_daemon_that_was_gone_for_a_moment_is_found_again` |
//! | a daemon that hangs stops the server | `a_stopped_daemon_costs_a_prefill_and_nothing_else` |
//! | a store that fails takes the server along | `a_store_that_fails_is_the_daemons_business` |
//! | slots leak | `a_soak_of_deaths_keeps_every_answer`, and every test here that ends in `accounts` |
//! | the disk is slower than computing | `told.rs`: `a_restore_slower_…` |
//! | alive is not told apart from ready | `rest.rs`: `probes_and_metrics_can_be_read` |
//! | no GPU, no service | every test here |
//! | names that are paths, links in the store | `strange_names.rs`; `rest_hostile.rs` |
//! | whoever comes may do anything | `rest_access.rs`; `serve.rs` |
//! | files that run code when they are read | `damaged_store.rs`: files are JSON and safetensors |
//! | nobody sees or sets what each tier takes | `told.rs`: `every_tier_tells_…` |

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::daemon::Daemon;
use common::disk;
use common::engine::{Engine, tokens};
use common::wait_for;
use common::worker::{Model, Worker, prompt};
use serde_json::json;

fn cold() -> Engine {
    Engine::alone(&["--no-cache"])
}

/// Forgets everything on the device that the daemon has.
fn forget(engine: &Engine) {
    engine.settled();
    engine.flush();
}

#[test]
fn answers_are_right_at_every_edge_of_a_page_and_a_block() {
    let daemon = Daemon::start(&[]);
    let oracle = cold();
    for args in [
        &["--page-size", "64"][..],
        &["--page-size", "1", "--exact-end"],
    ] {
        let engine = Engine::beside(&daemon, args);
        let whole = tokens(args.len() as u64, 1400);
        engine.generate("c", "first", &whole, 1);
        // A chunk's state is not sent when a deeper one of its request comes too soon: these are the
        // deepest of theirs.
        for chunks in [512, 1024] {
            engine.generate("c", &format!("chunks-{chunks}"), &whole[..chunks], 1);
            engine.settled();
        }
        for length in [
            255, 256, 257, 320, 321, 322, 575, 577, 1023, 1024, 1025, 1026, 1089, 1281,
        ] {
            let prompt = &whole[..length];
            let expected = oracle.generate("o", "o", prompt, 8).tokens;
            // The second time, whatever the first one left can be had.
            for time in ["first", "second"] {
                forget(&engine);
                let rid = format!("{length}-{time}");
                let reply = engine.generate("c", &rid, prompt, 8);
                assert_eq!(reply.tokens, expected, "{args:?}, {rid}");
                assert!(reply.cached < length as u64, "{args:?}, {rid}");
                let least = (length as u64 - 1) / 512 * 512;
                assert!(
                    time == "first" || reply.cached >= least,
                    "{args:?}, {rid}: {} cached",
                    reply.cached
                );
            }
        }
        engine.check_accounts();
    }
}

#[test]
fn many_ask_for_the_same_prefix_while_it_is_made() {
    let daemon = Daemon::start(&[("service.write_after", "1ms".into())]);
    let pools = ["--slots", "40", "--pages", "400", "--max-running", "12"];
    let engine = Engine::beside(&daemon, &pools);
    let oracle = cold();
    for round in 0..4 {
        let shared = tokens(round + 1, 1100);
        let expected: Vec<_> = (0..10)
            .map(|client| {
                let prompt = [&shared[..], &tokens(100 + client, 30)].concat();
                let answer = oracle
                    .generate("o", &format!("o{client}"), &prompt, 8)
                    .tokens;
                (prompt, answer)
            })
            .collect();
        for again in 0..2 {
            thread::scope(|scope| {
                for ((prompt, answer), client) in expected.iter().zip(0..) {
                    let engine = &engine;
                    scope.spawn(move || {
                        let rid = format!("{round}-{again}-{client}");
                        let reply = engine.generate(&rid, &rid, prompt, 8);
                        assert_eq!(reply.tokens, *answer, "{rid}");
                    });
                }
            });
            forget(&engine);
        }
    }
    engine.check_accounts();
}

#[test]
fn requests_given_up_in_the_middle_leave_nothing() {
    let daemon = Daemon::start(&[
        ("service.preload", "0 B".into()),
        ("service.write_after", "1ms".into()),
    ]);
    let engine = Engine::beside(&daemon, &["--max-running", "4"]);
    let oracle = cold();
    let prompts: Vec<_> = (0..4).map(|i| tokens(i + 1, 2600)).collect();
    for (prompt, i) in prompts.iter().zip(0..) {
        engine.generate(&format!("c{i}"), &format!("first{i}"), prompt, 4);
    }
    daemon.all_durable();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (engine, stop) = (&engine, &stop);
        for (prompt, i) in prompts.iter().zip(0..) {
            scope.spawn(move || {
                for round in 0..6 {
                    let rid = format!("r{i}-{round}");
                    let body = json!({
                        "input_ids": prompt,
                        "sampling_params": { "max_new_tokens": 300, "temperature": 0 },
                        "rid": rid,
                        "session_id": format!("c{i}"),
                    });
                    let answer = engine.post("/generate", &body);
                    assert_eq!(answer.status, 200, "{}", answer.text());
                }
            });
        }
        // Gives up whatever is there, and empties the cache whenever it can.
        let aborts = scope.spawn(move || {
            let mut found = 0;
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                for i in 0..4 {
                    let rid = format!("r{i}-{}", round % 6);
                    let answer = engine.post("/abort_request", &json!({ "rid": rid }));
                    found += usize::from(answer.json()["aborted"] == true);
                }
                engine.post("/flush_cache", &json!({}));
                round += 1;
                if round > 200 {
                    break;
                }
            }
            found
        });
        let found = aborts.join().unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(found > 0, "nothing was given up");
    });
    engine.check_accounts();
    for (prompt, i) in prompts.iter().zip(0..) {
        let rid = format!("last{i}");
        let reply = engine.generate(&format!("c{i}"), &rid, prompt, 8);
        assert_eq!(reply.tokens, oracle.generate("o", &rid, prompt, 8).tokens);
        assert_eq!(reply.cached, 2560);
    }
    engine.check_accounts();
    wait_for("all leases back", || {
        let workers = daemon.get("/v1/workers").json();
        let worker = &workers["workers"][0];
        (worker["leases"] == 0 && worker["saves"] == 0 && worker["requests"] == 0).then_some(())
    });
}

#[test]
fn what_is_saved_while_others_decode_is_right() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &["--slots", "80", "--pages", "800"]);
    let oracle = cold();
    // Answers that cross a multiple of 256: states are taken in the middle of decoding.
    let turns: Vec<(Vec<u32>, Vec<u32>)> = thread::scope(|scope| {
        let clients: Vec<_> = (0..32)
            .map(|client| {
                let engine = &engine;
                scope.spawn(move || {
                    let prompt = tokens(client + 1, 200 + client as usize);
                    let name = format!("c{client}");
                    let reply = engine.generate(&name, &name, &prompt, 90);
                    (prompt, reply.tokens)
                })
            })
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect()
    });
    forget(&engine);
    for ((prompt, answer), client) in turns.iter().zip(0..) {
        let rid = format!("next{client}");
        let next = [&prompt[..], answer, &tokens(77, 20)].concat();
        let reply = engine.generate(&format!("c{client}"), &rid, &next, 8);
        let expected = oracle.generate("o", &rid, &next, 8);
        assert_eq!(reply.tokens, expected.tokens, "client {client}");
        assert_eq!(reply.cached, 256, "client {client}");
    }
    engine.check_accounts();
}

#[test]
fn a_soak_of_deaths_keeps_every_answer() {
    let mut daemon = Daemon::start(&[("service.write_after", "1ms".into())]);
    let mut engine = Engine::beside(&daemon, &["--slots", "24", "--pages", "120"]);
    let oracle = cold();
    let mut said: Vec<Vec<u32>> = (0..3).map(|i| tokens(i + 1, 600)).collect();
    let mut cached = 0;
    for round in 0..6 {
        for (said, i) in said.iter_mut().zip(0..) {
            let rid = format!("{round}-{i}");
            let reply = engine.generate(&format!("c{i}"), &rid, said, 24);
            let expected = oracle.generate("o", &rid, said, 24);
            assert_eq!(reply.tokens, expected.tokens, "{rid}");
            let mut distinct = reply.tokens.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert!(
                distinct.len() >= 12,
                "{rid} repeats itself: {:?}",
                reply.tokens
            );
            cached += reply.cached;
            assert!(
                round == 0 || reply.cached >= 512,
                "{rid}: {} cached",
                reply.cached
            );
            said.extend(reply.tokens);
            said.extend(tokens(1000 + round, 60));
        }
        engine.settled();
        daemon.all_durable();
        if round % 2 == 0 {
            engine.kill();
            engine.restart_beside(&daemon);
        } else {
            daemon.kill();
            daemon.restart();
            engine.wait_attached(&daemon);
            engine.flush();
        }
    }
    assert!(cached > 0);
    engine.check_accounts();
    assert_eq!(disk::quarantine(&daemon.data()), []);
}

#[test]
fn restored_and_reused_are_told_apart_and_true() {
    let daemon = Daemon::start(&[]);
    let engine = Engine::beside(&daemon, &[]);
    let prompt = tokens(1, 1300);
    let first = engine.generate("c", "r1", &prompt, 4);
    forget(&engine);
    let body = json!({ "conversation_id": "c" });
    let answer = daemon.post("/restore_snapshot", &body).json();
    assert_eq!(answer["token_count"], 1280);
    // Bringing it to RAM is not yet a use of it.
    assert_eq!(daemon.metric("engram_restored_tokens_total"), 0.0);
    assert_eq!(daemon.metric("engram_reused_tokens_total"), 0.0);
    let second = engine.generate("c", "r2", &prompt, 4);
    assert_eq!((first.cached, second.cached), (0, 1280));
    assert_eq!(first.tokens, second.tokens);
    engine.settled();
    wait_for("the release", || {
        (daemon.metric("engram_reused_tokens_total") == 1280.0).then_some(())
    });
    assert_eq!(daemon.metric("engram_restored_tokens_total"), 1280.0);
    wait_for("the turns", || {
        (daemon.metric("engram_turns_total") == 2.0).then_some(())
    });
    assert_eq!(daemon.metric("engram_cached_tokens_total"), 1280.0);
    assert_eq!(
        daemon.metric("engram_prefilled_tokens_total"),
        1300.0 + 20.0
    );
}

#[test]
fn a_tail_without_its_beginning_is_reported_and_collected() {
    let mut daemon = Daemon::start(&[("service.preload", "0 B".into())]);
    let mut worker = Worker::attach(&daemon);
    let trunk = prompt(1, 6000);
    let save = |daemon: &Daemon, name: &str| {
        let answer = daemon.post("/save_snapshot", &json!({ "conversation_id": name }));
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    for boundary in [1024, 3000, 6000] {
        worker.turn("c", &trunk[..boundary as usize], boundary);
        save(&daemon, "c");
    }
    let other = prompt(2, 2000);
    worker.turn("d", &other, 2000);
    save(&daemon, "d");
    daemon.kill();
    let (_, deepest) = disk::manifests_of(&daemon.data(), "c").pop().unwrap();
    let first = disk::object_path(&daemon.data(), &deepest["kv"][0]["object"]);
    std::fs::remove_file(&first).unwrap();
    daemon.restart();
    // Reported: each snapshot that needs it. Collected: all that only they had.
    let aside = disk::quarantine(&daemon.data());
    assert_eq!(aside.len(), 3, "{aside:?}");
    assert!(
        aside.iter().all(|(_, reason)| reason == "incomplete"),
        "{aside:?}"
    );
    let model = Model::default();
    let kept = model.state_bytes() + 2000 * model.row_bytes();
    wait_for("the collection", || {
        (disk::payload(&daemon.data()) == kept).then_some(())
    });
    let mut worker = Worker::attach(&daemon);
    assert_eq!(worker.restore(&trunk), None);
    assert_eq!(worker.restore(&other).unwrap().boundary, 2000);
    // Stored again it is whole again.
    worker.turn("c", &trunk, 6000);
    save(&daemon, "c");
    daemon.restart();
    let mut worker = Worker::attach(&daemon);
    assert_eq!(worker.restore(&trunk).unwrap().boundary, 6000);
}

#[test]
fn many_snapshots_spread_over_folders() {
    let daemon = Daemon::start(&[("service.write_after", "1ms".into())]);
    let mut worker = Worker::attach(&daemon);
    for i in 0..300 {
        worker.turn(&format!("c{i}"), &prompt(i + 1, 40), 32);
    }
    daemon.all_durable();
    wait_for("all of them on disk", || {
        (daemon.metric("engram_durable_snapshots_total") == 300.0).then_some(())
    });
    let mut folders: HashMap<_, usize> = HashMap::new();
    let files = disk::files(&daemon.data());
    assert!(files.len() >= 900, "{} files", files.len());
    for path in files.into_keys() {
        *folders
            .entry(path.parent().unwrap().to_owned())
            .or_default() += 1;
    }
    let (folder, most) = folders.iter().max_by_key(|(_, count)| **count).unwrap();
    assert!(*most <= 16, "{most} files in {}", folder.display());
    assert_eq!(worker.restore(&prompt(1, 40)).unwrap().boundary, 32);
}

#[test]
fn a_daemon_that_was_gone_for_a_moment_is_found_again() {
    let mut daemon = Daemon::start(&[("service.write_after", "1ms".into())]);
    let engine = Engine::beside(&daemon, &[]);
    let prompt = tokens(1, 1300);
    let first = engine.generate("c", "r1", &prompt, 4);
    engine.settled();
    daemon.all_durable();
    let boot = engine.info()["memory"]["boot"].clone();
    // Faster than any heartbeat.
    daemon.restart();
    engine.wait_attached(&daemon);
    assert_ne!(engine.info()["memory"]["boot"], boot);
    engine.flush();
    let again = engine.generate("c", "r2", &prompt, 4);
    assert_eq!((again.cached, again.tokens), (1280, first.tokens));
    engine.check_accounts();
}

#[test]
fn a_stopped_daemon_costs_a_prefill_and_nothing_else() {
    let mut daemon = Daemon::start(&[]);
    let patience = [
        "--restore-patience",
        "300ms",
        "--save-patience",
        "300ms",
        "--daemon-silence",
        "60s",
    ];
    let engine = Engine::beside(&daemon, &patience);
    let oracle = cold();
    let prompt = tokens(1, 1300);
    engine.generate("c", "r1", &prompt, 4);
    forget(&engine);
    daemon.process().pause();
    // A restore that is not answered, and saves that nobody drains.
    for (prompt, rid) in [(prompt.clone(), "r2"), (tokens(2, 1300), "r3")] {
        let reply = engine.generate("d", rid, &prompt, 4);
        assert_eq!(reply.cached, 0, "{rid}");
        assert_eq!(
            reply.tokens,
            oracle.generate("o", rid, &prompt, 4).tokens,
            "{rid}"
        );
    }
    engine.check_accounts();
    daemon.process().resume();
    engine.wait_attached(&daemon);
    forget(&engine);
    let reply = engine.generate("c", "r4", &prompt, 4);
    assert_eq!(reply.tokens, oracle.generate("o", "r4", &prompt, 4).tokens);
    engine.check_accounts();
    wait_for("all leases back", || {
        let workers = daemon.get("/v1/workers").json();
        (workers["workers"][0]["leases"] == 0).then_some(())
    });
}

#[test]
fn a_store_that_fails_is_the_daemons_business() {
    // No room on disk at all, and RAM for less than one conversation.
    let daemon = Daemon::start(&[
        ("store.ram", "1 MiB".into()),
        ("store.disk.min_free", "8 EiB".into()),
        ("service.room_wait", "50ms".into()),
    ]);
    let engine = Engine::beside(&daemon, &[]);
    let oracle = cold();
    for i in 0..4 {
        let (prompt, rid) = (tokens(i + 1, 9000), format!("r{i}"));
        let reply = engine.generate(&rid, &rid, &prompt, 4);
        assert_eq!(reply.tokens, oracle.generate("o", &rid, &prompt, 4).tokens);
    }
    engine.check_accounts();
    assert_eq!(daemon.get("/readyz").status, 200);
}
