//! The engine's command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use humantime_serde::re::humantime::parse_duration;

use super::attach::{self, Address, Limits};
use super::batch::Grid;
use super::device_memory::DeviceConfig;
use super::model::{ModelConfig, VOCAB};
use super::pools::{Dtype, Layout};
use super::scheduler::SchedulerConfig;
use crate::tokenizer::Tokenizer;
use crate::types::ModeChoice;

/// Largest staging ring in bytes.
const MAX_RING: u64 = 1 << 36;

/// The embedded engine: a small hybrid language model behind SGLang's HTTP surface.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address to serve HTTP on. Port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:30000")]
    pub listen: SocketAddr,
    /// Name under which the model is known.
    #[arg(long, default_value = "engram-tiny-hybrid")]
    pub model_name: String,
    /// Seed of the model's weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Change one weight: another model under the same name.
    #[arg(long)]
    pub perturb_weights: bool,
    /// Type of the recurrent state.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub temporal_dtype: Dtype,
    /// Slots of the state pool, the reserved one not counted.
    #[arg(long, default_value_t = 128)]
    pub slots: u32,
    /// Pages of the KV pool, the reserved one not counted.
    #[arg(long, default_value_t = 2048)]
    pub pages: u32,
    /// Tokens of a page.
    #[arg(long, default_value_t = 64)]
    pub page_size: usize,
    /// Layout of both pools.
    #[arg(long, value_enum, default_value_t = Layout::PerLayer)]
    pub layout: Layout,
    /// Most tokens of a prefill batch.
    #[arg(long, default_value_t = 512)]
    pub chunk: usize,
    /// States are taken at multiples of this many tokens (and of the page size).
    #[arg(long, default_value_t = 256)]
    pub state_grid: usize,
    /// Also take states at the exact end of prompts and answers. Needs `--page-size 1`.
    #[arg(long)]
    pub exact_end: bool,
    /// Reuse nothing: compute every prompt from its first token.
    #[arg(long)]
    pub no_cache: bool,
    /// Most requests that run at once. Each takes a slot; leave some for cached states.
    #[arg(long, default_value_t = 32)]
    pub max_running: usize,
    /// Seed of the order in which slots and pages are handed out. Default: another each start.
    #[arg(long)]
    pub scramble_seed: Option<u64>,
    /// Folder with the model's tokenizer (`tokenizer.json`) and chat template. Without one, prompts
    /// and answers are token ids.
    #[arg(long, value_name = "FOLDER")]
    pub tokenizer: Option<PathBuf>,
    /// Streamed answers of `/generate` say only what is new, not all so far.
    #[arg(long)]
    pub incremental_streaming_output: bool,
    /// Attach to the Engram daemon here: http://HOST:PORT, or the path of a Unix socket. It may
    /// come and go.
    #[arg(long, value_name = "SOCKET")]
    pub engram: Option<Address>,
    /// File with the token that the daemon wants to see over TCP.
    #[arg(long, value_name = "FILE", requires = "engram")]
    pub engram_token_file: Option<PathBuf>,
    /// Size of the staging ring.
    #[arg(long, value_name = "SIZE", default_value = "8 MiB")]
    pub ring: ByteSize,
    /// Who copies between the ring and memory that the daemon reaches: `ipc` (the daemon), `engine` (this
    /// process), or `auto` (the daemon chooses).
    #[arg(long, value_name = "MODE", default_value_t)]
    pub mode: ModeChoice,
    /// How long a request waits for one step of its restore before it is prefilled.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub restore_patience: Duration,
    /// How long one step of a save may take before it is dropped.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub save_patience: Duration,
    /// A daemon without a sign of life for so long is given up; it is attached to again later.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub daemon_silence: Duration,
}

/// All parts' configurations.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to serve.
    pub listen: SocketAddr,
    /// The model.
    pub model: ModelConfig,
    /// The pools.
    pub device: DeviceConfig,
    /// The scheduler.
    pub scheduler: SchedulerConfig,
    /// The daemon, if there is to be one.
    pub attach: Option<attach::Config>,
    /// The tokenizer, if there is one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Streamed answers say only what is new.
    pub incremental: bool,
}

/// Everything that is wrong with a command line.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{}", problems.join("; "))]
pub struct BadArgs {
    /// One sentence each.
    pub problems: Vec<String>,
}

// === impl Args ===

impl Args {
    /// Checks and sorts the arguments. `random` scrambles if no seed is given.
    ///
    /// # Errors
    ///
    /// All problems at once.
    pub fn config(&self, random: u64) -> Result<Config, BadArgs> {
        let Self {
            listen,
            model_name,
            seed,
            perturb_weights,
            temporal_dtype,
            slots,
            pages,
            page_size,
            layout,
            chunk,
            state_grid,
            exact_end,
            no_cache,
            max_running,
            scramble_seed,
            tokenizer,
            incremental_streaming_output,
            engram,
            engram_token_file,
            ring,
            mode,
            restore_patience,
            save_patience,
            daemon_silence,
        } = self;
        let mut problems = Vec::new();
        let mut positive = |name: &str, value: usize| {
            if value == 0 {
                problems.push(format!("--{name} must be at least 1"));
            }
        };
        positive("slots", *slots as usize);
        positive("pages", *pages as usize);
        positive("page-size", *page_size);
        positive("chunk", *chunk);
        positive("max-running", *max_running);
        if *exact_end && *page_size != 1 {
            problems.push("--exact-end needs --page-size 1".to_owned());
        }
        let grid = Grid::new(*state_grid, *page_size, *exact_end);
        if grid.is_none() {
            problems.push("--state-grid and --page-size have no common multiple".to_owned());
        }
        let model = ModelConfig {
            name: model_name.clone(),
            seed: *seed,
            perturb: *perturb_weights,
            temporal: *temporal_dtype,
        };
        // Nothing is reused without a cache, so nothing is remembered either.
        let attach = engram.as_ref().filter(|_| !no_cache).map(|address| {
            let token = engram_token_file.as_deref().and_then(|path| {
                let token = std::fs::read_to_string(path);
                let problem = |error| problems.push(format!("{}: {error}", path.display()));
                token.map_err(problem).ok()
            });
            attach::Config {
                address: address.clone(),
                token: token.map(|token| token.trim_end_matches(['\r', '\n']).to_owned()),
                ring_bytes: ring.as_u64(),
                modes: *mode,
                limits: attach::Limits {
                    patience: *restore_patience,
                    save_patience: *save_patience,
                    silence: *daemon_silence,
                },
            }
        });
        if let Some(attach) = &attach {
            let least = attach::Config::least_ring(model.state_bytes(), model.kv_bytes());
            if !(least..=MAX_RING).contains(&attach.ring_bytes) {
                problems.push(format!("--ring must be {least} to {MAX_RING} bytes"));
            }
            let Limits {
                patience,
                save_patience,
                silence,
            } = attach.limits;
            if [patience, save_patience, silence]
                .iter()
                .any(Duration::is_zero)
            {
                problems
                    .push("--restore-patience, --save-patience, --daemon-silence: not 0".into());
            }
        }
        let tokenizer = tokenizer.as_deref().and_then(|folder| {
            let loaded = Tokenizer::load(folder).map_err(|error| error.to_string());
            let fits = loaded.and_then(|it| match it.len() {
                len if len > VOCAB => Err(format!("{len} tokens, the model has {VOCAB}")),
                _ => Ok(Arc::new(it)),
            });
            let problem = |error| problems.push(format!("--tokenizer: {error}"));
            fits.map_err(problem).ok()
        });
        match grid {
            Some(grid) if problems.is_empty() => Ok(Config {
                listen: *listen,
                model,
                device: DeviceConfig {
                    slots: *slots,
                    pages: *pages,
                    page_size: *page_size,
                    layout: *layout,
                    scramble: scramble_seed.unwrap_or(random),
                },
                scheduler: SchedulerConfig {
                    chunk: *chunk,
                    grid,
                    no_cache: *no_cache,
                    max_running: *max_running,
                },
                attach,
                tokenizer,
                incremental: *incremental_streaming_output,
            }),
            _ => Err(BadArgs { problems }),
        }
    }
}
