"""Ring <-> pinned RAM through the daemon, against a plain loop of the driver's copies in the same run.

Run as `ENGRAM_BIN=... python benches/gpu/copies.py`. Writes gpu-copies.md and gpu-copies.json into $OUT.
"""

from __future__ import annotations

import pathlib
import signal
import sys
import tempfile
import time
from array import array
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from common import Daemon, Worker, median, write_results

HOST = "--host" in sys.argv
SIZES = [1, 4, 16, 57, 128, 512] if not HOST else [1, 4]
MIB = 1 << 20


def new_ring(size: int) -> Any:
    if HOST:
        from engram_sglang.ring import HostRing

        return HostRing(size)
    import torch

    from engram_sglang.cuda import CudaRing

    return CudaRing(size, torch.device("cuda", 0))


def plain(ring: Any, size: int, repeats: int) -> tuple[float, float]:
    """GB/s of one copy after another, out and in, by torch on pinned memory."""
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=not HOST)
    host.fill_(1)
    part, out = ring[:size], []
    for to, source in ((host, part), (part, host)):
        seconds = []
        for _ in range(repeats + 2):
            if not HOST:
                torch.cuda.synchronize()
            began = time.perf_counter()
            to.copy_(source, non_blocking=True)
            if not HOST:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        out.append(size / median(seconds[2:]) / 1e9)
    return out[0], out[1]


def main() -> None:
    daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram="12GiB" if not HOST else "64MiB")
    rows, n = [], 1
    try:
        for mib in SIZES:
            size, repeats = mib * MIB, 15
            worker = Worker(daemon, size, 64, max(64 * MIB, size + 4 * MIB), new_ring)
            saves, restores, lookups = [], [], []
            for _ in range(repeats + 2):
                n += 1
                saves.append(worker.save(array("I", [n]))[0])
                looked, moved, _ = worker.restore(array("I", [n]))
                lookups.append(looked)
                restores.append(moved)
            out, into = plain(worker.ring.bytes, size, repeats)
            save, restore = median(saves[2:]), median(restores[2:])
            rows.append({
                "MiB": mib, "one piece": "yes",
                "ring->RAM ms": round(save * 1e3, 3), "ring->RAM GB/s": round(size / save / 1e9, 1),
                "plain GB/s out": round(out, 1), "% out": round(100 * size / save / 1e9 / out, 1),
                "RAM->ring ms": round(restore * 1e3, 3), "RAM->ring GB/s": round(size / restore / 1e9, 1),
                "plain GB/s in": round(into, 1), "% in": round(100 * size / restore / 1e9 / into, 1),
                "lookup us": round(median(lookups[2:]) * 1e6),
            })  # fmt: skip
            worker.close()
        for count in ((8192, 65536) if not HOST else (2048,)):
            # State and KV as of a model with 8 KiB of KV a token: many pieces at once.
            state, row = (57 * MIB, 8192) if not HOST else (MIB, 64)
            size = state + count * row
            worker = Worker(daemon, state, row, size + (count // 1024 + 4) * 4096, new_ring)
            saves, restores, lookups = [], [], []
            for _ in range(8):
                n += 1
                tokens = array("I", [n, *range(1, count)])
                saves.append(worker.save(tokens)[0])
                looked, moved, _ = worker.restore(tokens)
                lookups.append(looked)
                restores.append(moved)
            out, into = plain(worker.ring.bytes, size, 8)
            save, restore = median(saves[2:]), median(restores[2:])
            rows.append({
                "MiB": round(size / MIB), "one piece": f"no: {count} tokens",
                "ring->RAM ms": round(save * 1e3, 3), "ring->RAM GB/s": round(size / save / 1e9, 1),
                "plain GB/s out": round(out, 1), "% out": round(100 * size / save / 1e9 / out, 1),
                "RAM->ring ms": round(restore * 1e3, 3), "RAM->ring GB/s": round(size / restore / 1e9, 1),
                "plain GB/s in": round(into, 1), "% in": round(100 * size / restore / 1e9 / into, 1),
                "lookup us": round(median(lookups[2:]) * 1e6),
            })  # fmt: skip
            worker.close()
    finally:
        daemon.kill(signal.SIGTERM)
        if rows:
            write_results(
                "gpu-copies", rows, "Ring in GPU memory <-> pinned RAM, through the daemon",
                "Times are the worker's: from its message in the channel to the daemon's answer, median; one piece at a "
                "time, or all pieces of a snapshot at once. Plain: `copy_` between the same ring and pinned memory and a "
                "synchronize, in the worker's process, median.",
            )  # fmt: skip


if __name__ == "__main__":
    main()
