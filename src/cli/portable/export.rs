//! `engram export`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bytes::Bytes;
use clap::ValueHint;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::pair::{Pair, Writing};
use super::{Failure, block_on, offline};
use crate::cli::client::{Client, ClientError, root_cause};
use crate::cli::remote::{self, Remote, Which};
use crate::cli::table::size;
use crate::cli::teller::Teller;
use crate::service::{Export, ExportRequest, Selector, ServiceError};
use crate::store::bundle::Bundle;
use crate::types::SnapshotId;

const HELP: &str = "\
NAME.safetensors holds the token ids, the state and the KV of every rank, for any safetensors
library; NAME.json says what they are and has their checksums. Both are needed to import. What is
on the daemon's disk is verified while it is read. An export that breaks off leaves no file.

Examples:
  engram export chat-42 --out chat            the latest turn of a conversation
  engram export chat-42 --turn 7 --out seven
  engram export 019aa3c4-5a1e-7cc1-9d0c-4e1f3e0b7a55
  engram export chat-42 --data /var/lib/engram --out chat     the daemon is stopped

Exit codes: 0 done; 1 refused or failed; 2 wrong usage; 3 no daemon answers.";

/// Write a snapshot as NAME.safetensors and NAME.json, which another host can import.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// A snapshot's id; or a conversation, of which the latest is meant unless a turn or branch is
    /// named.
    #[arg(value_name = "SNAPSHOT", required_unless_present_any = ["snapshot", "rid"])]
    what: Option<String>,
    #[command(flatten)]
    which: Which,
    /// Name of the two files, without their ends. [default: the snapshot's id]
    #[arg(long, value_name = "NAME", value_hint = ValueHint::FilePath)]
    out: Option<PathBuf>,
    /// Write over files of that name.
    #[arg(long)]
    force: bool,
    /// The data directory of a daemon that is stopped, instead of a daemon.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    data: Option<PathBuf>,
    #[command(flatten)]
    remote: Remote,
}

/// Bytes as they come, from either side.
enum Source {
    Daemon(reqwest::Response),
    Here(mpsc::Receiver<Result<Bytes, ServiceError>>),
}

/// What was written.
struct Written {
    pair: Pair,
    bundle: Bundle,
}

/// Exports, and says where to.
pub fn run(args: Args) -> ExitCode {
    let as_json = args.remote.json;
    match block_on(export(args)) {
        Ok(written) => remote::print(&written.show(as_json)),
        Err(failure) => {
            if let (true, Failure::Client(ClientError::Refused { body, .. })) = (as_json, &failure)
            {
                remote::print(&format!("{body}\n"));
            }
            failure.exit()
        }
    }
}

async fn export(args: Args) -> Result<Written, Failure> {
    let Args {
        what,
        mut which,
        out,
        force,
        data,
        remote,
    } = args;
    let named = which.turn.is_some() || which.branch.is_some() || which.rid.is_some();
    let is_id = |text: &String| text.parse::<SnapshotId>().is_ok();
    // A conversation may have such a name, too; then its turn or branch is named.
    let id = what.as_ref().filter(|text| is_id(text) && !named);
    let conversation = what.as_ref().filter(|_| id.is_none());
    which.snapshot = which.snapshot.or(id.cloned());
    if let Some(out) = &out
        && !force
    {
        Pair::of(out).check_free()?;
    }
    match data {
        Some(data) => {
            let service = offline::open(&data, false, 0).await?;
            let select = select(conversation, which)?;
            let exported = service.export(ExportRequest { select }).await;
            let written = match exported {
                Ok(Export {
                    snapshot,
                    tensor_bytes,
                    chunks,
                }) => {
                    let pair = name(out.as_deref(), &snapshot.to_string(), force);
                    write(pair, tensor_bytes, Source::Here(chunks)).await
                }
                Err(error) => Err(error.into()),
            };
            service.shutdown().await;
            written
        }
        None => {
            let Remote {
                url,
                token,
                timeout,
                json: _,
            } = remote;
            let client = Client::streaming(&url, token, timeout)?;
            let body = remote::select(conversation.map(String::as_str), &which);
            let response = client.open("/v1/export", &body).await?;
            let header = |name: &str| {
                let value = response.headers().get(name)?;
                Some(value.to_str().ok()?.to_owned())
            };
            let bytes = header("x-engram-tensor-bytes").and_then(|text| text.parse().ok());
            let id = header("x-engram-snapshot").filter(|id| id.parse::<SnapshotId>().is_ok());
            let Some((bytes, id)) = Option::zip(bytes, id) else {
                let text = "the answer is no export: the daemon is of another version";
                return Err(Failure::Other(text.to_owned()));
            };
            let pair = name(out.as_deref(), &id, force);
            write(pair, bytes, Source::Daemon(response)).await
        }
    }
}

fn select(conversation: Option<&String>, which: Which) -> Result<Selector, Failure> {
    let Which {
        turn,
        branch,
        rid,
        snapshot,
    } = which;
    let bad = |_| Failure::Other("--snapshot is not a UUID".to_owned());
    Ok(Selector {
        tenant: None,
        rid,
        conversation_id: conversation.cloned(),
        turn_number: turn,
        branch_name: branch,
        snapshot_id: snapshot.map(|id| id.parse().map_err(bad)).transpose()?,
    })
}

fn name(out: Option<&Path>, id: &str, force: bool) -> Result<Pair, Failure> {
    let pair = Pair::of(out.unwrap_or(Path::new(id)));
    if !force {
        pair.check_free()?;
    }
    Ok(pair)
}

/// Writes what comes: so many bytes of tensors, then the description.
async fn write(
    pair: Result<Pair, Failure>,
    tensor_bytes: u64,
    mut source: Source,
) -> Result<Written, Failure> {
    let pair = pair?;
    let teller = Teller::new();
    let (writing, file, mut out) = Writing::start(pair.clone())?;
    let failed = |error: std::io::Error| Failure::file(&pair.tensors, &error);
    let (mut done, mut description) = (0_u64, Vec::new());
    while let Some(mut bytes) = source.next().await? {
        let left = usize::try_from(tensor_bytes - done).unwrap_or(usize::MAX);
        let tensors = bytes.split_to(left.min(bytes.len()));
        out.write(&tensors).map_err(failed)?;
        done += tensors.len() as u64;
        description.extend_from_slice(&bytes);
        if description.len() as u64 > Bundle::max_bytes() {
            return Err(Failure::Other("the description never ends".to_owned()));
        }
        teller.tell(|| format!("{} of {} written", size(done), size(tensor_bytes)));
    }
    let (bytes, checksums) = out.finish().map_err(failed)?;
    teller.done();
    let bundle = Bundle::decode(&description).map_err(|error| {
        Failure::Other(format!(
            "the export broke off before it was whole ({error})"
        ))
    })?;
    if (bundle.file_bytes, &bundle.checksums) != (bytes, &checksums) {
        let text = "other bytes came than were sent; nothing is kept".to_owned();
        return Err(Failure::Other(text));
    }
    let pair = writing.finish(&file, &description)?;
    Ok(Written { pair, bundle })
}

// === impl Source ===

impl Source {
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match self {
            Self::Daemon(response) => {
                let chunk = response.chunk().await;
                chunk.map_err(|error| {
                    let why = root_cause(&error);
                    Failure::Other(format!(
                        "the export broke off, see the daemon's log ({why})"
                    ))
                })
            }
            Self::Here(chunks) => Ok(chunks.recv().await.transpose()?),
        }
    }
}

// === impl Written ===

impl Written {
    fn show(&self, as_json: bool) -> String {
        let Self { pair, bundle } = self;
        let (tensors, description) = (pair.tensors.display(), pair.description.display());
        if as_json {
            let answer: Value = json!({
                "success": true,
                "snapshot_id": bundle.snapshot,
                "tensors": tensors.to_string(),
                "description": description.to_string(),
                "file_bytes": bundle.file_bytes,
                "format_version": bundle.format_version,
                "encoding": bundle.encoding,
                "boundary": bundle.boundary,
                "fingerprint": bundle.fingerprint,
                "names": bundle.names,
            });
            return format!("{answer}\n");
        }
        format!(
            "{} tokens of snapshot {} written: {tensors} ({}) and {description}\n",
            bundle.boundary,
            bundle.snapshot,
            size(bundle.file_bytes),
        )
    }
}
