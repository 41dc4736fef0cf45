//! The parsers of what clients send. See `util::parser`.

use serde_json::{Value, json};

use super::body::Fields;
use super::error::ApiError;
use super::guard::Admitted;
use super::names::checked;
use super::sent::ask_of;
use super::snapshots::{RestoreOrder, delete_of, info_of, list_of, restore_of, save_of};
use crate::gateway::Ask;
use crate::service::Selector;
use crate::util::parser::{Case, Parser, Refused, case, refused};

/// All of them.
pub(crate) fn parsers() -> Vec<Parser> {
    let body = |name, parse, valid, hostile| Parser {
        name,
        parse,
        exact: false,
        seal: None,
        factor: 128,
        valid,
        hostile,
    };
    vec![
        body(
            "rest-save",
            save,
            || vec![case("all", ALL), case("one", ONE)],
            bad_bodies,
        ),
        body(
            "rest-restore",
            restore,
            || vec![case("all", ALL), case("create", CREATE)],
            bad_restores,
        ),
        body(
            "rest-list",
            list,
            || vec![case("all", LIST)],
            || {
                let mut bad = bad_bodies();
                bad.push(refused(
                    "negative",
                    r#"{"conversation_id":"c","limit":-1}"#,
                    "limit",
                ));
                bad
            },
        ),
        body(
            "rest-ask",
            ask,
            || vec![case("turn", ASK), case("passes", "[1")],
            bad_asks,
        ),
        body("rest-info", info, || vec![case("all", ALL)], bad_bodies),
        body("rest-delete", delete, || vec![case("all", ALL)], bad_bodies),
        Parser {
            exact: true,
            factor: 16,
            ..body("rest-name", name, names, bad_names)
        },
    ]
}

/// Everything that a selector may have, in the order in which it is written here.
const ALL: &str = r#"{"branch_name":"b","conversation_id":"chat:42/7","durable":false,"rid":"r","snapshot_id":"00000000-0000-7000-8000-000000000001","tenant":"t","turn_number":3}"#;
const ONE: &str = r#"{"branch_name":null,"conversation_id":"c","durable":true,"rid":null,"snapshot_id":null,"tenant":null,"turn_number":null}"#;
const CREATE: &str = r#"{"append_to":"turn","branch_name":null,"continuation_ids":[1,4294967295],"conversation_id":"c","create_new_request":true,"durable":false,"max_new_tokens":3,"rid":null,"sampling_params":{"temperature":0.0},"snapshot_id":null,"tenant":null,"turn_number":null}"#;
const ASK: &str =
    r#"{"body":{"input_ids":[1],"x":null},"branch":null,"conversation_id":"c","turn":3}"#;
const LIST: &str =
    r#"{"conversation_id":"c","limit":10,"offset":18446744073709551615,"tenant":"t"}"#;

fn read<T>(bytes: &[u8], of: impl FnOnce(&mut Fields) -> Result<T, ApiError>) -> Result<T, String> {
    let mut fields = Fields::parse(bytes).map_err(told)?;
    of(&mut fields).map_err(told)
}

fn told(error: ApiError) -> String {
    format!("{error:?}")
}

fn written(select: &Selector, more: Value) -> Vec<u8> {
    let Selector {
        tenant,
        rid,
        conversation_id,
        turn_number,
        branch_name,
        snapshot_id,
    } = select;
    let mut all = json!({
        "tenant": tenant,
        "rid": rid,
        "conversation_id": conversation_id,
        "turn_number": turn_number,
        "branch_name": branch_name,
        "snapshot_id": snapshot_id,
        "durable": false,
    });
    if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
        all.extend(more);
    }
    serde_json::to_vec(&all).unwrap()
}

fn save(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (select, durable, label) = read(bytes, save_of)?;
    let more = match label {
        Some(label) => json!({ "durable": durable, "snapshot_id": label }),
        None => json!({ "durable": durable }),
    };
    Ok(written(&select, more))
}

fn restore(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let RestoreOrder {
        select,
        pin_for,
        request_id,
        create,
    } = read(bytes, restore_of)?;
    let mut more = json!({});
    if let Some(create) = create {
        more["create_new_request"] = json!(true);
        more["continuation_ids"] = json!(create.continuation);
        more["max_new_tokens"] = json!(create.max_new_tokens);
        more["sampling_params"] = json!(create.sampling);
        more["append_to"] = json!(create.append_to);
    }
    if let Some(pin_for) = pin_for {
        more["pin_seconds"] = json!(pin_for.as_secs_f64());
    }
    if let Some(id) = request_id {
        more["request_id"] = json!(id);
    }
    Ok(written(&select, more))
}

fn list(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let request = read(bytes, list_of)?;
    let all = json!({
        "tenant": request.tenant,
        "conversation_id": request.conversation_id,
        "limit": request.limit,
        "offset": request.offset,
    });
    Ok(serde_json::to_vec(&all).unwrap())
}

fn ask(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let admitted = Admitted {
        id: "r".into(),
        by_token: false,
    };
    let Some(Ask { target, body, .. }) =
        ask_of(bytes, &admitted, &["conversation_id", "session_id"]).map_err(told)?
    else {
        return Ok(b"null".to_vec());
    };
    let all = json!({
        "conversation_id": target.conversation,
        "turn": target.turn,
        "branch": target.branch,
        "body": body.get("body").unwrap_or(&Value::Object(body.clone())),
    });
    Ok(serde_json::to_vec(&all).unwrap())
}

fn bad_asks() -> Vec<Refused> {
    let with = |field: &str| format!(r#"{{"conversation_id":"c",{field}}}"#);
    vec![
        refused("number", r#"{"conversation_id":7}"#, "not a text"),
        refused("empty", r#"{"conversation_id":""}"#, "must not be empty"),
        refused("path", r#"{"conversation_id":"../x"}"#, "path"),
        refused("turn-0", with(r#""turn":0"#), "counts from 1"),
        refused("turn-text", with(r#""turn":"1""#), "counts from 1"),
        refused("turn-beyond", with(r#""turn":4294967296"#), "counts from 1"),
        refused("both", with(r#""turn":1,"branch":"b""#), "either"),
    ]
}

fn info(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (select, with_tokens) = read(bytes, info_of)?;
    let more = if with_tokens {
        json!({})
    } else {
        json!({ "with_tokens": false })
    };
    Ok(written(&select, more))
}

fn delete(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (select, whole) = read(bytes, delete_of)?;
    let more = if whole {
        json!({ "whole": true })
    } else {
        json!({})
    };
    Ok(written(&select, more))
}

/// What no body may be that names a snapshot or a conversation.
fn bad_bodies() -> Vec<Refused> {
    let long = format!("{{\"conversation_id\":\"{}\"}}", "x".repeat(256));
    vec![
        refused("empty", "", "not JSON"),
        refused("list", "[]", "must be a JSON object"),
        refused("cut", &ALL.as_bytes()[..60], "not JSON"),
        refused("two", "{}{}", "not JSON"),
        refused("deep", "{\"x\":".repeat(10_000), "not JSON"),
        refused("no-utf8", b"{\"rid\":\"\xff\"}", "not JSON"),
        refused("half-surrogate", r#"{"rid":"\ud800"}"#, "not JSON"),
        refused("nothing", "{}", "needed"),
        refused("wrong-type", r#"{"conversation_id":7}"#, "conversation_id"),
        refused(
            "object-as-name",
            r#"{"conversation_id":{"a":1}}"#,
            "conversation_id",
        ),
        refused(
            "name-empty",
            r#"{"conversation_id":""}"#,
            "must not be empty",
        ),
        refused(
            "name-path",
            r#"{"conversation_id":"../../etc/passwd"}"#,
            "path",
        ),
        refused(
            "name-control",
            r#"{"conversation_id":"a\u0000b"}"#,
            "control",
        ),
        refused("name-long", long, "255 bytes"),
        refused("no-conversation", r#"{"turn_number":1}"#, "needed"),
    ]
}

fn bad_restores() -> Vec<Refused> {
    let with = |field: &str| format!(r#"{{"conversation_id":"c",{field}}}"#);
    let mut bad = bad_bodies();
    bad.extend([
        refused("turn-0", with(r#""turn_number":0"#), "counts from 1"),
        refused("turn-negative", with(r#""turn_number":-1"#), "turn_number"),
        refused(
            "turn-beyond",
            with(r#""turn_number":4294967296"#),
            "turn_number",
        ),
        refused("no-uuid", with(r#""snapshot_id":"../x""#), "not a UUID"),
        refused("pin-negative", with(r#""pin_seconds":-1"#), "pin_seconds"),
        refused("pin-long", with(r#""pin_seconds":86400.1"#), "pin_seconds"),
        refused("pin-infinite", with(r#""pin_seconds":1e999"#), "not JSON"),
        refused("generate", with(r#""create_new_request":true"#), "needs"),
        refused(
            "tokens-alone",
            with(r#""continuation_ids":[1]"#),
            "create_new_request",
        ),
        refused(
            "sampling-list",
            with(r#""sampling_params":[]"#),
            "sampling_params",
        ),
        refused(
            "token-negative",
            with(r#""continuation_ids":[-1]"#),
            "continuation_ids",
        ),
    ]);
    bad
}

fn name(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let text = String::from_utf8(bytes.to_vec()).map_err(|_| "not UTF-8")?;
    let name = checked("name", Some(text)).map_err(told)?;
    Ok(name.unwrap_or_default().into_bytes())
}

fn names() -> Vec<Case> {
    let good = [
        "a",
        "chat:42/7",
        "a..b",
        "...",
        "Grüße 🦀",
        " ",
        &"x".repeat(255),
        "a/.b",
    ];
    let cases = good.iter().enumerate();
    cases
        .map(|(n, good)| case(&format!("good-{n}"), *good))
        .collect()
}

fn bad_names() -> Vec<Refused> {
    let long = "é".repeat(128);
    let bad = [
        "", "../x", "/abs", "..", ".", "a/../b", "a/..", "./a", "a\0b", "a\nb", "\u{7f}", "\u{85}",
        &long,
    ];
    let cases = bad.iter().enumerate();
    let mut bad: Vec<_> = cases
        .map(|(n, bad)| refused(&format!("bad-{n}"), *bad, "must not"))
        .collect();
    bad[12].2 = "255 bytes".into();
    bad.push(refused("no-utf8", [b'a', 0xff], "UTF-8"));
    bad
}
