//! Headers of object files, names of files, and what points into the token log.

use std::ffi::OsStr;

use super::{id, told};
use crate::{
    store::{
        ObjectMeta, TokenLog,
        disk::{
            layout,
            object_file::{Facts, Plan, crc32c, decode_header, encode_header, header_len},
        },
        sample,
    },
    types::{BadRange, Fingerprint, ObjectId, ObjectKind, TokenRange, Tokens},
    util::parser::{Case, Refused, case, refused, said},
};

pub(super) fn kv_meta() -> (ObjectMeta, Plan) {
    let (geometry, range) = (
        sample::geometry(),
        TokenRange {
            start: 1000,
            end: 2100,
        },
    );
    let meta = sample::meta(&geometry, ObjectKind::Kv, range, 3);
    let plan = Plan::of(&meta, &geometry);
    (meta, plan)
}

pub(super) fn header_of_kv() -> Vec<u8> {
    let (meta, plan) = kv_meta();
    let facts = Facts {
        generation: meta.generation,
        tokens_crc: 5,
        checksums: (0..plan.chunks() as u32).collect(),
    };
    encode_header(&meta, &plan, 1, &facts)
}

pub(super) fn object_header(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let first = bytes.first_chunk().ok_or("length: less than 8 bytes")?;
    let len = header_len(*first).map_err(told)?;
    // What is read of a file: so much, and no more than there is.
    let header = bytes.get(..len as usize).ok_or("length: the file ends")?;
    let (meta, plan) = kv_meta();
    let facts = decode_header(header, &meta, &plan, 1).map_err(told)?;
    Ok(encode_header(&meta, &plan, 1, &facts))
}

pub(super) fn seal_header(bytes: &mut Vec<u8>) {
    let total = bytes.len().max(64).next_multiple_of(4096);
    bytes.resize(total, b' ');
    bytes[..8].copy_from_slice(&(total as u64 - 8).to_le_bytes());
    bytes[42..50].copy_from_slice(b"00000000");
    let crc = format!("{:08x}", crc32c(bytes));
    bytes[42..50].copy_from_slice(crc.as_bytes());
}

/// A header with a right checksum and any content behind it.
pub(super) fn header_with(rest: &str) -> Vec<u8> {
    let json = format!(r#"{{"__metadata__":{{"header_crc32c":"00000000",{rest}"#);
    let mut bytes = [&[0; 8], json.as_bytes()].concat();
    seal_header(&mut bytes);
    bytes
}

pub(super) fn bad_headers() -> Vec<Refused> {
    let valid = header_of_kv();
    let with = |from: &str, to: &str| {
        let text = str::from_utf8(&valid[8..]).unwrap();
        assert!(text.contains(from), "{from} is not in {text}");
        let mut bytes = [&[0; 8], text.replacen(from, to, 1).trim_end().as_bytes()].concat();
        seal_header(&mut bytes);
        bytes
    };
    let length = |json: u64| [&json.to_le_bytes(), &valid[8..]].concat();
    let mut flipped = valid.clone();
    flipped[60] ^= 1;
    let tensor = r#""x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let mut bad = vec![
        refused("empty", "", "length"),
        refused("cut", &valid[..valid.len() - 1], "the file ends"),
        refused("flipped", flipped, "checksum"),
        refused(
            "version-2",
            header_with(r#""format_version":"2","new":"x"}}"#),
            "version",
        ),
        refused(
            "unknown-field",
            header_with(r#""format_version":"1","new":"x"}}"#),
            "unknown_field",
        ),
        refused(
            "missing-fields",
            header_with(r#""format_version":"1"}}"#),
            "malformed",
        ),
        refused("no-json", header_with(""), "malformed"),
        refused(
            "deep",
            header_with(&format!("\"x\":{}", "[".repeat(20_000))),
            "",
        ),
        refused(
            "another-object",
            with("\"object\":\"", "\"object\":\"0"),
            "another object",
        ),
        refused(
            "another-shard",
            with("\"shard\":\"1\"", "\"shard\":\"0\""),
            "another shard",
        ),
        refused(
            "generation-short",
            with("\"generation\":\"0", "\"generation\":\""),
            "generation",
        ),
        refused(
            "checksums-none",
            with("[\\\"00000000\\\"]", "[]"),
            "checksums",
        ),
        refused(
            "checksums-deep",
            with("[\\\"00000000\\\"]", "[[[["),
            "checksums",
        ),
        refused(
            "tensor-more",
            with("\"tokens\":{", &format!("{tensor},\"tokens\":{{")),
            "tensor",
        ),
        refused(
            "tensor-beyond",
            with(
                "\"data_offsets\":[0,",
                "\"data_offsets\":[18446744073709551615,",
            ),
            "tensor",
        ),
        refused(
            "tensor-negative",
            with("\"shape\":[", "\"shape\":[-"),
            "malformed",
        ),
    ];
    let lengths = [0, 1, 4087, 4089, 16 << 20, u64::MAX, u64::MAX - 7];
    bad.extend(lengths.map(|json| refused(&format!("length-{json}"), length(json), "length")));
    bad
}

pub(super) fn file_name(bytes: &[u8]) -> Result<Vec<u8>, String> {
    use std::os::unix::ffi::OsStrExt;
    let name = OsStr::from_bytes(bytes);
    let model = Fingerprint([0; 32]);
    let objects = layout::parse_object(name).map(|(id, shard)| layout::object(&model, &id, shard));
    let manifests = layout::parse_manifest(name).map(|id| layout::manifest(&model, &id));
    let conversations = layout::parse_conversation(name).map(|key| layout::conversation(&key));
    let rel = objects.or(manifests).or(conversations);
    let spread = layout::parse_spread(name).map(|number| format!("{number:02x}").into_bytes());
    let plain = layout::is_model(name) || layout::is_token_log(name);
    rel.map(|rel| rel.name().as_bytes().to_vec())
        .or(spread)
        .or(plain.then(|| bytes.to_vec()))
        .ok_or_else(|| "no name of ours".into())
}

pub(super) fn file_names() -> Vec<Case> {
    let object = ObjectId([1; 32]);
    vec![
        case("object", format!("{object}.12.safetensors")),
        case("manifest", format!("{}.json", id(1))),
        case("conversation", format!("{object}.json")),
        case("folder", "0f"),
        case("model", "ab".repeat(16)),
        case("token-log", "tokens.00000000000000ff.log"),
    ]
}

pub(super) fn bad_file_names() -> Vec<Refused> {
    let object = ObjectId([0xab; 32]);
    let snapshot = id(1).0;
    let names = [
        ("no-shard", format!("{object}.safetensors")),
        ("shard-with-sign", format!("{object}.+1.safetensors")),
        ("shard-with-zero", format!("{object}.01.safetensors")),
        (
            "shard-too-large",
            format!("{object}.4294967296.safetensors"),
        ),
        ("more-behind", format!("{object}.0.safetensors.x")),
        (
            "capitals",
            format!("{}.0.safetensors", object.to_string().to_uppercase()),
        ),
        (
            "uuid-without-hyphens",
            format!("{}.json", snapshot.simple()),
        ),
        ("uuid-in-braces", format!("{{{snapshot}}}.json")),
        ("uuid-as-urn", format!("urn:uuid:{snapshot}.json")),
        ("short", "x.json".into()),
        ("one-digit", "0".into()),
        ("dots", "..".into()),
        ("path", format!("../{object}.json")),
        ("token-log-capital", "tokens.00000000000000FF.log".into()),
    ];
    let mut bad = names
        .map(|(name, text)| refused(name, text, "no name"))
        .to_vec();
    bad.push(refused("no-utf8", [0xff; 64], "no name"));
    bad
}

/// Any words are tokens; what can be wrong is what points to them.
pub(super) fn run_of(offset: u64, len: u32, tokens: &[u32]) -> Vec<u8> {
    let words = tokens.iter().flat_map(|token| token.to_le_bytes());
    let run = offset.to_le_bytes().into_iter().chain(len.to_le_bytes());
    run.chain(words).collect()
}

pub(super) fn token_run(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (offset, rest) = bytes.split_first_chunk().ok_or("no run")?;
    let (len, rest) = rest.split_first_chunk().ok_or("no run")?;
    let (offset, len) = (u64::from_le_bytes(*offset), u32::from_le_bytes(*len));
    let words: Vec<u32> = rest
        .as_chunks()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .collect();
    let mut log = TokenLog::in_memory().map_err(said)?;
    log.append(&words).map_err(said)?;
    // A run of nothing is everywhere.
    let held = log.hold(offset, len) || len == 0;
    let crc = log.crc(offset, len);
    assert_eq!(held, crc.is_some(), "both say whether the tokens are there");
    let mut read = 0;
    log.get(offset, len, &mut |run| read += run.len());
    crc.ok_or("not all there")?;
    assert_eq!(read, len as usize);
    Ok(run_of(offset, len, &words))
}

/// A range comes as two numbers.
#[test]
fn a_range_is_never_backwards() {
    let range = |start, end| -> Result<TokenRange, BadRange> { TokenRange::new(start, end) };
    assert!(range(1, 0).is_err() && range(u32::MAX, 0).is_err() && range(0, u32::MAX).is_ok());
}
