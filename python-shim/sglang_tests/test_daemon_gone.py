"""The daemon killed, stopped and restarted in every state of both machines: SGLang never notices.

In each case the requests end with the right bytes, SGLang's own accounting holds, the shim attaches
again by itself, and whatever the daemon then has is whole: a next turn restores right bytes or none.
"""

from __future__ import annotations

from typing import Any

import pytest

from engram_sglang.restore import Restore, RestoreState
from engram_sglang.save import Save, SaveState
from test_turns import settle, words

HOW = ["kill", "stop", "restart"]
# A save that ended is over for the shim; a request that ended too.
SAVE_STATES = [s for s in SaveState if s is not SaveState.ENDED]
RESTORE_STATES = [s for s in RestoreState if s is not RestoreState.ENDED]


def strike(daemon: Any, how: str) -> None:
    """What befalls the daemon."""
    if how == "stop":
        daemon.pause()
    else:
        daemon.kill()


def recover(daemon: Any, how: str) -> None:
    """What is done about it, later."""
    if how == "stop":
        daemon.resume()
    else:
        daemon.start()


@pytest.fixture
def striking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `strike` at the moment a machine comes into a state, once."""

    def arm(machine: type, state: Any, act: Any) -> list[Any]:
        hits: list[Any] = []
        original = machine.step

        def step(self: Any, to: Any, now: float) -> None:
            original(self, to, now)
            if to is state and not hits:
                hits.append(self)
                act()

        monkeypatch.setattr(machine, "step", step)
        if machine is Save and state is SaveState.OFFERED:
            begin = Save.__init__

            def init(self: Any, *args: Any) -> None:
                begin(self, *args)
                if not hits:
                    hits.append(self)
                    act()

            monkeypatch.setattr(Save, "__init__", init)
        if machine is Restore and state is RestoreState.LOOKUP:
            begin_restore = Restore.__init__

            def init_restore(self: Any, *args: Any) -> None:
                begin_restore(self, *args)
                if not hits:
                    hits.append(self)
                    act()

            monkeypatch.setattr(Restore, "__init__", init_restore)
        return hits

    return arm


SETTINGS = {"silence_ms": 300, "lookup_ms": 10_000, "restore_ms": 20_000, "save_ms": 2000}
MODE = {"page_size": 64, "overlap": True, "lag": 2}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", SAVE_STATES, ids=lambda s: s.value)
def test_in_every_state_of_a_save(world: Any, daemon: Any, striking: Any, state: SaveState, how: str, seed: int) -> None:
    d = daemon()
    w = world(d, settings=SETTINGS, **MODE)
    prompt = words(seed, 700)
    # Something is there already, that must not be lost.
    before = words(seed + 1, 300)
    w.run(w.request(before, new=4))
    settle(w)
    hits = striking(Save, state, lambda: strike(d, how))
    first = w.request(prompt, new=8)
    w.run(first)
    assert hits, f"no save came into {state.value}"
    if how == "restart":
        recover(d, how)
    w.until(lambda: not w.shim.saves, what="saves end without the daemon")
    # It serves on, attached or not.
    w.run(w.request(words(seed + 2, 200), new=4))
    w.check()
    if how != "restart":
        w.until(lambda: w.shim.session is None, what="leaving")
        recover(d, how)
    w.until(lambda: w.shim.session is not None and w.shim.counts["sessions"] > 1, what="attaching again")
    settle(w)
    w.flush()
    second = w.request(prompt + list(first.output_ids) + [1, 2, 3], new=8)
    other = w.request(before + [5], new=4)
    w.run(second, other)
    assert w.admitted_prefix[second.rid] in (0, 512, 640)
    if how == "stop":
        assert w.admitted_prefix[other.rid] == 256
    settle(w)
    w.check()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", RESTORE_STATES, ids=lambda s: s.value)
def test_in_every_state_of_a_restore(
    world: Any, daemon: Any, striking: Any, state: RestoreState, how: str, seed: int
) -> None:
    d = daemon()
    w = world(d, settings=SETTINGS, **MODE)
    prompt = words(seed, 700)
    first = w.request(prompt, new=8)
    w.run(first)
    settle(w)
    w.until(lambda: d.has_durable(640), what="written down")
    w.flush()
    hits = striking(Restore, state, lambda: strike(d, how))
    second = w.request(prompt + list(first.output_ids) + [1, 2, 3], new=8)
    beside = w.request(words(seed + 3, 100), new=8)
    w.run(second, beside)
    assert hits, f"no restore came into {state.value}"
    placed = state is RestoreState.PLACED
    assert w.admitted_prefix[second.rid] in ((640,) if placed else (0, 640))
    if how == "restart":
        recover(d, how)
    w.until(lambda: not w.shim.restores and not w.shim.saves, what="all ends without the daemon")
    w.check()
    if how != "restart":
        w.until(lambda: w.shim.session is None, what="leaving")
        recover(d, how)
    w.until(lambda: w.shim.session is not None and w.shim.counts["sessions"] > 1, what="attaching again")
    settle(w)
    w.flush()
    third = w.request(prompt + list(first.output_ids) + [1, 2, 3, 4], new=8)
    w.run(third)
    assert w.admitted_prefix[third.rid] == 640, f"what was durable is not there: {w.shim.counts}"
    settle(w)
    w.check()


def test_absent_at_start_and_attached_when_it_appears(world: Any, daemon: Any, seed: int) -> None:
    d = daemon(start=False)
    w = world(None, settings={"daemon": d.target})
    prompt = words(seed, 300)
    w.run(w.request(prompt, new=4))
    assert w.shim.session is None
    d.start()
    w.until(lambda: w.shim.session is not None, what="attaching")
    # The state is still on the device: a hit offers it.
    w.run(w.request(prompt + [1], new=4))
    settle(w)
    assert w.shim.counts["save_ok"] >= 1
    w.flush()
    again = w.request(prompt + [2], new=4)
    w.run(again)
    assert w.admitted_prefix[again.rid] == 256
