//! Webhooks of a really started daemon, with real receivers: signed, repeated, bounded, held by nobody.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use common::daemon::Daemon;
use common::wait_for;
use common::worker::{Worker, prompt};
use engram::util::clock::{Clock as _, SystemClock};
use hmac::{Hmac, Mac as _};
use parking_lot::Mutex;
use serde_json::Value;
use sha2::Sha256;

const KEY: &[u8] = b"a key of thirty-two bytes, taken";

/// A request as a receiver saw it.
#[derive(Clone, Debug)]
struct Posted {
    path: String,
    id: String,
    seconds: u64,
    signature: String,
    body: Vec<u8>,
}

/// A receiver that answers by a rule: how many requests came before, to a whole answer; none: it
/// keeps the connection and says nothing.
struct Receiver {
    url: String,
    seen: Arc<Mutex<Vec<Posted>>>,
}

impl Receiver {
    fn start(rule: impl Fn(usize) -> Option<&'static str> + Send + 'static) -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook?key=s", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut kept = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let Some(posted) = read(&stream) else {
                    continue;
                };
                let count = {
                    let mut all = all.lock();
                    all.push(posted);
                    all.len() - 1
                };
                match rule(count) {
                    Some(head) => {
                        let text = format!(
                            "HTTP/1.1 {head}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                        );
                        let _ = stream.write_all(text.as_bytes());
                    }
                    None => kept.push(stream),
                }
            }
        });
        Receiver { url, seen }
    }

    fn seen(&self) -> Vec<Posted> {
        self.seen.lock().clone()
    }

    fn wait(&self, count: usize) -> Vec<Posted> {
        wait_for("messages", || {
            let seen = self.seen();
            (seen.len() >= count).then_some(seen)
        })
    }
}

fn read(stream: &TcpStream) -> Option<Posted> {
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    lines.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = std::collections::HashMap::new();
    loop {
        line.clear();
        lines.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let mut body = vec![0; headers.get("content-length")?.parse().ok()?];
    lines.read_exact(&mut body).ok()?;
    assert_eq!(headers["content-type"], "application/json");
    Some(Posted {
        path,
        id: headers.remove("webhook-id")?,
        seconds: headers.remove("webhook-timestamp")?.parse().ok()?,
        signature: headers.remove("webhook-signature")?,
        body,
    })
}

impl Posted {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn verify(&self) {
        let mut mac = Hmac::<Sha256>::new_from_slice(KEY).unwrap();
        mac.update(format!("{}.{}.", self.id, self.seconds).as_bytes());
        mac.update(&self.body);
        let signature = self.signature.strip_prefix("v1,").unwrap();
        mac.verify_slice(&STANDARD.decode(signature).unwrap())
            .unwrap();
        let now = SystemClock::new().now().0 / 1000;
        assert!(now.abs_diff(self.seconds) < 300, "{}", self.seconds);
    }
}

/// A daemon that posts to these, each with more settings.
fn start(receivers: &[(&Receiver, &str)]) -> (tempfile::TempDir, Daemon) {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, format!("whsec_{}\n", STANDARD.encode(KEY))).unwrap();
    let hooks = receivers.iter().map(|(receiver, more)| {
        let text = format!(
            "url = '{}'\nsecret_file = '{}'\nretry_after = '10ms'\nretry_most = '100ms'\n{more}",
            receiver.url,
            secret.display()
        );
        toml::Value::Table(toml::from_str(&text).unwrap())
    });
    let knobs = [
        ("webhooks", toml::Value::Array(hooks.collect())),
        ("service.write_after", "20ms".into()),
    ];
    let daemon = Daemon::start(&knobs);
    (folder, daemon)
}

fn label(receiver: &Receiver) -> &str {
    receiver.url.split('?').next().unwrap()
}

#[test]
fn events_are_posted_signed_and_again_until_they_are_taken() {
    let receiver = Receiver::start(|count| match count {
        0 => Some("500 No"),
        // Followed, it would lead elsewhere.
        1 => Some("302 There\r\nLocation: /elsewhere"),
        2 => Some("429 Later\r\nRetry-After: 1"),
        _ => Some("204 Taken"),
    });
    let chosen = Receiver::start(|_| Some("200 OK"));
    let hooks = [(&receiver, ""), (&chosen, "events = ['durable']")];
    let (_folder, mut daemon) = start(&hooks);
    let mut worker = Worker::attach(&daemon);
    worker.turn("c", &prompt(1, 40), 40);
    daemon.all_durable();
    let seen = wait_for("the end of the turn", || {
        let seen = receiver.seen();
        let durable = |it: &Posted| it.json()["type"] == "durable";
        seen.iter().any(durable).then_some(seen)
    });
    seen.iter().for_each(Posted::verify);
    assert!(seen.iter().all(|it| it.path == "/hook?key=s"), "{seen:?}");
    let first = &seen[0];
    let again = seen.iter().filter(|it| it.id == first.id).count();
    assert_eq!(again, 4, "three refusals, and a yes");
    assert!(seen[..4].iter().all(|it| it.body == first.body));
    assert_eq!(first.json()["type"], "attached");
    assert!(first.json()["timestamp"].as_str().unwrap().ends_with('Z'));
    let saved = seen.iter().find(|it| it.json()["type"] == "saved").unwrap();
    assert_eq!(saved.json()["data"]["conversation_id"], "c");
    let durable = &chosen.wait(1)[0];
    durable.verify();
    assert_eq!(durable.json()["type"], "durable");
    let attempts = |outcome| {
        let labels = format!("{{url=\"{}\",outcome=\"{outcome}\"}}", label(&receiver));
        daemon.metric(&format!("engram_webhook_attempts_total{labels}"))
    };
    wait_for("the counts", || {
        (attempts("delivered") >= 3.0).then_some(())
    });
    assert_eq!((attempts("retried"), attempts("given_up")), (3.0, 0.0));
    assert!(daemon.stop().success());
}

#[test]
fn a_receiver_that_never_answers_holds_up_nobody() {
    let silent = Receiver::start(|_| None);
    let quick = Receiver::start(|_| Some("200 OK"));
    let hooks = [(&silent, "timeout = '1h'"), (&quick, "")];
    let (_folder, mut daemon) = start(&hooks);
    let mut worker = Worker::attach(&daemon);
    for number in 1..20 {
        worker.turn(&format!("c{number}"), &prompt(number, 40), 40);
    }
    daemon.all_durable();
    // Saved, durable and the turn of each, and the worker.
    quick.wait(3 * 19 + 1);
    assert_eq!(silent.seen().len(), 1);
    // Which is not waited for either.
    assert!(daemon.stop().success());
}

#[test]
fn what_nobody_takes_is_given_up_and_counted() {
    let deaf = Receiver::start(|_| Some("500 No"));
    let gone = Receiver::start(|_| Some("410 Gone"));
    let hooks = [(&deaf, "attempts = 3\nevents = ['attached']"), (&gone, "")];
    let (_folder, daemon) = start(&hooks);
    let mut worker = Worker::attach(&daemon);
    worker.turn("c", &prompt(1, 40), 40);
    daemon.all_durable();
    let dropped = |receiver| {
        let sample = format!(
            "engram_webhook_dropped_total{{url=\"{}\"}}",
            label(receiver)
        );
        wait_for("the count", || {
            Some(daemon.metric(&sample)).filter(|count| *count > 0.0)
        })
    };
    assert_eq!(dropped(&deaf), 1.0);
    assert_eq!(deaf.seen().len(), 3);
    assert_eq!(dropped(&gone), 1.0);
    assert_eq!(gone.seen().len(), 1);
}
