"""The plug-in by which the tests on a GPU read SGLang's pools: it sees what it is there to see."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

import pytest

from test_turns import settle, words

PROBE = pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu" / "probe" / "engram_probe.py"


def load(monkeypatch: pytest.MonkeyPatch, file: pathlib.Path, **env: str) -> Any:
    for name, value in {"FILE": str(file), **env}.items():
        monkeypatch.setenv(f"ENGRAM_PROBE_{name}", value)
    spec = importlib.util.spec_from_file_location("engram_probe", PROBE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def turns(w: Any, seed: int) -> None:
    first = w.request(words(seed, 700), new=8)
    w.run(first)
    settle(w)
    w.flush()
    w.run(w.request(words(seed, 700) + list(first.output_ids) + words(seed + 1, 50), new=40))
    settle(w)


@pytest.mark.parametrize("spoil", ["0", "1"])
def test_bytes_of_saved_and_restored_prefixes(
    world: Any, shared_daemon: Any, seed: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    w = world(shared_daemon, page_size=64)
    probe = load(monkeypatch, tmp_path / "events", SPOIL=spoil)
    w.mixed = spoil == "1"
    probe.Probe(w.shim)
    turns(w, seed)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    saved = {e["name"]: e["bytes"] for e in events if e["event"] == "saved"}
    restored = [e for e in events if e["event"] == "restored"]
    assert [e["boundary"] for e in restored] == [640]
    assert all((e["bytes"] == saved[e["name"]]) == (spoil == "0") for e in restored)
    found = [(e["unknown"], e["foreign"], e["state"]) for e in restored]
    assert found == [(0, 0, "ok" if spoil == "0" else "foreign")]


def test_times_of_parts(
    world: Any, shared_daemon: Any, seed: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(shared_daemon, page_size=64)
    load(monkeypatch, tmp_path / "events", BYTES="0").Probe(w.shim)
    turns(w, seed)
    times = w.shim.times.snapshot()
    assert {"part:_offer", "part:place", "part:submit", "part:rows"} <= set(times)
