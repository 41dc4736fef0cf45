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

from common import OUT, ROOT, Daemon, free_port


class Server:
    """`sglang.launch_server` on one model. `probe`: where the plug-in of the tests writes."""

    def __init__(self, name: str, model: str, flags: list[str], daemon: Daemon | None, probe: pathlib.Path | None, **env: str) -> None:
        self.name, self.port, self.log = name, free_port(), OUT / f"{name}.log"
        self.env = dict(os.environ, **env)
        extra = [str(ROOT / "python-shim" / "src")] if daemon is not None else []
        if probe is not None:
            extra.append(str(ROOT / "tests" / "gpu" / "probe"))
            self.env["ENGRAM_PROBE_FILE"] = str(probe)
        if daemon is not None:
            self.env["ENGRAM_DAEMON"] = daemon.target
            flags = [*flags, "--radix-cache-backend", "engram"]
        self.env["PYTHONPATH"] = ":".join([self.env.get("PYTHONPATH", ""), *extra]).strip(":")
        self.command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--load-format", "dummy", "--dtype", "bfloat16",
            "--skip-tokenizer-init", "--mamba-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
            "--host", "127.0.0.1", "--port", str(self.port), "--skip-server-warmup", "--enable-cache-report", *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Starts it and waits until it answers; seconds that this took."""
        began = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.env, start_new_session=True)
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=60).read()
                return time.monotonic() - began
            except (urllib.error.URLError, OSError):
                text = self.log.read_text(errors="replace")[-3000:]
                assert self.process.poll() is None, text
                assert time.monotonic() < began + 200, "the server does not answer: " + text
                time.sleep(0.5)

    def kill(self) -> None:
        """kill -9 of all its processes."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
            time.sleep(1)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            text = answer.read()
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

    def flush(self) -> None:
        """Empties the device's tree."""
        for _ in range(20):
            try:
                self.post("/flush_cache?timeout=10")
                return
            except urllib.error.HTTPError:
                time.sleep(0.2)
        raise AssertionError("the cache cannot be flushed")


def settled(daemon: Daemon, seconds: float = 60, durable: bool = False) -> None:
    """Waits until the worker is attached and all saves are over; with `durable` also written down."""
    end, quiet, last, written_since = time.monotonic() + seconds, 0, -1, time.monotonic()
    while quiet < 5:
        workers = daemon.get("/v1/workers")["workers"]
        rows = daemon.get("/v1/snapshots")["snapshots"]
        # A worker that says what it does has its session; before, its GPU is being prepared.
        calm = len(workers) == 1 and workers[0]["load"] is not None and workers[0]["saves"] == 0
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
