//! A server that is down, slow, wrong, or gone in the middle; a client that goes; a daemon that is
//! told to stop.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::daemon::Daemon;
use crate::common::engine::tokens;
use crate::common::http::Place;
use crate::common::wait_for;
use crate::fakes::{Fake, begin_events, say};
use crate::stage::{Stage, chat, order, user};

fn daemon(url: &str, knobs: &[(&str, toml::Value)]) -> Daemon {
    let knobs = [&[("upstream.url", url.into())], knobs].concat();
    Daemon::start(&knobs)
}

/// Status and type of the answer to a request with tokens, and to a chat that passes through.
fn kinds(daemon: &Daemon) -> [(u16, String); 2] {
    let generate = daemon.post("/v1/generate", &order("c", &[1, 2], 4));
    let chat = daemon.post(
        "/v1/chat/completions",
        &chat(json!([user("x")]), 4, json!({})),
    );
    [generate, chat].map(|answer| (answer.status, answer.kind()))
}

#[test]
fn without_a_server_nothing_generates_and_all_else_works() {
    let daemon = Daemon::start(&[]);
    for kind in kinds(&daemon) {
        assert_eq!(kind, (501, "not_implemented".to_owned()));
    }
    assert_eq!(daemon.get("/readyz").status, 200);
}

#[test]
fn a_server_that_is_down_is_a_typed_503() {
    let daemon = daemon("http://127.0.0.1:9", &[]);
    for kind in kinds(&daemon) {
        assert_eq!(kind, (503, "upstream_unavailable".to_owned()));
    }
    let answer = daemon.post("/v1/generate", &order("c", &[1], 1));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(answer.json()["error"]["retryable"], true);
}

#[test]
fn a_server_that_fails_is_a_typed_502() {
    let fake = Fake::start(|stream| say(stream, "500 Oops", "text/plain", b"out of memory"));
    let failed = daemon(&fake.url, &[]).post("/v1/generate", &order("c", &[1], 1));
    assert_eq!((failed.status, &*failed.kind()), (502, "bad_upstream"));
    let fake = Fake::start(|stream| say(stream, "503 Full", "application/json", b"{}"));
    let full = daemon(&fake.url, &[]).post("/v1/generate", &order("c", &[1], 1));
    assert_eq!((full.status, &*full.kind()), (503, "upstream_unavailable"));
    let fake = Fake::start(|stream| say(stream, "200 OK", "text/html", b"<html>"));
    let odd = daemon(&fake.url, &[]);
    let answer = odd.post("/v1/generate", &order("c", &[1], 1));
    assert_eq!((answer.status, &*answer.kind()), (502, "bad_upstream"));
    let mut streamed = order("c", &[1], 1);
    streamed["stream"] = json!(true);
    let answer = odd.post("/v1/generate", &streamed);
    assert_eq!((answer.status, &*answer.kind()), (502, "bad_upstream"));
    let fake = Fake::start(|stream| say(stream, "429 Slow", "application/x-mine", b"{\"a\":1}"));
    let refused = daemon(&fake.url, &[]).post("/v1/generate", &order("c", &[1], 1));
    assert_eq!(
        (refused.status, &refused.body[..]),
        (429, &b"{\"a\":1}"[..])
    );
    assert_eq!(refused.header("content-type"), Some("application/x-mine"));
}

#[test]
fn an_answer_that_is_too_large_is_not_read() {
    let fake = Fake::start(|stream| say(stream, "200 OK", "application/json", &[b' '; 200_000]));
    let daemon = daemon(&fake.url, &[("upstream.max_answer", "64 KiB".into())]);
    let answer = daemon.post("/v1/generate", &order("c", &[1], 1));
    assert_eq!((answer.status, &*answer.kind()), (502, "bad_upstream"));
    let long = format!("{{\"text\":\"{}\"}}", "x".repeat(100_000));
    let fake = Fake::start(move |stream| begin_events(stream, &[&long]));
    let daemon = self::daemon(&fake.url, &[("upstream.max_answer", "64 KiB".into())]);
    let mut body = order("c", &[1], 1);
    body["stream"] = json!(true);
    let answer = daemon.post("/v1/generate", &body);
    assert_eq!(last_error(answer.text())["type"], "bad_upstream");
}

/// The error in the last event before `[DONE]`.
fn last_error(text: &str) -> Value {
    let text = text
        .strip_suffix("data: [DONE]\n\n")
        .unwrap_or_else(|| panic!("{text}"));
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    let event: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    event["error"].clone()
}

#[test]
fn a_connection_that_was_closed_while_idle_is_tried_anew_once() {
    let (listener, url) = crate::fakes::listen();
    let served = std::thread::spawn(move || {
        let mut served = 0;
        for stream in listener.incoming().take(2) {
            let mut stream = stream.unwrap();
            crate::fakes::read_request(&mut stream).unwrap();
            let head =
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
            stream.write_all(head.as_bytes()).unwrap();
            served += 1;
            if served == 1 {
                // The next request on it finds it closed.
                crate::fakes::read_request(&mut stream).unwrap();
            }
        }
        served
    });
    let daemon = daemon(&url, &[]);
    for _ in 0..2 {
        assert_eq!(daemon.post("/generate", &json!({})).status, 200);
    }
    assert_eq!(served.join().unwrap(), 2);
}

#[test]
fn what_passes_may_be_larger_than_what_the_daemon_itself_takes() {
    let fake = Fake::start(|stream| say(stream, "200 OK", "application/json", b"{}"));
    let daemon = daemon(&fake.url, &[]);
    let body = json!({ "messages": [user(&"x".repeat(5 << 20))] });
    assert_eq!(daemon.post("/v1/chat/completions", &body).status, 200);
    assert_eq!(daemon.post("/list_snapshots", &body).status, 413);
    let knobs = [("rest.max_generate_body", "1 MiB".into())];
    let daemon = self::daemon(&fake.url, &knobs);
    assert_eq!(daemon.post("/v1/chat/completions", &body).status, 413);
}

#[test]
fn a_slow_server_is_a_typed_504() {
    let fake = Fake::start(|stream| {
        // Until the daemon gives up.
        stream.read_exact(&mut [0]).ok();
    });
    let daemon = daemon(&fake.url, &[("upstream.timeout", "300ms".into())]);
    for kind in kinds(&daemon) {
        assert_eq!(kind, (504, "upstream_timeout".to_owned()));
    }
    assert_eq!(daemon.get("/readyz").status, 200);
}

#[test]
fn a_stream_that_stands_still_or_breaks_off_ends_with_an_error() {
    let event = r#"{"output_ids":[1],"meta_info":{"id":"x","finish_reason":null}}"#;
    for stands in [true, false] {
        let fake = Fake::start(move |stream| {
            begin_events(stream, &[event]);
            if stands {
                stream.read_exact(&mut [0]).ok();
            }
        });
        let daemon = daemon(&fake.url, &[("upstream.idle_timeout", "300ms".into())]);
        let kind = if stands {
            "upstream_timeout"
        } else {
            "bad_upstream"
        };
        let mut body = order("c", &[1], 4);
        body["stream"] = json!(true);
        let answer = daemon.post("/v1/generate", &body);
        assert!(answer.text().starts_with(&format!("data: {event}\n\n")));
        assert_eq!(last_error(answer.text())["type"], kind);
        // The same for what passes through.
        let chat = chat(json!([user("x")]), 4, json!({ "stream": true }));
        let answer = daemon.post("/v1/chat/completions", &chat);
        assert_eq!(last_error(answer.text())["type"], kind);
        // The server was told of the end of the first.
        let told = wait_for("an abort", || {
            fake.requests
                .try_recv()
                .ok()
                .filter(|request| is_abort(request))
        });
        assert!(String::from_utf8_lossy(&told).contains("\"rid\""));
    }
}

fn is_abort(request: &[u8]) -> bool {
    request.starts_with(b"POST /abort_request ")
}

#[test]
fn what_passes_is_the_same_byte_for_byte() {
    let fake = Fake::start(|stream| say(stream, "201 Made", "application/x-mine", b"\x00\xff\n"));
    let daemon = daemon(&fake.url, &[]);
    let body = b"{ \"messages\" :[ ],\n\t\"a\": 1.50, \"a\": \"\\u00e9\" } ";
    let headers = [
        ("Content-Type", "application/json; charset=utf-8"),
        ("X-Custom", "mine"),
        ("Authorization", "Bearer for-the-server"),
        ("X-Request-Id", "q"),
    ];
    let answer = daemon
        .place()
        .request("POST", "/v1/chat/completions?x=%20y", &headers, body)
        .unwrap();
    assert_eq!((answer.status, &answer.body[..]), (201, &b"\x00\xff\n"[..]));
    assert_eq!(answer.header("x-other"), Some("kept"));
    assert_eq!(answer.header("content-type"), Some("application/x-mine"));
    assert_eq!(answer.header("x-request-id"), Some("q"));
    let sent = fake.requests.recv().unwrap();
    let at = sent
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .unwrap();
    assert_eq!(&sent[at + 4..], body);
    let head = String::from_utf8_lossy(&sent[..at]).to_ascii_lowercase();
    assert!(
        head.starts_with("post /v1/chat/completions?x=%20y http/1.1\r\n"),
        "{head}"
    );
    for line in [
        "content-type: application/json; charset=utf-8",
        "x-custom: mine",
        "authorization: bearer for-the-server",
    ] {
        assert!(head.lines().any(|it| it == line), "{line}: {head}");
    }
    // A page of another site cannot have it sent.
    let form = [("Content-Type", "text/plain")];
    let answer = daemon
        .place()
        .request("POST", "/generate", &form, b"{}")
        .unwrap();
    assert_eq!(answer.status, 415);
}

#[test]
fn the_daemons_own_token_is_not_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        toml::Value::from(path.to_str().unwrap())
    };
    let knobs = [
        ("rest.token_file", file("token", "0123456789abcdef")),
        ("upstream.api_key_file", file("key", "the-servers-key")),
    ];
    let fake = Fake::start(|stream| say(stream, "200 OK", "application/json", b"{}"));
    let daemon = daemon(&fake.url, &knobs);
    let headers = [
        ("Content-Type", "application/json"),
        ("Authorization", "Bearer 0123456789abcdef"),
    ];
    for (path, body) in [
        ("/generate", json!({})),
        ("/v1/generate", order("c", &[1], 1)),
    ] {
        let body = body.to_string();
        let place = daemon.place();
        place
            .request("POST", path, &headers, body.as_bytes())
            .unwrap();
        let sent = String::from_utf8_lossy(&fake.requests.recv().unwrap()).into_owned();
        assert!(sent.contains("Bearer the-servers-key"), "{sent}");
        assert!(!sent.contains("0123456789abcdef"), "{sent}");
    }
}

/// Sends a request and reads until its first event, then leaves the connection to the caller.
pub fn begin(place: &Place, body: &Value) -> TcpStream {
    let Place::Tcp(address) = place else { panic!() };
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let body = body.to_string();
    let head = format!(
        "POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    stream
}

pub fn read_to(stream: &mut TcpStream, mark: &str) -> String {
    let mut text = String::new();
    let mut piece = [0; 4096];
    while !text.contains(mark) {
        let count = stream.read(&mut piece).unwrap();
        assert!(count > 0, "{text}");
        text += &String::from_utf8_lossy(&piece[..count]);
    }
    text
}

#[test]
fn a_client_that_goes_away_ends_its_request_in_the_server() {
    let stage = Stage::new(&[]);
    for stream in [true, false] {
        let aborted = stage.count("aborted");
        let mut body = order("c", &tokens(1, 20), 20_000);
        body["stream"] = json!(stream);
        let mut connection = begin(stage.daemon.place(), &body);
        if stream {
            read_to(&mut connection, "data: {");
        }
        wait_for("a running request", || {
            (stage.engine.info()["running"] == 1).then_some(())
        });
        drop(connection);
        wait_for("its end", || {
            let info = stage.engine.info();
            (info["running"] == 0 && info["waiting"] == 0).then_some(())
        });
        assert_eq!(stage.count("aborted"), aborted + 1);
    }
    // The conversation is not stuck.
    assert_eq!(
        stage
            .daemon
            .post("/v1/generate", &order("c", &tokens(1, 20), 4))
            .status,
        200
    );
    stage.engine.check_accounts();
}

#[test]
fn a_stop_lets_answers_end_and_cuts_off_what_does_not() {
    let mut stage = Stage::with(
        &[],
        &[("upstream.drain_timeout", "1500ms".into())],
        engram::tokenizer::testing::CHATML,
    );
    stage.generate("kept", &tokens(1, 300), 8);
    let mut short = order("short", &tokens(2, 20), 40);
    let mut long = order("long", &tokens(3, 20), 20_000);
    (short["stream"], long["stream"]) = (json!(true), json!(true));
    let mut long = begin(stage.daemon.place(), &long);
    read_to(&mut long, "data: {");
    let mut short = begin(stage.daemon.place(), &short);
    read_to(&mut short, "data: {");
    let began = Instant::now();
    let readers = [short, long]
        .map(|mut stream| std::thread::spawn(move || read_to(&mut stream, "data: [DONE]")));
    let status = stage.daemon.stop();
    assert!(status.success(), "{status:?}");
    // 1.5 s for answers, 20 s for the disk, and some for what is between.
    assert!(began.elapsed() < Duration::from_secs(30));
    let [short, long] = readers.map(|reader| reader.join().unwrap());
    assert!(!short.contains("\"error\""), "{short}");
    assert!(long.contains("\"type\":\"unavailable\""));
    stage.restart_daemon();
    let list = stage.post("/list_snapshots", &json!({ "conversation_id": "kept" }));
    assert_eq!(list["total"], 1, "{list}");
}
