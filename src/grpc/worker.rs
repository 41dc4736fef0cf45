//! `Worker`: attaching, and the stream by which both sides know that the other lives.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::peer;
use crate::proto::v1::daemon_event::Event as Say;
use crate::proto::v1::worker_event::Event as Said;
use crate::proto::v1::{
    AttachRequest, AttachResponse, Closing, DaemonBeat, DaemonEvent, Hello, WorkerBeat,
    WorkerEvent, attach_response, worker_server,
};
use crate::service::{Attachment, HookRow, Service, WorkerLoad};

/// What a worker may take to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

/// A worker that says nothing for this and for ten beats is gone.
const SILENCE: Duration = Duration::from_secs(30);

/// What a worker may take to read an order.
const SEND_WITHIN: Duration = Duration::from_secs(1);

/// Hooks of which a worker may tell times, and the longest name of one.
const HOOKS: (usize, usize) = (32, 64);

/// Events that may wait for a worker that does not read.
const BACKLOG: usize = 16;

/// The service `Worker`.
#[derive(Debug)]
pub(super) struct Worker {
    service: Arc<Service>,
    stop: CancellationToken,
}

// === impl Worker ===

impl Worker {
    pub(super) fn new(service: Arc<Service>, stop: CancellationToken) -> Self {
        Self { service, stop }
    }
}

#[tonic::async_trait]
impl worker_server::Worker for Worker {
    async fn attach(
        &self,
        request: Request<AttachRequest>,
    ) -> Result<Response<AttachResponse>, Status> {
        let peer = peer(&request)?;
        let result = match self.service.attach(request.into_inner(), &peer) {
            Ok(attached) => attach_response::Result::Attached(attached),
            Err(refusal) => attach_response::Result::Refusal(refusal),
        };
        Ok(Response::new(AttachResponse {
            result: Some(result),
        }))
    }

    type SessionStream = ReceiverStream<Result<DaemonEvent, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<WorkerEvent>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut said = request.into_inner();
        let first = tokio::time::timeout(HELLO_WITHIN, said.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no hello"))??;
        let Some(Said::Hello(Hello { session, secret })) = first.and_then(|first| first.event)
        else {
            return Err(Status::invalid_argument("the first event is not a hello"));
        };
        let attachment = self.service.hello(&session, &secret);
        let attachment = attachment.ok_or_else(|| Status::unauthenticated("no such session"))?;
        let (say, says) = mpsc::channel(BACKLOG);
        let stream = Stream {
            heartbeat: self.service.config().heartbeat,
            boot: self.service.boot().to_bytes(),
            attachment,
            said,
            say,
            stop: self.stop.clone(),
        };
        tokio::spawn(stream.run());
        Ok(Response::new(ReceiverStream::new(says)))
    }
}

/// One stream.
struct Stream {
    attachment: Attachment,
    said: Streaming<WorkerEvent>,
    say: mpsc::Sender<Result<DaemonEvent, Status>>,
    heartbeat: Duration,
    boot: [u8; 16],
    stop: CancellationToken,
}

// === impl Stream ===

impl Stream {
    /// Beats and listens until either side ends.
    async fn run(mut self) {
        let mut ended = self.attachment.worker().stop();
        let mut beats = 0;
        let mut beat = tokio::time::interval(self.heartbeat);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let silence = SILENCE.max(self.heartbeat.saturating_mul(10));
        let mut heard = Instant::now();
        let worker = self.attachment.worker_arc();
        loop {
            tokio::select! {
                reason = ended.wait() => {
                    self.close(reason.as_str()).await;
                    return;
                }
                // The session itself is ended by the service, which tells why.
                () = self.stop.cancelled() => {
                    self.close("shutdown").await;
                    return;
                }
                said = timeout_at(heard + silence, self.said.next()) => match said {
                    Ok(Some(Ok(event))) => {
                        heard = Instant::now();
                        self.heard(event);
                    }
                    // The end, an error, or silence.
                    Ok(None | Some(Err(_))) | Err(_) => break,
                },
                work = worker.order() => {
                    let event = DaemonEvent { event: Some(Say::Work(work)) };
                    if self.say.send_timeout(Ok(event), SEND_WITHIN).await.is_err() {
                        break;
                    }
                }
                _ = beat.tick() => {
                    beats += 1;
                    let event = Say::Beat(DaemonBeat { boot: self.boot.to_vec().into(), beats });
                    match self.say.try_send(Ok(DaemonEvent { event: Some(event) })) {
                        // A worker that does not read is found by its silence.
                        Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => {}
                        Err(mpsc::error::TrySendError::Closed(_)) => break,
                    }
                }
            }
        }
        self.attachment.end();
    }

    fn heard(&self, event: WorkerEvent) {
        match event.event {
            Some(Said::Beat(beat)) => self.attachment.worker().set_load(load(beat)),
            Some(Said::Done(done)) => {
                let (number, ok) = (done.number, done.ok);
                tracing::debug!(number, ok, "A worker's work is done: {}", done.message);
            }
            Some(Said::Hello(_)) | None => {}
        }
    }

    async fn close(&self, reason: &str) {
        let closing = Say::Closing(Closing {
            reason: reason.to_owned(),
            retry_after_ms: 1000,
        });
        let event = Ok(DaemonEvent {
            event: Some(closing),
        });
        // A worker that does not read learns it from the end of the stream.
        let _ = self.say.send_timeout(event, Duration::from_secs(1)).await;
    }
}

fn load(beat: WorkerBeat) -> WorkerLoad {
    let WorkerBeat {
        ticks,
        slots_free,
        slots_total,
        rows_free,
        rows_total,
        running,
        waiting,
        hooks,
    } = beat;
    let (most, longest) = HOOKS;
    let hooks = hooks.into_iter().take(most);
    let hooks = hooks.filter(|hook| hook.name.len() <= longest).map(|hook| {
        let row = HookRow {
            calls: hook.calls,
            mean_ns: hook.mean_ns,
            p99_ns: hook.p99_ns,
            max_ns: hook.max_ns,
        };
        (hook.name, row)
    });
    WorkerLoad {
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
