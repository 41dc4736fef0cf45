//! Exports and imports inside the service: what they hold while they go on, and what they leave.

use bytes::Bytes;
use tokio::sync::mpsc;

use super::fake::*;
use crate::proto::channel::msg::RequestClose;
use crate::service::{
    DeleteRequest, Export, ExportRequest, ImportReply, ImportRequest, Selector, ServiceError,
};
use crate::store::Tier as _;
use crate::types::SnapshotId;

/// The two files of a pair.
type Pair = (Vec<u8>, Vec<u8>);

async fn start(world: &World, id: SnapshotId) -> Result<Export, ServiceError> {
    let select = Selector::snapshot(id);
    world.service.export(ExportRequest { select }).await
}

async fn rest(export: Export) -> Result<Pair, ServiceError> {
    let mut all = Vec::new();
    let mut chunks = export.chunks;
    while let Some(chunk) = chunks.recv().await {
        all.extend_from_slice(&chunk?);
    }
    let json = all.split_off(export.tensor_bytes as usize);
    Ok((all, json))
}

/// Sends the first so many bytes of a pair.
async fn import(
    world: &World,
    (tensors, json): &Pair,
    upto: usize,
) -> Result<ImportReply, ServiceError> {
    let request = ImportRequest {
        new_model: false,
        names: true,
        conversation_id: None,
        durable: true,
        timeout: LONG,
    };
    let head = (json.len() as u64).to_le_bytes();
    let mut body = [&head[..], json, tensors].concat();
    body.truncate(upto);
    let (to, chunks) = mpsc::channel(1);
    let send = async move {
        for chunk in body.chunks(100_000) {
            if to.send(Ok(Bytes::copy_from_slice(chunk))).await.is_err() {
                return;
            }
        }
    };
    let (reply, ()) = tokio::join!(world.service.import(request, chunks), send);
    reply
}

async fn ranks(world: &World) -> [Fake; 2] {
    let variant = |rank| Variant {
        instance: Some([7; 16]),
        rank: Some((rank, 2)),
        ..Variant::default()
    };
    let first = Fake::attach_as(world, &variant(0)).await;
    [first, Fake::attach_as(world, &variant(1)).await]
}

/// Nothing is spoken for, and nothing holds anything.
async fn at_rest(world: &World) {
    eventually("rest", || {
        *world.service.reserved.lock() == 0
            && world.service.portable.available_permits() == super::super::portable::AT_ONCE
    })
    .await;
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_rank_gets_its_own_bytes_back() {
    let world = World::new().await;
    let mut pair = ranks(&world).await;
    let tokens = prompt(1, 2500);
    let mut ids = Vec::new();
    let mut saves = Vec::new();
    for rank in &mut pair {
        let req = rank.open("c", &tokens);
        let save = rank.offer(req, 2304);
        let parts = rank.answer(save).await.unwrap();
        rank.drain_all(save, &tokens[..2304], &parts).await;
        saves.push((req, save));
    }
    for (rank, (req, save)) in pair.iter_mut().zip(saves) {
        ids.push(rank.saved(save).await.unwrap());
        rank.finish(req, tokens.len());
        rank.say(RequestClose { req });
        rank.heard_all().await;
    }
    let files = rest(start(&world, ids[0]).await.unwrap()).await.unwrap();
    at_rest(&world).await;
    let other = World::new().await;
    let reply = import(&other, &files, usize::MAX).await.unwrap();
    assert_eq!((reply.row.boundary, reply.already_here), (2304, false));
    assert_eq!(reply.row.turn_number, Some(1));
    assert!(reply.row.durable);
    at_rest(&other).await;
    let other = other.killed().await;
    for rank in &mut ranks(&other).await {
        assert_eq!(rank.restore(&tokens).await.unwrap().boundary, 2304);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_that_ends_anywhere_leaves_nothing() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 2500);
    let id = fake.turn("c", &tokens, 2304).await;
    let files = rest(start(&world, id).await.unwrap()).await.unwrap();
    let other = World::new().await;
    let all = 8 + files.0.len() + files.1.len();
    for upto in [
        0,
        5,
        8,
        100,
        8 + files.1.len(),
        all - files.0.len() / 2,
        all - 1,
    ] {
        let error = import(&other, &files, upto).await.unwrap_err();
        assert!(matches!(error, ServiceError::Invalid(_)), "{upto}: {error}");
        at_rest(&other).await;
        assert_eq!(other.service.store.ram.usage().objects, 0);
        assert_eq!(other.service.store.arena.used(), 0);
    }
    assert_eq!(other.files(".safetensors").len(), 0);
    assert_eq!(other.metric("engram_saved_snapshots_total"), 0.0);
    import(&other, &files, usize::MAX).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_being_exported_is_exported_whole_though_it_is_deleted() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 40_000);
    let id = fake.turn("c", &tokens, 39_936).await;
    world.all_durable().await;
    let export = start(&world, id).await.unwrap();
    let mut given_up = start(&world, id).await.unwrap();
    assert!(given_up.chunks.recv().await.is_some());
    let request = DeleteRequest {
        select: Selector::conversation("c"),
        whole: true,
    };
    let reply = world.service.delete(request).await.unwrap();
    assert_eq!(reply.snapshots, [id]);
    // Nobody takes the rest of this one.
    drop(given_up);
    let files = rest(export).await.unwrap();
    at_rest(&world).await;
    eventually("all of it to go", || {
        world.service.store.arena.used() == 0 && world.files(".safetensors").is_empty()
    })
    .await;
    assert_eq!(fake.restore(&tokens).await, None);
    import(&world, &files, usize::MAX).await.unwrap();
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 39_936);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_adds_only_what_is_not_here() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 5000);
    let id = fake.turn("c", &tokens, 4000).await;
    let files = rest(start(&world, id).await.unwrap()).await.unwrap();
    let other = World::new().await;
    let mut fake = Fake::attach(&other).await;
    // It ends inside a block, which comes again whole.
    fake.turn("mine", &tokens[..1600], 1500).await;
    other.all_durable().await;
    let before = other.metric("engram_written_bytes_total");
    import(&other, &files, usize::MAX).await.unwrap();
    other.all_durable().await;
    let after = other.metric("engram_written_bytes_total");
    assert_eq!(after - before, (STATE + (4000 - 1024) * ROW) as f64);
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 4000);
    assert_eq!(fake.restore(&tokens[..3999]).await.unwrap().boundary, 1500);
    at_rest(&other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_than_a_few_go_on_at_a_time() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 40_000);
    let id = fake.turn("c", &tokens, 39_936).await;
    let mut open = Vec::new();
    for _ in 0..super::super::portable::AT_ONCE {
        open.push(start(&world, id).await.unwrap());
    }
    let error = start(&world, id).await.unwrap_err();
    assert!(matches!(error, ServiceError::Busy(_)), "{error}");
    drop(open);
    at_rest(&world).await;
    rest(start(&world, id).await.unwrap()).await.unwrap();
}
