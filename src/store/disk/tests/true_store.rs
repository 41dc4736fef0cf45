//! A small store whose tokens give the addresses of its objects, as a daemon would leave it.

use super::*;
use crate::{
    pool::PrefixHasher,
    store::{ConversationRef, KvRef, TurnRef},
    types::{Namespace, ObjectKind, TokenId, TokenRange},
};

/// What was stored, to compare with what is read.
pub(super) struct Copy {
    pub(super) id: ObjectId,
    tokens: Vec<TokenId>,
    bytes: Vec<Vec<u8>>,
}

/// Two turns, the second with a block of its own, and a branch that leaves in the middle of that.
pub(super) struct TrueStore {
    pub(super) bed: Bed,
    /// First turn, second turn, branch.
    pub(super) manifests: Vec<Manifest>,
    pub(super) copies: Vec<Copy>,
    pub(super) conversation: PathBuf,
}

/// An object of a snapshot: the tokens that it was made of, its range, and where the part used ends.
type Part<'a> = (&'a [TokenId], TokenRange, u32);

impl Copy {
    fn of(object: &Object) -> Self {
        Self {
            id: object.meta.id,
            tokens: object.tokens.to_vec(),
            bytes: flat(object),
        }
    }

    pub(super) fn is(&self, object: &Object) -> bool {
        *object.tokens == *self.tokens && flat(object) == self.bytes
    }
}

fn flat(object: &Object) -> Vec<Vec<u8>> {
    let segments = object.shards.iter().flatten();
    segments.map(|segment| segment.to_vec()).collect()
}

pub(super) fn tokens(seed: u64, len: u32) -> Vec<TokenId> {
    (0..len).map(|at| sample::token(seed, at)).collect()
}

fn address(tokens: &[TokenId], start: u32, kind: ObjectKind) -> ObjectId {
    let mut hasher = PrefixHasher::new(sample::MODEL, Namespace::default().id());
    hasher.update(tokens);
    hasher.object(start, kind)
}

/// The objects of a snapshot, the state first, and its manifest.
pub(super) fn snapshot(
    store: &Store,
    shards: u32,
    all: &[TokenId],
    parts: &[Part<'_>],
) -> (Manifest, Vec<Object>) {
    let geometry = sample::geometry();
    let boundary = all.len() as u32;
    let object = |id: ObjectId, kind, range: TokenRange, tokens: &[TokenId]| {
        let seed = u64::from(range.end);
        let mut meta = sample::meta(&geometry, kind, range, seed);
        meta.id = id;
        meta.shards = shards;
        let made = sample::object(&store.arena, meta, seed);
        Object {
            tokens: tokens.into(),
            ..made
        }
    };
    let id = address(all, boundary, ObjectKind::State);
    let state = object(id, ObjectKind::State, TokenRange::at(boundary), &[]);
    let mut objects = vec![state];
    let mut kv = Vec::new();
    let mut start = 0;
    for (tokens, range, end) in parts {
        let own = &tokens[range.start as usize..range.end as usize];
        let id = address(&tokens[..range.end as usize], range.start, ObjectKind::Kv);
        objects.push(object(id, ObjectKind::Kv, *range, own));
        kv.push(KvRef {
            object: id,
            generation: objects.last().unwrap().meta.generation,
            range: TokenRange { start, end: *end },
            object_range: *range,
        });
        start = *end;
    }
    let manifest = Manifest {
        kv,
        ..sample::manifest(&objects[0], &[])
    };
    (manifest, objects)
}

impl TrueStore {
    pub(super) fn new() -> Self {
        Self::on(Bed::new())
    }

    /// One snapshot of 40 tokens, in one shard: as few bytes as can be.
    pub(super) fn tiny() -> Self {
        let bed = Bed::new();
        let start = bed.start();
        let text = tokens(1, 40);
        let part = (&text[..], TokenRange { start: 0, end: 40 }, 40);
        let snapshots = vec![snapshot(&start.store, 1, &text, &[part])];
        Self::of(bed, &start, snapshots)
    }

    fn on(bed: Bed) -> Self {
        let start = bed.start();
        let range = |start, end| TokenRange { start, end };
        let text = tokens(1, 1500);
        let branch = [&text[..1200], &tokens(2, 600)].concat();
        let snapshots = vec![
            snapshot(
                &start.store,
                2,
                &text[..1024],
                &[(&text, range(0, 1024), 1024)],
            ),
            snapshot(
                &start.store,
                2,
                &text,
                &[
                    (&text, range(0, 1024), 1024),
                    (&text, range(1024, 1500), 1500),
                ],
            ),
            snapshot(
                &start.store,
                2,
                &branch,
                &[
                    (&text, range(0, 1024), 1024),
                    (&text, range(1024, 1500), 1200),
                    (&branch, range(1200, 1800), 1800),
                ],
            ),
        ];
        Self::of(bed, &start, snapshots)
    }

    fn of(bed: Bed, start: &Start, snapshots: Vec<(Manifest, Vec<Object>)>) -> Self {
        start.refs().scan(&mut |_| {}).unwrap();
        let (mut manifests, mut copies) = (Vec::new(), Vec::<Copy>::new());
        for (manifest, objects) in snapshots {
            for object in &objects {
                start.put(object);
                if copies.iter().all(|copy| copy.id != object.meta.id) {
                    copies.push(Copy::of(object));
                }
            }
            start.manifests().put(&manifest).unwrap();
            manifests.push(manifest);
        }
        let mut conversation = ConversationRef::new(None, "c".into(), Millis(3));
        let last = manifests.last().unwrap();
        conversation.turns.push(TurnRef {
            turn: 1,
            snapshot: Some(last.snapshot),
            boundary: last.boundary,
            total_tokens: last.boundary,
            rid: "r".into(),
            finished: Millis(4),
            finish: "stop".into(),
            prompt_tokens: None,
            tail: None,
            print: None,
            said: None,
            namespace: None,
        });
        start.refs().put(&conversation).unwrap();
        let rel = layout::conversation(&conversation.key());
        let conversation = bed.dir().join(rel.as_path());
        Self {
            bed,
            manifests,
            copies,
            conversation,
        }
    }

    pub(super) fn copy(&self, id: &ObjectId) -> &Copy {
        self.copies.iter().find(|copy| copy.id == *id).unwrap()
    }

    /// Reads all that a start finds; every byte is the one that was stored. Gives the snapshots whose
    /// objects all came.
    pub(super) fn read_all(&self) -> Vec<Manifest> {
        let start = self.bed.start();
        start.refs().scan(&mut |_| {}).unwrap();
        let whole = |manifest: &Manifest| {
            assert!(self.manifests.contains(manifest), "a changed manifest");
            let objects = manifest.kv.iter().map(|part| part.object);
            let mut objects = objects.chain([manifest.state.object]);
            objects.all(|id| match start.disk().get(&id, &start.store.arena) {
                Ok(object) => {
                    assert!(self.copy(&id).is(&object), "changed bytes of {id}");
                    true
                }
                Err(_) => false,
            })
        };
        let found = start.snapshots.clone();
        found.into_iter().filter(whole).collect()
    }
}
