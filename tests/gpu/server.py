"""An SGLang server as a process, with Engram's plug-in and the tests' own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from common import OUT, ROOT, Daemon, free_port, started


class Server:
    """`sglang.launch_server` on one model. `probe`: where the plug-in of the tests writes; `path`: more of PYTHONPATH."""

    def __init__(
        self, name: str, model: str, flags: list[str], daemon: Daemon | None, probe: pathlib.Path | None, path: list[str] | None = None, **env: str,
    ) -> None:  # fmt: skip
        self.name, self.port, self.log = name, free_port(), OUT / f"{name}.log"
        self.env = dict(os.environ, **env)
        extra = [str(ROOT / "python-shim" / "src")] if daemon is not None else []
        if probe is not None:
            extra.append(str(ROOT / "tests" / "gpu" / "probe"))
            self.env["ENGRAM_PROBE_FILE"] = str(probe)
        if daemon is not None:
            self.env["ENGRAM_DAEMON"] = daemon.target
            flags = [*flags, "--radix-cache-backend", "engram"]
        self.env["PYTHONPATH"] = ":".join([self.env.get("PYTHONPATH", ""), *extra, *(path or [])]).strip(":")
        self.command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--load-format", "dummy", "--dtype", "bfloat16",
            "--skip-tokenizer-init", "--mamba-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
            "--host", "127.0.0.1", "--port", str(self.port), "--skip-server-warmup", "--enable-cache-report", *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Starts it; `wait` waits for it."""
        self.began = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.env, start_new_session=True)
        started(self.process)

    def wait(self, seconds: float = 200) -> float:
        """Waits until it answers; seconds since it was started."""
        assert self.process is not None
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=60).read()
                return time.monotonic() - self.began
            except (urllib.error.URLError, OSError):
                text = self.log.read_text(errors="replace")[-3000:]
                assert self.process.poll() is None, text
                assert time.monotonic() < self.began + seconds, "the server does not answer: " + text
                time.sleep(0.5)

    def start(self) -> float:
        """Starts it and waits until it answers; seconds that this took."""
        self.launch()
        return self.wait()

    def kill(self) -> None:
        """kill -9 of all its processes."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process = None
            time.sleep(1)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            # What it says of itself is what helps.
            error.msg = f"{error.msg}: {error.read()[:300].decode(errors='replace')}"
            raise
        try:
            return json.loads(text)
        except ValueError:
            return text.decode()

    def generate(self, ids: list[int], new: int, logprobs: bool = False) -> dict[str, Any]:
        """Greedy tokens: `ids`, `logprobs`, `cached` and `ms`."""
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        answer = self.post("/generate", {"input_ids": ids, "return_logprob": logprobs, "sampling_params": sampling})
        ms = (time.perf_counter() - began) * 1e3
        meta = answer["meta_info"]
        probabilities = [x[0] for x in meta["output_token_logprobs"]] if logprobs else []
        return {"ids": answer["output_ids"], "logprobs": probabilities, "cached": meta["cached_tokens"], "ms": ms}

    def stream(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[float]]]:
        """All prompts as one request: seconds until all is answered, and when each token of each came, from the start."""
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompts, "stream": True, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", body, {"Content-Type": "application/json"})
        times: list[list[float]] = [[] for _ in prompts]
        lines: list[tuple[float, bytes]] = []
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    lines.append((time.perf_counter() - began, line))
        whole = time.perf_counter() - began
        # What is in them is looked at when the clock has stopped.
        for at, line in lines:
            event = json.loads(line[6:])
            assert "meta_info" in event, line[:300]
            mine = times[event.get("index", 0)]
            mine.extend([at] * (event["meta_info"]["completion_tokens"] - len(mine)))
        assert all(len(mine) == new for mine in times), [len(mine) for mine in times]
        return whole, times

    def batch(self, prompts: list[list[int]], new: int) -> float:
        """All prompts as one request: seconds until all is answered."""
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        answers = self.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
        whole = time.perf_counter() - began
        answers = answers if isinstance(answers, list) else [answers]
        assert len(answers) == len(prompts) and all(len(a["output_ids"]) == new for a in answers), str(answers)[:300]
        return whole

    def flush(self) -> None:
        """Empties the device's tree."""
        for _ in range(20):
            try:
                self.post("/flush_cache?timeout=10")
                return
            except urllib.error.HTTPError:
                time.sleep(0.2)
        raise AssertionError("the cache cannot be flushed")


def settled(daemon: Daemon, seconds: float = 60, durable: bool = False, workers_wanted: int = 1) -> None:
    """Waits until the workers are attached and all saves are over; with `durable` also written down."""
    end, quiet, last, written_since = time.monotonic() + seconds, 0, -1, time.monotonic()
    while quiet < 5:
        workers = daemon.get("/v1/workers")["workers"]
        rows = daemon.get("/v1/snapshots")["snapshots"]
        # A worker that says what it does has its session; before, its GPU is being prepared.
        calm = len(workers) == workers_wanted and all(worker["load"] is not None and worker["saves"] == 0 for worker in workers)
        written = sum(row["durable"] for row in rows)
        # Snapshots that a deeper one of their own request supersedes are never written.
        if durable and (written == 0 or written != last):
            calm = False
            last, written_since = written, time.monotonic()
        if durable and time.monotonic() - written_since < 3:
            calm = False
        quiet = quiet + 1 if calm else 0
        assert time.monotonic() < end, f"not settled: {workers} {len(rows)} snapshots, {written} durable"
        time.sleep(0.1)
