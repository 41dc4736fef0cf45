"""Changes of the weights: what is of others is neither saved nor restored, and what turns out to be good still is."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from conftest import World
from engram_sglang import plugin, weights
from test_turns import settle, words

MODE = {"page_size": 64, "overlap": True, "lag": 2}
HAS_SESSIONS = hasattr(plugin.adapter(), "IN_PARTS") is False
needs_sessions = pytest.mark.skipif(not HAS_SESSIONS, reason="this release has no sessions of updates")


def first_turn(w: Any, prompt: list[int]) -> Any:
    """A turn that is saved and stays on the device."""
    first = w.request(prompt, new=8)
    w.run(first)
    settle(w)
    return first


def comes_back(w: Any, prompt: list[int], boundary: int) -> None:
    """After a flush the prompt is restored up to there."""
    w.flush()
    again = w.request([*prompt, 1], new=4)
    w.run(again)
    assert w.admitted_prefix[again.rid] == boundary, dict(w.shim.counts)
    settle(w)
    w.check()


def test_an_update_that_fails_changes_nothing(world: Any, shared_daemon: Any, seed: int, monkeypatch: Any, caplog: Any) -> None:
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    first_turn(w, prompt)
    monkeypatch.setattr(w, "new_weights", lambda *args, **kwargs: (False, "there is no such file"))
    with caplog.at_level("INFO"):
        result = w.update_weights(seed + 1)
    assert not result.success
    assert w.shim.epoch == 2 and not w.shim.stale_tree
    assert any("what they were" in record.message for record in caplog.records)
    offers = w.shim.counts["offers"]
    other = words(seed + 2, 300)
    w.run(w.request(other, new=4))
    settle(w)
    assert w.shim.counts["offers"] > offers
    comes_back(w, prompt, 640)
    comes_back(w, other, 256)


def test_other_weights_without_a_flush_are_said(world: Any, shared_daemon: Any, seed: int, caplog: Any) -> None:
    w = world(shared_daemon, **MODE)
    first_turn(w, words(seed, 700))
    w.mixed = True
    with caplog.at_level("INFO"):
        assert w.update_weights(seed + 700_000, flush=False).success
    assert w.shim.stale_tree
    assert any("until it is flushed" in record.message for record in caplog.records)
    # An update that is rejected then does not make it good.
    w.new_weights = lambda *args, **kwargs: (False, "no")
    w.update_weights(seed)
    assert w.shim.stale_tree
    w.flush()
    w.mixed = False
    assert not w.shim.stale_tree


def session(w: Any, *calls: Any, flush: int | None = None) -> None:
    """A session of weight updates as the server runs it; `calls` are made between begin and end."""
    updater = w.updater()
    updater.tp_cpu_group = None
    request = types.SimpleNamespace(selector="all")
    runner = updater.tp_worker.weight_update_runners()[0][1]
    runner.weight_updater.begin_weight_update = lambda: None
    runner.weight_updater.end_weight_update = lambda run_post_load: None
    assert updater.begin_weight_update(request).success
    for call in calls:
        call()
    assert updater.end_weight_update(request).success


@pytest.fixture
def no_barrier(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.distributed, "barrier", lambda group=None: None)


@needs_sessions
def test_what_is_computed_in_a_session_of_updates_is_not_saved(world: Any, shared_daemon: Any, seed: int, no_barrier: Any) -> None:
    w = world(shared_daemon, **MODE)
    prompt, between = words(seed, 700), words(seed + 1, 700)
    first_turn(w, prompt)
    new_seed = seed + 700_000

    def compute() -> None:
        w.flush()
        offers = w.shim.counts["offers"]
        w.run(w.request(between, new=4))
        settle(w)
        assert w.shim.counts["offers"] == offers

    def load() -> None:
        w.mixed = True
        w.new_weights(str(new_seed))

    session(w, compute, load)
    assert w.shim.stale_tree
    offers = w.shim.counts["offers"]
    w.run(w.request([*between, 1, 2], new=4))
    settle(w)
    assert w.shim.counts["offers"] == offers, "it has KV of weights that nobody knows"
    w.flush()
    w.mixed = False
    first_turn(w, between)
    comes_back(w, between, 640)


@needs_sessions
def test_a_flush_in_a_session_of_updates_is_enough(world: Any, shared_daemon: Any, seed: int, no_barrier: Any) -> None:
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    first_turn(w, prompt)
    session(w, lambda: w.new_weights(str(seed + 700_000)), w.flush)
    assert not w.shim.stale_tree
    first_turn(w, prompt)
    comes_back(w, prompt, 640)


@needs_sessions
def test_a_session_that_changed_nothing(world: Any, shared_daemon: Any, seed: int, no_barrier: Any) -> None:
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    first_turn(w, prompt)
    session(w)
    assert not w.shim.stale_tree
    comes_back(w, prompt, 640)


@pytest.mark.skipif(HAS_SESSIONS, reason="this release says which call is the last one")
def test_weights_that_come_in_parts_are_named_once(world: Any, shared_daemon: Any, seed: int, monkeypatch: Any) -> None:
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    first_turn(w, prompt)
    named: list[Any] = []

    def counted(model: Any) -> bytes:
        named.append(model)
        return weights.digest_of(model)

    monkeypatch.setattr(plugin, "digest_of", counted)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group=None: None)
    updater = w.updater()
    part = types.SimpleNamespace(
        disable_draft_model=True, flush_cache=True, torch_empty_cache=False, weight_version=None, names=[], dtypes=[], shapes=[],
    )
    updater.tp_worker.update_weights_from_tensor = lambda request: w.new_weights(str(seed + 700_000))
    for _ in range(5):
        assert updater.update_weights_from_tensor(part).success
    assert named == [] and w.shim.epoch == 6 and w.shim.link.weights.digest is None
    lookups, offers = w.shim.counts["lookups"], w.shim.counts["offers"]
    w.run(w.request(prompt, new=4))
    assert (lookups, offers) == (w.shim.counts["lookups"], w.shim.counts["offers"]), "nothing begins without a name"
    w.until(lambda: named, what="a name at an idle moment")
    w.until(lambda: w.shim.link.weights.digest is not None)
    assert len(named) == 1 and not w.shim.stale_tree
    # What these weights computed before they had a name is theirs.
    w.run(w.request([*prompt, 1], new=4))
    settle(w)
    comes_back(w, prompt, 640)
    w.shim.off = True
    assert updater.update_weights_from_tensor(part).success
    for _ in range(20):
        w.step()
    assert len(named) == 1, "not when the shim is off"
    w.shim.off = False
