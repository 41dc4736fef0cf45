//! Sealed JSON files, and the note in the lock.

use super::{id, told};
use crate::{
    store::{
        bundle::Bundle,
        disk::{data_dir::Owner, model::ModelFile},
        manifest, refs, sample,
        scrub::ScrubMark,
        sealed_json,
    },
    types::{Fingerprint, Millis, Namespace, ObjectId},
    util::parser::{Case, Refused, case, refused, said},
};

pub(super) fn record_of<T: sealed_json::Record>(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let record: T = sealed_json::decode(bytes).map_err(told)?;
    Ok(sealed_json::encode(&record).expect("what was taken can be written"))
}

/// Gives the last member `checksum` its right value, or adds it.
pub(super) fn seal_json(bytes: &mut Vec<u8>) {
    const CHECKSUM: &[u8] = b",\"checksum\":\"";
    let at = bytes.windows(CHECKSUM.len()).rposition(|w| w == CHECKSUM);
    bytes.truncate(at.unwrap_or(bytes.len()));
    let sum = blake3::hash(bytes).to_hex();
    bytes.extend_from_slice(CHECKSUM);
    bytes.extend_from_slice(sum.as_bytes());
    bytes.extend_from_slice(b"\"}\n");
}

/// The body of a valid record with a part of it replaced, sealed.
pub(super) fn changed(valid: &[Case], from: &str, to: &str) -> Vec<u8> {
    let text = str::from_utf8(&valid[0].1).unwrap();
    assert!(text.contains(from), "{from} is not in {text}");
    let mut bytes = text.replacen(from, to, 1).into_bytes();
    seal_json(&mut bytes);
    bytes
}

pub(super) fn sealed(body: &str) -> Vec<u8> {
    let mut bytes = body.as_bytes().to_vec();
    seal_json(&mut bytes);
    bytes
}

/// What no sealed file may be.
pub(super) fn bad_json(valid: Vec<Case>) -> Vec<Refused> {
    let whole = &valid[0].1;
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    let version = "\"format_version\":";
    let known = str::from_utf8(whole)
        .unwrap()
        .split_once(version)
        .unwrap()
        .1;
    let known: u32 = known.split_once(',').unwrap().0.parse().unwrap();
    let now = format!("{version}{known}");
    let unknown = |to: &str| changed(&valid, &now, &format!("{version}{to}"));
    let next = (known + 1).to_string();
    vec![
        refused("empty", "", "length"),
        refused("cut", &whole[..whole.len() - 1], "checksum"),
        refused("longer", [whole, &b"\n"[..]].concat(), "checksum"),
        refused("flipped", flipped, "checksum"),
        refused(&format!("version-{next}"), unknown(&next), "version"),
        refused(
            "version-18446744073709551615",
            unknown("18446744073709551615"),
            "version",
        ),
        refused("version-negative", unknown("-1"), "malformed"),
        refused(
            "unknown-field",
            unknown(&format!("{known},\"new_field\":0")),
            "unknown_field",
        ),
        refused(
            "field-twice",
            unknown(&format!("{known},{version}{known}")),
            "malformed",
        ),
        refused("no-json", sealed("]"), "malformed"),
        refused("nothing", sealed("{\"format_version\":1"), "malformed"),
        refused(
            "deep",
            sealed(&format!("{{\"x\":{}", "[".repeat(100_000))),
            "",
        ),
    ]
}

pub(super) fn encoded<T: sealed_json::Record>(record: &T) -> Vec<u8> {
    sealed_json::encode(record).unwrap()
}

pub(super) fn manifests() -> Vec<Case> {
    let mut whole = manifest::tests::sample();
    (whole.snapshot, whole.parent) = (id(1), Some(id(2)));
    let mut bare = whole.clone();
    (bare.parent, bare.namespace) = (None, Namespace::default());
    bare.kv.clear();
    bare.labels.clear();
    vec![
        case("two-objects", encoded(&whole)),
        case("no-attention", encoded(&bare)),
    ]
}

pub(super) fn bad_manifests() -> Vec<Refused> {
    let valid = manifests();
    let with = |from: &str, to: &str| changed(&valid, from, to);
    let label = |value: &str| with("\"labels\":{", &format!("\"labels\":{{{value},"));
    let long = "v".repeat((16 << 10) + 1);
    let many: Vec<String> = (0..65).map(|n| format!("\"k{n}\":\"\"")).collect();
    let mut bad = bad_json(manifests());
    let state = "09".repeat(32);
    let (first, second) = ("01".repeat(32), "02".repeat(32));
    bad.extend([
        refused(
            "boundary-0",
            with("\"boundary\":1500", "\"boundary\":0"),
            "invalid",
        ),
        refused(
            "boundary-other",
            with("\"boundary\":1500", "\"boundary\":1499"),
            "own range",
        ),
        refused(
            "boundary-huge",
            with("\"boundary\":1500", "\"boundary\":4294967296"),
            "malformed",
        ),
        refused(
            "own-parent",
            with(&id(2).to_string(), &id(1).to_string()),
            "its own parent",
        ),
        refused(
            "no-shards",
            with("\"shards\":2", "\"shards\":0"),
            "0 shards",
        ),
        refused(
            "many-shards",
            with("\"shards\":2", "\"shards\":4294967295"),
            "shards",
        ),
        refused(
            "hole",
            with("\"range\":[1024,1500],\"obj", "\"range\":[1025,1500],\"obj"),
            "invalid",
        ),
        refused("backwards", with("[1024,1500]", "[1500,1024]"), "malformed"),
        refused("object-twice", with(&second, &first), "twice"),
        refused("state-as-kv", with(&second, &state), "twice"),
        refused("short-id", with(&second, &second[2..]), "malformed"),
        refused(
            "capital-id",
            with(&second, &second.replace("02", "0A")),
            "malformed",
        ),
        refused("label-long", label(&format!("\"k\":\"{long}\"")), "labels"),
        refused("label-empty", label("\"\":\"\""), "labels"),
        refused("labels-many", label(&many.join(",")), "labels"),
    ]);
    bad
}

pub(super) fn conversations() -> Vec<Case> {
    let turn = |turn| refs::TurnRef {
        turn,
        snapshot: Some(id(turn as u8)),
        boundary: 256,
        total_tokens: 300,
        rid: format!("r{turn}"),
        finished: Millis(5),
        finish: "stop".into(),
        prompt_tokens: None,
        tail: None,
        print: None,
        said: None,
        namespace: None,
    };
    let mut whole = refs::ConversationRef::new(Some("t".into()), "../\u{202e}c".into(), Millis(9));
    whole.turns = vec![turn(1), turn(2), turn(5)];
    whole.branches.insert("main".into(), id(9));
    let bare = refs::ConversationRef::new(None, "c".into(), Millis(0));
    let mut spoken = whole.clone();
    spoken.turns.truncate(2);
    spoken.turns[0].tail = Some((0..44).collect());
    spoken.turns[0].prompt_tokens = Some(280);
    spoken.turns[1].print = Some(refs::StreamPrint {
        digest: [3; 16],
        chain: 4,
    });
    spoken.turns[1].said = Some("[{\"role\":\"user\"}]".into());
    spoken.unnamed = true;
    spoken.origin = Some(refs::OriginRef {
        conversation: "d".into(),
        turn: 2,
    });
    let mark = refs::MarkRef {
        pinned: true,
        label: Some("l".into()),
    };
    spoken.marks.insert(id(1), mark);
    vec![
        case("turns", encoded(&whole)),
        case("bare", encoded(&bare)),
        case("spoken", encoded(&spoken)),
    ]
}

pub(super) fn bad_conversations() -> Vec<Refused> {
    let valid = conversations();
    let with = |from: &str, to: &str| changed(&valid, from, to);
    let mut bad = bad_json(conversations());
    let long = format!("\"rid\":\"{}\"", "x".repeat((16 << 10) + 1));
    bad.extend([
        refused("nameless", with("../\u{202e}c", ""), "name"),
        refused("long-rid", with("\"rid\":\"r1\"", &long), "name"),
        refused("turn-0", with("\"turn\":1", "\"turn\":0"), "contradicts"),
        refused(
            "turn-twice",
            with("\"turn\":2", "\"turn\":1"),
            "out of order",
        ),
        refused(
            "beyond",
            with("\"boundary\":256", "\"boundary\":301"),
            "contradicts",
        ),
        refused("no-uuid", with(&id(1).to_string(), "x"), "malformed"),
        refused(
            "short-tail",
            with("\"finish\":\"stop\"", "\"finish\":\"stop\",\"tail\":[1,2]"),
            "more tokens",
        ),
        refused(
            "wide-token",
            with(
                "\"finish\":\"stop\"",
                "\"finish\":\"stop\",\"tail\":[4294967296]",
            ),
            "malformed",
        ),
        refused(
            "no-print",
            with("\"finish\":\"stop\"", "\"finish\":\"stop\",\"print\":\"0\""),
            "malformed",
        ),
        refused(
            "prompt-beyond",
            with("\"rid\":\"r1\"", "\"rid\":\"r1\",\"prompt_tokens\":301"),
            "contradicts",
        ),
        refused(
            "old-with-new",
            with(
                "\"format_version\":2,",
                "\"format_version\":1,\"unnamed\":true,",
            ),
            "more than its version",
        ),
    ]);
    bad
}

pub(super) fn formats() -> Vec<Case> {
    vec![case(
        "format",
        sealed(r#"{"format_version":1,"created":1700000000000"#),
    )]
}

pub(super) fn models() -> Vec<Case> {
    let file = ModelFile {
        format_version: 1,
        fingerprint: Fingerprint([7; 32]),
        description: [("name".to_owned(), "m".to_owned())].into(),
        geometry: sample::geometry(),
    };
    vec![case("small", encoded(&file))]
}

pub(super) fn bad_models() -> Vec<Refused> {
    let valid = models();
    let with = |from: &str, to: &str| changed(&valid, from, to);
    let mut bad = bad_json(models());
    bad.extend([
        refused(
            "huge-shape",
            with("[3,7]", "[4294967295,4294967295]"),
            "malformed",
        ),
        refused(
            "many-dimensions",
            with("[3,7]", "[1,1,1,1,1,1,1,1,1,1,1,1]"),
            "malformed",
        ),
        refused("own-name", with("\"conv.0\"", "\"_pad.0\""), "malformed"),
        refused("path-name", with("\"conv.0\"", "\"../conv\""), "malformed"),
        refused(
            "huge-heads",
            with("\"heads\":2", "\"heads\":4294967295"),
            "malformed",
        ),
    ]);
    bad
}

pub(super) fn marks() -> Vec<Case> {
    let mark = ScrubMark {
        format_version: 1,
        began: Millis(5),
        last: Some(ObjectId([3; 32])),
        ended: None,
    };
    vec![case("under-way", encoded(&mark))]
}

pub(super) fn states() -> Vec<Case> {
    vec![case(
        "open",
        sealed(r#"{"format_version":1,"epoch":77,"boot":"b","closed":null"#),
    )]
}

pub(super) fn lock_note(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let owner: Owner = serde_json::from_slice(bytes).map_err(said)?;
    Ok(serde_json::to_vec(&owner).unwrap())
}

/// What an export says of its tensors.
pub(super) fn bundle(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let written = record_of::<Bundle>(bytes)?;
    Bundle::decode(bytes).map_err(said)?;
    Ok(written)
}

pub(super) fn bundles() -> Vec<Case> {
    let mut bundle = Bundle::of(
        (id(1), sample::MODEL),
        (sample::geometry(), 2),
        (Namespace::default(), 1500),
        [Millis(5), Millis(6)],
    );
    bundle.names.conversation = Some("c".into());
    (bundle.file_bytes, bundle.checksums) = (1, vec!["00000007".into()]);
    vec![case("pair", encoded(&bundle))]
}

pub(super) fn bad_bundles() -> Vec<Refused> {
    let valid = bundles();
    let with = |from: &str, to: &str| changed(&valid, from, to);
    let mut bad = bad_json(bundles());
    let bytes = "\"file_bytes\":1";
    bad.extend([
        refused("encoding", with("\"raw\"", "\"zstd\""), "encoding"),
        refused("format", with("engram.snapshot", "other"), "format"),
        refused(
            "no-tokens",
            with("\"boundary\":1500", "\"boundary\":0"),
            "no tokens",
        ),
        refused(
            "many-shards",
            with("\"shards\":2", "\"shards\":4294967295"),
            "shards",
        ),
        refused(
            "chunks",
            with("\"chunk_bytes\":1048576", "\"chunk_bytes\":0"),
            "chunks of 0",
        ),
        refused(
            "file-huge",
            with(bytes, "\"file_bytes\":18446744073709551615"),
            "bytes of tensors",
        ),
        refused(
            "file-longer",
            with(bytes, "\"file_bytes\":9999999"),
            "checksums",
        ),
        refused(
            "checksum-short",
            with("00000007", "0007"),
            "8 hexadecimal digits",
        ),
        refused(
            "name-empty",
            with("\"conversation\":\"c\"", "\"conversation\":\"\""),
            "name",
        ),
        refused(
            "turn-0",
            with("\"turn\":null", "\"turn\":0"),
            "count from 1",
        ),
        refused(
            "ends-before",
            with("\"total_tokens\":null", "\"total_tokens\":1499"),
            "ends before",
        ),
    ]);
    bad
}
