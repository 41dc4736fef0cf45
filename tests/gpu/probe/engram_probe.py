"""A plug-in for tests: reads SGLang's pools by itself, when a state was saved and when one was restored.

Each line of $ENGRAM_PROBE_FILE is JSON: `saved` and `restored` events with a digest of the tokens and one of all
bytes that belong to them, read with plain indexing of torch; and, once in a while, the shim's counts and hook times.
$ENGRAM_PROBE_BYTES=0: only the latter, and the times of parts of hooks. $ENGRAM_PROBE_SCALE widens dummy weights, so that
outputs vary and depend on the state. $ENGRAM_PROBE_SPOIL=1 changes restored states after they were read: a test that
passes with it compares nothing.

A `restored` event also tells how many of the tokens whose KV was restored have KV that was never gathered for them
(`foreign`), and whether its state was (`state`): the same tokens computed twice, in other batches, differ in their last
bits, and a restored prefix may have pieces of both, behind what the device had by itself. That is told only of what this
process itself has saved; the rest is `unknown`.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from array import array
from typing import Any

import numpy as np

_FILE = os.environ.get("ENGRAM_PROBE_FILE", "")
_SCALE = float(os.environ.get("ENGRAM_PROBE_SCALE", "0"))
_BYTES = os.environ.get("ENGRAM_PROBE_BYTES", "1") == "1"
_SPOIL = os.environ.get("ENGRAM_PROBE_SPOIL", "0") == "1"
_LATER = 10
_rank = 0


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
    # All ranks of a server write to one file: a line is one write.
    with open(_FILE, "a") as file:
        file.write(json.dumps({"time": time.time(), "rank": _rank, **row}) + "\n")


def _name(tokens: Any, upto: int) -> str:
    """Of the first `upto` tokens, which may come in several parts."""
    parts = tokens if isinstance(tokens, tuple) else (tokens,)
    whole = [token for part in parts for token in part]
    return hashlib.sha256(array("q", whole[:upto]).tobytes()).hexdigest()[:32]


class Seen:
    """What was gathered: for each token of each prefix, a sum of all bytes of its KV; and for each boundary of the state."""

    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        self._places = draw.integers(1, 1 << 63, 1 << 20, dtype=np.uint64)
        self._weights = draw.integers(1, 1 << 63, 1 << 20, dtype=np.uint64) | np.uint64(1)
        self._kv: dict[int, set[int]] = {}
        self._state: dict[int, set[str]] = {}

    def names(self, tokens: Any, upto: int) -> Any:
        """A number for each of the first `upto` tokens and all before it."""
        parts = tokens if isinstance(tokens, tuple) else (tokens,)
        whole = np.concatenate([np.array(part, dtype=np.uint64) for part in parts])[:upto]
        return np.cumsum((whole + np.uint64(1)) * self._places[:upto], dtype=np.uint64).tolist()

    def sums(self, rows: Any) -> Any:
        """Of bytes `[tokens, row]`."""
        pad = -rows.shape[1] % 8
        if pad:
            rows = np.pad(rows, ((0, 0), (0, pad)))
        words = np.ascontiguousarray(rows).view(np.uint64)
        return (words * self._weights[: words.shape[1]]).sum(axis=1, dtype=np.uint64).tolist()

    def gathered(self, names: Any, sums: Any) -> None:
        for name, total in zip(names, sums, strict=True):
            self._kv.setdefault(name, set()).add(total)

    def offered(self, name: int, digest: str) -> None:
        self._state.setdefault(name, set()).add(digest)

    def compare(self, names: Any, have: int, sums: Any, digest: str) -> dict[str, Any]:
        """How much of a restored prefix, from token `have` on, is what was gathered for its tokens."""
        known = [self._kv.get(name) for name in names[have:]]
        states = self._state.get(names[-1])
        return {
            "have": have,
            "unknown": known.count(None),
            "foreign": sum(was is not None and total not in was for was, total in zip(known, sums, strict=True)),
            "state": "unknown" if states is None else "ok" if digest in states else "foreign",
        }


class Probe:
    """On one scheduler."""

    def __init__(self, shim: Any) -> None:
        self.shim, self.tree, self.pools = shim, shim.tree, shim.pools
        self.names: dict[int, tuple[str, int]] = {}
        self.pending: list[tuple[int, str, Any, int, int]] = []
        self.ticks = 0
        self.seen = Seen()
        self.tokens: dict[int, Any] = {}
        if _BYTES:
            self._offer, shim._offer = shim._offer, self.offer
            self._gather, shim.gather_kv = shim.gather_kv, self.gather
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
        names = self.seen.names(save.tokens, save.boundary)
        self.tokens[save.number] = names
        self._offer(save, slot)
        # What the copy that was queued finds is what is there when all that was queued is over.
        self.seen.offered(names[-1], self.state(slot))

    def gather(self, save: Any, runs: Any) -> Any:
        event = self._gather(save, runs)
        parts, names = save.parts, self.tokens.get(save.number)
        if event is not None and names is not None:
            start = parts.starts[runs[0].index]
            first, _, rows = self.tree.rows(save.node, start)
            last = runs[-1].index + runs[-1].count - 1
            wanted = slice(start - first, parts.ends[last] - first)
            self.seen.gathered(names[start : parts.ends[last]], self.kv(rows[wanted]))
        return event

    def insert(self, key: Any, have: int, rows: Any, slot: Any) -> int:
        node = int(self._insert(key, have, rows, slot))
        names = self.seen.names(key.token_ids, len(key))
        self.pending.append((self.ticks + _LATER, _name(key.token_ids, len(key)), names, have, node))
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
        self.tokens.pop(save.number, None)
        self._end_save(save, why)

    def tick(self) -> None:
        self._tick()
        self.ticks += 1
        while self.pending and self.pending[0][0] <= self.ticks:
            _, name, names, have, node = self.pending.pop(0)
            found, slot = self.digest(node), self.tree.slot(node)
            compared: dict[str, Any] = {}
            if slot is not None:
                sums = self.kv(self.tree.rows(node, 0)[2][have:])
                compared = self.seen.compare(names, have, sums, self.state(slot))
            _write(event="restored", name=name, boundary=len(names), bytes=found, **compared)

    def digest(self, node: int) -> str:
        """Of all bytes of the node's prefix."""
        slot = self.tree.slot(node)
        if slot is None:
            return "gone"
        first, _, rows = self.tree.rows(node, 0)
        assert first == 0
        out = hashlib.sha256(self.state(slot).encode())
        out.update(self.kv(rows, sums=False))
        return out.hexdigest()[:32]

    def state(self, slot: Any) -> str:
        """A digest of the state in a slot."""
        _wait()
        out = hashlib.sha256()
        for tensor in self.pools.state:
            out.update(tensor.bytes[:, slot].contiguous().cpu().numpy().tobytes())
        return out.hexdigest()[:32]

    def kv(self, rows: Any, sums: bool = True) -> Any:
        """KV of rows, read with plain indexing: all bytes, or a sum for each row."""
        import torch

        _wait()
        sides = list(self.pools.sides())
        if not sides:
            return [0] * len(rows) if sums else b""
        # Page-major, rows of different pages are apart.
        page = sides[0].shape[1]
        place = rows if sides[0].dim() == 2 else (rows // page, rows % page)
        found = torch.cat([side[place] for side in sides], dim=1).cpu().numpy()
        return self.seen.sums(found) if sums else found.tobytes()


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _after_init(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    global _rank
    shim = getattr(getattr(scheduler, "tree_cache", None), "shim", None)
    _rank = shim.ranks.rank if shim is not None else 0
    _write(event="start", cache=type(scheduler.tree_cache).__name__, shim=shim is not None)
    if shim is not None:
        Probe(shim)
