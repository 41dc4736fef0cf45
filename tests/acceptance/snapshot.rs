//! Phase 7: snapshots end to end.

use serde_json::json;

use crate::common::engine::tokens;
use crate::common::wait_for;
use crate::stage::{Stage, good, ids, number, order};

#[test]
fn save_success() {
    let stage = Stage::new(&[]);
    let first = stage.generate("c", &tokens(1, 300), 20);
    let rid = first["id"].as_str().unwrap();
    // By the name of the answer, as clients do that know no conversation.
    let saved = wait_for("a saved turn", || {
        let answer = stage.daemon.post("/save_snapshot", &json!({ "rid": rid }));
        (answer.status == 200).then(|| answer.json())
    });
    assert_eq!(
        (&saved["success"], &saved["durable"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(saved["conversation_id"], "c");
    let unknown = stage
        .daemon
        .post("/save_snapshot", &json!({ "rid": "nobody" }));
    assert_eq!(
        (unknown.status, &unknown.json()["success"]),
        (404, &json!(false))
    );
}

#[test]
fn restore_state_equivalence() {
    let mut stage = Stage::new(&[]);
    let (prompt, more) = (tokens(2, 700), tokens(3, 30));
    let first = stage.generate("c", &prompt, 24);
    stage.keep("c");
    stage.restart_both();
    let body = json!({
        "conversation_id": "c", "input_ids": more, "return_logprob": true, "top_logprobs_num": 5,
        "sampling_params": { "max_new_tokens": 32, "ignore_eos": true },
    });
    let restored = stage.post("/v1/generate", &body);
    assert!(
        number(&restored, "/usage/cached_tokens") >= 700,
        "{}",
        restored["usage"]
    );
    // The same prompt in full, with nothing cached: the same numbers to the bit.
    let whole = [prompt, ids(&first), more].concat();
    let cold = json!({
        "input_ids": whole, "return_logprob": true, "top_logprobs_num": 5, "cache_salt": "cold",
        "sampling_params": { "max_new_tokens": 32, "ignore_eos": true },
    });
    let cold = stage.direct("/generate", &cold);
    assert_eq!(cold["meta_info"]["cached_tokens"], 0);
    assert_eq!(ids(&restored), ids(&cold));
    for list in ["output_token_logprobs", "output_top_logprobs"] {
        assert_eq!(
            restored["meta_info"][list], cold["meta_info"][list],
            "{list}"
        );
    }
}

#[test]
fn restore_requires_idle() {
    let stage = Stage::new(&[]);
    let unknown = stage
        .daemon
        .post("/restore_snapshot", &json!({ "rid": "nobody" }));
    assert_eq!(
        (unknown.status, &unknown.json()["success"]),
        (404, &json!(false))
    );
    // A request that runs is never touched: its answer is what it would have been.
    let prompt = tokens(4, 300);
    stage.generate("c", &prompt, 8);
    stage.keep("c");
    let truth = stage.truth(&tokens(5, 100), 600);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| stage.generate("running", &tokens(5, 100), 600));
        wait_for("a running request", || {
            (stage.engine.info()["running"] == 1).then_some(())
        });
        let restore = json!({ "conversation_id": "c" });
        assert_eq!(stage.post("/restore_snapshot", &restore)["success"], true);
        assert_eq!(ids(&running.join().unwrap()), truth);
    });
}

#[test]
fn disk_format() {
    let mut stage = Stage::new(&[]);
    stage.generate("c", &tokens(6, 300), 8);
    stage.keep("c");
    stage.daemon.stop();
    let mut files = Vec::new();
    let mut folders = vec![stage.daemon.data()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => files.push(path),
            }
        }
    }
    let with = |end: &str| {
        let files = files
            .iter()
            .filter(|path| path.to_str().unwrap().ends_with(end));
        files.collect::<Vec<_>>()
    };
    let tensors = with(".safetensors");
    assert!(tensors.len() >= 2, "a state and its KV: {files:?}");
    let mut names = Vec::new();
    for path in tensors {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        names.extend(file.names().iter().map(|name| (*name).to_owned()));
    }
    assert!(
        names.iter().any(|name| name.contains("temporal")),
        "{names:?}"
    );
    let manifests = with(".json");
    assert!(!manifests.is_empty());
    for path in manifests {
        let text = std::fs::read_to_string(path).unwrap();
        let line = text.lines().next().unwrap_or_default();
        assert!(line.starts_with('{'), "{}: {line}", path.display());
    }
}

#[test]
fn tier_consistency() {
    let mut stage = Stage::with(
        &[],
        &[("service.preload", "0 B".into())],
        engram::tokenizer::testing::CHATML,
    );
    let prompt = tokens(7, 500);
    stage.generate("c", &prompt, 8);
    stage.keep("c");
    let info = json!({ "conversation_id": "c", "turn_number": 1 });
    let before = stage.post("/get_snapshot_info", &info)["metadata"].clone();
    assert_eq!(before["tier"], "ram");
    stage.restart_both();
    let on_disk = stage.post("/get_snapshot_info", &info)["metadata"].clone();
    assert_eq!(on_disk["tier"], "disk");
    let restored = stage.post("/restore_snapshot", &info);
    assert_eq!(
        (&restored["from_tier"], &restored["tier"]),
        (&json!("disk"), &json!("ram"))
    );
    for same in ["snapshot_id", "boundary", "fill_ids", "size_bytes"] {
        assert_eq!(before[same], on_disk[same], "{same}");
    }
    assert_eq!(restored["boundary"], before["boundary"]);
}

#[test]
fn create_new_request() {
    let stage = Stage::new(&[]);
    let (prompt, more) = (tokens(8, 400), tokens(9, 20));
    let first = stage.generate("c", &prompt, 12);
    stage.keep("c");
    let whole = [prompt.clone(), ids(&first)].concat();
    let info = json!({ "conversation_id": "c", "turn_number": 1 });
    let fill = stage.post("/get_snapshot_info", &info)["metadata"]["fill_ids"].clone();
    let fill: Vec<u32> = serde_json::from_value(fill).unwrap();
    let tail = whole.strip_prefix(fill.as_slice()).unwrap();
    let create = |continuation: &[u32], more: serde_json::Value| {
        let mut body = json!({
            "conversation_id": "c", "turn_number": 1, "create_new_request": true,
            "continuation_ids": continuation, "max_new_tokens": 10, "request_id": "mine",
            "sampling_params": { "ignore_eos": true },
        });
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        stage.post("/restore_snapshot", &body)
    };
    let truth = stage.truth(&[&whole[..], &more].concat(), 10);
    // After the whole turn; and, for clients that know the snapshot's tokens, after those.
    let blind = create(&more, json!({}));
    let exact = create(&[tail, &more].concat(), json!({}));
    for (answer, base) in [(&blind, whole.len()), (&exact, fill.len())] {
        assert_eq!(ids(answer), truth);
        assert_eq!(answer["success"], true);
        assert_eq!(answer["request_id"], "mine");
        assert_eq!(answer["finish_reason"]["type"], "length");
        assert_eq!(answer["token_count"], fill.len());
        assert_eq!(
            number(answer, "/usage/wire_tokens") as usize,
            answer_wire(answer, &whole, &more)
        );
        if !tail.is_empty() {
            assert_eq!(number(answer, "/base_tokens") as usize, base);
        }
        assert!(answer["output_text"].is_string());
    }
    assert_ne!(blind["rid"], exact["rid"]);
    assert_ne!(blind["rid"], first["id"]);
    // Nothing sent: what the model says after its own answer.
    let empty = create(&[], json!({}));
    assert_eq!(ids(&empty), stage.truth(&whole, 10));
    let forced = create(&more, json!({ "append_to": "boundary" }));
    assert_eq!(ids(&forced), stage.truth(&[&fill[..], &more].concat(), 10));
    let bad = json!({
        "conversation_id": "c", "create_new_request": true, "continuation_ids": [1],
        "max_new_tokens": 1, "append_to": "x",
    });
    assert_eq!(stage.daemon.post("/restore_snapshot", &bad).status, 400);
    let nobody = json!({
        "conversation_id": "nobody", "create_new_request": true, "continuation_ids": [1],
        "max_new_tokens": 1,
    });
    assert_eq!(stage.daemon.post("/restore_snapshot", &nobody).status, 404);
    // The conversation goes on from its latest turn all the same.
    good(&stage.daemon.post("/v1/generate", &order("c", &more, 4)));
}

fn answer_wire(answer: &serde_json::Value, whole: &[u32], more: &[u32]) -> usize {
    let base = number(answer, "/base_tokens") as usize;
    whole.len() - base + more.len()
}
