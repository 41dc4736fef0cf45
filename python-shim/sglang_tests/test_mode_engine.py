"""The same as elsewhere, where the shim copies between its ring and a window by itself: the copies are under way for some
iterations, beside SGLang's own work, and whatever happens meanwhile happens to them, too."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

# The tests are theirs; the fixture `world` is this module's.
from test_daemon_gone import striking, test_in_every_state_of_a_restore, test_in_every_state_of_a_save  # noqa: F401
from test_in_flight import (  # noqa: F401
    first,
    hold,
    prompt,
    test_flush_with_a_restore,
    test_flush_with_a_save,
    test_room_of_an_aborted_restore_is_the_daemon_s_until_it_answered,
    test_room_of_an_aborted_save_is_the_daemon_s_until_it_answered,
    w,
)
from test_parts import (  # noqa: F401
    test_abort,
    test_it_comes_back_whole,
    test_several_at_once_and_a_small_one,
    test_the_daemon_goes,
    test_the_daemon_loses_a_piece,
)
from test_ranks import pairs  # noqa: F401
from test_turns import (  # noqa: F401
    settle,
    test_after_eviction_of_the_state_alone_only_the_state_moves,
    test_branch_of_a_shared_prompt_is_kept,
    test_second_turn_after_a_flush,
    test_second_turn_after_a_restart_of_the_server,
    words,
)


@pytest.fixture
def world(world: Callable[..., Any]) -> Callable[..., Any]:
    """Servers in mode engine."""

    def make(daemon: Any = None, *, settings: dict[str, Any] | None = None, **how: Any) -> Any:
        one = world(daemon, settings={"mode": "engine", **(settings or {})}, **how)
        if daemon is not None:
            assert one.shim.session.carrier is not None and one.shim.link.mode == "engine"
        return one

    return make


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["plain_engine", "parts_engine"])
def test_two_ranks(name: str, pairs: Any, daemon: Any, seed: int) -> None:  # noqa: F811
    d = daemon(ram="256MiB")
    pairs().play(name, d, seed)
    assert "mode=engine" in d.log.read_text() and "mode=ipc" not in d.log.read_text()


def windows() -> tuple[int, int]:
    """Descriptors and mappings of windows that this process has."""
    # The tests' own watch over rooms knows each ring, and it knows that.
    gc.collect()
    links = [fd.readlink() for fd in pathlib.Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sum("engram-window" in str(link) for link in links), sum("engram-window" in line for line in maps)


def test_the_daemon_reaches_the_window_and_not_the_ring(world: Any, daemon: Any, seed: int) -> None:
    d = daemon()
    w = world(d)
    assert d.process is not None
    maps = pathlib.Path(f"/proc/{d.process.pid}/maps").read_text()
    assert "memfd:engram-window" in maps and "memfd:engram-ring" not in maps
    row = d.get("/v1/workers")["workers"][0]
    assert (row["mode"], row["mode_why"]) == ("engine", "the worker allows engine only")
    w.run(w.request(words(seed, 700), new=4))
    settle(w)
    assert w.shim.counts["save_ok"] >= 1


def test_no_window_stays_open_after_its_session(world: Any, daemon: Any, seed: int) -> None:
    d = daemon()
    w = world(d)
    before = windows()
    for sessions in range(2, 6):
        w.run(w.request(words(seed + sessions, 300), new=4))
        settle(w)
        d.kill()
        w.until(lambda: w.shim.session is None, what="leaving")
        d.start()
        w.until(lambda: w.shim.session is not None and w.shim.counts["sessions"] == sessions, what="attaching again")
    w.until(lambda: windows() <= before, what="the windows of before are closed")


def test_a_daemon_that_forbids_it_is_left_alone(world: Any, daemon: Any, seed: int) -> None:
    d = daemon(service='modes = ["ipc"]')
    w = world(None, settings={"daemon": d.target})
    w.until(lambda: w.shim.link.state == "refused", what="the refusal")
    assert "service.modes" in w.shim.link.reason
    w.run(w.request(words(seed, 300), new=4))
    w.check()
