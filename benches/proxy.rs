//! What the daemon adds to a request beside talking to the server directly.
//!
//! The server answers at once, from this process; requests to it and to the daemon in front of it
//! alternate on two kept connections, so that both meet the same machine. What counts is the difference
//! within each pair: of the first byte of an answer, and of its last.
//!
//! `cargo bench --bench proxy -- [PAIRS]`

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Pairs of each kind of request, when nothing is said.
const PAIRS: usize = 2000;
/// Pairs before any is counted.
const WARM: usize = 200;
/// Events of a streamed answer.
const EVENTS: usize = 32;
/// Tokens of a prompt.
const PROMPT: usize = 1000;

/// A kind of request.
struct Kind {
    name: &'static str,
    /// Where the daemon takes it.
    path: &'static str,
    /// A conversation of its own for each.
    conversation: bool,
    stream: bool,
}

const KINDS: [Kind; 4] = [
    Kind {
        name: "passed through, whole",
        path: "/generate",
        conversation: false,
        stream: false,
    },
    Kind {
        name: "passed through, streamed",
        path: "/generate",
        conversation: false,
        stream: true,
    },
    Kind {
        name: "in a conversation, whole",
        path: "/v1/generate",
        conversation: true,
        stream: false,
    },
    Kind {
        name: "in a conversation, streamed",
        path: "/v1/generate",
        conversation: true,
        stream: true,
    },
];

fn main() {
    let args = std::env::args().skip(1);
    // Cargo adds a flag of its own.
    let pairs = args
        .filter_map(|arg| arg.parse().ok())
        .next()
        .unwrap_or(PAIRS);
    let server = serve();
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Daemon::start(folder.path(), &server);
    println!("| request | part | direct p50 | p99 | added p50 | p99 |");
    println!("|---|---|---|---|---|---|");
    for kind in &KINDS {
        let (mut direct, mut through) =
            (Client::connect(&server), Client::connect(&daemon.address));
        let (mut first, mut whole) = (Pairs::default(), Pairs::default());
        for number in 0..WARM + pairs {
            let body = body(kind, number);
            // Which goes first alternates, too.
            let (one, other) = match number % 2 {
                0 => {
                    let one = direct.ask("/generate", &body);
                    (one, through.ask(kind.path, &body))
                }
                _ => {
                    let other = through.ask(kind.path, &body);
                    (direct.ask("/generate", &body), other)
                }
            };
            if number >= WARM {
                first.add(one.0, other.0);
                whole.add(one.1, other.1);
            }
        }
        first.tell(kind.name, "first byte");
        whole.tell(kind.name, "whole");
    }
}

fn body(kind: &Kind, number: usize) -> String {
    let ids: Vec<String> = (0..PROMPT).map(|id| (id * 7 % 2000).to_string()).collect();
    let conversation = match kind.conversation {
        true => format!("\"conversation_id\":\"{}-{number}\",", kind.stream),
        false => String::new(),
    };
    format!(
        "{{{conversation}\"stream\":{},\"input_ids\":[{}],\"sampling_params\":{{\"max_new_tokens\":{EVENTS}}}}}",
        kind.stream,
        ids.join(",")
    )
}

/// Times in pairs.
#[derive(Default)]
struct Pairs {
    direct: Vec<f64>,
    added: Vec<f64>,
}

impl Pairs {
    fn add(&mut self, direct: Duration, through: Duration) {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        self.direct.push(ms(direct));
        self.added.push(ms(through) - ms(direct));
    }

    fn tell(mut self, name: &str, part: &str) {
        let mut of = |values: &str| {
            let values = if values == "direct" {
                &mut self.direct
            } else {
                &mut self.added
            };
            values.sort_by(f64::total_cmp);
            let at = |part: f64| values[((values.len() - 1) as f64 * part) as usize];
            format!("{:.3} ms | {:.3} ms", at(0.5), at(0.99))
        };
        println!("| {name} | {part} | {} | {} |", of("direct"), of("added"));
    }
}

/// A kept connection.
struct Client {
    stream: TcpStream,
    address: String,
}

impl Client {
    fn connect(address: &str) -> Client {
        let stream = TcpStream::connect(address).expect("a listener");
        stream.set_nodelay(true).expect("a socket");
        Client {
            stream,
            address: address.to_owned(),
        }
    }

    /// When the first byte of the answer's body came, and when its last.
    fn ask(&mut self, path: &str, body: &str) -> (Duration, Duration) {
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        let asked = Instant::now();
        self.stream.write_all(request.as_bytes()).expect("a peer");
        let (mut all, mut piece, mut first) = (Vec::new(), [0; 65536], None);
        loop {
            let count = self.stream.read(&mut piece).expect("an answer");
            assert!(
                count > 0,
                "the answer broke off: {}",
                String::from_utf8_lossy(&all)
            );
            all.extend_from_slice(&piece[..count]);
            let Some(head) = find(&all, b"\r\n\r\n") else {
                continue;
            };
            let rest = &all[head + 4..];
            if !rest.is_empty() {
                first.get_or_insert_with(|| asked.elapsed());
            }
            let text = String::from_utf8_lossy(&all[..head]).to_ascii_lowercase();
            let length = text
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            let ended = match length {
                Some(length) => rest.len() >= length.parse::<usize>().expect("a number"),
                None => rest.ends_with(b"0\r\n\r\n"),
            };
            if ended {
                assert!(
                    text.starts_with("http/1.1 200"),
                    "{}",
                    String::from_utf8_lossy(&all)
                );
                let whole = asked.elapsed();
                return (first.unwrap_or(whole), whole);
            }
        }
    }
}

fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

/// A server that answers at once. Returns its address.
fn serve() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
    address
}

fn answer(mut stream: TcpStream) {
    stream.set_nodelay(true).expect("a socket");
    let ids: Vec<usize> = (0..EVENTS).collect();
    let end = format!(
        "{{\"output_ids\":{ids:?},\"text\":\"x\",\"meta_info\":{{\"id\":\"r\",\"finish_reason\":\
         {{\"type\":\"length\"}},\"prompt_tokens\":{PROMPT},\"completion_tokens\":{EVENTS},\
         \"cached_tokens\":0}}}}"
    );
    let event = |text: &str| {
        let data = format!("data: {text}\n\n");
        format!("{:x}\r\n{data}\r\n", data.len())
    };
    let piece =
        event(r#"{"output_ids":[1],"text":"x","meta_info":{"id":"r","finish_reason":null}}"#);
    let (mut open, mut piece_read) = (Vec::new(), [0; 65536]);
    loop {
        let head = loop {
            if let Some(head) = find(&open, b"\r\n\r\n") {
                break head;
            }
            match stream.read(&mut piece_read) {
                Ok(0) | Err(_) => return,
                Ok(count) => open.extend_from_slice(&piece_read[..count]),
            }
        };
        let text = String::from_utf8_lossy(&open[..head]).to_ascii_lowercase();
        let length = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.map_or(0, |it| it.trim().parse().expect("a number"));
        while open.len() < head + 4 + length {
            match stream.read(&mut piece_read) {
                Ok(0) | Err(_) => return,
                Ok(count) => open.extend_from_slice(&piece_read[..count]),
            }
        }
        let request: Vec<u8> = open.drain(..head + 4 + length).collect();
        let said = if find(&request, b"\"stream\":true").is_some() {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\
                        Transfer-Encoding: chunked\r\n\r\n";
            let pieces = piece.repeat(EVENTS - 1);
            format!("{head}{pieces}{}{}0\r\n\r\n", event(&end), event("[DONE]"))
        } else {
            format!(
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{end}",
                end.len()
            )
        };
        if stream.write_all(said.as_bytes()).is_err() {
            return;
        }
    }
}

/// A daemon in front of the server.
struct Daemon {
    process: Child,
    address: String,
}

impl Daemon {
    fn start(folder: &Path, server: &str) -> Daemon {
        let (announce, config) = (folder.join("address.json"), folder.join("engram.toml"));
        let text = format!(
            "[rest]\nlisten = \"127.0.0.1:0\"\n[grpc]\nsocket = {:?}\n[service]\nfd_socket = {:?}\n\
             [store]\nram = \"64 MiB\"\n[upstream]\nurl = \"http://{server}\"\n",
            folder.join("grpc.sock"),
            folder.join("fd.sock"),
        );
        std::fs::write(&config, text).expect("a file");
        let process = Command::new(env!("CARGO_BIN_EXE_engram"))
            .args(["serve", "--config"])
            .arg(&config)
            .arg("--announce")
            .arg(&announce)
            .stderr(Stdio::null())
            .spawn()
            .expect("the daemon");
        let mut daemon = Daemon {
            process,
            address: String::new(),
        };
        let until = Instant::now() + Duration::from_secs(30);
        while daemon.address.is_empty() {
            assert!(Instant::now() < until, "the daemon does not start");
            thread::sleep(Duration::from_millis(20));
            let bound = std::fs::read(&announce).ok();
            let bound: Option<serde_json::Value> =
                bound.and_then(|bytes| serde_json::from_slice(&bytes).ok());
            let url = bound.and_then(|it| it["rest"].as_str().map(str::to_owned));
            daemon.address = url.map_or_else(String::new, |url| url.replace("http://", ""));
        }
        while !is_ready(&daemon.address) {
            assert!(Instant::now() < until, "the daemon is not ready");
            thread::sleep(Duration::from_millis(20));
        }
        daemon
    }
}

fn is_ready(address: &str) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect(address)?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut all = String::new();
        stream
            .read_to_string(&mut all)
            .map(|_| all.starts_with("HTTP/1.1 200"))
    };
    let asked: std::io::Result<bool> = ask();
    asked.unwrap_or(false)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
