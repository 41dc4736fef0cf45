//! `Admin`: what the daemon is and holds, and ending a session.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::peer;
use crate::proto::v1::{
    DetachRequest, DetachResponse, HookTime, Shard, StatusRequest, StatusResponse, TransferMode,
    WorkerBeat, WorkerStatus, admin_server,
};
use crate::service::{Service, WorkerLoad, WorkerRow};
use crate::types::SessionId;

/// The service `Admin`. Over TCP it wants the token as `authorization: Bearer TOKEN`.
#[derive(Debug)]
pub(super) struct Admin {
    service: Arc<Service>,
}

// === impl Admin ===

impl Admin {
    pub(super) fn new(service: Arc<Service>) -> Self {
        Self { service }
    }

    fn check<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let peer = peer(request)?;
        let header = request.metadata().get("authorization");
        let header = header.and_then(|value| value.to_str().ok());
        let token = header.and_then(|value| value.strip_prefix("Bearer "));
        if self.service.admits(&peer, token) {
            Ok(())
        } else {
            Err(Status::unauthenticated("this peer may not ask"))
        }
    }
}

#[tonic::async_trait]
impl admin_server::Admin for Admin {
    async fn status(
        &self,
        request: Request<StatusRequest>,
    ) -> Result<Response<StatusResponse>, Status> {
        self.check(&request)?;
        let status = self.service.status();
        let workers = self.service.workers().into_iter().map(worker);
        Ok(Response::new(StatusResponse {
            version: status.version.to_owned(),
            boot: status.boot.to_bytes().to_vec().into(),
            ready: status.ready,
            not_ready: status.not_ready,
            workers: workers.collect(),
        }))
    }

    async fn detach(
        &self,
        request: Request<DetachRequest>,
    ) -> Result<Response<DetachResponse>, Status> {
        self.check(&request)?;
        let DetachRequest { session, reason } = request.into_inner();
        let session: [u8; 16] = session
            .as_ref()
            .try_into()
            .map_err(|_| Status::invalid_argument("a session has 16 bytes"))?;
        let found = self.service.detach(SessionId::from_bytes(session), &reason);
        Ok(Response::new(DetachResponse { found }))
    }
}

fn worker(row: WorkerRow) -> WorkerStatus {
    let fingerprint = row.fingerprint.map(|fingerprint| fingerprint.0.to_vec());
    WorkerStatus {
        session: row.session.to_bytes().to_vec().into(),
        instance: row.instance.to_bytes().to_vec().into(),
        shard: Some(Shard {
            attn_tp_size: row.attn_tp_size,
            attn_tp_rank: row.attn_tp_rank,
        }),
        model: row.model_name,
        fingerprint: fingerprint.unwrap_or_default().into(),
        mode: TransferMode::from(row.mode).into(),
        epoch: row.epoch,
        beat: row.load.map(beat),
    }
}

fn beat(load: WorkerLoad) -> WorkerBeat {
    let WorkerLoad {
        ticks,
        slots_free,
        slots_total,
        rows_free,
        rows_total,
        running,
        waiting,
        hooks,
    } = load;
    let hooks = hooks.into_iter().map(|(name, row)| HookTime {
        name,
        calls: row.calls,
        mean_ns: row.mean_ns,
        p99_ns: row.p99_ns,
        max_ns: row.max_ns,
    });
    WorkerBeat {
        ticks,
        slots_free,
        slots_total,
        rows_free,
        rows_total,
        running,
        waiting,
        hooks: hooks.collect(),
    }
}
