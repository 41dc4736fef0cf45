"""What is saved comes back, byte for byte, at the boundary that was promised."""

from __future__ import annotations

import random
from typing import Any

import pytest

from conftest import World
from engram_sglang import saves

MODES = [
    pytest.param({"page_size": 1, "extra_buffer": True}, id="page1-extra"),
    pytest.param({"page_size": 64, "extra_buffer": True}, id="page64-extra"),
    pytest.param({"page_size": 1, "extra_buffer": False}, id="page1-no_buffer"),
    pytest.param({"page_size": 64, "extra_buffer": True, "overlap": True, "lag": 2}, id="page64-overlap"),
    pytest.param({"page_size": 1, "extra_buffer": True, "overlap": True, "lag": 2}, id="page1-overlap"),
]
if World.PAGE_MAJOR:
    MODES += [
        pytest.param({"page_size": 64, "page_major": True, "overlap": True, "lag": 2}, id="page64-page_major"),
        pytest.param({"page_size": 1, "page_major": True}, id="page1-page_major"),
    ]


def words(seed: int, count: int) -> list[int]:
    """A prompt that no other test has."""
    rng = random.Random(seed)
    return [rng.randrange(1, 50_000) for _ in range(count)]


def settle(world: Any) -> None:
    """All saves are over."""
    world.until(lambda: not world.shim.saves, what="saves")


@pytest.mark.parametrize("mode", MODES)
def test_second_turn_after_a_flush(world: Any, shared_daemon: Any, mode: dict[str, Any], seed: int) -> None:
    w = world(shared_daemon, **mode)
    prompt = words(seed, 700)
    first = w.request(prompt, new=8, session="s")
    w.run(first)
    settle(w)
    w.flush()
    second = w.request(prompt + list(first.output_ids) + words(seed + 1, 50), new=8, session="s")
    w.run(second)
    expected = 640 if w.extra_buffer else 707
    assert w.admitted_prefix[second.rid] == expected, w.shim.counts
    assert w.shim.counts["tokens_reused"] == expected
    settle(w)
    w.check()


@pytest.mark.parametrize("mode", MODES)
def test_second_turn_after_a_restart_of_the_server(world: Any, shared_daemon: Any, mode: dict[str, Any], seed: int) -> None:
    w = world(shared_daemon, **mode)
    prompt = words(seed, 700)
    first = w.request(prompt, new=8)
    w.run(first)
    settle(w)
    w.close()
    again = world(shared_daemon, **mode)
    second = again.request(prompt + list(first.output_ids) + [1, 2, 3], new=8)
    again.run(second)
    assert again.admitted_prefix[second.rid] == (640 if w.extra_buffer else 707), w.shim.counts
    settle(again)
    again.check()


@pytest.mark.parametrize("mode", MODES)
def test_branch_of_a_shared_prompt_is_kept(world: Any, shared_daemon: Any, mode: dict[str, Any], seed: int) -> None:
    w = world(shared_daemon, **mode)
    system = words(seed, 256)
    first = w.request(system + words(seed + 1, 200), new=4)
    w.run(first)
    second = w.request(system + words(seed + 2, 200), new=4)
    w.run(second)
    settle(w)
    w.flush()
    third = w.request(system + words(seed + 3, 200), new=4)
    w.run(third)
    if w.extra_buffer:
        # The second request found the branching point and left a state there.
        assert w.admitted_prefix[third.rid] == 256
    settle(w)
    w.check()


@pytest.mark.parametrize("mode", MODES)
def test_after_eviction_of_the_state_alone_only_the_state_moves(
    world: Any, shared_daemon: Any, mode: dict[str, Any], seed: int
) -> None:
    w = world(shared_daemon, **mode)
    first = w.request(words(seed, 700), new=4)
    w.run(first)
    settle(w)
    before = shared_daemon.metrics().get("engram_restored_bytes_total", 0)
    boundary = 640 if w.extra_buffer else 703
    talk = list(first.origin_input_ids) + list(first.output_ids)
    # Others that go on from there keep the KV, when the states go.
    w.run(w.request(talk[:boundary] + words(seed + 5, 400), new=4))
    settle(w)
    w.evict_states()
    second = w.request(talk + [7, 8, 9], new=4)
    w.run(second)
    assert w.admitted_prefix[second.rid] == boundary
    moved = shared_daemon.metrics()["engram_restored_bytes_total"] - before
    assert moved == w.pools.state_bytes
    settle(w)
    w.check()


def test_a_repeated_prompt_is_not_saved_again(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, page_size=64)
    prompt = words(seed, 700)
    w.run(w.request(prompt, new=4))
    settle(w)
    offers = w.shim.counts["offers"]
    w.run(w.request(prompt, new=4))
    settle(w)
    assert w.shim.counts["offers"] == offers
    saved = w.shim.counts["save_ok"]
    w.flush()
    w.run(w.request(prompt, new=4))
    settle(w)
    assert w.shim.counts["save_ok"] == saved


def test_namespaces_are_apart(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, page_size=64)
    prompt = words(seed, 300)
    kinds = [{}, {"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "c"}]
    w.run(w.request(prompt, new=2, **kinds[1]))
    settle(w)
    w.flush()
    for kind in kinds:
        again = w.request(prompt, new=2, **kind)
        w.run(again)
        same = w.namespace(**kind) == w.namespace(**kinds[1])
        assert w.admitted_prefix[again.rid] == (256 if same else 0), kind
        settle(w)


def test_other_weights_find_nothing(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon)
    prompt = words(seed, 300)
    w.run(w.request(prompt, new=2))
    settle(w)
    w.close()
    other = world(shared_daemon, seed=seed + 500_000)
    second = other.request(prompt, new=2)
    other.run(second)
    assert other.admitted_prefix[second.rid] == 0


@pytest.mark.parametrize("looks", [True, False], ids=["looked-for", "in-time"])
def test_what_the_daemon_lost_is_saved_again(world: Any, daemon: Any, looks: bool, seed: int, monkeypatch: Any) -> None:
    """A hot prefix stays on the device while its snapshot is deleted: its next turn brings it there again."""
    d = daemon()
    w = world(d, page_size=64)
    prompt = words(seed, 700)
    w.run(w.request(prompt, new=4))
    settle(w)
    assert w.shim.counts["save_ok"] == 1 and d.delete_all() == 1
    if looks:
        # Enough that is new to ask for.
        w.run(w.request(prompt[:640] + words(seed + 1, 100), new=2))
        assert w.shim.counts["miss_nothing_stored"] == 2
    else:
        offers = w.shim.counts["offers"]
        w.run(w.request(prompt, new=4))
        settle(w)
        assert w.shim.counts["offers"] == offers, "what is known is not offered"
        monkeypatch.setattr(saves, "_KNOWN_TICKS", 1)
        w.run(w.request(prompt, new=4))
    settle(w)
    w.flush()
    again = w.request(prompt[:640] + words(seed + 2, 40), new=4)
    w.run(again)
    assert w.admitted_prefix[again.rid] == 640, w.shim.counts
    settle(w)
    w.check()
