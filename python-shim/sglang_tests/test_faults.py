"""What is wrong in the shim or in the daemon never reaches the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from engram_sglang.shim import Shim
from test_turns import settle, words

MODE = {"page_size": 64, "overlap": True, "lag": 1}
INNER = [
    "_hear", "_pump_saves", "_pump_restores", "_offer", "_tell_tokens", "_ask", "_on_lookup_result", "_on_want",
    "_on_filled", "_on_drained", "_on_saved", "place", "_scatter", "gather_kv", "release", "_close", "_pump_closing",
]


@pytest.mark.parametrize("inner", INNER)
def test_a_fault_anywhere_is_the_end_of_the_session_only(world: Any, shared_daemon: Any, inner: str, seed: int, monkeypatch: Any) -> None:
    w = world(shared_daemon, **MODE)
    prompt = words(seed, 700)
    first = w.request(prompt, new=4)
    w.run(first)
    settle(w)
    w.flush()
    original = getattr(Shim, inner)
    faults = []

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not faults:
            faults.append(inner)
            raise RuntimeError("on purpose")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Shim, inner, broken)
        # Handlers were bound when the shim was made.
        for kind, handler in w.shim._handlers.items():
            if handler.__name__ == inner:
                patch.setitem(w.shim._handlers, kind, lambda m: broken(w.shim, m))
        second = w.request(prompt + [1, 2, 3], new=4)
        third = w.request(words(seed + 1, 300), new=4)
        w.run(second, third)
        w.until(lambda: faults, what=f"{inner} was called")
    w.until(lambda: w.shim.session is not None, what="attaching again")
    settle(w)
    w.check()
    assert w.shim.counts["faults"] == 1
    w.flush()
    fourth = w.request(prompt + [1, 2, 3], new=4)
    w.run(fourth)
    assert w.admitted_prefix[fourth.rid] == 640
    settle(w)
    w.check()
    w.shim.counts["faults"] = 0


def test_off_after_three(world: Any, daemon: Any, seed: int, monkeypatch: Any) -> None:
    d = daemon()
    w = world(d, **MODE)
    prompt = words(seed, 300)
    w.run(w.request(prompt, new=4))
    settle(w)
    w.flush()

    def broken(self: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Shim, "_adopt", broken)
    monkeypatch.setattr(Shim, "_flush", broken)
    second = w.request(prompt + [1], new=4)
    w.run(second)
    for _ in range(20):
        w.step()
    assert w.shim.off
    w.run(w.request(prompt + [2], new=4))
    w.check()
    w.shim.counts["faults"] = 0
    # Nobody looks after a session any more: there is none, and no ring.
    link = w.shim.link
    w.until(lambda: link.state == "closed" and not link._thread.is_alive(), what="the end of all tries")
    w.until(lambda: d.get("/v1/workers")["workers"] == [], what="no worker at the daemon")


def test_faults_of_long_ago_do_not_count(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, **MODE)
    ahead = [0.0]
    clock = w.shim._clock
    w.shim._clock = lambda: clock() + ahead[0]
    for number in range(1, 5):
        w.shim._fault("on purpose")
        assert not w.shim.off and w.shim.counts["faults"] == number
        ahead[0] += 3000.0
        w.until(lambda: w.shim.session is not None, what="attaching again")
    w.shim._fault("on purpose")
    assert not w.shim.off, "two of them are within an hour"
    w.shim._fault("on purpose")
    assert w.shim.off
    w.shim.counts["faults"] = 0
