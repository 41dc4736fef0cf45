"""Pools <-> ring in the worker's process: fused kernels against torch's index operations, and what they cost the
scheduler thread. Granite-4.0-H-Tiny's shapes; rows scattered at random (page 1) and by pages of 64.

Run as `python benches/gpu/moves.py`. Writes gpu-moves.md and gpu-moves.json into $OUT.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

import numpy as np
import torch
from common import median, write_results

from engram_sglang.cuda import CudaCopier
from engram_sglang.fused import Mover
from engram_sglang.pools import KvLayer, Pools, StateTensor

PCIE = 54.5e9
DEVICE = torch.device("cuda", 0)


def pools(rows: int) -> Pools:
    noise = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)  # noqa: E731
    kv = [KvLayer(i, 3, 4, 128, 128, noise(rows, 1024), noise(rows, 1024)) for i in range(4)]
    state = [
        StateTensor("conv.0", 3, tuple(range(36)), (3328, 3), noise(36, 65, 19968), 19968),
        StateTensor("temporal", 4, tuple(range(36)), (48, 64, 128), noise(36, 65, 1572864), 1572864),
    ]
    return Pools(state=state, kv=kv, page_size=1, slots=65, rows=rows)


def timed(copier: CudaCopier, copy: Callable[[], None]) -> tuple[float, float]:
    """Median seconds on the device, and on this thread."""
    device, thread = [], []
    for _ in range(22):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def between() -> None:
            start.record(copier.side)
            copy()
            end.record(copier.side)

        began = time.perf_counter()
        copier.submit(between, before_next=True)
        thread.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) / 1e3)
    return median(device[2:]), median(thread[2:])


def main() -> None:
    total = 300_000
    p = pools(total)
    mover, copier = Mover(p, DEVICE), CudaCopier(DEVICE)
    mover.warm()
    ring = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    rows = []

    def row(what: str, tokens: int, size: int, copy: Callable[[], None]) -> None:
        device, thread = timed(copier, copy)
        rows.append({
            "what": what, "tokens": tokens, "MB": round(size / 1e6, 1), "GPU ms": round(device * 1e3, 3),
            "GB/s": round(size / device / 1e9), "% of its PCIe time": round(100 * device / (size / PCIE), 1),
            "thread us": round(thread * 1e6),
        })  # fmt: skip

    slot = torch.tensor([17], device=DEVICE)
    for out in (True, False):
        way = "gather" if out else "scatter"
        p.mover = mover
        row(f"state {way}, fused", 0, p.state_bytes, lambda: mover.state(ring, slot, 0, out))
        p.mover = None
        row(f"state {way}, torch", 0, p.state_bytes, lambda: p.save_state(slot, ring, 0) if out else p.restore_state(ring, 0, slot))
    for tokens in (1024, 8192, 65536, 131072):
        for page in (1, 64):
            order = torch.randperm(total // page, device=DEVICE)[: tokens // page]
            index = (order[:, None] * page + torch.arange(page, device=DEVICE)[None, :]).reshape(-1).contiguous()
            size = p.kv_bytes(tokens)
            block = p.kv_bytes(1024)
            runs = np.array([(i * block, 1024, 0, i * 1024, 1024) for i in range(tokens // 1024)])
            for out in (True, False):
                way = f"KV {'gather' if out else 'scatter'}, page {page}"
                row(f"{way}, fused", tokens, size, lambda: mover.kv(ring, index, runs, out))
                if tokens <= 8192:
                    row(f"{way}, torch", tokens, size, lambda: p.save_kv(index, ring, runs) if out else p.restore_kv(ring, runs, index))
    write_results("gpu-moves", rows, "Pools <-> ring, Granite-4.0-H-Tiny's shapes",
                  "GPU: on the side stream, by events, median of 20. Thread: `submit` with all its events. PCIe: 54.5 GB/s.")  # fmt: skip


if __name__ == "__main__":
    main()
