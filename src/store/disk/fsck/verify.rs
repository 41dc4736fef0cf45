//! What the bytes of the objects say.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::{
    device::shm::SharedMap,
    pool::PrefixHasher,
    store::{counters::Reason, error::StoreError, fault::Op, object::ObjectMeta, sealed_json::Bad},
    types::{ObjectId, ObjectKind, TokenId, TokenRange},
};

use super::super::{
    object_file::{CHUNK, Plan},
    parallel,
    root::{Rel, Root},
    scan::plausible,
    to_tokens,
    transfer::{Audit, ReadError, tokens_of},
};
use super::survey::{Claim, Content, Survey, Thing, Use, Verdict};
use super::{Options, Progress, Watch};

/// Snapshots whose tokens one thread hashes in a row.
const RUN: usize = 64;

/// Room for a chunk, and who is told of the bytes of each.
type Chunks<'a> = (&'a SharedMap, &'a (dyn Fn(u64) + Sync));

/// The way to a snapshot: its KV so far.
struct Path {
    steps: Vec<Step>,
    tokens: Vec<TokenId>,
}

struct Step {
    part: Use,
    hasher: PrefixHasher,
}

/// Verifies every object that a manifest names.
pub(super) fn objects(
    root: &Root,
    survey: &mut Survey,
    options: &Options,
    watch: &Watch<'_>,
) -> Result<(), StoreError> {
    let named: Vec<usize> = survey
        .objects
        .iter()
        .enumerate()
        .filter(|(_, thing)| !thing.claims.is_empty())
        .map(|(index, _)| index)
        .collect();
    let threads = options.threads.clamp(1, named.len().max(1));
    let scratch: Vec<SharedMap> = (0..threads)
        .map(|_| SharedMap::anonymous(CHUNK))
        .collect::<Result<_, _>>()
        .map_err(|error| StoreError::io(Op::Open, root.path().to_owned(), error))?;
    let scratch = Mutex::new(scratch);
    let (done, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let verdicts = Mutex::new(Vec::with_capacity(named.len()));
    let progress = || {
        watch(Progress {
            phase: "objects",
            done: done.load(Relaxed),
            total: named.len() as u64,
            bytes: bytes.load(Relaxed),
        });
    };
    parallel::for_each(threads, named.len(), |index| {
        let Some((place, thing)) = named
            .get(index)
            .and_then(|place| Some((*place, survey.objects.get(*place)?)))
        else {
            return Ok(());
        };
        let map = scratch.lock().pop();
        let told = |len| {
            bytes.fetch_add(len, Relaxed);
            progress();
        };
        let chunks = map.as_ref().filter(|_| !options.fast);
        let verdict = examine(root, survey, thing, chunks.map(|map| (map, &told as _)));
        scratch.lock().extend(map);
        verdicts.lock().push((place, verdict?));
        done.fetch_add(1, Relaxed);
        progress();
        Ok::<(), StoreError>(())
    })?;
    for (place, verdict) in verdicts.into_inner() {
        if let Some(thing) = survey.objects.get_mut(place) {
            thing.verdict = verdict;
        }
    }
    survey.verified_bytes = bytes.into_inner();
    Ok(())
}

/// Finds the claim that an object fulfils; of none, what is wrong by the first.
fn examine(
    root: &Root,
    survey: &Survey,
    thing: &Thing,
    chunks: Option<Chunks<'_>>,
) -> Result<Verdict, StoreError> {
    let mut first = None;
    for (number, claim) in thing.claims.iter().enumerate() {
        match examine_as(root, survey, thing, claim, chunks)? {
            Verdict::Open => return Ok(Verdict::Sound(number)),
            other => first.get_or_insert(other),
        };
    }
    Ok(first.unwrap_or(Verdict::Open))
}

/// `Open`: nothing is wrong with it.
fn examine_as(
    root: &Root,
    survey: &Survey,
    thing: &Thing,
    claim: &Claim,
    chunks: Option<Chunks<'_>>,
) -> Result<Verdict, StoreError> {
    let Some((meta, geometry)) = survey.meta(thing, claim) else {
        return Ok(Verdict::Open);
    };
    let plan = Plan::of(&meta, geometry);
    let mut tokens: Option<Vec<u8>> = None;
    for shard in 0..claim.shards {
        let file = thing.files.iter().find(|(number, _)| *number == shard);
        let Some((_, len)) = file else {
            return Ok(Verdict::Missing(shard));
        };
        if !plausible(&meta, *len) {
            let bad = Bad::new(Reason::Length, format!("{len} bytes"));
            return Ok(Verdict::Bad(shard, bad));
        }
        let Some(rel) = survey.file(thing, shard) else {
            return Ok(Verdict::Missing(shard));
        };
        let read = read_whole(root, &rel, (&meta, &plan, shard), chunks);
        let read = read.and_then(|bytes| match &tokens {
            Some(first) if *first != bytes => Err(ReadError::Bad(Bad::new(
                Reason::Mismatch,
                "its tokens are not those of the first shard",
            ))),
            _ => Ok(bytes),
        });
        match read {
            Ok(bytes) => tokens.get_or_insert(bytes),
            Err(ReadError::Missing) => return Ok(Verdict::Missing(shard)),
            Err(ReadError::Bad(bad)) => return Ok(Verdict::Bad(shard, bad)),
            Err(ReadError::Other(error)) => return Err(error),
        };
    }
    Ok(Verdict::Open)
}

/// Header, tokens and all chunks of one shard. Gives the token tensor.
fn read_whole(
    root: &Root,
    rel: &Rel,
    (meta, plan, shard): (&ObjectMeta, &Plan, u32),
    chunks: Option<Chunks<'_>>,
) -> Result<Vec<u8>, ReadError> {
    let (mut audit, tokens) = Audit::open(root, rel, (meta, plan, shard), chunks.is_some())?;
    if let Some((scratch, told)) = chunks {
        while let Some(len) = audit.step(root, rel, plan, scratch)? {
            told(len);
        }
    }
    Ok(tokens)
}

/// Hashes the tokens of every snapshot whose objects are sound; one whose tokens do not give the
/// addresses of its objects is bad.
pub(super) fn tokens(
    root: &Root,
    survey: &mut Survey,
    threads: usize,
    watch: &Watch<'_>,
) -> Result<(), StoreError> {
    let mut order: Vec<usize> = (0..survey.snapshots.len())
        .filter(|index| sound(survey, *index).is_some())
        .collect();
    // Those that share a beginning stand side by side.
    order.sort_by(|a, b| {
        let key = |index: &usize| {
            let content = sound(survey, *index)?;
            Some((content.namespace, &content.kv))
        };
        key(a).cmp(&key(b))
    });
    let runs: Vec<&[usize]> = order.chunks(RUN).collect();
    let (done, hashed) = (AtomicU64::new(0), AtomicU64::new(0));
    let foreign = Mutex::new(Vec::new());
    parallel::for_each(threads, runs.len(), |run| {
        let mut path = Path {
            steps: Vec::new(),
            tokens: Vec::new(),
        };
        let mut namespace = None;
        for index in runs.get(run).copied().unwrap_or_default() {
            let Some(content) = sound(survey, *index) else {
                continue;
            };
            if namespace.replace(content.namespace) != Some(content.namespace) {
                path.back_to(0);
            }
            match path.follow(root, survey, content, &hashed) {
                Ok(None) => {}
                Ok(Some(bad)) => foreign.lock().push((*index, bad)),
                Err(error) => return Err(error),
            }
            watch(Progress {
                phase: "tokens",
                done: done.fetch_add(1, Relaxed) + 1,
                total: order.len() as u64,
                bytes: 0,
            });
        }
        Ok::<(), StoreError>(())
    })?;
    for (index, bad) in foreign.into_inner() {
        if let Some(snapshot) = survey.snapshots.get_mut(index) {
            snapshot.content = Err(bad);
        }
    }
    survey.tokens = hashed.into_inner();
    Ok(())
}

/// The content of a good manifest whose objects are all what it says.
pub(super) fn sound(survey: &Survey, index: usize) -> Option<&Content> {
    let content = survey.snapshots.get(index)?.content.as_ref().ok()?;
    let whole = |part: &Use| {
        let thing = survey.objects.get(part.object);
        thing.is_some_and(|thing| matches!(thing.verdict, Verdict::Sound(n) if n == part.claim))
    };
    (whole(&content.state) && content.kv.iter().all(whole)).then_some(content)
}

// === impl Path ===

impl Path {
    fn back_to(&mut self, steps: usize) {
        self.steps.truncate(steps);
        let end = self.steps.last().map_or(0, |step| step.part.end);
        self.tokens.truncate(end as usize);
    }

    /// Goes to a snapshot from where it is. Says what does not fit.
    fn follow(
        &mut self,
        root: &Root,
        survey: &Survey,
        content: &Content,
        hashed: &AtomicU64,
    ) -> Result<Option<Bad>, StoreError> {
        let Some((namespace, _)) = survey.namespaces.get(content.namespace) else {
            return Ok(None);
        };
        let common = self.steps.iter().zip(&content.kv);
        let common = common
            .take_while(|(step, part)| step.part == **part)
            .count();
        self.back_to(common);
        for part in content.kv.iter().skip(common) {
            let Some((thing, meta, own)) = tokens_of_part(root, survey, part)? else {
                return Ok(Some(Bad::new(Reason::Incomplete, "an object is gone")));
            };
            let start = self.tokens.len() as u32;
            let empty = PrefixHasher::new(meta.fingerprint, *namespace);
            if self.address(&empty, meta.range, &own) != Some(thing.id) {
                return Ok(Some(foreign(&thing.id)));
            }
            let skip = start.saturating_sub(meta.range.start) as usize;
            let used = own.get(skip..(part.end.saturating_sub(meta.range.start)) as usize);
            let Some(used) = used else {
                return Ok(Some(foreign(&thing.id)));
            };
            let mut hasher = self.steps.last().map_or(empty, |step| step.hasher.clone());
            hasher.update(used);
            hashed.fetch_add(used.len() as u64, Relaxed);
            self.tokens.extend_from_slice(used);
            self.steps.push(Step {
                part: *part,
                hasher,
            });
        }
        let state = survey.objects.get(content.state.object);
        let fits = self.steps.last().zip(state).is_some_and(|(step, state)| {
            step.hasher.object(content.boundary, ObjectKind::State) == state.id
        });
        let id = state.map_or(ObjectId([0; 32]), |state| state.id);
        Ok((!fits).then(|| foreign(&id)))
    }

    /// The address of KV with these tokens, after the tokens here before its range.
    fn address(
        &self,
        empty: &PrefixHasher,
        range: TokenRange,
        own: &[TokenId],
    ) -> Option<ObjectId> {
        let before = |step: &&Step| step.part.end <= range.start;
        let step = self.steps.iter().rev().find(before);
        let (mut hasher, end) = match step {
            Some(step) => (step.hasher.clone(), step.part.end),
            None => (empty.clone(), 0),
        };
        hasher.update(self.tokens.get(end as usize..range.start as usize)?);
        hasher.update(own);
        Some(hasher.object(range.start, ObjectKind::Kv))
    }
}

type Part<'a> = (&'a Thing, ObjectMeta, std::sync::Arc<[TokenId]>);

/// An object and its tokens; `None` if it has gone bad since it was verified.
fn tokens_of_part<'a>(
    root: &Root,
    survey: &'a Survey,
    part: &Use,
) -> Result<Option<Part<'a>>, StoreError> {
    let thing = survey.objects.get(part.object);
    let Some((thing, claim)) = thing.and_then(|thing| Some((thing, thing.claims.get(part.claim)?)))
    else {
        return Ok(None);
    };
    let Some(((meta, geometry), rel)) = survey.meta(thing, claim).zip(survey.file(thing, 0)) else {
        return Ok(None);
    };
    let plan = Plan::of(&meta, geometry);
    match tokens_of(root, &rel, &meta, &plan, 0) {
        Ok(bytes) => {
            let own = to_tokens(&bytes, &meta);
            Ok(Some((thing, meta, own)))
        }
        Err(ReadError::Other(error)) => Err(error),
        Err(ReadError::Missing | ReadError::Bad(_)) => Ok(None),
    }
}

fn foreign(id: &ObjectId) -> Bad {
    Bad::new(
        Reason::Mismatch,
        format!("object {id} belongs to other tokens"),
    )
}
