//! The engine's command line.

use std::net::SocketAddr;

use super::batch::Grid;
use super::device_memory::DeviceConfig;
use super::model::ModelConfig;
use super::pools::{Dtype, Layout};
use super::scheduler::SchedulerConfig;

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
        match grid {
            Some(grid) if problems.is_empty() => Ok(Config {
                listen: *listen,
                model: ModelConfig {
                    name: model_name.clone(),
                    seed: *seed,
                    perturb: *perturb_weights,
                    temporal: *temporal_dtype,
                },
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
            }),
            _ => Err(BadArgs { problems }),
        }
    }
}
