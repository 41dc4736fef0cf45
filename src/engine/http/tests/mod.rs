//! The surface over a real socket.

mod openai;
mod stream;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::*;
use crate::engine::{Args, Engine};

/// A served engine and a client.
struct Rig {
    address: SocketAddr,
    client: reqwest::Client,
    stop: Option<oneshot::Sender<()>>,
    served: tokio::task::JoinHandle<anyhow::Result<()>>,
}

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

fn args(line: &[&str]) -> Args {
    use clap::Parser as _;
    Line::parse_from(std::iter::once(&"engine").chain(line)).args
}

impl Rig {
    async fn new(line: &[&str]) -> Self {
        let config = args(line).config(7).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let engine = Engine::start(&config).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(engine.serve(listener, async {
            let _asked = stopped.await;
        }));
        Self {
            address,
            client: reqwest::Client::new(),
            stop: Some(stop),
            served,
        }
    }

    async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> (u16, Value) {
        let url = format!("http://{}{path}", self.address);
        let reply = self.client.post(url).body(body).send().await.unwrap();
        (reply.status().as_u16(), reply.json().await.unwrap())
    }

    async fn get(&self, path: &str) -> Value {
        let url = format!("http://{}{path}", self.address);
        let reply = self.client.get(url).send().await.unwrap();
        assert_eq!(reply.status().as_u16(), 200);
        reply.json().await.unwrap()
    }

    /// Asks until so many requests run.
    async fn until_running(&self, count: u64) -> Value {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let info = self.get("/server_info").await;
            if info["running"] == count {
                return info;
            }
            assert!(Instant::now() < deadline, "{info}");
        }
    }

    async fn generate(&self, body: Value) -> (u16, Value) {
        self.post("/generate", body.to_string()).await
    }
}

#[tokio::test]
async fn generate_answers_as_sglang_does() {
    let rig = Rig::new(&["--slots", "16"]).await;
    let ids: Vec<u32> = (0..300).map(|i| i * 7 % 2048).collect();
    let body = json!({
        "input_ids": ids, "rid": "turn-1", "session_id": "s", "extra_key": "", "unknown": 1,
        "sampling_params": { "max_new_tokens": 30, "temperature": 0, "ignore_eos": true },
    });
    let (status, first) = rig.generate(body.clone()).await;
    assert_eq!(status, 200);
    assert_eq!(first["output_ids"].as_array().unwrap().len(), 30);
    let meta = &first["meta_info"];
    assert_eq!(meta["id"], "turn-1");
    assert_eq!(
        meta["finish_reason"],
        json!({ "type": "length", "length": 30 })
    );
    assert_eq!(
        (&meta["prompt_tokens"], &meta["completion_tokens"]),
        (&json!(300), &json!(30))
    );
    assert_eq!(meta["cached_tokens"], 0);
    assert!(meta["e2e_latency"].as_f64().unwrap() > 0.0);
    let (_, second) = rig.generate(body).await;
    assert_eq!(second["meta_info"]["cached_tokens"], 256);
    assert_eq!(second["output_ids"], first["output_ids"]);
    let info = rig.get("/server_info").await;
    assert_eq!(info["sanity_check"], "ok");
    assert_eq!(
        (&info["slots"]["cached"], &info["slots"]["held"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(info["counts"]["finished"], 2);
    assert_eq!(rig.get("/flush_cache").await["success"], true);
    assert_eq!(rig.get("/server_info").await["slots"]["free"], 16);
    assert_eq!(rig.get("/health").await["status"], "ok");
}

#[tokio::test]
async fn hostile_bodies_are_typed_400s_and_the_engine_lives() {
    let rig = Rig::new(&["--slots", "4", "--pages", "10"]).await;
    let cases = [
        ("{", "bad_body"),
        ("", "bad_body"),
        ("[]", "bad_body"),
        (r#"{"input_ids": "abc"}"#, "bad_body"),
        (r#"{"input_ids": [1.5]}"#, "bad_body"),
        (r#"{"input_ids": [[1]]}"#, "bad_body"),
        (r#"{"input_ids": [99999999999999999999]}"#, "bad_body"),
        (
            r#"{"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}"#,
            "bad_body",
        ),
        (r#"{"text": "hello"}"#, "unsupported"),
        (r#"{"text": "hello", "stream": true}"#, "unsupported"),
        (r#"{"input_ids": [], "stream": true}"#, "empty_input"),
        (r#"{"input_ids": [1], "stream": 1}"#, "bad_body"),
        (
            r#"{"input_ids": [1], "sampling_params": {"stop": "x"}}"#,
            "unsupported",
        ),
        (
            r#"{"input_ids": [1], "return_logprob": true, "logprob_start_len": 0}"#,
            "unsupported",
        ),
        (
            r#"{"input_ids": [1], "return_logprob": true, "top_logprobs_num": 101}"#,
            "bad_body",
        ),
        (
            r#"{"input_ids": [1], "sampling_params": {"temperature": 0.7}}"#,
            "unsupported",
        ),
        (
            r#"{"input_ids": [1], "sampling_params": {"n": 2}}"#,
            "unsupported",
        ),
        (r#"{"input_ids": []}"#, "empty_input"),
        (r#"{"input_ids": [1, -1]}"#, "token_out_of_vocabulary"),
        (r#"{"input_ids": [2048]}"#, "token_out_of_vocabulary"),
        (r#"{"input_ids": [4294967297]}"#, "token_out_of_vocabulary"),
        (r#"{"input_ids": [1], "rid": ""}"#, "bad_name"),
        (
            r#"{"input_ids": [1], "sampling_params": {"max_new_tokens": 131072}}"#,
            "too_long",
        ),
        (
            r#"{"input_ids": [1], "sampling_params": {"max_new_tokens": 641}}"#,
            "too_large",
        ),
    ];
    for (body, kind) in cases {
        let (status, reply) = rig.post("/generate", body).await;
        assert_eq!(
            (status, &reply["error"]["type"]),
            (400, &json!(kind)),
            "{body}: {reply}"
        );
        assert!(!reply["error"]["message"].as_str().unwrap().is_empty());
    }
    let long = json!({ "input_ids": [1], "session_id": "x".repeat(513) });
    assert_eq!(rig.generate(long).await.1["error"]["type"], "bad_name");
    let ids = vec![1_u32; 131_073];
    assert_eq!(
        rig.generate(json!({ "input_ids": ids })).await.1["error"]["type"],
        "too_long"
    );
    let ok = json!({ "input_ids": [1], "sampling_params": { "max_new_tokens": 640 } });
    assert_eq!(rig.generate(ok).await.0, 200);
}

#[tokio::test]
async fn concurrent_requests_get_their_own_answers() {
    let rig = Rig::new(&["--slots", "12", "--max-running", "6", "--page-size", "16"]).await;
    let body = |i: u32| {
        let ids: Vec<u32> = (0..200 + i * 20)
            .map(|k| (k * (2 * i + 3)) % 2048)
            .collect();
        json!({
            "input_ids": ids, "rid": format!("r{i}"), "sampling_params": { "max_new_tokens": 16 },
        })
    };
    let all = futures_util::future::join_all((0..16).map(|i| rig.generate(body(i)))).await;
    rig.post("/flush_cache", "").await;
    for (i, (status, reply)) in (0..16).zip(all) {
        assert_eq!(
            (status, &reply["meta_info"]["id"]),
            (200, &json!(format!("r{i}")))
        );
        assert_eq!(
            rig.generate(body(i)).await.1["output_ids"],
            reply["output_ids"]
        );
    }
    assert_eq!(rig.get("/server_info").await["sanity_check"], "ok");
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_its_request() {
    let rig = Rig::new(&[]).await;
    let body = json!({
        "input_ids": [1, 2, 3], "rid": "long", "sampling_params": { "max_new_tokens": 100_000 },
    });
    let url = format!("http://{}/generate", rig.address);
    let call = tokio::spawn(rig.client.post(url).body(body.to_string()).send());
    rig.until_running(1).await;
    call.abort();
    let info = rig.until_running(0).await;
    assert_eq!(
        (&info["counts"]["aborted"], &info["pages"]["held"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(info["sanity_check"], "ok");
}

#[tokio::test]
async fn stopping_answers_what_is_open() {
    let mut rig = Rig::new(&[]).await;
    let body = json!({ "input_ids": [1], "sampling_params": { "max_new_tokens": 100_000 } });
    let url = format!("http://{}/generate", rig.address);
    let call = tokio::spawn(rig.client.post(url).body(body.to_string()).send());
    rig.until_running(1).await;
    rig.stop.take().unwrap().send(()).unwrap();
    let reply: Value = call.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(reply["meta_info"]["finish_reason"]["type"], "abort");
    rig.served.await.unwrap().unwrap();
}

#[test]
fn bad_arguments_are_all_named() {
    let bad = [
        "--slots",
        "0",
        "--chunk",
        "0",
        "--exact-end",
        "--state-grid",
        "0",
    ];
    let error = args(&bad).config(1).unwrap_err();
    assert_eq!(error.problems.len(), 4, "{error}");
    assert!(args(&["--exact-end", "--page-size", "1"]).config(1).is_ok());
    let seeds = [
        args(&[]).config(5),
        args(&["--scramble-seed", "9"]).config(5),
    ];
    assert_eq!(seeds.map(|config| config.unwrap().device.scramble), [5, 9]);
}
