"""Size of a snapshot and the time to save and to restore it, by model and length: pools -> ring -> RAM, and back; disk.

    ENGRAM_BIN=... python benches/gpu/snapshots.py MODELS [MODEL ...]

`MODELS`: the folder of the models' folders; of a model only its `config.json` is read. Pools have the model's true shapes, and
are filled with noise; the kernels are the shim's, the daemon is real, and there is no SGLang. Free lists are as fragmented
as can be: rows (page 1), or pages of 64 rows, in random order. Each time is set against plain copies of the driver between
the same ring and pinned memory, and against plain direct reads and writes of the disk, in the same run; all bytes that came
back are compared. `--host` runs it without a GPU. Writes gpu-snapshots.md and .json into $OUT.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

import numpy as np
import torch
from common import Daemon, Steps, Worker, drop_caches, median, write_results
from limits import MIB, plain_disk, shapes

from engram_sglang.pools import KvLayer, Pools, StateTensor
from engram_sglang.ring import HostRing

HOST = "--host" in sys.argv
DEVICE = torch.device("cpu") if HOST else torch.device("cuda", 0)
LENGTHS = [1, 2048, 8192, 32768, 65536, 131072] if not HOST else [1, 2048]
PAGES, SAVES, RESTORES, SLOTS, BLOCK = (1, 64), 4, 6, 9, 1024
MODELS = ["granite-4.0-h-tiny", "qwen3-next-24l", "nemotron-3-nano-30b-a3b"]
RAM = ("24GiB", "10GiB") if not HOST else ("1GiB", "1GiB")


def pools_of(config: dict[str, Any], rows: int) -> Pools:
    states, conv, temporal, attention, heads, width = shapes(config)
    noise = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)  # noqa: E731
    sizes = [(conv, 3, 2), (temporal, 4, 4)]
    state = [
        StateTensor(name, dtype, tuple(states), shape, noise(len(states), SLOTS, int(np.prod(shape)) * item), int(np.prod(shape)) * item)
        for name, (shape, dtype, item) in zip(("conv.0", "temporal"), sizes)
    ]
    kv = [KvLayer(n, 3, heads, width, width, noise(rows, heads * width * 2), noise(rows, heads * width * 2)) for n in attention]
    return Pools(state=state, kv=kv, page_size=1, slots=SLOTS, rows=rows)


def synchronize() -> None:
    if not HOST:
        torch.cuda.synchronize()


def timed(what: Callable[[], Any], repeats: int = 1) -> float:
    """Median seconds, the GPU's work included."""
    times = []
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        what()
        synchronize()
        times.append(time.perf_counter() - began)
    return median(times)


class Model:
    """One model's pools, a worker with them, and what is told of it."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        self.name, self.total = name, max(LENGTHS) * 2 + 4096
        self.pools = pools_of(json.loads((folder / name / "config.json").read_text()), self.total)
        if not HOST:
            from engram_sglang.fused import Mover

            self.pools.mover = Mover(self.pools, DEVICE)
            self.pools.mover.warm()
        self.ring_bytes = self.bytes(max(LENGTHS)) + (max(LENGTHS) // BLOCK + 8) * 4096
        self.slot, self.other = (torch.tensor([n], device=DEVICE) for n in (3, 7))
        self.marks, self.weights = 0, os.urandom(32)

    def bytes(self, tokens: int) -> int:
        return self.pools.state_bytes + self.pools.kv_bytes(tokens)

    def attach(self, daemon: Daemon) -> Worker:
        def ring(size: int) -> Any:
            if HOST:
                return HostRing(size)
            from engram_sglang.cuda import CudaRing

            return CudaRing(size, DEVICE)

        return Worker(daemon, 0, 0, self.ring_bytes, ring, self.pools, self.weights)

    def rows(self, tokens: int, page: int) -> tuple[Any, Any]:
        """Rows of the pools for so many tokens, and as many others."""
        pages = -(-tokens // page)
        order = torch.randperm(self.total // page, device=DEVICE)
        whole = (order[:, None] * page + torch.arange(page, device=DEVICE)[None, :]).reshape(-1)
        return whole[:tokens].contiguous(), whole[pages * page :][:tokens].contiguous()

    def table(self, parts: Any) -> Any:
        out, first = [], 0
        for _, _, at, size in parts[1:]:
            count = size // self.pools.row_bytes
            out.append((at, count, 0, first, count))
            first += count
        return np.array(out).reshape(-1, 5)

    def tokens(self, count: int) -> array[int]:
        self.marks += 1
        return array("I", [self.marks, *range(1, count)])

    def gather(self, worker: Worker, rows: Any, slot: Any) -> Callable[[Any], None]:
        def before(parts: Any) -> None:
            def move() -> None:
                self.pools.save_state(slot, worker.ring.bytes, parts[0][2])
                self.pools.save_kv(rows, worker.ring.bytes, self.table(parts))

            self.gathered = timed(move)

        return before

    def scatter(self, worker: Worker, rows: Any, slot: Any) -> Callable[[Any], None]:
        def after(parts: Any) -> None:
            def move() -> None:
                self.pools.restore_kv(worker.ring.bytes, self.table(parts), rows)
                self.pools.restore_state(worker.ring.bytes, parts[0][2], slot)

            self.scattered = timed(move)

        return after

    def equal(self, rows: Any, others: Any) -> bool:
        same = all(torch.equal(side[rows], side[others]) for side in self.pools.sides())
        return same and all(torch.equal(t.bytes[:, self.slot], t.bytes[:, self.other]) for t in self.pools.state)

    def spoil(self, others: Any) -> None:
        for side in self.pools.sides():
            side[others] = 0
        for t in self.pools.state:
            t.bytes[:, self.other] = 0

    def ram(self, worker: Worker, count: int, page: int, host: Any) -> dict[str, Any]:
        rows, others = self.rows(count, page)
        saves, restores, tokens = [], [], array("I")
        for _ in range(SAVES if count < 65536 else SAVES - 1):
            tokens = self.tokens(count)
            moved, _, size = worker.save(tokens, self.gather(worker, rows, self.slot))
            saves.append((self.gathered + moved, self.gathered, moved))
        self.spoil(others)
        for _ in range(RESTORES):
            looked, moved, size = worker.restore(tokens, self.scatter(worker, others, self.other))
            restores.append((looked + moved + self.scattered, self.scattered, moved))
        part = worker.ring.bytes[:size]
        out, into = timed(lambda: host[:size].copy_(part, non_blocking=True), 5), timed(lambda: part.copy_(host[:size], non_blocking=True), 5)
        (save, gather, drain), (restore, scatter, fill) = ([median([row[n] for row in some[1:]]) for n in range(3)] for some in (saves, restores))
        ms = lambda seconds: round(seconds * 1e3, 2)  # noqa: E731
        return {
            "model": self.name, "tokens": count, "MB": round(size / 1e6, 1), "page": page, "save ms": ms(save), "of it gather": ms(gather),
            "ring to RAM GB/s": round(size / drain / 1e9, 1), "% of plain out": round(100 * out / drain, 1), "whole save, %": round(100 * out / save, 1),
            "restore ms": ms(restore), "of it scatter": ms(scatter), "RAM to ring GB/s": round(size / fill / 1e9, 1),
            "% of plain in": round(100 * into / fill, 1), "whole restore, %": round(100 * into / restore, 1),
            "scatter, % of plain in": round(100 * scatter / into, 1), "bytes": "equal" if self.equal(rows, others) else "DIFFERENT",
        }  # fmt: skip


def on_disk(model: Model, steps: Steps, rows: list[dict[str, Any]], folder: pathlib.Path) -> None:
    """Adds what the disk takes to the rows of page 64: until durable, and back after a restart with a cold file cache."""
    daemon = Daemon(folder, ram=RAM[1], disk=True, service='write_after = "1ms"\npreload = "0 B"\nscrub_rate = "0 B"')
    try:
        out, into = plain_disk(folder, (1024 if not HOST else 16) * MIB)
        worker, said = model.attach(daemon), {}
        for count in LENGTHS:
            source, others = model.rows(count, 64)
            said[count] = (model.tokens(count), source, others)
            durable = daemon.metric("engram_durable_snapshots_total")
            began = time.perf_counter()
            _, _, size = worker.save(said[count][0], model.gather(worker, source, model.slot))
            while daemon.metric("engram_durable_snapshots_total") <= durable and time.perf_counter() < began + 30:
                time.sleep(0.002)
            took = time.perf_counter() - began
            for row in rows:
                if row["model"] == model.name and row["tokens"] == count and row["page"] == 64:
                    row |= {"save to disk ms": round(took * 1e3, 1), "to disk GB/s": round(size / took / 1e9, 2), "plain write GB/s": round(out, 2)}
        worker.close()
        daemon.kill(signal.SIGKILL)
        dropped = drop_caches()
        print(f"daemon ready again in {daemon.start():.2f} s, file cache dropped: {dropped}", flush=True)
        worker = model.attach(daemon)
        for count, (tokens, source, others) in said.items():
            with steps.step(f"{model.name} {count} from disk"):
                model.spoil(others)
                looked, moved, size = worker.restore(tokens, model.scatter(worker, others, model.other))
                took, same = looked + moved + model.scattered, model.equal(source, others)
                for row in rows:
                    if row["model"] == model.name and row["tokens"] == count and row["page"] == 64:
                        row |= {
                            "from disk ms": round(took * 1e3, 1), "from disk GB/s": round(size / took / 1e9, 2), "plain read GB/s": round(into, 2),
                            "bytes from disk": "equal" if same else "DIFFERENT",
                        }  # fmt: skip
                steps.check(same, f"{model.name} {count}: bytes from disk differ")
        worker.close()
    finally:
        daemon.end("daemon-snapshots.log")


def main() -> None:
    steps, own = Steps(300), [a for a in sys.argv[1:] if a != "--host"]
    models, names = pathlib.Path(own[0]), own[1:] or (MODELS if not HOST else ["tiny-granite-attn0", "tiny-qwen3-next", "tiny-nemotron"])
    rows: list[dict[str, Any]] = []

    def write(show: bool) -> None:
        write_results("gpu-snapshots", rows, "Snapshots: size, save and restore",
                      f"Medians of {SAVES - 1} saves (from 65,536 tokens on one less) and {RESTORES - 1} restores after a first one; one after another, nothing overlaps: gather, then ring to RAM; lookup, RAM to ring, "
                      "then scatter. Plain: a copy of as many bytes by the driver between the same ring and pinned memory. Tokens 1: the state alone (and KV of one token). "
                      "Pages in random order. To disk: from the gather on until durable, once; from disk: lookup to scatter, once, after a restart of the daemon with "
                      "a cold file cache. Plain writes and reads of the disk: O_DIRECT, 8 threads of 4 MiB. "
                      f"Failures: {steps.failures or 'none'}.", show)  # fmt: skip

    with steps.whole():
        for name in names:
            with steps.step(name), tempfile.TemporaryDirectory() as folder:
                model = Model(models, name)
                host = torch.empty(model.ring_bytes, dtype=torch.uint8, pin_memory=not HOST)
                host.fill_(1)
                daemon = Daemon(pathlib.Path(folder) / "ram", ram=RAM[0])
                try:
                    worker = model.attach(daemon)
                    for count in LENGTHS:
                        for page in PAGES:
                            with steps.step(f"{name} {count} page {page}"):
                                rows.append(model.ram(worker, count, page, host))
                                print(rows[-1], flush=True)
                                steps.check(rows[-1]["bytes"] == "equal", f"{name} {count}: bytes differ")
                    worker.close()
                finally:
                    daemon.end()
                write(show=False)
                on_disk(model, steps, rows, pathlib.Path(folder) / "disk")
                write(show=False)
                del model, host
                if not HOST:
                    torch.cuda.empty_cache()
    if rows:
        write(show=True)
    steps.end("snapshots")


if __name__ == "__main__":
    main()
