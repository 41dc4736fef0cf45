//! HTTP by hand over TCP or a Unix socket, so that a test can send what no client would.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// `HOST:PORT`.
    Tcp(String),
    /// Path of a Unix socket.
    Unix(PathBuf),
}

/// An HTTP answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

impl Place {
    fn connect(&self, patience: Duration) -> io::Result<Box<dyn Stream>> {
        match self {
            Place::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_read_timeout(Some(patience))?;
                Ok(Box::new(stream))
            }
            Place::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(patience))?;
                Ok(Box::new(stream))
            }
        }
    }

    /// Sends bytes as they are and reads until the server closes the connection.
    pub fn raw(&self, bytes: &[u8]) -> io::Result<Answer> {
        let mut stream = self.connect(super::PATIENCE)?;
        // A server may refuse before it has read everything: its answer counts then.
        let sent = stream.write_all(bytes).and_then(|()| stream.flush());
        let mut all = Vec::new();
        match stream.read_to_end(&mut all) {
            Err(error) if all.is_empty() => return Err(sent.err().unwrap_or(error)),
            _ => {}
        }
        Answer::parse(&all).ok_or_else(|| io::Error::other(String::from_utf8_lossy(&all)))
    }

    /// One request with a head of its own.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Answer> {
        let mut bytes = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n").into_bytes();
        let has = |name: &str| headers.iter().any(|(n, _)| n.eq_ignore_ascii_case(name));
        if !has("host") {
            bytes.extend(b"Host: localhost\r\n");
        }
        if !body.is_empty() && !has("content-length") && !has("transfer-encoding") {
            bytes.extend(format!("Content-Length: {}\r\n", body.len()).into_bytes());
        }
        for (name, value) in headers {
            bytes.extend(format!("{name}: {value}\r\n").into_bytes());
        }
        bytes.extend(b"\r\n");
        bytes.extend(body);
        self.raw(&bytes)
    }

    /// GET.
    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], b"").unwrap()
    }

    /// POST of JSON.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let json = [("Content-Type", "application/json")];
        self.request("POST", path, &json, body.to_string().as_bytes())
            .unwrap()
    }
}

impl Answer {
    fn parse(bytes: &[u8]) -> Option<Answer> {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
        let head = std::str::from_utf8(&bytes[..end]).ok()?;
        let mut lines = head.split("\r\n");
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let mut answer = Answer {
            status,
            headers,
            body: bytes[end + 4..].to_vec(),
        };
        if answer.header("transfer-encoding") == Some("chunked") {
            answer.body = unchunk(&answer.body)?;
        }
        Some(answer)
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// `error.type` of a refusal.
    pub fn kind(&self) -> String {
        self.json()["error"]["type"]
            .as_str()
            .unwrap_or("none")
            .to_owned()
    }
}

fn unchunk(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    loop {
        let end = bytes.windows(2).position(|window| window == b"\r\n")?;
        let size = std::str::from_utf8(&bytes[..end]).ok()?;
        let size = usize::from_str_radix(size.split(';').next()?, 16).ok()?;
        if size == 0 {
            return Some(out);
        }
        bytes = &bytes[end + 2..];
        out.extend(bytes.get(..size)?);
        bytes = bytes.get(size + 2..)?;
    }
}
