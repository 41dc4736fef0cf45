"""The daemon hears of each request that it is over, and of each turn, whatever the channel has room for."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import World
from engram_sglang._channel_layout import TurnFinished
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from test_turns import settle, words

MODE = {"page_size": 64, "overlap": True, "lag": 2}
# Nothing of this depends on the tree.
ONE = pytest.mark.parametrize("world", World.CORES[:1], indirect=True)


def spy(w: Any) -> list[Any]:
    said: list[Any] = []
    tx = w.shim.session.end.tx
    push = tx.push

    def pushed(m: Any) -> bool:
        ok = push(m)
        if ok:
            said.append(m)
        return ok

    tx.push = pushed
    return said


def nothing_open(one: Any, w: Any) -> None:
    """Waits until the daemon has heard of all requests that they are over."""
    shim = w.shim
    w.until(lambda: not (shim.requests or shim._closing or shim.outbox), what="all said")
    w.until(lambda: one.get("/v1/workers")["workers"][0]["requests"] == 0, what="the end of all requests")


@ONE
def test_reopened_and_aborted(world: Any, daemon: Any, seed: int) -> None:
    """A request that the daemon knows is begun anew after a change of weights, and aborted before anything more is
    said of it: the daemon is told that it is over."""
    one = daemon()
    w = world(one, settings={"restore": False}, **MODE)
    r = w.request(words(seed, 700), new=200)
    w.until(lambda: w.shim.requests and next(iter(w.shim.requests.values())).opened is not None, what="opened")
    settle(w)
    w.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    for _ in range(5):
        w.step()
    w.until(lambda: not w.stream.work)
    w.update_weights(w.seed + 1, flush=World.FLUSHES_WHILE_WAITING)
    w.mixed = True
    w.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    w.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    request = w.shim.requests[r.rid]
    w.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    for _ in range(3):
        if w.shim.requests[r.rid].opened is None:
            break
        w.step()
    w.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    w.abort(r.rid)
    w.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    w.until(lambda: w.scheduler.is_fully_idle(), what="idle")
    assert not w.shim.requests
    nothing_open(one, w)


@ONE
def test_short_turn_with_a_full_outbox(world: Any, daemon: Any, seed: int) -> None:
    """Turns that end while the channel is full for a moment."""
    one = daemon()
    w = world(one, **MODE)
    said = spy(w)
    tx = w.shim.session.end.tx
    push, push_tokens = tx.push, tx.push_tokens
    tx.push, tx.push_tokens = (lambda m: False), (lambda *a: 0)
    rs = [w.request(words(seed + i, 30), new=4) for i in range(3)]
    w.run(*rs)
    tx.push, tx.push_tokens = push, push_tokens
    nothing_open(one, w)
    assert sum(isinstance(m, TurnFinished) for m in said) == 3


@ONE
def test_short_turn_behind_a_long_one(world: Any, daemon: Any, seed: int) -> None:
    """A turn that ends while the tokens of another are still being told in parts."""
    one = daemon()
    w = world(one, settings={"save": False, "restore": False}, rows=40000, context=36000, chunk=36000, page_size=64)
    said = spy(w)
    tx = w.shim.session.end.tx
    push_tokens = tx.push_tokens
    tx.push_tokens = lambda req, at, ids: push_tokens(req, at, memoryview(ids)[:2000])
    a = w.request(words(seed, 34000), new=1)
    b = w.request(words(seed + 1, 30), new=1)
    w.run(a, b, seconds=60)
    nothing_open(one, w)
    assert sum(isinstance(m, TurnFinished) for m in said) == 2
