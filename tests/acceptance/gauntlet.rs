//! Phase 9: many at once.

use std::thread;

use serde_json::{Value, json};

use crate::common::engine::tokens;
use crate::stage::{Stage, chat, content, ids, number, order, user};

/// Runs all at once and returns the answers in order.
fn together<T: Sync, R: Send>(asks: &[T], ask: impl Fn(&T) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let ask = &ask;
        let running: Vec<_> = asks.iter().map(|it| scope.spawn(move || ask(it))).collect();
        running.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

#[test]
fn thirty_two_with_a_shared_prefix() {
    let stage = Stage::new(&[]);
    let shared = tokens(1, 500);
    let prompts: Vec<Vec<u32>> = (0..32)
        .map(|i| [shared.clone(), tokens(100 + i, 20)].concat())
        .collect();
    let numbered: Vec<(usize, &Vec<u32>)> = prompts.iter().enumerate().collect();
    let answers = together(&numbered, |(i, prompt)| {
        stage.generate(&format!("c{i}"), prompt, 8)
    });
    for (prompt, answer) in prompts.iter().zip(&answers) {
        assert_eq!(ids(answer), stage.truth(prompt, 8));
    }
}

#[test]
fn a_hundred_distinct() {
    let stage = Stage::new(&[]);
    let seeds: Vec<u64> = (0..100).collect();
    let answers = together(&seeds, |seed| {
        let rid = format!("r{seed}");
        let mut body = order(&format!("c{seed}"), &tokens(*seed, 20 + *seed as usize), 6);
        body["rid"] = json!(rid);
        stage.post("/v1/generate", &body)
    });
    for (seed, answer) in seeds.iter().zip(&answers) {
        assert_eq!(answer["id"], format!("r{seed}"));
        assert_eq!(answer["engram"]["conversation_id"], format!("c{seed}"));
        assert_eq!(
            ids(answer),
            stage.truth(&tokens(*seed, 20 + *seed as usize), 6)
        );
    }
}

#[test]
fn fifty_identical_at_temperature_0() {
    let stage = Stage::new(&[]);
    let numbers: Vec<u32> = (0..50).collect();
    let answers = together(&numbers, |_| {
        let body = chat(
            json!([user("Please answer in one sentence.")]),
            12,
            json!({}),
        );
        stage.post("/v1/chat/completions", &body)
    });
    let first = content(&answers[0]);
    assert!(answers.iter().all(|answer| content(answer) == first));
    let mut names: Vec<&str> = answers
        .iter()
        .map(|it| it["id"].as_str().unwrap())
        .collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 50);
}

#[test]
fn alternating_long_and_short() {
    let stage = Stage::new(&[]);
    for round in 0..20_u64 {
        let length = if round % 2 == 0 { 1500 } else { 10 };
        let prompt = tokens(200 + round, length);
        let answer = stage.generate(&format!("c{round}"), &prompt, 4);
        assert_eq!(ids(&answer), stage.truth(&prompt, 4), "round {round}");
    }
}

#[test]
fn eight_users_by_five_turns_keep_their_personas() {
    let stage = Stage::new(&["--slots", "12", "--max-running", "4"]);
    let users: Vec<u64> = (0..8).collect();
    let ends = together(&users, |user| {
        let name = format!("persona-{user}");
        let mut transcript = Vec::new();
        for turn in 0..5_u64 {
            let new = tokens(1000 + user * 10 + turn, if turn == 0 { 300 } else { 25 });
            transcript.extend(&new);
            let answer = stage.generate(&name, &new, 8);
            assert_eq!(
                number(&answer, "/usage/prompt_tokens") as usize,
                transcript.len()
            );
            assert_eq!(number(&answer, "/engram/from_turn"), turn);
            transcript.extend(ids(&answer));
        }
        transcript
    });
    for transcript in ends {
        let (prompt, answer) = transcript.split_at(transcript.len() - 8);
        assert_eq!(answer, stage.truth(prompt, 8));
    }
}

#[test]
fn healthy_afterwards() {
    let stage = Stage::new(&["--slots", "8", "--max-running", "3"]);
    let seeds: Vec<u64> = (0..40).collect();
    let answers = together(&seeds, |seed| {
        let path = if seed % 2 == 0 {
            "/v1/generate"
        } else {
            "/v1/nothing"
        };
        stage
            .daemon
            .post(path, &order(&format!("c{seed}"), &tokens(*seed, 30), 5))
            .status
    });
    for (seed, status) in seeds.iter().zip(answers) {
        assert_eq!(status, if seed % 2 == 0 { 200 } else { 404 });
    }
    assert_eq!(stage.daemon.get("/readyz").status, 200);
    assert_eq!(
        stage.daemon.get("/health").json(),
        json!({ "status": "ok" })
    );
    stage.engine.check_accounts();
    let info: Value = stage.engine.info();
    assert_eq!((&info["running"], &info["waiting"]), (&json!(0), &json!(0)));
}
