//! Snapshots placed at once are found as those that were inserted one by one.

use proptest::prelude::*;

use super::*;
use crate::index::{Edge, Part, Placed, Placing, Spot};

fn disk() -> TierSet {
    tiers(&[TierKind::Disk])
}

/// What a snapshot needs to be placed.
struct Row {
    id: SnapshotId,
    key: TreeKey,
    state: ObjectEntry,
    after: Option<usize>,
    edges: Vec<Edge>,
    kv: Vec<Part>,
    created: Millis,
}

fn entry(index: &Index<VecLog>, id: ObjectId) -> ObjectEntry {
    let info = index.object(&id).unwrap();
    ObjectEntry {
        id,
        kind: info.kind,
        range: info.range,
        bytes: info.bytes,
        tiers: info.tiers,
    }
}

/// All that is in a bed is on disk.
fn committed(bed: &mut Bed) {
    let ids: Vec<SnapshotId> = bed.index.iter().collect();
    for id in ids {
        bed.index.set_durable(&id, true);
    }
}

/// Rows of all snapshots, parents first; those for which `whole` is true do not name their parent.
fn rows(index: &Index<VecLog>, mut whole: impl FnMut() -> bool) -> Vec<Row> {
    let mut ids: Vec<SnapshotId> = index.iter().collect();
    ids.sort_by_key(|id| (index.snapshot(id).unwrap().boundary, *id));
    let mut rows: Vec<Row> = Vec::new();
    for id in &ids {
        let info = index.snapshot(id).unwrap();
        let hit = index.hit(id).unwrap();
        let parent = info.parent.filter(|_| !whole());
        let from = parent.map_or(0, |parent| index.snapshot(&parent).unwrap().boundary);
        let (at, edges) = index.edges(id, from).unwrap();
        assert_eq!(at, from);
        let kv: Vec<Part> = hit
            .kv
            .iter()
            .map(|part| Part {
                object: entry(index, part.object),
                range: part.range,
            })
            .collect();
        // Its own, if it goes on where the parent's end.
        let own = kv.iter().position(|part| part.range.start == from);
        let kv = kv.split_off_at(own.unwrap_or(0));
        rows.push(Row {
            id: *id,
            key: info.key,
            state: entry(index, hit.state),
            after: parent.and_then(|parent| rows.iter().position(|row| row.id == parent)),
            edges,
            kv,
            created: info.created,
        });
    }
    rows
}

trait SplitOffAt {
    fn split_off_at(self, at: usize) -> Self;
}

impl SplitOffAt for Vec<Part> {
    fn split_off_at(mut self, at: usize) -> Self {
        self.split_off(at)
    }
}

fn load(log: VecLog, rows: &[Row]) -> Index<VecLog> {
    let mut loader = Index::loader(log, disk(), rows.len());
    let mut spots: Vec<Spot> = Vec::new();
    for row in rows {
        let placed = Placed {
            id: row.id,
            state: row.state,
            after: row.after.map(|at| spots[at]),
            edges: &row.edges,
            kv: &row.kv,
            created: row.created,
        };
        let placing = loader.place(&row.key, &placed).unwrap();
        assert!(matches!(placing, Placing::Fresh(_)));
        assert_eq!(loader.find(row.id).unwrap().0, placing.spot());
        spots.push(placing.spot());
    }
    loader.finish()
}

fn assert_same(one: &mut Index<VecLog>, other: &mut Index<VecLog>) {
    other.check().unwrap();
    assert_eq!(one.usage(TierKind::Disk), other.usage(TierKind::Disk));
    let mut ids: Vec<SnapshotId> = one.iter().collect();
    ids.sort();
    let mut others: Vec<SnapshotId> = other.iter().collect();
    others.sort();
    assert_eq!(ids, others);
    for id in &ids {
        let (a, b) = (one.hit(id).unwrap(), other.hit(id).unwrap());
        assert_eq!((a.boundary, a.state), (b.boundary, b.state));
        let end = |hit: &Hit| hit.kv.last().map(|part| part.range.end);
        assert_eq!(end(&a), end(&b));
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(one.read_tokens(id, &mut a) && other.read_tokens(id, &mut b));
        assert_eq!(a, b);
        let (a, b) = (one.snapshot(id).unwrap(), other.snapshot(id).unwrap());
        assert_eq!(a, b);
        assert_eq!(
            one.object(&one.hit(id).unwrap().state),
            other.object(&other.hit(id).unwrap().state)
        );
    }
    let order = |index: &mut Index<VecLog>| -> Vec<(ObjectId, Action)> {
        let victims = index.victims(TierKind::Disk, u64::MAX, Millis(u64::MAX));
        victims
            .iter()
            .map(|victim| (victim.object, victim.action))
            .collect()
    };
    assert_eq!(order(one), order(other));
}

#[test]
fn branches_and_chains_come_back() {
    let mut bed = Bed::new(disk());
    let trunk = run(1, 3000);
    bed.save(&key(1), &trunk[..900]);
    bed.save(&key(1), &trunk[..2900]);
    bed.save(&key(1), &join(&trunk[..1500], &run(90_000, 500)));
    bed.save(&key(1), &join(&trunk[..900], &run(70_000, 10)));
    bed.save(&key(2), &trunk[..40]);
    bed.save(&key(1), &run(5, 3));
    committed(&mut bed);
    let rows = rows(&bed.index, || false);
    let mut loaded = load(bed.index.log().clone(), &rows);
    assert_same(&mut bed.index, &mut loaded);
    let kv = |index: &Index<VecLog>| index.lookup(&key(1), &trunk, u32::MAX).unwrap();
    assert_eq!(kv(&bed.index), kv(&loaded));
}

#[test]
fn what_contradicts_the_tree_changes_nothing() {
    let mut bed = Bed::new(disk());
    bed.save(&key(1), &run(1, 100));
    bed.save(&key(1), &run(1, 200));
    committed(&mut bed);
    let rows = rows(&bed.index, || false);
    let mut loader = Index::loader(bed.index.log().clone(), disk(), 2);
    let [first, second] = &rows[..] else { panic!() };
    let placed = |row: &'static str| {
        (
            row,
            Placed {
                id: first.id,
                state: first.state,
                after: None,
                edges: &first.edges,
                kv: &first.kv,
                created: first.created,
            },
        )
    };
    let refused = |loader: &mut crate::index::Loader<VecLog>, (what, new): (&str, Placed<'_>)| {
        assert!(loader.place(&key(1), &new).is_err(), "{what}");
    };
    let (what, good) = placed("no tokens");
    refused(&mut loader, (what, Placed { edges: &[], ..good }));
    refused(&mut loader, ("no kv", Placed { kv: &[], ..good }));
    refused(
        &mut loader,
        (
            "another's kv",
            Placed {
                kv: &second.kv,
                ..good
            },
        ),
    );
    refused(
        &mut loader,
        (
            "another's state",
            Placed {
                state: second.state,
                ..good
            },
        ),
    );
    let beyond = [Edge {
        offset: 1 << 40,
        ..first.edges[0]
    }];
    refused(
        &mut loader,
        (
            "not in the log",
            Placed {
                edges: &beyond,
                ..good
            },
        ),
    );
    let spot = loader.place(&key(1), &good).unwrap().spot();
    refused(&mut loader, ("twice", good));
    let standing = Placed {
        id: snapshot_id(99),
        ..good
    };
    assert_eq!(
        loader.place(&key(1), &standing).unwrap(),
        Placing::Standing(spot)
    );
    let after = Placed {
        id: second.id,
        state: second.state,
        after: Some(spot),
        edges: &second.edges,
        kv: &second.kv,
        created: second.created,
    };
    refused(
        &mut loader,
        (
            "known state",
            Placed {
                state: ObjectEntry {
                    id: first.state.id,
                    ..second.state
                },
                ..after
            },
        ),
    );
    let placing = loader.place(&key(1), &after).unwrap();
    assert_eq!(loader.parent(placing.spot()), Some(first.id));
    assert_same(&mut bed.index, &mut loader.finish());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_tree_comes_back(
        saves in prop::collection::vec((0..3u8, 0..6usize, 1..60u32, 0..4u32), 1..40),
        removed in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        whole in prop::collection::vec(any::<bool>(), 40),
    ) {
        let mut bed = Bed::new(disk());
        let mut known: Vec<(TreeKey, Vec<TokenId>)> = vec![];
        for (n, (tree, base, len, branch)) in saves.into_iter().enumerate() {
            let key = key(tree);
            let mine: Vec<&Vec<TokenId>> = known.iter().filter(|(k, _)| *k == key).map(|(_, t)| t).collect();
            let base = mine.get(base % mine.len().max(1)).map_or(&[][..], |t| t.as_slice());
            // A branch inside what is known, or its next turn; alike starts meet again.
            let cut = if branch == 0 { base.len() } else { base.len() * branch as usize / 4 };
            let tokens = join(&base[..cut], &run(1 + (n as u32 % 4) * 1000, len));
            bed.save(&key, &tokens);
            known.push((key, tokens));
        }
        for at in removed {
            let ids: Vec<SnapshotId> = bed.index.iter().collect();
            if !ids.is_empty() {
                bed.index.remove_snapshot(at.get(&ids));
            }
        }
        committed(&mut bed);
        let mut whole = whole.into_iter().cycle();
        let rows = rows(&bed.index, || whole.next().unwrap_or(false));
        let mut loaded = load(bed.index.log().clone(), &rows);
        assert_same(&mut bed.index, &mut loaded);
        for (key, tokens) in &known {
            let find = |index: &Index<VecLog>| index.lookup(key, tokens, u32::MAX).map(|hit| hit.snapshot);
            prop_assert_eq!(find(&bed.index), find(&loaded));
        }
    }
}
