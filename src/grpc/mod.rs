//! The control plane for workers: gRPC over a Unix socket, and over TCP if configured. No logic:
//! what comes in is handed to the service, what it answers goes out.

mod admin;
mod worker;

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::{Router, TcpConnectInfo, UdsConnectInfo};
use tonic::{Request, Status};

use crate::proto::v1::admin_server::AdminServer;
use crate::proto::v1::worker_server::WorkerServer;
use crate::service::{Peer, Service};
use crate::util::socket::{self, SocketFile};

/// Streams and calls of one connection at once.
const STREAMS: u32 = 64;

/// Largest message of a worker in bytes.
const MAX_MESSAGE: usize = 1 << 20;

/// The sockets, bound.
#[derive(Debug)]
pub struct Grpc {
    unix: UnixListener,
    file: SocketFile,
    tcp: Option<TcpListener>,
}

// === impl Grpc ===

impl Grpc {
    /// Binds the sockets. Must be called inside a runtime.
    ///
    /// # Errors
    /// Somebody else listens there, or the system refuses.
    pub async fn bind(path: &Path, listen: Option<SocketAddr>) -> io::Result<Self> {
        let (unix, file) = socket::bind(path)?;
        let tcp = match listen {
            Some(address) => Some(TcpListener::bind(address).await?),
            None => None,
        };
        Ok(Self {
            unix: UnixListener::from_std(unix)?,
            file,
            tcp,
        })
    }

    /// Address over TCP, if there is one.
    pub fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok())
    }

    /// Serves until `stop`; then lets calls end.
    ///
    /// # Errors
    /// A server that cannot go on.
    pub async fn run(
        self,
        service: Arc<Service>,
        stop: CancellationToken,
    ) -> Result<(), tonic::transport::Error> {
        let Self { unix, file, tcp } = self;
        let unix = router(&service, &stop)
            .serve_with_incoming_shutdown(UnixListenerStream::new(unix), stop.cancelled());
        let tcp = async {
            match tcp {
                Some(tcp) => {
                    let incoming = TcpListenerStream::new(tcp);
                    let router = router(&service, &stop);
                    router
                        .serve_with_incoming_shutdown(incoming, stop.cancelled())
                        .await
                }
                None => Ok(()),
            }
        };
        let (unix, tcp) = tokio::join!(unix, tcp);
        drop(file);
        unix.and(tcp)
    }
}

fn router(service: &Arc<Service>, stop: &CancellationToken) -> Router {
    let worker = worker::Worker::new(Arc::clone(service), stop.clone());
    let admin = admin::Admin::new(Arc::clone(service));
    Server::builder()
        .max_concurrent_streams(STREAMS)
        .add_service(WorkerServer::new(worker).max_decoding_message_size(MAX_MESSAGE))
        .add_service(AdminServer::new(admin).max_decoding_message_size(MAX_MESSAGE))
}

/// Who asks.
fn peer<T>(request: &Request<T>) -> Result<Peer, Status> {
    let extensions = request.extensions();
    if let Some(unix) = extensions.get::<UdsConnectInfo>() {
        let cred = unix
            .peer_cred
            .ok_or_else(|| Status::unauthenticated("no credentials"))?;
        return Ok(Peer::Unix {
            uid: cred.uid(),
            pid: cred.pid(),
        });
    }
    let tcp = extensions
        .get::<TcpConnectInfo>()
        .and_then(TcpConnectInfo::remote_addr);
    tcp.map(Peer::Tcp)
        .ok_or_else(|| Status::unauthenticated("no address"))
}
