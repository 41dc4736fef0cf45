"""A flush, new weights and a pause while a save or a restore is under way, in each of their states.

The daemon's answers come when all is over: nothing of them may have an effect then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import World
from engram_sglang._channel_layout import AbortReason
from engram_sglang.restore import RestoreState
from engram_sglang.save import SaveState
from held import PATIENCE, Held
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from test_turns import settle, words

MODES = [
    pytest.param({"page_size": 64, "overlap": True, "lag": 2}, id="page64-overlap"),
    pytest.param({"page_size": 1, "extra_buffer": False}, id="page1-no_buffer"),
]
SAVE_STATES = [s for s in SaveState if s is not SaveState.ENDED]
RESTORE_STATES = [s for s in RestoreState if s is not RestoreState.ENDED]
PAUSES = ["in_place", "retract"]

save_states = pytest.mark.parametrize("state", SAVE_STATES, ids=lambda s: s.value)
restore_states = pytest.mark.parametrize("state", RESTORE_STATES, ids=lambda s: s.value)
pauses = pytest.mark.parametrize("how", PAUSES)


@pytest.fixture(params=MODES)
def w(world: Any, shared_daemon: Any, request: pytest.FixtureRequest) -> Any:
    """A server that gives nothing up."""
    return world(shared_daemon, settings=PATIENCE, **request.param)


@pytest.fixture
def prompt(seed: int) -> list[int]:
    """What is said first."""
    return words(seed, 700)


@pytest.fixture
def first(w: Any, prompt: list[int]) -> Any:
    """A first turn, at the daemon and nowhere else."""
    turn = w.request(prompt, new=8)
    w.run(turn)
    settle(w)
    w.flush()
    return turn


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    """Holds machines, and lets go at the end whatever happens."""
    made: list[Held] = []

    def make(w: Any, state: Any) -> Held:
        made.append(Held(w, state))
        return made[-1]

    yield make
    for held in made:
        held._patch.undo()


def deepest(w: Any, prompt: int, new: int) -> int:
    """Where the deepest state of a finished request is: less than 256 tokens after the prompt."""
    return prompt // 64 * 64 if w.extra_buffer else prompt + new - 1


def pause(w: Any, how: str) -> None:
    """`/pause_generation`, and what is on the device is done."""
    w.scheduler.pause_generation(PauseGenerationReqInput(mode=how))
    for _ in range(5):
        w.step()
    w.until(lambda: not w.stream.work)


def go_on(w: Any) -> None:
    """`/continue_generation`."""
    w.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


def next_turn(w: Any, hold: Any, state: RestoreState, first: Any) -> tuple[Held, Any]:
    """The turn after `first`, whose restore is held in the state."""
    held = hold(w, state)
    second = w.request(list(first.origin_input_ids) + list(first.output_ids) + [1, 2, 3], new=4)
    held.wait()
    return held, second


def comes_back(w: Any, prompt: list[int]) -> None:
    """With all that was under way over, the prompt is saved and restored as ever."""
    settle(w)
    w.flush()
    first = w.request(prompt, new=8)
    w.run(first)
    settle(w)
    w.flush()
    second = w.request(prompt + list(first.output_ids) + [1, 2, 3], new=4)
    w.run(second)
    assert w.admitted_prefix[second.rid] == deepest(w, len(prompt), 8), w.shim.counts
    settle(w)
    w.check()
    w.until(lambda: not w.shim._retired)
    assert w.shim.session.ring.space.taken == 0


# --- Saves ---


@save_states
def test_flush_with_a_save(w: Any, prompt: list[int], hold: Any, state: SaveState, seed: int) -> None:
    held = hold(w, state)
    first = w.request(prompt, new=8)
    w.run(first)
    held.wait_for_all()
    w.flush()
    w.check()
    held.release()
    settle(w)
    second = w.request(prompt + list(first.output_ids) + [1], new=4)
    w.run(second)
    # What lay whole in the ring is saved all the same.
    whole = state in (SaveState.DRAINING, SaveState.SETTLING)
    assert w.admitted_prefix[second.rid] == (deepest(w, 700, 8) if whole else 0)
    comes_back(w, words(seed + 1, 700))


@save_states
def test_new_weights_with_a_save(w: Any, prompt: list[int], hold: Any, state: SaveState, seed: int) -> None:
    held = hold(w, state)
    first = w.request(prompt, new=8)
    w.run(first)
    held.wait_for_all()
    result = w.update_weights(seed + 700_000)
    assert result.success, result.message
    assert not w.shim.saves, "a save of the old weights goes on"
    held.release()
    second = w.request(prompt + list(first.output_ids) + [1], new=4)
    w.run(second)
    assert w.admitted_prefix[second.rid] == 0, "a state of the old weights came back"
    comes_back(w, prompt)


@save_states
@pauses
def test_pause_with_a_save(w: Any, prompt: list[int], hold: Any, state: SaveState, how: str, seed: int) -> None:
    held = hold(w, state)
    first = w.request(prompt, new=40)
    held.wait()
    pause(w, how)
    # What is retracted begins anew, with what it had generated as part of its prompt.
    # On a busy machine it may have ended meanwhile.
    had = len(first.output_ids) if how == "retract" and not first.finished() else 0
    held.release()
    go_on(w)
    w.run(first)
    settle(w)
    w.check()
    w.flush()
    second = w.request(prompt + list(first.output_ids) + [1], new=4)
    w.run(second)
    assert w.admitted_prefix[second.rid] == deepest(w, 700 + had, 40 - had)
    comes_back(w, words(seed + 1, 700))


# --- Restores ---


@restore_states
def test_flush_with_a_restore(w: Any, first: Any, hold: Any, state: RestoreState, seed: int) -> None:
    held, second = next_turn(w, hold, state, first)
    pause(w, "retract")
    flushed = w.scheduler.flush_cache(empty_cache=False)
    assert flushed is World.FLUSHES_WHILE_WAITING
    go_on(w)
    held.release()
    w.run(second)
    assert w.admitted_prefix[second.rid] == (0 if flushed else deepest(w, 700, 8))
    comes_back(w, words(seed + 1, 700))


@restore_states
def test_new_weights_with_a_restore(w: Any, first: Any, hold: Any, state: RestoreState, seed: int) -> None:
    held, second = next_turn(w, hold, state, first)
    pause(w, "retract")
    flush = World.FLUSHES_WHILE_WAITING
    # Without a flush the server keeps what is in its tree, restored or not, and goes on with both.
    w.mixed = not flush
    result = w.update_weights(seed + 700_000, flush=flush)
    assert result.success, result.message
    go_on(w)
    held.release()
    w.run(second)
    kept = state is RestoreState.PLACED and not flush
    assert w.admitted_prefix[second.rid] == (deepest(w, 700, 8) if kept else 0)
    settle(w)
    w.flush()
    w.mixed = False
    third = w.request(list(second.origin_input_ids) + list(second.output_ids) + [1], new=4)
    w.run(third)
    # What began with the new weights is saved for them, if nothing of the old ones can be in the tree.
    fresh = flush or state is RestoreState.LOOKUP
    assert w.admitted_prefix[third.rid] == (deepest(w, 711, 4) if fresh else 0)
    comes_back(w, words(seed + 1, 700))


@restore_states
@pauses
def test_pause_with_a_restore(w: Any, first: Any, hold: Any, state: RestoreState, how: str, seed: int) -> None:
    beside = w.request(words(seed + 2, 100), new=60)
    w.until(lambda: beside.rid in w.admitted_prefix, what="admission")
    held, second = next_turn(w, hold, state, first)
    pause(w, how)
    held.release()
    go_on(w)
    w.run(second, beside)
    assert w.admitted_prefix[second.rid] == deepest(w, 700, 8)
    comes_back(w, words(seed + 1, 700))


def test_room_of_an_aborted_save_is_the_daemon_s_until_it_answered(w: Any, prompt: list[int], hold: Any) -> None:
    """The daemon reads what it was lent, and does not know yet that nobody wants it."""
    held = hold(w, SaveState.DRAINING)
    w.request(prompt, new=8)
    held.wait()
    save = next(s for s in w.shim.saves.values() if s.state is SaveState.DRAINING)
    # All copies are queued; the first of them may not be over.
    w.until(lambda: any(run.lent for run in save.runs), what="something is lent")
    lent = [run.block for run in save.runs if run.lent]
    assert lent
    save.end(w.shim, AbortReason.SUPERSEDED, w.shim.now)
    w.shim._end_save(save, "superseded")
    taken = w.shim.session.ring.space._taken
    for _ in range(20):
        w.step()
    assert all(block in taken for block in lent)
    held.release()
    w.until(lambda: w.scheduler.is_fully_idle() and not w.shim.saves, what="idle")
    w.until(lambda: not taken, what="room is free")


def test_room_of_an_aborted_restore_is_the_daemon_s_until_it_answered(w: Any, first: Any, hold: Any) -> None:
    """The daemon writes to what it was asked to fill."""
    held, second = next_turn(w, hold, RestoreState.FILLING, first)
    (restore,) = w.shim.restores
    lent = [run.block for run in restore.runs if run.lent and run.open]
    assert lent
    w.abort(second.rid)
    taken = w.shim.session.ring.space._taken
    for _ in range(20):
        w.step()
    assert not w.shim.restores and all(block in taken for block in lent)
    held.release()
    w.until(lambda: not taken, what="room is free")
