//! `engram namespaces`: who holds how much.

use serde_json::Value;

use super::client::{Client, ClientError};
use super::fields::{and_more, bytes, rows, text};
use super::remote::{Ask, Remote};
use super::table::Table;

/// List namespaces with what they hold and what they may hold, those that hold most first.
///
/// A namespace is the tenant, extra_key, cache_salt and adapter of requests. Its bytes are those of
/// its states and KV, each once. Limits are set in the daemon's configuration, [service.limits].
#[derive(Debug, clap::Args)]
pub struct Namespaces {
    /// At most so many rows.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1000))]
    limit: u64,
    /// Skip so many rows.
    #[arg(long, default_value_t = 0)]
    offset: u64,
    #[command(flatten)]
    remote: Remote,
}

impl Ask for Namespaces {
    fn remote(&self) -> &Remote {
        &self.remote
    }

    async fn ask(&self, client: &Client) -> Result<Value, ClientError> {
        let Namespaces {
            limit,
            offset,
            remote: _,
        } = self;
        let path = format!("/v1/namespaces?limit={limit}&offset={offset}");
        client.get(&path).await
    }

    fn show(&self, answer: &Value) -> String {
        let mut table = Table::new(&[
            "NAMESPACE",
            "NAME",
            "TENANT",
            "EXTRA KEY",
            "SALTED",
            ">SNAPSHOTS",
            ">USED",
            ">QUOTA",
        ]);
        let rows = rows(answer, "namespaces");
        for row in rows {
            let id = text(row, "namespace");
            table.row(vec![
                id.get(..16).unwrap_or(&id).to_owned(),
                text(row, "name"),
                text(row, "tenant"),
                text(row, "extra_key"),
                text(row, "salted"),
                text(row, "snapshots"),
                bytes(row, "used_bytes"),
                bytes(row, "quota_bytes"),
            ]);
        }
        table.render() + &and_more(answer, self.offset, rows.len())
    }
}
