//! Streamed answers of `/generate`.

use super::*;

/// The events of an answer.
async fn events(rig: &Rig, path: &str, body: Value) -> Vec<Value> {
    let url = format!("http://{}{path}", rig.address);
    let reply = rig.client.post(url).body(body.to_string()).send().await;
    let reply = reply.unwrap();
    assert_eq!(reply.status().as_u16(), 200);
    assert_eq!(reply.headers()["content-type"], "text/event-stream");
    read_events(&reply.text().await.unwrap())
}

/// The events of a body that ends well.
pub(super) fn read_events(text: &str) -> Vec<Value> {
    let mut lines: Vec<&str> = text.split("\n\n").collect();
    assert_eq!((lines.pop(), lines.pop()), (Some(""), Some("data: [DONE]")));
    let data = lines
        .iter()
        .map(|line| line.strip_prefix("data: ").unwrap());
    data.map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[tokio::test]
async fn a_streamed_answer_is_the_whole_answer_piece_by_piece() {
    let rig = Rig::new(&[]).await;
    let body = |stream: bool| {
        json!({
            "input_ids": [5, 6, 7], "rid": "r", "stream": stream, "return_logprob": true,
            "top_logprobs_num": 2, "sampling_params": { "max_new_tokens": 9, "temperature": 0 },
        })
    };
    let (_, whole) = rig.generate(body(false)).await;
    let events = events(&rig, "/generate", body(true)).await;
    assert_eq!(events.last().unwrap()["output_ids"], whole["output_ids"]);
    let all = whole["output_ids"].as_array().unwrap();
    for event in &events {
        let ids = event["output_ids"].as_array().unwrap();
        assert!(all.starts_with(ids) && !ids.is_empty());
        assert_eq!(event["meta_info"]["id"], "r");
        assert_eq!(event["meta_info"]["completion_tokens"], ids.len());
    }
    let (last, early) = events.split_last().unwrap();
    assert!(
        early
            .iter()
            .all(|event| event["meta_info"]["finish_reason"].is_null())
    );
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "length");
    assert_eq!(last["meta_info"]["cached_tokens"], 0);
    let lists = ["output_token_logprobs", "output_top_logprobs"];
    for list in lists {
        assert_eq!(last["meta_info"][list], whole["meta_info"][list], "{list}");
        assert_eq!(whole["meta_info"][list].as_array().unwrap().len(), 9);
    }
    let own = whole["meta_info"]["output_token_logprobs"]
        .as_array()
        .unwrap();
    let top = whole["meta_info"]["output_top_logprobs"]
        .as_array()
        .unwrap();
    for ((own, top), id) in own.iter().zip(top).zip(all) {
        // Greedy: the token is the most likely one.
        assert_eq!((&own[0], &own[1]), (&top[0][0], id));
        assert!(own[0].as_f64().unwrap() < 0.0);
        assert!(top[0][0].as_f64() >= top[1][0].as_f64());
    }
}

#[tokio::test]
async fn an_incremental_stream_says_only_what_is_new() {
    let rig = Rig::new(&["--incremental-streaming-output"]).await;
    let body = json!({
        "input_ids": [5, 6, 7], "sampling_params": { "max_new_tokens": 9 }, "stream": true,
    });
    let events = events(&rig, "/generate", body.clone()).await;
    let mut ids = Vec::new();
    for event in &events {
        ids.extend(event["output_ids"].as_array().unwrap().clone());
        assert_eq!(event["meta_info"]["completion_tokens"], ids.len());
    }
    let mut body = body;
    body["stream"] = json!(false);
    assert_eq!(rig.generate(body).await.1["output_ids"], json!(ids));
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_frees_its_request() {
    let rig = Rig::new(&[]).await;
    let body = json!({
        "input_ids": [1], "stream": true, "sampling_params": { "max_new_tokens": 100_000 },
    });
    let url = format!("http://{}/generate", rig.address);
    let mut reply = rig
        .client
        .post(url)
        .body(body.to_string())
        .send()
        .await
        .unwrap();
    assert!(
        reply
            .chunk()
            .await
            .unwrap()
            .unwrap()
            .starts_with(b"data: {")
    );
    rig.until_running(1).await;
    drop(reply);
    let info = rig.until_running(0).await;
    assert_eq!(info["counts"]["aborted"], 1);
    assert_eq!(info["sanity_check"], "ok");
}

#[tokio::test]
async fn an_aborted_stream_says_so() {
    let rig = Rig::new(&[]).await;
    let body = json!({
        "input_ids": [1], "stream": true, "rid": "x",
        "sampling_params": { "max_new_tokens": 100_000 },
    });
    let url = format!("http://{}/generate", rig.address);
    let call = tokio::spawn(rig.client.post(url).body(body.to_string()).send());
    let reply = call.await.unwrap().unwrap();
    assert_eq!(
        rig.post("/abort_request", r#"{"rid": "x"}"#).await.1["aborted"],
        true
    );
    let events = read_events(&reply.text().await.unwrap());
    let last = events.last().unwrap();
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "abort");
}
