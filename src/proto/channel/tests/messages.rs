//! Bodies of messages, without a channel.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::msg::strategy;
use super::*;

fn encoded(message: &impl Message) -> Vec<u8> {
    let mut body = Vec::new();
    message.encode(&mut body);
    body
}

fn check<M: Message + PartialEq + std::fmt::Debug>(message: &M) -> Result<(), TestCaseError> {
    let mut body = encoded(message);
    let back = M::decode(message.kind(), &body);
    prop_assert_eq!(back.as_ref(), Ok(message));
    for cut in 0..body.len() {
        prop_assert!(M::decode(message.kind(), &body[..cut]).is_err());
    }
    body.push(0);
    let longer = M::decode(message.kind(), &body);
    let trailing = matches!(longer, Err(DecodeError::Trailing { left: 1, .. }));
    prop_assert!(trailing, "{:?}", longer);
    Ok(())
}

proptest! {
    #[test]
    fn every_message_of_the_worker_comes_back(message in strategy::up()) {
        check(&message)?;
    }

    #[test]
    fn every_message_of_the_daemon_comes_back(message in strategy::down()) {
        check(&message)?;
    }

    /// Whatever is taken for a message is one: written again it gives the same bytes.
    #[test]
    fn arbitrary_bytes_are_a_message_or_an_error(
        kind in prop::sample::select([&msg::Up::KINDS[..], &msg::Down::KINDS[..], &[0, 13, 100, 108, 65535]].concat()),
        body in prop::collection::vec(prop_oneof![3 => Just(0_u8), 1 => any::<u8>()], 0..300),
    ) {
        let up = msg::Up::decode(kind, &body);
        prop_assert_eq!(up.is_err(), !msg::Up::KINDS.contains(&kind) || up.is_err());
        if let Ok(message) = up {
            prop_assert_eq!(encoded(&message), body.clone());
        }
        if let Ok(message) = msg::Down::decode(kind, &body) {
            prop_assert_eq!(encoded(&message), body);
        }
    }
}

#[test]
fn a_count_beyond_the_body_is_refused_before_anything_is_allocated() {
    let mut body = vec![0; 12];
    body.extend_from_slice(&u32::MAX.to_le_bytes());
    for (kind, needed) in [(msg::Tokens::KIND, 4), (msg::TokensWide::KIND, 8)] {
        let error = msg::Up::decode(kind, &body).unwrap_err();
        let DecodeError::Short {
            needed: bytes,
            left,
            ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((bytes, left), (u64::from(u32::MAX) * needed, 0));
    }
}

#[test]
fn a_value_outside_its_enum_its_flags_or_a_bool_is_refused() {
    let fill = encoded(&msg::Up::from(msg::Fill {
        lease: 1,
        piece: layout::Piece::Kv,
        index: 0,
        count: 1,
        ring_offset: 0,
        bytes: 0,
    }));
    let value = |kind, at: usize, mut body: Vec<u8>, value: u32| {
        body[at..at + 4].copy_from_slice(&value.to_le_bytes());
        if kind < 100 {
            msg::Up::decode(kind, &body).map(|_| ())
        } else {
            msg::Down::decode(kind, &body).map(|_| ())
        }
    };
    assert_eq!(value(4, 8, fill.clone(), 1), Ok(()));
    for bad in [0, 3, u32::MAX] {
        let error = value(4, 8, fill.clone(), bad).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("Fill.piece: {bad} is not a value of it")
        );
    }
    let open = encoded(&msg::Up::from(msg::RequestOpen {
        req: 0,
        attempt: 0,
        flags: layout::RequestFlags::ALL,
        epoch: 0,
        rid: String::new(),
        session_id: String::new(),
        tenant: String::new(),
        extra_key: String::new(),
        cache_salt: String::new(),
        adapter: [0; 32],
    }));
    assert_eq!(value(1, 12, open.clone(), 63), Ok(()));
    assert!(value(1, 12, open, 64).is_err());
    let want = encoded(&msg::Down::from(msg::Want {
        save: 0,
        need_state: true,
        parts: vec![],
    }));
    assert!(value(103, 8, want.clone(), 0).is_ok());
    assert!(value(103, 8, want, 2).is_err());
    let miss = encoded(&msg::Down::from(msg::LookupResult {
        req: 0,
        attempt: 0,
        lease: 0,
        boundary: 0,
        kv_from: 0,
        tier: None,
        reason: Some(layout::Miss::NothingStored),
        bytes: 0,
        parts: vec![],
    }));
    assert!(value(101, 32, miss.clone(), 0).is_ok());
    assert!(value(101, 32, miss, 10).is_err());
}

#[test]
fn text_must_be_utf8() {
    let reply = layout::HandshakeReply {
        magic: 0,
        version: 0,
        status: 0,
        descriptors: 0,
        channel_bytes: 0,
        arena_bytes: 0,
        reason: "xy".into(),
    };
    let mut body = Vec::new();
    reply.encode(&mut body);
    assert_eq!(layout::HandshakeReply::decode(&body), Ok(reply));
    *body.last_mut().unwrap() = 0xC3;
    let error = layout::HandshakeReply::decode(&body).unwrap_err();
    assert!(matches!(
        error,
        DecodeError::Utf8 {
            at: At {
                field: "reason",
                ..
            }
        }
    ));
}

#[test]
fn enums_know_their_numbers_and_names() {
    for reason in layout::CloseReason::ALL {
        assert_eq!(layout::CloseReason::from_u32(reason.as_u32()), Some(reason));
        assert_eq!(json!(reason), json!(reason.as_str()));
    }
    assert_eq!(layout::CloseReason::from_u32(0), None);
    let flags = layout::RequestFlags::NONE.with(layout::RequestFlags::HAS_TENANT, true);
    assert!(flags.contains(layout::RequestFlags::HAS_TENANT));
    assert!(!flags.contains(layout::RequestFlags::NOT_SAVED));
    assert_eq!(layout::RequestFlags::from_u32(64), None);
}

#[test]
fn wide_ids_are_narrowed_only_if_all_fit() {
    let wide = |ids| msg::TokensWide {
        req: 7,
        offset: 9,
        ids,
    };
    let narrow = wide(vec![0, 5, u32::MAX.into()]).narrow().unwrap();
    assert_eq!(
        narrow,
        msg::Tokens {
            req: 7,
            offset: 9,
            ids: vec![0, 5, u32::MAX]
        }
    );
    assert_eq!(wide(vec![1, 1 << 32]).narrow(), None);
}

/// The other half is in python-shim/tests/test_channel.py.
#[test]
fn golden_messages_are_what_both_languages_mean() {
    let rows: Vec<Value> = serde_json::from_str(include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/proto/engram/v1/golden.json"
    )))
    .unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for row in &rows {
        let name = row["message"].as_str().unwrap();
        let hex = row["body"].as_str().unwrap().as_bytes();
        let body: Vec<u8> = hex
            .chunks(2)
            .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect();
        let kind = row["kind"]
            .as_u64()
            .map(|kind| u16::try_from(kind).unwrap());
        let (value, again) = match (row["direction"].as_str().unwrap(), kind) {
            ("up", Some(kind)) => {
                let message = msg::Up::decode(kind, &body).unwrap();
                assert_eq!((message.kind(), message.name()), (kind, name));
                (json!(message), encoded(&message))
            }
            ("down", Some(kind)) => {
                let message = msg::Down::decode(kind, &body).unwrap();
                assert_eq!((message.kind(), message.name()), (kind, name));
                (json!(message), encoded(&message))
            }
            ("handshake", None) if name == "HandshakeRequest" => {
                let message = layout::HandshakeRequest::decode(&body).unwrap();
                let mut again = Vec::new();
                message.encode(&mut again);
                (json!({ name: message }), again)
            }
            ("handshake", None) => {
                let message = layout::HandshakeReply::decode(&body).unwrap();
                let mut again = Vec::new();
                message.encode(&mut again);
                (json!({ name: message }), again)
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(value, json!({ name: row["fields"] }));
        assert_eq!(again, body, "{name}");
        seen.insert(kind);
    }
    let all = msg::Up::KINDS.iter().chain(&msg::Down::KINDS);
    assert!(all.copied().all(|kind| seen.contains(&Some(kind))));
}
