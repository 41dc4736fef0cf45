//! An engine on one thread, with a fake daemon and a clock that stands still unless told.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use serde_json::Value;
use tokio::sync::oneshot;

use super::fake::{Fake, Store};
use crate::engine::attach::dial::{Dialer, Event, Load};
use crate::engine::attach::{Address, Attach, Config, Control, Limits};
use crate::engine::batch::Grid;
use crate::engine::cache::Namespace;
use crate::engine::device_memory::{DeviceConfig, DeviceMemory};
use crate::engine::memory::{Memory, NoMemory};
use crate::engine::model::{Model, ModelConfig, VOCAB};
use crate::engine::pools::{Dtype, Layout};
use crate::engine::request::{Answer, Refusal, Request, RequestId, RequestInfo, Sampling};
use crate::engine::rng::SplitMix64;
use crate::engine::scheduler::{Command, Scheduler, SchedulerConfig};
use crate::types::{Millis, ModeChoice, TransferMode};
use crate::util::clock::ManualClock;

/// Deadlines of the rig.
pub const LIMITS: Limits = Limits {
    patience: Duration::from_secs(5),
    save_patience: Duration::from_secs(30),
    silence: Duration::from_secs(500),
};

thread_local! {
    /// Who copies between the rings of rigs on this thread and what the daemon reaches.
    pub static MODE: Cell<TransferMode> = const { Cell::new(TransferMode::Ipc) };
}

/// The engine's shape.
#[derive(Clone, Copy)]
pub struct Shape {
    pub slots: u32,
    pub pages: u32,
    pub page_size: usize,
    pub exact_end: bool,
    pub ring: u64,
    pub max_running: usize,
}

pub const SHAPE: Shape = Shape {
    slots: 16,
    pages: 128,
    page_size: 64,
    exact_end: false,
    ring: 2 << 20,
    max_running: 4,
};

/// An engine.
pub struct Rig {
    scheduler: Scheduler,
    commands: Sender<Command>,
    events: Sender<Event>,
    pub clock: Arc<ManualClock>,
    pub control: Arc<Control>,
    pub shape: Shape,
    pub fake: Option<Fake>,
    sessions: u8,
    next_id: u64,
}

pub type Reply = oneshot::Receiver<Result<Answer, Refusal>>;

fn scheduler(
    shape: Shape,
    no_cache: bool,
    memory: Box<dyn Memory>,
) -> (Scheduler, Sender<Command>) {
    let model = ModelConfig {
        name: "test".to_owned(),
        seed: 1,
        perturb: false,
        temporal: Dtype::F32,
    };
    let device = DeviceConfig {
        slots: shape.slots,
        pages: shape.pages,
        page_size: shape.page_size,
        layout: Layout::PerLayer,
        scramble: 77,
    };
    let device = DeviceMemory::new(&model, &device).unwrap();
    let config = SchedulerConfig {
        chunk: 512,
        grid: Grid::new(256, shape.page_size, shape.exact_end).unwrap(),
        no_cache,
        max_running: shape.max_running,
    };
    let (commands, receiver) = crossbeam_channel::unbounded();
    (
        Scheduler::new(config, Model::new(model), device, memory, receiver),
        commands,
    )
}

/// The answer of an engine without cache and daemon.
pub fn cold(prompt: &[u32], answer: usize) -> Vec<u32> {
    let shape = Shape {
        page_size: 64,
        pages: 512,
        exact_end: false,
        ..SHAPE
    };
    let (mut scheduler, commands) = scheduler(shape, true, Box::new(NoMemory));
    let (request, mut reply) = request(1, prompt, answer, None);
    commands.send(Command::Submit(request)).unwrap();
    loop {
        scheduler.take_waiting();
        scheduler.tick();
        if let Ok(answer) = reply.try_recv() {
            return answer.unwrap().output_ids;
        }
    }
}

pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    (0..len).map(|_| rng.below(VOCAB as u64) as u32).collect()
}

fn request(id: u64, prompt: &[u32], answer: usize, key: Option<&str>) -> (Box<Request>, Reply) {
    let (reply, receiver) = oneshot::channel();
    let info = RequestInfo {
        id: RequestId(id),
        rid: format!("r{id}"),
        session_id: Some("talk".to_owned()),
        namespace: Namespace {
            extra_key: key.map(str::to_owned),
            cache_salt: None,
        },
        prompt: prompt.to_vec(),
    };
    let sampling = Sampling {
        max_new_tokens: answer,
        stop_token_ids: Vec::new(),
        logprobs: None,
    };
    let request = Request {
        info,
        sampling,
        arrived: Instant::now(),
        listener: None,
        reply,
    };
    (Box::new(request), receiver)
}

impl Rig {
    /// An engine without a session.
    pub fn alone(shape: Shape) -> Self {
        let clock = Arc::new(ManualClock::new(Millis(0)));
        let control = Arc::<Control>::default();
        let (events, heard) = crossbeam_channel::unbounded();
        let config = Config {
            address: Address::Unix("/nowhere".into()),
            token: None,
            ring_bytes: shape.ring,
            modes: ModeChoice::Only(MODE.get()),
            limits: LIMITS,
        };
        let (dialer, load) = (Dialer::of(heard), Arc::<Load>::default());
        let attach = Attach::new(config, clock.clone(), dialer, load, Arc::clone(&control));
        let (scheduler, commands) = scheduler(shape, false, Box::new(attach));
        Self {
            scheduler,
            commands,
            events,
            clock,
            control,
            shape,
            fake: None,
            sessions: 0,
            next_id: 0,
        }
    }

    /// An engine with a session.
    pub fn new(shape: Shape) -> Self {
        let mut rig = Self::alone(shape);
        rig.attach(Store::default());
        rig
    }

    /// Begins a session with a daemon that has this.
    pub fn attach(&mut self, store: Store) {
        self.sessions += 1;
        let (fake, linked) = Fake::new(self.sessions, self.shape.ring, MODE.get(), store);
        self.fake = Some(fake);
        self.events.send(Event::Linked(Box::new(linked))).unwrap();
        self.tick();
        assert_eq!(self.memory()["attached"], true);
    }

    /// The daemon's process is gone. Returns it, with what it has.
    pub fn lose(&mut self) -> Fake {
        let event = Event::Lost([self.sessions; 16], "killed".to_owned());
        self.events.send(event).unwrap();
        self.fake.take().unwrap()
    }

    pub fn fake(&mut self) -> &mut Fake {
        self.fake.as_mut().unwrap()
    }

    pub fn submit(&mut self, prompt: &[u32], answer: usize) -> Reply {
        self.submit_as(prompt, answer, None)
    }

    pub fn submit_as(&mut self, prompt: &[u32], answer: usize, key: Option<&str>) -> Reply {
        self.next_id += 1;
        let (request, reply) = request(self.next_id, prompt, answer, key);
        self.commands.send(Command::Submit(request)).unwrap();
        reply
    }

    /// One tick of the engine, then one of the daemon.
    pub fn tick(&mut self) {
        assert!(self.scheduler.take_waiting());
        self.scheduler.tick();
        self.scheduler.sanity_check().unwrap();
        if let Some(fake) = &mut self.fake {
            fake.serve();
        }
    }

    pub fn wait(&mut self, mut reply: Reply) -> Answer {
        for _ in 0..10_000 {
            if let Ok(answer) = reply.try_recv() {
                return answer.unwrap();
            }
            self.tick();
        }
        panic!("no answer: {}", self.report());
    }

    pub fn ask(&mut self, prompt: &[u32], answer: usize) -> Answer {
        let reply = self.submit(prompt, answer);
        self.wait(reply)
    }

    /// Asks and lets all saves come to their end.
    pub fn ask_and_save(&mut self, prompt: &[u32], answer: usize) -> Answer {
        let answer = self.ask(prompt, answer);
        self.until("all is saved", |rig| rig.memory()["saves"] == none("saves"));
        answer
    }

    /// Ticks until it is so.
    pub fn until(&mut self, what: &str, mut so: impl FnMut(&mut Self) -> bool) {
        for _ in 0..2000 {
            if so(self) {
                return;
            }
            self.tick();
        }
        panic!("waited in vain until {what}: {}", self.report());
    }

    pub fn pass(&mut self, time: Duration) {
        self.clock.advance(time);
        self.tick();
    }

    pub fn flush(&mut self) {
        let (reply, mut done) = oneshot::channel();
        self.commands.send(Command::Flush(reply)).unwrap();
        self.tick();
        done.try_recv().unwrap().unwrap();
    }

    pub fn report(&mut self) -> Value {
        let (reply, mut report) = oneshot::channel();
        self.commands.send(Command::Report(reply)).unwrap();
        assert!(self.scheduler.take_waiting());
        report.try_recv().unwrap()
    }

    pub fn memory(&mut self) -> Value {
        self.report()["memory"].take()
    }

    /// A counter of the memory; with a `/`, one by reason.
    pub fn count(&mut self, name: &str) -> u64 {
        let memory = self.memory();
        memory
            .pointer(&format!("/counts/{name}"))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    }

    /// How many machines are in a state: `saves/Offered`.
    pub fn in_state(&mut self, name: &str) -> u64 {
        self.memory()
            .pointer(&format!("/{name}"))
            .unwrap()
            .as_u64()
            .unwrap()
    }

    /// Nothing is held, nothing leaks: checks all accounts, empties the device.
    pub fn settle(&mut self) {
        self.until("all machines are done", |rig| {
            let memory = rig.memory();
            memory["saves"] == none("saves") && memory["restores"] == none("restores")
        });
        self.flush();
        let report = self.report();
        for pool in ["slots", "pages"] {
            assert_eq!(report[pool]["free"], report[pool]["total"], "{report}");
        }
        assert_eq!(report["sanity_check"], "ok");
        if report["memory"]["attached"] == true {
            assert_eq!(report["memory"]["ring_free"], self.shape.ring, "{report}");
        }
    }
}

fn none(machine: &str) -> Value {
    use crate::engine::attach::{RestoreState, SaveState};
    let names: Vec<&str> = match machine {
        "saves" => SaveState::ALL.iter().map(SaveState::as_str).collect(),
        _ => RestoreState::ALL.iter().map(RestoreState::as_str).collect(),
    };
    names
        .into_iter()
        .map(|name| (name.to_owned(), Value::from(0)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}
