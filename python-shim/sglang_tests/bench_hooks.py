"""How long each hook keeps SGLang's scheduler thread, at 8K, 32K and 128K tokens.

    ENGRAM_BIN=target/release/engram python python-shim/sglang_tests/bench_hooks.py PYTHON...

runs once under each interpreter, one with each release of SGLang (see `install.sh`), and writes
`benches/results/hooks.md` and `.json`. Real are the daemon, SGLang's scheduler, cache, allocators and pools, on CPU
tensors; the forward does nothing, and copies are queued, as on a GPU, and so are not in the times.

A round is a new prompt, its save, a flush, and a second turn that restores it. Times are of the wall clock, which has in
it what other programs on the machine do; `--clock cpu` takes the time that the thread itself ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from array import array
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benches/results"
SIZES = (8192, 32768, 131072)
WARM_UP, ROUNDS, TRIPS = 5, 50, 2000
LIMIT_US = 100.0


def summary(samples: list[int]) -> dict[str, float]:
    """Of nanoseconds, in microseconds."""
    ordered = sorted(samples)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    over = sum(sample > LIMIT_US * 1000 for sample in ordered)
    return {
        "calls": len(ordered), "median_us": round(statistics.median(ordered) / 1000, 1), "p99_us": round(p99 / 1000, 1),
        "max_us": round(ordered[-1] / 1000, 1), "over_limit": over,
    }  # fmt: skip


# --- In an environment with SGLang ------------------------------------------------------------------------


def measure(rounds: int, sizes: list[int], clock: str, binary: pathlib.Path) -> dict[str, Any]:
    sys.path.insert(0, str(HERE))
    import numpy as np
    import sglang
    import torch

    from conftest import World
    from daemon import Daemon
    from engram_sglang import cache as cache_module
    from engram_sglang import shim as shim_module
    from engram_sglang.settings import Settings
    from engram_sglang.timing import Times
    from sglang.srt.managers.utils import GenerationBatchResult
    from test_turns import settle

    now = time.thread_time_ns if clock == "cpu" else time.perf_counter_ns
    shim_module.time = types.SimpleNamespace(perf_counter_ns=now, monotonic=time.monotonic)

    class Samples(Times):
        """Every single time."""

        def __init__(self) -> None:
            super().__init__()
            self.all: dict[str, list[int]] = {}
            self.theirs = 0
            """Spent in SGLang's own methods since the last hook."""

        def add(self, hook: str, nanoseconds: int) -> None:
            theirs, self.theirs = self.theirs, 0
            self.all.setdefault(hook, []).append(nanoseconds)
            if hook == "tick":
                self.all.setdefault("tick, ours", []).append(nanoseconds - theirs)

    class Idle(World):  # type: ignore[misc,valid-type]
        """A server whose forward does nothing."""

        def run_batch(self, batch: Any) -> Any:
            batch.mamba_cow_src_indices = batch.mamba_cow_dst_indices = batch.mamba_clear_indices = None
            if batch.forward_mode.is_extend():
                for req in batch.reqs:
                    self.admitted_prefix.setdefault(req.rid, self.span(req)[0])
            self.stream.run(self.ticks)
            return GenerationBatchResult(
                logits_output=None, next_token_ids=torch.ones(len(batch.reqs), dtype=torch.int64), can_run_cuda_graph=False
            )

    def around(name: str, inner: str | None) -> None:
        """Times what the adapter does in one of SGLang's calls; without SGLang's own part of it."""
        method = getattr(cache_module.EngramCache, name)
        spent = [0]
        if inner is not None:
            base = cache_module.UnifiedRadixCache
            own = getattr(base, inner)

            def timed_own(self: Any, *args: Any, **kwargs: Any) -> Any:
                began = now()
                try:
                    return own(self, *args, **kwargs)
                finally:
                    spent[0] += now() - began

            setattr(base, inner, timed_own)

        def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
            spent[0], began = 0, now()
            try:
                return method(self, *args, **kwargs)
            finally:
                if self.shim is not None:
                    self.shim.times.add("call " + name.removeprefix("_engram_"), now() - began - spent[0])

        setattr(cache_module.EngramCache, name, timed)

    around("match_prefix", "match_prefix")
    for name in ("_engram_queued", "_engram_inserted", "_engram_over"):
        around(name, None)

    def split(w: Any) -> None:
        """Times what SGLang's own methods take of a tick."""
        for name in ("full_match", "state_match", "lock_kv", "unlock", "rows", "room", "take", "insert", "load"):
            method = getattr(w.shim.tree, name)

            def timed(*args: Any, method: Any = method, name: str = name) -> Any:
                began = now()
                try:
                    return method(*args)
                finally:
                    took, times = now() - began, w.shim.times
                    if isinstance(times, Samples):
                        times.theirs += took
                        times.all.setdefault("SGLang: " + name, []).append(took)

            setattr(w.shim.tree, name, timed)

    random = np.random.default_rng(1)
    out: dict[str, Any] = {"release": sglang.__version__, "python": platform.python_version(), "sizes": {}}
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(binary, pathlib.Path(folder), ram="1GiB")
        try:
            for tokens in sizes:
                w = Idle(
                    settings=Settings(daemon=daemon.target, ring_bytes=256 << 20, retry_ms=50, lookup_ms=60_000, save_ms=60_000),
                    page_size=64, rows=tokens + 16384, context=tokens + 8192, chunk=8192, seed=tokens, overlap=True, lag=1,
                )  # fmt: skip
                split(w)
                w.until(lambda: w.shim.session is not None, what="attaching")
                # Tests write garbage into room that is given back, which takes longer than all else.
                del w.shim.session.ring.space.give
                for round_ in range(WARM_UP + rounds):
                    if round_ == WARM_UP:
                        w.shim.times = Samples()
                        gc.collect()
                    prompt = random.integers(1, 50_000, tokens).tolist()
                    w.run(w.request(prompt, new=4), seconds=300)
                    settle(w)
                    assert w.scheduler.flush_cache(empty_cache=False), "the server is busy"
                    second = w.request(prompt + [1, 2, 3], new=4)
                    w.run(second, seconds=300)
                    settle(w)
                    assert w.admitted_prefix[second.rid] == tokens, w.shim.counts
                    assert w.scheduler.flush_cache(empty_cache=False), "the server is busy"
                hooks = {hook: summary(samples) for hook, samples in sorted(w.shim.times.all.items())}
                out["sizes"][str(tokens)] = hooks
                if tokens == sizes[0]:
                    out["round_trip"] = round_trip(w)
                w.close()
        finally:
            daemon.stop()
    return out


def round_trip(w: Any) -> dict[str, Any]:
    """A question to the daemon and its answer, while the main thread works in Python, 20 microseconds at a time, between
    looks at the channel; and what asking and hearing take of the thread."""
    from engram_sglang import channel
    from engram_sglang._channel_layout import Lookup

    session = w.shim.session
    end = session.end
    trips, asking, hearing = [], [], []
    for number in range(TRIPS + 100):
        began = time.perf_counter_ns()
        assert end.tx.push(Lookup(req=1 << 40 | number, attempt=0, max_boundary=64, device_boundary=0, device_kv=0))
        if end.tx.take_written():
            channel.ring(session.doorbell)
        asked = time.perf_counter_ns()
        while True:
            busy_until = time.perf_counter_ns() + 20_000
            while time.perf_counter_ns() < busy_until:
                sum(range(50))
            looked = time.perf_counter_ns()
            if end.rx.pop() is not None:
                break
            end.beat()
        heard = time.perf_counter_ns()
        if number >= 100:
            trips.append(heard - began)
            asking.append(asked - began)
            hearing.append(heard - looked)
    return {"trip": summary(trips), "asking": summary(asking), "hearing": summary(hearing)}


# --- Report -----------------------------------------------------------------------------------------------


def report(results: dict[str, Any]) -> str:
    lines = ["# Hooks on SGLang's scheduler thread", "", f"`{results['command']}`", ""]
    lines += [
        f"{results['rounds']} rounds for each size after {WARM_UP} to warm up, on {results['cpus']} CPUs ({results['machine']}), "
        f"{results['clock']} clock. A round is a new prompt, its save, a flush, and a second turn that restores it; the forward "
        "does nothing, and copies are queued, as on a GPU. The target is 100 µs for each hook.",
        "",
        "`tick` is once in each iteration of the scheduler; `tick, ours` is what is left of it without the methods of SGLang's "
        "cache and allocators that it calls, each of which is told as `SGLang: …`: they take longer for longer prefixes. `call …` is all that the adapter does in one of SGLang's calls, "
        "the hooks in it included and SGLang's own part left out.",
    ]
    for run in results["runs"]:
        lines += ["", f"## SGLang {run['release']}", "", "| tokens | hook | calls | median µs | p99 µs | max µs | over 100 µs |"]
        lines += ["|---:|---|---:|---:|---:|---:|---:|"]
        for tokens, hooks in run["sizes"].items():
            for hook, row in hooks.items():
                lines.append(
                    f"| {int(tokens):,} | {hook} | {row['calls']} | {row['median_us']} | {row['p99_us']} | {row['max_us']} "
                    f"| {row['over_limit']} |"
                )
        trip = run["round_trip"]
        lines += ["", "The channel, beside a main thread that works in Python all the time, and looks each 20 µs:", ""]
        lines += ["| what | calls | median µs | p99 µs | max µs |", "|---|---:|---:|---:|---:|"]
        names = {"trip": "a lookup and its answer", "asking": "of the thread, to ask", "hearing": "of the thread, to hear"}
        for key, name in names.items():
            row = trip[key]
            lines.append(f"| {name} | {row['calls']} | {row['median_us']} | {row['p99_us']} | {row['max_us']} |")
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", help="interpreters with SGLang")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "hooks", help="without its ending")
    parser.add_argument("--measure", action="store_true", help="measure here, and print JSON")
    args = parser.parse_args()
    binary = pathlib.Path(os.environ.get("ENGRAM_BIN", HERE.parents[1] / "target/release/engram"))
    if args.measure:
        print(json.dumps(measure(args.rounds, args.sizes, args.clock, binary)))
        return
    if not args.pythons:
        parser.error("no interpreter is named")
    runs = []
    options = ["--rounds", str(args.rounds), "--clock", args.clock, "--sizes", *map(str, args.sizes)]
    for python in args.pythons:
        command = [python, __file__, *options, "--measure"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    names = " ".join(f"target/venv/sglang-{run['release']}/bin/python" for run in runs)
    chosen = "" if args.clock == "wall" else " --clock cpu"
    results = {
        "command": f"python python-shim/sglang_tests/bench_hooks.py {names}{chosen}", "rounds": args.rounds,
        "clock": {"wall": "wall", "cpu": "the thread's own"}[args.clock], "cpus": os.cpu_count(), "machine": cpu_name(),
        "runs": runs,
    }  # fmt: skip
    text = report(results)
    args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
