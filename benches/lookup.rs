//! The index at 1,000,000 snapshots: lookup, insert, use and victims, and memory.
//!
//! 20,000 conversations of 50 turns over 100 system prompts of 3,072 tokens. 256 of them have turns
//! of 2,560 tokens, so that they end at 131,072; the others have turns of 64. The tokens of every
//! turn are unique: 96 million in all.

mod numbers;

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use engram::{
    index::{Index, KvRef, NewSnapshot, ObjectEntry, Retain, TierSet, TreeKey, VecLog},
    types::{
        Fingerprint, Millis, NamespaceId, ObjectId, ObjectKind, SnapshotId, TierKind, TokenId,
        TokenRange,
    },
};
use numbers::{Numbers, VOCABULARY};
use uuid::Uuid;

const CONVERSATIONS: u32 = 20_000;
const DEEP: u32 = 256;
const TURNS: u32 = 50;
const SYSTEMS: u32 = 100;
const SYSTEM_TOKENS: u32 = 3072;
const DEEP_TURN: u32 = 2560;
const TURN: u32 = 64;
const STATE_BYTES: u64 = 57 << 20;

const KEY: TreeKey = TreeKey {
    fingerprint: Fingerprint([1; 32]),
    namespace: NamespaceId([2; 32]),
};

fn object(ids: &mut Numbers) -> ObjectId {
    let mut id = [0; 32];
    for word in id.as_chunks_mut::<8>().0 {
        *word = ids.next().to_le_bytes();
    }
    ObjectId(id)
}

fn turn_tokens(conversation: u32) -> u32 {
    if conversation < DEEP { DEEP_TURN } else { TURN }
}

/// All tokens of a conversation, up to the end of `turns`.
fn prompt(conversation: u32, turns: u32) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    Numbers(u64::from(conversation % SYSTEMS)).tokens(SYSTEM_TOKENS, &mut tokens);
    let mut own = Numbers(1000 + u64::from(conversation));
    own.tokens(turns * turn_tokens(conversation), &mut tokens);
    tokens
}

/// A snapshot of `tokens` whose KV is what the index has, and one new object for the rest.
fn snapshot(index: &Index<VecLog>, tokens: &[TokenId], ids: &mut Numbers, now: u64) -> NewSnapshot {
    let boundary = tokens.len() as u32;
    let tiers = TierSet::of(&[TierKind::Ram, TierKind::Disk]);
    let mut kv = index.kv_refs(&KEY, tokens, boundary);
    let start = kv.last().map_or(0, |part| part.range.end);
    let mut new_objects = Vec::new();
    if start < boundary {
        let range = TokenRange {
            start,
            end: boundary,
        };
        let id = object(ids);
        new_objects.push(ObjectEntry {
            id,
            kind: ObjectKind::Kv,
            range,
            bytes: u64::from(range.len()) * 24_576,
            tiers,
        });
        kv.push(KvRef {
            object: id,
            range,
            object_range: range,
        });
    }
    NewSnapshot {
        id: SnapshotId(Uuid::from_u64_pair(now << 16 | 0x7000, ids.next())),
        state: ObjectEntry {
            id: object(ids),
            kind: ObjectKind::State,
            range: TokenRange::at(boundary),
            bytes: STATE_BYTES,
            tiers,
        },
        kv,
        new_objects,
        created: Millis(now),
        durable: true,
        retain: Retain::Ordinary,
    }
}

/// Resident memory of this process, in bytes; 0 where the system does not say.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_u64) * 4096
}

/// The index, turn by turn as conversations go on at the same time.
fn build() -> (Index<VecLog>, Numbers) {
    let before = resident();
    let started = Instant::now();
    let mut inserting = Duration::ZERO;
    let tiers = TierSet::of(&[TierKind::Ram, TierKind::Disk]);
    let mut index = Index::new(VecLog::new(), tiers);
    let mut ids = Numbers(7);
    let mut now = 0;
    // A hundred conversations at a time: their turns interleave in the log.
    for group in 0..CONVERSATIONS / 100 {
        let conversations = group * 100..(group + 1) * 100;
        let prompts: Vec<Vec<TokenId>> = conversations.clone().map(|c| prompt(c, TURNS)).collect();
        for turn in 1..=TURNS {
            for (conversation, prompt) in conversations.clone().zip(&prompts) {
                now += 1;
                let boundary = SYSTEM_TOKENS + turn * turn_tokens(conversation);
                let tokens = prompt.split_at(boundary as usize).0;
                let new = snapshot(&index, tokens, &mut ids, now);
                let clock = Instant::now();
                let inserted = index.insert(&KEY, tokens, new).expect("a good snapshot");
                inserting += clock.elapsed();
                assert!(inserted.fresh);
            }
        }
    }
    let stats = index.stats();
    let log = index.log().len() * 4;
    let memory = resident().saturating_sub(before).saturating_sub(log);
    println!(
        "{} snapshots, {} nodes, {} objects; built in {:.1?} (in insert: {:.1?}, {:.2?} each)",
        stats.snapshots,
        stats.nodes,
        stats.objects,
        started.elapsed(),
        inserting,
        inserting / stats.snapshots.max(1) as u32,
    );
    println!(
        "token log {} MB ({} tokens); index {} MB of resident memory, {} bytes a snapshot",
        log >> 20,
        log / 4,
        memory >> 20,
        memory / stats.snapshots.max(1),
    );
    (index, ids)
}

fn lookup(c: &mut Criterion) {
    let (mut index, mut ids) = build();
    let deep: Vec<Vec<TokenId>> = (0..DEEP).map(|c| prompt(c, TURNS)).collect();
    let copies = deep.clone();
    let tokens = deep.first().map_or(0, Vec::len);
    let mut group = c.benchmark_group("index");
    group
        .sample_size(30)
        .measurement_time(Duration::from_secs(3));
    let mut turn = 0_usize;
    let mut next = move || {
        turn += 1;
        turn * 37 % DEEP as usize
    };

    // The bytes of prompt and log, compared by the C library's memcmp: no lookup can be faster.
    group.bench_function(BenchmarkId::new("memcmp", tokens), |b| {
        b.iter(|| {
            let n = next();
            black_box(deep.get(n) == copies.get(n))
        });
    });
    group.bench_function(BenchmarkId::new("lookup_hit", tokens), |b| {
        b.iter(|| {
            let hit = index.lookup(&KEY, deep.get(next()).map_or(&[], Vec::as_slice), u32::MAX);
            assert_eq!(hit.map(|hit| hit.boundary), Some(tokens as u32));
        });
    });
    // The last turn differs in its last token: the hit is the turn before.
    let mut edited = deep.clone();
    for prompt in &mut edited {
        if let Some(last) = prompt.last_mut() {
            *last = VOCABULARY;
        }
    }
    group.bench_function(BenchmarkId::new("lookup_edited_end", tokens), |b| {
        b.iter(|| {
            let prompt = edited.get(next()).map_or(&[][..], Vec::as_slice);
            let hit = index.lookup(&KEY, prompt, u32::MAX);
            assert_eq!(hit.map(|hit| hit.boundary), Some(tokens as u32 - DEEP_TURN));
        });
    });
    // Nothing is known beyond the system prompt.
    let mut unknown = Vec::new();
    Numbers(3).tokens(SYSTEM_TOKENS, &mut unknown);
    Numbers(99).tokens(tokens as u32 - SYSTEM_TOKENS, &mut unknown);
    group.bench_function(BenchmarkId::new("lookup_miss", tokens), |b| {
        b.iter(|| assert!(index.lookup(&KEY, &unknown, u32::MAX).is_none()));
    });
    let short: Vec<Vec<TokenId>> = (DEEP..DEEP + 4096).map(|c| prompt(c, TURNS)).collect();
    let short_tokens = short.first().map_or(0, Vec::len);
    let mut at = 0_usize;
    group.bench_function(BenchmarkId::new("lookup_hit", short_tokens), |b| {
        b.iter(|| {
            at += 1;
            let prompt = short
                .get(at * 37 % short.len())
                .map_or(&[][..], Vec::as_slice);
            assert!(index.lookup(&KEY, prompt, u32::MAX).is_some());
        });
    });

    group.bench_function(BenchmarkId::new("coverage", tokens), |b| {
        b.iter(|| {
            let prompt = deep.get(next()).map_or(&[][..], Vec::as_slice);
            assert_eq!(index.coverage(&KEY, prompt).kv, tokens as u32);
        });
    });
    // One more turn of a conversation of 131,072 tokens; taken out again outside the clock.
    let longer: Vec<Vec<TokenId>> = (0..DEEP).map(|c| prompt(c, TURNS + 1)).collect();
    let mut now = 10_000_000;
    group.bench_function(BenchmarkId::new("insert_turn", tokens), |b| {
        b.iter_custom(|rounds| {
            let mut spent = Duration::ZERO;
            for _ in 0..rounds {
                now += 1;
                let tokens = longer.get(next()).map_or(&[][..], Vec::as_slice);
                let new = snapshot(&index, tokens, &mut ids, now);
                let clock = Instant::now();
                let inserted = index.insert(&KEY, tokens, new).expect("a good snapshot");
                spent += clock.elapsed();
                index.remove_snapshot(&inserted.snapshot);
            }
            spent
        });
    });
    let known: Vec<SnapshotId> = deep
        .iter()
        .filter_map(|prompt| index.has_snapshot(&KEY, prompt, prompt.len() as u32))
        .collect();
    group.bench_function("touch_50_turns", |b| {
        b.iter(|| {
            now += 1;
            known.get(next()).map(|id| index.touch(id, Millis(now)))
        });
    });
    group.bench_function("lease_and_release_50_turns", |b| {
        b.iter(|| {
            let lease = known.get(next()).and_then(|id| index.lease(id));
            index.release(lease.expect("a known snapshot"));
        });
    });
    for (name, tier) in [("ram", TierKind::Ram), ("disk", TierKind::Disk)] {
        group.bench_function(BenchmarkId::new("victims_100_states", name), |b| {
            b.iter(|| index.victims(tier, 100 * STATE_BYTES, Millis(now)).len());
        });
    }
    group.finish();
}

criterion_group!(benches, lookup);
criterion_main!(benches);
