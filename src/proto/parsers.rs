//! All parsers of what a peer writes. See `util::parser`.
//!
//! A message of the channel stands here with its kind, two bytes, before its body. The Python half
//! reads the same corpus: python-shim/tests/test_corpus.py.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use prost::Message as _;
use serde_json::Value;

use super::channel::layout::{self, HandshakeReply, HandshakeRequest, header};
use super::channel::msg::{self, Down, Up};
use super::channel::{Capacities, DaemonEnd, Message, WorkerEnd};
use super::v1;
use crate::device::shm::SharedMap;
use crate::util::parser::{Case, Parser, Refused, case, refused, said};

const GOLDEN: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/proto/engram/v1/golden.json"
));

/// All of them.
pub(crate) fn parsers() -> Vec<Parser> {
    let exact = |name, parse, valid, hostile| Parser {
        name,
        parse,
        exact: true,
        seal: None,
        factor: 16,
        valid,
        hostile,
    };
    vec![
        exact("channel-up", message::<Up>, || golden("up"), bad_up),
        exact("channel-down", message::<Down>, || golden("down"), bad_down),
        exact(
            "handshake-request",
            handshake_request,
            || handshakes("HandshakeRequest"),
            || {
                let valid = handshakes("HandshakeRequest").swap_remove(0).1;
                bad_ends(&valid)
            },
        ),
        exact(
            "handshake-reply",
            handshake_reply,
            || handshakes("HandshakeReply"),
            bad_replies,
        ),
        Parser {
            exact: false,
            ..exact(
                "channel-header",
                channel_header,
                || vec![case("small", small_header())],
                bad_channels,
            )
        },
        Parser {
            // Unknown fields are left out.
            exact: false,
            ..exact("session-event", session_event, session_events, bad_events)
        },
    ]
}

// === Messages ===

fn message<M: Message>(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (kind, body) = bytes.split_first_chunk().ok_or("no kind")?;
    let message = M::decode(u16::from_le_bytes(*kind), body).map_err(said)?;
    Ok(written(&message))
}

fn written(message: &impl Message) -> Vec<u8> {
    let mut out = message.kind().to_le_bytes().to_vec();
    message.encode(&mut out);
    out
}

fn rows(direction: &str) -> Vec<(String, Option<u64>, Vec<u8>)> {
    let rows: Vec<Value> = serde_json::from_str(GOLDEN).unwrap();
    let rows = rows.iter().filter(|row| row["direction"] == direction);
    let found = rows.enumerate().map(|(n, row)| {
        let digits = row["body"].as_str().unwrap().as_bytes().chunks(2);
        let body =
            digits.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap());
        let name = row["message"].as_str().unwrap();
        (
            format!("{name}-{n:02}"),
            row["kind"].as_u64(),
            body.collect(),
        )
    });
    found.collect()
}

fn golden(direction: &str) -> Vec<Case> {
    let rows = rows(direction).into_iter();
    rows.map(|(name, kind, body)| {
        let kind = (kind.unwrap() as u16).to_le_bytes();
        (name, [&kind, &body[..]].concat())
    })
    .collect()
}

fn handshakes(name: &str) -> Vec<Case> {
    let rows = rows("handshake").into_iter();
    rows.filter(|(found, ..)| found.starts_with(name))
        .map(|(name, _, body)| (name, body))
        .collect()
}

/// Cuts, and a byte too many.
fn bad_ends(valid: &[u8]) -> Vec<Refused> {
    vec![
        refused("empty", "", ""),
        refused("cut", &valid[..valid.len() - 1], "ends after"),
        refused("longer", [valid, &[0]].concat(), "follow"),
    ]
}

/// A message with a word of its body replaced.
fn with(message: impl Message, at: usize, word: u32) -> Vec<u8> {
    let mut bytes = written(&message);
    bytes[2 + at..6 + at].copy_from_slice(&word.to_le_bytes());
    bytes
}

fn bad_up() -> Vec<Refused> {
    let fill = || {
        Up::from(msg::Fill {
            lease: 1,
            piece: layout::Piece::Kv,
            index: 0,
            count: 1,
            ring_offset: 0,
            bytes: 0,
        })
    };
    let open = || {
        Up::from(msg::RequestOpen {
            req: 0,
            attempt: 0,
            flags: layout::RequestFlags::ALL,
            epoch: 0,
            rid: "xy".into(),
            session_id: String::new(),
            tenant: String::new(),
            extra_key: String::new(),
            cache_salt: String::new(),
            adapter: [0; 32],
        })
    };
    let mut bad = bad_ends(&written(&fill()));
    for kind in [0, 13, 101, 999, u16::MAX] {
        bad.push(refused(
            &format!("kind-{kind}"),
            kind.to_le_bytes(),
            "no message",
        ));
    }
    for piece in [0, 3, u32::MAX] {
        let why = format!("Fill.piece: {piece} is not a value of it");
        bad.push(refused(
            &format!("piece-{piece}"),
            with(fill(), 8, piece),
            &why,
        ));
    }
    bad.push(refused(
        "flags-64",
        with(open(), 12, 64),
        "is not a value of it",
    ));
    let mut text = written(&open());
    let at = text.windows(2).position(|w| w == b"xy").unwrap();
    text[at] = 0xc3;
    bad.push(refused("text-no-utf8", text, "RequestOpen.rid: not UTF-8"));
    for (name, kind, width) in [
        ("tokens", msg::Tokens::KIND, 4),
        ("wide-tokens", msg::TokensWide::KIND, 8),
    ] {
        let head = [&kind.to_le_bytes()[..], &[0; 12], &u32::MAX.to_le_bytes()].concat();
        let why = format!("0 of {} bytes", u64::from(u32::MAX) * width);
        bad.push(refused(&format!("{name}-endless"), head, &why));
    }
    bad
}

fn bad_down() -> Vec<Refused> {
    let want = || {
        Down::from(msg::Want {
            save: 0,
            need_state: true,
            parts: vec![],
        })
    };
    let mut bad = bad_ends(&written(&want()));
    for kind in [0, 1, 100, 108, u16::MAX] {
        bad.push(refused(
            &format!("kind-{kind}"),
            kind.to_le_bytes(),
            "no message",
        ));
    }
    bad.push(refused(
        "bool-2",
        with(want(), 8, 2),
        "is not a value of it",
    ));
    bad.push(refused(
        "parts-endless",
        with(want(), 12, u32::MAX),
        "ends after",
    ));
    let miss = Down::from(msg::LookupResult {
        req: 0,
        attempt: 0,
        lease: 0,
        boundary: 0,
        kv_from: 0,
        tier: None,
        reason: Some(layout::Miss::NothingStored),
        bytes: 0,
        parts: vec![],
    });
    bad.push(refused(
        "miss-10",
        with(miss, 32, 10),
        "is not a value of it",
    ));
    bad
}

// === The handshake ===

fn handshake_request(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    HandshakeRequest::decode(bytes)
        .map_err(said)?
        .encode(&mut out);
    Ok(out)
}

fn handshake_reply(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    HandshakeReply::decode(bytes)
        .map_err(said)?
        .encode(&mut out);
    Ok(out)
}

fn bad_replies() -> Vec<Refused> {
    let mut reply = Vec::new();
    HandshakeReply {
        magic: 0,
        version: 0,
        status: 0,
        descriptors: 0,
        channel_bytes: 0,
        mode: 0,
        reason: "xy".into(),
    }
    .encode(&mut reply);
    let mut bad = bad_ends(&reply);
    let mut text = reply.clone();
    *text.last_mut().unwrap() = 0xc3;
    bad.push(refused(
        "reason-no-utf8",
        text,
        "HandshakeReply.reason: not UTF-8",
    ));
    let at = reply.len() - 6;
    reply[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    bad.push(refused("reason-endless", reply, "ends after"));
    bad
}

// === The header of a channel ===

const SMALL: Capacities = Capacities {
    up: layout::MIN_CAPACITY,
    down: layout::MIN_CAPACITY,
};

/// Bytes of the header that anything is read of.
const READ: usize = 384;

fn small_header() -> Vec<u8> {
    let map = Arc::new(SharedMap::anonymous(SMALL.bytes()).unwrap());
    DaemonEnd::create(&map, SMALL, [1; 16], [2; 16]).unwrap();
    let mut bytes = vec![0; READ];
    map.read(0, &mut bytes).unwrap();
    bytes
}

/// Opens memory that begins with the bytes and goes on with zeros, and uses it as a worker does.
fn channel_header(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let map = Arc::new(SharedMap::anonymous(SMALL.bytes()).unwrap());
    let bytes = &bytes[..bytes.len().min(READ)];
    map.write(0, bytes).unwrap();
    let mut end = WorkerEnd::open(&map).map_err(said)?;
    let mut out = vec![0; READ];
    map.read(0, &mut out).unwrap();
    // Whatever beats and closed words say: an answer, and at once.
    let _ = (end.rx.pop(), end.link.peer_closed(), end.link.peer_beat());
    let _ = end.tx.push(&msg::RequestClose { req: 1 }.into());
    end.link.beat();
    Ok(out)
}

fn bad_channels() -> Vec<Refused> {
    let set = |at: u64, value: u64, bytes: usize| {
        let mut all = small_header();
        all[at as usize..at as usize + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        all
    };
    let size = SMALL.bytes();
    let mut bad = vec![
        refused("empty", "", "no channel"),
        refused("another-magic", set(header::MAGIC, 0, 8), "no channel"),
        refused("another-version", set(header::VERSION, 99, 4), "version 99"),
        refused("no-header", set(header::HEADER_BYTES, 0, 4), "header of 0"),
        refused("up-over-down", set(header::UP_OFFSET, 8192, 8), "overlap"),
        refused(
            "down-over-up",
            set(header::DOWN_OFFSET, 4096 + 64, 8),
            "overlap",
        ),
    ];
    for (name, at, values) in [
        (
            "up-offset",
            header::UP_OFFSET,
            [0, 64, 4097, size, u64::MAX - 63],
        ),
        (
            "down-offset",
            header::DOWN_OFFSET,
            [0, 4032, 8200, size - 4032, 1 << 63],
        ),
        (
            "up-capacity",
            header::UP_CAPACITY,
            [0, 64, 4100, size, u64::MAX - 63],
        ),
        (
            "down-capacity",
            header::DOWN_CAPACITY,
            [0, 4032, 4097, 8192, 1 << 40],
        ),
    ] {
        let set = values
            .map(|value| refused(&format!("{name}-{value}"), set(at, value, 8), "cannot have"));
        bad.extend(set);
    }
    bad
}

#[test]
fn nothing_is_read_of_a_header_beyond_what_the_corpus_has() {
    let map = Arc::new(SharedMap::anonymous(SMALL.bytes()).unwrap());
    DaemonEnd::create(&map, SMALL, [1; 16], [2; 16]).unwrap();
    for at in (READ as u64..layout::HEADER_BYTES).step_by(8) {
        map.store_u64(at, u64::MAX, Ordering::Relaxed).unwrap();
    }
    let end = WorkerEnd::open(&map).unwrap();
    assert_eq!((end.link.peer_closed(), end.link.peer_beat()), (None, 0));
}

// === gRPC ===

fn session_event(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let event = v1::WorkerEvent::decode(bytes).map_err(said)?;
    Ok(event.encode_to_vec())
}

fn session_events() -> Vec<Case> {
    let event = |event| v1::WorkerEvent { event: Some(event) }.encode_to_vec();
    let hello = v1::Hello {
        session: vec![1; 16].into(),
        secret: vec![2; 32].into(),
    };
    let beat = v1::WorkerBeat {
        ticks: u64::MAX,
        hooks: vec![v1::HookTime {
            name: "insert".into(),
            calls: 3,
            ..Default::default()
        }],
        ..Default::default()
    };
    vec![
        case("hello", event(v1::worker_event::Event::Hello(hello))),
        case("beat", event(v1::worker_event::Event::Beat(beat))),
    ]
}

fn bad_events() -> Vec<Refused> {
    vec![
        refused(
            "longer-than-all",
            [0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f],
            "decode",
        ),
        refused(
            "endless-number",
            [&[0x08][..], &[0xff; 11]].concat(),
            "decode",
        ),
        refused("field-0", [0x02, 0x00], "decode"),
        refused("group-without-end", [0x0b, 0x0b, 0x0b], "decode"),
    ]
}
