//! Servers that misbehave: each answers as it is told.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;

/// A server for as long as it is held. What it was sent comes through `requests`.
pub struct Fake {
    pub url: String,
    pub requests: mpsc::Receiver<Vec<u8>>,
}

impl Fake {
    /// Answers every connection by `answer`, which gets the stream once a whole request was read.
    pub fn start(answer: impl Fn(&mut TcpStream) + Send + Sync + Clone + 'static) -> Fake {
        let (listener, url) = listen();
        let (sender, requests) = mpsc::channel();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let (answer, sender) = (answer.clone(), sender.clone());
                thread::spawn(move || {
                    if let Some(request) = read_request(&mut stream)
                        && sender.send(request).is_ok()
                    {
                        answer(&mut stream);
                    }
                });
            }
        });
        Fake { url, requests }
    }
}

/// A place to answer by hand, and its address.
pub fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

/// Head and body of one request.
pub fn read_request(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut all = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let end = all.windows(4).position(|window| window == b"\r\n\r\n");
        if let Some(end) = end {
            let head = String::from_utf8_lossy(&all[..end]).to_ascii_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length:"))
                .map_or(0, |value| value.trim().parse().unwrap());
            if all.len() >= end + 4 + length {
                return Some(all);
            }
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return None,
            Ok(count) => all.extend(&piece[..count]),
        }
    }
}

/// Writes a whole answer and closes.
pub fn say(stream: &mut TcpStream, status: &str, kind: &str, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nX-Other: kept\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok();
    stream.write_all(body).ok();
}

/// Begins a stream of events, of a length that nobody knows.
pub fn begin_events(stream: &mut TcpStream, events: &[&str]) {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\
                Transfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).ok();
    for event in events {
        let data = format!("data: {event}\n\n");
        let chunk = format!("{:x}\r\n{data}\r\n", data.len());
        stream.write_all(chunk.as_bytes()).ok();
    }
}
