"""What a save or a restore holds never keeps SGLang from what it counted on: neither its room, nor its admissions."""

from __future__ import annotations

from typing import Any

import pytest

from engram_sglang.restore import Restore, RestoreState
from engram_sglang.save import Save, SaveState
from held import Held
from test_daemon_gone import striking  # noqa: F401
from test_parts import PATIENCE as PARTS
from test_parts import Late, at_part, under_way
from test_turns import settle, words

MODE = {"page_size": 64, "overlap": True, "lag": 2}
# A ring that has room for states, and for no piece of KV: nothing that is asked for gets into it.
NO_RING = {"ring_bytes": 96 << 10, "save_ms": 20_000}


def unsaved(w: Any, prompt: list[int]) -> Any:
    """A request whose state is on the device, and that the daemon never heard of."""
    object.__setattr__(w.shim.settings, "save", False)
    request = w.request(prompt, new=4)
    w.run(request)
    object.__setattr__(w.shim.settings, "save", True)
    return request


def whole(request: Any) -> bool:
    """It got all the tokens that it asked for."""
    return request.finished() and len(request.output_ids) == request.sampling_params.max_new_tokens


def test_a_save_leaves_room_to_a_request_in_chunks(world: Any, shared_daemon: Any, seed: int) -> None:
    """It was admitted when what is saved now could still be evicted."""
    w = world(shared_daemon, settings=NO_RING, rows=4096, chunk=512, **MODE)
    prompt = words(seed, 2560)
    unsaved(w, prompt)
    long = w.request(words(seed + 1, 3000), new=4)
    w.until(lambda: w.scheduler.chunked_req is long, what="its first chunk")
    again = w.request(prompt + [7] * 50, new=2)
    assert w.shim.counts["offers"] == 1
    w.run(long, again)
    assert whole(long) and whole(again)
    w.check()


def test_a_save_leaves_room_to_what_decodes(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings=NO_RING, rows=2048, **MODE)
    w.scheduler.new_token_ratio_tracker.current = w.scheduler.new_token_ratio_tracker.min = 0.01
    prompt = words(seed, 1536)
    unsaved(w, prompt)
    long = w.request(words(seed + 1, 300), new=350)
    w.until(lambda: len(long.output_ids) > 2, what="decoding")
    # More than there is room for: it waits, and only its prefix is offered.
    waits = w.request(prompt + words(seed + 2, 300), new=4)
    w.until(lambda: any(save.state is SaveState.GATHERING for save in w.shim.saves.values()), what="gathering")
    w.run(long, waits, seconds=60)
    assert whole(long) and whole(waits)
    w.check()


@pytest.mark.parametrize("state", [SaveState.GATHERING, SaveState.DRAINING], ids=lambda s: s.value)
def test_the_daemon_stops_in_a_save(world: Any, daemon: Any, striking: Any, state: SaveState, seed: int) -> None:  # noqa: F811
    """A request that needs what is being saved is served at once, and a small one after it."""
    d = daemon()
    w = world(d, settings={"silence_ms": 20_000, "save_ms": 20_000, "lookup_ms": 100}, rows=4096, **MODE)
    hits = striking(Save, state, d.pause)
    w.run(w.request(words(seed, 2560), new=4))
    w.until(lambda: hits, what=state.value)
    large = w.request(words(seed + 1, 2900), new=4)
    w.run(large)
    small = w.request(words(seed + 2, 100), new=4)
    w.run(small)
    assert whole(large) and whole(small) and w.shim.session is not None and w.shim.saves
    w.check()
    d.resume()
    settle(w)
    w.check()


@pytest.mark.parametrize("stop", [False, True], ids=["runs", "stopped"])
def test_admission_goes_on_after_a_hold(
    world: Any, daemon: Any, striking: Any, stop: bool, seed: int  # noqa: F811
) -> None:
    """A request that does not fit beside what is held for another one waits for that, and no longer."""
    d = daemon()
    w = world(d, settings={"lookup_ms": 100, "silence_ms": 20_000, "save_ms": 500}, rows=4096, **MODE)
    prompt = words(seed, 2560)
    w.run(w.request(prompt, new=4))
    settle(w)
    w.flush()
    came = []

    def comes() -> None:
        if stop:
            d.pause()
        came.append(w.request(words(seed + 1, 2900), new=4))

    striking(Restore, RestoreState.PLACED, comes)
    held = Held(w, RestoreState.PLACED)
    try:
        second = w.request(prompt + [1, 2, 3], new=4)
        held.wait()
        assert w.shim.restores[0].hold is not None
        (large,) = came
        assert not w.scheduler.running_batch.reqs and large in w.scheduler.waiting_queue, "it found no room yet"
        w.until(lambda: whole(large), what="the large one")
        small = w.request(words(seed + 2, 100), new=4)
        w.until(lambda: whole(small), what="the small one")
    finally:
        held._patch.undo()
        if stop:
            d.resume()
    w.run(second)
    assert whole(second)
    settle(w)
    w.check()


def test_a_hold_ends_where_running_requests_need_its_room(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings={"hold_ms": 60_000}, rows=1728, **MODE)
    w.scheduler.new_token_ratio_tracker.current = w.scheduler.new_token_ratio_tracker.min = 0.01
    prompt = words(seed, 1300)
    w.run(w.request(prompt, new=4))
    settle(w)
    w.flush()
    held = Held(w, RestoreState.PLACED)
    try:
        long = w.request(words(seed + 1, 200), new=300)
        w.until(lambda: len(long.output_ids) > 2, what="decoding")
        second = w.request(prompt + [1, 2, 3], new=4)
        held.wait()
        assert w.shim.restores[0].hold is not None
        w.until(long.finished, 60, what="the long one")
        assert whole(long), long.finished_reason
    finally:
        held._patch.undo()
    w.run(second)
    assert whole(second) and w.shim.counts["holds_yielded"] == 1
    settle(w)
    w.check()


def test_rows_of_a_stream_are_given_where_running_requests_need_them(world: Any, shared_daemon: Any, seed: int) -> None:
    w = world(shared_daemon, settings={**PARTS, "restore_ms": 60_000}, rows=6400, context=8192, chunk=2048, **MODE)
    w.scheduler.new_token_ratio_tracker.current = w.scheduler.new_token_ratio_tracker.min = 0.01
    prompt = words(seed, 6000)
    w.run(w.request(prompt, new=4))
    settle(w)
    w.flush()
    long = w.request(words(seed + 1, 200), new=300)
    w.until(lambda: len(long.output_ids) > 2, what="decoding")
    hits = at_part(w, 1, lambda restore: None)
    late = Late(w, hits)
    second = w.request(prompt + [1, 2, 3], new=4)
    w.until(lambda: hits, what="the first part")
    under_way(w, hits[0])
    w.until(long.finished, 60, what="the long one")
    assert whole(long), long.finished_reason
    assert hits[0].stock is None and w.shim.counts["restore_no_device_room"] == 1
    late.release()
    w.run(second)
    assert whole(second)
    settle(w)
    w.check()


def test_a_restore_without_room_seldom_looks_for_it(world: Any, shared_daemon: Any, seed: int) -> None:
    """A look walks along its whole prefix. It looks again when there is more room, and is placed at once then."""
    w = world(shared_daemon, settings={"restore_ms": 60_000}, rows=4096, **MODE)
    prompt = words(seed, 2560)
    w.run(w.request(prompt, new=4))
    settle(w)
    w.flush()
    long = w.request(words(seed + 1, 2500), new=250)
    w.until(lambda: len(long.output_ids) > 2, what="decoding")
    looks: list[int] = []
    tree = w.shim.tree
    full_match = tree.full_match

    def counted(key: Any) -> Any:
        looks.append(w.ticks)
        return full_match(key)

    tree.full_match = counted
    second = w.request(prompt + [1, 2, 3], new=4)
    w.until(lambda: w.shim.restores and w.shim.restores[0].state is RestoreState.FILLED, what="filled")
    began = w.ticks
    w.until(long.finished, 60, what="the long one")
    ended, many = w.ticks, len(looks)
    assert ended - began > 150 and many < (ended - began) / 10, (looks, began, ended)
    w.run(second)
    assert w.admitted_prefix[second.rid] == 2560 and looks[-1] <= ended + 2
    settle(w)
    w.check()
