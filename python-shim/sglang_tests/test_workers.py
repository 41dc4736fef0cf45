"""What `/v1/workers` says of a server: of one that is attached, and why of one that is not."""

from __future__ import annotations

import dataclasses
import time
import types
from typing import Any

import pytest

from conftest import World
from engram_sglang import plugin
from test_turns import settle, words


def test_an_attached_worker_shows_its_numbers_and_hook_times(world: Any, daemon: Any, seed: int) -> None:
    one = daemon()
    w = world(one, page_size=64)
    w.run(w.request(words(seed, 300), new=4))
    settle(w)
    rows: list[Any] = []

    def shown() -> bool:
        rows[:] = one.get("/v1/workers")["workers"]
        load = rows[0]["load"] if rows else None
        return load is not None and "inserted" in load["hooks"]

    w.until(shown, what="a beat with hook times")
    (row,) = rows
    assert (row["mode"], row["attn_tp_size"], row["attn_tp_rank"], row["epoch"]) == ("ipc", 1, 0, 1)
    assert row["ring_bytes"] == 8 << 20 and row["versions"]["sglang"]
    load = row["load"]
    assert load["slots_total"] == w.req_pool.mamba_pool.size and load["slots_free"] <= load["slots_total"]
    tick = load["hooks"]["tick"]
    assert tick["calls"] > 0 and tick["max_ns"] >= tick["mean_ns"] > 0


def test_an_idle_server_has_nothing_open_at_the_daemon(world: Any, daemon: Any, seed: int) -> None:
    one = daemon()
    w = world(one, page_size=64)
    first = w.request(words(seed, 700), new=8)
    w.run(first)
    settle(w)
    w.flush()
    w.run(w.request(words(seed, 700) + list(first.output_ids) + [1, 2, 3], new=8))
    settle(w)
    what = ("requests", "saves", "leases")
    w.until(lambda: [one.get("/v1/workers")["workers"][0][n] for n in what] == [0, 0, 0], what="nothing open")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"pp_size": 2}, "pp_size is 2"), ({"speculative_algorithm": "EAGLE"}, "speculative decoding")],
)
def test_a_worker_that_will_not_attach_says_why(
    daemon: Any, seed: int, monkeypatch: Any, changes: dict[str, Any], reason: str
) -> None:
    one = daemon()
    monkeypatch.setenv("ENGRAM_DAEMON", one.target)
    monkeypatch.setenv("ENGRAM_RETRY_MS", "20")
    w = World(armed=False, seed=seed)
    args = types.SimpleNamespace(**{**vars(w.args), **changes})
    plugin.factory(dataclasses.replace(w.ctx, server_args=args))
    end = time.monotonic() + 20
    while not (refused := one.get("/v1/workers")["refused"]):
        assert time.monotonic() < end, "the daemon was never told"
        time.sleep(0.02)
    (row,) = refused
    assert reason in row["message"] and row["reason"] == "unsupported" and row["times"] == 1
    assert one.get("/v1/workers")["workers"] == []
