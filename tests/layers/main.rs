//! The layers of the crate hold: no module uses one above it. A single crate cannot let the
//! compiler enforce that, so this test reads the sources.

mod lexer;
mod paths;
mod rules;
mod snippets;

use std::fs;
use std::path::{Path, PathBuf};

/// All Rust files below `dir`.
fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(dir) else {
        return found;
    };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn report(violations: &[rules::Violation]) -> String {
    violations
        .iter()
        .map(|v| format!("{}:{}: {}\n", v.file, v.line, v.what))
        .collect()
}

#[test]
fn sources_keep_to_their_layers() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = rust_files(&src);
    assert!(
        files.iter().any(|file| file.ends_with("lib.rs")),
        "no sources found in {src:?}"
    );
    let mut violations = Vec::new();
    for file in files {
        let path = file
            .strip_prefix(&src)
            .unwrap()
            .to_str()
            .unwrap()
            .replace('\\', "/");
        violations.extend(rules::check(&path, &fs::read_to_string(&file).unwrap()));
    }
    assert!(violations.is_empty(), "\n{}", report(&violations));
}

#[test]
fn no_test_or_benchmark_is_too_long() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut long = Vec::new();
    for file in [
        rust_files(&root.join("tests")),
        rust_files(&root.join("benches")),
    ]
    .concat()
    {
        let lines = fs::read_to_string(&file).unwrap().lines().count();
        if lines > rules::MAX_LINES {
            long.push(format!("{}: {lines} lines", file.display()));
        }
    }
    assert!(
        long.is_empty(),
        "more than {} lines:\n{}",
        rules::MAX_LINES,
        long.join("\n")
    );
}
