//! The owner of all decisions.

pub mod api;
pub mod config;
pub mod conversations;
pub mod error;
pub mod hold;
pub mod metrics;
pub mod restore_state;
pub mod save_state;
mod session;

pub use api::{
    ConversationRow, DeleteReply, DeleteRequest, Event, InfoRequest, ListReply, ListRequest,
    RestoreReply, RestoreRequest, SaveReply, SaveRequest, Selector, SnapshotRow, StatusReply,
    TierRow, WorkerLoad, WorkerRow,
};
pub use config::Config;
pub use error::{ErrorKind, ServiceError};

// Signatures that REST and gRPC build on (all on `Service`, held as `Arc<Service>`):
//
//   pub fn start(config: Config, store: Arc<Store>, devices: Devices, clock: Arc<dyn Clock>,
//                registry: &mut Registry) -> Arc<Service>          // loads in the background
//   pub async fn ready(&self)                                      // waits for the latches
//   pub async fn save(&self, SaveRequest) -> Result<SaveReply, ServiceError>
//   pub async fn restore(&self, RestoreRequest) -> Result<RestoreReply, ServiceError>
//   pub fn list(&self, ListRequest) -> Result<ListReply, ServiceError>
//   pub fn conversations(&self, limit: usize, offset: usize) -> (Vec<ConversationRow>, usize)
//   pub fn info(&self, InfoRequest) -> Result<SnapshotRow, ServiceError>
//   pub async fn delete(&self, DeleteRequest) -> Result<DeleteReply, ServiceError>
//   pub fn status(&self) -> StatusReply
//   pub fn tiers(&self) -> Vec<TierRow>
//   pub fn workers(&self) -> Vec<WorkerRow>
//   pub fn events(&self) -> tokio::sync::broadcast::Receiver<Event>
//   pub fn authorize(&self, token: Option<&str>) -> bool           // constant time; for REST over TCP too
//   pub async fn shutdown(&self)                                   // drains within `drain_timeout`
