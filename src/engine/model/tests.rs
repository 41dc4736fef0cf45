//! What the rest of the engine builds on: bit-exactness, dependence on state and KV, varied answers.

use std::collections::HashSet;

use super::*;
use crate::engine::pools::{FreeList, Layout};

/// A model with pools, and sequences in them.
struct Rig {
    model: Model,
    state: StatePool,
    kv: KvPool,
    slots: FreeList<SlotId>,
    pages: FreeList<PageId>,
}

/// One sequence in a rig.
struct Seq {
    tokens: Vec<u32>,
    done: usize,
    slot: SlotId,
    pages: Vec<PageId>,
}

fn config() -> ModelConfig {
    ModelConfig {
        name: "test".to_owned(),
        seed: 1,
        perturb: false,
        temporal: Dtype::F32,
    }
}

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    (0..len).map(|_| rng.below(VOCAB as u64) as u32).collect()
}

impl Rig {
    fn new(config: ModelConfig, layout: Layout, page_size: usize, seed: u64) -> Self {
        let pages = (24_576 / page_size) as u32;
        let state = StatePool::new(config.state_spec(), layout, 16).unwrap();
        let kv = KvPool::new(config.kv_spec(), layout, pages, page_size).unwrap();
        Self {
            model: Model::new(config),
            state,
            kv,
            slots: FreeList::new(16, seed),
            pages: FreeList::new(pages, seed),
        }
    }

    fn plain() -> Self {
        Self::new(config(), Layout::PerLayer, 64, 1)
    }

    fn seq(&mut self, tokens: &[u32]) -> Seq {
        let count = (tokens.len() + 64).div_ceil(self.kv.page_size());
        let pages = (0..count).map(|_| self.pages.alloc().unwrap()).collect();
        let slot = self.slots.alloc().unwrap();
        self.state.clear(slot);
        Seq {
            tokens: tokens.to_vec(),
            done: 0,
            slot,
            pages,
        }
    }

    /// Computes the next `counts[i]` tokens of each sequence together.
    fn step(&mut self, seqs: &mut [&mut Seq], counts: &[usize]) -> Vec<u32> {
        let chunks: Vec<SeqChunk<'_>> = seqs
            .iter()
            .zip(counts)
            .map(|(seq, count)| SeqChunk {
                tokens: &seq.tokens[seq.done..seq.done + count],
                start: seq.done,
                slot: seq.slot,
                pages: &seq.pages,
                predict: true,
                logprobs: None,
            })
            .collect();
        let next = self.model.forward(&mut self.state, &mut self.kv, &chunks);
        for (seq, count) in seqs.iter_mut().zip(counts) {
            seq.done += count;
        }
        next.into_iter().map(|next| next.unwrap().token).collect()
    }

    /// Prefills the rest in chunks of `chunk` and decodes `count` tokens.
    fn answer(&mut self, seq: &mut Seq, chunk: usize, count: usize) -> Vec<u32> {
        let mut next = 0;
        while seq.done < seq.tokens.len() {
            let len = chunk.min(seq.tokens.len() - seq.done);
            next = self.step(&mut [seq], &[len])[0];
        }
        let mut out = vec![next];
        while out.len() < count {
            seq.tokens.push(next);
            next = self.step(&mut [seq], &[1])[0];
            out.push(next);
        }
        out
    }

    fn packed(&self, seq: &Seq) -> (Vec<u8>, Vec<u8>) {
        let mut state = vec![0; self.state.packed_len()];
        self.state.gather(seq.slot, &mut state).unwrap();
        let mut kv = vec![0; seq.done * self.kv.token_bytes()];
        self.kv.gather(&seq.pages, 0, seq.done, &mut kv).unwrap();
        (state, kv)
    }
}

#[test]
fn answers_are_the_same_however_the_prompt_is_cut() {
    let tokens = prompt(3, 700);
    let mut rig = Rig::plain();
    let mut cold = rig.seq(&tokens);
    let want = rig.answer(&mut cold, 700, 20);
    let want_bytes = rig.packed(&cold);
    for chunk in [1, 2, 3, 7, 64, 255, 512] {
        let mut rig = Rig::plain();
        let mut seq = rig.seq(&tokens);
        assert_eq!(rig.answer(&mut seq, chunk, 20), want, "chunk {chunk}");
        assert!(rig.packed(&seq) == want_bytes, "chunk {chunk}");
    }
}

#[test]
fn answers_and_packed_bytes_depend_on_neither_page_size_nor_layout_nor_ids() {
    let tokens = prompt(4, 333);
    let mut want = None;
    for layout in [Layout::PerLayer, Layout::PageMajor] {
        for (page_size, seed) in [(1, 2), (3, 3), (64, 4), (64, 5), (256, 6)] {
            let mut rig = Rig::new(config(), layout, page_size, seed);
            let mut seq = rig.seq(&tokens);
            let answer = rig.answer(&mut seq, 100, 12);
            let got = (answer, rig.packed(&seq));
            assert!(
                want.get_or_insert_with(|| got.clone()) == &got,
                "{layout:?} {page_size}"
            );
        }
    }
}

#[test]
fn answers_do_not_depend_on_what_is_computed_together() {
    let prompts = [prompt(5, 130), prompt(6, 77), prompt(7, 200)];
    let mut rig = Rig::plain();
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|tokens| {
            let mut seq = rig.seq(tokens);
            rig.answer(&mut seq, 64, 10)
        })
        .collect();
    let mut rig = Rig::plain();
    let mut seqs: Vec<Seq> = prompts.iter().map(|tokens| rig.seq(tokens)).collect();
    let [a, b, c] = &mut seqs[..] else {
        unreachable!()
    };
    rig.step(&mut [a, b], &[30, 70]);
    rig.step(&mut [b, c, a], &[6, 150, 99]);
    let mut next = rig.step(&mut [a, b, c], &[1, 1, 50]);
    let mut answers: Vec<Vec<u32>> = next.iter().map(|token| vec![*token]).collect();
    for _ in 1..10 {
        for (seq, token) in [&mut *a, &mut *b, &mut *c].into_iter().zip(&next) {
            seq.tokens.push(*token);
        }
        next = rig.step(&mut [a, b, c], &[1, 1, 1]);
        for (answer, token) in answers.iter_mut().zip(&next) {
            answer.push(*token);
        }
    }
    assert_eq!(answers, alone);
}

/// Prefills `boundary` tokens, moves state and KV to another slot and other pages of another rig
/// (after `change`), and answers there.
fn restored(
    tokens: &[u32],
    boundary: usize,
    temporal: Dtype,
    change: impl Fn(&mut Vec<u8>, &mut Vec<u8>),
) -> Vec<u32> {
    let config = ModelConfig {
        temporal,
        ..config()
    };
    let mut rig = Rig::new(config.clone(), Layout::PerLayer, 64, 1);
    let mut saved = rig.seq(&tokens[..boundary]);
    rig.answer(&mut saved, 512, 1);
    let (mut state, mut kv) = rig.packed(&saved);
    change(&mut state, &mut kv);
    let mut rig = Rig::new(config, Layout::PageMajor, 16, 99);
    let mut seq = rig.seq(tokens);
    rig.state.scatter(seq.slot, &state).unwrap();
    rig.kv.scatter(&seq.pages, 0, boundary, &kv).unwrap();
    seq.done = boundary;
    rig.answer(&mut seq, 512, 48)
}

#[test]
fn a_moved_prefix_continues_as_a_cold_run() {
    for temporal in [Dtype::F32, Dtype::Bf16] {
        let tokens = prompt(8, 1100);
        let mut rig = Rig::new(
            ModelConfig {
                temporal,
                ..config()
            },
            Layout::PerLayer,
            64,
            1,
        );
        let mut cold = rig.seq(&tokens);
        let want = rig.answer(&mut cold, 512, 48);
        assert_eq!(restored(&tokens, 1024, temporal, |_, _| {}), want);
    }
}

#[test]
fn zeroing_state_or_kv_changes_the_answer() {
    for (seed, boundary, len) in [(9, 1024, 1044), (10, 256, 500), (11, 2048, 2300)] {
        let tokens = prompt(seed, len);
        let want = restored(&tokens, boundary, Dtype::F32, |_, _| {});
        let no_state = restored(&tokens, boundary, Dtype::F32, |state, _| state.fill(0));
        assert_ne!(no_state, want, "state, {boundary} of {len}");
        let no_kv = restored(&tokens, boundary, Dtype::F32, |_, kv| kv.fill(0));
        assert_ne!(no_kv, want, "KV, {boundary} of {len}");
        // The recurrent part alone, without the convolution's window.
        let conv = 4 * CONV_DIM * CONV_WINDOW * 2;
        let no_temporal = restored(&tokens, boundary, Dtype::F32, |s, _| s[conv..].fill(0));
        assert_ne!(no_temporal, want, "temporal, {boundary} of {len}");
        // One attention layer's values, of one block of tokens.
        let row = KV_HEADS * ATTN_DIM * 2;
        let values = |kv: &mut Vec<u8>| kv[boundary * row..(boundary + 200) * row].fill(0);
        let no_block = restored(&tokens, boundary, Dtype::F32, |_, kv| values(kv));
        assert_ne!(no_block, want, "200 values, {boundary} of {len}");
    }
}

#[test]
fn answers_vary() {
    let lengths = (0..12).map(|i| 40 + 60 * i);
    let mut prompts: Vec<Vec<u32>> = (100..).zip(lengths).map(|(i, n)| prompt(i, n)).collect();
    prompts.push(vec![5]);
    prompts.push(vec![7; 300]);
    prompts.push((0..600).map(|i| i % 4).collect());
    prompts.push((0..256).collect());
    let mut answers = HashSet::new();
    for tokens in &prompts {
        let mut rig = Rig::plain();
        let mut seq = rig.seq(tokens);
        let answer = rig.answer(&mut seq, 512, 48);
        let distinct = answer.iter().collect::<HashSet<_>>().len();
        assert!(distinct >= 20, "{distinct} distinct tokens: {answer:?}");
        answers.insert(answer);
    }
    assert_eq!(
        answers.len(),
        prompts.len(),
        "different prompts, different answers"
    );
}

#[test]
fn seed_dtype_and_one_weight_make_another_model() {
    let base = Model::new(config());
    assert_eq!(base.digest(), Model::new(config()).digest());
    assert!(
        (200_000..450_000).contains(&base.parameters()),
        "{}",
        base.parameters()
    );
    let seeded = Model::new(ModelConfig {
        seed: 2,
        ..config()
    });
    assert_ne!(base.digest(), seeded.digest());
    let perturbed = ModelConfig {
        perturb: true,
        ..config()
    };
    assert_ne!(base.digest(), Model::new(perturbed.clone()).digest());
    let tokens = prompt(12, 100);
    let answers: Vec<Vec<u32>> = [config(), perturbed]
        .into_iter()
        .map(|config| {
            let mut rig = Rig::new(config, Layout::PerLayer, 64, 1);
            let mut seq = rig.seq(&tokens);
            rig.answer(&mut seq, 512, 48)
        })
        .collect();
    assert_ne!(answers[0], answers[1]);
    let narrow = ModelConfig {
        temporal: Dtype::Bf16,
        ..config()
    };
    assert_ne!(narrow.state_spec(), config().state_spec());
}
