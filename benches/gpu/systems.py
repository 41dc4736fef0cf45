"""SGLang alone, and with each thing that keeps its cache: how each is started, drained, and left with nothing but the disk."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from common import OUT, Daemon, drop_caches, free_port, median, started
from server import Server, settled

HICACHE = "--enable-hierarchical-cache --hicache-ratio 4 --hicache-storage-backend file".split()
WARM, HITS = (3000, 20000), 3
EVICT = int(os.environ.get("EVICT", 130_900))
"""Tokens of a prompt that fills the tree; two of them must not fit into it."""


class System:
    """SGLang with one of the things that keep its cache. What it lacks is never asked of it."""

    disk = restarts = False
    ram = True

    def __init__(self, name: str, model: str, flags: list[str], daemon: Daemon | None = None, path: list[str] | None = None, **env: str) -> None:
        self.name, self.rng = name, random.Random(name)
        self.server = Server(f"sglang-{name}", model, flags, daemon, None, path=path, **env)
        self.turns: dict[int, list[int]] = {}
        self.rows: dict[int, dict[str, Any]] = {}

    def drain(self) -> None:
        """Waits until all is kept that is to be kept."""

    def durable(self) -> None:
        self.drain()

    def lose_ram(self) -> bool:
        """Leaves nothing but the disk, while SGLang runs; says whether that can be."""
        return True

    def end(self) -> None:
        self.server.kill()

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(10, 4000) for _ in range(count)]

    def turn(self, n: int) -> dict[str, Any]:
        return self.server.generate(self.turns[n] + self.ids(100), 1)

    def first(self, n: int) -> None:
        words = self.ids(n - 116)
        self.turns[n] = words + self.server.generate(words, 16)["ids"]

    def compile(self) -> None:
        """Kernels are compiled and loaded; those that restore, too, where there is something to restore."""
        for n in (300, *WARM):
            words = self.ids(n)
            self.server.generate(words, 4)
            self.server.generate(words + self.ids(100), 1)
        for n in WARM:
            if n not in self.turns:
                self.first(n)
            self.turn(n)
        self.drain()

    def measure(self, lengths: list[int]) -> None:
        for n in lengths:
            cold = self.server.generate(self.ids(n), 1)["ms"]
            self.first(n)
            self.drain()
            hits = [self.turn(n) for _ in range(HITS + 2)][1:]
            self.rows[n] = {"with": self.name, "prompt": n, "cold ms": round(cold, 1), "warm ms": round(median([h["ms"] for h in hits]), 1), "warm cached": hits[-1]["cached"]}
            self.drain()
            print(self.rows[n], [round(h["ms"]) for h in hits], flush=True)

    def evict(self) -> None:
        for _ in range(2):
            self.server.generate(self.ids(EVICT), 1)
        self.drain()
        for n in WARM:
            self.turn(n)

    def stored(self, what: str) -> None:
        """Turns from what is kept outside the tree, each and then warm hits; several calls give medians."""
        for n, row in self.rows.items():
            got, hits = self.turn(n), [self.turn(n)["ms"] for _ in range(HITS)]
            seen = row.setdefault("seen", {}).setdefault(what, [])
            seen.append((got["ms"], got["cached"], median(hits)))
            ms, warm = median([s[0] for s in seen]), median([s[2] for s in seen])
            row |= {f"{what} ms": round(ms, 1), f"{what} cached": min(s[1] for s in seen), f"{what}, its warm ms": round(warm, 1), f"{what} over warm ms": round(ms - warm, 1)}
            print(self.name, n, what, [(round(s[0]), s[1], round(s[2])) for s in seen], flush=True)
        self.drain()


class Engram(System):
    disk = restarts = True

    def __init__(self, model: str, flags: list[str]) -> None:
        service = 'write_after = "1s"\npreload = "0 B"\nscrub_rate = "0 B"'
        self.daemon = Daemon(pathlib.Path(tempfile.mkdtemp()), ram=os.environ.get("RAM", "24GiB"), disk=True, service=service)
        super().__init__("engram", model, flags, self.daemon, ENGRAM_RING_BYTES="4GiB")

    def drain(self) -> None:
        settled(self.daemon, 60)

    def durable(self) -> None:
        settled(self.daemon, 60, durable=True)

    def lose_ram(self) -> bool:
        self.daemon.kill(signal.SIGKILL)
        drop_caches()
        print(f"engram: daemon ready again in {self.daemon.start():.2f} s", flush=True)
        settled(self.daemon, 60)
        self.server.flush()
        for n in WARM:
            self.turn(n)
        self.drain()
        return True

    def end(self) -> None:
        super().end()
        self.daemon.end("daemon-peers.log")


class HiCache(System):
    """Its host tier dies with SGLang; its files stay."""

    disk = restarts = True
    ram = False

    def __init__(self, model: str, flags: list[str]) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp())
        super().__init__("hicache", model, [*flags, *HICACHE], SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=str(self.folder))

    def drain(self) -> None:
        """Until no file comes or grows for a second."""
        last, since, end = -1, time.monotonic(), time.monotonic() + 30
        while time.monotonic() < min(since + 1, end):
            with contextlib.suppress(OSError):
                size = sum(1 + (pathlib.Path(at) / name).stat().st_size for at, _, names in os.walk(self.folder) for name in names)
                if size != last:
                    last, since = size, time.monotonic()
            time.sleep(0.2)

    def end(self) -> None:
        super().end()
        shutil.rmtree(self.folder, ignore_errors=True)


class LmCache(System):
    """The multi-process server of LMCache 0.5.6, for SGLang 0.5.23; one missing symbol of torch 2.14 comes from `stubs/`."""

    disk = restarts = True

    def __init__(self, model: str, flags: list[str], folder: pathlib.Path) -> None:
        work = pathlib.Path(tempfile.mkdtemp())
        site, self.disk_folder = work / "site", work / "disk"
        self.disk_folder.mkdir()
        wheels = sorted(str(wheel) for wheel in (folder / "wheels").glob("*.whl"))
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site), *wheels]
        subprocess.run(command, check=True, timeout=120)
        self.port, self.http = free_port(), free_port()
        (work / "mp.yaml").write_text(f"mp_host: 127.0.0.1\nmp_port: {self.port}\n")
        path = [str(folder / "stubs"), str(site)]
        self.env = dict(os.environ, LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1")
        self.env["PYTHONPATH"] = ":".join([self.env.get("PYTHONPATH", ""), *path]).strip(":")
        self.process: subprocess.Popen[bytes] | None = None
        self.start_cache()
        more = ["--enable-lmcache", "--lmcache-config-file", str(work / "mp.yaml")]
        super().__init__("lmcache", model, [*flags, *more], path=path, LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1")

    def start_cache(self) -> None:
        adapter = f'{{"type":"fs_native","base_path":"{self.disk_folder}","use_odirect":true,"num_workers":8}}'
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(self.http),
                   "--l1-size-gb", "24", "--l1-init-size-gb", "24", "--eviction-policy", "LRU", "--chunk-size", "256",
                   "--separate-object-groups", "--l2-adapter", adapter]  # fmt: skip
        with open(OUT / "lmcache.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env, start_new_session=True)
        started(self.process)
        end = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.http}/healthcheck", timeout=5).read()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < end, "LMCache's server is not up: " + (OUT / "lmcache.log").read_text()[-1500:]
                time.sleep(0.5)

    def drain(self) -> None:
        """Until no file comes or grows for a second."""
        HiCache.drain(self)  # type: ignore[arg-type]

    @property
    def folder(self) -> pathlib.Path:
        return self.disk_folder

    def lose_ram(self) -> bool:
        """Both die: SGLang does not find another server of LMCache by itself."""
        self.end()
        drop_caches()
        self.start_cache()
        print(f"lmcache: both up again in {self.server.start():.0f} s", flush=True)
        self.compile()
        return True

    def end(self) -> None:
        super().end()
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
