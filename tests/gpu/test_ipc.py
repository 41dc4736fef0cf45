"""The daemon and a ring in GPU memory: bytes, memory, and the death of the worker at any time; in mode `engine` the daemon
must not take any of the GPU's memory.

Run as `ENGRAM_BIN=... python tests/gpu/test_ipc.py`. Needs a GPU, torch, grpcio and nvidia-smi. With `--host` it runs
over a ring in host memory, which checks the script itself where there is no GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common import MODE, Daemon, Worker, vram

HOST = "--host" in sys.argv
MIB = 1 << 20


def new_ring(size: int) -> Any:
    if HOST:
        from engram_sglang.ring import HostRing

        return HostRing(size)
    import torch

    from engram_sglang.cuda import CudaRing

    return CudaRing(size, torch.device("cuda", 0))


def tokens(first: int, count: int) -> array[int]:
    return array("I", [first, *range(1, count)])


def contents(worker: Worker, parts: Any) -> list[Any]:
    return [worker.ring.bytes[at : at + size].cpu().clone() for _, _, at, size in parts]


def round_trip(daemon: Daemon, state: int, row: int, count: int) -> None:
    import torch

    worker = Worker(daemon, state, row, max(64 * MIB, 2 * (state + row * count + 4096 * (count // 1024 + 2))), new_ring)
    said: list[Any] = []

    def fill(parts: Any) -> None:
        worker.ring.bytes.random_(0, 256)
        if not HOST:
            torch.cuda.synchronize()
        said[:] = contents(worker, parts)

    worker.save(tokens(state % 1000 + 1, count), fill)
    worker.ring.bytes.zero_()
    if not HOST:
        torch.cuda.synchronize()

    def compare(parts: Any) -> None:
        got = contents(worker, parts)
        assert len(got) == len(said) and all(torch.equal(a, b) for a, b in zip(got, said)), "bytes differ"

    worker.restore(tokens(state % 1000 + 1, count), compare)
    worker.close()
    if MODE == "engine" and not HOST:
        assert daemon.process is not None and vram().get(daemon.process.pid, 0) == 0, "the daemon took memory of the GPU"
    print(f"bytes equal: state {state}, {count} tokens of {row} bytes", flush=True)


def busy(target: str, folder: str, started: Any, endless: bool) -> None:
    """A worker that is killed in the middle of copies."""
    daemon = Daemon.__new__(Daemon)
    daemon.target = target
    worker = Worker(daemon, (256 if not HOST else 16) * MIB, 8192, (2048 if not HOST else 64) * MIB, new_ring)
    started.set()
    n = 0
    while endless:
        n += 1
        worker.save(tokens(1_000_000 + os.getpid() + n, 1500))
    time.sleep(600)


def killed(daemon: Daemon, endless: bool) -> None:
    before = vram()[-1] if not HOST else 0
    started = multiprocessing.get_context("spawn").Event()
    process = multiprocessing.get_context("spawn").Process(target=busy, args=(daemon.target, "", started, endless))
    process.start()
    assert started.wait(60)
    time.sleep(1.0 if endless else 0.0)
    during = vram()[-1] if not HOST else 0
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    process.join()
    while daemon.get("/v1/workers")["workers"]:
        assert time.monotonic() < began + 5, "the session of a dead worker stays"
        time.sleep(0.002)
    gone = time.monotonic() - began
    freed = 0.0
    if not HOST:
        # The ring's 2 GiB and the worker's context; the daemon's own context may linger.
        while vram()[-1] > during - 2048:
            assert time.monotonic() < began + 10, f"memory stays: {before} {during} {vram()}"
        freed = time.monotonic() - began
    print(f"killed {'in a copy' if endless else 'at rest'}: session gone after {gone * 1e3:.0f} ms, memory free within "
          f"{freed * 1e3:.0f} ms ({before} -> {during} MiB)", flush=True)  # fmt: skip


def main() -> None:
    folder = pathlib.Path(tempfile.mkdtemp())
    daemon = Daemon(folder, ram="4GiB" if not HOST else "1GiB")
    assert daemon.process is not None
    pid = daemon.process.pid
    try:
        if not HOST:
            print("VRAM of the daemon before the first worker:", vram().get(pid, 0), "MiB", flush=True)
            assert vram().get(pid, 0) == 0
        began = time.monotonic()
        round_trip(daemon, 1 * MIB, 64, 1)
        print(f"first attach, save and restore: {time.monotonic() - began:.2f} s", flush=True)
        round_trip(daemon, 57 * MIB + 123, 8192, 5000)
        round_trip(daemon, 3, 2, 1025)
        round_trip(daemon, 4 * MIB, 8192, 40_000)
        killed(daemon, endless=False)
        for _ in range(3):
            killed(daemon, endless=True)
        round_trip(daemon, 1 * MIB, 64, 100)
        if not HOST:
            end = time.monotonic() + 30
            while vram().get(pid, 0):
                assert time.monotonic() < end, "the daemon keeps memory of the GPU without a worker"
                time.sleep(0.1)
            print("VRAM of the daemon after the last worker: 0 MiB", flush=True)
        threads = subprocess.run(["ps", "-o", "rss=,nlwp=,time=", "-p", str(pid)], capture_output=True, text=True)
        print("daemon RSS KiB, threads, CPU time:", threads.stdout.strip(), flush=True)
    finally:
        daemon.kill(signal.SIGTERM)
        log = daemon.log.read_text()
        print(log[-3000:] if "panick" in log or "ERROR" in log else "daemon log clean", flush=True)
    print("ipc: ok", flush=True)


if __name__ == "__main__":
    main()
