use super::*;
use crate::store::sealed_json;

fn turn(turn: u32) -> TurnRef {
    TurnRef {
        turn,
        snapshot: Some(SnapshotId::new()),
        boundary: 256,
        total_tokens: 300,
        rid: "r".into(),
        finished: Millis(5),
        finish: "stop".into(),
        prompt_tokens: None,
        tail: None,
        print: None,
        said: None,
        namespace: None,
    }
}

/// A file as version 1 had it.
fn of_version_1(turn: &str) -> Vec<u8> {
    let body = format!(
        r#"{{"format_version":1,"conversation":"c","tenant":null,"turns":[{{"turn":1,"snapshot":null,"boundary":0,"total_tokens":3,"rid":"r","finished":5,"finish":"stop"{turn}}}],"branches":{{}},"updated":7"#
    );
    let sum = blake3::hash(body.as_bytes()).to_hex();
    format!("{body},\"checksum\":\"{sum}\"}}\n").into_bytes()
}

#[test]
fn version_1_is_read_and_has_nothing_of_version_2() {
    let read: ConversationRef = sealed_json::decode(&of_version_1("")).unwrap();
    assert_eq!(read.format_version, ConversationRef::FORMAT);
    assert_eq!((read.turns.len(), &read.turns[0].tail), (1, &None));
    let again = sealed_json::encode(&read).unwrap();
    assert_eq!(
        sealed_json::decode::<ConversationRef>(&again).unwrap(),
        read
    );
    let newer = of_version_1(r#","tail":[1,2,3]"#);
    let bad = sealed_json::decode::<ConversationRef>(&newer).unwrap_err();
    assert!(bad.detail.contains("more than its version"), "{bad:?}");
    let future = ConversationRef {
        format_version: 3,
        ..read
    };
    assert!(sealed_json::encode(&future).is_err());
}

#[test]
fn a_print_is_its_digits() {
    let print = StreamPrint {
        digest: [0xab; 16],
        chain: 7,
    };
    let text = print.to_string();
    assert_eq!(text.len(), PRINT_DIGITS);
    assert_eq!(text.parse(), Ok(print));
    for bad in [
        "",
        &text[1..],
        &text.to_uppercase(),
        &format!("{text}0"),
        "é",
    ] {
        assert_eq!(bad.parse::<StreamPrint>(), Err(NoPrint), "{bad}");
    }
}

#[test]
fn round_trip_and_limits() {
    let mut conversation = ConversationRef::new(None, "c".into(), Millis(1));
    conversation.turns = vec![turn(1), turn(2), turn(5)];
    conversation.turns[1].tail = Some(Arc::from([9; 44]));
    conversation.turns[1].print = Some(StreamPrint {
        digest: [1; 16],
        chain: u64::MAX,
    });
    conversation.turns[2].said = Some(Arc::from(r#"[{"role":"user"}]"#));
    conversation.turns[1].prompt_tokens = Some(300);
    let mark = MarkRef {
        pinned: true,
        label: Some("before the edit".into()),
    };
    conversation.marks.insert(SnapshotId::new(), mark);
    conversation.unnamed = true;
    conversation.origin = Some(OriginRef {
        conversation: "d".into(),
        turn: 4,
    });
    conversation
        .branches
        .insert("main".into(), SnapshotId::new());
    let bytes = sealed_json::encode(&conversation).unwrap();
    let read: ConversationRef = sealed_json::decode(&bytes).unwrap();
    assert_eq!(read, conversation);

    let refused = |change: &dyn Fn(&mut ConversationRef)| {
        let mut bad = conversation.clone();
        change(&mut bad);
        assert!(sealed_json::encode(&bad).is_err());
    };
    refused(&|c| c.conversation.clear());
    refused(&|c| c.conversation = "x".repeat(MAX_NAME + 1));
    refused(&|c| c.turns.swap(0, 1));
    refused(&|c| c.turns[1].turn = 1);
    refused(&|c| c.turns[0].turn = 0);
    refused(&|c| c.turns[0].boundary = 301);
    refused(&|c| c.turns[0].snapshot = None);
    refused(&|c| {
        c.rules = Some(RulesRef {
            policy: "every_turn".into(),
            every_n_turns: 0,
            min_interval: 0,
        });
    });
    refused(&|c| c.turns[0].prompt_tokens = Some(301));
    refused(&|c| {
        let label = Some("x".repeat(MAX_NAME + 1).into());
        let mark = MarkRef {
            pinned: false,
            label,
        };
        c.marks.insert(SnapshotId::new(), mark);
    });
    refused(&|c| c.turns[0].tail = Some(Arc::from([1; 43])));
    refused(&|c| {
        c.origin = Some(OriginRef {
            conversation: String::new(),
            turn: 1,
        });
    });
}

#[test]
fn hostile_names_only_become_hashes() {
    let names = [
        "../x",
        "/abs",
        "a\0b",
        ".",
        "",
        "é\u{202E}",
        &"x".repeat(300),
    ];
    let mut keys: Vec<String> = names
        .iter()
        .flat_map(|name| [None, Some(""), Some("a"), Some("../x")].map(|t| (t, name)))
        .map(|(tenant, name)| ConversationKey::of(tenant, name).to_hex())
        .collect();
    assert!(
        keys.iter()
            .all(|key| { key.len() == 64 && key.chars().all(|c| c.is_ascii_hexdigit()) })
    );
    let all = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), all);
    // A tenant cannot run into a name.
    let (a, b) = (
        ConversationKey::of(Some("a"), "bc"),
        ConversationKey::of(Some("ab"), "c"),
    );
    assert_ne!(a, b);
}
