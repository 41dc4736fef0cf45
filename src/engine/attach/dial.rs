//! The thread that attaches, again and again, and knows whether the daemon's process lives.
//!
//! # What
//!
//! It calls Attach, passes the ring's descriptor, checks the self-test, opens the stream, and then
//! hands channel and ring to the scheduler. From there on it beats and listens. When the session
//! ends, from whichever side, it starts again. The scheduler never waits for it.
//!
//! # Cancellation
//!
//! The scheduler ends a session by dropping [`Over`]; the connections are closed then, which tells
//! the daemon. The thread ends with [`Dialer`].

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use super::attaching::{self, AttachError, Attached};
use crate::device::shm::SharedMap;
use crate::engine::device_memory::DeviceMemory;
use crate::proto::channel::WorkerEnd;
use crate::proto::v1;
use crate::proto::v1::daemon_event::Event as Said;
use crate::proto::v1::worker_client::WorkerClient;
use crate::proto::v1::worker_event::Event as Say;

/// First pause between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause after failures.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Pause after a refusal that the daemon does not expect to change. It may be replaced by another.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);
/// How often a daemon that stays away is logged.
const TOLD_EVERY: Duration = Duration::from_secs(600);
/// How long connecting may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
/// Events of the worker that may wait for the stream.
const BACKLOG: usize = 16;
/// Beats that the daemon may miss on the stream.
const MISSED_BEATS: u32 = 30;

/// Where a daemon is: `http://HOST:PORT`, or the path of a Unix socket (`unix:` may stand before).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Over TCP.
    Http(String),
    /// Over a Unix socket.
    Unix(PathBuf),
}

/// A text that is no address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is neither http://HOST:PORT nor the absolute path of a socket")]
pub struct BadAddress(String);

/// What the thread works with.
pub(super) struct Dial {
    pub address: Address,
    pub request: v1::AttachRequest,
    pub ring_bytes: u64,
    pub load: Arc<Load>,
}

/// The thread, from outside.
#[derive(Debug)]
pub(super) struct Dialer {
    events: Receiver<Event>,
    /// Dropped with this.
    _stop: Option<oneshot::Sender<()>>,
}

/// What the scheduler hears.
#[derive(Debug)]
pub(super) enum Event {
    /// A session.
    Linked(Box<Linked>),
    /// This session's connection is gone.
    Lost([u8; 16], String),
    /// There is no session, and why.
    Apart(String),
}

/// A session that is ready.
pub(super) struct Linked {
    pub id: [u8; 16],
    pub boot: [u8; 16],
    pub end: WorkerEnd,
    pub ring: SharedMap,
    /// What the daemon reaches instead of it, in mode engine.
    pub window: Option<SharedMap>,
    /// Wakes the daemon.
    pub bell: Box<dyn Fn() + Send>,
    pub over: Over,
}

/// Held as long as the scheduler uses a session.
#[derive(Debug)]
pub(super) struct Over {
    _held: oneshot::Sender<()>,
}

/// How busy the engine is, for the beats. Written by the scheduler.
#[derive(Debug, Default)]
pub(super) struct Load {
    ticks: AtomicU64,
    slots: [AtomicU64; 2],
    rows: [AtomicU64; 2],
    requests: AtomicU64,
}

// === impl Address ===

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let bad = || BadAddress(text.to_owned());
        if let Some(rest) = text.strip_prefix("http://") {
            let plain = rest.trim_end_matches('/');
            let sound = plain.contains(':') && !plain.contains('/');
            return sound
                .then(|| Self::Http(format!("http://{plain}")))
                .ok_or_else(bad);
        }
        let path = text.strip_prefix("unix:").unwrap_or(text);
        let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
        let sound = path.is_absolute() && path.as_os_str().len() < 108;
        sound.then_some(Self::Unix(path)).ok_or_else(bad)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(url) => f.write_str(url),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

// === impl Over ===

impl Over {
    /// The second value tells when this is dropped.
    pub fn new() -> (Self, oneshot::Receiver<()>) {
        let (held, ended) = oneshot::channel();
        (Self { _held: held }, ended)
    }
}

// === impl Linked ===

impl fmt::Debug for Linked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Linked")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

// === impl Load ===

impl Load {
    /// Notes how busy the engine is.
    pub fn set(&self, ticks: u64, device: &DeviceMemory, requests: usize) {
        let (slots, pages) = (device.slot_account(), device.page_account());
        let page = device.kv.page_size() as u64;
        let set = |at: &AtomicU64, value: u64| at.store(value, Ordering::Relaxed);
        set(&self.ticks, ticks);
        let [free, total] = &self.slots;
        set(free, slots.free as u64);
        set(total, slots.total as u64);
        let [free, total] = &self.rows;
        set(free, pages.free as u64 * page);
        set(total, pages.total as u64 * page);
        set(&self.requests, requests as u64);
    }

    fn beat(&self) -> v1::WorkerBeat {
        let get = |at: &AtomicU64| at.load(Ordering::Relaxed);
        let ([slots_free, slots_total], [rows_free, rows_total]) = (&self.slots, &self.rows);
        v1::WorkerBeat {
            ticks: get(&self.ticks),
            slots_free: get(slots_free),
            slots_total: get(slots_total),
            rows_free: get(rows_free),
            rows_total: get(rows_total),
            running: u32::try_from(get(&self.requests)).unwrap_or(u32::MAX),
            waiting: 0,
            hooks: Vec::new(),
        }
    }
}

// === impl Dialer ===

impl Dialer {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// The system gives none.
    pub fn start(dial: Dial) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (tell, events) = crossbeam_channel::unbounded();
        let (stop, stopped) = oneshot::channel();
        thread::Builder::new()
            .name("engram-attach".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        _ = stopped => {}
                        () = run(&dial, &tell) => {}
                    }
                });
                // A call that hangs must not keep the thread.
                runtime.shutdown_background();
            })?;
        Ok(Self {
            events,
            _stop: Some(stop),
        })
    }

    /// One that says what a test says.
    #[cfg(test)]
    pub fn of(events: Receiver<Event>) -> Self {
        Self {
            events,
            _stop: None,
        }
    }

    /// What happened, if anything did.
    pub fn event(&self) -> Option<Event> {
        self.events.try_recv().ok()
    }
}

/// Failed attempts since the last session.
#[derive(Debug, Default)]
struct Apart {
    /// When it was logged last, and whether it was a refusal.
    told: Option<(Instant, bool)>,
}

impl Apart {
    /// Whether a failure is to be logged: the first, one of another kind, and now and then.
    fn is_news(&mut self, error: &AttachError, now: Instant) -> bool {
        let refused = error.retry_after().is_some();
        let known = |(at, kind)| kind == refused && now.duration_since(at) < TOLD_EVERY;
        if self.told.is_some_and(known) {
            return false;
        }
        self.told = Some((now, refused));
        true
    }
}

/// Attaches and stays attached, until the scheduler is gone.
async fn run(dial: &Dial, tell: &Sender<Event>) {
    let mut pause = FIRST_PAUSE;
    let mut apart = Apart::default();
    loop {
        match once(dial, tell).await {
            Ok(()) => {
                pause = FIRST_PAUSE;
                apart = Apart::default();
            }
            Err(error) => {
                if apart.is_news(&error, Instant::now()) {
                    tracing::warn!(
                        "Not attached to {}: {error}. Requests are served without it",
                        dial.address
                    );
                } else {
                    tracing::debug!("Not attached: {error}");
                }
                pause = match error.retry_after() {
                    Some(Duration::ZERO) => REFUSED_PAUSE,
                    Some(after) => after.clamp(FIRST_PAUSE, REFUSED_PAUSE),
                    None => pause.saturating_mul(2).min(LONGEST_PAUSE),
                };
                if tell.send(Event::Apart(error.to_string())).is_err() {
                    return;
                }
            }
        }
        sleep(pause).await;
    }
}

/// One session, from attach to end.
async fn once(dial: &Dial, tell: &Sender<Event>) -> Result<(), AttachError> {
    let mut client = WorkerClient::new(connect(&dial.address).await?);
    let (over, ended) = Over::new();
    let Attached {
        session,
        secret,
        heartbeat,
        connection,
        linked,
    } = attaching::attach(&mut client, &dial.request, dial.ring_bytes, over).await?;
    let (says, waiting) = mpsc::channel(BACKLOG);
    let hello = v1::Hello {
        session: session.to_vec().into(),
        secret: secret.to_vec().into(),
    };
    let event = |event| v1::WorkerEvent { event: Some(event) };
    // The first of a fresh queue always fits.
    let _queued = says.try_send(event(Say::Hello(hello)));
    let stream = timeout(CONNECT_WITHIN, client.session(ReceiverStream::new(waiting)));
    let stream = stream.await.map_err(|_| AttachError::Slow)??.into_inner();
    if tell.send(Event::Linked(Box::new(linked))).is_err() {
        return Ok(());
    }
    let why = attend(&dial.load, heartbeat, stream, &says, &connection, ended).await;
    tracing::debug!("The connection is over: {why}");
    let _gone = tell.send(Event::Lost(session, why));
    Ok(())
}

async fn connect(address: &Address) -> Result<Channel, AttachError> {
    let uri = match address {
        Address::Http(url) => url.clone(),
        Address::Unix(path) => format!("unix:{}", path.display()),
    };
    let endpoint = Endpoint::from_shared(uri)?.connect_timeout(CONNECT_WITHIN);
    let connected = timeout(CONNECT_WITHIN, endpoint.connect()).await;
    Ok(connected.map_err(|_| AttachError::Slow)??)
}

/// Beats and listens until the session is over. Says why it is.
async fn attend(
    load: &Load,
    heartbeat: Duration,
    mut stream: Streaming<v1::DaemonEvent>,
    says: &mpsc::Sender<v1::WorkerEvent>,
    connection: &UnixStream,
    mut ended: oneshot::Receiver<()>,
) -> String {
    let mut beat = interval(heartbeat);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let silence = heartbeat.saturating_mul(MISSED_BEATS);
    let mut heard = Instant::now();
    loop {
        tokio::select! {
            _ = &mut ended => return "the engine ended it".to_owned(),
            () = attaching::closed(connection) => return "the daemon is gone".to_owned(),
            said = tokio::time::timeout_at(heard + silence, stream.message()) => {
                heard = Instant::now();
                let event = match said {
                    Ok(Ok(Some(event))) => event.event,
                    Ok(Ok(None)) => return "the daemon ended the stream".to_owned(),
                    Ok(Err(status)) => return status.message().to_owned(),
                    Err(_) => return "the stream is silent".to_owned(),
                };
                match event {
                    Some(Said::Closing(closing)) => return closing.reason,
                    Some(Said::Work(work)) => {
                        // Hits offer their state again by themselves; this engine keeps no list.
                        let done = v1::WorkDone {
                            number: work.number,
                            ok: false,
                            message: "not supported by this engine".to_owned(),
                        };
                        let event = v1::WorkerEvent { event: Some(Say::Done(done)) };
                        let _full = says.try_send(event);
                    }
                    Some(Said::Beat(_)) | None => {}
                }
            }
            _ = beat.tick() => {
                let event = v1::WorkerEvent { event: Some(Say::Beat(load.beat())) };
                // A daemon that does not read is found by its silence.
                let _full = says.try_send(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_stays_away_is_logged_at_first_and_then_rarely() {
        let refused = AttachError::Refused {
            reason: v1::refusal::Reason::Unspecified,
            message: "no".to_owned(),
            retry_after: Duration::ZERO,
        };
        let start = Instant::now();
        let mut apart = Apart::default();
        assert!(apart.is_news(&AttachError::Slow, start));
        for seconds in 1..TOLD_EVERY.as_secs() {
            let now = start + Duration::from_secs(seconds);
            assert!(!apart.is_news(&AttachError::Slow, now), "after {seconds} s");
        }
        let later = start + TOLD_EVERY;
        assert!(apart.is_news(&AttachError::Slow, later));
        assert!(apart.is_news(&refused, later), "it came, and refuses");
        assert!(!apart.is_news(&refused, later));
    }

    #[test]
    fn addresses_are_checked() {
        let address = |text: &str| text.parse::<Address>();
        assert_eq!(
            address("/run/e.sock"),
            Ok(Address::Unix("/run/e.sock".into()))
        );
        assert_eq!(
            address("unix:/run/e.sock"),
            Ok(Address::Unix("/run/e.sock".into()))
        );
        assert_eq!(
            address("unix:///run/e.sock"),
            Ok(Address::Unix("/run/e.sock".into()))
        );
        assert_eq!(
            address("http://h:1/"),
            Ok(Address::Http("http://h:1".to_owned()))
        );
        assert_eq!(address("/x").unwrap().to_string(), "unix:/x");
        for bad in [
            "",
            "relative",
            "https://h:1",
            "http://h",
            "http://h:1/p",
            "unix:x",
        ] {
            assert_eq!(address(bad), Err(BadAddress(bad.to_owned())), "{bad}");
        }
    }
}
