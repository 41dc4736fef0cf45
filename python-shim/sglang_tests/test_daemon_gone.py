"""The daemon killed, stopped and restarted in every state of both machines: SGLang never notices.

In each case the requests end with the right bytes, SGLang's own accounting holds, the shim attaches
again by itself, and whatever the daemon then has is whole: a next turn restores right bytes or none.
Nothing of the session that is over has an effect later: not on the pools, not on what the daemon has.

Configurations (`CONFIGURATIONS`): pages of 1 and of 64, with and without a buffer (SGLang allows none with larger pages),
overlap or not, and each of SGLang's tree cores at least once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conftest import World
from engram_sglang.restore import Restore, RestoreState
from engram_sglang.save import Save, SaveState
from test_turns import settle, words

HOW = ["kill", "stop", "restart"]
# A save that ended is over for the shim; a request that ended too.
SAVE_STATES = [s for s in SaveState if s is not SaveState.ENDED]
RESTORE_STATES = [s for s in RestoreState if s is not RestoreState.ENDED]


def strike(daemon: Any, w: Any, how: str) -> None:
    """What befalls the daemon."""
    if how == "stop":
        daemon.pause()
        # Only now: on a busy machine a daemon that is well may be silent for so long, too.
        w.shim.settings = dataclasses.replace(w.shim.settings, silence_ms=300)
    else:
        daemon.kill()


def recover(daemon: Any, w: Any, how: str) -> None:
    """What is done about it, later."""
    if how == "stop":
        w.shim.settings = dataclasses.replace(w.shim.settings, silence_ms=SETTINGS["silence_ms"])
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


SETTINGS = {"silence_ms": 10_000, "lookup_ms": 10_000, "restore_ms": 20_000, "save_ms": 2000}
FIRST, LAST = World.CORES[0], World.CORES[-1]
CONFIGURATIONS = [
    pytest.param(FIRST, {"page_size": 64, "overlap": True, "lag": 2}, id=f"{FIRST}-page64-overlap"),
    pytest.param(LAST, {"page_size": 1, "extra_buffer": False}, id=f"{LAST}-page1-no_buffer"),
    pytest.param(LAST, {"page_size": 1, "overlap": True, "lag": 2}, id=f"{LAST}-page1-overlap"),
]
configurations = pytest.mark.parametrize(("world", "mode"), CONFIGURATIONS, indirect=["world"])


def deepest(w: Any, prompt: int, new: int) -> int:
    """Where the deepest state of a finished request is."""
    return prompt // 64 * 64 if w.extra_buffer else prompt + new - 1


class Past:
    """What the session that is over must leave alone from now on."""

    def __init__(self, w: Any) -> None:
        w.until(lambda: not w.stream.work, what="the device")
        self._w, self._pools = w, self._bytes(w)

    @staticmethod
    def _bytes(w: Any) -> list[Any]:
        pools = w.pools
        sides = [side for layer in pools.kv for side in (layer.k, layer.v) if side is not None]
        return [tensor.clone() for tensor in (*(state.bytes for state in pools.state), *sides)]

    def check(self, daemon: Any, seed: int) -> None:
        """Attached again: neither did a byte of the pools change, nor does the daemon come to have more."""
        w = self._w
        w.until(lambda: not w.stream.work, what="the device")
        assert all(a.equal(b) for a, b in zip(self._pools, self._bytes(w), strict=True)), "a late write into a pool"
        before = self._rows(daemon)
        # A whole save in the new session comes after all that the daemon could still do for the old one.
        w.run(w.request(words(seed, 200), new=4, session="after"))
        settle(w)
        assert w.shim.counts["save_ok"] >= 1
        late = {row: what for row, what in self._rows(daemon).items() if what != "after"}
        assert late == {row: what for row, what in before.items() if what != "after"}, "a late commit"

    @staticmethod
    def _rows(daemon: Any) -> dict[str, str]:
        return {row["snapshot_id"]: row["conversation_id"] for row in daemon.get("/v1/snapshots?limit=1000")["snapshots"]}


@configurations
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", SAVE_STATES, ids=lambda s: s.value)
def test_in_every_state_of_a_save(
    world: Any, daemon: Any, striking: Any, mode: dict[str, Any], state: SaveState, how: str, seed: int
) -> None:
    d = daemon()
    w = world(d, settings=SETTINGS, **mode)
    prompt = words(seed, 700)
    # Something is there already, that must not be lost.
    early = w.request(words(seed + 1, 300), new=4)
    w.run(early)
    before = list(early.origin_input_ids) + list(early.output_ids)
    settle(w)
    hits = striking(Save, state, lambda: strike(d, w, how))
    first = w.request(prompt, new=8)
    w.run(first)
    w.until(lambda: hits, what=f"a save {state.value}")
    if how == "restart":
        recover(d, w, how)
    w.until(lambda: not w.shim.saves, what="saves end without the daemon")
    # It serves on, attached or not.
    w.run(w.request(words(seed + 2, 200), new=4))
    w.check()
    if how != "restart":
        w.until(lambda: w.shim.session is None, what="leaving")
        past = Past(w)
        recover(d, w, how)
    w.until(lambda: w.shim.session is not None and w.shim.counts["sessions"] > 1, what="attaching again")
    settle(w)
    if how != "restart":
        past.check(d, seed + 4)
    w.flush()
    second = w.request(prompt + list(first.output_ids) + [1, 2, 3], new=8)
    other = w.request(before + [5], new=4)
    w.run(second, other)
    assert w.admitted_prefix[second.rid] in (0, 512, 640, 700, deepest(w, 700, 8))
    if how == "stop":
        assert w.admitted_prefix[other.rid] == deepest(w, 300, 4)
    settle(w)
    w.check()


@configurations
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("state", RESTORE_STATES, ids=lambda s: s.value)
def test_in_every_state_of_a_restore(
    world: Any, daemon: Any, striking: Any, mode: dict[str, Any], state: RestoreState, how: str, seed: int
) -> None:
    d = daemon()
    w = world(d, settings=SETTINGS, **mode)
    boundary = deepest(w, 700, 8)
    prompt = words(seed, 700)
    first = w.request(prompt, new=8)
    w.run(first)
    settle(w)
    w.until(lambda: d.has_durable(boundary), what="written down")
    w.flush()
    hits = striking(Restore, state, lambda: strike(d, w, how))
    second = w.request(prompt + list(first.output_ids) + [1, 2, 3], new=8)
    beside = w.request(words(seed + 3, 100), new=8)
    w.run(second, beside)
    assert hits, f"no restore came into {state.value}"
    placed = state is RestoreState.PLACED
    assert w.admitted_prefix[second.rid] in ((boundary,) if placed else (0, boundary))
    if how == "restart":
        recover(d, w, how)
    w.until(lambda: not w.shim.restores and not w.shim.saves, what="all ends without the daemon")
    w.check()
    if how != "restart":
        w.until(lambda: w.shim.session is None, what="leaving")
        past = Past(w)
        recover(d, w, how)
    w.until(lambda: w.shim.session is not None and w.shim.counts["sessions"] > 1, what="attaching again")
    settle(w)
    if how != "restart":
        past.check(d, seed + 4)
    w.flush()
    third = w.request(prompt + list(first.output_ids) + [1, 2, 3, 4], new=8)
    w.run(third)
    assert w.admitted_prefix[third.rid] == boundary, f"what was durable is not there: {w.shim.counts}"
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
