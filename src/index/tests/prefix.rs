//! Which prefix is found.

use super::*;

#[test]
fn the_longest_prefix_is_found() {
    let mut bed = Bed::new(ram());
    let turns = run(0, 5000);
    let ids: Vec<SnapshotId> = [1000, 2500, 5000]
        .into_iter()
        .map(|boundary| bed.save(&key(1), &turns[..boundary]))
        .collect();
    let longer = join(&turns, &[7, 7, 7]);
    assert_eq!(bed.find(&key(1), &longer), Some((ids[2], 5000)));
    assert_eq!(bed.find(&key(1), &turns), Some((ids[2], 5000)));
    assert_eq!(bed.find(&key(1), &turns[..4999]), Some((ids[1], 2500)));
    let hit = bed.index.lookup(&key(1), &longer, u32::MAX).unwrap();
    let ranges: Vec<_> = hit
        .kv
        .iter()
        .map(|part| (part.range.start, part.range.end))
        .collect();
    assert_eq!(ranges, [(0, 1000), (1000, 2500), (2500, 5000)]);
    assert_eq!(bed.index.hit(&ids[2]), Some(hit));
    let mut tokens = vec![42];
    assert!(bed.index.read_tokens(&ids[1], &mut tokens));
    assert_eq!(tokens[1..], turns[..2500]);
}

#[test]
fn max_boundary_cuts() {
    let mut bed = Bed::new(ram());
    let turns = run(0, 300);
    let ids: Vec<SnapshotId> = [100, 200, 300]
        .into_iter()
        .map(|boundary| bed.save(&key(1), &turns[..boundary]))
        .collect();
    let find = |max| {
        bed.index
            .lookup(&key(1), &turns, max)
            .map(|hit| hit.snapshot)
    };
    assert_eq!(find(300), Some(ids[2]));
    assert_eq!(find(299), Some(ids[1]));
    assert_eq!(find(200), Some(ids[1]));
    assert_eq!(find(199), Some(ids[0]));
    assert_eq!(find(99), None);
    assert_eq!(find(0), None);
    assert_eq!(bed.index.has_snapshot(&key(1), &turns, 200), Some(ids[1]));
    assert_eq!(bed.index.has_snapshot(&key(1), &turns, 201), None);
    assert_eq!(bed.index.has_snapshot(&key(1), &turns[..150], 200), None);
}

#[test]
fn empty_and_short_prompts_find_nothing() {
    let mut bed = Bed::new(ram());
    assert_eq!(bed.find(&key(1), &[]), None);
    assert_eq!(bed.index.coverage(&key(1), &[1, 2]), Coverage::default());
    bed.save(&key(1), &run(0, 100));
    assert_eq!(bed.find(&key(1), &[]), None);
    assert_eq!(bed.find(&key(1), &run(0, 99)), None);
    assert_eq!(bed.index.has_snapshot(&key(1), &run(0, 99), 0), None);
    assert_eq!(bed.index.kv_refs(&key(1), &[], 10), []);
    let coverage = bed.index.coverage(&key(1), &run(0, 99));
    assert_eq!(
        (coverage.matched, coverage.kv, coverage.deepest),
        (99, 99, None)
    );
}

#[test]
fn trees_never_mix() {
    let mut bed = Bed::new(ram());
    let tokens = run(0, 100);
    let other_namespace = TreeKey {
        namespace: NamespaceId([2; 32]),
        ..key(1)
    };
    let first = bed.save(&key(1), &tokens);
    for other in [key(2), other_namespace] {
        assert_eq!(bed.find(&other, &tokens), None);
        assert_eq!(bed.index.coverage(&other, &tokens), Coverage::default());
        let own = bed.save(&other, &tokens);
        assert_ne!(own, first);
        assert_eq!(bed.find(&other, &tokens), Some((own, 100)));
        bed.index.remove_snapshot(&own);
        assert_eq!(bed.find(&other, &tokens), None);
    }
    assert_eq!(bed.find(&key(1), &tokens), Some((first, 100)));
    assert_eq!(bed.index.stats().trees, 1);
}

#[test]
fn split_shares_payload() {
    let mut bed = Bed::new(ram());
    let system = run(0, 1500);
    let a = join(&system, &run(10_000, 500));
    let b = join(&system, &run(20_000, 700));
    let first = bed.save(&key(1), &a);
    let logged = bed.index.log().len();
    let second = bed.save(&key(1), &b);
    assert_eq!(
        bed.index.log().len(),
        logged + 700,
        "a shared prefix is logged once"
    );
    let (first, second) = (
        bed.index.hit(&first).unwrap(),
        bed.index.hit(&second).unwrap(),
    );
    assert_eq!(first.kv.len(), 1);
    assert_eq!(second.kv[0].object, first.kv[0].object);
    assert_eq!(
        second.kv[0].range,
        TokenRange {
            start: 0,
            end: 1500
        }
    );
    assert_eq!(
        second.kv[0].object_range,
        TokenRange {
            start: 0,
            end: 2000
        }
    );
    assert_eq!(
        second.kv[1].object_range,
        TokenRange {
            start: 1500,
            end: 2200
        }
    );
    assert_eq!(bed.index.usage(TierKind::Ram).bytes, 2000 + 700 + 2 * 1000);
}

#[test]
fn a_branch_uses_a_part_of_an_object_after_its_maker_is_gone() {
    let mut bed = Bed::new(ram());
    let a = run(0, 2000);
    let b = join(&a[..1500], &run(20_000, 10));
    let first = bed.save(&key(1), &a);
    let second = bed.save(&key(1), &b);
    let removed = bed.index.remove_snapshot(&first);
    bed.index.check().unwrap();
    assert_eq!(
        removed.objects,
        [address(
            &key(1),
            &a,
            TokenRange::at(2000),
            ObjectKind::State
        )]
    );
    assert_eq!(bed.find(&key(1), &a), None);
    assert_eq!(bed.find(&key(1), &b), Some((second, 1510)));
    assert_eq!(bed.index.coverage(&key(1), &a).kv, 2000);
    let removed = bed.index.remove_snapshot(&second);
    assert_eq!(removed.objects.len(), 3, "the state and both KV objects");
    assert_eq!(bed.index.stats(), Stats::default());
    assert_eq!(bed.index.usage(TierKind::Ram), Usage::default());
    assert_eq!(bed.index.log().released(), bed.index.log().len());
}

#[test]
fn tombstone_creation() {
    let mut bed = Bed::new(ram());
    let turns = run(0, 300);
    let parent = bed.save(&key(1), &turns[..100]);
    let child = bed.save(&key(1), &turns[..200]);
    let leaf = bed.save(&key(1), &turns);

    // In the middle: what extends it is not touched, and two edges become one.
    let nodes = bed.index.stats().nodes;
    let state = bed.state(child);
    assert_eq!(bed.index.forget_state(&child).objects, [state]);
    bed.index.check().unwrap();
    assert_eq!(bed.index.snapshot(&child), None);
    assert_eq!(bed.index.stats().nodes, nodes - 1);
    assert_eq!(bed.find(&key(1), &turns), Some((leaf, 300)));
    assert_eq!(bed.find(&key(1), &turns[..250]), Some((parent, 100)));
    assert_eq!(bed.index.snapshot(&leaf).unwrap().parent, Some(parent));

    // At the end: its KV stays, and a new state needs no other.
    bed.index.forget_state(&leaf);
    bed.index.check().unwrap();
    let coverage = bed.index.coverage(&key(1), &turns);
    assert_eq!(coverage.kv, 300);
    assert_eq!(coverage.deepest, Some((parent, 100)));
    let new = bed.new_snapshot(&key(1), &turns);
    assert_eq!(new.new_objects, []);
    let again = bed.index.insert(&key(1), &turns, new).unwrap().snapshot;
    assert_eq!(bed.find(&key(1), &turns), Some((again, 300)));
    bed.index.check().unwrap();
}

#[test]
fn equal_hashes_do_not_make_equal_tokens() {
    let collide = Hashing {
        head: |_| 0,
        child: |_, _| 0,
    };
    let mut bed = Bed::with_hashing(ram(), collide);
    let a = run(0, 200);
    // Differs in a token that is not the first, and in the first.
    let mut b = a.clone();
    b[3] = 9999;
    let c = run(5000, 200);
    let first = bed.save(&key(1), &a);
    for other in [&b, &c] {
        assert_eq!(bed.find(&key(1), other), None);
        assert_eq!(bed.index.has_snapshot(&key(1), other, 200), None);
    }
    assert_eq!(bed.index.coverage(&key(1), &b).kv, 3);
    assert_eq!(bed.index.coverage(&key(1), &c).kv, 0);
    let second = bed.save(&key(1), &b);
    let third = bed.save(&key(1), &c);
    for (tokens, id) in [(&a, first), (&b, second), (&c, third)] {
        assert_eq!(bed.find(&key(1), tokens), Some((id, 200)));
    }
}

#[test]
fn tokens_are_compared_beyond_the_hashed_head() {
    let mut bed = Bed::new(ram());
    let a = run(0, 3000);
    bed.save(&key(1), &a);
    for at in [64, 1023, 1024, 2999] {
        let mut b = a.clone();
        b[at] += 1;
        assert_eq!(bed.find(&key(1), &b), None);
        assert_eq!(bed.index.coverage(&key(1), &b).kv, at as u32);
    }
}

#[test]
fn wide_nodes_keep_their_children_apart() {
    let mut bed = Bed::new(ram());
    let system = run(0, 100);
    let prompts: Vec<Vec<TokenId>> = (0..500).map(|n| join(&system, &[1000 + n, 5, 6])).collect();
    let mut ids = Vec::new();
    for prompt in &prompts {
        let new = bed.new_snapshot(&key(1), prompt);
        ids.push(bed.index.insert(&key(1), prompt, new).unwrap().snapshot);
    }
    bed.index.check().unwrap();
    for (prompt, id) in prompts.iter().zip(&ids) {
        assert_eq!(bed.find(&key(1), prompt), Some((*id, 103)));
    }
    for id in ids.iter().rev() {
        bed.index.remove_snapshot(id);
    }
    bed.index.check().unwrap();
    assert_eq!(bed.index.stats(), Stats::default());
}
