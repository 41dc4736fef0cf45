//! The embedded engine: a small true hybrid language model behind SGLang's HTTP surface, for where
//! there is no GPU or no SGLang.
//!
//! # What
//!
//! ```text
//!  http ── commands ──► scheduler ── SeqChunk ──► model
//!                        │   │                     │
//!                     memory device_memory ──── pools
//!                     (attach)  (ledger, cache)
//! ```
//!
//! It is a process of its own and links nothing of the daemon but the protocol.
//!
//! # State
//!
//! One thread, the scheduler's, owns model, pools, cache and requests. The HTTP side only sends
//! commands. What an external memory does, it does on that thread, at the points that [`memory`]
//! names.
//!
//! # Cancellation
//!
//! SIGTERM and SIGINT give up what runs, answer it as aborted and end the process.
//!
//! # Errors
//!
//! Bad arguments end the process before a port is bound ([`BadArgs`]). A scheduler that ends
//! unasked ends the process.

pub mod args;
pub mod attach;
pub mod batch;
pub mod cache;
pub mod device_memory;
pub mod http;
pub mod ids;
pub mod ledger;
pub mod memory;
pub mod model;
pub mod pools;
pub mod request;
pub mod rng;
pub mod scheduler;

pub use args::{Args, BadArgs, Config};

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use anyhow::Context as _;
use crossbeam_channel::Sender;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use uuid::Uuid;

use attach::{Attach, Control};
use device_memory::DeviceMemory;
use memory::{Memory, NoMemory};
use model::Model;
use scheduler::{Command, Scheduler};

/// A started engine.
#[derive(Debug)]
pub struct Engine {
    /// Its commands.
    pub commands: Sender<Command>,
    /// Ends when its scheduler has ended.
    pub ended: oneshot::Receiver<()>,
    /// What its HTTP surface is made of.
    pub parts: http::Parts,
}

// === impl Engine ===

impl Engine {
    /// Makes the model and the pools and starts the scheduler's thread.
    ///
    /// # Errors
    ///
    /// Pools that are too large, or no thread.
    pub fn start(config: &Config) -> anyhow::Result<Self> {
        let device = DeviceMemory::new(&config.model, &config.device)?;
        let model = Model::new(config.model.clone());
        let control = Arc::<Control>::default();
        let memory: Box<dyn Memory> = match config.attach.clone() {
            Some(attach) => {
                let control = Arc::clone(&control);
                let attach = Attach::start(attach, &model, &device, control);
                Box::new(attach.context("starting the thread that attaches")?)
            }
            None => Box::new(NoMemory),
        };
        let (commands, receiver) = crossbeam_channel::unbounded();
        let scheduler = Scheduler::new(config.scheduler, model, device, memory, receiver);
        let (end, ended) = oneshot::channel::<()>();
        thread::Builder::new()
            .name("engine-scheduler".to_owned())
            .spawn(move || {
                // Dropped, and so seen, however the thread ends.
                let _end = end;
                scheduler.run();
            })
            .context("starting the scheduler's thread")?;
        Ok(Self {
            commands,
            ended,
            parts: http::Parts {
                control,
                tokenizer: config.tokenizer.clone(),
                model: config.model.name.clone(),
                incremental: config.incremental,
            },
        })
    }

    /// Serves HTTP until `stop` is done or the scheduler ends.
    ///
    /// # Errors
    ///
    /// A listener that fails, or a scheduler that ended unasked.
    pub async fn serve(
        self,
        listener: TcpListener,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> anyhow::Result<()> {
        let Self {
            commands,
            mut ended,
            parts,
        } = self;
        let router = http::router(commands.clone(), parts);
        let (asked, was_asked) = oneshot::channel::<()>();
        let shutdown = async move {
            tokio::select! {
                () = stop => {
                    let _sent = asked.send(());
                    // The scheduler answers what is open, so that the server can drain.
                    let _gone = commands.send(Command::Stop);
                }
                _ = &mut ended => {}
            }
        };
        axum::serve(listener, router)
            .with_graceful_shutdown(shutdown)
            .await?;
        was_asked
            .await
            .map_err(|_| anyhow::anyhow!("the scheduler ended unasked"))
    }
}

/// `engram engine`. `announce` is told the address once it listens.
///
/// # Errors
///
/// [`BadArgs`], an address that cannot be bound, or what [`Engine::serve`] says.
pub async fn run(
    args: Args,
    announce: impl FnOnce(SocketAddr) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (high, low) = Uuid::new_v4().as_u64_pair();
    let config = args.config(high ^ low)?;
    let listener = TcpListener::bind(config.listen)
        .await
        .with_context(|| format!("{}", config.listen))?;
    let address: SocketAddr = listener.local_addr()?;
    let engine = Engine::start(&config)?;
    tracing::info!(%address, model = config.model.name, "Engine serves");
    announce(address)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    engine.serve(listener, stop).await
}
