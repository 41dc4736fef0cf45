//! Who may use whom, and what else holds for the text of the sources.

use crate::lexer::{self, Token};
use crate::paths::{self, Path};

/// Longest file, in lines.
pub const MAX_LINES: usize = 500;

/// A module at the top of the crate.
struct Layer {
    name: &'static str,
    /// Modules that it may use beside itself, [`EVERYONE`] and, in the chain, those to its left.
    uses: &'static [&'static str],
    /// Paths of other crates that it must not name.
    never_names: &'static [&'static str],
}

/// What every layer may use.
const EVERYONE: [&str; 3] = ["types", "util", "telemetry"];

/// The chain: each may use those to its left, as far as [`HIDDEN`] lets it.
const CHAIN: [&str; 11] = [
    "device",
    "proto",
    "pool",
    "store",
    "index",
    "service",
    "tokenizer",
    "upstream",
    "gateway",
    "grpc",
    "rest",
];

/// Pure layers name neither a runtime nor a device nor the file system.
const IMPURE: &[&str] = &["tokio", "cudarc", "std::fs"];

/// Exceptions to the chain: the first sees the second not at all.
const HIDDEN: [(&str, &str); 28] = [
    ("proto", "device"),
    ("grpc", "device"),
    ("grpc", "store"),
    ("rest", "device"),
    ("rest", "store"),
    ("rest", "grpc"),
    ("tokenizer", "device"),
    ("tokenizer", "proto"),
    ("tokenizer", "pool"),
    ("tokenizer", "store"),
    ("tokenizer", "index"),
    ("tokenizer", "service"),
    ("upstream", "device"),
    ("upstream", "proto"),
    ("upstream", "pool"),
    ("upstream", "store"),
    ("upstream", "index"),
    ("upstream", "service"),
    ("upstream", "tokenizer"),
    ("gateway", "device"),
    ("gateway", "proto"),
    ("gateway", "pool"),
    ("gateway", "store"),
    ("gateway", "index"),
    ("grpc", "tokenizer"),
    ("grpc", "upstream"),
    ("grpc", "gateway"),
    ("rest", "tokenizer"),
];

#[rustfmt::skip] // One layer a line.
const LAYERS: &[Layer] = &[
    Layer { name: "types", uses: &[], never_names: IMPURE },
    Layer { name: "util", uses: &[], never_names: &["cudarc"] },
    Layer { name: "telemetry", uses: &[], never_names: &["cudarc"] },
    Layer { name: "device", uses: &[], never_names: &[] },
    // The channel: its memory, its descriptors and its doorbell.
    Layer { name: "proto", uses: &["device::shm", "device::fds", "device::Doorbell"], never_names: &["cudarc"] },
    Layer { name: "pool", uses: &[], never_names: IMPURE },
    Layer { name: "store", uses: &[], never_names: &["cudarc"] },
    Layer { name: "index", uses: &[], never_names: IMPURE },
    Layer { name: "service", uses: &[], never_names: &["cudarc"] },
    // Leaves: text and tokens; HTTP with the inference server.
    Layer { name: "tokenizer", uses: &[], never_names: &["cudarc", "tokio"] },
    Layer { name: "upstream", uses: &[], never_names: &["cudarc"] },
    Layer { name: "gateway", uses: &[], never_names: &["cudarc", "std::fs", "axum"] },
    Layer { name: "grpc", uses: &[], never_names: &["cudarc", "std::fs"] },
    Layer { name: "rest", uses: &[], never_names: &["cudarc"] },
    // Told by the service, asked by nobody.
    Layer { name: "webhooks", uses: &["service"], never_names: &["cudarc", "axum"] },
    // The worker in its own process: of the daemon it knows the protocol alone.
    Layer { name: "engine", uses: &["proto", "device::shm", "tokenizer"], never_names: &["cudarc"] },
    // Of each module it may name the `Config`, see `leads_to_config`.
    Layer { name: "config", uses: &[], never_names: &["cudarc"] },
    Layer { name: "app", uses: APP, never_names: &["cudarc"] },
    Layer { name: "cli", uses: CLI, never_names: &["cudarc"] },
    // `src/main.rs`: a crate of its own, that only starts what the library holds.
    Layer { name: "main", uses: &["app", "cli"], never_names: &["cudarc"] },
];

#[rustfmt::skip]
const APP: &[&str] = &[
    "device", "proto", "pool", "store", "index", "service", "tokenizer", "upstream", "gateway", "grpc",
    "rest", "webhooks", "engine", "config",
];
#[rustfmt::skip]
const CLI: &[&str] = &[
    "device", "proto", "pool", "store", "index", "service", "tokenizer", "upstream", "gateway", "grpc",
    "rest", "engine", "config", "app",
];

/// A line that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
pub struct Violation {
    pub file: String,
    pub line: usize,
    pub what: String,
}

// === impl Layer ===

impl Layer {
    /// May this layer name `target` (segments from the root of the crate)?
    fn may_use(&self, target: &[String]) -> bool {
        let module = target[0].as_str();
        let below = |path: &&str| path.split("::").eq(target.iter().take(depth(path)));
        if module == self.name {
            return true;
        }
        if let Some(target) = EVERYONE.iter().position(|name| *name == module) {
            // These stand in a row of their own, each seeing those before it.
            let own = EVERYONE.iter().position(|name| *name == self.name);
            return own.is_none_or(|own| target < own);
        }
        if self.uses.iter().any(below) {
            return true;
        }
        if self.name == "config" {
            let has_one = CHAIN.contains(&module) || module == "webhooks";
            return has_one && leads_to_config(target);
        }
        let place = |name: &str| CHAIN.iter().position(|layer| *layer == name);
        match (place(module), place(self.name)) {
            (Some(target), Some(own)) => target < own && !HIDDEN.contains(&(self.name, module)),
            _ => false,
        }
    }
}

fn depth(path: &str) -> usize {
    path.split("::").count()
}

/// `store::Config`, `store::disk::DiskConfig`, `store::config::…`; or `store` alone, to write
/// `store::Config` where it is used.
fn leads_to_config(target: &[String]) -> bool {
    let is_config = |segment: &String| segment == "config" || segment.ends_with("Config");
    target.len() == 1 || target.iter().any(is_config)
}

/// The module that the file at `path` (from `src/`, `/` between its parts) holds; `None` for a
/// file that is the root of a crate.
pub fn module_of(path: &str) -> Option<Vec<String>> {
    let path = path.strip_suffix(".rs").unwrap_or(path);
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if path == "lib" {
        return None;
    }
    Some(path.split('/').map(String::from).collect())
}

/// Everything wrong with the file at `path` (from `src/`).
pub fn check(path: &str, source: &str) -> Vec<Violation> {
    let tokens = lexer::tokens(source);
    let mut found = Vec::new();
    let mut report = |line: usize, what: String| {
        found.push(Violation {
            file: path.to_string(),
            line,
            what,
        });
    };

    let lines = source.lines().count();
    if lines > MAX_LINES {
        report(lines, format!("{lines} lines, more than {MAX_LINES}"));
    }
    if !path.starts_with("device/") && path != "device.rs" {
        for token in tokens.iter().filter(|token| token.is_ident("unsafe")) {
            report(token.line, "`unsafe` outside src/device".into());
        }
    }
    for line in hidden_modules(&tokens) {
        report(
            line,
            "a module or source from elsewhere: its place would not tell its layer".into(),
        );
    }
    if let Some(module) = module_of(path) {
        check_paths(&tokens, &module, &mut report);
    }
    found
}

fn check_paths(tokens: &[Token], module: &[String], report: &mut impl FnMut(usize, String)) {
    let own = match module[0].as_str() {
        "main" | "bin" => "main",
        name => name,
    };
    let Some(layer) = LAYERS.iter().find(|layer| layer.name == own) else {
        report(
            1,
            format!("module `{own}` has no place among the layers of tests/layers"),
        );
        return;
    };
    for named in paths::named(tokens, module) {
        match &named.path {
            Path::Other(path) => {
                let path = path.join("::") + "::";
                for name in layer.never_names {
                    if path.starts_with(&format!("{name}::")) {
                        report(named.line, format!("`{own}` names `{name}`"));
                    }
                }
            }
            Path::Crate(target) => match target.first().map(String::as_str) {
                None | Some("*") => {
                    report(named.line, "imports the root of the crate whole".into());
                }
                Some(name) if own != name && !LAYERS.iter().any(|layer| layer.name == name) => {
                    report(
                        named.line,
                        format!("`{name}` is no module with a place among the layers"),
                    );
                }
                Some(_) if !layer.may_use(target) => {
                    report(named.line, format!("`{own}` uses `{}`", target.join("::")));
                }
                Some(_) => {}
            },
        }
    }
}

/// Lines of `#[path = …]`, of `include!` with a literal, and of `extern crate self`.
fn hidden_modules(tokens: &[Token]) -> impl Iterator<Item = usize> {
    tokens
        .windows(4)
        .filter(|w| {
            let literal = |t: &Token| t.kind == lexer::Kind::Literal;
            (w[0].is_punct('[') && w[1].is_ident("path") && w[2].is_punct('='))
                || (w[0].is_ident("include") && w[1].is_punct('!') && literal(&w[3]))
                || (w[0].is_ident("extern") && w[1].is_ident("crate") && w[2].is_ident("self"))
        })
        .map(|w| w[0].line)
}
