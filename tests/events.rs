//! `/v1/events`: what happens is told as it happens, and again to who was away.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use common::daemon::Daemon;
use common::engine::{Engine, tokens};
use common::http::Place;
use common::{PATIENCE, wait_for};
use serde_json::{Value, json};

/// An event as a client sees it.
#[derive(Clone, Debug)]
struct Seen {
    id: String,
    name: String,
    data: Value,
}

/// A client that reads events.
struct Watcher {
    lines: BufReader<TcpStream>,
}

impl Watcher {
    fn open(daemon: &Daemon, query: &str, last: Option<&str>) -> Watcher {
        let Place::Tcp(address) = daemon.place() else {
            panic!("no TCP");
        };
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let last = last.map_or(String::new(), |id| format!("Last-Event-ID: {id}\r\n"));
        let head = format!("GET /v1/events{query} HTTP/1.1\r\nHost: localhost\r\n{last}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut lines = BufReader::new(stream);
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(line.starts_with("HTTP/1.1 200 "), "{line}");
        while line.trim_end() != "" {
            line.clear();
            lines.read_line(&mut line).unwrap();
        }
        Watcher { lines }
    }

    /// The next event; chunk sizes and comments between are passed over. `None`: the stream is over.
    fn next(&mut self) -> Option<Seen> {
        let (mut id, mut name) = (String::new(), String::new());
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            let line = line.trim_end();
            if let Some(text) = line.strip_prefix("id: ") {
                id = text.to_owned();
            } else if let Some(text) = line.strip_prefix("event: ") {
                name = text.to_owned();
            } else if let Some(text) = line.strip_prefix("data: ") {
                let data = serde_json::from_str(text).unwrap();
                return Some(Seen { id, name, data });
            }
        }
    }

    /// All until one of this name.
    fn until(&mut self, name: &str) -> Vec<Seen> {
        let mut all = Vec::new();
        loop {
            let seen = self.next().expect("the stream goes on");
            all.push(seen);
            if all.last().unwrap().name == name {
                return all;
            }
        }
    }
}

fn names(all: &[Seen]) -> Vec<&str> {
    all.iter().map(|seen| &*seen.name).collect()
}

#[test]
fn what_happens_is_told_and_again_to_who_was_away() {
    let mut daemon = Daemon::start(&[("service.write_after", "20ms".into())]);
    let engine = Engine::beside(&daemon, &[]);
    let mut watcher = Watcher::open(&daemon, "", None);
    let mut chosen = Watcher::open(&daemon, "?types=turn_finished&conversation_id=b", None);
    engine.generate("a", "r1", &tokens(1, 600), 16);
    let all = watcher.until("durable");
    let saved = all.iter().find(|seen| seen.name == "saved").unwrap();
    assert_eq!(saved.data["conversation_id"], "a");
    let durable = all.last().unwrap();
    assert!(durable.data["snapshot_id"].is_string() && durable.data["at"].is_f64());
    engine.generate("b", "r2", &tokens(2, 600), 16);
    let seen = chosen.next().unwrap();
    assert_eq!(
        (&*seen.name, &seen.data["conversation_id"]),
        ("turn_finished", &json!("b"))
    );
    assert_eq!(seen.data["turn_number"], 1);
    // Who comes back hears what was told meanwhile, and then what is new.
    let more = watcher.until("durable");
    let mut again = Watcher::open(&daemon, "", Some(&durable.id));
    let repeated: Vec<Seen> = more.iter().map(|_| again.next().unwrap()).collect();
    assert_eq!(names(&repeated), names(&more));
    assert_eq!(repeated.last().unwrap().id, more.last().unwrap().id);
    daemon.all_durable();
    let mut from_here = Watcher::open(&daemon, "", None);
    let body = json!({ "conversation_id": "a", "whole": true });
    assert_eq!(daemon.post("/delete_snapshot", &body).status, 200);
    assert_eq!(names(&from_here.until("deleted")), ["deleted"]);
    // A number that no event has yet is no promise that nothing was missed.
    let (boot, _) = durable.id.split_once('-').unwrap();
    let mut ahead = Watcher::open(&daemon, "", Some(&format!("{boot}-999999999")));
    let seen = ahead.next().unwrap();
    assert_eq!((&*seen.name, &seen.data["count"]), ("missed", &Value::Null));
    // A daemon that ends, ends the streams; one started anew says so.
    drop(engine);
    assert!(daemon.stop().success());
    while watcher.next().is_some() {}
    while chosen.next().is_some() {}
    daemon.restart();
    let mut after = Watcher::open(&daemon, "", Some(&durable.id));
    let seen = after.next().unwrap();
    assert_eq!((&*seen.name, &seen.data["count"]), ("missed", &Value::Null));
}

#[test]
fn readers_are_bounded_and_bad_requests_refused() {
    let daemon = Daemon::start(&[]);
    for query in [
        "?types=x",
        "?types=",
        "?conversation_id=",
        "?last_event_id=x",
    ] {
        let answer = daemon.get(&format!("/v1/events{query}"));
        assert_eq!(
            (answer.status, &*answer.kind()),
            (400, "invalid_request"),
            "{query}"
        );
    }
    let all: Vec<Watcher> = (0..64).map(|_| Watcher::open(&daemon, "", None)).collect();
    let answer = daemon.get("/v1/events");
    assert_eq!((answer.status, &*answer.kind()), (503, "busy"));
    drop(all);
    wait_for("a place", || {
        let Place::Tcp(address) = daemon.place() else {
            return None;
        };
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
            .write_all(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line.starts_with("HTTP/1.1 200 ").then_some(())
    });
}
