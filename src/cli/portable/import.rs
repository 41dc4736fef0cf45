//! `engram import`.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::ValueHint;
use http_body_util::StreamBody;
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use super::pair::Pair;
use super::{Failure, block_on, offline, told};
use crate::cli::client::{Client, ClientError};
use crate::cli::fields::describe;
use crate::cli::remote::{self, Remote};
use crate::cli::table::size;
use crate::cli::teller::Teller;
use crate::service::{ImportRequest, Service};
use crate::store::bundle::{Bundle, CHUNK};

const HELP: &str = "\
All of the pair is verified before anything is sent: the description's own checksum, the header of
the tensors, every 1 MiB of them, and the end of the file. The daemon verifies it again, and takes
all of it or nothing. A model that the store does not hold is refused unless the store holds none;
--new-model takes it. What is here already is not written a second time. A turn or branch of which
the name is taken keeps its snapshot; the one imported then has that name not.

Examples:
  engram import chat                          chat.safetensors and chat.json, under their old names
  engram import chat --conversation copy
  engram import chat --check                  verify the pair, and no more
  engram import chat --data /var/lib/engram   the daemon is stopped

Exit codes: 0 done; 1 refused or failed; 2 wrong usage; 3 no daemon answers; 4 the pair is damaged,
or not one that this version knows.";

/// How long the disk may take after the last byte.
const DISK: Duration = Duration::from_secs(3600);
/// Chunks of a file that are read ahead.
const AHEAD: usize = 4;

/// Take a snapshot in from NAME.safetensors and NAME.json.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Name of the two files, with or without an end.
    #[arg(value_name = "NAME", value_hint = ValueHint::FilePath)]
    name: PathBuf,
    /// Name it in this conversation instead of the one that it was in.
    #[arg(long, value_name = "CONVERSATION", conflicts_with = "no_names")]
    conversation: Option<String>,
    /// Give it no turn and no branch.
    #[arg(long)]
    no_names: bool,
    /// Take it although the store holds snapshots, and none of this model.
    #[arg(long)]
    new_model: bool,
    /// Verify the pair and take nothing in; no daemon is asked.
    #[arg(long)]
    check: bool,
    /// The data directory of a daemon that is stopped, instead of a daemon. Made if missing.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, conflicts_with = "check")]
    data: Option<PathBuf>,
    #[command(flatten)]
    remote: Remote,
}

/// Imports, and says what is here now.
pub fn run(args: Args) -> ExitCode {
    let (as_json, check) = (args.remote.json, args.check);
    match block_on(import(args)) {
        Ok(answer) if as_json => remote::print(&format!("{answer}\n")),
        Ok(_) if check => remote::print("The pair is good.\n"),
        Ok(answer) => remote::print(&show(&answer)),
        Err(Failure::Client(ClientError::Refused {
            body,
            kind,
            message,
            status,
        })) => {
            if as_json {
                remote::print(&format!("{body}\n"));
            }
            let message = told(&message);
            Failure::Client(ClientError::Refused {
                status,
                kind,
                message,
                body,
            })
            .exit()
        }
        Err(failure) => failure.exit(),
    }
}

fn show(answer: &Value) -> String {
    let mut text = describe(answer);
    let taken = answer.get("names_taken").and_then(Value::as_array);
    for name in taken.into_iter().flatten().filter_map(Value::as_str) {
        let name = crate::cli::table::plain(name);
        text.push_str(&format!("not named       {name}: another has it\n"));
    }
    text
}

async fn import(args: Args) -> Result<Value, Failure> {
    let Args {
        name,
        conversation,
        no_names,
        new_model,
        check,
        data,
        remote,
    } = args;
    let pair = Pair::of(&name);
    let (bundle, description) = pair.describe()?;
    let teller = Arc::new(Teller::new());
    let of = size(bundle.file_bytes);
    pair.verify(&bundle, &mut |done| {
        teller.tell(|| format!("{} of {of} verified", size(done)));
    })?;
    if check {
        teller.done();
        return Ok(json!({ "success": true, "snapshot_id": bundle.snapshot }));
    }
    let request = ImportRequest {
        new_model,
        names: !no_names,
        conversation_id: conversation,
        durable: true,
        timeout: DISK,
    };
    let answer = match data {
        Some(data) => {
            let service = offline::open(&data, true, bundle.file_bytes).await?;
            let answer = offline_import(&service, request, &pair, description, &teller).await;
            service.shutdown().await;
            answer
        }
        None => {
            let Remote {
                url,
                token,
                timeout,
                json: _,
            } = remote;
            let query = query(&request);
            let client = Client::new(&url, token.clone(), timeout)?;
            let path = format!("/v1/import/check{query}");
            client
                .send_bytes(&path, "application/json", description.clone())
                .await?;
            let body = body(&pair, &bundle, description, &teller)?;
            let body = body.map(|chunk| chunk.map(Frame::data));
            let body = reqwest::Body::wrap(StreamBody::new(body));
            let client = Client::streaming(&url, token, timeout)?;
            let path = format!("/v1/import{query}");
            let answer = client.send_bytes(&path, "application/octet-stream", body);
            Ok(answer.await?)
        }
    };
    teller.done();
    answer
}

async fn offline_import(
    service: &Arc<Service>,
    request: ImportRequest,
    pair: &Pair,
    description: Vec<u8>,
    teller: &Arc<Teller>,
) -> Result<Value, Failure> {
    let bundle =
        Bundle::decode(&description).map_err(|error| Failure::bad(&pair.description, error))?;
    let mut body = body(pair, &bundle, description, teller)?;
    let (to, chunks) = mpsc::channel(AHEAD);
    let forward = async move {
        while let Some(chunk) = body.next().await {
            if to.send(chunk).await.is_err() {
                return;
            }
        }
    };
    let (reply, ()) = tokio::join!(service.import(request, chunks), forward);
    let reply = serde_json::to_value(reply?);
    let reply = reply.map_err(|error| Failure::Other(error.to_string()))?;
    Ok(reply)
}

/// What is sent: the description with its length before it, then the tensors.
fn body(
    pair: &Pair,
    bundle: &Bundle,
    description: Vec<u8>,
    teller: &Arc<Teller>,
) -> Result<ReceiverStream<io::Result<Bytes>>, Failure> {
    let file = pair.open()?;
    let (to, chunks) = mpsc::channel(AHEAD);
    let (of, teller) = (size(bundle.file_bytes), Arc::clone(teller));
    tokio::task::spawn_blocking(move || {
        let mut head = (description.len() as u64).to_le_bytes().to_vec();
        head.extend_from_slice(&description);
        if to.blocking_send(Ok(Bytes::from(head))).is_err() {
            return;
        }
        let mut done = 0;
        loop {
            let chunk = read_chunk(&file);
            let end = !matches!(&chunk, Ok(chunk) if !chunk.is_empty());
            if matches!(&chunk, Ok(chunk) if chunk.is_empty()) {
                return;
            }
            done += chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
            if to.blocking_send(chunk).is_err() || end {
                return;
            }
            teller.tell(|| format!("{} of {of} sent", size(done)));
        }
    });
    Ok(ReceiverStream::new(chunks))
}

fn read_chunk(file: &File) -> io::Result<Bytes> {
    let mut chunk = Vec::with_capacity(CHUNK as usize);
    file.take(CHUNK).read_to_end(&mut chunk)?;
    Ok(Bytes::from(chunk))
}

/// The request as a query.
fn query(request: &ImportRequest) -> String {
    let ImportRequest {
        new_model,
        names,
        conversation_id,
        durable: _,
        timeout: _,
    } = request;
    let mut query = format!("?new_model={new_model}&names={names}");
    if let Some(name) = conversation_id {
        query.push_str("&conversation_id=");
        for byte in name.bytes() {
            match byte.is_ascii_alphanumeric() {
                true => query.push(char::from(byte)),
                false => query.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_goes_into_a_query() {
        let request = ImportRequest {
            new_model: true,
            names: true,
            conversation_id: Some("a b&c=é".into()),
            durable: true,
            timeout: DISK,
        };
        let expected = "?new_model=true&names=true&conversation_id=a%20b%26c%3D%C3%A9";
        assert_eq!(query(&request), expected);
    }
}
