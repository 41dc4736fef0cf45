use std::sync::Arc;

use super::fake::*;
use crate::device::shm::SharedMap;
use crate::device::{Device, DeviceError, DeviceKind, Ring, RingExport};
use crate::proto::channel::layout::{self, CloseReason};
use crate::proto::handshake::self_test_byte;
use crate::proto::v1;
use crate::proto::v1::refusal::Reason;
use crate::service::{Peer, SaveState};
use crate::types::{SessionId, TransferMode};

fn refused(world: &World, change: impl FnOnce(&mut v1::AttachRequest)) -> Reason {
    let mut request = attach_request(&Variant::default());
    change(&mut request);
    world
        .service
        .attach(request, &own_peer())
        .unwrap_err()
        .reason()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wrong_description_has_its_own_refusal() {
    let world = World::new().await;
    let ring = |bytes, device: v1::DeviceKind| {
        Some(v1::Ring {
            bytes,
            device: device.into(),
            ..v1::Ring::default()
        })
    };
    let host = v1::DeviceKind::Host;
    assert_eq!(
        refused(&world, |r| r.protocol = 2000),
        Reason::ProtocolVersion
    );
    assert_eq!(
        refused(&world, |r| r.channel_version += 1),
        Reason::ChannelVersion
    );
    assert_eq!(
        refused(&world, |r| r.instance = vec![1; 15].into()),
        Reason::BadIdentity
    );
    assert_eq!(refused(&world, |r| r.shard = None), Reason::BadGeometry);
    assert_eq!(
        refused(&world, |r| r.unknown.push("ple".into())),
        Reason::UnknownPool
    );
    assert_eq!(refused(&world, |r| r.state.clear()), Reason::BadGeometry);
    assert_eq!(refused(&world, |r| r.kv.clear()), Reason::BadGeometry);
    assert_eq!(
        refused(&world, |r| r.kv[0].heads = u32::MAX),
        Reason::BadGeometry
    );
    assert_eq!(
        refused(&world, |r| r.state[0].dtype = 99),
        Reason::BadGeometry
    );
    assert_eq!(refused(&world, |r| r.page_size = 0), Reason::BadGeometry);
    assert_eq!(refused(&world, |r| r.layout = 0), Reason::BadGeometry);
    assert_eq!(refused(&world, |r| r.slots = 0), Reason::BadGeometry);
    assert_eq!(refused(&world, |r| r.model = None), Reason::BadIdentity);
    let digest = |r: &mut v1::AttachRequest, bytes: Vec<u8>| {
        r.model.as_mut().unwrap().weights_digest = bytes.into();
    };
    assert_eq!(
        refused(&world, |r| digest(r, vec![1; 31])),
        Reason::BadIdentity
    );
    assert_eq!(
        refused(&world, |r| digest(r, vec![0; 32])),
        Reason::BadIdentity
    );
    assert_eq!(refused(&world, |r| r.ring = None), Reason::RingTooSmall);
    assert_eq!(
        refused(&world, |r| r.ring = ring(65535, host)),
        Reason::RingTooSmall
    );
    assert_eq!(
        refused(&world, |r| r.ring = ring(1024 * ROW - 1, host)),
        Reason::RingTooSmall
    );
    assert_eq!(
        refused(&world, |r| r.ring = ring(u64::MAX, host)),
        Reason::RingTooSmall
    );
    let cuda = v1::DeviceKind::Cuda;
    assert_eq!(
        refused(&world, |r| r.ring = ring(RING, cuda)),
        Reason::DeviceUnavailable
    );
    for unknown in [vec![], vec![0], vec![3]] {
        assert_eq!(refused(&world, |r| r.modes = unknown), Reason::NoCommonMode);
    }
    let none = Some(v1::Shard {
        attn_tp_size: 2,
        attn_tp_rank: 2,
    });
    assert_eq!(refused(&world, |r| r.shard = none), Reason::BadGeometry);
    let why = "pipeline parallelism";
    assert_eq!(
        refused(&world, |r| r.not_attaching = why.to_owned()),
        Reason::Unsupported
    );
    let rows = world.service.refusals();
    let last = rows.last().unwrap();
    assert_eq!((last.reason, &*last.message), ("unsupported", why));
    assert_eq!(
        world.metric("engram_attach_refused_total{reason=\"bad_geometry\"}"),
        9.0
    );
    assert!(world.service.workers().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_on_a_gpu_says_where_it_is_in_full() {
    let world = World::new().await;
    let text = |uuid: usize, handle: usize| {
        let mut request = attach_request(&Variant::default());
        request.ring = Some(v1::Ring {
            bytes: RING,
            device: v1::DeviceKind::Cuda.into(),
            device_uuid: vec![1; uuid].into(),
            ipc_handle: vec![2; handle].into(),
            ipc_offset: 0,
        });
        let refusal = world.service.attach(request, &own_peer()).unwrap_err();
        assert_eq!(refusal.reason(), Reason::DeviceUnavailable);
        refusal.message
    };
    assert!(text(0, 64).contains("UUID of 0 bytes"));
    assert!(text(17, 64).contains("UUID of 17 bytes"));
    assert!(text(16, 0).contains("handle of 0 bytes"));
    assert!(text(16, 63).contains("handle of 63 bytes"));
    // All is said, but there is no GPU here.
    assert!(text(16, 64).contains("no cuda device"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_known_users_and_right_secrets_come_in() {
    let world = World::new().await;
    let own = nix::unistd::geteuid().as_raw();
    let stranger = Peer::Unix {
        uid: own + 1,
        pid: None,
    };
    let request = || attach_request(&Variant::default());
    let reason = |result: Result<v1::Attached, v1::Refusal>| result.unwrap_err().reason();
    assert_eq!(
        reason(world.service.attach(request(), &stranger)),
        Reason::Unauthenticated
    );
    let tcp = Peer::Tcp("127.0.0.1:1".parse().unwrap());
    assert_eq!(
        reason(world.service.attach(request(), &tcp)),
        Reason::Unauthenticated
    );
    let attached = world.service.attach(request(), &own_peer()).unwrap();
    let session = SessionId::from_bytes(attached.session.as_ref().try_into().unwrap());
    let (_ring, fd) = SharedMap::create("ring", RING).unwrap();
    let bind = |secret: &[u8], peer: &Peer| {
        let fd = fd.try_clone().unwrap();
        world
            .service
            .bind_ring(session, secret, Some(fd), peer)
            .unwrap_err()
            .reason()
    };
    assert_eq!(bind(&[0; 32], &own_peer()), Reason::Unauthenticated);
    assert_eq!(bind(&attached.secret, &stranger), Reason::Unauthenticated);
    assert!(world.service.hello(&attached.session, &[0; 32]).is_none());
    assert!(
        world
            .service
            .hello(&attached.session, &attached.secret)
            .is_some()
    );
    // The ring does not hold the pattern: no session, and this one is over.
    assert_eq!(bind(&attached.secret, &own_peer()), Reason::SelfTest);
    assert!(world.service.workers().is_empty());
    assert!(
        world
            .service
            .hello(&attached.session, &attached.secret)
            .is_none()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_that_lies_is_refused() {
    let world = World::new().await;
    for (bytes, fd) in [(RING / 2, true), (RING, false)] {
        let attached = world
            .service
            .attach(attach_request(&Variant::default()), &own_peer());
        let attached = attached.unwrap();
        let session = SessionId::from_bytes(attached.session.as_ref().try_into().unwrap());
        let (_ring, ring) = SharedMap::create("ring", bytes).unwrap();
        let ring = fd.then_some(ring);
        let bound = world
            .service
            .bind_ring(session, &attached.secret, ring, &own_peer());
        assert_eq!(bound.unwrap_err().reason(), Reason::DeviceUnavailable);
    }
    // A memfd that can still shrink under the daemon.
    let attached = world
        .service
        .attach(attach_request(&Variant::default()), &own_peer())
        .unwrap();
    let session = SessionId::from_bytes(attached.session.as_ref().try_into().unwrap());
    let flags = nix::sys::memfd::MFdFlags::MFD_ALLOW_SEALING;
    let fd = nix::sys::memfd::memfd_create(c"ring", flags).unwrap();
    nix::unistd::ftruncate(&fd, RING as i64).unwrap();
    let bound = world
        .service
        .bind_ring(session, &attached.secret, Some(fd), &own_peer());
    assert_eq!(bound.unwrap_err().reason(), Reason::DeviceUnavailable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_rank_replaces_its_session() {
    let world = World::new().await;
    let variant = Variant {
        instance: Some([7; 16]),
        ..Variant::default()
    };
    let mut first = Fake::attach_as(&world, &variant).await;
    let tokens = prompt(1, 1500);
    first.turn("c", &tokens, 1280).await;
    let mut second = Fake::attach_as(&world, &variant).await;
    assert_eq!(first.closed().await, CloseReason::Replaced);
    eventually("the first is gone", || world.service.workers().len() == 1).await;
    assert_eq!(world.service.workers()[0].session, second.session);
    assert_eq!(second.restore(&tokens).await.unwrap().boundary, 1280);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_is_a_limit_of_workers() {
    let mut settings = Settings::default();
    settings.config.max_workers = 2;
    let world = World::with(settings).await;
    let _one = Fake::attach(&world).await;
    let two = Fake::attach(&world).await;
    let refusal = world
        .service
        .attach(attach_request(&Variant::default()), &own_peer());
    let refusal = refusal.unwrap_err();
    assert_eq!(refusal.reason(), Reason::TooManyWorkers);
    assert!(refusal.retry_after_ms > 0);
    world.service.detach(two.session, "a test");
    eventually("the end", || world.service.workers().len() == 1).await;
    let _three = Fake::attach(&world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_state_is_told_and_goes_on_when_lifted() {
    let world = World::new().await;
    let mut fake = Fake::attach(&world).await;
    let tokens = prompt(1, 1500);
    world.service.hold.set(Some("save:Sealing"));
    fake.turn("c", &tokens, 1280).await;
    eventually("it is held", || {
        world.service.status().held == ["save:Sealing"]
    })
    .await;
    assert!(world.files("objects").len() == 2 && world.files("manifests").is_empty());
    let before = fake.end.link.peer_beat();
    assert_eq!(fake.restore(&tokens).await.unwrap().boundary, 1280);
    world.service.hold.set(None);
    world.all_durable().await;
    assert_eq!(world.files("manifests").len(), 1);
    // In the task of the worker, too; it beats on.
    world.service.hold.set(Some("save:Draining"));
    let other = prompt(2, 1500);
    let req = fake.open("d", &other);
    let save = fake.offer(req, 1280);
    let parts = fake.answer(save).await.unwrap();
    let bytes = kv_bytes(0, &other, parts[0]);
    let held = world.service.clone();
    let lift = tokio::spawn(async move {
        eventually("it is held", || held.status().held == ["save:Draining"]).await;
        held.hold.set(None);
    });
    fake.drain(save, crate::proto::channel::layout::Piece::Kv, 0, &bytes)
        .await;
    lift.await.unwrap();
    eventually("beats", || fake.end.link.peer_beat() > before + 2).await;
    assert_eq!(SaveState::ALL.len(), 9);
}

/// A GPU whose rings cannot be opened.
#[derive(Debug)]
struct Denied;

impl Device for Denied {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn open_ring(&self, _: RingExport) -> Result<Arc<dyn Ring>, DeviceError> {
        Err(DeviceError::Unsupported)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_ring_cannot_be_opened_the_window_takes_its_place() {
    let mut settings = Settings::default();
    settings.devices.push(Arc::new(Denied));
    let world = World::with(settings).await;
    let (ipc, engine) = (v1::TransferMode::Ipc, v1::TransferMode::Engine);
    let attach = |modes: &[v1::TransferMode]| {
        let mut request = attach_request(&Variant::default());
        request.ring = Some(v1::Ring {
            bytes: RING,
            device: v1::DeviceKind::Cuda.into(),
            device_uuid: vec![1; 16].into(),
            ipc_handle: vec![2; 64].into(),
            ipc_offset: 0,
        });
        request.modes = modes.iter().map(|mode| (*mode).into()).collect();
        let attached = world.service.attach(request, &own_peer()).unwrap();
        assert_eq!(attached.mode(), ipc, "it is tried first");
        let session = SessionId::from_bytes(attached.session.as_ref().try_into().unwrap());
        (session, attached.secret)
    };
    let (window, fd) = SharedMap::create("window", RING).unwrap();
    let pattern: Vec<u8> = (0..layout::HANDSHAKE_SELF_TEST_BYTES)
        .map(self_test_byte)
        .collect();
    window.write(0, &pattern).unwrap();
    let bind = |(session, secret): (SessionId, _), fd: Option<&std::os::fd::OwnedFd>| {
        let fd = fd.map(|fd| fd.try_clone().unwrap());
        world
            .service
            .bind_ring(session, &Vec::from(secret), fd, &own_peer())
    };
    // A worker that does not allow it, and one that passed no window.
    for (modes, fd) in [(&[ipc][..], Some(&fd)), (&[ipc, engine], None)] {
        let refusal = bind(attach(modes), fd).unwrap_err();
        assert_eq!(refusal.reason(), Reason::DeviceUnavailable, "{refusal:?}");
    }
    let fds = bind(attach(&[ipc, engine]), Some(&fd)).unwrap();
    assert_eq!(fds.mode, TransferMode::Engine);
    let row = world.service.workers().remove(0);
    assert_eq!((row.mode, row.device), (TransferMode::Engine, "cuda"));
    assert!(row.mode_why.contains("cannot be used"), "{}", row.mode_why);
}
