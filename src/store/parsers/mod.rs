//! All parsers of what lies on disk and in an arena that another process left. See `util::parser`.

mod catalog;
mod files;
mod records;

use self::{catalog::*, files::*, records::*};
use super::{
    Manifest, arena,
    disk::{data_dir::FormatFile, model::ModelFile},
    refs,
    scrub::ScrubMark,
};
use crate::{
    types::SnapshotId,
    util::parser::{Parser, case, refused},
};

/// All of them.
pub(crate) fn parsers() -> Vec<Parser> {
    let sealed = |name, parse, valid, hostile| Parser {
        name,
        parse,
        exact: false,
        seal: Some(seal_json),
        factor: 24,
        valid,
        hostile,
    };
    let mut all = vec![
        sealed("manifest", record_of::<Manifest>, manifests, bad_manifests),
        sealed(
            "conversation",
            record_of::<refs::ConversationRef>,
            conversations,
            bad_conversations,
        ),
        sealed("format", record_of::<FormatFile>, formats, || {
            bad_json(formats())
        }),
        sealed("model", record_of::<ModelFile>, models, bad_models),
        sealed("scrub-mark", record_of::<ScrubMark>, marks, || {
            bad_json(marks())
        }),
        sealed(
            "catalog-state",
            record_of::<super::catalog::CatalogFile>,
            states,
            || bad_json(states()),
        ),
        sealed("bundle", bundle, bundles, bad_bundles),
        Parser {
            name: "lock-note",
            parse: lock_note,
            exact: false,
            seal: None,
            factor: 24,
            valid: || {
                vec![case(
                    "note",
                    *br#"{"pid":7,"host":"h","since":1700000000000}"#,
                )]
            },
            hostile: || {
                vec![
                    refused("empty", "", "EOF"),
                    refused(
                        "negative",
                        *br#"{"pid":-7,"host":"h","since":1}"#,
                        "invalid value",
                    ),
                    refused("deep", "[".repeat(4096), "invalid type"),
                ]
            },
        },
        Parser {
            name: "object-header",
            parse: object_header,
            exact: false,
            seal: Some(seal_header),
            factor: 48,
            valid: || vec![case("kv", header_of_kv())],
            hostile: bad_headers,
        },
        Parser {
            name: "catalog-record",
            parse: catalog_record,
            exact: false,
            seal: None,
            factor: 24,
            valid: catalog_records,
            hostile: bad_catalog_records,
        },
        Parser {
            name: "catalog-log",
            parse: catalog_log,
            exact: false,
            seal: Some(seal_log),
            factor: 48,
            valid: || {
                let all = catalog_records();
                let rows = all.iter().take(3).cloned().collect();
                vec![case("rows", catalog_of(rows)), case("all", catalog_of(all))]
            },
            hostile: bad_logs,
        },
        Parser {
            name: "file-name",
            parse: file_name,
            exact: true,
            seal: None,
            factor: 16,
            valid: file_names,
            hostile: bad_file_names,
        },
        Parser {
            name: "token-run",
            parse: token_run,
            exact: false,
            seal: None,
            factor: 48,
            valid: || {
                vec![
                    case("inside", run_of(1, 2, &[1, 2, 3])),
                    case("none", run_of(3, 0, &[1, 2, 3])),
                ]
            },
            hostile: || {
                let all = "not all there";
                vec![
                    refused("behind", run_of(3, 1, &[1, 2, 3]), all),
                    refused("longest", run_of(0, u32::MAX, &[1, 2, 3]), all),
                    refused("far", run_of(u64::MAX, u32::MAX, &[1]), all),
                    refused("wraps", run_of(u64::MAX - 1, 3, &[1, 2]), all),
                    refused("short", [0; 11], "no run"),
                ]
            },
        },
    ];
    all.extend(arena::tests::parsers());
    all
}

fn told(bad: super::sealed_json::Bad) -> String {
    format!("{}: {}", bad.reason.as_str(), bad.detail)
}

fn id(n: u8) -> SnapshotId {
    SnapshotId::from_bytes([n, 1, 2, 3, 4, 5, 0x70, 7, 0x80, 9, 10, 11, 12, 13, 14, 15])
}
