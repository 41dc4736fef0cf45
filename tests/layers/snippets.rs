//! The test of the test: small sources with a fault that it must find, and look-alikes without one.

use crate::rules::{self, MAX_LINES, Violation};

/// (file, source, the fault's line, a part of what is said of it)
#[rustfmt::skip] // One fault a line.
const FAULTY: &[(&str, &str, usize, &str)] = &[
    // Each layer, upward and sideways.
    ("util/clock.rs", "use crate::telemetry::Counter;", 1, "`util` uses `telemetry::Counter`"),
    ("types/mod.rs", "use crate::util::Clock;", 1, "`types` uses `util::Clock`"),
    ("types/mod.rs", "use crate::device::Device;", 1, "`types` uses `device::Device`"),
    ("types/mod.rs", "use std::fs::File;", 1, "`types` names `std::fs`"),
    ("telemetry/mod.rs", "use crate::service::X;", 1, "`telemetry` uses `service::X`"),
    ("device/host.rs", "use crate::pool::Geometry;", 1, "`device` uses `pool::Geometry`"),
    ("proto/mod.rs", "use crate::device::Device;", 1, "`proto` uses `device::Device`"),
    ("proto/mod.rs", "use crate::device;", 1, "`proto` uses `device`"),
    ("proto/mod.rs", "use crate::device::{shm::Map, cuda::Stream};", 1, "device::cuda::Stream"),
    ("pool/mod.rs", "use crate::store::Tier;", 1, "`pool` uses `store::Tier`"),
    ("store/disk.rs", "use crate::index::Tree;", 1, "`store` uses `index::Tree`"),
    ("index/tree.rs", "use crate::service::Save;", 1, "`index` uses `service::Save`"),
    ("service/mod.rs", "use crate::grpc::Server;", 1, "`service` uses `grpc::Server`"),
    ("service/mod.rs", "use crate::config::Config;", 1, "`service` uses `config::Config`"),
    ("grpc/mod.rs", "use crate::rest::Router;", 1, "`grpc` uses `rest::Router`"),
    ("rest/mod.rs", "use crate::grpc::Server;", 1, "`rest` uses `grpc::Server`"),
    ("grpc/mod.rs", "use crate::store::Tier;", 1, "`grpc` uses `store::Tier`"),
    ("rest/mod.rs", "use crate::store::Tier;", 1, "`rest` uses `store::Tier`"),
    ("rest/mod.rs", "use crate::device::Device;", 1, "`rest` uses `device::Device`"),
    ("rest/mod.rs", "use crate::cli::X;", 1, "`rest` uses `cli::X`"),
    ("engine/model.rs", "use crate::service::X;", 1, "`engine` uses `service::X`"),
    ("engine/model.rs", "use crate::pool::X;", 1, "`engine` uses `pool::X`"),
    ("engine/model.rs", "use crate::device::Device;", 1, "`engine` uses `device::Device`"),
    ("store/mod.rs", "use crate::engine::X;", 1, "`store` uses `engine::X`"),
    ("config/mod.rs", "use crate::store::Tier;", 1, "`config` uses `store::Tier`"),
    ("config.rs", "use crate::app::AppConfig;", 1, "`config` uses `app::AppConfig`"),
    ("app.rs", "use crate::cli::Args;", 1, "`app` uses `cli::Args`"),
    ("main.rs", "fn main() { engram::service::run() }", 1, "`main` uses `service::run`"),
    ("bin/other.rs", "use engram::store::Tier;", 1, "`main` uses `store::Tier`"),
    // Every way to write a path.
    ("pool/a.rs", "fn f() {\n    crate::store::open();\n}", 2, "store::open"),
    ("pool/a.rs", "use crate::{device::X,\n    util::{Y, Z},\n    store::{Tier, Ram}};", 3, "store::Tier"),
    ("pool/a.rs", "use crate::{util::{self, clock}, store};", 1, "`pool` uses `store`"),
    ("pool/a.rs", "pub(crate) use crate::store::Tier as Pool;", 1, "store::Tier"),
    ("pool/a.rs", "use crate::store::*;", 1, "store::*"),
    ("pool/a.rs", "use super::super::store::Tier;", 1, "store::Tier"),
    ("pool/a.rs", "use super::{super::store::Tier, b};", 1, "store::Tier"),
    ("pool.rs", "use super::store::Tier;", 1, "store::Tier"),
    ("pool/mod.rs", "use self::super::store::Tier;", 1, "store::Tier"),
    ("pool/a/b.rs", "fn f(x: &super::super::super::store::Tier) {}", 1, "store::Tier"),
    ("pool/a.rs", "mod tests {\n    use super::super::super::store::X;\n}", 2, "store::X"),
    ("pool/a.rs", "mod x { mod y {} }\nuse super::super::store::X;", 2, "store::X"),
    ("pool/a.rs", "fn f<'a>(x: &'a <crate::store::T as D>::U) {}", 1, "store::T"),
    ("pool/a.rs", "macro_rules! m { () => { $crate::store::open() } }", 1, "store::open"),
    ("pool/a.rs", "#[derive(crate::store::Derive)]\nstruct S;", 1, "store::Derive"),
    ("pool/a.rs", "use crate /* here */ ::\n    store::Tier;", 1, "store::Tier"),
    ("pool/a.rs", "const A: &str = \"\\\"\"; use crate::store::B;", 1, "store::B"),
    ("pool/a.rs", "const A: char = '\"'; use crate::store::B; const C: char = '\"';", 1, "store::B"),
    ("pool/a.rs", "const A: &str = r#\"\"\"#; use crate::store::B;", 1, "store::B"),
    ("pool/a.rs", "/* /* */ */ use crate::store::B;", 1, "store::B"),
    // Ways around.
    ("pool/a.rs", "use crate as all;", 1, "root of the crate"),
    ("pool/a.rs", "use crate::*;", 1, "root of the crate"),
    ("pool/a.rs", "use crate::{self as all};", 1, "root of the crate"),
    ("pool.rs", "use super::*;", 1, "root of the crate"),
    ("pool/a.rs", "use super::super as up;", 1, "root of the crate"),
    ("pool/a.rs", "use crate::Tier;", 1, "`Tier` is no module"),
    ("other/a.rs", "fn f() {}", 1, "`other` has no place"),
    ("pool/a.rs", "#[path = \"../store/mod.rs\"]\nmod x;", 1, "from elsewhere"),
    ("pool/a.rs", "include!(\"../store/tier.rs\");", 1, "from elsewhere"),
    ("pool/a.rs", "extern crate self as all;", 1, "from elsewhere"),
    // Names of other crates.
    ("index/tree.rs", "use tokio::sync::mpsc;", 1, "`index` names `tokio`"),
    ("index/tree.rs", "use tokio as rt;", 1, "`index` names `tokio`"),
    ("index/tree.rs", "#[tokio::test]\nasync fn f() {}", 1, "`index` names `tokio`"),
    ("index/tree.rs", "use ::cudarc::driver;", 1, "`index` names `cudarc`"),
    ("index/tree.rs", "use std::{io, fs::File};", 1, "`index` names `std::fs`"),
    ("pool/a.rs", "fn f() { std::fs::read(\"x\"); }", 1, "`pool` names `std::fs`"),
    ("store/a.rs", "use cudarc::driver::sys;", 1, "`store` names `cudarc`"),
    // Unsafe code.
    ("store/a.rs", "fn f() {\n    unsafe { g() }\n}", 2, "`unsafe` outside"),
    ("store/a.rs", "unsafe impl Send for S {}", 1, "`unsafe` outside"),
    ("devices/a.rs", "unsafe fn f() {}", 1, "`unsafe` outside"),
    ("lib.rs", "unsafe fn f() {}", 1, "`unsafe` outside"),
];

/// (file, source without a fault)
#[rustfmt::skip] // One source a line.
const SOUND: &[(&str, &str)] = &[
    ("lib.rs", "pub mod store;\npub use store::Tier;"),
    ("main.rs", "fn main() -> std::process::ExitCode { engram::cli::run() }"),
    ("util/clock.rs", "use super::id::Id;\nuse crate::{types::Millis, util::x};"),
    ("telemetry/mod.rs", "use crate::{types::Millis, util::clock};"),
    ("device/shm.rs", "unsafe fn f() { crate::telemetry::count() }"),
    ("proto/handshake.rs", "use crate::device::{Doorbell, fds};"),
    ("proto/channel.rs", "use crate::device::shm::Map;\nuse crate::{device::shm, util::Clock};"),
    ("store/a.rs", "use crate::{device::Device, pool::{Block, Page}};"),
    ("store.rs", "mod tests { use super::*; }"),
    ("store/a.rs", "mod tests { use super::*; use super::super::b; mod c { use super::super::*; } }"),
    ("store/a.rs", "use tokio::fs; fn f() { std::fs::read(\"x\"); }"),
    ("index/tree.rs", "use std::collections::HashMap; use crate::store::ObjectId;"),
    ("index/tree.rs", "fn f(tokio: u8, fs: u8) -> u8 { tokio + fs }"),
    ("service/mod.rs", "use crate::{device, index, pool, proto, store};"),
    ("rest/mod.rs", "use crate::service::Service; use crate::proto::v1;"),
    ("engine/a.rs", "use crate::{proto::v1, device::shm::Map, util::clock::Clock};"),
    ("config/mod.rs", "use crate::store::{Config, disk::DiskConfig}; use crate::rest::config::Tls;"),
    ("config/mod.rs", "use crate::{rest, telemetry};\nstruct Config { rest: rest::Config }"),
    ("app.rs", "use crate::{config::Config, engine, grpc, rest, store};"),
    ("cli/mod.rs", "use crate::{app, config, engine, rest};"),
    // Not code.
    ("pool/a.rs", "// use crate::store::Tier;\n/* crate::store::open() */"),
    ("pool/a.rs", "/// See [`crate::store::Tier`].\nconst A: &str = \"unsafe crate::store::Tier\";"),
    ("pool/a.rs", "const A: &str = r##\"\"# crate::store::T \"##; const B: &[u8] = b\"crate::store::T\";"),
    ("pool/a.rs", "const A: &str = r\"\\\"; const B: char = '\\''; const C: &str = \"crate::store::T\";"),
    // Look-alikes.
    ("pool/a.rs", "pub(crate) struct S; pub(in crate::pool) struct T; fn f() { store::x() }"),
    ("pool/a.rs", "fn f<'a>() -> impl Sized + use<'a> {}"),
    ("pool/a.rs", "struct S { path: u8 } fn f(x: [u8; 1]) { unsafe_code(x) }"),
    ("proto/mod.rs", "include!(concat!(env!(\"OUT_DIR\"), \"/engram.v1.rs\"));"),
];

#[test]
fn every_fault_is_found_where_it_is() {
    for (file, source, line, what) in FAULTY {
        let found = rules::check(file, source);
        let hit = |v: &Violation| v.line == *line && v.what.contains(what);
        assert!(
            found.iter().any(hit),
            "{file}: {source}\nwanted {line}: {what}\nfound {found:?}"
        );
    }
}

#[test]
fn look_alikes_pass() {
    for (file, source) in SOUND {
        assert_eq!(rules::check(file, source), [], "{file}: {source}");
    }
}

#[test]
fn a_file_may_have_500_lines_and_no_more() {
    assert_eq!(rules::check("store/a.rs", &"\n".repeat(MAX_LINES)), []);
    let found = rules::check("store/a.rs", &"\n".repeat(MAX_LINES + 1));
    assert_eq!(found.len(), 1);
    assert!(found[0].what.contains("501 lines"), "{found:?}");
}
