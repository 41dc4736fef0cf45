//! The scheduler against itself without a cache.

mod seam;

use std::collections::HashMap;
use std::time::Instant;

use crossbeam_channel::Sender;

use super::*;
use crate::engine::cache::Namespace;
use crate::engine::device_memory::DeviceConfig;
use crate::engine::memory::NoMemory;
use crate::engine::model::ModelConfig;
use crate::engine::pools::{Dtype, Layout};
use crate::engine::request::{RequestId, RequestInfo, Sampling};
use crate::engine::rng::SplitMix64;

/// A small engine without HTTP.
struct Rig {
    scheduler: Scheduler,
    commands: Sender<Command>,
    next_id: u64,
}

#[derive(Clone, Copy)]
struct Shape {
    slots: u32,
    tokens: usize,
    page_size: usize,
    layout: Layout,
    chunk: usize,
    exact_end: bool,
    no_cache: bool,
}

const SHAPE: Shape = Shape {
    slots: 64,
    tokens: 16_384,
    page_size: 64,
    layout: Layout::PerLayer,
    chunk: 512,
    exact_end: false,
    no_cache: false,
};

type Reply = oneshot::Receiver<Result<Answer, Refusal>>;

impl Rig {
    fn new(shape: Shape) -> Self {
        Self::with_memory(shape, Box::new(NoMemory))
    }

    fn with_memory(shape: Shape, memory: Box<dyn Memory>) -> Self {
        let model = ModelConfig {
            name: "test".to_owned(),
            seed: 1,
            perturb: false,
            temporal: Dtype::F32,
        };
        let device = DeviceConfig {
            slots: shape.slots,
            pages: (shape.tokens / shape.page_size) as u32,
            page_size: shape.page_size,
            layout: shape.layout,
            scramble: shape.page_size as u64 * 31 + u64::from(shape.slots),
        };
        let device = DeviceMemory::new(&model, &device).unwrap();
        let config = SchedulerConfig {
            chunk: shape.chunk,
            grid: Grid::new(256, shape.page_size, shape.exact_end).unwrap(),
            no_cache: shape.no_cache,
            // As a real server leaves slots for cached states.
            max_running: (shape.slots as usize / 2).clamp(1, 8),
        };
        let (commands, receiver) = crossbeam_channel::unbounded();
        let scheduler = Scheduler::new(config, Model::new(model), device, memory, receiver);
        Self {
            scheduler,
            commands,
            next_id: 0,
        }
    }

    fn submit(&mut self, prompt: &[u32], answer: usize) -> Reply {
        self.next_id += 1;
        let rid = format!("r{}", self.next_id);
        self.submit_as(&rid, None, prompt, answer, &[])
    }

    fn submit_as(
        &mut self,
        rid: &str,
        extra_key: Option<&str>,
        prompt: &[u32],
        answer: usize,
        stops: &[u32],
    ) -> Reply {
        let (reply, receiver) = oneshot::channel();
        let namespace = Namespace {
            extra_key: extra_key.map(str::to_owned),
            cache_salt: None,
        };
        let info = RequestInfo {
            id: RequestId(self.next_id),
            rid: rid.to_owned(),
            session_id: None,
            namespace,
            prompt: prompt.to_vec(),
        };
        let sampling = Sampling {
            max_new_tokens: answer,
            stop_token_ids: stops.to_vec(),
            logprobs: None,
        };
        let request = Request {
            info,
            sampling,
            arrived: Instant::now(),
            listener: None,
            reply,
        };
        self.commands
            .send(Command::Submit(Box::new(request)))
            .unwrap();
        self.take();
        receiver
    }

    fn take(&mut self) {
        while let Ok(command) = self.scheduler.commands.try_recv() {
            self.scheduler.handle(command);
        }
    }

    fn tick(&mut self) -> bool {
        let worked = self.scheduler.tick();
        self.scheduler.sanity_check().unwrap();
        worked
    }

    fn wait(&mut self, mut reply: Reply) -> Result<Answer, Refusal> {
        for _ in 0..10_000 {
            if let Ok(answer) = reply.try_recv() {
                return answer;
            }
            self.tick();
        }
        panic!("no answer");
    }

    fn ask(&mut self, prompt: &[u32], answer: usize) -> Answer {
        let reply = self.submit(prompt, answer);
        self.wait(reply).unwrap()
    }

    fn idle(&self) {
        let (slots, pages) = (
            self.scheduler.device.slot_account(),
            self.scheduler.device.page_account(),
        );
        assert_eq!((slots.held, pages.held), (0, 0));
        self.scheduler.sanity_check().unwrap();
    }
}

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    (0..len).map(|_| rng.below(VOCAB as u64) as u32).collect()
}

fn cold(prompt: &[u32], answer: usize) -> Vec<u32> {
    Rig::new(Shape {
        no_cache: true,
        ..SHAPE
    })
    .ask(prompt, answer)
    .output_ids
}

#[test]
fn a_conversation_is_answered_as_without_a_cache() {
    for shape in [
        SHAPE,
        Shape {
            page_size: 1,
            layout: Layout::PageMajor,
            chunk: 300,
            ..SHAPE
        },
        Shape {
            page_size: 32,
            chunk: 2048,
            ..SHAPE
        },
    ] {
        let mut rig = Rig::new(shape);
        let mut plain = Rig::new(Shape {
            no_cache: true,
            ..SHAPE
        });
        let mut history = prompt(1, 400);
        let mut boundary = 0;
        for turn in 0..6 {
            let answer = rig.ask(&history, 48);
            assert_eq!(
                answer.output_ids,
                plain.ask(&history, 48).output_ids,
                "turn {turn}"
            );
            assert_eq!(answer.cached_tokens, boundary, "turn {turn}");
            assert_eq!(answer.finish_reason, FinishReason::Length);
            rig.idle();
            // The last boundary of what was computed: the grid's, in prompt or answer.
            boundary = (history.len() + 47) / 256 * 256;
            history.extend(answer.output_ids);
            history.extend(prompt(turn + 2, 150));
        }
        assert_eq!(plain.scheduler.device.page_account().cached, 0);
    }
}

#[test]
fn exact_ends_are_reused_to_the_token() {
    let mut rig = Rig::new(Shape {
        page_size: 1,
        exact_end: true,
        ..SHAPE
    });
    let mut history = prompt(1, 333);
    let mut boundary = 0;
    for turn in 0..4 {
        let answer = rig.ask(&history, 21);
        assert_eq!(answer.cached_tokens, boundary, "turn {turn}");
        assert_eq!(answer.output_ids, cold(&history, 21), "turn {turn}");
        boundary = history.len() + 20;
        history.extend(answer.output_ids);
        history.extend(prompt(turn + 2, 77));
        rig.idle();
    }
    // The same prompt again: all but its last token, from the state at the prompt's end before.
    let shorter = &history[..boundary];
    assert_eq!(rig.ask(shorter, 5).output_ids, cold(shorter, 5));
}

#[test]
fn many_at_once_on_little_memory_answer_as_alone() {
    for (slots, tokens, page_size) in [(3, 2048, 64), (9, 1500, 1), (1, 1152, 64)] {
        let mut rig = Rig::new(Shape {
            slots,
            tokens,
            page_size,
            chunk: 200,
            ..SHAPE
        });
        let mut rng = SplitMix64::new(slots.into());
        let stems: Vec<Vec<u32>> = (0..3).map(|seed| prompt(seed, 900)).collect();
        let mut open = Vec::new();
        let mut answers = HashMap::new();
        for number in 0..24_usize {
            let stem = &stems[number % 3];
            let mut tokens = stem[..1 + rng.below(890) as usize].to_vec();
            tokens.extend(prompt(100 + number as u64, rng.below(60) as usize));
            open.push((tokens.clone(), rig.submit(&tokens, 10)));
            for _ in 0..rng.below(6) {
                rig.tick();
            }
        }
        for (tokens, reply) in open {
            let answer = rig.wait(reply).unwrap();
            answers.insert(tokens, answer);
        }
        rig.idle();
        assert!(rig.scheduler.device.evicted().pages > 0);
        let reused: usize = answers.values().map(|answer| answer.cached_tokens).sum();
        assert!(
            reused > 0 || slots == 1,
            "one slot leaves none for a cached state"
        );
        for (tokens, answer) in answers {
            assert_eq!(answer.output_ids, cold(&tokens, 10));
        }
    }
}

#[test]
fn a_boundary_reached_in_decoding_is_reused() {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(1, 200);
    let first = rig.ask(&tokens, 400);
    let mut next = [tokens, first.output_ids].concat();
    next.extend(prompt(2, 10));
    let second = rig.ask(&next, 8);
    // 599 tokens were computed; of the boundaries 256 and 512 the last is kept.
    assert_eq!(second.cached_tokens, 512);
    assert_eq!(second.output_ids, cold(&next, 8));
    assert_eq!(
        rig.ask(&next[..400], 8).cached_tokens,
        0,
        "the one before is not"
    );
}

#[test]
fn a_shared_prefix_gets_a_state_where_prompts_part() {
    let mut rig = Rig::new(Shape {
        chunk: 2048,
        ..SHAPE
    });
    let shared = prompt(1, 700);
    let of = |seed| [shared.clone(), prompt(seed, 400)].concat();
    assert_eq!(rig.ask(&of(2), 4).cached_tokens, 0);
    assert_eq!(rig.ask(&of(3), 4).cached_tokens, 0);
    assert_eq!(rig.ask(&of(4), 4).cached_tokens, 512);
    assert_eq!(rig.ask(&of(4), 4).output_ids, cold(&of(4), 4));
}

#[test]
fn namespaces_reuse_nothing_of_each_other() {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(1, 600);
    for (rid, key, cached) in [("a", None, 0), ("b", Some("x"), 0), ("c", Some("x"), 512)] {
        let reply = rig.submit_as(rid, key, &tokens, 4, &[]);
        assert_eq!(rig.wait(reply).unwrap().cached_tokens, cached);
    }
}

#[test]
fn a_client_that_goes_away_frees_everything() {
    let mut rig = Rig::new(SHAPE);
    let gone = rig.submit(&prompt(1, 3000), 100);
    let stays = rig.submit(&prompt(2, 100), 4);
    rig.tick();
    assert!(rig.scheduler.device.page_account().held > 0);
    drop(gone);
    assert_eq!(
        rig.wait(stays).unwrap().output_ids,
        cold(&prompt(2, 100), 4)
    );
    rig.idle();
    assert_eq!(rig.scheduler.counts.aborted, 1);
    // What it had computed by then is cached.
    assert_eq!(rig.ask(&prompt(1, 3000), 4).cached_tokens, 512);
}

#[test]
fn abort_by_rid_ends_a_request_with_what_it_has() {
    let mut rig = Rig::new(SHAPE);
    let reply = rig.submit_as("mine", None, &prompt(1, 100), 1000, &[]);
    for _ in 0..5 {
        rig.tick();
    }
    for (rid, found) in [("other", false), ("mine", true)] {
        let (send, mut receive) = oneshot::channel();
        rig.commands
            .send(Command::Abort(rid.to_owned(), send))
            .unwrap();
        rig.take();
        assert_eq!(receive.try_recv(), Ok(found));
    }
    let answer = rig.wait(reply).unwrap();
    assert_eq!(
        (answer.finish_reason, answer.output_ids.len()),
        (FinishReason::Abort, 6)
    );
    rig.idle();
}

#[test]
fn stop_tokens_and_empty_answers() {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(1, 300);
    let all = rig.ask(&tokens, 8).output_ids;
    let reply = rig.submit_as("s", None, &tokens, 8, &[all[3]]);
    let stopped = rig.wait(reply).unwrap();
    let end = all.iter().position(|token| *token == all[3]).unwrap();
    assert_eq!(stopped.output_ids, all[..=end]);
    assert_eq!(stopped.finish_reason, FinishReason::Stop(all[3]));
    let empty = rig.ask(&prompt(2, 300), 0);
    assert_eq!(
        (empty.output_ids.len(), empty.finish_reason),
        (0, FinishReason::Length)
    );
    rig.idle();
}

#[test]
fn refusals_are_typed_and_change_nothing() {
    let mut rig = Rig::new(SHAPE);
    let held = rig.submit_as("same", None, &prompt(1, 10), 50, &[]);
    let cases: [(&str, Vec<u32>, usize, Refusal); 6] = [
        ("a", vec![], 4, Refusal::Empty),
        (
            "b",
            vec![1, 2048],
            4,
            Refusal::Vocabulary {
                index: 1,
                token: 2048,
            },
        ),
        (
            "c",
            vec![1],
            usize::MAX,
            Refusal::TooLong {
                prompt: 1,
                answer: usize::MAX,
            },
        ),
        (
            "d",
            vec![1; 16_000],
            500,
            Refusal::TooLarge {
                needed: 258,
                total: 256,
            },
        ),
        ("", vec![1], 4, Refusal::Name { field: "rid" }),
        ("same", vec![1], 4, Refusal::DuplicateRid("same".to_owned())),
    ];
    for (rid, tokens, answer, refusal) in cases {
        let reply = rig.submit_as(rid, None, &tokens, answer, &[]);
        assert_eq!(rig.wait(reply), Err(refusal));
    }
    assert_eq!(rig.wait(held).unwrap().output_ids.len(), 50);
    rig.idle();
}

#[test]
fn flush_empties_an_idle_engine_only() {
    let mut rig = Rig::new(SHAPE);
    let tokens = prompt(1, 600);
    let reply = rig.submit(&tokens, 20);
    rig.tick();
    assert!(rig.scheduler.flush().is_err());
    rig.wait(reply).unwrap();
    assert!(rig.scheduler.device.page_account().cached > 0);
    rig.scheduler.flush().unwrap();
    let pages = rig.scheduler.device.page_account();
    assert_eq!(pages.free, pages.total);
    assert_eq!(rig.ask(&tokens, 4).cached_tokens, 0);
}
