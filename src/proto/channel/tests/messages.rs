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
