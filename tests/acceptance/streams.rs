//! A thousand streams at once: no answer is mixed with another, and memory is bounded.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::common::engine::tokens;
use crate::stage::Stage;

const STREAMS: u64 = 1000;
const ANSWER: usize = 6;
/// What a thousand streams may add to the daemon's memory: connections both ways, and little more.
const GROWTH_KIB: u64 = 192 << 10;

fn prompt(number: u64) -> Vec<u32> {
    tokens(5000 + number, 12)
}

/// Resident memory of a process in KiB.
fn resident(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").trim().parse().unwrap()
}

async fn stream(client: reqwest::Client, url: String, number: u64) -> (u64, u64, Vec<u32>) {
    let body = json!({
        "conversation_id": format!("c{number}"), "rid": format!("r{number}"),
        "input_ids": prompt(number), "stream": true,
        "sampling_params": { "max_new_tokens": ANSWER, "ignore_eos": true },
    });
    let request = client
        .post(format!("{url}/v1/generate"))
        .header("Content-Type", "application/json")
        .header("X-Request-Id", format!("q{number}"))
        .body(body.to_string());
    let response = request.send().await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    assert_eq!(response.headers()["x-request-id"], format!("q{number}"));
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let mut last = Value::Null;
    let mut count = 0;
    for data in text
        .split("\n\n")
        .filter_map(|part| part.strip_prefix("data: {"))
    {
        last = serde_json::from_str(&format!("{{{data}")).unwrap();
        assert_eq!(last["meta_info"]["id"], format!("r{number}"));
        count += 1;
    }
    assert_eq!(last["engram"]["conversation_id"], format!("c{number}"));
    assert_eq!(last["engram"]["request_id"], format!("q{number}"));
    let ids = serde_json::from_value(last["output_ids"].clone()).unwrap();
    (number, count, ids)
}

#[test]
fn a_thousand_streams_are_not_mixed() {
    let mut stage = Stage::new(&["--slots", "256", "--max-running", "64"]);
    let url = stage.daemon.url();
    let pid = stage.daemon.process().pid();
    let before = resident(pid);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let (answers, peak) = runtime.block_on(async {
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(120))
            .build()
            .unwrap();
        let watch = tokio::spawn(async move {
            let mut peak = 0;
            loop {
                peak = peak.max(resident(pid));
                PEAK.store(peak, std::sync::atomic::Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let streams = (0..STREAMS).map(|n| tokio::spawn(stream(client.clone(), url.clone(), n)));
        let answers = join_all(streams).await;
        watch.abort();
        (answers, PEAK.load(std::sync::atomic::Ordering::Relaxed))
    });
    for answer in answers {
        let (number, events, ids) = answer.unwrap();
        // One for each token, and the end.
        assert_eq!(events, ANSWER as u64 + 1);
        assert_eq!(ids, stage.truth(&prompt(number), ANSWER), "stream {number}");
    }
    let growth = peak.saturating_sub(before);
    assert!(
        growth < GROWTH_KIB,
        "{before} KiB before, {peak} KiB at most"
    );
    stage.engine.check_accounts();
}

static PEAK: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
