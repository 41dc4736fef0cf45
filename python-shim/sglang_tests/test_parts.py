"""Prefixes that are larger than the staging ring: they come in parts, into rows that nobody else knows of meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engram_sglang._channel_layout import Filled, Status
from engram_sglang.restore import RestoreState
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from test_daemon_gone import HOW, recover, strike
from test_ranks import pairs  # noqa: F401
from test_turns import MODES, settle, words

# A block of KV is 128 KiB here: four fill the ring, and a prefix of 6000 tokens has six.
RING = 512 << 10
SIZE = {"rows": 20_480, "context": 8192, "chunk": 8192}
MODE = {"page_size": 64, "overlap": True, "lag": 2, **SIZE}
PROMPT, BOUNDARY = 6000, 5952
PATIENCE = {"ring_bytes": RING, "lookup_ms": 20_000, "restore_ms": 20_000, "save_ms": 20_000, "hold_ms": 20_000}


def saved(w: Any, prompt: list[int]) -> Any:
    """A first turn, saved and flushed. It has one state, so that nothing is dropped for want of room in the ring."""
    first = w.request(prompt, new=1)
    w.run(first)
    settle(w)
    w.flush()
    return first


def at_part(w: Any, number: int, act: Callable[[Any], None]) -> list[Any]:
    """Calls `act` when so many parts of a restore moved on and the next ones are under way, once."""
    hits: list[Any] = []
    moved = [0]
    move_on = w.shim.move_on

    def moves(restore: Any, runs: list[Any]) -> Any:
        event = move_on(restore, runs)
        moved[0] += len(runs)
        if moved[0] >= number and not hits:
            hits.append(restore)
            act(restore)
        return event

    w.shim.move_on = moves
    return hits


class Late:
    """Answers about pieces come late, from the part of the restore on that `hits` tell."""

    def __init__(self, w: Any, hits: list[Any]) -> None:
        self._filled, self.messages = w.shim._on_filled, list[Any]()
        self._handlers = w.shim._handlers
        self._handlers[Filled] = lambda m: self.messages.append(m) if hits else self._filled(m)

    def release(self) -> None:
        """They come now."""
        self._handlers[Filled] = self._filled
        for message in self.messages:
            self._filled(message)


def under_way(w: Any, restore: Any) -> None:
    """It has rows, which SGLang must not miss, and parts are still to come."""
    assert restore.state is RestoreState.FILLING and restore.stock is not None
    assert restore.next < restore.parts.count or any(run.open for run in restore.runs)
    assert w.shim.is_busy() and not w.scheduler.is_fully_idle()


@pytest.mark.parametrize("mode", MODES)
def test_it_comes_back_whole(world: Any, shared_daemon: Any, mode: dict[str, Any], seed: int) -> None:
    w = world(shared_daemon, settings=PATIENCE, **mode, **SIZE)
    prompt = words(seed, PROMPT)
    first = saved(w, prompt)
    hits = at_part(w, 1, lambda restore: under_way(w, restore))
    second = w.request(prompt + list(first.output_ids) + words(seed + 1, 50), new=8)
    w.run(second)
    expected = BOUNDARY if w.extra_buffer else PROMPT
    assert w.admitted_prefix[second.rid] == expected, w.shim.counts
    assert w.shim.counts["tokens_reused"] == expected and w.shim.counts["parts_restored"] >= 3 and hits
    settle(w)
    w.check()
    assert w.shim.session.ring.space.taken == 0


def test_of_what_the_device_has_nothing_comes_again(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings=PATIENCE, **MODE)
    prompt = words(seed, PROMPT + 1000)
    w.run(w.request(prompt[:1500], new=4))
    settle(w)
    first = saved(w, prompt)
    w.run(w.request(prompt[:1400], new=4))
    settle(w)
    second = w.request(prompt + list(first.output_ids), new=4)
    w.run(second)
    assert w.admitted_prefix[second.rid] == 6976, w.shim.counts
    settle(w)
    w.check()


def test_several_at_once_and_a_small_one(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings=PATIENCE, **MODE)
    prompts = [words(seed + i, count) for i, count in enumerate((PROMPT, 700, PROMPT + 64, 300))]
    for prompt in prompts:
        saved(w, prompt)
    again = [w.request(prompt + [1, 2, 3], new=4) for prompt in prompts]
    w.run(*again, seconds=60)
    assert [w.admitted_prefix[r.rid] for r in again] == [5952, 640, 6016, 256], w.shim.counts
    settle(w)
    w.check()


def test_somebody_else_computes_some_of_it_meanwhile(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings={**PATIENCE, "minimum_tokens": 3000}, **MODE)
    prompt = words(seed, PROMPT)
    saved(w, prompt)
    hits = at_part(w, 1, lambda restore: None)
    late = Late(w, hits)
    second = w.request(prompt + [1, 2, 3], new=4)
    w.until(lambda: late.messages, what="the second part")
    under_way(w, hits[0])
    # It has the same tokens for a while, too few to ask for.
    other = w.request(prompt[:2500], new=4)
    w.until(other.finished, what="the other one")
    assert w.shim.tree.full_match(w.shim.tree.key(hits[0].request, BOUNDARY))[0] > hits[0].stock.have
    late.release()
    w.run(second)
    assert w.admitted_prefix[second.rid] == BOUNDARY, w.shim.counts
    settle(w)
    w.check()


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("part", [1, 2])
def test_abort(world: Any, shared_daemon: Any, part: int, lag: int, seed: int) -> None:
    """Its rows are used by others at once, and copies into them that are queued still do no harm."""
    w = world(shared_daemon, settings=PATIENCE, **{**MODE, "rows": 8192})
    prompt = words(seed, PROMPT)
    saved(w, prompt)
    w.copier.lag = lag
    hits = at_part(w, part, lambda restore: None)
    late = Late(w, hits)
    second = w.request(prompt + [1, 2, 3], new=4)
    w.until(lambda: hits, what="the part")
    under_way(w, hits[0])
    w.abort(second.rid)
    assert not w.shim.restores and hits[0].stock is None and not w.shim.is_busy()
    w.run(w.request(words(seed + 1, 7000), new=4))
    late.release()
    w.until(lambda: w.shim.session.ring.space.taken == 0 and not w.shim.saves, what="room in the ring")
    w.check()
    w.flush()
    third = w.request(prompt + [1, 2, 3], new=4)
    w.run(third)
    assert w.admitted_prefix[third.rid] == BOUNDARY
    settle(w)
    w.check()


def test_the_daemon_loses_a_piece(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings=PATIENCE, **MODE)
    prompt = words(seed, PROMPT)
    saved(w, prompt)
    hits = at_part(w, 2, lambda restore: under_way(w, restore))
    filled = w.shim._on_filled
    w.shim._handlers[Filled] = lambda m: filled(m._replace(status=Status.LOST) if hits else m)
    second = w.request(prompt + [1, 2, 3], new=4)
    w.run(second)
    assert w.admitted_prefix[second.rid] == 0 and w.shim.counts["restore_fill_failed"] == 1
    w.until(lambda: not w.shim.restores and not w.shim.saves, what="the end")
    w.check()


@pytest.mark.parametrize("how", ["pause", "weights"])
def test_flush(world: Any, shared_daemon: Any, how: str, seed: int) -> None:
    w = world(shared_daemon, settings=PATIENCE, **MODE)
    prompt = words(seed, PROMPT)
    saved(w, prompt)
    hits = at_part(w, 2, lambda restore: None)
    late = Late(w, hits)
    second = w.request(prompt + [1, 2, 3], new=4)
    w.until(lambda: hits, what="the second part")
    restore = hits[0]
    under_way(w, restore)
    if how == "weights":
        w.shim.weights_change()
        assert restore.stock is None and restore.state is RestoreState.ENDED
        w.shim.weights_changed(bytes([seed % 251] * 32))
        w.shim.reset()
    else:
        w.scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        w.tree.reset()
        w.req_pool.clear()
        w.allocator.clear()
        w.scheduler.continue_generation(ContinueGenerationReqInput())
        assert restore.stock is None
    late.release()
    w.run(second)
    assert w.admitted_prefix[second.rid] in (0, BOUNDARY)
    w.until(lambda: not w.shim.restores and not w.shim.saves, what="the end")
    w.check()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("part", [1, 2])
def test_the_daemon_goes(world: Any, daemon: Any, part: int, how: str, seed: int) -> None:
    d = daemon()
    w = world(d, settings=PATIENCE, **MODE)
    prompt = words(seed, PROMPT)
    first = saved(w, prompt)
    w.until(lambda: d.has_durable(BOUNDARY), what="written down")
    hits = at_part(w, part, lambda restore: strike(d, w, how))
    second = w.request(prompt + list(first.output_ids) + [1, 2, 3], new=8)
    beside = w.request(words(seed + 3, 100), new=8)
    w.run(second, beside, seconds=60)
    assert hits and w.admitted_prefix[second.rid] in (0, BOUNDARY)
    assert hits[0].stock is None
    if how == "restart":
        recover(d, w, how)
    w.until(lambda: not w.shim.restores and not w.shim.saves, what="all ends without the daemon")
    w.check()
    if how != "restart":
        w.until(lambda: w.shim.session is None, what="leaving")
        recover(d, w, how)
    w.until(lambda: w.shim.session is not None and w.shim.counts["sessions"] > 1, what="attaching again")
    settle(w)
    w.flush()
    third = w.request(prompt + list(first.output_ids) + [1, 2, 3, 4], new=8)
    w.run(third, seconds=60)
    assert w.admitted_prefix[third.rid] == BOUNDARY, f"what was durable is not there: {w.shim.counts}"
    settle(w)
    w.check()


def test_no_rows_for_it(world: Any, shared_daemon: Any, seed: int) -> None:
    """What runs needs the rows: it waits, and comes when there are some."""
    w = world(shared_daemon, settings=PATIENCE, **{**MODE, "rows": 8192})
    prompt = words(seed, PROMPT)
    saved(w, prompt)
    long = w.request(words(seed + 1, 2000), new=200)
    w.until(lambda: len(long.output_ids) > 1, what="the other one")
    restored = w.shim.take_stock
    places: list[Any] = []

    def noted(restore: Any) -> Any:
        places.append(restored(restore))
        return places[-1]

    w.shim.take_stock = noted
    second = w.request(prompt + [1, 2, 3], new=4)
    w.run(long, second, seconds=60)
    assert w.admitted_prefix[second.rid] == BOUNDARY, w.shim.counts
    assert [place.value for place in places if place.value != "no_room"] == ["done"] and len(places) > 1
    settle(w)
    w.check()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["parts", "parts_of_one"])
def test_two_ranks(name: str, pairs: Any, daemon: Any, seed: int) -> None:  # noqa: F811
    pairs().play(name, daemon(ram="256MiB"), seed)
