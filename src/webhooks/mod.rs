//! Webhooks: events are posted to whom the configuration names, signed as Standard Webhooks has it.
//!
//! # What
//! A message is a POST of `{"type", "timestamp", "data"}` with `webhook-id`, `webhook-timestamp` and
//! `webhook-signature`. The id is that of the event, the same in every attempt: receivers that get
//! one twice know it by that. Any 2xx is a yes.
//!
//! # State
//! Each receiver has a task of its own that reads the service's log of events, one after the other,
//! at its own pace: so one that is slow or gone holds up neither others nor anything in the daemon.
//! The log is the queue, and it is bounded: who is too far behind misses events, which are counted.
//! Nothing of it survives a restart.
//!
//! # Retries
//! Whatever is not a yes is tried again, after a time that doubles, less up to a half of it by
//! chance; `Retry-After` makes it longer, up to the longest wait. After so many attempts an event is
//! given up. 410 says that nothing more is wanted: nothing more is sent until the next start.
//! Redirects are not followed: they are a no.
//!
//! # Cancellation
//! The daemon's end ends the tasks at once, whatever they wait for.

mod config;
mod metrics;
mod secret;

use std::time::Duration;

use humantime_serde::re::humantime::format_rfc3339_millis;
use prometheus_client::registry::Registry;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{StatusCode, Url};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

pub use config::Config;
pub use metrics::Metrics;

use metrics::Outcome;
use secret::Secret;

use crate::service::{EventReader, Numbered, Service};
use crate::util::clock::{Clock as _, SystemClock};

/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);

/// The tasks of all receivers.
#[derive(Debug)]
pub struct Webhooks {
    tasks: TaskTracker,
}

/// One receiver.
#[derive(Debug)]
struct Receiver {
    config: Config,
    url: Url,
    label: String,
    secret: Secret,
    http: reqwest::Client,
    metrics: Metrics,
    clock: SystemClock,
}

/// A message as it is posted, again and again.
#[derive(Debug)]
struct Message {
    id: String,
    body: Vec<u8>,
}

/// What became of an attempt.
#[derive(Debug)]
enum Answer {
    Yes,
    /// Not now; at the earliest after this time.
    No(String, Duration),
    /// Never again.
    Gone,
}

// === impl Webhooks ===

impl Webhooks {
    /// Starts to tell what happens from now on, until `stop` is cancelled.
    ///
    /// # Errors
    /// A secret cannot be read, or a URL cannot be one.
    pub fn start(
        configs: Vec<Config>,
        service: &std::sync::Arc<Service>,
        registry: &mut Registry,
        stop: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let tasks = TaskTracker::new();
        if configs.is_empty() {
            tasks.close();
            return Ok(Self { tasks });
        }
        let metrics = Metrics::register(registry);
        for config in configs {
            let receiver = Receiver::new(config, metrics.clone())?;
            let reader = service.follow();
            let stop = stop.clone();
            tasks.spawn(async move {
                stop.run_until_cancelled(receiver.run(reader)).await;
            });
        }
        tasks.close();
        Ok(Self { tasks })
    }

    /// Waits until all have ended.
    pub async fn ended(&self) {
        self.tasks.wait().await;
    }
}

// === impl Receiver ===

impl Receiver {
    fn new(config: Config, metrics: Metrics) -> anyhow::Result<Self> {
        let url = config.address().map_err(anyhow::Error::msg)?;
        let http = reqwest::Client::builder()
            // A proxy of the environment was not meant.
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .timeout(config.timeout)
            .pool_max_idle_per_host(1)
            .build()?;
        let label = config.label();
        metrics.receiver(&label);
        Ok(Self {
            secret: Secret::read(&config.secret_file)?,
            config,
            url,
            label,
            http,
            metrics,
            clock: SystemClock::new(),
        })
    }

    async fn run(self, mut reader: EventReader) {
        tracing::info!(url = self.label, "Events are posted");
        while let Some(batch) = reader.next().await {
            if let Some(missed) = batch.missed.filter(|missed| *missed > 0) {
                tracing::warn!(
                    url = self.label,
                    missed,
                    "A webhook was too slow: events are lost to it"
                );
                self.metrics.dropped_by(&self.label, missed);
            }
            for event in batch.events {
                let name = event.event.name();
                let wanted = &self.config.events;
                if !wanted.is_empty() && !wanted.iter().any(|it| it == name) {
                    continue;
                }
                let message = Message::new(reader.id(&event).to_string(), &event);
                if !self.deliver(&message).await {
                    return;
                }
            }
        }
    }

    /// Posts a message until it is there or given up. `false`: nothing more is wanted.
    async fn deliver(&self, message: &Message) -> bool {
        for attempt in 1..=self.config.attempts {
            let (why, at_least) = match self.post(message).await {
                Answer::Yes => {
                    self.metrics.attempt(&self.label, Outcome::Delivered);
                    return true;
                }
                Answer::Gone => {
                    self.metrics.attempt(&self.label, Outcome::GivenUp);
                    self.metrics.dropped_by(&self.label, 1);
                    tracing::warn!(
                        url = self.label,
                        "The receiver is gone (410): nothing more is posted there until the next start"
                    );
                    return false;
                }
                Answer::No(why, at_least) => (why, at_least),
            };
            if attempt == self.config.attempts {
                self.metrics.attempt(&self.label, Outcome::GivenUp);
                self.metrics.dropped_by(&self.label, 1);
                tracing::warn!(
                    url = self.label,
                    id = message.id,
                    why,
                    "An event is given up"
                );
                break;
            }
            self.metrics.attempt(&self.label, Outcome::Retried);
            tracing::debug!(
                url = self.label,
                id = message.id,
                why,
                attempt,
                "An event is posted again"
            );
            let wait = backoff(&self.config, attempt, chance());
            tokio::time::sleep(wait.max(at_least.min(self.config.retry_most))).await;
        }
        true
    }

    async fn post(&self, message: &Message) -> Answer {
        let seconds = self.clock.now().0 / 1000;
        let Message { id, body } = message;
        let sent = self
            .http
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", seconds)
            .header("webhook-signature", self.secret.sign(id, seconds, body))
            .body(body.clone())
            .send()
            .await;
        // What it says beside its status is not read.
        match sent {
            Ok(response) if response.status().is_success() => Answer::Yes,
            Ok(response) if response.status() == StatusCode::GONE => Answer::Gone,
            Ok(response) => {
                let after = response.headers().get(RETRY_AFTER);
                let after = after.and_then(|value| value.to_str().ok()?.parse().ok());
                let after = Duration::from_secs(after.unwrap_or(0));
                Answer::No(format!("status {}", response.status()), after)
            }
            // Without its URL, in which there may be a key.
            Err(error) => Answer::No(error.without_url().to_string(), Duration::ZERO),
        }
    }
}

// === impl Message ===

impl Message {
    fn new(id: String, event: &Numbered) -> Self {
        let at = std::time::UNIX_EPOCH + Duration::from_millis(event.at.0);
        let body = json!({
            "type": event.event.name(),
            "timestamp": format_rfc3339_millis(at).to_string(),
            "data": event.event.fields(),
        });
        Self {
            id,
            body: body.to_string().into_bytes(),
        }
    }
}

/// How long to wait after a failed attempt, counted from 1: twice as long each time, less up to a
/// half by `chance` (0 to 1), so that receivers are not met by all at once.
fn backoff(config: &Config, attempt: u32, chance: f64) -> Duration {
    let doubled = 2u32
        .checked_pow(attempt.saturating_sub(1))
        .unwrap_or(u32::MAX);
    let whole = config.retry_after.saturating_mul(doubled);
    whole.min(config.retry_most).mul_f64(1.0 - chance / 2.0)
}

/// From 0 up to 1.
fn chance() -> f64 {
    let (high, _) = Uuid::new_v4().as_u64_pair();
    // The upper bits are random, up to the version.
    (high >> 32) as f64 / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest() {
        let config: Config =
            toml::from_str("url = ''\nsecret_file = ''\nretry_most = '20s'").unwrap();
        let waits =
            |chance| [1, 2, 3, 6, 100].map(|attempt| backoff(&config, attempt, chance).as_millis());
        assert_eq!(waits(0.0), [1000, 2000, 4000, 20_000, 20_000]);
        assert_eq!(waits(1.0), [500, 1000, 2000, 10_000, 10_000]);
        assert!((0..100).all(|_| (0.0..=1.0).contains(&chance())));
    }
}
