"""What SGLang does to requests and pools while saves and restores are under way."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest

from conftest import World
from engram_sglang.restore import Restore, RestoreState
from engram_sglang.save import Save, SaveState
from held import Held
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from test_turns import settle, words

MODE = {"page_size": 64, "overlap": True, "lag": 2}
# What SGLang's own ratio gives for two running requests: 5 slots each with a buffer and overlap, else 3.
SPARSE = [
    pytest.param({"page_size": 64, "overlap": True, "lag": 2}, 10, id="page64-overlap"),
    pytest.param({"page_size": 1, "overlap": True, "lag": 1}, 10, id="page1-overlap"),
    pytest.param({"page_size": 1, "extra_buffer": False}, 6, id="page1-no_buffer"),
]


def until_state(w: Any, kind: type, state: Any, seconds: float = 10) -> Any:
    """Goes on until a machine is in the state."""

    def find() -> Any:
        machines = w.shim.saves.values() if kind is Save else w.shim.restores
        return next((m for m in machines if m.state is state), None)

    w.until(find, seconds, state.value)
    return find()


def saved(w: Any, prompt: list[int], **how: Any) -> Any:
    """A first turn, saved and flushed."""
    first = w.request(prompt, new=8, **how)
    w.run(first)
    settle(w)
    w.flush()
    return first


def test_a_premature_copy_is_found(world: Any, shared_daemon: Any, seed: int) -> None:
    """The oracle sees what a copy that does not wait for the forward brings."""
    w = world(shared_daemon, **MODE)

    class Hasty:
        def submit(self, copy: Any, *, before_next: bool) -> Any:
            copy()
            return types.SimpleNamespace(done=lambda: True)

    w.shim.copier = Hasty()
    prompt = words(seed, 700)
    saved(w, prompt)
    second = w.request(prompt + [1, 2, 3], new=4)
    with pytest.raises(AssertionError, match="not its own"):
        w.run(second)
    w.shim.copier = w.copier


@pytest.mark.parametrize("state", [SaveState.OFFERED, SaveState.GATHERING, SaveState.DRAINING])
def test_flush_with_a_save_under_way(world: Any, shared_daemon: Any, state: SaveState, seed: int) -> None:
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    # It gathers no longer than it lacks room in the ring.
    held = Held(w, state) if state is SaveState.GATHERING else None
    first = w.request(prompt, new=8)
    until_state(w, Save, state)
    w.abort(first.rid)
    w.until(lambda: w.scheduler.is_fully_idle(), what="idle")
    w.flush()
    w.check()
    if held is not None:
        held.release()
    settle(w)
    second = w.request(prompt + [1], new=4)
    w.run(second)
    assert w.admitted_prefix[second.rid] in (0, 512, 640)
    settle(w)
    w.check()


@pytest.mark.parametrize("state", [RestoreState.LOOKUP, RestoreState.LEASED, RestoreState.FILLING, RestoreState.PLACED])
def test_abort_while_it_is_restored(world: Any, shared_daemon: Any, state: RestoreState, seed: int, monkeypatch: Any) -> None:
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    saved(w, prompt)
    second = None
    original = Restore.step
    reached = []

    def step(self: Any, to: Any, now: float) -> None:
        original(self, to, now)
        if to is state:
            reached.append(self)

    monkeypatch.setattr(Restore, "step", step)
    second = w.request(prompt + [1, 2, 3], new=4)
    if state is RestoreState.LOOKUP:
        reached.append(w.shim.restores[0])
    w.until(lambda: reached, what=state.value)
    w.abort(second.rid)
    w.until(lambda: w.scheduler.is_fully_idle() and not w.shim.restores, what="idle")
    assert second.rid not in w.shim.requests
    w.check()
    third = w.request(prompt + [1, 2, 3], new=4)
    w.run(third)
    assert w.admitted_prefix[third.rid] == 640
    settle(w)
    w.check()


def test_the_same_rid_again_while_the_first_waits(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, **MODE)
    prompt, other = words(seed, 700), words(seed + 1, 700)
    saved(w, prompt)
    first = w.request(prompt + [1, 2, 3], new=4, rid="same")
    w.abort("same")
    second = w.request(other, new=4, rid="same")
    w.run(second)
    assert w.admitted_prefix["same"] == 0
    assert not first.finished()
    third = w.request(prompt + [1, 2, 3], new=4, rid="same")
    w.admitted_prefix.pop("same")
    w.run(third)
    assert w.admitted_prefix["same"] == 640
    settle(w)
    w.check()


# SGLang refuses to flush while requests hold their KV; and, in older releases, while any wait.
PAUSES = [("in_place", False), ("retract", False), *([("retract", True)] if World.FLUSHES_WHILE_WAITING else [])]


@pytest.mark.parametrize(("mode", "flush"), PAUSES)
def test_weights_change_while_paused(world: Any, shared_daemon: Any, mode: str, flush: bool, seed: int) -> None:
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    saved(w, prompt)
    second = w.request(prompt + [1, 2, 3], new=200)
    w.until(lambda: w.admitted_prefix.get(second.rid) is not None, what="admission")
    for _ in range(4):
        w.step()
    waiting = w.request(prompt + [9], new=4)
    w.scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
    if mode == "retract":
        w.admitted_prefix.clear()
    for _ in range(5):
        w.step()
    w.until(lambda: not w.stream.work)
    new_seed = seed + 700_000
    if mode == "in_place":
        # A real model computes on with KV of the old weights. The oracle would not have it.
        w.abort(second.rid)
        w.abort(waiting.rid)
        w.mixed = True
    result = w.update_weights(new_seed, flush=flush)
    assert result.success, result.message
    assert w.shim.epoch == 2
    assert w.shim.stale_tree is not flush
    w.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    if mode == "in_place" or not flush:
        w.scheduler.abort_request(types.SimpleNamespace(rid="", abort_all=True, abort_message=None, finished_reason=None))
        w.until(lambda: w.scheduler.is_fully_idle() and not w.stream.work, what="idle")
        w.mixed = False
        offers = w.shim.counts["offers"]
        if not flush:
            w.run(w.request(words(seed + 3, 300), new=4))
            assert w.shim.counts["offers"] == offers, "a stale tree offers nothing"
        w.flush()
    else:
        # What it finds of the other was computed by the new weights: the oracle looks at it.
        w.run(second, waiting)
        assert w.admitted_prefix[waiting.rid] == 0, "nothing of the old weights comes back"
    settle(w)
    w.flush()
    third = w.request(prompt + [1], new=4)
    w.run(third)
    assert w.admitted_prefix[third.rid] in ((0,) if mode == "in_place" or not flush else (0, 640))
    settle(w)
    w.flush()
    fourth = w.request(prompt + [1], new=4)
    w.run(fourth)
    assert w.admitted_prefix[fourth.rid] == 640, "and what the new ones compute does"
    settle(w)
    w.check()


def test_a_retracted_request_comes_back_right(world: Any, shared_daemon: Any, seed: int, monkeypatch: Any) -> None:
    w = world(shared_daemon, page_size=64, rows=576, slots=40, max_running=4)
    w.scheduler.new_token_ratio_tracker.current = w.scheduler.new_token_ratio_tracker.min = 0.01
    retracted = []
    original = w.scheduler.running_batch.__class__.retract_decode

    def retract(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        retracted.extend(result[0])
        return result

    monkeypatch.setattr(w.scheduler.running_batch.__class__, "retract_decode", retract)
    prompts = [words(seed + i, 100) for i in range(3)]
    requests = [w.request(p, new=180) for p in prompts]
    w.run(*requests, seconds=60)
    assert retracted, "nothing was retracted"
    settle(w)
    w.check()
    for prompt, first in zip(prompts, requests):
        w.flush()
        again = w.request(prompt + list(first.output_ids)[:100], new=4)
        w.run(again)
        assert w.admitted_prefix[again.rid] >= 64
        settle(w)


@pytest.mark.parametrize(("mode", "slots"), SPARSE)
def test_no_spare_slots(world: Any, shared_daemon: Any, mode: dict[str, Any], slots: int, seed: int) -> None:
    """As many slots as SGLang gives by default for so many requests: none to spare."""
    w = world(shared_daemon, max_running=2, slots=slots, **mode)
    talks = []
    for i in range(6):
        first = w.request(words(seed + i, 300), new=4)
        w.run(first)
        settle(w)
        talks.append(list(first.origin_input_ids) + list(first.output_ids))
    w.flush()
    # They go on from where they ended: the state of a prompt alone may be superseded before it was wanted.
    again = [w.request(talk + [1], new=6) for talk in talks]
    w.run(*again, seconds=60)
    restored = [w.admitted_prefix[request.rid] for request in again]
    assert restored == [256 if w.extra_buffer else 303] * 6, w.shim.counts
    assert w.shim.counts["restore_used"] == 6
    settle(w)
    w.check()


@pytest.mark.parametrize(("mode", "slots"), SPARSE)
def test_32_conversations_in_pools_of_minimum_size(
    world: Any, daemon: Any, mode: dict[str, Any], slots: int, seed: int
) -> None:
    """Unique contents, restored in random order: no foreign byte (the oracle looks at every one)."""
    d = daemon(ram="16MiB")
    w = world(d, max_running=2, slots=slots, rows=1536, **mode)
    rng = random.Random(seed)
    talks = {i: words(seed + i, rng.randrange(150, 400)) for i in range(32)}
    for turn in range(3):
        order = list(talks)
        rng.shuffle(order)
        for i in range(0, len(order), 2):
            pair = order[i : i + 2]
            requests = {n: w.request(talks[n], new=5, session=f"talk-{n}") for n in pair}
            w.run(*requests.values(), seconds=60)
            for n, request in requests.items():
                talks[n] = talks[n] + list(request.output_ids) + words(seed * 7 + n + turn, 40)
    settle(w)
    w.check()
    assert w.shim.counts["restore_used"] >= 40


def test_a_ring_that_holds_almost_nothing(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings={"ring_bytes": 1}, **MODE)
    prompts = [words(seed + i, 500) for i in range(4)]
    w.run(*[w.request(p, new=4) for p in prompts])
    settle(w)
    w.flush()
    again = [w.request(p + [1], new=4) for p in prompts]
    w.run(*again)
    settle(w)
    w.check()
    assert w.shim.session.ring.space.taken == 0


def test_ring_and_locks_are_given_back(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, **MODE)
    prompts = [words(seed + i, 700) for i in range(6)]
    for _ in range(2):
        w.run(*[w.request(p, new=4) for p in prompts], seconds=60)
        settle(w)
        w.flush()
    w.until(lambda: not w.shim._retired)
    shim = w.shim
    assert shim.session.ring.space.taken == 0
    assert not shim.restores and not shim.saves and not shim.outbox and not shim.requests
    assert w.tree.full_protected_size() == 0 and w.tree.mamba_protected_size() == 0


def test_a_rejected_request_of_the_same_rid_ends_nothing(world: Any, shared_daemon: Any, seed: int) -> None:
    """It is turned away at the door, while the first one of that name is restored."""
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    saved(w, prompt)
    first = w.request(prompt + [1, 2, 3], new=4, rid="same")
    known = w.shim.requests["same"]
    w.scheduler.max_queued_requests = 1
    w.request(words(seed + 1, 300), new=4, rid="same")
    assert w.scheduler.waiting_queue == [first] and w.aborted == ["same"]
    assert w.shim.requests["same"] is known and w.shim.restores == [known.restore]
    w.scheduler.max_queued_requests = None
    w.run(first)
    assert w.admitted_prefix["same"] == 640
    settle(w)
    w.check()
