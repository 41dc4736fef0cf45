"""A plug-in for tests: reads SGLang's pools by itself, when a state was saved and when one was restored.

Each line of $ENGRAM_PROBE_FILE is JSON: `saved` and `restored` events with a digest of the tokens and one of all
bytes that belong to them, read with plain indexing of torch; and, once in a while, the shim's counts and hook times.
$ENGRAM_PROBE_BYTES=0: only the latter, and the times of parts of hooks. $ENGRAM_PROBE_SCALE widens dummy weights, so that
outputs vary and depend on the state. $ENGRAM_PROBE_SPOIL=1 changes restored states after they were read: a test that
passes with it compares nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from array import array
from typing import Any

_FILE = os.environ.get("ENGRAM_PROBE_FILE", "")
_SCALE = float(os.environ.get("ENGRAM_PROBE_SCALE", "0"))
_BYTES = os.environ.get("ENGRAM_PROBE_BYTES", "1") == "1"
_SPOIL = os.environ.get("ENGRAM_PROBE_SPOIL", "0") == "1"
_LATER = 10


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _FILE:
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _after_init, HookType.AFTER)
    if _SCALE:
        target = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
        HookRegistry.register(target, _wide, HookType.AROUND)


def _wide(original: Any, model: Any, low: float = -1e-3, high: float = 1e-3, seed: int = 1234) -> Any:
    return original(model, -_SCALE, _SCALE, seed)


def _write(**row: Any) -> None:
    with open(_FILE, "a") as file:
        file.write(json.dumps({"time": time.time(), **row}) + "\n")


def _name(tokens: Any, upto: int) -> str:
    """Of the first `upto` tokens, which may come in several parts."""
    parts = tokens if isinstance(tokens, tuple) else (tokens,)
    whole = [token for part in parts for token in part]
    return hashlib.sha256(array("q", whole[:upto]).tobytes()).hexdigest()[:32]


class Probe:
    """On one scheduler."""

    def __init__(self, shim: Any) -> None:
        self.shim, self.tree, self.pools = shim, shim.tree, shim.pools
        self.names: dict[int, tuple[str, int]] = {}
        self.pending: list[tuple[int, str, int, int]] = []
        self.ticks = 0
        if _BYTES:
            self._offer, shim._offer = shim._offer, self.offer
            self._insert, shim.tree.insert = shim.tree.insert, self.insert
            self._tick, shim.tick = shim.tick, self.tick
            self._end_save, shim._end_save = shim._end_save, self.ended
        else:
            self.time_parts()
        threading.Thread(target=self.report, daemon=True).start()

    def time_parts(self) -> None:
        """How long the parts of hooks take: beside the hooks, as `part:NAME`. Parts are within others."""
        shim, tree = self.shim, self.tree
        names = "_offer _tell_tokens _push gather_kv place _scatter _hear _pump_saves _pump_restores _flush _ring _is_alive"
        wrapped = [(shim, name) for name in names.split()] + [(shim.copier, "submit")]
        wrapped += [(tree, name) for name in "slot rows insert take room key state_match full_match lock_kv unlock".split()]
        for owner, name in wrapped:
            setattr(owner, name, self.timed(name, getattr(owner, name)))

    def timed(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.shim.times.add("part:" + name, time.perf_counter_ns() - began)

        return call

    def report(self) -> None:
        last = ""
        while True:
            time.sleep(2)
            try:
                now = {"counts": dict(self.shim.counts), "hooks": self.shim.times.snapshot(), "link": self.shim.link.state}
            except RuntimeError:
                continue  # a dict grew meanwhile
            if str(now["counts"]) + now["link"] != last:
                last = str(now["counts"]) + now["link"]
                _write(event="shim", reason=self.shim.link.reason, **now)

    def offer(self, save: Any, slot: Any) -> None:
        self.names[save.node] = (_name(save.tokens, save.boundary), save.boundary)
        self._offer(save, slot)

    def insert(self, key: Any, have: int, rows: Any, slot: Any) -> int:
        node = int(self._insert(key, have, rows, slot))
        self.pending.append((self.ticks + _LATER, _name(key.token_ids, len(key)), len(key), node))
        if _SPOIL:
            self.shim.copier.submit(lambda: self.spoil(slot), before_next=True)
        return node

    def spoil(self, slot: Any) -> None:
        for tensor in self.pools.state:
            tensor.bytes[:, slot] = 0

    def ended(self, save: Any, why: str) -> None:
        if why == "ok":
            name, boundary = self.names.get(save.node, ("", 0))
            _write(event="saved", name=name, boundary=boundary, bytes=self.digest(save.node))
        self._end_save(save, why)

    def tick(self) -> None:
        self._tick()
        self.ticks += 1
        while self.pending and self.pending[0][0] <= self.ticks:
            _, name, boundary, node = self.pending.pop(0)
            _write(event="restored", name=name, boundary=boundary, bytes=self.digest(node))

    def digest(self, node: int) -> str:
        """Of all bytes of the node's prefix."""
        import torch

        slot = self.tree.slot(node)
        if slot is None:
            return "gone"
        first, _, rows = self.tree.rows(node, 0)
        assert first == 0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        out = hashlib.sha256()
        for tensor in self.pools.state:
            out.update(tensor.bytes[:, slot].contiguous().cpu().numpy().tobytes())
        for side in self.pools.sides():
            # Page-major, rows of different pages are apart.
            place = rows if side.dim() == 2 else (rows // side.shape[1], rows % side.shape[1])
            out.update(side[place].cpu().numpy().tobytes())
        return out.hexdigest()[:32]


def _after_init(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    shim = getattr(getattr(scheduler, "tree_cache", None), "shim", None)
    _write(event="start", cache=type(scheduler.tree_cache).__name__, shim=shim is not None)
    if shim is not None:
        Probe(shim)
