//! A daemon in one thread, with a clock that moves when told, and everything that happens to it drawn
//! from a seed: the same seed is the same run.
//!
//! # What
//! The real service, index and store, on a real folder, without their threads. What these would do
//! is a step of the run like any other (`daemon`): a round of the disk thread, a read from disk, a
//! chunk of the scrub. Between such steps conversations go on and branch, states are offered and
//! committed, prompts are looked up and restored, snapshots are saved, pinned and deleted by name,
//! RAM and disk come under pressure, the disk is full or fails or tears a write, files are damaged,
//! the clock jumps, and the daemon ends, in good order or not, and starts again (`run`).
//!
//! # What is seen to
//! After each step (`checks`), against lists of what was promised (`model`): what is known is what
//! was committed and not said to be gone; what was said to be durable is, and comes back bit by bit
//! after any end; nothing that has a name is evicted; a lookup finds the deepest prefix; index,
//! RAM tier and disk agree on every object; no tier is above its budget; no lease, room or promise
//! outlives what it was for. Bytes are functions of the tokens, so a foreign one is seen.
//!
//! # What is not here
//! Steps follow each other whole: what two threads do at the same moment is left to the tests with
//! threads. There is no lock-free code in index or service that a search over interleavings would be
//! needed for: counts, leases, both orders of last use and moves between tiers change under the one
//! lock of `core`, so a history of steps is all that there can be of them. What an end does between
//! two operations on the file system is here, as the fault layer tears or fails any of them.
//!
//! # That it would notice
//! `a_planted_fault_is_found` runs seeds against daemons that lose a manifest, a name or a lease, or
//! change a byte.
//!
//! # To repeat a run
//! A failure prints its seed and the steps before it. `ENGRAM_SIM_SEED=<seed>` runs that seed alone
//! and prints all steps; `ENGRAM_SIM_SEEDS=<n>` runs `n` seeds, of other numbers each time.

mod checks;
mod daemon;
mod dice;
mod harm;
mod model;
mod run;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use self::dice::Dice;
use self::run::{Plant, Run};

/// Seeds of an ordinary test run; each takes half a second.
const SEEDS: u64 = 40;

/// Where a slow machine stops before it has done them all.
const ENOUGH: Duration = Duration::from_secs(30);

/// Steps of one run.
const STEPS: u32 = 200;

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number")),
    )
}

/// Runs a seed; says what happened, a line a step.
fn run(seed: u64) -> Vec<String> {
    run_with(seed, None)
}

fn run_with(seed: u64, plant: Option<Plant>) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    let runtime = runtime.unwrap();
    // Timers are made, and never fire: the run itself says when it was long enough.
    let _entered = runtime.enter();
    let mut run = Run::new(seed, plant);
    let done = catch_unwind(AssertUnwindSafe(|| {
        for _ in 0..STEPS {
            run.step();
        }
        run.end();
    }));
    let told = run.told();
    if let Err(panic) = done {
        if plant.is_some() {
            resume_unwind(panic);
        }
        eprintln!(
            "The run with seed {seed} failed in its step {}:",
            told.len()
        );
        for line in told.iter().skip(told.len().saturating_sub(30)) {
            eprintln!("  {line}");
        }
        eprintln!(
            "To repeat it: ENGRAM_SIM_SEED={seed} cargo test --release --all-features simulation"
        );
        resume_unwind(panic);
    }
    told
}

#[test]
fn any_history_keeps_what_was_promised() {
    if let Some(seed) = number("ENGRAM_SIM_SEED") {
        for (step, line) in run(seed).iter().enumerate() {
            println!("{step:4} {line}");
        }
        return;
    }
    let start = Instant::now();
    if let Some(seeds) = number("ENGRAM_SIM_SEEDS") {
        let mut dice = Dice::new(uuid::Uuid::new_v4().as_u64_pair().0);
        for _ in 0..seeds {
            run(dice.roll() >> 16);
        }
        return;
    }
    for seed in 0..SEEDS {
        run(seed);
        if start.elapsed() > ENOUGH {
            println!("{} of {SEEDS} seeds in {ENOUGH:?}", seed + 1);
            return;
        }
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in [3, 4] {
        let (first, second) = (run(seed), run(seed));
        let differs = first.iter().zip(&second).position(|(a, b)| a != b);
        if let Some(at) = differs {
            panic!(
                "seed {seed}, step {at}: {:?} and then {:?}",
                first[at], second[at]
            );
        }
        assert_eq!(first.len(), second.len());
    }
}

/// Faults that the code does not have: each is noticed, by a run that goes well without it.
#[test]
fn a_planted_fault_is_found() {
    for plant in Plant::ALL {
        let found = (0..20).any(|seed| {
            let done = catch_unwind(AssertUnwindSafe(|| run_with(seed, Some(plant))));
            done.is_err()
        });
        assert!(found, "{plant:?} was not noticed");
    }
}
