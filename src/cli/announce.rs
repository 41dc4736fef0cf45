//! Where a process listens, told to whoever started it.

use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;

/// Writes `addresses` as JSON to a file; readers never see half of it.
pub fn write(path: &Path, addresses: &impl Serialize) -> anyhow::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".draft");
    std::fs::write(&draft, serde_json::to_vec(addresses)?)
        .and_then(|()| std::fs::rename(&draft, path))
        .with_context(|| format!("writing {}", path.display()))
}
